"""Every backend against the reference, and the reference against attention spelled out.

`BackendContract` is the suite that a new backend's test class inherits.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_grpc.backends import (
    Answer,
    Backend,
    Dense,
    Dtype,
    Fused,
    Query,
    QueryError,
    Resident,
    Selector,
    Sparse,
    SparseAuto,
    SparseAutoFused,
    check,
    create,
)
from pion_grpc.backends import query as parse
from pion_grpc.backends.base import F32, Array
from pion_grpc.backends.blocks import SLAB_BYTES, Summaries
from pion_grpc.backends.fast import FastBackend
from pion_grpc.backends.mlx_backend import MlxBackend
from pion_grpc.backends.reference import ReferenceBackend
from pion_wire.softmax import merge

SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)
VALUES_MAX = 1 << 19  # of K in a random case: the reference takes milliseconds for it

properties = settings(
    max_examples=20,
    deadline=None,
    # One instance of a backend serves all examples, and the suite is inherited: both on purpose.
    suppress_health_check=[HealthCheck.differing_executors],
)


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, dtype=np.float32)


def dense(q: F32, **more: Any) -> Dense:
    return Dense(q=q, with_lse=True, **more)


class Case:
    """A random prefix and everything to ask queries over it with."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.heads_kv = draw(st.integers(1, 32))
        self.heads = self.heads_kv * draw(st.integers(1, 32 // self.heads_kv))
        self.dim = draw(st.integers(16, 512))
        self.tokens = draw(st.integers(1, max(1, min(4096, VALUES_MAX // (self.heads * self.dim)))))
        n = self.tokens
        self.window = draw(st.sampled_from([0, 1, max(n - 1, 0), n, n + 1]))
        self.rows = draw(st.integers(1, 64))
        self.suffix = draw(st.integers(0, 64))
        self.scale = draw(st.sampled_from([None, 0.02]))
        self.head_map = b""
        if draw(st.booleans()):
            self.head_map = self.rng.integers(0, self.heads_kv, self.heads, np.uint8).tobytes()
        self.k = normal(self.rng, self.heads_kv, n, self.dim)
        self.v = normal(self.rng, self.heads_kv, n, self.dim)
        self.block_tokens = draw(st.integers(1, max(1, n // 3)))
        self.blocks = draw(st.integers(1, 1 + n // self.block_tokens))

    def query(self, kind: type[Query]) -> Query:
        rng, heads, dim = self.rng, self.heads, self.dim
        rows = self.rows if kind in (Dense, Fused) else 1
        fields: dict[str, Any] = {
            "q": normal(rng, heads, rows, dim),
            "head_map": self.head_map,
            "window": self.window,
            "scale": self.scale,
            "with_lse": bool(rng.integers(2)),
        }
        if kind in (Fused, SparseAutoFused):
            fields["k_suffix"] = normal(rng, self.heads_kv, self.suffix, dim)
            fields["v_suffix"] = normal(rng, self.heads_kv, self.suffix, dim)
        if kind is Sparse:
            width = int(rng.integers(1, 2 * self.tokens + 2))
            # A few positions outside of the prefix on either side, and some twice.
            table = rng.integers(-2, self.tokens + 2, (heads, width), np.int32)
            fields["indices"] = table
            fields["counts"] = rng.integers(0, width + 1, heads, np.uint32)
        if kind in (SparseAuto, SparseAutoFused):
            fields["block_tokens"] = self.block_tokens
            fields["blocks"] = self.blocks
            fields["selector"] = rng.choice(["mean", "quest"])
        return kind(**fields)


cases = st.composite(Case)()


@functools.cache
def the(make: Callable[..., Backend], *args: Any) -> Backend:
    """One backend per kind for the whole run: a compute thread each, no more."""
    return make(*args)


def assert_close(got: Answer, want: Answer, tolerance: float) -> None:
    assert got.out.dtype == np.float32
    assert got.out.shape == want.out.shape
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=tolerance)
    assert (got.lse is None) == (want.lse is None)
    if got.lse is not None and want.lse is not None:
        assert got.lse.dtype == np.float32
        np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6, atol=tolerance)


class BackendContract:
    """What every backend must hold to. A subclass says which one, and how exact."""

    dtype: Dtype = "f32"
    tolerance = 1e-5

    def backend(self) -> Backend:
        raise NotImplementedError

    def expected(self, k: Array, v: Array, query: Query) -> Answer:
        reference = the(ReferenceBackend, self.dtype)
        return reference.attend(reference.load(k, v), query)

    def answer(self, k: Array, v: Array, query: Query) -> Answer:
        resident = self.backend().load(k, v)
        check(query, resident)
        return self.backend().attend(resident, query)

    @pytest.mark.parametrize("kind", [Dense, Fused, Sparse, SparseAuto, SparseAutoFused])
    def test_answer_never_differs_from_the_reference(self, kind: type[Query]) -> None:
        @properties
        @given(cases)
        def holds(case: Case) -> None:
            query = case.query(kind)
            got = self.answer(case.k, case.v, query)
            assert_close(got, self.expected(case.k, case.v, query), self.tolerance)

        holds()

    @properties
    @given(cases)
    def test_merged_halves_never_differ_from_the_whole(self, case: Case) -> None:
        query = replace(case.query(Dense), window=0, with_lse=True)
        cut = case.tokens // 2
        if cut == 0:
            return
        halves = [
            self.answer(case.k[:, part], case.v[:, part], query)
            for part in (slice(0, cut), slice(cut, None))
        ]
        (out1, lse1), (out2, lse2) = halves
        assert lse1 is not None
        assert lse2 is not None
        whole = self.answer(case.k, case.v, query)
        assert_close(Answer(*merge(out1, lse1, out2, lse2)), whole, 2 * self.tolerance)

    @pytest.mark.parametrize("tokens", [1, 7, 1024])
    def test_equal_keys_give_no_other_lse_than_ln_n_plus_score(self, tokens: int) -> None:
        rng = np.random.default_rng(tokens)
        q, key = normal(rng, 4, 3, 32), normal(rng, 2, 1, 32)
        k = np.repeat(key, tokens, axis=1)
        got = self.answer(k, normal(rng, 2, tokens, 32), dense(q))
        assert got.lse is not None
        held = key.astype(np.float16) if self.dtype == "f16" else key
        score = np.einsum("hmd,hd->hm", q, np.repeat(held[:, 0], 2, axis=0)) / math.sqrt(32)
        np.testing.assert_allclose(got.lse, math.log(tokens) + score, rtol=0, atol=self.tolerance)

    @pytest.mark.parametrize("selector", ["mean", "quest"])
    @pytest.mark.parametrize("blocks", [16, 1000])
    def test_selecting_all_blocks_never_differs_from_dense(
        self, selector: Any, blocks: int
    ) -> None:
        rng = np.random.default_rng(3)
        k, v, q = normal(rng, 4, 1001, 128), normal(rng, 4, 1001, 128), normal(rng, 4, 1, 128)
        auto = SparseAuto(q=q, block_tokens=64, blocks=blocks, selector=selector, with_lse=True)
        assert_close(self.answer(k, v, auto), self.answer(k, v, dense(q)), 1e-6)

    def test_naming_all_positions_never_differs_from_dense(self) -> None:
        rng = np.random.default_rng(3)
        k, v, q = normal(rng, 4, 500, 64), normal(rng, 4, 500, 64), normal(rng, 4, 1, 64)
        named = np.tile(rng.permutation(500).astype(np.int32), (4, 1))
        sparse = Sparse(q=q, indices=named, counts=np.full(4, 500, np.uint32), with_lse=True)
        assert_close(self.answer(k, v, sparse), self.answer(k, v, dense(q)), self.tolerance)

    def test_position_named_twice_never_counts_twice(self) -> None:
        rng = np.random.default_rng(4)
        k, v, q = normal(rng, 1, 9, 16), normal(rng, 1, 9, 16), normal(rng, 1, 1, 16)
        once = Sparse(q=q, indices=np.array([[2, 5, 8]], np.int32), counts=np.array([3], np.uint32))
        twice = Sparse(
            q=q, indices=np.array([[8, 2, 2, 5]], np.int32), counts=np.array([4], np.uint32)
        )
        assert np.array_equal(self.answer(k, v, once).out, self.answer(k, v, twice).out)

    def test_head_without_usable_index_is_never_nan(self) -> None:
        rng = np.random.default_rng(5)
        k, v, q = normal(rng, 4, 9, 16), normal(rng, 4, 9, 16), normal(rng, 4, 1, 16)
        indices = np.array([[3, 4], [-1, 9], [3, 4], [0, 1]], np.int32)
        counts = np.array([2, 2, 0, 2], np.uint32)  # usable, outside, none, before the window
        query = Sparse(q=q, indices=indices, counts=counts, window=7, with_lse=True)
        got = self.answer(k, v, query)
        assert got.lse is not None
        assert np.isfinite(got.out).all()
        assert got.out[0].any()
        assert not got.out[1:].any()
        assert np.isfinite(got.lse[0]).all()
        assert np.isneginf(got.lse[1:]).all()
        nothing = self.answer(k, v, replace(query, counts=np.zeros(4, np.uint32)))
        assert not nothing.out.any()

    @pytest.mark.parametrize("head_map", ["0000", "1111", "1010", "0011", "1110", ""])
    def test_query_head_never_reads_another_head_than_its_own(self, head_map: str) -> None:
        """The value of K/V head h is h everywhere, so the answer is the map."""
        rng = np.random.default_rng(17)
        k, v = normal(rng, 2, 90, 32), np.ones((2, 90, 32), np.float32) * np.array([[[0]], [[1]]])
        fields: dict[str, Any] = {
            "q": normal(rng, 4, 1, 32),
            "head_map": bytes(int(kv) for kv in head_map),
            "with_lse": bool(rng.integers(2)),
        }
        suffix = {"k_suffix": k[:, :3], "v_suffix": v[:, :3].astype(np.float32)}
        auto: dict[str, Any] = {"block_tokens": 9, "blocks": 2}
        table: dict[str, Any] = {
            "indices": np.zeros((4, 1), np.int32),
            "counts": np.ones(4, np.uint32),
        }
        for query in (
            Dense(**fields),
            Fused(**fields, **suffix),
            Sparse(**fields, **table),
            SparseAuto(**fields, **auto),
            SparseAutoFused(**fields, **auto, **suffix),
        ):
            got = self.answer(k, v, query).out.mean(axis=(1, 2))
            np.testing.assert_allclose(got, [int(kv) for kv in head_map or "0011"], atol=1e-5)

    def test_empty_suffix_never_changes_an_answer(self) -> None:
        rng = np.random.default_rng(6)
        k, v = normal(rng, 2, 300, 32), normal(rng, 2, 300, 32)
        none = np.zeros((2, 0, 32), np.float32)
        q = normal(rng, 4, 1, 32)
        auto = SparseAuto(q=q, block_tokens=16, blocks=3)
        fused = SparseAutoFused(q=q, block_tokens=16, blocks=3, k_suffix=none, v_suffix=none)
        assert_close(self.answer(k, v, fused), self.answer(k, v, auto), 1e-6)
        q = normal(rng, 4, 5, 32)
        got = self.answer(k, v, Fused(q=q, k_suffix=none, v_suffix=none))
        assert_close(got, self.answer(k, v, Dense(q=q)), 1e-6)

    @pytest.mark.parametrize(("rows", "suffix"), [(1, 5), (4, 4), (3, 7), (7, 3), (2, 1)])
    def test_row_never_sees_a_suffix_key_after_itself(self, rows: int, suffix: int) -> None:
        """Each suffix value is a unit vector of its own: the answer shows which were seen."""
        rng = np.random.default_rng(7)
        zeros = np.zeros((1, 2, 16), np.float32)
        v_suffix = np.eye(suffix, 16, dtype=np.float32)[None]
        query = Fused(
            q=normal(rng, 1, rows, 16),
            k_suffix=np.zeros((1, suffix, 16), np.float32),
            v_suffix=v_suffix,
            window=1,
        )
        seen = self.answer(zeros, zeros, query).out[0, :, :suffix] > 0
        last = [max(suffix - rows, 0) + m for m in range(rows)]
        assert seen.tolist() == [[s <= last[m] for s in range(suffix)] for m in range(rows)]

    @pytest.mark.parametrize("window", [1, 5, 8, 9, 10])
    def test_token_before_the_window_is_never_seen(self, window: int) -> None:
        zeros = np.zeros((1, 9, 16), np.float32)
        v = np.eye(9, 16, dtype=np.float32)[None]
        q = np.zeros((1, 1, 16), np.float32)
        named = Sparse(
            q=q,
            indices=np.arange(9, dtype=np.int32)[None],
            counts=np.array([9], np.uint32),
            window=window,
        )
        auto = SparseAuto(q=q, block_tokens=2, blocks=5, window=window)
        for query in (Dense(q=q, window=window), named, auto):
            seen = self.answer(zeros, v, query).out[0, 0, :9] > 0
            assert seen.tolist() == [position >= 9 - window for position in range(9)]

    def test_tie_never_prefers_a_later_block_and_the_last_is_never_missing(self) -> None:
        """All keys equal, the last block short: blocks 0, 1 and the last are read."""
        key = normal(np.random.default_rng(8), 1, 1, 64)
        k = np.repeat(key, 50, axis=1)
        v = np.repeat(np.eye(7, 64, dtype=np.float32)[None], 8, axis=1)[:, :50]
        for selector in ("mean", "quest"):
            query = SparseAuto(q=key * 3, block_tokens=8, blocks=2, selector=selector)
            seen = self.answer(k, v, query).out[0, 0, :7] > 0
            assert seen.tolist() == [True, True, False, False, False, False, True], selector

    @pytest.mark.parametrize("selector", ["mean", "quest"])
    def test_block_that_is_no_number_never_changes_the_choice_among_others(
        self, selector: Any
    ) -> None:
        """Blocks of one key, the better the later; every third has none. The last is read anyway."""
        q = np.ones((1, 1, 32), np.float32)
        k = np.linspace(0.1, 3, 30, dtype=np.float32)[None, :, None] * q
        k[:, ::3] = np.nan
        v = np.eye(30, 32, dtype=np.float32)[None]
        query = SparseAuto(q=q, block_tokens=1, blocks=4, selector=selector)
        seen = self.answer(k, v, query).out[0, 0, :30] > 0
        assert np.flatnonzero(seen).tolist() == [25, 26, 28, 29], selector

    def test_selectors_never_agree_where_a_block_mixes_signs(self) -> None:
        """Block 0 holds one key that q matches and one opposite: their mean is nothing."""
        rng = np.random.default_rng(9)
        q = normal(rng, 1, 1, 32)
        k = np.concatenate([q * 5, q * -5, q * 0.1, q * 0.1, q * 0, q * 0], axis=1)
        v = np.repeat(np.eye(3, 32, dtype=np.float32)[None], 2, axis=1)
        chosen = {}
        for selector in ("mean", "quest"):
            query = SparseAuto(q=q, block_tokens=2, blocks=1, selector=selector)
            chosen[selector] = (self.answer(k, v, query).out[0, 0, :3] > 0).tolist()
        assert chosen == {"mean": [False, True, True], "quest": [True, False, True]}

    @pytest.mark.parametrize("magnitude", [1e-40, 1e-20, 1.0, 1e4])
    @pytest.mark.parametrize("kind", [Dense, Fused, Sparse, SparseAuto, SparseAutoFused])
    def test_magnitude_never_breaks_an_answer(self, kind: type[Query], magnitude: float) -> None:
        self.assert_magnitude(kind, magnitude)

    def assert_magnitude(self, kind: type[Query], magnitude: float) -> None:
        rng = np.random.default_rng(10)
        heads, tokens, dim = 2, 70, 32
        factor = np.float32(magnitude)
        k, v = normal(rng, 2, tokens, dim) * factor, normal(rng, 2, tokens, dim) * factor
        fields: dict[str, Any] = {"q": normal(rng, heads, 1, dim) * factor, "with_lse": True}
        if kind in (Fused, SparseAutoFused):
            fields["k_suffix"] = normal(rng, 2, 3, dim) * factor
            fields["v_suffix"] = normal(rng, 2, 3, dim) * factor
        if kind is Sparse:
            fields["indices"] = rng.integers(0, tokens, (heads, 9), np.int32)
            fields["counts"] = np.full(heads, 9, np.uint32)
        if kind in (SparseAuto, SparseAutoFused):
            fields |= {"block_tokens": 8, "blocks": 2}
        query = kind(**fields)
        got, want = self.answer(k, v, query), self.expected(k, v, query)
        assert got.lse is not None
        assert np.isfinite(got.out).all()
        assert np.isfinite(got.lse).all()
        # A device may flush subnormal numbers to zero.
        allowed = max(self.tolerance, SMALLEST_NORMAL / magnitude)
        assert_close(
            Answer(got.out / factor, got.lse), Answer(want.out / factor, want.lse), allowed
        )

    def test_not_a_number_never_warns(self) -> None:
        rng = np.random.default_rng(11)
        k, v, q = normal(rng, 2, 9, 16), normal(rng, 2, 9, 16), normal(rng, 2, 1, 16)
        q[0, 0, 3] = np.nan
        got = self.answer(k, v, Dense(q=q)).out
        assert np.isnan(got[0]).all()
        assert np.isfinite(got[1]).all()
        if self.dtype == "f32":  # infinity is refused where K is held as float16
            k[0, 1:3, 0] = np.inf, -np.inf
            for selector in ("mean", "quest"):
                query = SparseAuto(q=0 * k[:, :1], block_tokens=4, blocks=1, selector=selector)
                assert np.isfinite(self.answer(k, v, query).out).all()

    def test_strided_and_unaligned_input_never_changes_an_answer(self) -> None:
        rng = np.random.default_rng(12)
        k, v, q = normal(rng, 3, 40, 16), normal(rng, 3, 40, 16), normal(rng, 3, 2, 16)
        want = self.answer(k, v, Dense(q=q)).out
        token_major = [np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for a in (k, v)]
        assert np.array_equal(self.answer(token_major[0], token_major[1], Dense(q=q)).out, want)
        shifted = memoryview(b"-" + q.tobytes())[1:]
        odd = parse.tensor(shifted, 3, 16, "q")
        assert np.array_equal(self.answer(k, v, Dense(q=odd)).out, want)

    def test_concurrent_callers_never_get_each_others_answers(self) -> None:
        rng = np.random.default_rng(13)
        backend = self.backend()
        k, v = normal(rng, 4, 200, 32), normal(rng, 4, 200, 32)
        queries = [
            SparseAuto(q=normal(rng, 4, 1, 32), block_tokens=16, blocks=4) for _ in range(24)
        ]
        alone = backend.load(k, v)
        want = [backend.attend(alone, query).out for query in queries]
        fresh = backend.load(k, v)  # its summaries are yet to be made, by several at once
        with ThreadPoolExecutor(8) as threads:
            got = list(threads.map(lambda query: backend.attend(fresh, query).out, queries))
        assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))

    def test_resident_never_misstates_its_size(self) -> None:
        resident = self.backend().load(np.ones((2, 5, 16), "f4"), np.ones((2, 5, 16), "f4"))
        size = 2 if self.dtype == "f16" else 4
        assert (resident.heads, resident.tokens, resident.dim) == (2, 5, 16)
        assert resident.nbytes == 2 * 2 * 5 * 16 * size


class Float16Contract(BackendContract):
    dtype: Dtype = "f16"

    def test_value_beyond_float16_is_never_made_infinite(self) -> None:
        fine, large = np.ones((1, 2, 16), np.float32), np.full((1, 2, 16), 7e4, np.float32)
        for field, k, v in (("k", large, fine), ("v", fine, large)):
            with pytest.raises(QueryError) as caught:
                self.backend().load(k, v)
            assert caught.value.field == field


class HugeValues(BackendContract):
    """For backends that hold float32: magnitudes whose scores float32 cannot hold."""

    @pytest.mark.parametrize("magnitude", [1e15, 1e30, 1e38])
    @pytest.mark.parametrize("kind", [Dense, Fused, Sparse, SparseAuto, SparseAutoFused])
    def test_huge_values_never_overflow(self, kind: type[Query], magnitude: float) -> None:
        self.assert_magnitude(kind, magnitude / 5)

    def test_sum_of_huge_values_never_overflows(self) -> None:
        rng = np.random.default_rng(18)
        k, q, v = normal(rng, 1, 70, 16), normal(rng, 1, 2, 16), np.full((1, 70, 16), 3e38, "f4")
        np.testing.assert_allclose(self.answer(k, v, Dense(q=q)).out, 3e38, rtol=1e-6)


class TestReference(HugeValues):
    tolerance = 1e-6

    def backend(self) -> Backend:
        return the(create, "reference")

    def expected(self, k: Array, v: Array, query: Query) -> Answer:
        return spelled_out(k, v, query)


class TestFast(HugeValues):
    def backend(self) -> Backend:
        return the(create, "numpy")

    def test_largest_case_in_many_tiles_never_differs(self) -> None:
        rng = np.random.default_rng(14)
        k, v, q = normal(rng, 2, 4096, 512), normal(rng, 2, 4096, 512), normal(rng, 32, 64, 512)
        suffix = normal(rng, 2, 64, 512)
        query = Fused(q=q, k_suffix=suffix, v_suffix=-suffix, window=4095, with_lse=True)
        assert_close(self.answer(k, v, query), self.expected(k, v, query), self.tolerance)

    @pytest.mark.parametrize(("selector", "strength"), [("quest", 2.5), ("mean", 8.0)])
    def test_needle_is_never_missed(self, selector: Any, strength: float) -> None:
        """One key of 65,536 that the queries match, at ten depths.

        Of a block's mean a single key is a 64th part: there it must be as large as few keys are.
        """
        rng = np.random.default_rng(15)
        tokens, dim = 65_536, 64
        k, v, wanted = (normal(rng, 1, count, dim) for count in (tokens, tokens, 1))
        q = wanted + normal(rng, 4, 1, dim) / 4  # what four heads ask is alike
        for depth in np.linspace(0, tokens - 1, 10).astype(int):
            planted = k.copy()
            planted[:, depth] = strength * wanted[0]
            query = SparseAuto(q=q, block_tokens=64, blocks=8, selector=selector)
            got = self.answer(planted, v, query).out
            assert_close(Answer(got, None), self.answer(planted, v, Dense(q=q)), 0.05)

    def test_float32_is_never_copied_on_load(self) -> None:
        k = np.ones((1, 4, 16), np.float32)
        resident = self.backend().load(k, k)
        assert np.shares_memory(vars_of(resident)["k"], k)


class TestFastFloat16(Float16Contract):
    def backend(self) -> Backend:
        return the(FastBackend, "f16")

    def test_widening_never_changes_a_finite_pattern(self) -> None:
        """Every finite float16, as the one value of a key's only token."""
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        patterns: Array = every[np.isfinite(every)].reshape(1, 1, -1)
        q = np.zeros(patterns.shape, np.float32)
        got = self.backend().attend(self.backend().load(patterns, patterns), Dense(q=q)).out
        assert np.array_equal(got, patterns.astype(np.float32))


class TestMlx(HugeValues):
    def backend(self) -> Backend:
        return the(create, "mlx")


class TestMlxFloat16(Float16Contract):
    def backend(self) -> Backend:
        return the(MlxBackend, "f16")


def test_mlx_computing_in_float16_is_never_further_off_than_float16_is() -> None:
    """What a GPU does with float16 residency, here on whatever device there is."""
    rng = np.random.default_rng(16)
    k, v = normal(rng, 2, 300, 64), normal(rng, 2, 300, 64)
    q, suffix = normal(rng, 4, 6, 64), normal(rng, 2, 6, 64)
    backend, reference = MlxBackend("f16", compute="f16"), ReferenceBackend("f16")
    for with_lse in (False, True):
        query = Fused(q=q, k_suffix=suffix, v_suffix=-suffix, with_lse=with_lse)
        got = backend.attend(backend.load(k, v), query)
        assert_close(got, reference.attend(reference.load(k, v), query), 5e-3)
        # Neither q nor a score fits float16; then q does, and scores do not.
        for q_factor, k_factor in ((1e6, 1), (1e4, 10)):
            beyond = replace(query, q=q * np.float32(q_factor))
            got = backend.attend(backend.load(k * np.float32(k_factor), v), beyond)
            want = reference.attend(reference.load(k * np.float32(k_factor), v), beyond)
            assert_close(got, want, 1e-5)
    small, large = q.copy(), suffix.copy()
    small[..., 0], large[..., 0] = -1e-4, 1e5  # infinite in float16, the score would be -inf
    beyond = Fused(q=small, k_suffix=large, v_suffix=suffix)
    got = backend.attend(backend.load(k, v), beyond)
    assert_close(got, reference.attend(reference.load(k, v), beyond), 1e-5)
    backend.close()


def vars_of(resident: Resident) -> dict[str, Any]:
    return {name: getattr(resident, name) for name in ("k", "v")}


def spelled_out(k: Array, v: Array, query: Query) -> Answer:
    """Attention by definition: one softmax under a mask that is filled in position by position."""
    heads, rows, dim = query.q.shape
    heads_kv, tokens = k.shape[:2]
    kv = [query.head_map[h] if query.head_map else h * heads_kv // heads for h in range(heads)]
    q64, k64, v64 = (a.astype(np.float64) for a in (query.q, k[kv], v[kv]))
    suffix = 0
    if isinstance(query, Fused | SparseAutoFused):
        suffix = query.k_suffix.shape[1]
        k64 = np.concatenate([k64, query.k_suffix[kv].astype(np.float64)], axis=1)
        v64 = np.concatenate([v64, query.v_suffix[kv].astype(np.float64)], axis=1)
    mask = np.zeros((heads, rows, tokens + suffix), bool)
    inside = [n for n in range(tokens) if query.window == 0 or n >= tokens - query.window]
    for h in range(heads):
        if isinstance(query, Sparse):
            named = set(query.indices[h, : query.counts[h]].tolist())
            mask[h, :, [n for n in inside if n in named]] = True
        elif isinstance(query, SparseAuto):
            size = query.block_tokens
            chosen = spelled_out_blocks(q64[:, 0], k64[:, :tokens], query)
            mask[h, :, [n for n in inside if n // size in chosen]] = True
        else:
            mask[h, :, inside] = True
    for m in range(rows):
        mask[:, m, tokens : tokens + max(suffix - rows, 0) + m + 1] = True
    scale = dim**-0.5 if query.scale is None else query.scale
    scores = np.where(mask, np.einsum("hmd,hnd->hmn", q64, k64) * scale, -np.inf)
    top = scores.max(axis=2, keepdims=True, initial=-np.inf)
    weights = np.where(mask, np.exp(scores - np.where(np.isinf(top), 0, top)), 0)
    total = weights.sum(axis=2)
    out = np.einsum("hmn,hnd->hmd", weights, v64) / np.where(total, total, 1)[..., None]
    limit = float(np.finfo(np.float32).max)
    sums = np.log(np.where(total, total, 1)) + top[..., 0]
    lse = np.where(total, np.clip(sums, -limit, limit), -np.inf)
    return Answer(out.astype(np.float32), lse.astype(np.float32) if query.with_lse else None)


def spelled_out_blocks(q: Array, k: Array, query: SparseAuto) -> set[int]:
    """q [heads][dim], k [heads][tokens][dim]; the choice as the protocol words it."""
    scores = []
    for start in range(0, k.shape[1], query.block_tokens):
        block = k[:, start : start + query.block_tokens]
        if query.selector == "quest":
            best = np.maximum(q * block.min(axis=1), q * block.max(axis=1))
        else:
            best = q * block.mean(axis=1)
        scores.append(float(best.sum(axis=1).mean()))
    order = sorted(range(len(scores)), key=lambda block: -scores[block])
    return {*order[: query.blocks], len(scores) - 1}


class TestMerge:
    def test_half_that_saw_nothing_never_changes_the_other(self) -> None:
        out = normal(np.random.default_rng(0), 2, 3, 16)
        lse = np.zeros((2, 3), np.float32)
        nothing = np.zeros_like(out), np.full((2, 3), -np.inf, np.float32)
        for got in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
            assert np.array_equal(got[0], out)
            assert np.array_equal(got[1], lse)

    def test_two_empty_halves_are_never_nan(self) -> None:
        nothing = np.zeros((2, 16), np.float32), np.full(2, -np.inf, np.float32)
        out, lse = merge(*nothing, *nothing)
        assert not out.any()
        assert np.isneginf(lse).all()

    @pytest.mark.parametrize("score", [-3.4e38, 1e4, 3.4e38])
    def test_large_scores_never_overflow(self, score: float) -> None:
        one, two = np.ones((1, 4), np.float32), np.full((1, 4), 3, np.float32)
        lse = np.array([score], np.float32)
        out, joined = merge(one, lse, two, lse)
        assert out.dtype == joined.dtype == np.float32
        np.testing.assert_allclose(out, 2)
        np.testing.assert_allclose(joined, score + math.log(2), rtol=1e-6)


class TestSummaries:
    def test_summary_is_never_computed_twice(self) -> None:
        kept, calls = Summaries(1 << 20), []
        k = normal(np.random.default_rng(0), 1, 64, 16)

        def keys() -> Array:
            calls.append(1)
            return k

        probe = np.ones(16)
        first = kept.products(keys, 16, "mean", probe)
        np.testing.assert_array_equal(kept.products(keys, 16, "mean", probe), first)
        np.testing.assert_allclose(first, k.reshape(4, 16, 16).mean(axis=1).sum(axis=1), atol=1e-6)
        kept.products(keys, 16, "quest", np.ones(32))
        assert len(calls) == 2

    def test_summaries_never_outgrow_their_bound(self) -> None:
        k = normal(np.random.default_rng(0), 1, 64, 16)
        kept, calls = Summaries(2 * 4 * 16 * 8), []

        def keys() -> Array:
            calls.append(1)
            return k

        for block_tokens in (16, 17, 18, 16, 1, 1):  # the third drops the first; 1 never fits
            kept.products(keys, block_tokens, "mean", np.ones(16))
        assert len(calls) == 6

    @pytest.mark.parametrize("selector", ["mean", "quest"])
    def test_a_summary_too_large_to_keep_does_not_rank_otherwise_nor_exist_whole(
        self, selector: Selector
    ) -> None:
        tokens, dim = 150_001, 16
        k = normal(np.random.default_rng(0), 1, tokens, dim)
        probe = np.random.default_rng(1).standard_normal(dim * (1 if selector == "mean" else 2))
        whole = Summaries(1 << 30).products(lambda: k, 2, selector, probe)
        tracemalloc.start()
        slabs = Summaries(1 << 20).products(lambda: k, 2, selector, probe)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        np.testing.assert_allclose(slabs, whole, rtol=0, atol=1e-12)
        assert len(whole) == 75_001
        assert peak < 5 * SLAB_BYTES


class TestCheck:
    """A request that does not fit is refused with the field's name, before anything is computed."""

    resident = Resident(heads=2, tokens=9, dim=16, nbytes=0)
    q = np.ones((4, 1, 16), np.float32)
    suffix = np.ones((2, 3, 16), np.float32)
    indices, counts = np.zeros((4, 5), np.int32), np.full(4, 5, np.uint32)

    def fused(self, **changed: Any) -> Fused:
        return Fused(**({"q": self.q, "k_suffix": self.suffix, "v_suffix": self.suffix} | changed))

    def sparse(self, **changed: Any) -> Sparse:
        return Sparse(**({"q": self.q, "indices": self.indices, "counts": self.counts} | changed))

    def auto(self, **changed: Any) -> SparseAuto:
        fields: dict[str, Any] = {"q": self.q, "block_tokens": 4, "blocks": 1}
        return SparseAuto(**(fields | changed))

    def test_fitting_query_is_never_refused(self) -> None:
        queries = [Dense(q=self.q), self.fused(), self.sparse(), self.auto()]
        queries += [replace(query, head_map=bytes([1, 0, 1, 0])) for query in queries]
        for query in queries:
            check(query, self.resident)

    @pytest.mark.parametrize(
        ("field", "changed"),
        [
            ("q", {"q": np.ones((4, 16), np.float32)}),
            ("q", {"q": np.ones((4, 1, 16))}),
            ("q", {"q": np.ones((4, 0, 16), np.float32)}),
            ("q", {"q": np.ones((0, 1, 16), np.float32)}),
            ("q", {"q": np.ones((3, 1, 16), np.float32)}),
            ("q", {"q": np.ones((4, 1, 15), np.float32)}),
            ("head_map", {"head_map": bytes(3)}),
            ("head_map", {"head_map": bytes([0, 1, 2, 0])}),
            ("window", {"window": -1}),
            ("scale", {"scale": 0.0}),
            ("scale", {"scale": math.inf}),
            ("scale", {"scale": math.nan}),
            ("k_suffix", {"k_suffix": np.ones((1, 3, 16), np.float32)}),
            ("k_suffix", {"k_suffix": np.ones((2, 48), np.float32)}),
            ("v_suffix", {"v_suffix": np.ones((2, 4, 16), np.float32)}),
            ("v_suffix", {"v_suffix": np.ones((2, 3, 16))}),
        ],
    )
    def test_misfit_is_never_computed(self, field: str, changed: dict[str, Any]) -> None:
        with pytest.raises(QueryError) as caught:
            check(self.fused(**changed), self.resident)
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("field", "changed"),
        [
            ("q", {"q": np.ones((4, 2, 16), np.float32)}),
            ("indices", {"indices": np.zeros((3, 5), np.int32)}),
            ("indices", {"indices": np.zeros((4, 5), np.int64)}),
            ("counts", {"counts": np.full(4, 6, np.uint32)}),
            ("counts", {"counts": np.full(3, 5, np.uint32)}),
            ("counts", {"counts": np.full(4, 5, np.int32)}),
        ],
    )
    def test_misfit_of_indices_is_never_computed(self, field: str, changed: dict[str, Any]) -> None:
        with pytest.raises(QueryError) as caught:
            check(self.sparse(**changed), self.resident)
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("field", "changed"),
        [
            ("q", {"q": np.ones((4, 2, 16), np.float32)}),
            ("block_tokens", {"block_tokens": 0}),
            ("blocks", {"blocks": 0}),
            ("selector", {"selector": "median"}),
        ],
    )
    def test_misfit_of_blocks_is_never_computed(self, field: str, changed: dict[str, Any]) -> None:
        with pytest.raises(QueryError) as caught:
            check(self.auto(**changed), self.resident)
        assert caught.value.field == field


class TestBytes:
    def test_rows_never_follow_from_anything_but_the_length(self) -> None:
        a = normal(np.random.default_rng(0), 2, 3, 16)
        assert np.array_equal(parse.tensor(a.tobytes(), 2, 16, "q"), a)
        assert parse.tensor(b"", 2, 16, "k_suffix").shape == (2, 0, 16)

    @pytest.mark.parametrize(
        ("size", "heads", "dim", "rows"),
        [(127, 2, 16, None), (129, 2, 16, None), (256, 2, 16, 1), (128, 2, 16, 2), (128, 0, 16, 1)],
    )
    def test_wrong_length_is_never_reshaped(
        self, size: int, heads: int, dim: int, rows: int | None
    ) -> None:
        with pytest.raises(QueryError) as caught:
            parse.tensor(bytes(size), heads, dim, "v", rows)
        assert caught.value.field == "v"

    def test_index_table_is_never_read_beyond_its_bytes(self) -> None:
        assert parse.indices(bytes(24), 2, 3).shape == (2, 3)
        assert parse.counts(bytes(8), 2).dtype == np.uint32
        for size, heads, width in ((20, 2, 3), (28, 2, 3), (24, -2, -3), (0, 2**40, 2**40)):
            with pytest.raises(QueryError):
                parse.indices(bytes(size), heads, width)
        with pytest.raises(QueryError):
            parse.counts(bytes(9), 2)


def test_mlx_is_never_imported_unless_asked_for() -> None:
    code = (
        "import sys; from pion_grpc.backends import create; create('numpy'); create('reference');"
        "sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_is_never_mlx_off_the_mac() -> None:
    on_mac = sys.platform == "darwin"
    assert the(create, "auto").name == ("mlx" if on_mac else "numpy")
