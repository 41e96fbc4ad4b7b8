"""The certificates of a private network: an authority, and what it signs.

Knows X.509; nothing of who uses what. A node's certificate is a server's and a client's, for it is both,
and says `node.<mesh>` beside its addresses: that is what proxies ask of a server. A client's is a
client's only, so that whoever has one cannot pass for a node.

The one decision: making them again changes nothing that is still good. What has a month left and the
right names is kept, so that the command can be run whenever a node joins, and every week.
"""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pion_grpc.cli.failure import CommandFailed
from pion_grpc.cli.mesh.nodes import Mesh, Node
from pion_grpc.cli.mesh.writing import write

AUTHORITY_DAYS = 3_650
RENEW_DAYS = 30
"""What is valid for less is made anew."""
_SKEW = datetime.timedelta(hours=1)
"""Clocks differ: certificates are valid a little before they are made."""

Names: TypeAlias = list[x509.GeneralName]


class Authority(NamedTuple):
    """Who signs."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)


class Signed(NamedTuple):
    """What has been signed, or found still good."""

    directory: Path
    name: str
    is_new: bool
    until: datetime.datetime


def authority_in(directory: Path, mesh: Mesh) -> Authority:
    """Returns the authority of a directory, made if there is none.

    Raises:
        CommandFailed: half of it is there, or it is not one.
    """
    cert, key = directory / "ca.pem", directory / "ca.key"
    if not cert.exists() and not key.exists():
        return _new_authority(directory, mesh)
    for half in (cert, key):
        if not half.exists():
            raise CommandFailed(
                f"{directory} holds no authority: there is no {half.name}", reason="INVALID"
            )
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        authority = Authority(x509.load_pem_x509_certificate(cert.read_bytes()), _of_curve(loaded))
        if authority.certificate.public_key() != authority.key.public_key():
            raise ValueError("ca.key is another certificate's")
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
        raise CommandFailed(
            f"{directory} holds no authority: {problem}", reason="INVALID"
        ) from error
    except (ValueError, TypeError) as error:
        raise CommandFailed(f"{directory} holds no authority: {error}", reason="INVALID") from error
    return authority


def node_names(mesh: Mesh, node: Node) -> Names:
    """What a node's certificate says it is."""
    names = dict.fromkeys((mesh.server_name, node.name, "localhost"))
    addresses = dict.fromkeys((node.address, node.peer_address, "127.0.0.1", "::1"))
    return [
        *map(x509.DNSName, names),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
    ]


def sign(
    authority: Authority,
    directory: Path,
    name: str,
    names: Names,
    *,
    stem: str,
    days: int,
    renew: bool = False,
) -> Signed:
    """Puts `ca.pem`, `<stem>.pem` and `<stem>.key` into a directory, unless what is there is still good.

    Args:
        authority: who signs.
        directory: where to.
        name: whose it is, for people.
        names: what a server is reached by; none: a client's certificate, no server's.
        stem: of the files.
        days: how long it is valid.
        renew: whether also what is still good is made anew.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(directory / "ca.pem", authority.pem)
    kept = None if renew else _still_good(authority, directory / stem, names)
    if kept is not None:
        return Signed(directory, name, False, kept.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(authority, name, names, key, days)
    write(directory / f"{stem}.key", _pem_of(key))
    write(directory / f"{stem}.pem", certificate.public_bytes(serialization.Encoding.PEM))
    return Signed(directory, name, True, certificate.not_valid_after_utc)


def _new_authority(directory: Path, mesh: Mesh) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"{mesh.name} mesh authority")
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = Authority(certificate, key)
    write(directory / "ca.key", _pem_of(key))
    write(directory / "ca.pem", authority.pem)
    return authority


def _certificate(
    authority: Authority, name: str, names: Names, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = authority.certificate
    builder = (
        x509.CertificateBuilder(
            issuer.subject, _named(name), key.public_key(), x509.random_serial_number()
        )
        .not_valid_before(now - _SKEW)
        .not_valid_after(
            min(now + datetime.timedelta(days=days), authority.certificate.not_valid_after_utc)
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
    )
    if names:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def _still_good(authority: Authority, stem: Path, names: Names) -> x509.Certificate | None:
    try:
        certificate = x509.load_pem_x509_certificate(
            stem.with_name(f"{stem.name}.pem").read_bytes()
        )
        certificate.verify_directly_issued_by(authority.certificate)
        key = stem.with_name(f"{stem.name}.key").read_bytes()
        if serialization.load_pem_private_key(key, None).public_key() != certificate.public_key():
            return None  # whoever wrote them was interrupted
        alternative = x509.SubjectAlternativeName
        found = certificate.extensions.get_extension_for_class(alternative).value
    except x509.ExtensionNotFound:
        found = None
    except Exception:  # none there, or no certificate, or another authority's: all the same
        return None
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    right = list(found or ()) == names and left > datetime.timedelta(days=RENEW_DAYS)
    return certificate if right else None


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _of_curve(key: object) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("ca.key is no key on an elliptic curve")
    return key
