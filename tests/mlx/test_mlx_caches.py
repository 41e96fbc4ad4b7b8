"""Caches taken apart and put together again: exactly, or refused by name; never approximately."""

import os

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache, make_prompt_cache

from pion_client import caches
from pion_grpc.cli.smollm2 import random_llama
from pion_wire.layout import DType, Layout, Side

TOKENS = 37


@pytest.fixture(scope="module")
def model():
    return random_llama()


def prefilled(model, count=TOKENS, start=0, cache=None):
    cache = make_prompt_cache(model) if cache is None else cache
    ids = (mx.arange(start, start + count) * 7919) % 512
    model(ids[None], cache=cache)
    mx.eval([slot.state for slot in cache])
    return cache


def as_mlx(rows):
    """What a fetch returns: token-major memory, seen as (kv_heads, tokens, head_dim)."""
    fetched = []
    for side in rows:
        bits = side.view(np.uint16) if side.dtype == ml_dtypes.bfloat16 else side
        array = mx.array(np.ascontiguousarray(bits.transpose(1, 0, 2)))
        array = array.view(mx.bfloat16) if side.dtype == ml_dtypes.bfloat16 else array
        fetched.append(array.transpose(1, 0, 2))
    return tuple(fetched)


def bits(array):
    return np.asarray(array.view({2: mx.uint16, 4: mx.uint32}[array.itemsize]))


def next_logits(model, cache, steps=4):
    """Logits of a question of 3 tokens and then of single tokens, which use the cache's buffer."""
    logits = [model(mx.array([[5, 6, 7]]), cache=cache)[0, -1]]
    for token in range(steps):
        logits.append(model(mx.array([[token]]), cache=cache)[0, -1])
    return mx.stack(logits)


# What is taken


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_bit_and_no_type_is_lost_on_the_way_through_numpy(dtype):
    model = random_llama(dtype=dtype)
    cache = prefilled(model)
    rows = caches.take(cache)
    expected = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    assert len(rows) == len(cache)
    for slot, (keys, values) in zip(cache, rows, strict=True):
        for side, buffer in ((keys, slot.keys), (values, slot.values)):
            assert side.shape == (2, TOKENS, 16)
            assert side.dtype == expected
            used = bits(buffer)[0, :, :TOKENS]
            assert np.array_equal(side.view(used.dtype), used)


def test_what_is_appended_later_does_not_show_in_rows_taken_before(model):
    cache = prefilled(model)
    rows = caches.take(cache)
    before = [(k.copy(), v.copy()) for k, v in rows]
    for start in range(TOKENS, 600, 90):  # within the buffer, and beyond it
        prefilled(model, 90, start, cache)
    mlx_lm_cache.trim_prompt_cache(cache, 590)
    prefilled(model, 30, 3, cache)  # over the very rows that were taken
    for (k, v), (k_before, v_before) in zip(rows, before, strict=True):
        assert np.array_equal(k, k_before)
        assert np.array_equal(v, v_before)


def test_rows_taken_cannot_be_written_to(model):
    keys, _ = caches.take(prefilled(model))[0]
    with pytest.raises(ValueError, match="read-only"):
        keys[0, 0, 0] = 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_taking_does_not_copy(dtype):
    cache = prefilled(random_llama(dtype=dtype))
    for slot, rows in zip(cache, caches.take(cache), strict=True):
        for side, buffer in zip(rows, (slot.keys, slot.values), strict=True):
            assert np.shares_memory(side.view(bits(buffer).dtype), bits(buffer))


# What is put back


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_installed_cache_does_not_continue_otherwise_than_the_one_it_came_from(dtype):
    model = random_llama(dtype=dtype)
    source = prefilled(model)
    copy = make_prompt_cache(model)
    layout = caches.expected_layout(model)
    caches.install(copy, [as_mlx(rows) for rows in caches.take(source)], layout, TOKENS)
    assert [type(slot) for slot in copy] == [type(slot) for slot in source]
    assert [slot.offset for slot in copy] == [TOKENS] * len(source)
    assert np.array_equal(bits(next_logits(model, copy)), bits(next_logits(model, source)))


def test_an_installed_cache_is_not_told_from_one_that_mlx_lm_loaded(model, tmp_path):
    source = prefilled(model)
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), source)
    loaded = mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    copy = make_prompt_cache(model)
    layout = caches.expected_layout(model)
    caches.install(copy, [as_mlx(rows) for rows in caches.take(source)], layout, TOKENS)
    for mine, theirs in zip(copy, loaded, strict=True):
        assert mine.size() == theirs.size()
        assert mine.is_trimmable() == theirs.is_trimmable()
        for side, other in zip(mine.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert mx.array_equal(side, other)
    for cache in (copy, loaded):
        assert mlx_lm_cache.trim_prompt_cache(cache, 5) == 5
    assert np.array_equal(bits(next_logits(model, copy)), bits(next_logits(model, loaded)))


MISFITS = {
    "a row less": lambda layers: [layers[0], (layers[1][0], layers[1][1][:, 1:])],
    "a head less": lambda layers: [layers[0], (layers[1][0][:1], layers[1][1])],
    "a value less": lambda layers: [layers[0], (layers[1][0][..., 1:], layers[1][1])],
    "another type": lambda layers: [layers[0], (layers[1][0].astype(mx.float16), layers[1][1])],
    "the same bits": lambda layers: [layers[0], (layers[1][0].view(mx.uint32), layers[1][1])],
    "a slot less": lambda layers: layers[:1],
    "a slot more": lambda layers: [*layers, layers[0]],
}


@pytest.mark.parametrize("spoil", MISFITS.values(), ids=MISFITS)
def test_a_misfit_in_the_last_slot_leaves_no_slot_filled(model, spoil):
    layers = [as_mlx(rows) for rows in caches.take(prefilled(model))]
    cache = make_prompt_cache(model)
    with pytest.raises(caches.CacheMismatch):
        caches.install(cache, spoil(layers), caches.expected_layout(model), TOKENS)
    assert all(slot.empty() and slot.offset == 0 for slot in cache)


def test_a_cache_that_holds_something_is_not_overwritten(model):
    layers = [as_mlx(rows) for rows in caches.take(prefilled(model))]
    cache = prefilled(model, 5)
    with pytest.raises(caches.CacheMismatch, match="not empty"):
        caches.install(cache, layers, caches.expected_layout(model), TOKENS)
    assert cache[0].offset == 5


# What is expected of a model


def test_the_expected_layout_is_not_other_than_what_a_prefill_leaves(model):
    layout = caches.expected_layout(model)
    assert layout == caches.layout_of(prefilled(model))
    assert isinstance(layout, Layout)
    assert [(t.slot, t.side, t.heads, t.head_dim, t.dtype) for t in layout.tensors] == [
        (slot, side, 2, 16, DType.F32) for slot in range(2) for side in Side
    ]


def test_asking_for_the_layout_does_not_run_the_model(tmp_path):
    file = tmp_path / "rows.safetensors"
    mx.save_safetensors(str(file), {"rows": mx.zeros((1, 2, 1, 8))})
    poison = mx.load(str(file))["rows"]
    os.truncate(file, 64)  # lazy: its shape is known, evaluating it fails

    class Poisoned:
        layers = (None,)

        def __call__(self, tokens, cache):
            cache[0].update_and_fetch(poison, poison)

    assert [t.head_dim for t in caches.expected_layout(Poisoned()).tensors] == [8, 8]
    with pytest.raises(RuntimeError):
        mx.eval(poison)


def test_sides_of_different_width_are_not_mixed_up():
    class Latent:
        layers = (None,)

        def __call__(self, tokens, cache):
            n = tokens.shape[1]
            cache[0].update_and_fetch(mx.zeros((1, 1, n, 512)), mx.zeros((1, 1, n, 64)))

    assert [t.head_dim for t in caches.expected_layout(Latent()).tensors] == [512, 64]


# What is refused


class NearlyKVCache(KVCache):
    """A subclass may keep anything."""


REFUSED = [
    mlx_lm_cache.BatchKVCache([0]),
    mlx_lm_cache.BatchRotatingKVCache(8, [0]),
    NearlyKVCache(),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda cache: type(cache).__name__)
def test_no_class_is_taken_for_another(refused):
    inside = mlx_lm_cache.CacheList(KVCache(), refused)
    for use in (caches.require_supported, caches.expected_of, caches.take):
        for cache in ([KVCache(), refused], [KVCache(), inside]):
            with pytest.raises(caches.UnsupportedCache, match=f"^{type(refused).__name__}: "):
                use(cache)


def test_a_cache_of_several_sequences_is_not_taken_for_one(model):
    cache = make_prompt_cache(model)
    model(mx.zeros((2, 3), dtype=mx.int32), cache=cache)
    with pytest.raises(caches.UnsupportedCache, match="2 sequences"):
        caches.take(cache)


def test_rows_of_a_type_that_is_not_stored_are_refused():
    cache = KVCache()
    rows = mx.zeros((1, 1, 2, 4), dtype=mx.int8)
    cache.update_and_fetch(rows, rows)
    with pytest.raises(caches.UnsupportedCache, match="int8"):
        caches.layout_of([cache])


def test_a_model_that_leaves_every_slot_empty_is_refused():
    with pytest.raises(caches.UnsupportedCache, match="every slot empty"):
        caches.expected_of([KVCache()])


PARTS_ONLY = [
    mlx_lm_cache.RotatingKVCache(max_size=8),
    mlx_lm_cache.QuantizedKVCache(),
    mlx_lm_cache.ArraysCache(2),
    mlx_lm_cache.CacheList(KVCache(), KVCache()),
]


@pytest.mark.parametrize("other", PARTS_ONLY, ids=lambda cache: type(cache).__name__)
def test_attention_on_the_server_is_not_offered_what_is_not_rows(other):
    caches.require_rows([KVCache()])
    with pytest.raises(caches.UnsupportedCache, match=f"^{type(other).__name__}: "):
        caches.require_rows([KVCache(), other])
