"""Attention in MLX over rows that are here: with its log-sum-exp, joined, and over chosen blocks.

Knows arrays; neither caches, models nor servers. Everything stays lazy: nothing is evaluated here, so
a forward pass that uses it is still evaluated once. The formulas are the server's (`Attend` in the
protos). Blocks are chosen on the device: their rows are gathered, and masked where a block is short or
would count twice.

Shapes: q [1][heads][queries][dim]; k, v [1][kv heads][rows][dim]; query head h reads K/V head
h // (heads / kv heads).
"""

from typing import Any, Literal, NamedTuple

import mlx.core as mx

Selector = Literal["mean", "quest"]


class Blocks(NamedTuple):
    """Which rows of a prefix are looked at: the best blocks, and the last."""

    block_rows: int
    blocks: int
    selector: Selector


class Part(NamedTuple):
    """Attention over some rows."""

    out: mx.array
    """float32 [heads][queries][dim]."""
    lse: mx.array
    """float32 [heads][queries]: the log-sum-exp of the scaled scores."""


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any) -> Part:
    """Attention with its log-sum-exp, in float32.

    Args:
        q, k, v: see the module.
        scale: what scores are multiplied with.
        mask: None, "causal" (aligned at the end), or an array that broadcasts to
            [heads][queries][rows]: booleans, or numbers to add.
    """
    _, heads, queries, dim = q.shape
    kv_heads, rows = k.shape[1:3]
    folded = (q.astype(mx.float32) * scale).reshape(kv_heads, -1, dim)
    scores = (folded @ k[0].astype(mx.float32).swapaxes(-1, -2)).reshape(heads, queries, rows)
    if isinstance(mask, str):
        mask = mx.arange(rows) <= mx.arange(rows - queries, rows)[:, None]
    if mask is not None:
        mask = mask[0] if mask.ndim == 4 else mask
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    lse = mx.logsumexp(scores, axis=-1)
    weights = mx.exp(scores - lse[..., None]).reshape(kv_heads, -1, rows)
    out = (weights @ v[0].astype(mx.float32)).reshape(heads, queries, dim)
    return Part(out, lse)


def merge(one: Part, other: Part) -> mx.array:
    """Joins attention over two sets of rows: [heads][queries][dim].

    Weights are taken relative to the larger log-sum-exp, so nothing overflows (Milakov and Gimelshein
    2018, arXiv:1805.02867). At least one of the two has seen a row.
    """
    top = mx.maximum(one.lse, other.lse)
    weights = mx.exp(one.lse - top), mx.exp(other.lse - top)
    total = (weights[0] + weights[1])[..., None]
    return one.out * (weights[0][..., None] / total) + other.out * (weights[1][..., None] / total)


def summarise(keys: mx.array, choice: Blocks) -> mx.array:
    """What ranks the blocks of keys [kv heads][rows][dim]: float32 [blocks][features].

    "mean": the mean of each block; "quest": its largest values, then its smallest. The last block may
    be short.
    """
    size, rows = choice.block_rows, keys.shape[1]
    whole = rows // size * size
    cut = [keys[:, :whole].reshape(keys.shape[0], -1, size, keys.shape[2])] if whole else []
    if whole < rows:
        cut.append(keys[:, None, whole:])
    cut = [block.astype(mx.float32) for block in cut]
    if choice.selector == "mean":
        features = [mx.concatenate([block.mean(axis=2) for block in cut], axis=1)]
    else:
        features = [
            mx.concatenate([block.max(axis=2) for block in cut], axis=1),
            mx.concatenate([block.min(axis=2) for block in cut], axis=1),
        ]
    by_block = [feature.swapaxes(0, 1).reshape(feature.shape[1], -1) for feature in features]
    return mx.concatenate(by_block, axis=1)


def over_blocks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    prefix_rows: int,
    summary: mx.array,
    choice: Blocks,
    scale: float,
) -> mx.array:
    """Attention of one query per head over chosen blocks of the first rows, and over all later ones.

    Args:
        q, k, v: see the module; rows from `prefix_rows` on are a suffix, visible whole.
        prefix_rows: how many rows are chosen from.
        summary: of the first rows (`summarise`).
        choice: how.
        scale: what scores are multiplied with.

    Returns:
        [1][heads][1][dim], of q's type.
    """
    if choice.blocks * choice.block_rows >= prefix_rows:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=None)
    last = summary.shape[0] - 1
    best = mx.argsort(-_ranks(q, k.shape[1], summary, choice))[: choice.blocks]
    blocks = mx.concatenate([best, mx.array([last], best.dtype)])
    twice = (best == last).any()
    rows = blocks[:, None] * choice.block_rows + mx.arange(choice.block_rows, dtype=best.dtype)
    visible = rows < prefix_rows
    visible[-1] = visible[-1] & ~twice
    chosen = mx.minimum(rows, prefix_rows - 1).reshape(-1)
    keys = mx.concatenate([k[:, :, chosen], k[:, :, prefix_rows:]], axis=2)
    values = mx.concatenate([v[:, :, chosen], v[:, :, prefix_rows:]], axis=2)
    suffix = mx.ones(k.shape[2] - prefix_rows, mx.bool_)
    mask = mx.concatenate([visible.reshape(-1), suffix])
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def _ranks(q: mx.array, kv_heads: int, summary: mx.array, choice: Blocks) -> mx.array:
    """What orders blocks: the same for all heads, so that heads may be summed first."""
    by_kv = q[0, :, 0].astype(mx.float32).reshape(kv_heads, -1, q.shape[3])
    if choice.selector == "mean":
        return summary @ by_kv.sum(axis=1).reshape(-1)
    signs = mx.maximum(by_kv, 0).sum(axis=1), mx.minimum(by_kv, 0).sum(axis=1)
    return summary @ mx.concatenate([sign.reshape(-1) for sign in signs])
