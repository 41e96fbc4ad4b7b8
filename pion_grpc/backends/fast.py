"""Attention in float32 NumPy: the default on Linux, where its BLAS outruns other CPU paths.

Refuses to know devices and threads: NumPy releases the interpreter's lock inside BLAS, and nothing
here is shared but what is resident. The decision to understand: what a query reads is a list of
*parts*, spans of the prefix and the suffix, which are never copied to sit next to each other. Their
scores do: one matrix, one softmax. (For 9 blocks of 65,536 keys that is 5 × as fast as gathering.)
Scores are computed in tiles that fit the CPU's cache.

float16 residency halves memory, not time: there is no fast float16 product on a CPU, so each call
widens what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pion_grpc.backends import plan, reference
from pion_grpc.backends.base import (
    F32,
    Answer,
    Array,
    Dtype,
    Query,
    Resident,
    Sparse,
    always,
    check_wanted,
)
from pion_grpc.backends.blocks import KEPT_SHARE, Summaries

SCORES_PER_TILE = 1 << 20  # 4 MiB of float32; 32 MiB at once took 1.6 × as long
ROWS_PER_SPAN = 256  # rows that cost as much as to begin another span
_F16_BITS = np.array(0x8FFFE000, np.uint32).view(np.int32)  # sign, five of exponent, ten more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held(Resident):
    k: Array
    v: Array
    peak_k: float
    peak_v: float
    summaries: Summaries


class _Part(NamedTuple):
    """Keys and values [group][tokens][dim], a span of the prefix or the suffix; their columns."""

    k: F32
    v: F32
    columns: slice


class FastBackend:
    """float32 NumPy over K and V held as float32 or float16."""

    name = "numpy"

    def __init__(self, dtype: Dtype = "f32") -> None:
        self.dtype = dtype

    def load(self, k: Array, v: Array) -> Resident:
        """See `base.Backend`."""
        k, v = plan.hold(k, self.dtype, "k"), plan.hold(v, self.dtype, "v")
        heads, tokens, dim = k.shape
        nbytes = k.nbytes + v.nbytes
        return _Held(
            heads=heads,
            tokens=tokens,
            dim=dim,
            nbytes=nbytes,
            k=k,
            v=v,
            peak_k=plan.peak(k),
            peak_v=plan.peak(v),
            summaries=Summaries(nbytes // KEPT_SHARE),
        )

    def attend(
        self, resident: Resident, query: Query, wanted: Callable[[], bool] = always
    ) -> Answer:
        """See `base.Backend`."""
        assert isinstance(resident, _Held)
        check_wanted(wanted)
        if not plan.fits_f32(query, resident.tokens, resident.peak_k, resident.peak_v):
            return reference.attend(resident.k, resident.v, query, wanted)
        if isinstance(query, Sparse):
            return _attend_sparse(resident, query)
        return _attend_spans(resident, query, wanted)

    def close(self) -> None:
        """Nothing to release."""


def _attend_spans(resident: _Held, query: Query, wanted: Callable[[], bool]) -> Answer:
    """All heads read the same spans of the prefix, then the suffix, if there is one."""
    heads, rows, dim = query.q.shape
    reads = plan.reads(query, resident, lambda: resident.k, resident.summaries, ROWS_PER_SPAN)
    spans = reads.spans
    suffix = query.suffix
    suffix_tokens = suffix.k.shape[1] if suffix else 0
    columns = sum(span.stop - span.start for span in spans) + suffix_tokens
    folded = rows * heads // resident.heads
    width = min(max(1, SCORES_PER_TILE // (folded * columns)), resident.heads)
    if resident.k.itemsize == 2:
        width = 1  # what is widened stays in the cache, one head at a time

    q = query.q * np.float32(query.softmax_scale)
    groups = plan.groups(query.head_map, heads, resident.heads, width)
    done = []
    for group in groups:
        parts = _parts(resident, group.kv, spans)
        if suffix and suffix_tokens:
            last = slice(columns - suffix_tokens, columns)
            parts.append(_Part(suffix.k[group.kv], suffix.v[group.kv], last))
        mine = q[group.heads]
        tile = mine.reshape(len(parts[0].k), -1, dim)
        pieces = []
        for some in plan.steps(tile.shape[1], SCORES_PER_TILE // (len(tile) * columns)):
            check_wanted(wanted)
            mask = reads.mask(suffix_tokens)
            if mask is None:
                mask = plan.suffix_mask(some, rows, suffix_tokens)
            pieces.append(_attend_tile(tile[:, some], parts, mask))
        o, s = pieces[0] if len(pieces) == 1 else _joined(pieces)
        done.append((o.reshape(mine.shape), s.reshape(mine.shape[:2])))
    out, lse = done[0] if len(done) == 1 else _by_head(groups, done, q.shape)
    return Answer(out, lse if query.with_lse else None)


def _attend_sparse(resident: _Held, query: Sparse) -> Answer:
    """Each head reads its own positions; heads without any keep zeros and -inf."""
    heads, _, dim = query.q.shape
    out = np.zeros((heads, 1, dim), np.float32)
    lse = np.full((heads, 1), -np.inf, np.float32)
    picks = plan.picks(query, resident.tokens)
    if len(picks.heads):
        kv = plan.kv_of_heads(query.head_map, heads, resident.heads)[picks.heads, None]
        k, v = _f32(resident.k[kv, picks.positions]), _f32(resident.v[kv, picks.positions])
        part = _Part(k, v, slice(0, k.shape[1]))
        q = query.q[picks.heads] * np.float32(query.softmax_scale)
        out[picks.heads], sums = _attend_tile(q, [part], picks.used[:, None])
        lse[picks.heads] = sums
    return Answer(out, lse if query.with_lse else None)


def _attend_tile(q: F32, parts: list[_Part], mask: Array | None) -> tuple[F32, F32]:
    """Softmax attention of scaled q [group][rows][dim] over the union of ``parts``.

    ``mask`` says which of the last columns are visible, bool [rows][columns] or
    [group][1][columns]; None where all is. Every row sees some key. Returns out [group][rows][dim]
    and lse [group][rows].
    """
    scores = np.empty((len(q), q.shape[1], parts[-1].columns.stop), np.float32)
    for part in parts:
        np.matmul(q, part.k.swapaxes(1, 2), out=scores[:, :, part.columns])
    if mask is not None:
        np.copyto(scores[:, :, -mask.shape[-1] :], -np.inf, where=~mask)
    peak = scores.max(axis=2, keepdims=True)
    scores -= peak
    np.exp(scores, out=scores)
    total = scores.sum(axis=2, keepdims=True)
    outs = [np.matmul(scores[:, :, part.columns], part.v) for part in parts]
    out = sum(outs[1:], outs[0])
    out /= total
    return out, (peak + np.log(total))[:, :, 0]


def _parts(resident: _Held, kv: slice, spans: list[plan.Span]) -> list[_Part]:
    """The spans of some heads; views where they are held as float32."""
    parts, column = [], 0
    for start, stop in spans:
        k, v = resident.k[kv, start:stop], resident.v[kv, start:stop]
        parts.append(_Part(_f32(k), _f32(v), slice(column, column + stop - start)))
        column += stop - start
    return parts


def _joined(pieces: list[tuple[F32, F32]]) -> tuple[F32, F32]:
    """Answers for some rows each, one after another."""
    out, lse = zip(*pieces, strict=True)
    return np.concatenate(out, axis=1), np.concatenate(lse, axis=1)


def _by_head(
    groups: tuple[plan.Group, ...], done: list[tuple[F32, F32]], shape: tuple[int, ...]
) -> tuple[F32, F32]:
    """Answers for the heads of one group each, every head in its place; ``shape`` is the whole's."""
    out, lse = np.empty(shape, np.float32), np.empty(shape[:2], np.float32)
    for group, (o, s) in zip(groups, done, strict=True):
        out[group.heads], lse[group.heads] = o, s
    return out, lse


def _f32(a: Array) -> F32:
    """Finite values as float32.

    float16 is widened by its bits, 6 × as fast as `astype`: sign and magnitude are put where float32
    has them, and the exponent's bias is made good by a product, which is exact, subnormals included.
    """
    if a.itemsize == 4:
        return a
    bits = a.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _F16_BITS
    wide = bits.view(np.float32)
    wide *= np.float32(2.0**112)
    return wide
