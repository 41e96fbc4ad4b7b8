"""What a lossy prompt cache must not do: lose more than was agreed, hide it, or answer for a raw one."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from pion_client import Client
from pion_client.mlx import PionPromptCache
from pion_grpc.cli.smollm2 import random_llama
from pion_wire import codecs
from tests.mlx import families

WAIT_S = 60.0
LAYERS = 6
LOSSY = ("fp16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32", "bf16_rope_fp8_body(32)")


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        client.drop(*(prefix.namespace for prefix in client.list()))
        yield client


@pytest.fixture(params=["export", "stream"])
def reader(request, server):
    with Client(server.address, export=request.param == "export") as reader:
        yield reader


def wide_llama(dtype="float32", **shape):
    return random_llama(dtype=dtype, **{"layers": LAYERS, "head_dim": 64} | shape)


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


def prefilled(model, ids):
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    mx.eval([slot.state for slot in cache])
    return cache


def rows(side):
    """[tokens, width], float32, of (1, heads, tokens, dim)."""
    values = np.asarray(side.astype(mx.float32))[0].transpose(1, 0, 2)
    return np.ascontiguousarray(values).reshape(len(values), -1)


def assert_lost_as_agreed(cache, whole, codec, protected):
    parsed = codecs.parse(codec)
    for slot, (mine, exact) in enumerate(zip(cache, whole, strict=True)):
        (k, v), (exact_k, exact_v) = mine.keys_and_values(), exact.keys_and_values()
        assert (k.dtype, v.dtype, mine.offset) == (exact_k.dtype, exact_v.dtype, exact.offset)
        np.testing.assert_array_equal(rows(k), rows(exact_k))
        if slot in protected:
            np.testing.assert_array_equal(rows(v), rows(exact_v))
        else:
            lost = mx.array(parsed.decode(parsed.encode(rows(exact_v)))).astype(v.dtype)
            np.testing.assert_array_equal(rows(v), np.asarray(lost.astype(mx.float32)))
            assert not np.array_equal(rows(v), rows(exact_v))


@pytest.mark.parametrize("vquant", LOSSY)
@pytest.mark.parametrize(("boundary_protect", "protected"), [(0, ()), (2, (0, 1, 4, 5))])
def test_nothing_but_v_between_the_boundaries_loses_anything(
    client, reader, vquant, boundary_protect, protected
):
    model, ids = wide_llama(), tokens(150)
    options = {"vquant": vquant, "boundary_protect": boundary_protect}
    with PionPromptCache(model, client=client, **options) as first:
        first.get_or_prefill(ids, "agent")
    with PionPromptCache(model, client=reader, **options) as second:
        cache = second.get_or_prefill(ids, "agent")
        stats = second.stats()
        fidelity = client.lookup("agent").prefix.fidelity
    assert (stats["hits"], stats["misses"], stats["skipped"]) == (1, 0, {})
    assert_lost_as_agreed(cache, prefilled(model, ids), vquant, protected)
    assert stats["fidelity"] == fidelity
    assert f"v.2={codecs.parse(vquant)}" in fidelity
    assert "k.2=raw" in fidelity
    assert f"{'2 to 3' if boundary_protect else '0 to 5'}) {vquant}" in stats["stored_as"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_come_back_in_the_type_of_the_model(client, reader, dtype):
    model, ids = wide_llama(dtype), tokens(100)
    for client_ in (client, reader):
        with PionPromptCache(model, client=client_, vquant="int8", boundary_protect=1) as mine:
            cache = mine.get_or_prefill(ids)
    assert_lost_as_agreed(cache, prefilled(model, ids), "int8", (0, 5))


def test_fp16_neither_keeps_more_than_binary16_nor_loses_anything_of_it(client, reader):
    ids = tokens(50)
    for dtype, kept in (
        ("float32", "raw F32, V of 6 layers (0 to 5) fp16"),
        ("float16", "raw F16"),
    ):
        model = wide_llama(dtype)
        for client_ in (client, reader):
            with PionPromptCache(model, client=client_, vquant="fp16") as mine:
                cache = mine.get_or_prefill(ids, dtype)
                mine.flush(WAIT_S)
                assert mine.stats()["stored_as"] == kept
        for mine, exact in zip(cache, prefilled(model, ids), strict=True):
            (k, v), (exact_k, exact_v) = mine.keys_and_values(), exact.keys_and_values()
            np.testing.assert_array_equal(rows(k), rows(exact_k))
            rounded = rows(exact_v.astype(mx.float16))
            np.testing.assert_array_equal(rows(v), rounded)
    assert client.lookup("float16").prefix.fidelity == "raw"
    assert "v.0=fp16" in client.lookup("float32").prefix.fidelity


def test_a_lossy_prefix_is_never_served_for_a_raw_one_nor_for_another_codec(client):
    model, ids = wide_llama(), tokens(100)

    def stats_with(namespace, **options):
        with PionPromptCache(model, client=client, **options) as mine:
            mine.get_or_prefill(ids, namespace)
            mine.flush(WAIT_S)
            return mine.stats()

    ways = [
        {"vquant": "int8"},
        {},
        {"vquant": "turbo4"},
        {"vquant": "int8", "boundary_protect": 2},
    ]
    for options in ways:
        first, again = stats_with(None, **options), stats_with(None, **options)
        assert (first["hits"], first["stores"], again["hits"]) == (0, 1, 1), options
    assert len(list(client.list())) == len(ways)
    stats_with("name", **ways[0])
    for options in ways[1:]:
        stats = stats_with("name", **options)
        assert stats["miss_reasons"] == {"layout_differs": 1}
    assert client.lookup("name").prefix.fidelity.startswith("k.0=raw;v.0=int8")


def test_what_follows_is_stored_as_lossily_as_what_it_follows(client, reader):
    model, ids = wide_llama(), tokens(200)
    for ends, client_ in ((120, client), (200, client), (200, reader)):
        with PionPromptCache(model, client=client_, vquant="mlx4g32") as mine:
            cache = mine.get_or_prefill(ids[:ends])
            mine.flush(WAIT_S)
            stats = mine.stats()
    assert (stats["tokens_served"], stats["tokens_prefilled"]) == (200, 0)
    assert cache[0].offset == 200
    assert sorted(prefix.base for prefix in client.list()) == [0, 120]
    first_rows = rows(cache[3].keys_and_values()[1])[:120]
    exact = rows(prefilled(model, ids[:120])[3].keys_and_values()[1])
    parsed = codecs.parse("mlx4g32")
    np.testing.assert_allclose(first_rows, parsed.decode(parsed.encode(exact)), atol=1e-6)


@pytest.mark.parametrize(
    ("vquant", "shape", "named"),
    [
        ("mlx4g32", {"head_dim": 16}, r"mlx4g32.*kv_dim 32"),
        ("fp8", {"head_dim": 20}, r"fp8.*kv_dim 40"),
        ("turbo4", {"head_dim": 8}, r"turbo4.*kv_dim 16"),
        ("bf16_rope_fp8_body(48)", {"head_dim": 32}, r"bf16_rope_fp8_body\(48\).*kv_dim 64"),
    ],
)
def test_a_width_that_a_format_cannot_take_is_told_before_anything_is_prefilled(
    client, vquant, shape, named
):
    model = wide_llama(**shape)
    with pytest.raises(ValueError, match=named):
        PionPromptCache(model, client=client, vquant=vquant)


def test_layers_that_are_all_protected_are_raw(client):
    with PionPromptCache(wide_llama(), client=client, vquant="int8", boundary_protect=3) as mine:
        mine.get_or_prefill(tokens(60), "name")
        mine.flush(WAIT_S)
        assert (mine.stats()["stored_as"], mine.stats()["fidelity"]) == ("raw F32", "raw")
    assert client.lookup("name").prefix.fidelity == "raw"


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "lfm2", "mamba"])
def test_what_is_beside_rows_stays_exact(client, reader, family):
    model, ids = families.build(family), families.tokens(70)
    options = {"vquant": "int8"}
    with PionPromptCache(model, client=client, **options) as first:
        expected = first.get_or_prefill(ids, "hybrid")
        assert first.flush(WAIT_S)
        skipped = first.stats()["skipped"]
    with PionPromptCache(model, client=reader, **options) as second:
        cache = second.get_or_prefill(ids, "hybrid")
        stats = second.stats()
    assert (stats["hits"], stats["tokens_served"], skipped) == (1, 70, {})
    lossy, exact = set(), set()
    for slot, other in zip(cache, expected, strict=True):
        assert type(slot) is type(other)
        same = all(
            np.array_equal(
                np.asarray(mine.astype(mx.float32)), np.asarray(theirs.astype(mx.float32))
            )
            for mine, theirs in zip(arrays(slot), arrays(other), strict=True)
        )
        (exact if same else lossy).add(type(slot).__name__)
    assert lossy <= {"KVCache"}
    assert ("KVCache" in {type(slot).__name__ for slot in cache}) is bool(lossy)
    assert client.lookup("hybrid").prefix.fidelity.count("int8") == len(
        [slot for slot in cache if type(slot).__name__ == "KVCache" and slot.values.shape[-1]]
    )


def arrays(slot):
    """Every array of a cache, without what it has room for."""
    if type(slot).__name__ == "KVCache":
        return slot.keys_and_values()
    return [array for _, array in tree_flatten(slot.state) if isinstance(array, mx.array)]
