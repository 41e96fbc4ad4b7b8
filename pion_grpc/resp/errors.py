"""The one table from domain errors to the error replies of this wire.

A reply begins with a code word that clients branch on; what follows is for people. What is not a
`PionError` is logged here, once, with its traceback, and leaves without a word of it.
"""

import structlog

from pion_grpc.core.key_values import KeyspaceError, WrongKind
from pion_grpc.errors import PionError
from pion_grpc.resp.reply import Error, ReplyError
from pion_wire.layout import LayoutError

CODE_WORDS = {
    "BUDGET": "OOM",
    "QUOTA": "OOM",
    "DISK_FULL": "OOM",
    "TOO_MANY_STREAMS": "OOM",
    "COLD": "COLDMISS",
}
"""Of the reasons that have one of their own; every other is `ERR`. Who may do what is refused before a
command runs, in `dispatch`."""

_log = structlog.get_logger()


def refusal(error: Exception, command: str) -> Error:
    """Returns the reply to a command that raised."""
    if isinstance(error, ReplyError):
        return Error(str(error))
    if isinstance(error, PionError):
        return Error(f"{CODE_WORDS.get(error.reason, 'ERR')} {error}")
    if isinstance(error, WrongKind):
        return Error(f"WRONGTYPE {error}")
    if isinstance(error, KeyspaceError | LayoutError):
        return Error(f"ERR {error}")
    if isinstance(error, MemoryError):
        return Error("OOM not enough memory for this command")
    _log.error("internal error", command=command, exc_info=error)
    return Error("ERR internal error; the server's log has the details")
