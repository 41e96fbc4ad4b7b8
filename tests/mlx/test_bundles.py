"""Rows and parts as one prefix: kept once, served where all of it is exact, and never by halves."""

import dataclasses
import json
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from pion_client import Client, Part, caches
from pion_client.bundles import Bundle, Checkpoints, Facts, boundaries, cache_suffix, parts_max
from pion_client.errors import Unavailable
from pion_client.exchange import Exchange, Found, Pending, Request
from pion_client.mlx import PionPromptCache
from pion_client.tally import Tally
from tests.mlx import families
from tests.mlx.continuing import decoded

WAIT_S = 60.0
"""Longer than anything here takes; only a broken test waits so long."""
STATE_BYTES = 3 * (3 * 64 + 4 * 8 * 8) * 4
"""What the recurrent slots of `hybrid` hold."""
ROW_BYTES = 2 * 2 * 16 * 4
"""A token's rows in its one slot of attention."""
HEADER_BYTES = 20_000
"""More than what a segment has beside rows and parts here: header, token ids, checksums."""


@pytest.fixture(scope="module")
def hybrid():
    """Three recurrent slots and one of attention."""
    return families.build("qwen3_next")


@pytest.fixture(scope="module")
def windowed():
    return families.build("gemma3_text")


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        client.drop(*(prefix.namespace for prefix in client.list()))
        yield client


def prompt_cache(model, client, **options):
    return PionPromptCache(model, client=client, **options)


def stored_now(model, client, ids, namespace=None, checkpoints=(), **options):
    """Prefills and stores; returns the cache and what is said about it."""
    with prompt_cache(model, client, **options) as mine:
        cache = mine.get_or_prefill(ids, namespace, checkpoints=checkpoints)
        assert mine.flush(WAIT_S)
        return cache, mine.stats()


def prefilled(model, ids, *stops):
    """What a run without the server has, split in the same places."""
    cache = make_prompt_cache(model)
    for begin, end in zip((0, *stops), (*stops, len(ids)), strict=True):
        model(mx.array([ids[begin:end]]), cache=cache)
        caches.settle(cache)
    return cache


def prefixes(client):
    return {prefix.namespace: prefix for prefix in client.list()}


def boundaries_of(prefix):
    return sorted({part.boundary_tokens for part in prefix.parts})


# Checkpoints


def test_a_conversation_with_ten_checkpoints_does_not_store_its_rows_twice(client, hybrid):
    ids = families.tokens(320)
    cache, stats = stored_now(hybrid, client, ids, checkpoint_every=32)
    assert (stats["stores"], stats["skipped"]) == (1, {})
    (prefix,) = prefixes(client).values()
    assert boundaries_of(prefix) == list(range(32, 321, 32))
    least = 320 * ROW_BYTES + 10 * STATE_BYTES
    assert least <= prefix.stored_bytes < least + HEADER_BYTES
    with prompt_cache(hybrid, client) as other:
        assert np.array_equal(decoded(hybrid, other.get_or_prefill(ids)), decoded(hybrid, cache))


def test_turns_of_a_conversation_do_not_store_their_rows_twice(client, hybrid):
    ids = families.tokens(400)
    with prompt_cache(hybrid, client, checkpoint_every=0) as mine:
        for turn in range(40, 401, 40):
            cache = mine.get_or_prefill(ids[:turn])
            assert mine.flush(WAIT_S)
        stats = mine.stats()
    assert (stats["stores"], stats["tokens_prefilled"], stats["tokens_served"]) == (10, 400, 1800)
    stored = sum(prefix.stored_bytes for prefix in prefixes(client).values())
    least = 400 * ROW_BYTES + 10 * STATE_BYTES
    assert least <= stored < least + 10 * HEADER_BYTES
    assert np.array_equal(
        decoded(hybrid, cache), decoded(hybrid, prefilled(hybrid, ids, *range(40, 400, 40)))
    )
    with prompt_cache(hybrid, client) as other:  # any of the ten, from the one chain
        again, rest = other.reuse([*ids[:250], *[3] * 30])
        assert len(rest) == 280 - 240
    assert np.array_equal(
        decoded(hybrid, again), decoded(hybrid, prefilled(hybrid, ids[:240], *range(40, 240, 40)))
    )


def test_another_prompt_does_not_begin_before_the_last_boundary_in_common(client, hybrid):
    ids, fork = families.tokens(100), [*families.tokens(70), *[5] * 60]
    stored_now(hybrid, client, ids, checkpoint_every=32, checkpoints=(50, 0, 100, 7000, -3))
    assert boundaries_of(*prefixes(client).values()) == [32, 50, 64, 96, 100]
    with prompt_cache(hybrid, client, checkpoint_every=0) as other:
        cache = other.get_or_prefill(fork)
        assert other.flush(WAIT_S)
        stats = other.stats()
    assert (stats["tokens_served"], stats["tokens_prefilled"]) == (64, 66)
    assert stats["shortened_by"] == {"state": 1}
    same = prefilled(hybrid, fork, 32, 50, 64)
    assert np.array_equal(decoded(hybrid, cache), decoded(hybrid, same))
    child = next(prefix for prefix in prefixes(client).values() if prefix.token_count == 130)
    assert (child.base, boundaries_of(child)) == (64, [32, 50, 64, 130])


def test_a_checkpoint_within_what_is_served_is_not_ignored_silently(client, hybrid):
    ids = families.tokens(100)
    _, stats = stored_now(hybrid, client, ids, checkpoints=(40,))
    assert stats["checkpoints_dropped"] == 0
    _, stats = stored_now(hybrid, client, ids, checkpoints=(0, 40, 50, 60, 100, 200))
    assert (stats["tokens_prefilled"], stats["checkpoints_dropped"]) == (0, 2)
    _, stats = stored_now(hybrid, client, [*ids, *[3] * 60], checkpoints=(50, 120))
    assert (stats["tokens_prefilled"], stats["checkpoints_dropped"]) == (60, 1)
    assert boundaries_of(*(p for p in prefixes(client).values() if p.base)) == [40, 100, 120, 160]


def test_a_checkpoint_that_can_be_gone_back_to_is_not_counted_as_lost(client):
    for model in (families.build("llama"), families.build("gemma3_text", sliding_window=128)):
        for _ in range(2):
            _, stats = stored_now(model, client, families.tokens(100), checkpoints=(50,))
        assert (stats["hits"], stats["checkpoints_dropped"]) == (1, 0)
    ids = families.tokens(100)
    model = families.build("gemma3_text", sliding_window=128)
    with prompt_cache(model, client, model_id="fewer") as mine:
        mine.get_or_prefill(ids)
        assert mine.flush(WAIT_S)
        mine.get_or_prefill(ids, checkpoints=(50,))
        assert mine.stats()["checkpoints_dropped"] == 0


def test_a_prefill_is_not_split_elsewhere_than_said():
    assert boundaries(0, 20_000, (), 8192) == [8192, 16384, 20_000]
    assert boundaries(8192, 16384, (), 8192) == [16384]
    assert boundaries(100, 8193, (99, 100, 101, 8193, 9000), 8192) == [101, 8192, 8193]
    assert boundaries(0, 100, (), 0) == [100]


def test_parts_do_not_outgrow_their_room_and_the_last_boundary_stays(hybrid):
    kept = Checkpoints(parts_max=12)
    cache = make_prompt_cache(hybrid)
    for end in range(10, 101, 10):
        hybrid(mx.array([[1] * 10]), cache=cache)
        kept.take(cache, end)
        found = sorted({taken.boundary_tokens for taken in kept.taken})
        assert len(kept.taken) <= 12
        assert found[-1] == end
    assert kept.dropped + len(found) == 10
    tight = Checkpoints(parts_max=100, bytes_max=2 * STATE_BYTES)
    for end in (110, 120, 130):
        tight.take(cache, end)
    assert sorted({taken.boundary_tokens for taken in tight.taken}) == [110, 130]


def test_what_describes_the_parts_of_a_long_prefix_is_not_longer_than_a_message():
    assert parts_max(1) == 4095
    assert 0 < parts_max(1_000_000) < 200


# Reuse that would be wrong


def assert_missed(stats, kind):
    assert (stats["hits"], stats["miss_reasons"]) == (0, {"part_missing": 1})
    assert stats["shortened_by"] == {kind: 1}


@pytest.mark.parametrize(("family", "kind"), [("gemma3_text", "ring"), ("mamba2", "state")])
def test_nothing_is_served_at_a_boundary_that_was_not_taken(client, family, kind):
    model, ids = families.build(family), families.tokens(60)
    stored_now(model, client, ids)
    with prompt_cache(model, client) as other:
        cache, rest = other.reuse([*ids[:40], 1, 2, 3])
        assert_missed(other.stats(), kind)
    assert len(rest) == 43
    assert all(slot.empty() for slot in cache)
    with prompt_cache(model, client) as other:
        cache, rest = other.reuse(ids)  # a token must be left to run, and 59 are no boundary
        assert_missed(other.stats(), kind)
    with prompt_cache(model, client) as other:
        assert np.array_equal(
            decoded(model, other.get_or_prefill(ids[:40])),
            decoded(model, prefilled(model, ids[:40])),
        )
        assert_missed(other.stats(), kind)


def test_a_ring_that_has_not_wrapped_does_not_make_anybody_prefill_again(client):
    model = families.build("gemma3_text", sliding_window=128)
    ids = families.tokens(120)
    stored_now(model, client, ids)
    with prompt_cache(model, client) as other:
        cache, rest = other.reuse([*ids[:70], 1, 2, 3])
        assert (len(rest), {slot.offset for slot in cache}) == (3, {70})
        fork = other.get_or_prefill([*ids[:70], *[9] * 90])  # beyond the window, behind the first
        assert other.flush(WAIT_S)
        stats = other.stats()
        assert (stats["tokens_served"], stats["tokens_prefilled"], stats["stores"]) == (140, 90, 1)
        assert stats["shortened_by"] == {}
        again = other.get_or_prefill([*ids[:70], *[9] * 90])
        assert other.stats()["tokens_prefilled"] == 90
    # Row by row the same bits as in the prefill that was stored, which ran on.
    whole = prefilled(model, ids)
    for mine, theirs in zip(cache, whole, strict=True):
        for side, other_side in zip(mine.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert mx.array_equal(side[..., :70, :], other_side[..., :70, :])
    assert np.array_equal(decoded(model, again), decoded(model, fork))


@pytest.mark.parametrize("namespace", [None, "name"])
def test_rows_without_their_part_are_not_served_and_do_not_stay_in_the_way(
    client, hybrid, namespace
):
    ids = families.tokens(80)
    source = prefilled(hybrid, ids)
    held = caches.expected_of(source)
    with prompt_cache(hybrid, client, model_id="m") as mine:
        client.store(
            namespace, layers=caches.take(source), slots=held.slots, token_ids=ids, model="m"
        )
        assert not mine.lookup(namespace or "?")
        cache = mine.get_or_prefill(ids, namespace)
        assert mine.flush(WAIT_S)
        assert_missed(mine.stats(), "state")
        assert mine.stats()["stores"] == 1, mine.stats()
        again = mine.get_or_prefill(ids, namespace)
        assert mine.stats()["hits"] == 1
        assert namespace is None or mine.lookup(namespace)
    expected = decoded(hybrid, source)
    assert np.array_equal(decoded(hybrid, cache), expected)
    assert np.array_equal(decoded(hybrid, again), expected)


def test_parts_of_some_slots_only_are_not_served(client, hybrid):
    """The server shortens by kinds; that every slot has its own is held against the model here."""
    ids = families.tokens(80)
    source = prefilled(hybrid, ids)
    held, parts = caches.expected_of(source), caches.take_parts(source, 80)
    client.store(
        None,
        layers=caches.take(source),
        slots=held.slots,
        token_ids=ids,
        model="m",
        parts=[taken.part() for taken in parts[:-1]],
    )
    with prompt_cache(hybrid, client, model_id="m") as mine:
        cache = mine.get_or_prefill(ids)
        assert mine.stats()["miss_reasons"] == {"part_missing": 1}
    assert np.array_equal(decoded(hybrid, cache), decoded(hybrid, source))


@pytest.mark.parametrize("namespace", [None, "name"])
def test_who_has_other_checkpoints_does_not_replace_what_can_be_used(client, hybrid, namespace):
    ids = families.tokens(80)
    cache = prefilled(hybrid, ids)
    held = caches.expected_of(cache)
    facts = Facts("m", held.layout, held)
    request = Request(np.array(ids, "<u4").tobytes(), namespace, 80)
    at_the_end = caches.take_parts(cache, 80)
    more = caches.take_parts(prefilled(hybrid, ids[:32]), 32) + at_the_end

    tally = Tally()

    def send(taken):
        bundle = Bundle(caches.take(cache), taken)
        exchange = Exchange(client, WAIT_S, tally)
        return exchange.send(Pending(request, 1.0), Found(facts=facts), bundle, lambda *_: None)

    def generation():
        (prefix,) = prefixes(client).values()
        return prefix.generation

    assert send([])
    assert send(at_the_end), "rows without their parts are of use to nobody"
    usable = generation()
    assert not send(at_the_end)
    assert tally.of("checkpoints_dropped") == 0
    assert not send(more)
    assert tally.of("checkpoints_dropped") == 1, "it is not kept, and that is said"
    assert not send(at_the_end)
    assert generation() == usable


SPOILED = {
    "cut": lambda part: dataclasses.replace(part, data=part.data[4:]),
    "of another class": lambda part: dataclasses.replace(
        part, description=part.description.replace("Arrays", "Rotating")
    ),
    "of another format": lambda part: dataclasses.replace(
        part, description=part.description.replace('"v":1', '"v":2')
    ),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("export", [True, False])
def test_a_part_that_is_not_the_models_is_not_installed(server, hybrid, how, export):
    ids = families.tokens(80)
    source = prefilled(hybrid, ids)
    held = caches.expected_of(source)
    parts = [taken.part() for taken in caches.take_parts(source, 80)]
    with Client(server.address, export=export) as client:
        client.store(
            "spoiled",
            layers=caches.take(source),
            slots=held.slots,
            token_ids=ids,
            model="m",
            parts=[*parts[:-1], SPOILED[how](parts[-1])],
            replace=True,
        )
        with prompt_cache(hybrid, client, model_id="m") as mine:
            cache = mine.get_or_prefill(ids, "spoiled")
            assert mine.stats()["miss_reasons"] == {"part_differs": 1}
        client.drop("spoiled")
    assert np.array_equal(decoded(hybrid, cache), decoded(hybrid, source))


@pytest.mark.parametrize("namespace", [None, "name"])
@pytest.mark.parametrize("how", SPOILED)
def test_a_part_that_cannot_be_used_does_not_stay_in_the_way(client, hybrid, namespace, how):
    ids, longer = families.tokens(80), [*families.tokens(80), *[7] * 40]
    source = prefilled(hybrid, ids)
    held = caches.expected_of(source)
    parts = [taken.part() for taken in caches.take_parts(source, 80)]
    client.store(
        namespace,
        layers=caches.take(source),
        slots=held.slots,
        token_ids=ids,
        model="m",
        parts=[*parts[:-1], SPOILED[how](parts[-1])],
    )
    for wanted in (longer, ids):  # each is served to the next who asks
        name = None if wanted is longer else namespace
        for hits in (0, 1):
            with prompt_cache(hybrid, client, model_id="m") as mine:
                cache = mine.get_or_prefill(wanted, name)
                assert mine.flush(WAIT_S)
                stats = mine.stats()
            assert (stats["hits"], stats["skipped"]) == (hits, {}), stats
            expected = prefilled(hybrid, wanted)
            assert np.array_equal(decoded(hybrid, cache), decoded(hybrid, expected))
    assert sorted(prefix.token_count for prefix in prefixes(client).values()) == [80, 120]


def test_what_another_has_mended_meanwhile_is_not_replaced_again(client, hybrid):
    ids = families.tokens(80)
    cache = prefilled(hybrid, ids)
    held = caches.expected_of(cache)
    facts = Facts("m", held.layout, held)
    request = Request(np.array(ids, "<u4").tobytes(), "name", 80)
    bundle = Bundle(caches.take(cache), caches.take_parts(cache, 80))
    exchange = Exchange(client, WAIT_S, Tally())
    assert exchange.send(Pending(request, 1.0), Found(facts=facts), bundle, lambda *_: None)
    (prefix,) = prefixes(client).values()
    for generation, wrote in ((prefix.generation - 1, False), (prefix.generation, True)):
        tried = dataclasses.replace(prefix, generation=generation)
        found = Found(reason="part_differs", facts=facts, prefix=tried)
        sent = exchange.send(Pending(request, 1.0), found, bundle, lambda *_: None)
        assert sent == wrote


HOSTILE = {
    "nested": "[" * 4000,
    "as large as can be": json.dumps(
        {
            "v": 1,
            "class": "ArraysCache",
            "numbers": {},
            "arrays": [["F32", [0, *[2**31 - 1] * 5]]] * 2,
        }
    ),
    "beyond all numbers": json.dumps(
        {
            "v": 1,
            "class": "ArraysCache",
            "numbers": {"offset": 2**80},
            "arrays": [["F32", [0, 2**80]]] * 2,
        }
    ),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_no_description_of_a_part_raises_out_of_a_call(client, how):
    """Neither where the part is put back, nor where it is asked whether it can be brought back."""
    model, ids = families.build("mamba"), families.tokens(40)
    parts = [Part("state", slot, 40, b"", HOSTILE[how]) for slot in (0, 1)]
    client.store("hostile", layers=None, token_ids=ids, model="m", parts=parts)
    with prompt_cache(model, client, model_id="m") as mine:
        for given in ([*ids, 1], ids[:-5]):
            cache, rest = mine.reuse(given)
            assert (rest, cache[0].empty()) == (given, True)
        cache = mine.get_or_prefill(ids, "hostile")
        assert mine.stats()["hits"] == 0
    assert np.array_equal(decoded(model, cache), decoded(model, prefilled(model, ids)))


class Padding:
    """A model whose cache is refused only once it has seen two tokens."""

    layers = (None,)

    def make_cache(self):
        return [ArraysCache(1)]

    def __call__(self, tokens, cache):
        cache[0][0] = mx.sum(tokens.astype(mx.float32))[None]
        if tokens.shape[1] > 1:
            cache[0].lengths = mx.array([1])


def test_a_cache_that_turns_out_not_to_be_kept_is_not_stored_but_works(client):
    with prompt_cache(Padding(), client, model_id="m", checkpoint_every=8) as mine:
        cache = mine.get_or_prefill([1] * 40)
        assert mine.flush(WAIT_S)
        (reason,) = mine.stats()["skipped"]
    assert reason.startswith("ArraysCache: padded")
    assert cache[0][0].item() == 8
    assert prefixes(client) == {}


def quantised_caches(model):
    return [QuantizedKVCache(group_size=32, bits=4) for _ in model.layers]


def test_rows_and_codes_of_one_model_are_not_taken_for_each_other(client):
    model, ids = families.build("llama", head_dim=32), families.tokens(90)
    plain, _ = stored_now(model, client, ids)
    codes, stats = stored_now(model, client, ids, make_cache=quantised_caches)
    assert (stats["hits"], stats["stores"]) == (0, 1)
    expected = {"rows": decoded(model, plain), "codes": decoded(model, codes)}
    assert not np.array_equal(expected["rows"], expected["codes"])
    with prompt_cache(model, client) as other:
        assert np.array_equal(decoded(model, other.get_or_prefill(ids)), expected["rows"])
        assert other.stats()["hits"] == 1
    with prompt_cache(model, client, make_cache=quantised_caches) as other:
        assert np.array_equal(decoded(model, other.get_or_prefill(ids)), expected["codes"])
        assert other.stats()["hits"] == 1


def test_caches_of_other_sizes_do_not_share_a_name_and_equal_ones_do_not_differ():
    different = [
        [KVCache()],
        [KVCache(), KVCache()],
        [ArraysCache(2)],
        [ArraysCache(3)],
        [CacheList(ArraysCache(2))],
        [CacheList(ArraysCache(3))],
        [QuantizedKVCache(64, 8)],
        [QuantizedKVCache(64, 4)],
        [QuantizedKVCache(32, 8)],
        [RotatingKVCache(16, 4)],
        [RotatingKVCache(16, 0)],
    ]
    assert len({cache_suffix(cache) for cache in different}) == len(different)
    assert cache_suffix([RotatingKVCache(np.int64(16), 4)]) == cache_suffix(
        [RotatingKVCache(16, 4)]
    )
    assert cache_suffix([QuantizedKVCache(64, 8)]) == "72dbb558b96bc983"


def test_codes_are_not_served_at_their_end_only(client):
    model, ids = families.build("llama", head_dim=32), families.tokens(200)
    with prompt_cache(model, client, make_cache=quantised_caches) as mine:
        mine.get_or_prefill(ids[:100])
        assert mine.flush(WAIT_S)
        whole = mine.get_or_prefill(ids)  # its rows behind those of the first
        assert mine.flush(WAIT_S)
        stats = mine.stats()
        assert (stats["tokens_served"], stats["stores"], stats["skipped"]) == (100, 2, {})
        assert stats["stored_as"] == "mlx_affine(4,32,f32)"
    for export in (True, False):
        with (
            Client(client.address, export=export) as other_client,
            prompt_cache(model, other_client, make_cache=quantised_caches) as other,
        ):
            cache, rest = other.reuse([*ids[:150], 1, 2])
            assert (len(rest), cache[0].offset) == (2, 150)
            for mine_side, side in zip(cache[0].keys, whole[0].keys, strict=True):
                assert mx.array_equal(mine_side, side[..., :150, :])
            again = other.get_or_prefill(ids)
            assert other.stats()["lane"] == ("export" if export else "stream")
            assert np.array_equal(decoded(model, again), decoded(model, whole))
            whole[0].trim(32)
            whole[1].trim(32)


def test_attention_on_the_server_is_not_tried_for_what_is_more_than_rows(client, hybrid):
    ids = families.tokens(90)
    stored_now(hybrid, client, ids, "name", stage2=True)
    with prompt_cache(hybrid, client, stage2=True) as mine:
        cache = mine.get_or_prefill(ids, "name")
        assert (mine.stats()["hits"], mine.suggest_stage(10_000)) == (1, 1)
    assert np.array_equal(decoded(hybrid, cache), decoded(hybrid, prefilled(hybrid, ids)))


@pytest.mark.parametrize("export", [True, False])
def test_a_part_that_lies_in_several_places_is_not_stored_in_another_order(server, export):
    random = np.random.default_rng(2)
    pieces = [random.bytes(size) for size in (0, 7, 2_500_000, 0, 1 << 20, 3)]
    first, *more = [np.frombuffer(piece, np.uint8).data for piece in pieces]
    part = Part("state", 0, 5, first, "pieces", tuple(more))
    empty = Part("state", 1, 5, np.empty(0, np.uint8).data)
    with Client(server.address, export=export) as client:
        client.store(
            "pieces", layers=None, token_ids=range(5), model="m", parts=[part, empty], replace=True
        )
        fetched = client.fetch("pieces", part_kinds=["state"])
        assert [bytes(got.data) for got in fetched.parts] == [b"".join(pieces), b""]
        client.drop("pieces")


# Whole or not at all


def version(number):
    """Rows and parts that all say which version they are of."""
    value = np.full((2, 600, 64), number, np.float32)
    parts = [
        Part("state", slot, 600, bytes([number]) * size, json.dumps(number))
        for slot, size in ((1, 2_500_000), (2, 0), (3, 400_000))
    ]
    return {"layers": [(value, value)] * 2, "slots": [0, 4], "parts": parts}


def version_of(prefix):
    """Which version a fetched prefix is of, all of it."""
    (number,) = {float(side.flat[0]) for pair in prefix.layers for side in pair}
    expected = version(int(number))
    for pair, whole in zip(prefix.layers, expected["layers"], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(pair, whole, strict=True))
    assert len(prefix.parts) == 3
    for part, whole in zip(prefix.parts, expected["parts"], strict=True):
        assert (part.info, bytes(part.data)) == (whole.info, whole.data)
    return int(number)


def store_version(client, number, **options):
    return client.store(
        "bundle", token_ids=range(600), model="m", replace=True, **version(number), **options
    )


class KillAfter:
    """Progress of a store, at so many-th step of which the server dies."""

    def __init__(self, server, steps):
        self.server, self.steps, self.done = server, steps, 0

    def __call__(self, *_):
        self.done += 1
        if self.done == self.steps:
            self.server.kill()


@pytest.mark.faults
def test_a_server_killed_at_any_point_of_a_store_does_not_have_half_of_it(start_server, short_tmp):
    directory = short_tmp / "data"
    holds, sent, steps = 0, 0, 0
    killing = None
    while killing is None or killing.done >= steps:  # until a store is over before the kill
        server = start_server(directory=directory)
        with Client(server.address) as client, Client(server.address, timeout_s=0.1) as hasty:
            prefix = client.fetch("bundle", part_kinds=["state"])
            found = version_of(prefix) if prefix else 0
            assert found in (holds, sent), "what was acknowledged, or what was sent last"
            if steps == 1:  # so that from now on there is something to replace
                store_version(client, sent)
                found = sent
            holds, sent, steps = found, sent + 1, steps + 1
            killing = KillAfter(server, steps)
            try:
                store_version(hasty, sent, progress=killing)  # waits for no restart
            except Unavailable:
                assert server.process.poll() is not None
            else:
                holds = sent
        server.kill()
    assert steps > 5


@pytest.mark.faults
@pytest.mark.parametrize("export", [True, False])
def test_who_reads_while_a_bundle_is_replaced_does_not_get_a_mixture(server, export):
    done = threading.Event()
    failures, seen = [], set()

    def read():
        try:
            with Client(server.address, export=export) as client:
                while not done.is_set():
                    prefix = client.fetch("bundle", part_kinds=["state"])
                    seen.add(version_of(prefix))
        except Exception as error:
            failures.append(error)

    with Client(server.address) as client:
        store_version(client, 1)
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(2, 22):
            store_version(client, number)
        done.set()
        reader.join()
        client.drop("bundle")
    assert not failures
    assert len(seen) > 1


def truncate(path, at):
    with path.open("r+b") as file:
        file.truncate(at)


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def remove(path, _):
    path.unlink()


@pytest.mark.faults
@pytest.mark.parametrize("export", [True, False])
@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_part_damaged_on_disk_is_prefilled_again_not_installed(
    start_server, hybrid, damage, export
):
    ids = families.tokens(300)
    server = start_server(*([] if export else ["--no-export"]))
    with Client(server.address) as client:
        cache, _ = stored_now(hybrid, client, ids)
        (path,) = (server.directory / "segments").iterdir()
        # Parts come behind the rows; within the last one is what the last slot needs.
        damage(path, path.stat().st_size - 4 * 300 - 200)
        with prompt_cache(hybrid, client) as other:
            again = other.get_or_prefill(ids)
            assert other.flush(WAIT_S)
            stats = other.stats()
            assert (stats["hits"], stats["tokens_prefilled"], stats["stores"]) == (0, 300, 1)
            healed = other.get_or_prefill(ids)
            assert other.stats()["hits"] == 1
    expected = decoded(hybrid, cache)
    assert np.array_equal(decoded(hybrid, again), expected)
    assert np.array_equal(decoded(hybrid, healed), expected)
