"""What goes into the client and comes out of it: frozen values, without protobuf.

Arrays have the shape (kv_heads, tokens, head_dim). Token ids are kept packed (u32, little-endian) and
unpacked on request: as a list of Python integers, a long prompt takes ten times the room.
"""

import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np

from pion_wire import limits
from pion_wire.blocks import unpack_token_ids
from pion_wire.layout import DType, Layout, PartInfo, Side, TensorLayout

Array: TypeAlias = Any
"""A NumPy or an MLX array of f32, f16 or bf16 (in NumPy: `ml_dtypes.bfloat16`)."""
Codecs: TypeAlias = str | Mapping[tuple[int, Side | str], str]
"""A codec for every tensor, or one for each (slot, side) that is not to be raw."""
TokenIds: TypeAlias = bytes | Sequence[int] | np.ndarray
"""Token ids; `bytes` are already packed as u32, little-endian."""
DurabilityName: TypeAlias = Literal["process", "disk"]
"""What an acknowledgement promises: to survive the server's death, or a power cut as well."""
Progress: TypeAlias = Callable[[int, int], None]
"""Is called with (bytes done, bytes in all)."""


class MissReason(enum.StrEnum):
    """Why less was served than was asked, or nothing. A miss is an answer, not an error."""

    NONE = ""
    NOT_STORED = "not_stored"
    NO_ROWS = "no_rows"
    TOKENS_DIFFER = "tokens_differ"
    MODEL_DIFFERS = "model_differs"
    LAYOUT_DIFFERS = "layout_differs"
    TOO_SHORT = "too_short"
    PART_MISSING = "part_missing"
    PARTIAL = "partial"


class PrefixState(enum.StrEnum):
    """What state a prefix is in: declared without rows, growing, or complete."""

    REGISTERED = "registered"
    LIVE = "live"
    SEALED = "sealed"


class BlockTable(NamedTuple):
    """A caller's own table of hashes over the blocks of a prefix; the server only compares them."""

    block_tokens: int
    """Tokens per block, 1 to 8,192."""
    hashes: "Sequence[int] | np.ndarray"
    """One u64 per block, in token order; at most 400,000."""

    def packed(self) -> bytes:
        """Returns the hashes as they are sent: u64, little-endian.

        Raises:
            ValueError: too many, or one that does not fit.
        """
        return pack_hashes(self.hashes)


@dataclass(frozen=True, slots=True)
class Part:
    """An opaque piece that belongs to a prefix, such as the recurrent state of a slot."""

    kind: str
    """What it is: 1 to 64 bytes such as "state", "ring", "drafter", "logits"."""
    slot: int
    boundary_tokens: int
    """The token boundary at which it is exact."""
    data: bytes | bytearray | memoryview
    description: str = ""
    """Cache class, types, shapes; at most 4,096 bytes of UTF-8."""
    more: tuple[memoryview, ...] = ()
    """What follows `data`, if the bytes to be stored are not in one place."""

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """All its bytes, in order."""
        views = (memoryview(buffer) for buffer in (self.data, *self.more))
        return tuple(view.cast("B") for view in views if view.nbytes)

    @property
    def info(self) -> PartInfo:
        """Everything about it except its bytes."""
        size = sum(buffer.nbytes for buffer in self.buffers)
        return PartInfo(self.kind, self.slot, self.boundary_tokens, size, self.description)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Rows of one side as a codec stores them: neither encoded when stored nor decoded when fetched.

    An array with a row per head is (kv_heads, tokens, items), any other (tokens, items).
    `TensorLayout.arrays` and the package `pion_wire.codecs` say which arrays a codec has.
    """

    codec: str
    """Its name with parameters, such as "mlx_affine(4,64,bf16)"."""
    heads: int
    head_dim: int
    arrays: tuple[Array, ...]
    """NumPy or MLX arrays; those of an affine codec are codes (u32), scales and biases."""
    dtype: DType = DType.F32
    """Type of the values that were encoded."""

    @classmethod
    def quantized(
        cls, codes: Array, scales: Array, biases: Array, *, group: int, bits: int
    ) -> Self:
        """Returns rows as `mx.quantize` makes them and `QuantizedKVCache` keeps them.

        Args:
            codes, scales, biases: each (kv_heads, tokens, items).
            group: how many values share a scale.
            bits: per value.

        Raises:
            ValueError: the scales have a type that cannot be stored.
        """
        name = str(scales.dtype).rpartition(".")[2]
        if name not in _SCALE_TYPES:
            raise ValueError(f"scales of {name} are not stored; {', '.join(_SCALE_TYPES)} are")
        dtype = _SCALE_TYPES[name]
        return cls(
            f"mlx_affine({bits},{group},{dtype.value.lower()})",
            int(codes.shape[0]),
            int(codes.shape[-1]) * 32 // bits,
            (codes, scales, biases),
            dtype,
        )

    @property
    def token_count(self) -> int:
        """Number of rows."""
        return int(self.arrays[0].shape[-2])

    def tensor(self, slot: int, side: Side) -> TensorLayout:
        """Returns the layout of these rows in a slot and side.

        Raises:
            LayoutError: no layout has such rows.
        """
        return TensorLayout(slot, side, self.heads, self.head_dim, self.dtype, self.codec)


_SCALE_TYPES = {"float16": DType.F16, "bfloat16": DType.BF16, "float32": DType.F32}


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """What the server knows of a visible prefix."""

    namespace: str
    state: PrefixState
    model: str
    layout: Layout
    token_count: int
    """Rows of the whole chain."""
    base: int
    """Rows that come from the parent."""
    parent: str
    """Its name; empty if there is none, or if it has been dropped."""
    generation: int
    stored_bytes: int
    """Bytes on disk, without those of its parents."""
    row_bytes: int
    """Bytes that a fetch of all rows streams."""
    fidelity: str
    """`raw`, or the codecs of a lossy prefix."""
    created_unix_ms: int
    durability: DurabilityName
    parts: tuple[PartInfo, ...]
    prefill_ms: float
    """The measured prefill time that the storing client reported; 0 if none is known."""
    depth: int
    """Number of parents above it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The acknowledgement of a store."""

    namespace: str
    """The name, even if the server derived it."""
    already_stored: bool
    """Nothing was written: the same model, tokens and layout were there, with parts described alike.

    Bytes are not compared, neither of rows nor of parts.
    """
    generation: int
    token_count: int
    """Rows of the whole chain."""
    stored_bytes: int
    durability: DurabilityName
    """What is promised; never less than was asked for."""
    base: int
    """Rows that come from the parent, as stored."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A fetched prefix, whole and checked."""

    namespace: str
    model: str
    packed_token_ids: bytes
    """The token ids from row 0 to `rows[1]`, u32 LE; empty unless all are known."""
    rows: tuple[int, int]
    """Which rows of the prefix these are, half-open."""
    layers: list[tuple[Array, Array]]
    """(K, V) per slot, each (kv_heads, tokens, head_dim), with the stored type and bits.

    NumPy arrays are views over token-major memory. A side that keeps nothing is (1, tokens, 0). What
    was stored with a lossy codec is float32, or an `Encoded` if its codec was asked for.
    """
    slots: tuple[int, ...]
    """The cache slot of each entry of `layers`."""
    layout: Layout
    """The tensors as in `layers`: decoded ones are raw float32."""
    fidelity: str
    """`raw`, or the codecs that the rows went through."""
    parts: tuple[Part, ...]
    generation: int
    transport: Literal["export", "stream"]
    transport_reason: str
    """Why it was streamed."""
    shortened_by: str
    """The kind of part because of which `rows` end before the prefix does; empty if none."""

    @property
    def token_ids(self) -> list[int]:
        """The token ids from row 0 to `rows[1]`."""
        return unpack_token_ids(self.packed_token_ids)

    @property
    def token_count(self) -> int:
        """Number of rows in `layers`."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a token sequence."""

    hit: bool
    reason: MissReason
    """Why it is a miss, or why a hit is shorter than what was asked for."""
    token_count: int
    """Rows that can be fetched; 0 on a miss."""
    matched_tokens: int
    """Leading tokens in common: the index of the first difference."""
    requested_tokens: int
    prefix: PrefixInfo | None
    """The prefix to fetch; on a miss, the nearest stored one, if any."""
    lease_id: bytes
    """For `fetch`: what was matched stays readable as long as the lease lasts."""
    shortened_by: str
    """The kind of part that shortened it."""
    longest_namespace: str
    """The prefix with the most leading tokens in common, whatever parts it has: a prefix that extends
    it need not store their rows again. Empty if none has any."""
    longest_tokens: int
    """How many they are."""

    @property
    def namespace(self) -> str:
        """The name of `prefix`; empty if there is none."""
        return self.prefix.namespace if self.prefix else ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is stored under a name, and whether it is what was expected."""

    hit: bool
    reason: MissReason
    prefix: PrefixInfo | None
    """What is stored there, even if it is something else."""
    first_difference: int
    """Index of the first token that differs, if the reason is `TOKENS_DIFFER`."""
    lease_id: bytes


class Registered(NamedTuple):
    """The acknowledgement of a register."""

    state: PrefixState
    generation: int


class RowsWritten(NamedTuple):
    """The acknowledgement of written rows."""

    row_count: int
    """Rows that the tensor has now."""
    generation: int
    """It has changed if rows were overwritten, or the tensor is new."""
    durability: DurabilityName


@dataclass(frozen=True, slots=True)
class Description:
    """The server: what it is, its limits, what it holds."""

    version: str
    limits: dict[str, int]
    codecs: tuple[str, ...]
    attend_backend: str
    """Empty if attend is off."""
    disk_budget_bytes: int
    disk_used_bytes: int
    resident_budget_bytes: int
    resident_used_bytes: int
    tenant_budget_bytes: int
    prefix_count: int
    row_count: int
    evicted_count: int
    corrupt_count: int
    live_bytes: int
    attend_warm: int
    attend_cold: int
    attend_demotions: int
    attend_rehydrates: int
    started_unix_ms: int
    export_enabled: bool


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the store did for its clients since `since_unix_ms`."""

    hits: int
    misses: int
    measured_hits: int
    tokens_served: int
    bytes_streamed: int
    bytes_exported: int
    prefill_seconds_avoided: float
    prefill_seconds_avoided_measured: float
    prefill_seconds_avoided_estimated: float
    """An estimate: 555 µs per token."""
    since_unix_ms: int


def pack_hashes(hashes: "bytes | Sequence[int] | np.ndarray") -> bytes:
    """Returns u64 hashes as they are sent, little-endian; `bytes` are taken to be packed.

    Raises:
        ValueError: too many, or not hashes.
    """
    if isinstance(hashes, bytes):
        packed = hashes
    else:
        try:  # one by one: NumPy makes floats of integers that fit only unsigned
            values = np.fromiter(map(operator.index, hashes), np.uint64, len(hashes))
        except (TypeError, OverflowError) as error:
            raise ValueError("hashes must be integers of 0 to 2**64 - 1") from error
        packed = values.astype("<u8").tobytes()
    if len(packed) % 8 or len(packed) > 8 * limits.HASHES_MAX:
        raise ValueError(
            f"{len(packed)} bytes are not at most {limits.HASHES_MAX} hashes of 8 bytes"
        )
    return packed
