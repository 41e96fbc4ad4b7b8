"""Which blocks of a prefix a sparse query reads: summaries of the keys, and a choice among them.

Runs on the host for every backend, in float64; refuses to know where attention itself is computed.
The decision to understand: both selectors are linear once the signs of q are split, so the score of
every block for all heads together is *one* matrix-vector product. For "quest"::

    Σ_d max(q_d·low_d, q_d·high_d)  =  Σ_d max(q_d, 0)·high_d + min(q_d, 0)·low_d

and heads that share a K/V head are summed before they are multiplied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pion_grpc.backends.base import Array, Selector, SparseAuto

F64 = npt.NDArray[np.float64]

KEPT_SHARE = 4  # summaries may take a quarter of what K and V take


class Summaries:
    """The block summaries of one resident prefix, each computed once per block size and selector.

    The least recently used go when they would take more than ``bytes_max``; one that is larger than
    that (blocks of a few tokens) is computed anew for each query. Two threads that ask first at once
    both compute, and agree.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[int, Selector], F64] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, keys: Callable[[], Array], block_tokens: int, selector: Selector) -> F64:
        """The summaries [blocks][features] of ``keys()`` [heads_kv][tokens][dim]."""
        name = (block_tokens, selector)
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        summary = summarise(keys(), block_tokens, selector)
        with self._lock:
            self._kept[name] = summary
            while sum(kept.nbytes for kept in self._kept.values()) > self._bytes_max:
                self._kept.popitem(last=False)
        return summary


def summarise(k: Array, block_tokens: int, selector: Selector) -> F64:
    """Mean, or highest and lowest value, per block, K/V head and dimension: [blocks][features]."""
    cut = [k[:, first : first + block_tokens] for first in range(0, k.shape[1], block_tokens)]
    if selector == "mean":
        return np.stack([block.mean(axis=1, dtype=np.float64).ravel() for block in cut])
    return np.stack(
        [np.concatenate([block.max(axis=1), block.min(axis=1)], axis=None) for block in cut],
        dtype=np.float64,
    )


def choose(query: SparseAuto, summary: F64, kv_of: Array, heads_kv: int) -> list[int]:
    """The blocks to read, ascending: the best ``query.blocks`` and the last.

    ``kv_of`` is the K/V head of each query head. The factors that all blocks share (mean over heads,
    1/√dim) are left out: they order nothing.
    """
    q = query.q[:, 0].astype(np.float64)
    signed = [q] if query.selector == "mean" else [np.maximum(q, 0), np.minimum(q, 0)]
    probe = np.zeros((len(signed), heads_kv, q.shape[1]))
    for per_kv, part in zip(probe, signed, strict=True):
        np.add.at(per_kv, kv_of, part)
    with np.errstate(invalid="ignore", over="ignore"):
        scores = _to_24_bits(summary @ probe.ravel())
    best = np.argsort(-scores, kind="stable")[: query.blocks]
    return sorted({*best.tolist(), len(summary) - 1})


def _to_24_bits(scores: F64) -> F64:
    """Round to 24 significant bits, so that a tie does not depend on the order of summation."""
    mantissa, exponent = np.frexp(scores)
    rounded: F64 = np.ldexp(np.rint(mantissa * 2**24), exponent - 24)
    return rounded
