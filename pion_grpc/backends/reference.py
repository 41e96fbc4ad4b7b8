"""The right answer: attention in float64, head by head, written to be read.

Refuses to be fast. The decision to understand: this file defines every query kind by itself and
shares no selection or masking code with the other backends, so that comparing them means something.
It is also what the others fall back to for values whose scores float32 cannot hold: products of
float32 numbers never overflow float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pion_grpc.backends.base import (
    Answer,
    Array,
    Dtype,
    Query,
    Resident,
    Sparse,
    SparseAuto,
    always,
    check_wanted,
)
from pion_grpc.backends.plan import hold

_F32_MAX = float(np.finfo(np.float32).max)
_SCORES_MAX = 1 << 23  # 64 MiB of float64 at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held(Resident):
    k: Array
    v: Array


class ReferenceBackend:
    """NumPy with float64 inside; for tests, and for whoever doubts a faster one."""

    name = "reference"

    def __init__(self, dtype: Dtype = "f32") -> None:
        self.dtype = dtype

    def load(self, k: Array, v: Array) -> Resident:
        """See `base.Backend`."""
        k, v = hold(k, self.dtype, "k"), hold(v, self.dtype, "v")
        heads, tokens, dim = k.shape
        return _Held(heads=heads, tokens=tokens, dim=dim, nbytes=k.nbytes + v.nbytes, k=k, v=v)

    def attend(
        self, resident: Resident, query: Query, wanted: Callable[[], bool] = always
    ) -> Answer:
        """See `base.Backend`."""
        assert isinstance(resident, _Held)
        return attend(resident.k, resident.v, query, wanted)

    def close(self) -> None:
        """Nothing to release."""


def attend(k: Array, v: Array, query: Query, wanted: Callable[[], bool] = always) -> Answer:
    """Answer ``query`` over k, v [heads_kv][tokens][dim] of any float type.

    For each query head: gather the keys it may see, score them, softmax, weigh the values. Values
    that are not finite make NaN, as they would anywhere, but no warning.
    """
    heads, rows, dim = query.q.shape
    out = np.zeros((heads, rows, dim))
    lse = np.full((heads, rows), -np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = _best_blocks(k, query) if isinstance(query, SparseAuto) else None
        for head in range(heads):
            kv = kv_head(query, head, len(k))
            seen = _positions(query, head, k.shape[1], blocks)
            keys, values = k[kv, seen].astype(np.float64), v[kv, seen].astype(np.float64)
            suffix_tokens = 0
            if suffix := query.suffix:
                suffix_tokens = suffix.k.shape[1]
                keys = np.concatenate([keys, suffix.k[kv]])
                values = np.concatenate([values, suffix.v[kv]])
            if len(keys) == 0:
                continue  # zeros and -inf: there is nothing to attend to
            step = max(1, _SCORES_MAX // len(keys))
            for some in (slice(first, first + step) for first in range(0, rows, step)):
                check_wanted(wanted)
                scores = query.q[head, some].astype(np.float64) @ keys.T * query.softmax_scale
                scores[:, len(seen) :][~_suffix_mask(rows, suffix_tokens, some)] = -np.inf
                peak = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - peak)
                total = weights.sum(axis=1, keepdims=True)
                out[head, some] = weights @ values / total
                lse[head, some] = np.clip((peak + np.log(total))[:, 0], -_F32_MAX, _F32_MAX)
        return Answer(out.astype(np.float32), lse.astype(np.float32) if query.with_lse else None)


def kv_head(query: Query, head: int, heads_kv: int) -> int:
    """Which K/V head a query head reads."""
    if query.head_map:
        return query.head_map[head]
    return head // (len(query.q) // heads_kv)


def _positions(query: Query, head: int, tokens: int, blocks: list[int] | None) -> Array:
    """The prefix positions that a query head sees, ascending."""
    first = max(tokens - query.window, 0) if query.window else 0
    seen: Array = np.arange(tokens)
    if isinstance(query, Sparse):
        seen = np.unique(query.indices[head, : query.counts[head]])
    elif blocks is not None:
        assert isinstance(query, SparseAuto)
        size = query.block_tokens
        seen = np.concatenate([seen[block * size : (block + 1) * size] for block in blocks])
    return seen[(seen >= first) & (seen < tokens)]


def _suffix_mask(rows: int, suffix: int, some: slice) -> Array:
    """Row m sees suffix index s where s ≤ max(suffix - rows, 0) + m."""
    last_visible = max(suffix - rows, 0) + np.arange(rows)[some]
    visible: Array = np.arange(suffix) <= last_visible[:, None]
    return visible


def _best_blocks(k: Array, query: SparseAuto) -> list[int]:
    """Indices of the blocks that `SparseAuto` attends to, ascending; what is no number ranks last."""
    heads_kv, tokens, dim = k.shape
    q = query.q[:, 0].astype(np.float64)
    scores = []
    for start in range(0, tokens, query.block_tokens):
        block = k[:, start : start + query.block_tokens].astype(np.float64)
        total = 0.0
        for head in range(len(q)):
            keys = block[kv_head(query, head, heads_kv)]
            if query.selector == "mean":
                total += float(q[head] @ keys.mean(axis=0))
            else:
                low, high = keys.min(axis=0), keys.max(axis=0)
                total += float(np.maximum(q[head] * low, q[head] * high).sum())
        scores.append(_to_24_bits(total / len(q) * dim**-0.5))
    ranked = np.argsort(-np.array(scores), kind="stable")[: query.blocks]
    return sorted({*ranked.tolist(), len(scores) - 1})


def _to_24_bits(score: float) -> float:
    mantissa, exponent = np.frexp(score)
    return float(np.ldexp(np.rint(mantissa * 2**24), exponent - 24))
