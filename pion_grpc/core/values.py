"""What the core is asked and what it answers: frozen values, checked where they are made.

The transports turn their messages into these, and these into their answers. Every limit of a request
is checked here, before anything is allocated for it.
"""

import enum
import unicodedata
from dataclasses import dataclass, field
from typing import NamedTuple

from pion_grpc.errors import InvalidRequest
from pion_wire import limits
from pion_wire.blocks import RAW_FIDELITY
from pion_wire.layout import DType, Layout, PartInfo, Side

LAYER_MAX = (1 << 32) - 1
BLOCK_TOKENS_MAX = 8_192
"""Tokens in one block of a caller's table."""
TABLE_HASHES_MAX = 1 << 20
"""Hashes in a caller's table, and probes of one question. A transport may allow fewer."""
RESTORED_TOKENS_MAX = 100_000_000
"""Tokens that one Lookup may credit to the receipt."""
FIDELITIES_MAX = 16
"""Fidelities that one Match may accept."""


class State(enum.Enum):
    """Where a visible prefix stands."""

    REGISTERED = "registered"
    LIVE = "live"
    SEALED = "sealed"


class Durability(enum.Enum):
    """How much an acknowledgement promises: survival of the process, or of a power cut."""

    PROCESS = "process"
    DISK = "disk"


class MissReason(enum.Enum):
    """Why less was served than was asked, or nothing."""

    NONE = ""
    NOT_STORED = "not_stored"
    NO_ROWS = "no_rows"
    TOKENS_DIFFER = "tokens_differ"
    MODEL_DIFFERS = "model_differs"
    LAYOUT_DIFFERS = "layout_differs"
    TOO_SHORT = "too_short"
    PART_MISSING = "part_missing"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """What is known of a prefix."""

    namespace: str
    state: State
    model_id: str
    layout: Layout
    token_count: int
    base: int
    parent: str
    depth: int
    generation: int
    stored_bytes: int
    fidelity: str
    created_unix_ms: int
    durability: Durability
    parts: tuple[PartInfo, ...] = ()
    prefill_ms: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes that all rows have."""
        return self.token_count * self.layout.row_bytes


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A caller's hashes over blocks of a prefix: u64 LE each, in token order."""

    block_tokens: int
    hashes: bytes

    def __post_init__(self) -> None:
        check_number("table.block_tokens", self.block_tokens, BLOCK_TOKENS_MAX, least=1)
        check_hashes("table.hashes", self.hashes)


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """One name, and what the caller expects under it."""

    namespace: str
    model_id: str = ""
    token_ids: bytes = b""
    layout: Layout | None = None
    restored_tokens: int | None = None
    """For the receipt: tokens that the caller restored by other means, credited with the hit."""
    restored_prefill_ms: float | None = None
    """For the receipt: their measured prefill time."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        check_token_ids(self.token_ids)
        check_number("restored_tokens", self.restored_tokens or 0, RESTORED_TOKENS_MAX)
        check_prefill(self.restored_prefill_ms or 0.0)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What was found under one name."""

    hit: bool
    reason: MissReason
    prefix: PrefixInfo | None = None
    first_difference: int = 0
    lease_id: bytes = b""
    shortened_by: str = ""
    """The kind of part that is not there, with PART_MISSING."""


@dataclass(frozen=True, slots=True)
class MatchQuery:
    """A token sequence whose longest stored prefix is wanted."""

    model_id: str
    token_ids: bytes
    fidelities: tuple[str, ...] = (RAW_FIDELITY,)
    min_tokens: int = 0
    lease_ms: int = limits.LEASE_MS_DEFAULT
    part_kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_model_id(self.model_id)
        check_token_ids(self.token_ids)
        if not self.token_ids:
            raise InvalidRequest("token_ids", "required")
        if len(self.fidelities) > FIDELITIES_MAX:
            raise InvalidRequest("fidelities", f"more than {FIDELITIES_MAX}", limit=FIDELITIES_MAX)
        check_lease(self.lease_ms)
        _check_kinds(self.part_kinds)


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest stored prefix of a token sequence."""

    hit: bool
    reason: MissReason
    prefix: PrefixInfo | None
    requested_tokens: int
    matched_tokens: int
    served_tokens: int
    shortened_by: str = ""
    lease_id: bytes = b""
    longest: str = ""
    """The prefix with the most leading tokens in common, whatever parts it has."""
    longest_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """What a Store declares before its first row."""

    namespace: str
    model_id: str
    token_ids: bytes
    layout: Layout
    parent: str = ""
    base: int = 0
    replace: bool = False
    durability: Durability = Durability.PROCESS
    prefill_ms: float = 0.0
    table: BlockTable | None = None
    parts: tuple[PartInfo, ...] = ()
    parent_generation: int = 0
    """Which the parent must have; 0: any."""

    def __post_init__(self) -> None:
        if self.namespace:
            check_namespace(self.namespace)
        check_model_id(self.model_id)
        check_token_ids(self.token_ids)
        if not self.token_ids:
            raise InvalidRequest("token_ids", "required: a prefix has at least one token")
        if not self.layout.tensors and not self.parts:
            raise InvalidRequest("layout", "required unless there are parts")
        if bool(self.parent) != bool(self.base):
            raise InvalidRequest("base", "a parent and a base above 0 belong together")
        if self.parent_generation and not self.parent:
            raise InvalidRequest("parent_generation", "there is no parent")
        if self.parent:
            check_namespace(self.parent, "parent_namespace")
        check_number("base", self.base, self.token_count)
        check_prefill(self.prefill_ms)
        _check_parts(self.parts, self.token_count)

    @property
    def token_count(self) -> int:
        """Tokens of the whole chain."""
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class Stored:
    """The acknowledgement of a Store."""

    namespace: str
    already_stored: bool
    generation: int
    token_count: int
    stored_bytes: int
    durability: Durability
    base: int


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `begin` to `end`, counted from the start of the chain; `end` 0 means up to the end."""

    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where to go on in a stream of rows and parts."""

    tensor_index: int = 0
    array_index: int = 0
    row: int = 0
    part: int = 0
    """Counted from 1; 0 means in the rows."""
    part_offset: int = 0


@dataclass(frozen=True, slots=True)
class FetchQuery:
    """Rows of a prefix, named or leased."""

    namespace: str = ""
    lease_id: bytes = b""
    generation: int = 0
    rows: RowRange = RowRange()
    slots: frozenset[int] = frozenset()
    """Empty means all."""
    part_kinds: tuple[str, ...] = ()
    """What must be there at the end of the rows, and is handed out after them."""
    resume: Position = field(default_factory=Position)
    codecs: frozenset[str] | None = None
    """Codecs that the reader decodes itself; None means any. Rows in others come as float32."""
    raw_types: frozenset[DType] = frozenset(DType)
    """Types of raw values that it takes as they are; others come as float32, which holds them all."""
    sides: frozenset[Side] = frozenset(Side)
    counted: bool = True
    """Whether what is handed out spares a prefill."""

    def __post_init__(self) -> None:
        if bool(self.namespace) == bool(self.lease_id):
            raise InvalidRequest("namespace", "give either a namespace or a lease")
        if self.namespace:
            check_namespace(self.namespace)
        if len(self.lease_id) > 16:
            raise InvalidRequest("lease_id", "is not a lease")
        begin, end = self.rows.begin, self.rows.end
        if end and begin > end:
            raise InvalidRequest("rows", f"they begin at {begin} and end at {end}, before that")
        _check_kinds(self.part_kinds)


class ExportedFile(NamedTuple):
    """A segment, for a client on this host that reads it itself."""

    file_name: str
    """As the catalogue knows it, relative to the data directory."""
    device: int
    inode: int
    size_bytes: int
    data_offset_bytes: int


@dataclass(frozen=True, slots=True)
class ExportExtent:
    """Rows of one segment, for a client that reads it itself."""

    file: ExportedFile
    file_row: int
    row_count: int
    first_row: int


@dataclass(frozen=True, slots=True)
class Export:
    """The files of a prefix."""

    prefix: PrefixInfo
    rows: RowRange
    extents: tuple[ExportExtent, ...]
    token_ids: bytes
    lease_id: bytes
    shortened_by: str = ""
    """The kind of part that cut the rows; empty if none did."""


@dataclass(frozen=True, slots=True)
class WriteRowsHeader:
    """Rows that will be written into one tensor at a row."""

    namespace: str
    slot: int
    side: Side
    first_row: int
    row_count: int
    durability: Durability = Durability.PROCESS

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if self.row_count < 1:
            raise InvalidRequest("row_count", "at least one row")
        if not 0 <= self.first_row <= limits.TOKENS_MAX - self.row_count:
            raise InvalidRequest(
                "first_row",
                f"rows {self.first_row} to {self.first_row + self.row_count} are outside "
                f"0..{limits.TOKENS_MAX}",
                limit=limits.TOKENS_MAX,
            )


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """The acknowledgement of written rows."""

    row_count: int
    generation: int
    durability: Durability


def check_namespace(name: str, field: str = "namespace") -> None:
    """Raises InvalidRequest unless `name` is 1 to 200 bytes of UTF-8 without control characters."""
    check_text(field, name, 1, limits.NAMESPACE_BYTES_MAX)
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise InvalidRequest(field, "holds a control character")


def check_layer(layer: int) -> None:
    """Raises InvalidRequest unless `layer` is a u32."""
    check_number("layer", layer, LAYER_MAX)


def check_model_id(model_id: str) -> None:
    """Raises InvalidRequest unless `model_id` is 1 to 128 bytes."""
    check_text("model_id", model_id, 1, limits.MODEL_ID_BYTES_MAX)


def check_token_ids(token_ids: bytes) -> None:
    """Raises InvalidRequest unless `token_ids` are at most a million u32."""
    if len(token_ids) % 4:
        raise InvalidRequest("token_ids", f"{len(token_ids)} bytes are not a sequence of u32")
    if len(token_ids) > 4 * limits.TOKENS_MAX:
        raise InvalidRequest(
            "token_ids",
            f"{len(token_ids) // 4} tokens exceed {limits.TOKENS_MAX}",
            limit=limits.TOKENS_MAX,
        )


def check_hashes(field: str, hashes: bytes) -> None:
    """Raises InvalidRequest unless `hashes` are u64, and no more than a table may have."""
    if len(hashes) % 8 or len(hashes) > 8 * TABLE_HASHES_MAX:
        raise InvalidRequest(
            field, f"{len(hashes)} bytes are not at most {TABLE_HASHES_MAX} hashes of 8 bytes"
        )


def check_lease(lease_ms: int) -> None:
    """Raises InvalidRequest unless a lease may last so long."""
    check_number("lease_ms", lease_ms, limits.LEASE_MS_MAX)


def check_prefill(prefill_ms: float) -> None:
    """Raises InvalidRequest unless it is 0 to a day."""
    check_number("prefill_ms", prefill_ms, limits.PREFILL_MS_MAX)


def check_slots(wanted: frozenset[int], layout: Layout) -> None:
    """Raises InvalidRequest if a slot is wanted that the layout does not have."""
    unknown = wanted - {tensor.slot for tensor in layout.tensors}
    if unknown:
        raise InvalidRequest("slots", f"the prefix has no slot {min(unknown)}")


def check_names(names: list[str]) -> None:
    """Raises InvalidRequest unless there are at most a thousand valid names."""
    if len(names) > limits.NAMES_MAX:
        raise InvalidRequest(
            "namespaces", f"{len(names)} names exceed {limits.NAMES_MAX}", limit=limits.NAMES_MAX
        )
    for name in names:
        check_namespace(name, "namespaces")


def check_text(field: str, text: str, least: int, most: int) -> None:
    """Raises InvalidRequest unless `text` has `least` to `most` bytes of UTF-8."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if not least <= size <= most:
        raise InvalidRequest(field, f"{size} bytes long; {least} to {most} are allowed", limit=most)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest(field, "is not UTF-8")


def check_number(field: str, number: float, most: int, least: int = 0) -> None:
    """Raises InvalidRequest unless it is `least` to `most`."""
    if not least <= number <= most:
        raise InvalidRequest(field, f"{number} is outside {least}..{most}", limit=most)


def _check_parts(parts: tuple[PartInfo, ...], token_count: int) -> None:
    if len(parts) > limits.PARTS_MAX:
        raise InvalidRequest(
            "parts", f"{len(parts)} exceed {limits.PARTS_MAX}", limit=limits.PARTS_MAX
        )
    if len({(part.kind, part.slot, part.boundary_tokens) for part in parts}) != len(parts):
        raise InvalidRequest("parts", "two have the same kind, slot and boundary")
    for index, part in enumerate(parts):
        where = f"parts[{index}]"
        _check_kind(f"{where}.kind", part.kind)
        check_number(f"{where}.slot", part.slot, limits.SLOTS_MAX - 1)
        check_number(f"{where}.boundary_tokens", part.boundary_tokens, token_count, least=1)
        check_number(f"{where}.size_bytes", part.size_bytes, limits.PART_BYTES_MAX)
        check_text(f"{where}.description", part.description, 0, limits.DESCRIPTION_BYTES_MAX)


def _check_kind(field: str, kind: str) -> None:
    """Raises InvalidRequest unless a part can be of this kind."""
    check_text(field, kind, 1, limits.PART_KIND_BYTES_MAX)


def _check_kinds(kinds: tuple[str, ...]) -> None:
    """Raises InvalidRequest unless there can be parts of these kinds."""
    for kind in kinds:
        _check_kind("part_kinds", kind)
