"""Every cache class of mlx-lm, taken apart and put together again: the same bits, or a refusal."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pion_client import Part, caches
from pion_client.adapters import arrays_of, with_arrays
from pion_client.parts import Taken, contents_of, described

HEADS, DIM = 2, 32
BEFORE_0_32 = hasattr(KVCache, "meta_state")
"""Which of the two versions of mlx-lm this runs with: `meta_state` became a part of `state`."""


def fresh_rows(count, dtype=mx.float32, seed=0, heads=HEADS, dim=DIM):
    key = mx.random.key(seed)
    return mx.random.normal((1, heads, count, dim), key=key).astype(dtype)


class Written:
    """A cache that was written to in pieces, as a model does it."""

    def __init__(self, make, pieces, dtype=mx.float32):
        self.make, self.pieces, self.dtype = make, pieces, dtype
        self.cache = make()
        for seed, count in enumerate(pieces):
            write(self.cache, count, seed, dtype)

    @property
    def tokens(self):
        return sum(self.pieces)


def write(cache, count, seed, dtype=mx.float32):
    """One update; returns everything that attention would see."""
    if isinstance(cache, CacheList):
        return [write(inner, count, seed, dtype) for inner in cache.caches]
    if isinstance(cache, ArraysCache):
        conv, state = cache[0], cache[1]
        new = fresh_rows(count, dtype, seed)[0, 0]
        cache[0] = new[None, -1:] if conv is None else conv * 0.5 + new[None, -1:]
        total = mx.sum(new.astype(mx.float32), axis=0)
        cache[1] = total[None] if state is None else state * 0.9 + total[None]
        return [cache[0], cache[1]]
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    seen = cache.update_and_fetch(
        fresh_rows(count, dtype, seed), fresh_rows(count, dtype, seed + 1000)
    )
    return [array for side in seen for array in (side if isinstance(side, tuple) else (side,))]


def flat(seen):
    for entry in seen:
        yield from flat(entry) if isinstance(entry, list) else (entry,)


def raw(array):
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def assert_same(seen, other):
    seen, other = list(flat(seen)), list(flat(other))
    assert len(seen) == len(other)
    for mine, theirs in zip(seen, other, strict=True):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(raw(mine), raw(theirs))


def as_fetched(rows):
    """Rows as a fetch brings them, in MLX arrays of their own."""

    def array(side):
        if side.dtype.itemsize == 4:
            return mx.array(side)
        return mx.array(side.view(np.uint16)).view(mx.bfloat16)

    return [
        tuple(with_arrays(side, [array(a) for a in arrays_of(side)]) for side in pair)
        for pair in rows
    ]


def travelled(parts):
    """Parts as they come from the wire: other memory, the same bytes."""
    return [
        Part(p.kind, p.slot, p.boundary_tokens, b"".join(p.buffers), p.description)
        for p in (taken.part() for taken in parts)
    ]


def copied(written, change=lambda parts: parts):
    """The same cache, made from rows and parts."""
    source, copy = [written.cache], [written.make()]
    found = caches.expected_of(source)
    rows, parts = caches.take(source), caches.take_parts(source, written.tokens)
    caches.install(
        copy,
        as_fetched(rows),
        found.layout,
        written.tokens,
        parts=change(travelled(parts)),
        needs=found.needs,
    )
    return copy[0]


def ring(keep=0, size=16):
    return lambda: RotatingKVCache(max_size=size, keep=keep)


def chunked():
    return ChunkedKVCache(16)


def quantized():
    return QuantizedKVCache(group_size=32, bits=4)


WRITTEN = {
    "rows": (KVCache, (7,)),
    "rows beyond a buffer": (KVCache, (250, 1, 1, 40)),
    "concatenated rows": (ConcatenateKVCache, (7, 3, 1)),
    "a ring below its window": (ring(), (7,)),
    "a ring that grows by single tokens": (ring(), (1,) * 9),
    "a ring at its window": (ring(), (16,)),
    "a ring at its window by single tokens": (ring(), (1,) * 16),
    "a ring beyond its window": (ring(), (40,)),
    "a ring filled and gone round": (ring(), (10, *(1,) * 11)),
    "a ring gone round and appended to": (ring(), (10, *(1,) * 11, 5)),
    "a ring appended to and gone round": (ring(), (40, *(1,) * 21)),
    "a ring larger than a step": (ring(size=300), (200, *(1,) * 120)),
    "a ring that keeps its first rows": (ring(keep=4), (40, 1, 1, 1)),
    "a ring that keeps rows, gone round": (ring(keep=4), (3, *(1,) * 40)),
    "a ring that keeps rows, after a prefill": (ring(keep=4), (40,)),
    "codes": (quantized, (7, 1)),
    "codes beyond a buffer": (quantized, (250, 1, 40)),
    "codes of 8 bits": (lambda: QuantizedKVCache(group_size=32, bits=8), (9,)),
    "a chunk": (chunked, (7,)),
    "a chunk that was cut": (chunked, (40, 3, 1, 1)),
    "a chunk that is to be cut": (chunked, (40,)),
    "state": (lambda: ArraysCache(2), (7, 1)),
    "state of which the model leaves one out": (lambda: ArraysCache(3), (7,)),
    "a list": (lambda: CacheList(ArraysCache(2), KVCache()), (7, 1)),
    "a list in a list": (lambda: CacheList(CacheList(KVCache(), ring()()), ArraysCache(2)), (40,)),
}


if BEFORE_0_32:  # its chunks raise where they are smaller than the buffer
    WRITTEN = {name: how for name, how in WRITTEN.items() if how[0] is not chunked}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRITTEN)
def test_no_class_continues_otherwise_than_what_it_was_taken_from(name, dtype):
    written = Written(*WRITTEN[name], dtype)
    copy = copied(written)
    assert type(copy) is type(written.cache)
    for seed, count in enumerate([1] * 20 + [3, 30, 1, 1], 100):
        assert_same(write(copy, count, seed, dtype), write(written.cache, count, seed, dtype))
        for method in ("size", "is_trimmable"):
            assert getattr(copy, method)() == getattr(written.cache, method)()


LOADABLE = [
    name
    for name, (make, _) in WRITTEN.items()
    if not BEFORE_0_32 or not ("a list in" in name or "leaves one" in name or make is chunked)
]
"""Before 0.32 mlx-lm saves the others, and cannot load them, or not all of them."""


@pytest.mark.parametrize("name", LOADABLE)
def test_no_class_continues_otherwise_than_what_mlx_lm_saved(name, tmp_path):
    written = Written(*WRITTEN[name])
    path = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(path, [written.cache])
    (loaded,) = mlx_lm_cache.load_prompt_cache(path)
    copy = copied(written)
    for seed, count in enumerate((1, 1, 5, 1), 100):
        assert_same(write(copy, count, seed), write(loaded, count, seed))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_later_does_not_show_in_what_was_taken(name):
    written = Written(*WRITTEN[name])
    parts, rows = caches.take_parts([written.cache], written.tokens), caches.take([written.cache])
    before = [b"".join(taken.part().buffers) for taken in parts]
    rows_before = [[a.copy() for side in pair for a in arrays_of(side)] for pair in rows]
    for seed in range(40):
        mx.eval(list(flat(write(written.cache, 1, seed))))
    assert [b"".join(taken.part().buffers) for taken in parts] == before
    for pair, pair_before in zip(rows, rows_before, strict=True):
        now = [array for side in pair for array in arrays_of(side)]
        assert all(np.array_equal(a, b) for a, b in zip(now, pair_before, strict=True))


def test_recurrent_state_in_f32_and_bf16_is_not_brought_to_one_type():
    written = Written(lambda: ArraysCache(2), (7,), mx.bfloat16)
    (taken,) = caches.take_parts([written.cache], 7)
    assert [dtype for dtype, _ in json.loads(taken.description)["arrays"]] == ["BF16", "F32"]
    assert [array.dtype for array in copied(written).cache] == [mx.bfloat16, mx.float32]


@pytest.mark.parametrize("pattern", [0x7FC1, 0xFFFF, 0x7F80, 0x8000, 0x0001])
def test_bits_of_bf16_that_are_no_number_are_not_mended(pattern):
    cache = ArraysCache(1)
    cache[0] = mx.full((1, 3, 4), pattern, dtype=mx.uint16).view(mx.bfloat16)
    (taken,) = caches.take_parts([cache], 1)
    found = caches.expected_of([cache])
    copy = ArraysCache(1)
    parts = travelled([taken])
    caches.install([copy], [], found.layout, 1, parts=parts, needs=found.needs)
    assert np.all(raw(copy[0]) == pattern)


def test_a_ring_does_not_take_rows_along_that_it_will_not_look_at():
    written = Written(ring(), (2000,))
    (taken,) = caches.take_parts([written.cache], 2000)
    assert taken.size_bytes == 2 * HEADS * 16 * DIM * 4
    written = Written(ring(size=1000), (1,) * 9)
    (taken,) = caches.take_parts([written.cache], 9)
    assert taken.size_bytes == 2 * HEADS * 9 * DIM * 4


def test_a_slot_that_the_model_leaves_empty_is_not_filled():
    caches_made = [KVCache(), KVCache(), ring()()]
    write(caches_made[1], 7, 1)
    found = caches.expected_of(caches_made)
    assert (found.slots, found.needs) == ((1,), ())
    copy = [KVCache(), KVCache(), ring()()]
    caches.install(copy, as_fetched(caches.take(caches_made)), found.layout, 7)
    assert copy[0].empty()
    assert copy[2].empty()
    assert copy[1].offset == 7


def test_an_array_of_several_sequences_is_not_taken_for_one():
    for make in (KVCache, ring(), chunked, ConcatenateKVCache, quantized):
        cache = make()
        cache.update_and_fetch(mx.zeros((2, 1, 3, 32)), mx.zeros((2, 1, 3, 32)))
        with pytest.raises(caches.UnsupportedCache, match="2 sequences"):
            caches.expected_of([cache])
    with pytest.raises(caches.UnsupportedCache, match="padded"):
        caches.expected_of([ArraysCache(1, left_padding=[1, 2])])


def test_rows_that_a_trimmed_cache_still_hands_out_are_refused():
    written = Written(ConcatenateKVCache, (7,))
    written.cache.trim(3)
    with pytest.raises(caches.UnsupportedCache, match="trimmed to 4 tokens"):
        caches.take([written.cache])


# Parts that are not the model's


def other_description(**changes):
    def change(parts):
        described = {**json.loads(parts[0].description), **changes}
        return [Part("ring", 0, 40, parts[0].data, json.dumps(described))]

    return change


def with_numbers(**numbers):
    return other_description(
        numbers={"offset": 40, "keep": 0, "max_size": 16, "index": 16, **numbers}
    )


def cut(parts):
    return [Part("ring", 0, 40, bytes(parts[0].data)[:-4], parts[0].description)]


SPOILED = {
    "no part": lambda parts: [],
    "a part of another slot": lambda parts: [
        Part("ring", 1, 40, parts[0].data, parts[0].description)
    ],
    "a part of another boundary": lambda parts: [
        Part("ring", 0, 39, parts[0].data, parts[0].description)
    ],
    "a part of another kind": lambda parts: [
        Part("state", 0, 40, parts[0].data, parts[0].description)
    ],
    "a byte less": cut,
    "no description": lambda parts: [Part("ring", 0, 40, parts[0].data, "")],
    "a description that is a list": lambda parts: [Part("ring", 0, 40, parts[0].data, "[1]")],
    "another version": other_description(v=2),
    "another class": other_description(**{"class": "ChunkedKVCache"}),
    "no class": other_description(**{"class": None}),
    "an unknown type": other_description(arrays=[["F8", [1, 2, 16, 32]]] * 2),
    "another type": other_description(arrays=[["U32", [1, 2, 16, 32]]] * 2),
    "a shape below zero": other_description(arrays=[["F32", [1, -2, -16, 32]]] * 2),
    "a shape that is none": other_description(arrays=[["F32", "x"]] * 2),
    "another shape": other_description(arrays=[["F32", [1, 4, 16, 16]]] * 2),
    "an array less": other_description(arrays=[["F32", [1, 2, 32, 32]]]),
    "numbers that are none": other_description(numbers={"offset": "40"}),
    "no numbers": other_description(numbers={}),
    "another offset": with_numbers(offset=41),
    "another window": with_numbers(max_size=32),
    "other rows kept": with_numbers(keep=4),
    "an index outside": with_numbers(index=17),
    "an index below zero": with_numbers(index=-1),
    "a version that is true": other_description(v=True),
    "a version that is no integer": other_description(v=1.0),
    "a number that is true": with_numbers(keep=False),
    "a shape beyond 32 bits": other_description(arrays=[["F32", [1, 2, 2**40, 0]]] * 2),
    "a shape beyond 64 bits": other_description(arrays=[["F32", [1, 2, 2**70, 0]]] * 2),
    "a number beyond 64 bits": with_numbers(offset=2**70),
    "a shape as large as can be": other_description(
        arrays=[["F32", [0, *[2**31 - 1] * 7]], ["F32", [1, 2, 32, 32]]]
    ),
    "nested too deeply": lambda parts: [Part("ring", 0, 40, parts[0].data, "[" * 100_000)],
    "an array nested too deeply": lambda parts: [
        Part("ring", 0, 40, b"", '{"v":1,"class":"","numbers":{},"arrays":' + "[" * 900 + "]" * 900)
    ],
    "an integer too long to read": lambda parts: [Part("ring", 0, 40, parts[0].data, "1" * 10_000)],
    "sides of different length": other_description(
        arrays=[["F32", [1, 2, 15, 32]], ["F32", [1, 2, 17, 32]]]
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_part_that_is_not_exactly_what_the_model_holds_leaves_the_cache_empty(name):
    written = Written(ring(), (40,))
    made = []

    def make():
        made.append(RotatingKVCache(max_size=16))
        return made[-1]

    written.make = make
    with pytest.raises(caches.CacheMismatch):
        copied(written, SPOILED[name])
    assert made[-1].empty()
    assert made[-1].offset == 0


CODES = {
    "values": lambda side: mx.zeros((HEADS, 9, DIM)),
    "a row less": lambda side: with_arrays(side, [a[:, 1:] for a in arrays_of(side)]),
    "a head less": lambda side: with_arrays(side, [a[:1] for a in arrays_of(side)]),
    "an array shorter": lambda side: with_arrays(
        side, [*arrays_of(side)[:2], arrays_of(side)[2][:, 1:]]
    ),
    "others": lambda side: dataclasses.replace(side, codec="mlx_affine(8,32,f32)"),
}


@pytest.mark.parametrize("how", CODES)
def test_codes_that_are_not_the_models_leave_the_cache_empty(how):
    written = Written(quantized, (9,))
    layout = caches.layout_of([written.cache])
    ((keys, values),) = as_fetched(caches.take([written.cache]))
    copy = quantized()
    with pytest.raises(caches.CacheMismatch):
        caches.install([copy], [(keys, CODES[how](values))], layout, 9)
    assert copy.empty()
    rows = KVCache()
    with pytest.raises(caches.CacheMismatch):
        caches.install(
            [rows], [(keys, values)], caches.layout_of([Written(KVCache, (9,)).cache]), 9
        )
    assert rows.empty()


BACK = [
    "a ring below its window",
    "a ring that grows by single tokens",
    "a ring at its window",
    "a chunk",
]


@pytest.mark.parametrize("name", BACK)
def test_what_still_has_every_row_is_not_other_than_when_it_had_fewer(name):
    if name not in WRITTEN:
        pytest.skip("this version of mlx-lm cannot have it")
    make, pieces = WRITTEN[name]
    written, fewer = Written(make, pieces), make()
    parts = travelled(caches.take_parts([written.cache], written.tokens))
    found = caches.expected_of([written.cache])
    fewer.update_and_fetch(written.cache.keys[..., :5, :], written.cache.values[..., :5, :])
    copy = make()
    assert found.later([part.info for part in parts], 5) == written.tokens
    caches.install([copy], [], found.layout, 5, parts=parts, needs=found.needs)
    assert copy.offset == 5
    for seed, count in enumerate([1] * 20 + [3, 30, 1], 100):
        assert_same(write(copy, count, seed), write(fewer, count, seed))


@pytest.mark.parametrize(
    "name", ["a ring beyond its window", "a ring filled and gone round", "state"]
)
def test_what_has_lost_rows_is_not_brought_back(name):
    written = Written(*WRITTEN[name])
    parts = travelled(caches.take_parts([written.cache], written.tokens))
    found = caches.expected_of([written.cache])
    assert found.later([part.info for part in parts], 5) == 0
    copy = written.make()
    with pytest.raises(caches.CacheMismatch, match=f"that of {written.tokens} tokens"):
        caches.install([copy], [], found.layout, 5, parts=parts, needs=found.needs)
    assert caches.adapter_of(copy).is_empty(copy)


def ring_numbers(offset, index, keep=0, size=16):
    return {"offset": offset, "keep": keep, "max_size": size, "index": index}


def chunk_numbers(offset, start):
    return {"offset": offset, "chunk_size": 16, "start_position": start}


IMPOSSIBLE = {
    "a ring that has not wrapped, written elsewhere": (ring(), 10, 10, ring_numbers(10, 3)),
    "a ring with rows to come": (ring(), 10, 16, ring_numbers(10, 10)),
    "a ring that has wrapped and is not full": (ring(), 40, 15, ring_numbers(40, 9)),
    "a ring that has wrapped, written at its begin": (ring(), 40, 16, ring_numbers(40, 0)),
    "a ring written where it keeps rows": (ring(keep=4), 40, 16, ring_numbers(40, 4, keep=4)),
    "a chunk of which all is cut off": (chunked, 40, 40, chunk_numbers(40, 40)),
    "a chunk of which some is cut off": (chunked, 40, 15, chunk_numbers(40, 25)),
    "a chunk that begins before the prompt": (chunked, 10, 15, chunk_numbers(10, -5)),
    "a chunk with rows to come": (chunked, 10, 16, chunk_numbers(10, 0)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_numbers_that_no_update_leads_to_are_not_installed(name):
    make, tokens, rows, numbers = IMPOSSIBLE[name]
    source = make()
    source.update_and_fetch(fresh_rows(5), fresh_rows(5))
    found = caches.expected_of([source])
    (need,) = found.needs
    description = {
        "v": 1,
        "class": need.class_name,
        "numbers": numbers,
        "arrays": [["F32", [1, HEADS, rows, DIM]]] * 2,
    }
    data = bytes(2 * HEADS * rows * DIM * 4)
    part = Part(need.kind, 0, tokens, data, json.dumps(description))
    copy = make()
    with pytest.raises(caches.PartMismatch):
        caches.install([copy], [], found.layout, tokens, parts=[part], needs=found.needs)
    assert copy.empty()


def ids_so_far(count, kept=3):
    """What a model keeps of the last tokens' ids, which are not as many at first."""
    cache = ArraysCache(1)
    cache[0] = mx.arange(max(0, count - kept), count)[None]
    return cache


@pytest.mark.parametrize("count", [1, 2, 40])
def test_ids_of_the_last_tokens_are_not_taken_for_another_models(count):
    found, source, copy = caches.expected_of([ids_so_far(1)]), ids_so_far(count), ArraysCache(1)
    assert found.covers(caches.expected_of([source]))
    parts = travelled(caches.take_parts([source], count))
    caches.install([copy], [], found.layout, count, parts=parts, needs=found.needs)
    assert_same([copy[0]], [source[0]])


def test_state_of_another_shape_is_not_taken_for_ids_so_far():
    found, source, copy = caches.expected_of([ids_so_far(1)]), ids_so_far(40), ArraysCache(1)
    source[0] = source[0].astype(mx.float32)
    assert not found.covers(caches.expected_of([source]))
    parts = travelled(caches.take_parts([source], 40))
    with pytest.raises(caches.PartMismatch):
        caches.install([copy], [], found.layout, 40, parts=parts, needs=found.needs)
    assert copy[0] is None


def layer_of(tokens, window=4, group=8):
    """A cache of DeepSeek-V4.1: a window, and a row for each group of tokens that is full."""
    cache = pytest.importorskip("mlx_lm.models.deepseek_v41").LayerCache(window)
    if tokens:
        cache.update_window(fresh_rows(tokens)[0, :1])
        cache.pending_kv = fresh_rows(tokens % group)[0, :1]
    if tokens >= group:
        cache.compress_kv = fresh_rows(tokens // group, mx.bfloat16)[0, :1]
    return cache


@pytest.mark.parametrize("tokens", [1, 4, 7, 16, 20])
def test_arrays_that_come_later_are_not_lost(tokens):
    found, source, copy = caches.expected_of([layer_of(1)]), layer_of(tokens), layer_of(0)
    assert found.covers(caches.expected_of([source]))
    parts = travelled(caches.take_parts([source], tokens))
    caches.install([copy], [], found.layout, tokens, parts=parts, needs=found.needs)
    for name in ("window_size", "offset"):
        assert getattr(copy, name) == getattr(source, name)
    for mine, theirs in zip(copy.state[:-1], source.state[:-1], strict=True):
        assert (mine is None) is (theirs is None)
        assert_same(*([[], []] if mine is None else [[mine], [theirs]]))


def with_less_of_it(cache):
    cache.window = cache.window[:, 1:]


def with_another_offset(cache):
    cache.offset -= 1


def with_another_window(cache):
    cache.window_size = 3


@pytest.mark.parametrize("spoil", [with_less_of_it, with_another_offset, with_another_window])
def test_a_window_that_no_update_leads_to_is_not_installed(spoil):
    found, source, copy = caches.expected_of([layer_of(1)]), layer_of(20), layer_of(0)
    spoil(source)
    parts = travelled(caches.take_parts([source], 20))
    with pytest.raises(caches.PartMismatch):
        caches.install([copy], [], found.layout, 20, parts=parts, needs=found.needs)
    assert copy.window is None
    assert copy.empty()


def test_a_chunk_does_not_take_room_along_that_it_does_not_use():
    cache = ChunkedKVCache(8192)
    cache.update_and_fetch(fresh_rows(7), fresh_rows(7))
    (taken,) = caches.take_parts([cache], 7)
    assert taken.size_bytes == 2 * HEADS * 7 * DIM * 4


def test_a_chunk_or_ring_that_lost_rows_it_still_needs_is_not_stored():
    chunk = chunked()
    chunk.update_and_fetch(fresh_rows(40), fresh_rows(40))
    chunk.start_position, chunk.keys, chunk.values = 30, chunk.keys[..., 30:, :], chunk.values
    with pytest.raises(caches.UnsupportedCache, match="10 rows cannot have"):
        caches.take_parts([chunk], 40)
    turned = Written(ring(), (10, *(1,) * 11)).cache
    turned.trim(6)  # mlx-lm says that it must not be
    with pytest.raises(caches.UnsupportedCache, match="index -1"):
        caches.take_parts([turned], 15)


def test_one_wrong_part_does_not_leave_the_other_slots_filled():
    def make():
        return [KVCache(), ArraysCache(2), ring()()]

    source = make()
    for slot in source:
        write(slot, 20, 3)
    found = caches.expected_of(source)
    parts = travelled(caches.take_parts(source, 20))
    rows = as_fetched(caches.take(source))
    copy = make()
    broken = [parts[0], Part("ring", 2, 20, b"", parts[1].description)]
    with pytest.raises(caches.CacheMismatch):
        caches.install(copy, rows, found.layout, 20, parts=broken, needs=found.needs)
    assert copy[0].empty()
    assert copy[1].empty()
    caches.install(copy, rows, found.layout, 20, parts=parts, needs=found.needs)
    assert_same([write(slot, 1, 5) for slot in copy], [write(slot, 1, 5) for slot in source])


def test_arrays_are_not_copied_to_be_sent():
    arrays = [np.arange(12, dtype=np.float32), np.ones((2, 3), np.uint16)]
    buffers = Taken("state", 0, 1, "", arrays).part().buffers
    for array, buffer in zip(arrays, buffers, strict=True):
        assert np.shares_memory(np.asarray(buffer), array)


@pytest.mark.parametrize("odd", [0, 2])
def test_bytes_that_lie_in_an_mlx_array_are_not_read_from_the_wrong_place(odd):
    """What came from a file; with `odd` the second array does not begin at a multiple of its width."""
    cache = ArraysCache(2)
    cache[0] = mx.arange(3 + odd // 2).astype(mx.bfloat16)[None, :]
    cache[1] = mx.array([[1.5, -2.5]])
    (taken,) = caches.take_parts([cache], 5)
    part = taken.part()
    raw_bytes = b"".join(part.buffers)
    array = mx.array(np.frombuffer(b"x" * 4 + raw_bytes, np.uint8))
    for data in (memoryview(array)[4:], memoryview(array[4:] + 0), memoryview(raw_bytes)):
        contents = contents_of(data, described(part.description))
        for mine, theirs in zip(contents.arrays, cache.cache, strict=True):
            assert mine.dtype == theirs.dtype
            assert mx.array_equal(mine, theirs)


def test_the_format_of_parts_does_not_change():
    """Parts that are stored outlive the program: this is version 1."""
    cache = ArraysCache(3)
    cache[0] = mx.array([[1.0, -2.0]], dtype=mx.bfloat16)
    cache[2] = mx.array([[3.0]], dtype=mx.float32)
    (taken,) = caches.take_parts([cache], 5)
    part = taken.part()
    assert (part.kind, part.slot, part.boundary_tokens) == ("state", 0, 5)
    assert b"".join(part.buffers).hex() == "803f00c000004040"
    assert part.description == (
        '{"v":1,"class":"ArraysCache","numbers":{},"arrays":[["BF16",[1,2]],null,["F32",[1,1]]]}'
    )
