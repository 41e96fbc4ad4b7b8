"""What an attention backend is: K and V made resident once, and the queries asked over them.

This module knows shapes and meanings. It refuses to know how an answer is computed, where a query
came from, and who owns a session. The decision to understand: every kind of query is one value with
one meaning, defined by `reference.attend`; a backend may only differ in speed and in the last bits.

Shapes, everywhere in this package::

    k, v        [heads_kv][tokens][dim]     a resident prefix, head-major
    q           [heads_q][rows][dim]        rows is M: query positions asked in one call
    suffix      [heads_kv][suffix][dim]     K and V that come with the query, after the prefix
    out, lse    [heads_q][rows][dim], [heads_q][rows]

Query head h reads K/V head ``head_map[h]``, or ``h // (heads_q // heads_kv)`` when the map is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
Dtype = Literal["f32", "f16"]
Selector = Literal["mean", "quest"]


class Answer(NamedTuple):
    """What a query returns.

    ``out`` is float32 [heads_q][rows][dim]. ``lse`` is float32 [heads_q][rows]: the natural logarithm
    of the sum of the exponentials of the *scaled* scores, clipped to what float32 can hold; None
    unless asked for. A head that saw no key has zeros and -inf.
    """

    out: F32
    lse: F32 | None


class Suffix(NamedTuple):
    """K and V that follow the prefix, float32 [heads_kv][suffix][dim]; possibly no tokens at all."""

    k: F32
    v: F32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Query:
    """What all queries have in common; arrays must not change while a query runs.

    ``head_map``: one byte per query head, empty for the grouped order of GQA.
    ``window``: only the last ``window`` tokens of the prefix are visible; 0 means all. It never
    applies to a suffix.
    ``scale``: what scores are multiplied with; None means 1/√dim.
    ``with_lse``: whether the answer carries the log-sum-exp.
    """

    q: F32
    head_map: bytes = b""
    window: int = 0
    scale: float | None = None
    with_lse: bool = False

    @property
    def softmax_scale(self) -> float:
        """The factor in force: the given one, or 1/√dim."""
        return float(self.q.shape[2] ** -0.5) if self.scale is None else self.scale

    @property
    def suffix(self) -> Suffix | None:
        """K and V that come with the query; None where its kind has no suffix."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense(Query):
    """Attention over the whole prefix, without a causal mask: the queries come after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused(Query):
    """One softmax over prefix and suffix.

    Row m sees the suffix up to index ``max(suffix - rows, 0) + m``: with as many rows as suffix
    tokens (or fewer) the last row sees all of it.
    """

    k_suffix: F32
    v_suffix: F32

    @property
    def suffix(self) -> Suffix:
        """The suffix."""
        return Suffix(self.k_suffix, self.v_suffix)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sparse(Query):
    """Attention over positions that the caller names, per query head; one row.

    ``indices`` int32 [heads_q][width], of which head h uses the first ``counts[h]`` (uint32). They
    form a set: their order is irrelevant, a position named twice counts once, and one outside of the
    prefix or before the window is skipped.
    """

    indices: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseAuto(Query):
    """Attention over the blocks that score best, the same for all heads; one row.

    The prefix is cut into blocks of ``block_tokens``, the last possibly short. A block's score is the
    mean over query heads of q · mean(K of the block) ("mean"), or of the largest score that a key
    inside the block's bounding box could have, Σ_d max(q_d·min_d, q_d·max_d) ("quest"; Tang et al.
    2024, arXiv:2406.10774). The ``blocks`` best are taken, of equals the lower index, and the last
    block always. The window then applies to what was taken.

    "mean" finds where keys of a whole block point; a single key that the query matches is lost in the
    mean of the others, and "quest" finds it. Blocks of less than four tokens are scored anew for each
    query, which takes longer than `Dense`.

    Scores are compared to 24 bits: equal blocks tie whatever order a backend sums in.
    """

    block_tokens: int
    blocks: int
    selector: Selector = "mean"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseAutoFused(SparseAuto):
    """`SparseAuto` with a suffix that is visible whole."""

    k_suffix: F32
    v_suffix: F32

    @property
    def suffix(self) -> Suffix:
        """The suffix."""
        return Suffix(self.k_suffix, self.v_suffix)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """K and V of one prefix, held by the backend that made it; freed with its last reference.

    ``nbytes`` counts K and V. Block summaries come on top, at most a quarter of that.
    """

    heads: int
    tokens: int
    dim: int
    nbytes: int


class Unwanted(Exception):
    """Nobody waits for the answer any more: it was not computed, or not to the end."""


def always() -> bool:
    """Somebody waits."""
    return True


def check_wanted(wanted: Callable[[], bool]) -> None:
    """Raise `Unwanted` if nobody waits."""
    if not wanted():
        raise Unwanted


class Backend(Protocol):
    """Where attention is computed. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """The name `create` knows it by."""
        ...

    @property
    def dtype(self) -> Dtype:
        """What resident K and V are held as."""
        ...

    def load(self, k: Array, v: Array) -> Resident:
        """Make K and V resident: float arrays [heads_kv][tokens][dim] of any strides.

        The arrays may be kept without a copy: the caller never changes them afterwards. Raises
        `query.QueryError` where a value does not fit ``dtype``.
        """
        ...

    def attend(
        self, resident: Resident, query: Query, wanted: Callable[[], bool] = always
    ) -> Answer:
        """Answer a query that `query.check` accepted, over what this backend loaded.

        ``wanted`` is asked, from any thread, before parts of the work; raises `Unwanted` on a no.
        """
        ...

    def close(self) -> None:
        """Release threads; what is resident stays valid memory but answers nothing any more."""
        ...
