"""TLS on the client's side: whom it trusts, and who it is.

Knows files and gRPC's credentials; nothing of addresses. When the file of a certificate is replaced, the
next connection that is made after one has failed uses it; nothing has to be restarted.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pion_wire.certificates import CertificateFiles

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """An encrypted connection. All files are PEM.

    Args:
        ca: certificates of the authorities to trust; None: those that come with gRPC, for a server with
            a public certificate.
        cert: this client's own certificate, if servers ask for one (mutual TLS).
        key: the key of that certificate.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Returns what PION_TLS_CA, PION_TLS_CERT and PION_TLS_KEY name; None if none is set."""
        named = {
            name: environment.get(f"PION_TLS_{name.upper()}") or None
            for name in ("ca", "cert", "key")
        }
        return cls(**named) if any(named.values()) else None

    @property
    def files(self) -> CertificateFiles:
        """The paths of the files."""
        paths = (self.ca, self.cert, self.key)
        return CertificateFiles(
            *(None if path is None else Path(path).expanduser() for path in paths)
        )

    def credentials(self) -> "grpc.ChannelCredentials":
        """Returns the credentials with which gRPC connects.

        Raises:
            ValueError: a file cannot be read, or certificate and key do not belong together.
        """
        import grpc  # not before it is needed: caches within a process want no server

        pem = self.files.load()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
