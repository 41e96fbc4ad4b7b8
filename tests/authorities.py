"""Certificates that tests need, good and bad: an authority of their own, and files it puts them in."""

import datetime
import os
from pathlib import Path

import trustme

from pion_client import Tls

LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
LONG_OVER = datetime.datetime(2020, 2, 1, tzinfo=datetime.UTC)


class Authority:
    """A certificate authority whose files lie in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._trustme = trustme.CA()
        self.ca = directory / "ca.pem"
        self._trustme.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *identities: str, expired: bool = False) -> Tls:
        """Issues a certificate into `<name>.pem` and `<name>.key`, in the place of what is there."""
        times = {"not_before": LONG_AGO, "not_after": LONG_OVER} if expired else {}
        leaf = self._trustme.issue_cert(*(identities or (name,)), **times)
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        for path, data in ((key, leaf.private_key_pem.bytes()), (cert, chain)):
            put(path, data)
        return Tls(self.ca, cert, key)

    def server(self, *, expired: bool = False) -> Tls:
        """Issues one for a server on loopback."""
        return self.issue("server", "127.0.0.1", "localhost", expired=expired)


def put(path: Path, data: bytes) -> None:
    """Puts a file in the place of another, as those who renew certificates do."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    os.replace(new, path)


def serve_flags(own: Tls, client_ca: Path | None = None) -> list[str]:
    """The flags of a server."""
    flags = ["--tls-cert", str(own.cert), "--tls-key", str(own.key)]
    return [*flags, "--tls-client-ca", str(client_ca)] if client_ca is not None else flags
