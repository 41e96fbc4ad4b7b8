"""Every error of the domain, one small class each.

An error is raised where it is detected and translated once per transport by a table (`rpc/errors.py`,
`resp/errors.py`); it is never logged *and* raised. `reason` is the name in `error_reason.proto`,
`metadata` is for programs, the message for people: what is wrong and, where it helps, what to do.
"""

from pathlib import Path
from typing import ClassVar


class PionError(Exception):
    """Base of what crosses the wire."""

    reason: ClassVar[str] = "INTERNAL"
    retry_after_ms: ClassVar[int] = 0
    """How long to wait before trying again; 0 where waiting does not help."""

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(PionError):
    """A field is missing, malformed, too large or contradicts another."""

    reason = "INVALID"

    def __init__(self, field: str, message: str, **metadata: object) -> None:
        super().__init__(f"{field}: {message}", field=field, **metadata)
        self.field = field


class ChecksumMismatch(PionError):
    """The bytes received are not those that were sent."""

    reason = "CHECKSUM"


class RowsOutOfRange(PionError):
    """Rows were asked for that the prefix does not have."""

    reason = "ROWS"


class LayoutDiffers(PionError):
    """The stored layout differs from the request's."""

    reason = "LAYOUT"


class GenerationDiffers(PionError):
    """The rows have changed since the generation named in the request."""

    reason = "GENERATION"


class OtherContent(PionError):
    """The namespace holds other tokens, or belongs to another model."""

    reason = "OTHER_CONTENT"


class NotStored(PionError):
    """A namespace that the request needs is not stored."""

    reason = "NOT_STORED"


class Evicted(PionError):
    """It was stored, but was evicted before the call could be answered."""

    reason = "EVICTED"


class Conflict(PionError):
    """Another Store of the same namespace was published first."""

    reason = "CONFLICT"


class Cold(PionError):
    """The attend entry is known but not resident."""

    reason = "COLD"


class Missing(PionError):
    """The attend entry is unknown."""

    reason = "MISSING"


class OverBudget(PionError):
    """It would not fit into the server's budget."""

    reason = "BUDGET"
    retry_after_ms = 1_000


class OverQuota(PionError):
    """It would not fit into the tenant's quota."""

    reason = "QUOTA"
    retry_after_ms = 1_000


class DiskFull(PionError):
    """The file system is full."""

    reason = "DISK_FULL"
    retry_after_ms = 10_000


class Busy(PionError):
    """Another process holds the catalogue, for longer than anything of ours does."""

    retry_after_ms = 1_000


class Unreadable(PionError):
    """A stored file cannot be opened. It may be sound, so nothing is removed because of it.

    The message is for whoever asked, a tenant perhaps; `problem` is for the log, and names the file.
    """

    reason = "CORRUPT"

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"a file that holds what is asked for cannot be opened: {why}")
        self.problem = f"{path} cannot be opened: {why}"


class TooManyStreams(PionError):
    """All stream permits are taken."""

    reason = "TOO_MANY_STREAMS"
    retry_after_ms = 200


class TooManyFiles(TooManyStreams):
    """The streams that are running have opened as many files as this process may."""

    retry_after_ms = 1_000


class Stalled(PionError):
    """The peer of a stream sends or takes too little, or nobody waits for the answer any more."""

    reason = "STALLED"


class NoBackend(PionError):
    """This server cannot do that."""

    reason = "NO_BACKEND"


class Corrupt(PionError):
    """A stored page does not match its checksum, or is missing."""

    reason = "CORRUPT"


class NotAuthenticated(PionError):
    """No credentials, or unknown ones."""

    reason = "NOT_AUTHENTICATED"


class NotAllowed(PionError):
    """These credentials may not do that."""

    reason = "NOT_ALLOWED"


class CannotStart(Exception):
    """The server refuses to start; the message says why and what to do. Never crosses the wire."""
