"""Certificate files of either end of a connection: read, held against each other, and seen to change.

Knows files and PEM; neither connections nor who trusts whom. The one decision: files that are replaced
one after the other do not fit together for a moment, and gRPC takes anything, only to refuse every
connection afterwards. So they are loaded as a whole, and what does not fit is not handed on.
"""

import os
import ssl
from pathlib import Path
from typing import NamedTuple


class Pem(NamedTuple):
    """What the files hold."""

    ca: bytes | None
    """Who is trusted; None: whom the system trusts, or nobody is asked."""
    cert: bytes | None
    """Who we are: the certificate, and what is between it and the CA."""
    key: bytes | None


class CertificateFiles(NamedTuple):
    """Where certificates lie; each may be missing, but a certificate has a key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def load(self) -> Pem:
        """Reads all of them.

        Raises:
            ValueError: one cannot be read, is no PEM, or the key is another certificate's.
        """
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key go together: only one was given")
        pem = Pem(*(None if path is None else _read(path) for path in self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if pem.ca is not None:
            try:
                context.load_verify_locations(cadata=pem.ca.decode("ascii", "replace"))
            except (OSError, ValueError) as error:
                raise ValueError(f"{self.ca} holds no certificates: {error}") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
            except (OSError, ValueError) as error:  # SSLError is an OSError
                raise ValueError(
                    f"{self.cert} is not a certificate for the key {self.key}: {error}"
                ) from error
        return pem

    def stamp(self) -> tuple[object, ...]:
        """Returns what differs once a file has been replaced or rewritten."""
        return tuple(_stamp(path) for path in self)


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path) if path is not None else None
    except OSError:
        return None
    return status and (status.st_ino, status.st_size, status.st_mtime_ns)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted: nobody is there to type its password")
