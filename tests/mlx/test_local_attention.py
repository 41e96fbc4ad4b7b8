"""Attention over rows that are here, against the reference that defines the server's answers."""

import mlx.core as mx
import numpy as np
import pytest

from pion_client.local_attention import Blocks, Part, attend, merge, over_blocks, summarise
from pion_grpc.backends import Dense, Fused, SparseAutoFused
from pion_grpc.backends.reference import attend as reference

SHAPES = [(1, 1, 64, 1, 32), (2, 3, 100, 5, 16), (4, 2, 130, 9, 64), (3, 1, 1, 2, 8)]
"""K/V heads, query heads for each, rows of a prefix, rows of a suffix, values."""


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def both(prefix, suffix):
    return mx.array(np.concatenate([prefix, suffix], axis=1))[None]


def sides(kv_heads, prefix_rows, suffix_rows, dim):
    rows = (prefix_rows, prefix_rows, suffix_rows, suffix_rows)
    return [normal(seed, kv_heads, count, dim) for seed, count in enumerate(rows)]


@pytest.mark.parametrize("shape", SHAPES)
def test_two_parts_do_not_join_to_anything_but_the_whole(shape):
    kv_heads, per_kv, prefix_rows, suffix_rows, dim = shape
    k, v, suffix_k, suffix_v = sides(kv_heads, prefix_rows, suffix_rows, dim)
    scale = dim**-0.5
    for queries in {1, suffix_rows}:
        q = normal(9, kv_heads * per_kv, queries, dim)
        theirs = reference(k, v, Dense(q=q, with_lse=True))
        mine = attend(
            mx.array(q)[None], mx.array(suffix_k)[None], mx.array(suffix_v)[None], scale, "causal"
        )
        joined = merge(Part(mx.array(theirs.out), mx.array(theirs.lse)), mine)
        want = reference(k, v, Fused(q=q, k_suffix=suffix_k, v_suffix=suffix_v)).out
        np.testing.assert_allclose(np.asarray(joined), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "additive"])
def test_no_kind_of_mask_is_taken_for_another(kind):
    q, k, v = normal(1, 4, 3, 16), normal(2, 2, 5, 16), normal(3, 2, 5, 16)
    visible = np.tril(np.ones((3, 5), bool), 2)
    masks = {
        "none": (None, np.ones((3, 5), bool)),
        "causal": ("causal", visible),
        "boolean": (mx.array(visible), visible),
        "additive": (mx.array(np.where(visible, 0, -np.inf).astype(np.float32))[None], visible),
    }
    mask, seen = masks[kind]
    got = attend(mx.array(q)[None], mx.array(k)[None], mx.array(v)[None], 0.25, mask)
    for head in range(4):
        scores = q[head] @ k[head // 2].T * 0.25
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum(axis=1)
        want = weights @ v[head // 2] / total[:, None]
        np.testing.assert_allclose(np.asarray(got.out)[head], want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.asarray(got.lse)[head], np.log(total), rtol=0, atol=1e-5)


def test_scores_that_exp_cannot_hold_are_joined_all_the_same():
    one = Part(mx.array([[[1.0]]]), mx.array([[500.0]]))
    other = Part(mx.array([[[2.0]]]), mx.array([[-500.0]]))
    assert merge(one, other).item() == 1.0
    assert merge(other, one).item() == 1.0
    nothing = Part(mx.array([[[0.0]]]), mx.array([[-np.inf]]))
    assert merge(one, nothing).item() == 1.0


@pytest.mark.parametrize("selector", ["mean", "quest"])
@pytest.mark.parametrize(
    ("size", "count"), [(16, 2), (16, 4), (7, 3), (1, 5), (1_000, 1), (16, 50)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_other_blocks_than_the_servers_are_never_chosen(shape, size, count, selector):
    kv_heads, per_kv, prefix_rows, suffix_rows, dim = shape
    k, v, suffix_k, suffix_v = sides(kv_heads, prefix_rows, suffix_rows, dim)
    choice = Blocks(size, count, selector)
    summary = summarise(mx.array(k), choice)
    for seed in range(3):
        q = normal(10 + seed, kv_heads * per_kv, 1, dim)
        got = over_blocks(
            mx.array(q)[None],
            both(k, suffix_k),
            both(v, suffix_v),
            prefix_rows,
            summary,
            choice,
            dim**-0.5,
        )
        query = SparseAutoFused(
            q=q,
            k_suffix=suffix_k,
            v_suffix=suffix_v,
            block_tokens=size,
            blocks=count,
            selector=selector,
        )
        want = reference(k, v, query).out
        np.testing.assert_allclose(np.asarray(got)[0], want, rtol=0, atol=1e-5)
