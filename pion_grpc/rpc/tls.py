"""TLS of the gRPC side: certificates that may be replaced while calls run.

Knows files and gRPC's credentials; not who listens where. gRPC asks before every handshake whether there
is something new. The one decision: files that do not fit together (yet) are no reason to stop serving:
the last ones that did stay in use, and the log says so once.
"""

import threading

import grpc
import structlog

from pion_grpc.errors import CannotStart
from pion_wire.certificates import CertificateFiles

_log = structlog.get_logger()


class Certificates:
    """The certificate of a server and, with mutual TLS, the CA of its clients."""

    def __init__(self, files: CertificateFiles) -> None:
        """Reads them.

        Args:
            files: `ca` is the clients': with it nobody comes in without a certificate of theirs.

        Raises:
            CannotStart: they cannot be read, or do not fit together.
        """
        self._files = files
        self._lock = threading.Lock()
        self._stamp = files.stamp()
        try:
            self._first = self._loaded()
        except ValueError as error:
            raise CannotStart(f"--tls-cert: {error}") from error

    def credentials(self) -> grpc.ServerCredentials:
        """Returns what a port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._renewed,  # type: ignore[arg-type]  # None is "no change"; the stubs do not know
            require_client_authentication=self._files.ca is not None,
        )

    def _loaded(self) -> grpc.ServerCertificateConfiguration:
        pem = self._files.load()
        assert pem.cert is not None
        assert pem.key is not None
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns what has been put in the place of the last ones; None: nothing."""
        with self._lock:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                configuration = self._loaded()
            except ValueError as error:
                _log.warning("new certificates are not used", problem=str(error))
                return None
        _log.info("new certificates", cert=str(self._files.cert))
        return configuration
