"""The one table from domain errors to gRPC: code, and the rich status that carries the reason.

Whatever leaves a handler passes `problem_of`; what is not a `PionError` is logged there, once, with its
traceback, and leaves as INTERNAL with nothing of it in the message.
"""

import contextlib
from collections.abc import Iterator

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pion_grpc.errors import InvalidRequest, PionError
from pion_wire.layout import LayoutError

DOMAIN = "pion.v1"

CODES = {
    "INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "CHECKSUM": grpc.StatusCode.INVALID_ARGUMENT,
    "ROWS": grpc.StatusCode.OUT_OF_RANGE,
    "LAYOUT": grpc.StatusCode.FAILED_PRECONDITION,
    "GENERATION": grpc.StatusCode.FAILED_PRECONDITION,
    "OTHER_CONTENT": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_STORED": grpc.StatusCode.NOT_FOUND,
    "EVICTED": grpc.StatusCode.NOT_FOUND,
    "COLD": grpc.StatusCode.FAILED_PRECONDITION,
    "MISSING": grpc.StatusCode.NOT_FOUND,
    "BUDGET": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUOTA": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DISK_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "TOO_MANY_STREAMS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NO_BACKEND": grpc.StatusCode.UNIMPLEMENTED,
    "STARTING": grpc.StatusCode.UNAVAILABLE,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "CORRUPT": grpc.StatusCode.DATA_LOSS,
    "STALLED": grpc.StatusCode.CANCELLED,
    "NOT_AUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "CONFLICT": grpc.StatusCode.ABORTED,
}

_log = structlog.get_logger()


def error_status(error: PionError) -> status_pb2.Status:
    """Returns the rich status of a domain error."""
    status = status_pb2.Status(code=CODES[error.reason].value[0], message=str(error))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status.details.append(_pack(info))
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)
        )
        status.details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        status.details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def problem_of(error: Exception, method: str) -> PionError:
    """Returns the domain error to tell the peer; any other exception is logged, here and only here."""
    if isinstance(error, PionError):
        return error
    if isinstance(error, LayoutError):
        return InvalidRequest(f"layout.{error.field}", error.message)
    _log.exception("internal error", method=method)
    return PionError("internal error; the server's log has the details")


@contextlib.contextmanager
def translated(context: grpc.ServicerContext, method: str) -> Iterator[None]:
    """Ends the call with the status of what is raised inside."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, PionError | LayoutError) and not context.is_active():
            raise  # the peer is gone: nobody to tell, and what was raised follows from that
        problem = problem_of(error, method)
    else:
        return
    context.abort_with_status(rpc_status.to_status(error_status(problem)))


def _pack(
    message: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
