"""Recurrent state as bytes: never another bit, never more memory than the bytes that came."""

import json
import struct
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import mamba, rwkv7
from mlx_lm.models.cache import make_prompt_cache

from pion_client.arrays_cache import BadBlob, deserialize_arrays_cache, serialize_arrays_cache

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/arrays_cache.json").read_text())
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def bits(array):
    return np.asarray(array.view(mx.uint32 if array.itemsize == 4 else mx.uint16))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.array_equal(bits(one), bits(other))


def entry(*numbers, values=b""):
    return struct.pack(f"<{len(numbers)}I", *numbers) + values


def blob(*entries, version=1, count=None):
    return struct.pack("<2I", version, len(entries) if count is None else count) + b"".join(entries)


# The form


@pytest.mark.parametrize("vector", VECTORS["blobs"], ids=lambda vector: vector["about"])
def test_the_form_does_not_change(vector):
    entries = [
        None
        if e is None
        else mx.array(np.array(e["bits"], np.uint32 if e["type"] == "float32" else np.uint16))
        .reshape(e["shape"])
        .view(TYPES[e["type"]])
        for e in vector["entries"]
    ]
    assert serialize_arrays_cache(entries).hex() == vector["blob"]
    assert_same(deserialize_arrays_cache(bytes.fromhex(vector["blob"])), entries)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_no_pattern_of_sixteen_bits_is_changed(dtype):
    every = mx.array(np.arange(65_536, dtype=np.uint16)).reshape(256, 256).view(dtype)
    assert_same(deserialize_arrays_cache(serialize_arrays_cache([every])), [every])


def test_payloads_of_nans_and_signs_of_zeros_stay():
    patterns = np.array([0x7FC12345, 0xFF812345, 0x80000000, 1, 0x7F800000], np.uint32)
    state = mx.array(patterns).view(mx.float32)
    assert_same(deserialize_arrays_cache(serialize_arrays_cache([state])), [state])


def test_views_are_not_written_in_the_order_of_their_memory():
    whole = mx.arange(24, dtype=mx.float32).reshape(2, 3, 4)
    for view in (whole.transpose(2, 0, 1), whole[:, ::2], whole[..., 1:3].astype(mx.bfloat16)):
        assert_same(deserialize_arrays_cache(serialize_arrays_cache([view])), [view])


def small_mamba():
    return mamba.Model(
        mamba.ModelArgs(
            model_type="mamba",
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            state_size=8,
            num_hidden_layers=2,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=4,
        )
    )


def small_rwkv7():
    return rwkv7.Model(
        rwkv7.ModelArgs(
            model_type="rwkv7",
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            norm_eps=1e-5,
            head_dim=32,
            num_hidden_layers=2,
            a_low_rank_dim=8,
            v_low_rank_dim=8,
            gate_low_rank_dim=8,
            decay_low_rank_dim=8,
        )
    )


@pytest.mark.parametrize("make_model", [small_mamba, small_rwkv7])
def test_a_state_that_went_through_bytes_does_not_continue_otherwise(make_model):
    mx.random.seed(0)
    model = make_model()

    def decoded(cache, count=64):
        ids, out = [1], []
        for _ in range(count):
            logits = model(mx.array([ids]), cache=cache)[0, -1]
            out.append(np.asarray(logits).tobytes())
            ids = [int(mx.argmax(logits))]
        return out

    whole, rebuilt = make_prompt_cache(model), make_prompt_cache(model)
    model(mx.array([[3, 5, 7, 11, 13, 17, 19]]), cache=whole)
    for slot, other in zip(whole, rebuilt, strict=True):
        other.cache = deserialize_arrays_cache(serialize_arrays_cache(slot.cache))
    assert decoded(rebuilt) == decoded(whole)


@pytest.mark.parametrize(
    "array",
    [mx.zeros((1,) * 16), mx.zeros((0, 0x7FFFFFFF)), mx.zeros((0x7FFF, 0, 2), mx.bfloat16)],
)
def test_nothing_is_written_that_is_not_read(array):
    assert_same(deserialize_arrays_cache(serialize_arrays_cache([array])), [array])


def test_an_empty_cache_does_not_come_back_as_none():
    assert deserialize_arrays_cache(serialize_arrays_cache([])) == []
    assert deserialize_arrays_cache(serialize_arrays_cache([None, None])) == [None, None]


@pytest.mark.parametrize(
    "array",
    [
        mx.array([1, 2]),
        mx.array(1.0),
        mx.zeros((1,) * 17),
        mx.zeros((0, 0x7FFFFFFF, 0x7FFFFFFF)),
        [1.0, 2.0],
        np.zeros(2, np.float32),
    ],
    ids=["int32", "no dimensions", "17 dimensions", "a huge shape", "a list", "NumPy's"],
)
def test_what_the_form_has_no_word_for_is_not_written(array):
    with pytest.raises(TypeError, match=r"entry 1: .* has no form"):
        serialize_arrays_cache([mx.zeros((1,)), array])


# Bytes from anybody


BAD = {
    "nothing": (b"", "it ends after 0 bytes"),
    "half a head": (b"\x01\0\0\0\0\0", "it ends after 6 bytes"),
    "version 0": (blob(version=0), "version 0"),
    "version 2": (blob(version=2), "version 2"),
    "big-endian": (struct.pack(">2I", 1, 0), "version 16777216"),
    "more entries than bytes": (blob(count=0xFFFFFFFF), "4294967295 entries"),
    "an entry missing": (blob(bytes(16), count=2), "2 entries in 24 bytes"),
    "no dimensions, but a type": (blob(entry(0, 1, 0, 0)), "0 dimensions"),
    "many dimensions": (blob(entry(17, *[1] * 17, 0, 0)), "17 dimensions"),
    "dimensions beyond the end": (blob(entry(16, 1, 1, 0)), "within the numbers"),
    "an unknown type": (blob(entry(1, 1, 3, 0)), "type code 3"),
    "a huge type": (blob(entry(1, 1, 0xFFFFFFFF, 0)), "type code 4294967295"),
    "a negative dimension": (blob(entry(2, 0, 0xFFFFFFFF, 0)), "a dimension of 4294967295"),
    "values beyond the end": (blob(entry(2, 0x7FFFFFFF, 0x7FFFFFFF, 1)), "its values end at"),
    "values that overflow 64 bits": (blob(entry(4, *[0x7FFFFFFF] * 4, 0)), "a shape of"),
    "no values, but a huge shape": (blob(entry(6, 0, *[0x7FFFFFFF] * 5, 0)), "a shape of"),
    "values missing": (blob(entry(1, 2, 0, 0)), "its values end at 28 of 24"),
    "bytes behind": (blob(entry(1, 0, 0)) + b"\0", "1 bytes follow"),
    "a bfloat16 that is none": (blob(entry(1, 1, 2, 0x3F800001)), "no bfloat16"),
}


@pytest.mark.parametrize(("data", "why"), BAD.values(), ids=BAD.keys())
def test_a_blob_that_nobody_wrote_is_not_read(data, why):
    with pytest.raises(BadBlob, match=why):
        deserialize_arrays_cache(data)


def test_a_claim_of_eight_exabytes_allocates_nothing():
    hostile = blob(
        entry(1, 1, 0, values=bytes(4)), entry(3, 0x7FFFFFFF, 0x7FFFFFFF, 1, 0), bytes(16)
    )
    tracemalloc.start()
    before = mx.get_active_memory()
    try:
        with pytest.raises(BadBlob):
            deserialize_arrays_cache(hostile)
        assert tracemalloc.get_traced_memory()[1] < 65_536
        assert mx.get_active_memory() == before
    finally:
        tracemalloc.stop()


VALID = serialize_arrays_cache([mx.arange(6, dtype=mx.float32).reshape(2, 3), None, mx.ones((2,))])


@given(st.data())
def test_a_changed_blob_is_refused_or_is_another_valid_one(data):
    at = data.draw(st.integers(0, len(VALID) - 1))
    changed = bytearray(VALID)
    changed[at] ^= data.draw(st.integers(1, 255))
    cut = changed[: data.draw(st.integers(0, len(VALID)))]
    for candidate in (changed, cut):
        try:
            entries = deserialize_arrays_cache(candidate)
        except BadBlob:
            continue
        assert serialize_arrays_cache(entries) == bytes(candidate)


@given(st.binary(max_size=200))
def test_noise_raises_nothing_else(noise):
    for candidate in (noise, blob(noise)):
        try:
            entries = deserialize_arrays_cache(candidate)
        except BadBlob:
            continue
        assert serialize_arrays_cache(entries) == candidate
