"""What can go wrong, as the caller sees it.

One class per kind of failure that a caller may want to treat on its own; `reason` is the word that
crossed the wire. Knows the rich errors of gRPC, and nothing of what was asked.

The one decision: a status with the server's `ErrorInfo` comes from the server, and the table says what
it means. A status without one was made by the transport or a proxy on the way (`from_transport`). It
says nothing about the request, so whatever is safe to ask again is asked again.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

if TYPE_CHECKING:  # who has a call to ask has imported it; who needs no server need not load it
    import grpc

DOMAIN = "pion.v1"


class PionError(Exception):
    """Any error that this client raises about a call; the message is for people."""

    reason_default = "ERROR"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        from_transport: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.reason_default
        """One word in capitals, such as `OTHER_CONTENT`; see `pion.v1.ErrorReason`."""
        self.metadata = dict(metadata or {})
        """What the server says about it, such as `namespace` or `needed_bytes`."""
        self.retry_after_s = retry_after_s
        """How long the server asks to wait, if waiting helps."""
        self.from_transport = from_transport
        """Whether it came from the transport or a proxy, not from the server."""


class InvalidRequest(PionError, ValueError):
    """A field is missing, malformed, too large or contradicts another."""

    reason_default = "INVALID"

    @property
    def field(self) -> str:
        """The field at fault."""
        return self.metadata.get("field", "")


class ChecksumMismatch(PionError):
    """Bytes arrived with a different CRC-32C than they were sent with."""

    reason_default = "CHECKSUM"


class RowsOutOfRange(PionError):
    """Rows were asked for that the prefix does not have."""

    reason_default = "ROWS"


class LayoutDiffers(PionError):
    """The stored layout differs from the one given."""

    reason_default = "LAYOUT"


class GenerationDiffers(PionError):
    """The rows have changed since the generation given."""

    reason_default = "GENERATION"


class OtherContent(PionError):
    """The namespace holds other token ids, or belongs to another model."""

    reason_default = "OTHER_CONTENT"


class NotStored(PionError):
    """What the request needs is not stored, or was evicted meanwhile (`EVICTED`)."""

    reason_default = "NOT_STORED"


class Cold(PionError):
    """The attend entry is known, but not resident."""

    reason_default = "COLD"


class OverBudget(PionError):
    """It does not fit: `BUDGET`, `QUOTA` or `DISK_FULL`."""

    reason_default = "BUDGET"


class TooManyStreams(PionError):
    """The server has no stream to spare right now."""

    reason_default = "TOO_MANY_STREAMS"


class NotSupported(PionError):
    """This server, or this client, cannot do that."""

    reason_default = "NO_BACKEND"


class Unavailable(PionError):
    """The server cannot be reached, is starting or is shutting down."""

    reason_default = "UNAVAILABLE"


class DataCorrupt(PionError):
    """Stored bytes do not match their checksum; the server has removed the prefix."""

    reason_default = "CORRUPT"


class Stalled(PionError):
    """The server ended a stream because this side did nothing for too long."""

    reason_default = "STALLED"


class NotAuthenticated(PionError):
    """No credentials, or unknown ones."""

    reason_default = "NOT_AUTHENTICATED"


class NotAllowed(PionError):
    """These credentials may not do that."""

    reason_default = "NOT_ALLOWED"


class ServerFault(PionError):
    """An error inside the server, whose log has the details."""

    reason_default = "INTERNAL"


class Conflict(PionError):
    """Another Store of the same namespace was published first."""

    reason_default = "CONFLICT"


class DeadlineExceeded(PionError):
    """No answer came in time, or nothing arrived on a stream for too long."""

    reason_default = "DEADLINE_EXCEEDED"


class BadAnswer(PionError):
    """The answer contradicts itself or the request; nothing of it was used."""

    reason_default = "BAD_ANSWER"


class ClientClosed(PionError):
    """The client has been closed."""

    reason_default = "CLOSED"


class Forked(PionError):
    """The process was forked while gRPC was working, or after importing MLX: the child cannot use it.

    Start workers with `spawn` or `forkserver`, or fork before the first call and the import of MLX.
    """

    reason_default = "FORKED"


BY_REASON: dict[str, type[PionError]] = {
    "INVALID": InvalidRequest,
    "CHECKSUM": ChecksumMismatch,
    "ROWS": RowsOutOfRange,
    "LAYOUT": LayoutDiffers,
    "GENERATION": GenerationDiffers,
    "OTHER_CONTENT": OtherContent,
    "NOT_STORED": NotStored,
    "EVICTED": NotStored,
    "COLD": Cold,
    "MISSING": NotStored,
    "BUDGET": OverBudget,
    "QUOTA": OverBudget,
    "DISK_FULL": OverBudget,
    "TOO_MANY_STREAMS": TooManyStreams,
    "NO_BACKEND": NotSupported,
    "STARTING": Unavailable,
    "DRAINING": Unavailable,
    "CORRUPT": DataCorrupt,
    "STALLED": Stalled,
    "NOT_AUTHENTICATED": NotAuthenticated,
    "NOT_ALLOWED": NotAllowed,
    "INTERNAL": ServerFault,
    "CONFLICT": Conflict,
}

# Statuses without an ErrorInfo. UNKNOWN is what gRPC makes of a connection whose HTTP/2
# stream was damaged; a proxy whose backend died says INTERNAL.
_BY_CODE: dict[str, type[PionError]] = {
    "UNAVAILABLE": Unavailable,
    "INTERNAL": Unavailable,
    "CANCELLED": Unavailable,
    "UNKNOWN": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNIMPLEMENTED": NotSupported,
    "UNAUTHENTICATED": NotAuthenticated,
    "PERMISSION_DENIED": NotAllowed,
}


def from_rpc_error(error: "grpc.RpcError") -> PionError:
    """Returns the error that the status of an ended call means."""
    call: Any = error  # what gRPC raises is the ended call itself
    code: str = call.code().name
    message = call.details() or code
    info, retry_after_s = _details(call)
    if info is not None:
        kind = BY_REASON.get(info.reason, PionError)
        return kind(
            message, reason=info.reason, metadata=info.metadata, retry_after_s=retry_after_s
        )
    kind = _BY_CODE.get(code, PionError)
    reason = "" if code in _BY_CODE else code
    return kind(f"{code}: {message}", reason=reason, from_transport=True)


def may_ask_again(error: PionError) -> float | None:
    """Returns the seconds to wait before trying the same read again; None: do not try.

    For calls that change nothing. 0.0 leaves the pause to the caller.
    """
    if error.from_transport:
        return 0.0 if isinstance(error, Unavailable) else None
    if isinstance(error, Unavailable | TooManyStreams | Stalled):
        return error.retry_after_s or 0.0
    return None


def _details(call: "grpc.Call") -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):  # trailers that contradict the status are not ours
        return None, None
    info, retry_after_s = None, None
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            unpacked = error_details_pb2.ErrorInfo()
            detail.Unpack(unpacked)
            info = unpacked if unpacked.domain == DOMAIN else info
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1_000
    return info, retry_after_s
