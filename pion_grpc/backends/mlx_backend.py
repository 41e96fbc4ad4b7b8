"""Attention in MLX: the default on a Mac, where it runs on Metal; any device MLX has will do.

The only file of the server that imports MLX, and only when this backend is asked for. It refuses to
let MLX out of its thread. The decision to understand: MLX's streams belong to a thread, a lazy array
can only be evaluated where it was made, and every thread that touches MLX leaves one behind. So one
compute thread owns the stream; callers hand it a function and get NumPy arrays back, evaluated. Large
queries are computed in steps, so that others need not wait for their end.

`mx.fast.scaled_dot_product_attention` computes wherever no log-sum-exp is asked for (it returns
none); otherwise the same formula in single operations.

On a GPU, float16 residency computes in float16 with its float32 softmax, as models do; with a
log-sum-exp, and on the CPU, where MLX's float16 products are slow, it is widened to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
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
    Unwanted,
    always,
    check_wanted,
)
from pion_grpc.backends.blocks import KEPT_SHARE, Summaries

T = TypeVar("T")

SCORES_PER_STEP = 1 << 23
"""32 MiB of float32, where they exist at all; on a CPU some 50 ms of the compute thread."""
ROWS_PER_SPAN = 2_048
"""Rows that cost as much as another span, which is three more arrays to MLX."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlxResident(Resident):
    """K and V as evaluated MLX arrays [1][heads][tokens][dim]; a process may read them directly."""

    k: mx.array
    v: mx.array
    peak_k: float
    peak_v: float
    summaries: Summaries


class ComputeThread:
    """The one thread that touches MLX. Results and exceptions come back to the caller.

    A pool of one: measured against a queue and locks of our own, its round trip was a third.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="attend")

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the compute thread and wait. Never from the compute thread itself."""
        return self._pool.submit(work).result()

    def run_steps(self, work: Generator[None, None, T], wanted: Callable[[], bool]) -> T:
        """Run ``work`` to its end, and what others have queued at each of its yields.

        Raises `Unwanted` as soon as a step is no longer wanted.
        """

        def step() -> tuple[T] | None:
            try:
                check_wanted(wanted)
                next(work)
            except StopIteration as end:
                return (end.value,)
            except Unwanted:
                work.close()  # here, where its arrays were made
                raise
            return None

        while (done := self.run(step)) is None:
            pass
        return done[0]

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._pool.shutdown()


class MlxBackend:
    """MLX over K and V held as float32 or float16.

    ``compute`` is the type that products are made in; None chooses by device, see above.
    """

    name = "mlx"

    def __init__(self, dtype: Dtype = "f32", compute: Dtype | None = None) -> None:
        self.dtype = dtype
        self._thread = ComputeThread()
        if compute is None:
            on_gpu = self._thread.run(lambda: mx.default_device().type == mx.DeviceType.gpu)
            compute = "f16" if dtype == "f16" and on_gpu else "f32"
        self._compute = mx.float16 if compute == "f16" else mx.float32

    def load(self, k: Array, v: Array) -> Resident:
        """See `base.Backend`. MLX copies the arrays."""
        k, v = plan.hold(k, self.dtype, "k"), plan.hold(v, self.dtype, "v")
        heads, tokens, dim = k.shape

        def copies() -> tuple[mx.array, mx.array]:
            both = mx.array(k)[None], mx.array(v)[None]
            mx.eval(both)
            return both

        held_k, held_v = self._thread.run(copies)
        nbytes = k.nbytes + v.nbytes
        return MlxResident(
            heads=heads,
            tokens=tokens,
            dim=dim,
            nbytes=nbytes,
            k=held_k,
            v=held_v,
            peak_k=plan.peak(k),
            peak_v=plan.peak(v),
            summaries=Summaries(nbytes // KEPT_SHARE),
        )

    def attend(
        self, resident: Resident, query: Query, wanted: Callable[[], bool] = always
    ) -> Answer:
        """See `base.Backend`."""
        assert isinstance(resident, MlxResident)
        answer = self._thread.run_steps(self._attend(resident, query), wanted)
        if answer is not None:
            return answer
        k, v = self._thread.run(lambda: (_host(resident.k), _host(resident.v)))
        return reference.attend(k, v, query, wanted)  # NumPy's work, on the caller's thread

    def close(self) -> None:
        """End the compute thread."""
        self._thread.close()

    def _attend(self, resident: MlxResident, query: Query) -> Generator[None, None, Answer | None]:
        """Compute in steps; None where it takes the reference."""
        if not self._fits(resident, query):
            return None
        if isinstance(query, Sparse):
            answer = self._attend_sparse(resident, query)
        else:
            answer = yield from self._attend_spans(resident, query)
        # Scores in float16 may still have left it where there is no kernel that sums in float32.
        in_range = self._type(query) == mx.float32 or np.isfinite(answer.out).all()
        return answer if in_range else None

    def _type(self, query: Query) -> mx.Dtype:
        """What products are made in: a log-sum-exp is worth having in float32 only."""
        return mx.float32 if query.with_lse else self._compute

    def _fits(self, resident: MlxResident, query: Query) -> bool:
        if not plan.fits_f32(query, resident.tokens, resident.peak_k, resident.peak_v):
            return False
        if self._type(query) == mx.float32:
            return True
        return all(plan.peak(a) <= plan.F16_MAX for a in (query.q, *(query.suffix or ())))

    def _attend_spans(self, resident: MlxResident, query: Query) -> Generator[None, None, Answer]:
        """All heads read the same spans of the prefix, then the suffix, if there is one."""
        heads, rows, dim = query.q.shape
        reads = plan.reads(
            query, resident, lambda: _host(resident.k), resident.summaries, ROWS_PER_SPAN
        )
        k = [_span(resident.k, span) for span in reads.spans]
        v = [_span(resident.v, span) for span in reads.spans]
        suffix = query.suffix
        suffix_tokens = suffix.k.shape[1] if suffix else 0
        if suffix and suffix_tokens:
            k.append(mx.array(suffix.k)[None])
            v.append(mx.array(suffix.v)[None])
        keys, values = _joined(k, self._type(query)), _joined(v, self._type(query))

        out = np.empty((heads, rows, dim), np.float32)
        lse = np.empty((heads, rows), np.float32)
        groups = plan.groups(query.head_map, heads, resident.heads, resident.heads)
        for some in plan.steps(rows, SCORES_PER_STEP // (heads * keys.shape[2])):
            if some.start:
                yield
            mask = reads.mask(suffix_tokens)
            if mask is None and (mask := plan.suffix_mask(some, rows, suffix_tokens)) is not None:
                prefix = keys.shape[2] - suffix_tokens
                mask = np.pad(mask, ((0, 0), (prefix, 0)), constant_values=True)
            for group in groups:
                k_group, v_group = _heads(keys, group.kv), _heads(values, group.kv)
                o, s = self._kernel(query.q[group.heads, some], k_group, v_group, mask, query)
                out[group.heads, some], lse[group.heads, some] = o, s
        return Answer(out, lse if query.with_lse else None)

    def _attend_sparse(self, resident: MlxResident, query: Sparse) -> Answer:
        """Each head reads its own positions; heads without any keep zeros and -inf."""
        heads, _, dim = query.q.shape
        out = np.zeros((heads, 1, dim), np.float32)
        lse = np.full((heads, 1), -np.inf, np.float32)
        picks = plan.picks(query, resident.tokens)
        if len(picks.heads):
            kv = plan.kv_of_heads(query.head_map, heads, resident.heads)[picks.heads, None]
            at = mx.array(kv), mx.array(picks.positions)
            keys, values = (
                a[0][at][None].astype(self._type(query)) for a in (resident.k, resident.v)
            )
            o, s = self._kernel(query.q[picks.heads], keys, values, picks.used[:, None], query)
            out[picks.heads], lse[picks.heads] = o, s
        return Answer(out, lse if query.with_lse else None)

    def _kernel(
        self, q: F32, k: mx.array, v: mx.array, mask: Array | None, query: Query
    ) -> tuple[F32, F32 | float]:
        """Attention of q [heads][rows][dim] over k, v [1][heads_kv][tokens][dim].

        ``mask`` is bool [rows][tokens], or [heads_kv][rows][tokens]. Returns out and lse (NaN unless
        asked for), evaluated and copied out of MLX's memory.
        """
        queries = mx.array(q)[None].astype(self._type(query))
        visible = None if mask is None else mx.array(mask)
        if not query.with_lse:
            out = mx.fast.scaled_dot_product_attention(
                queries, k, v, scale=query.softmax_scale, mask=visible
            )
            return np.array(out[0].astype(mx.float32)), np.nan
        heads, rows, dim = q.shape
        heads_kv = k.shape[1]
        # Query heads that share a K/V head are rows of one product; broadcasting K took 1.4 × as long.
        folded = (queries * query.softmax_scale).reshape(1, heads_kv, -1, dim)
        scores = folded @ k.swapaxes(-1, -2)
        if visible is not None:
            by_head = scores.reshape(heads_kv, -1, rows, k.shape[2])
            visible = visible if visible.ndim == 2 else visible[:, None]
            scores = mx.where(visible, by_head, -mx.inf).reshape(scores.shape)
        lse = mx.logsumexp(scores, axis=-1, keepdims=True)
        out = mx.exp(scores - lse) @ v
        mx.eval(out, lse)
        return np.array(out).reshape(q.shape), np.array(lse).reshape(heads, rows)


def _joined(pieces: list[mx.array], kind: mx.Dtype) -> mx.array:
    """The pieces as one array of tokens, of one type."""
    typed = [piece.astype(kind) for piece in pieces]
    return typed[0] if len(typed) == 1 else mx.concatenate(typed, axis=2)


def _heads(a: mx.array, kv: slice) -> mx.array:
    return a if kv == slice(0, a.shape[1]) else a[:, kv]


def _span(a: mx.array, span: plan.Span) -> mx.array:
    return a if span == (0, a.shape[2]) else a[:, :, span.start : span.stop]


def _host(a: mx.array) -> Array:
    """[1][heads][tokens][dim] as NumPy sees it, without a copy; read only."""
    view: Array = np.asarray(a)[0]
    view.flags.writeable = False
    return view
