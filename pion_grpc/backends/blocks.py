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
SLAB_BYTES = 8 << 20
"""What a summary that is not kept takes at once."""


class Summaries:
    """The block summaries of one resident prefix, each computed once per block size and selector.

    The least recently used go when they would take more than ``bytes_max``; one that is larger than
    that (blocks of a few tokens) is computed anew for each query, a slab at a time, and never whole.
    Two threads that ask first at once both compute, and agree.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[int, Selector], F64] = OrderedDict()
        self._lock = threading.Lock()

    def products(
        self, keys: Callable[[], Array], block_tokens: int, selector: Selector, probe: F64
    ) -> F64:
        """Every block's summary of ``keys()`` [heads_kv][tokens][dim], times ``probe`` [features]."""
        name = (block_tokens, selector)
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return _product(self._kept[name], probe)
        k = keys()
        tokens = k.shape[1]
        if -(-tokens // block_tokens) * probe.nbytes > self._bytes_max:
            step = max(SLAB_BYTES // probe.nbytes, 1) * block_tokens
            slabs = (k[:, first : first + step] for first in range(0, tokens, step))
            return np.concatenate(
                [_product(summarise(slab, block_tokens, selector), probe) for slab in slabs]
            )
        summary = summarise(k, block_tokens, selector)
        with self._lock:
            self._kept[name] = summary
            while sum(kept.nbytes for kept in self._kept.values()) > self._bytes_max:
                self._kept.popitem(last=False)
        return _product(summary, probe)


def summarise(k: Array, block_tokens: int, selector: Selector) -> F64:
    """Mean, or highest and lowest value, per block, K/V head and dimension: [blocks][features]."""
    heads, tokens, dim = k.shape
    whole = tokens // block_tokens * block_tokens
    cut = [k[:, :whole].reshape(heads, -1, block_tokens, dim), k[:, None, whole:]]
    return np.concatenate([_statistics(blocks, selector) for blocks in cut if blocks.size])


def choose(
    query: SparseAuto, keys: Callable[[], Array], kept: Summaries, kv_of: Array, heads_kv: int
) -> npt.NDArray[np.intp]:
    """The blocks to read, ascending: the best ``query.blocks`` and the last.

    ``kv_of`` is the K/V head of each query head. The factors that all blocks share (mean over heads,
    1/√dim) are left out: they order nothing.
    """
    q = query.q[:, 0].astype(np.float64)
    signed = [q] if query.selector == "mean" else [np.maximum(q, 0), np.minimum(q, 0)]
    probe = np.zeros((len(signed), heads_kv, q.shape[1]))
    for per_kv, part in zip(probe, signed, strict=True):
        np.add.at(per_kv, kv_of, part)
    scores = _to_24_bits(kept.products(keys, query.block_tokens, query.selector, probe.ravel()))
    best = np.argsort(-scores, kind="stable")[: query.blocks]
    chosen = np.zeros(len(scores), bool)
    chosen[best] = chosen[-1] = True
    return np.flatnonzero(chosen)


def _statistics(blocks: Array, selector: Selector) -> F64:
    """Of [heads_kv][blocks][tokens][dim], the rows of a summary."""
    if selector == "mean":
        found = [blocks.mean(axis=2, dtype=np.float64)]
    else:
        found = [blocks.max(axis=2), blocks.min(axis=2)]
    count = blocks.shape[1]
    rows = [of.swapaxes(0, 1).reshape(count, -1) for of in found]
    return np.concatenate(rows, axis=1, dtype=np.float64)


def _product(summary: F64, probe: F64) -> F64:
    with np.errstate(invalid="ignore", over="ignore"):
        product: F64 = summary @ probe
    return product


def _to_24_bits(scores: F64) -> F64:
    """Round to 24 significant bits, so that a tie does not depend on the order of summation."""
    mantissa, exponent = np.frexp(scores)
    rounded: F64 = np.ldexp(np.rint(mantissa * 2**24), exponent - 24)
    return rounded
