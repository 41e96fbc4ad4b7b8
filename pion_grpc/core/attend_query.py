"""A query as it comes over any wire: numbers and bytes, turned into arrays once the entry is known.

Every lane (unary, stream, RESP, binary) makes one of these and hands it to `Attend.ask`, so one
implementation answers all of them. The one decision: answers are bit-equal on all lanes only if all ask
the same of the backend, and a backend may take another path where the log-sum-exp is wanted. RESP
returns it with several query vectors and never with one, so dense attention of several always has it
computed, whoever asks.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from pion_grpc.backends import (
    Dense,
    Fused,
    Query,
    QueryError,
    Resident,
    Selector,
    Sparse,
    SparseAuto,
    SparseAutoFused,
)
from pion_grpc.backends.base import F32
from pion_grpc.backends.query import counts, indices, tensor

Bytes = bytes | memoryview


FIELDS = {
    "q": "data",
    "k_suffix": "suffix_k",
    "v_suffix": "suffix_v",
    "block_tokens": "block_rows",
    "window": "window_rows",
}
"""What the contract calls a field, where a backend calls it otherwise."""


class SuffixBytes(NamedTuple):
    """K and V that follow the prefix: f32 [kv heads][rows][head_dim] each."""

    rows: int
    k: Bytes
    v: Bytes


class IndexBytes(NamedTuple):
    """Rows that the caller chose: i32 [heads][width], of which u32 [heads] say how many count."""

    width: int
    indices: Bytes
    counts: Bytes


class BlockChoice(NamedTuple):
    """Blocks to choose: their size in rows, how many, and by which statistic."""

    block_rows: int
    blocks: int
    selector: Selector


class _Common(TypedDict):
    q: F32
    head_map: bytes
    window: int
    scale: float | None
    with_lse: bool


class _Suffix(TypedDict):
    k_suffix: F32
    v_suffix: F32


@dataclass(frozen=True, slots=True)
class Ask:
    """One query. What is given decides its kind: nothing, a suffix, indices, or a choice of blocks."""

    heads: int
    head_dim: int
    q: Bytes
    """f32 [heads][queries][head_dim]."""
    queries: int | None = None
    """Query vectors per head; None: as many as there are bytes for."""
    kv_heads: int | None = None
    """What the caller takes the entry's K/V heads for; None: it does not say."""
    head_map: bytes = b""
    window: int | None = None
    """None: the server's default."""
    scale: float | None = None
    log_sum_exp: bool = False
    suffix: SuffixBytes | None = None
    indices: IndexBytes | None = None
    choice: BlockChoice | None = None

    def query(self, resident: Resident, default_window: int) -> Query:
        """Returns the query over an entry of this shape.

        Raises:
            QueryError: bytes and numbers contradict each other, or the entry.
        """
        if self.kv_heads not in (None, resident.heads):
            raise QueryError("kv_heads", f"{self.kv_heads} given, stored are {resident.heads}")
        q = tensor(self.q, self.heads, self.head_dim, "q", self.queries)
        dense = self.suffix is None and self.indices is None and self.choice is None
        common: _Common = {
            "q": q,
            "head_map": self.head_map,
            "window": default_window if self.window is None else self.window,
            "scale": self.scale,
            "with_lse": self.log_sum_exp or (dense and q.shape[1] > 1),
        }
        if self.indices is not None:
            if self.suffix is not None or self.choice is not None:
                raise QueryError("indices", "go with neither a suffix nor a choice of blocks")
            chosen = indices(self.indices.indices, self.heads, self.indices.width)
            return Sparse(**common, indices=chosen, counts=counts(self.indices.counts, self.heads))
        if self.choice is None:
            if self.suffix is None:
                return Dense(**common)
            return Fused(**common, **self._suffix(self.suffix, resident))
        block_tokens, blocks, selector = self.choice
        if self.suffix is None:
            return SparseAuto(**common, block_tokens=block_tokens, blocks=blocks, selector=selector)
        return SparseAutoFused(
            **common,
            **self._suffix(self.suffix, resident),
            block_tokens=block_tokens,
            blocks=blocks,
            selector=selector,
        )

    def _suffix(self, suffix: SuffixBytes, resident: Resident) -> _Suffix:
        rows, k, v = suffix
        return {
            "k_suffix": tensor(k, resident.heads, self.head_dim, "k_suffix", rows),
            "v_suffix": tensor(v, resident.heads, self.head_dim, "v_suffix", rows),
        }
