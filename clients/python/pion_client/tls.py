"""TLS of a client: whom it trusts, and who it is.

Knows files and gRPC's credentials; nothing of addresses. A certificate that is renewed in its file is
used by the next connection that is made after one has failed; nothing has to be started anew.
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
        ca: the certificates that a server's must come from; None: those that gRPC brings, for a server
            with a public certificate.
        cert: this client's own certificate, where servers ask for one (mutual TLS).
        key: of that certificate.
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
        """Where they lie."""
        paths = (self.ca, self.cert, self.key)
        return CertificateFiles(
            *(None if path is None else Path(path).expanduser() for path in paths)
        )

    def credentials(self) -> "grpc.ChannelCredentials":
        """Returns what gRPC makes connections with.

        Raises:
            ValueError: a file cannot be read, or they do not fit together.
        """
        import grpc  # not before it is needed: caches within a process want no server

        pem = self.files.load()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
