"""What a prompt cache from the server must never be: wrong, partial, late, or in the way."""

import json
import socket
import threading
from concurrent import futures

import grpc
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from pion_client import Client
from pion_client.breaker import Breaker
from pion_client.mlx import PionPromptCache, model_id
from pion_grpc.cli.decode import greedy
from pion_grpc.cli.smollm2 import random_llama
from tests.mlx import programs

WAIT_S = 60.0
"""Longer than anything here takes; only a broken test waits so long."""
QUESTION = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model():
    return random_llama()


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        client.drop(*stored(client))
        yield client


@pytest.fixture
def prompt_cache(model, client):
    with PionPromptCache(model, client=client) as prompt_cache:
        yield prompt_cache


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


def prefilled(model, *pieces):
    """What a run without the server has after these pieces of a prompt."""
    cache = make_prompt_cache(model)
    for piece in pieces:
        model(mx.array([piece]), cache=cache)
        mx.eval([slot.state for slot in cache])
    return cache


def bits(cache):
    """Every used bit of a cache of plain rows, whatever its type."""
    word = {2: mx.uint16, 4: mx.uint32}
    return [
        np.asarray(side.view(word[side.itemsize]))
        for slot in cache
        for side in slot.keys_and_values()
    ]


def assert_same_bits(cache, other):
    assert [type(slot) for slot in cache] == [type(slot) for slot in other]
    assert [slot.offset for slot in cache] == [slot.offset for slot in other]
    for mine, theirs in zip(bits(cache), bits(other), strict=True):
        assert np.array_equal(mine, theirs)


def stored(client):
    return {prefix.namespace: prefix for prefix in client.list()}


# A hit


@pytest.mark.parametrize("namespace", [None, "agent|v1"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_hit_does_not_differ_in_a_bit_from_the_prefill_it_saves(client, namespace, dtype):
    model = random_llama(dtype=dtype)
    ids = tokens(300)
    with PionPromptCache(model, client=client) as first:
        first.get_or_prefill(ids, namespace)
    with PionPromptCache(random_llama(dtype=dtype), client=client) as second:
        cache = second.get_or_prefill(ids, namespace)
        stats = second.stats()
    assert_same_bits(cache, prefilled(model, ids))
    assert (stats["hits"], stats["misses"], stats["tokens_served"]) == (1, 0, 300)
    assert (stats["tokens_prefilled"], stats["stores"], stats["skipped"]) == (0, 0, {})
    assert stats["lane"] in ("export", "stream")


def test_the_way_that_rows_take_makes_no_difference(server, client, model):
    ids = tokens(300)
    with PionPromptCache(model, client=client) as near:
        near.get_or_prefill(ids)
        near.flush(WAIT_S)
        exported = near.get_or_prefill(ids)
        assert (near.stats()["lane"], near.stats()["lane_reason"]) == ("export", "")
    with (
        Client(server.address, export=False) as far_client,
        PionPromptCache(model, client=far_client) as far,
    ):
        streamed = far.get_or_prefill(ids)
        assert far.stats()["lane"] == "stream"
        assert far.stats()["lane_reason"]
    assert_same_bits(exported, prefilled(model, ids))
    assert_same_bits(streamed, exported)


OTHER_PROCESS = """
    import json, sys
    from pion_client.mlx import PionPromptCache
    from pion_grpc.cli.decode import greedy
    from pion_grpc.cli.smollm2 import random_llama

    address, ids, question, namespace = json.loads(sys.argv[1])
    model = random_llama()
    prompt_cache = PionPromptCache(model, address=address)
    cache = prompt_cache.get_or_prefill(ids, namespace)
    answer = greedy(model, question, cache, 50).ids
    print(json.dumps([answer, prompt_cache.stats()]))
    # Ends without closing anything.
"""


@pytest.mark.parametrize("namespace", [None, "agent|v1"])
@pytest.mark.usefixtures("client")
def test_a_second_process_does_not_decode_other_tokens(server, model, namespace):
    ids = tokens(200)
    first, missed = programs.asked(OTHER_PROCESS, server.address, ids, QUESTION, namespace)
    second, hit = programs.asked(OTHER_PROCESS, server.address, ids, QUESTION, namespace)
    assert (missed["hits"], missed["misses"]) == (0, 1)
    assert (hit["hits"], hit["misses"], hit["tokens_prefilled"]) == (1, 0, 0)
    assert first == second == greedy(model, QUESTION, prefilled(model, ids), 50).ids
    assert len(set(second)) > 10


def test_a_program_that_ends_at_once_does_not_lose_what_it_prefilled(server, client):
    programs.asked(OTHER_PROCESS, server.address, tokens(500), QUESTION, "last words")
    assert client.lookup("last words").hit


STUCK_PROCESS = """
    import os, signal, sys
    from pion_client import background
    from pion_client.mlx import PionPromptCache
    from pion_grpc.cli.smollm2 import random_llama

    background.EXIT_GRACE_S = 0.2
    prompt_cache = PionPromptCache(random_llama(), address=sys.argv[1])
    prompt_cache.get_or_prefill(list(range(100)))
    assert prompt_cache.stats()["miss_reasons"] == {"not_stored": 1}
    os.kill(int(sys.argv[2]), signal.SIGSTOP)  # what is now stored never ends
"""


def test_a_server_that_hangs_does_not_keep_a_program_from_ending(start_server):
    server = start_server()
    # The client itself gives up a stream without progress after 30 s.
    programs.run(STUCK_PROCESS, server.address, str(server.process.pid), timeout_s=20)


def test_an_installed_cache_can_be_used_on_another_thread(prompt_cache, model):
    ids = tokens(100)
    prompt_cache.get_or_prefill(ids)
    assert prompt_cache.flush(WAIT_S)
    cache = prompt_cache.get_or_prefill(ids)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(greedy(model, QUESTION, cache, 5).ids))
    thread.start()
    thread.join()
    assert answers == [greedy(model, QUESTION, prefilled(model, ids), 5).ids]


@pytest.mark.parametrize("kind", [list, tuple, np.array, mx.array])
def test_no_kind_of_token_ids_is_taken_for_other_tokens(prompt_cache, kind):
    ids = tokens(40)
    prompt_cache.get_or_prefill(ids)
    assert prompt_cache.flush(WAIT_S)
    prompt_cache.get_or_prefill(kind(ids))
    assert prompt_cache.stats()["hits"] == 1


@pytest.mark.parametrize("ids", [[], [-1], [1.5], [[1, 2]], [2**32], ["a"]])
def test_what_are_no_token_ids_is_refused(prompt_cache, ids):
    with pytest.raises(ValueError, match="token id"):
        prompt_cache.get_or_prefill(ids)
    with pytest.raises(ValueError, match="token id"):
        prompt_cache.reuse(ids)


# A name that holds something else


def assert_missed(prompt_cache, reason):
    stats = prompt_cache.stats()
    assert stats["hits"] == 0
    assert stats["miss_reasons"] == {reason: 1}
    assert stats["skipped"] == {reason: 1}
    assert stats["stores"] == 0


@pytest.mark.parametrize(
    "other", [tokens(100, seed=1), tokens(100)[:99], [*tokens(100), 1], [*tokens(100)[:99], 511]]
)
def test_other_tokens_under_a_name_are_neither_installed_nor_overwritten(
    client, prompt_cache, model, other
):
    with PionPromptCache(model, client=client) as first:
        first.get_or_prefill(tokens(100), "name")
    before = stored(client)
    cache = prompt_cache.get_or_prefill(other, "name")
    prompt_cache.flush(WAIT_S)
    assert_same_bits(cache, prefilled(model, other))
    assert_missed(prompt_cache, "tokens_differ")
    assert stored(client) == before


def test_another_models_rows_under_a_name_are_neither_installed_nor_overwritten(client, model):
    ids = tokens(100)
    with PionPromptCache(model, client=client) as first:
        first.get_or_prefill(ids, "name")
    before = stored(client)
    other = random_llama(seed=1)
    with PionPromptCache(other, client=client) as second:
        cache = second.get_or_prefill(ids, "name")
        second.flush(WAIT_S)
        assert_missed(second, "model_differs")
        assert not second.lookup("name")
    assert_same_bits(cache, prefilled(other, ids))
    assert stored(client) == before


@pytest.mark.parametrize("namespace", ["name", None])
@pytest.mark.parametrize("other", [{"kv_heads": 4}, {"dtype": "float16"}, {"layers": 3}], ids=str)
def test_another_layout_is_neither_installed_nor_overwritten(client, model, namespace, other):
    ids = tokens(100)
    with PionPromptCache(model, client=client, model_id="mine") as first:
        first.get_or_prefill(ids, namespace)
    before = stored(client)
    changed = random_llama(**other)
    with PionPromptCache(changed, client=client, model_id="mine") as second:
        cache = second.get_or_prefill(ids, namespace)
        second.flush(WAIT_S)
        assert_missed(second, "layout_differs")
    assert_same_bits(cache, prefilled(changed, ids))
    assert stored(client) == before


def test_another_model_never_finds_what_this_one_stored(client, model):
    ids = tokens(100)
    with PionPromptCache(model, client=client) as first:
        first.get_or_prefill(ids)
    with PionPromptCache(random_llama(seed=1), client=client) as second:
        second.get_or_prefill(ids)
        assert second.stats()["miss_reasons"] == {"not_stored": 1}


def test_a_model_changed_meanwhile_does_not_get_its_old_rows(client):
    model, ids = random_llama(seed=5), tokens(100)
    with PionPromptCache(model, client=client) as prompt_cache:
        prompt_cache.get_or_prefill(ids, "name")
        prompt_cache.flush(WAIT_S)
        model.model.layers[0].self_attn.k_proj.weight[0] = 1.0
        cache = prompt_cache.get_or_prefill(ids, "name")
        assert prompt_cache.stats()["miss_reasons"] == {"not_stored": 1, "model_differs": 1}
        model.set_dtype(mx.float16)
        half = prompt_cache.get_or_prefill(ids)
        prompt_cache.flush(WAIT_S)
        assert prompt_cache.stats()["stored_as"] == "raw F16"
    assert not np.array_equal(bits(cache)[0], bits(prefilled(random_llama(seed=5), ids))[0])
    assert_same_bits(half, prefilled(model, ids))


@pytest.mark.parametrize("namespace", ["", "a\nb", "x" * 201])
def test_a_name_that_cannot_be_one_is_an_error_and_no_failure_of_the_server(
    prompt_cache, namespace
):
    for _ in range(4):
        with pytest.raises(ValueError, match="namespace"):
            prompt_cache.get_or_prefill(tokens(40), namespace)
    assert prompt_cache.stats()["breaker"] == "closed"


# Without a name: the longest beginning, and what follows it


def test_no_token_that_is_stored_is_prefilled_again(client, prompt_cache, model):
    ids = tokens(300)
    prompt_cache.get_or_prefill(ids[:200])
    prompt_cache.flush(WAIT_S)
    cache = prompt_cache.get_or_prefill(ids)
    prompt_cache.flush(WAIT_S)
    stats = prompt_cache.stats()
    assert (stats["tokens_served"], stats["tokens_prefilled"]) == (200, 300)
    assert (stats["hits"], stats["misses"], stats["stores"]) == (1, 1, 2)
    assert_same_bits(cache, prefilled(model, ids[:200], ids[200:]))
    child = client.match(model=model_id(model), token_ids=ids).prefix
    assert (child.token_count, child.base) == (300, 200)
    again = prompt_cache.get_or_prefill(ids)
    assert_same_bits(again, cache)
    assert prompt_cache.stats()["tokens_served"] == 500


def test_a_match_that_ends_inside_a_block_and_inside_a_prefix_is_not_rounded(
    client, prompt_cache, model
):
    ids = tokens(300)
    prompt_cache.get_or_prefill(ids)
    prompt_cache.flush(WAIT_S)
    fork = [*ids[:77], *tokens(60, seed=9)]
    fork[77] = (ids[77] + 1) % 512
    cache = prompt_cache.get_or_prefill(fork)
    prompt_cache.flush(WAIT_S)
    assert prompt_cache.stats()["tokens_served"] == 77
    assert_same_bits(prompt_cache.get_or_prefill(fork), cache)
    assert client.match(model=model_id(model), token_ids=fork).prefix.base == 77


def test_a_short_rest_is_not_dropped_in_silence(client, prompt_cache):
    ids = tokens(131)
    prompt_cache.get_or_prefill(ids[:100])
    prompt_cache.flush(WAIT_S)
    before = stored(client)
    prompt_cache.get_or_prefill(ids)
    prompt_cache.flush(WAIT_S)
    assert prompt_cache.stats()["skipped"] == {"tail_short": 1}
    assert stored(client) == before


@pytest.mark.parametrize("count", [31, 63])
def test_a_short_beginning_does_not_become_everybodys_parent(client, prompt_cache, model, count):
    """Nor what shares not even a block: in a mesh it may be on another node."""
    start = tokens(count)
    prompt_cache.get_or_prefill([*start, *tokens(50, seed=1)])
    prompt_cache.flush(WAIT_S)
    ids = [*start, *tokens(50, seed=2)]
    cache = prompt_cache.get_or_prefill(ids)
    prompt_cache.flush(WAIT_S)
    stats = prompt_cache.stats()
    assert (stats["tokens_served"], stats["stored_whole"]) == (count, {"base_short": 1})
    assert client.match(model=model_id(model), token_ids=ids).prefix.base == 0
    assert_same_bits(prompt_cache.get_or_prefill(ids), cache)


def test_a_conversation_longer_than_a_chain_is_still_kept(client, prompt_cache, model):
    ids = tokens(32 * 36)
    for turn in range(2, 37):
        cache = prompt_cache.get_or_prefill(ids[: 32 * turn])
        prompt_cache.flush(WAIT_S)
    stats = prompt_cache.stats()
    assert (stats["stores"], stats["skipped"]) == (35, {})
    assert stats["stored_whole"] == {"chain_deep": 1}
    assert stats["tokens_prefilled"] == len(ids)
    assert max(prefix.depth for prefix in client.list()) < 32
    assert_same_bits(prompt_cache.get_or_prefill(ids), cache)


def test_a_parent_dropped_while_its_child_waits_does_not_lose_the_child(
    client, prompt_cache, model
):
    ids = tokens(200)
    prompt_cache.get_or_prefill(ids[:100], None)
    prompt_cache.flush(WAIT_S)
    with held_back(prompt_cache):
        cache = prompt_cache.get_or_prefill(ids)
        client.drop(*stored(client))
    prompt_cache.flush(WAIT_S)
    assert prompt_cache.stats()["stored_whole"] == {"parent_gone": 1}
    assert client.match(model=model_id(model), token_ids=ids).prefix.base == 0
    assert_same_bits(prompt_cache.get_or_prefill(ids), cache)


def test_a_parent_replaced_while_its_child_waits_does_not_lend_it_other_rows(
    client, prompt_cache, model
):
    ids = tokens(200)
    prompt_cache.get_or_prefill(ids[:100], None)
    prompt_cache.flush(WAIT_S)
    (name,) = stored(client)
    with held_back(prompt_cache):
        cache = prompt_cache.get_or_prefill(ids)
        layers = [(np.negative(k), v) for k, v in client.fetch(name).layers]
        client.store(name, layers=layers, token_ids=ids[:100], model=model_id(model), replace=True)
    prompt_cache.flush(WAIT_S)
    assert prompt_cache.stats()["stored_whole"] == {"parent_gone": 1}
    assert_same_bits(prompt_cache.get_or_prefill(ids), cache)


def test_a_long_prefill_is_not_split_otherwise_than_mlx_lm_would(prompt_cache, model):
    ids = tokens(2048 + 100)
    cache = prompt_cache.get_or_prefill(ids)
    assert_same_bits(cache, prefilled(model, ids[:2048], ids[2048:]))


# A whole prompt


@pytest.mark.parametrize(("length", "served"), [(50, 49), (100, 99), (101, 100), (160, 100)])
def test_reuse_never_leaves_nothing_to_run(prompt_cache, model, length, served):
    ids = tokens(160)
    ids[100] += 1
    stored_ids = [*ids[:100], ids[100] - 1]
    prompt_cache.get_or_prefill(stored_ids)
    prompt_cache.flush(WAIT_S)
    cache, rest = prompt_cache.reuse(ids[:length])
    assert rest == ids[served:length]
    assert [slot.offset for slot in cache] == [served, served]
    for mine, whole in zip(bits(cache), bits(prefilled(model, stored_ids)), strict=True):
        assert np.array_equal(mine, whole[:, :, :served])
    greedy(model, rest, cache, 3)


def test_reuse_of_what_nobody_stored_is_the_whole_prompt(client, prompt_cache):
    for ids in (tokens(50), [3]):
        cache, rest = prompt_cache.reuse(ids)
        assert rest == ids
        assert all(slot.empty() for slot in cache)
    prompt_cache.flush(WAIT_S)
    assert stored(client) == {}
    assert prompt_cache.stats()["miss_reasons"] == {"not_stored": 1, "too_short": 1}


def test_a_prompt_too_long_to_be_stored_is_no_error(prompt_cache):
    ids = [1] * 1_000_001
    cache, rest = prompt_cache.reuse(ids)
    assert rest == ids
    assert all(slot.empty() for slot in cache)
    assert prompt_cache.stats()["miss_reasons"] == {"invalid": 1}
    assert prompt_cache.stats()["breaker"] == "closed"


# What is stored, and when


@pytest.mark.parametrize("namespace", [None, "name"])
def test_a_prefix_is_not_stored_before_its_second_miss(client, model, namespace):
    ids = tokens(100)
    with PionPromptCache(model, client=client, admission_threshold=2) as prompt_cache:
        prompt_cache.get_or_prefill(ids, namespace)
        prompt_cache.get_or_prefill(tokens(100, seed=1), namespace and "another")
        prompt_cache.flush(WAIT_S)
        assert stored(client) == {}
        assert prompt_cache.stats()["admission_skips"] == 2
        prompt_cache.get_or_prefill(ids, namespace)
        prompt_cache.flush(WAIT_S)
        assert len(stored(client)) == 1
        prompt_cache.get_or_prefill(ids, namespace)
        stats = prompt_cache.stats()
    assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (1, 3, 0.25)
    assert (stats["admission_skips"], stats["admission_threshold"]) == (2, 2)


@pytest.mark.parametrize("namespace", [None, "name"])
def test_no_prefix_is_prefilled_twice_because_it_is_not_stored_yet(prompt_cache, model, namespace):
    ids = tokens(300)
    for turn in range(3):
        cache = prompt_cache.get_or_prefill(ids, namespace)
        assert_same_bits(cache, prefilled(model, ids))
        _, rest = prompt_cache.reuse([*ids, 1])
        assert rest == [1]
        assert prompt_cache.stats()["hits"] == 2 * turn + 1
    assert (prompt_cache.stats()["misses"], prompt_cache.stats()["tokens_prefilled"]) == (1, 300)


def test_what_waits_to_be_stored_does_not_hold_up_who_asks_for_something_else(prompt_cache):
    with held_back(prompt_cache):
        prompt_cache.get_or_prefill(tokens(40), "name")
        prompt_cache.get_or_prefill(tokens(40, seed=1), "another name")
        prompt_cache.get_or_prefill(tokens(40, seed=2))
        stats = prompt_cache.stats()
        assert (stats["misses"], stats["stores"], stats["pending_bytes"] > 0) == (3, 0, True)


class held_back:  # noqa: N801 - reads as a statement
    """Keeps a prompt cache's storing from starting until the block ends."""

    def __init__(self, prompt_cache):
        self._background = prompt_cache._background
        self._open = threading.Event()

    def __enter__(self):
        assert self._background.put(lambda: self._open.wait(WAIT_S), size_bytes=0)
        return self

    def __exit__(self, *_):
        self._open.set()


def test_what_the_caller_appends_before_its_prefix_is_stored_is_not_stored(
    client, prompt_cache, model
):
    ids = tokens(300)
    with held_back(prompt_cache):
        cache = prompt_cache.get_or_prefill(ids, "name")
        greedy(model, QUESTION, cache, 300)  # fills the buffer and grows it
        for slot in cache:
            slot.trim(500)
        greedy(model, tokens(60, seed=3), cache, 2)  # over the rows that wait to be stored
    prompt_cache.flush(WAIT_S)
    prefix = client.fetch("name")
    assert prefix.token_count == 300
    expected = prefilled(model, ids)
    for (keys, values), slot in zip(prefix.layers, expected, strict=True):
        wanted = slot.keys_and_values()
        assert np.array_equal(keys, np.asarray(wanted[0])[0])
        assert np.array_equal(values, np.asarray(wanted[1])[0])


def test_what_finds_no_room_is_not_stored_in_silence(client, model):
    with PionPromptCache(model, client=client) as prompt_cache:
        with held_back(prompt_cache):
            for seed in range(70):
                prompt_cache.get_or_prefill(tokens(40, seed=seed))
        prompt_cache.flush(WAIT_S)
        stats = prompt_cache.stats()
    assert stats["skipped"]["queue_full"] + stats["stores"] == 70
    assert len(stored(client)) == stats["stores"] > 0


def test_nothing_is_stored_after_the_end(client, model):
    prompt_cache = PionPromptCache(model, client=client)
    prompt_cache.close()
    cache = prompt_cache.get_or_prefill(tokens(40))
    assert cache[0].offset == 40
    assert prompt_cache.stats()["skipped"] == {"closed": 1}


def test_the_prefill_time_reported_is_neither_lost_nor_invented(client, prompt_cache, model):
    ids = tokens(300)
    prompt_cache.get_or_prefill(ids[:100])
    first_ms = prompt_cache.stats()["last_prefill_ms"]
    prompt_cache.flush(WAIT_S)
    prompt_cache.get_or_prefill(ids)
    rest_ms = prompt_cache.stats()["last_prefill_ms"]
    prompt_cache.flush(WAIT_S)
    match = client.match(model=model_id(model), token_ids=ids)
    assert match.prefix.prefill_ms == pytest.approx(first_ms + rest_ms)
    client.store(
        "unmeasured", layers=client.fetch(match.namespace).layers, token_ids=ids, model="x"
    )
    with PionPromptCache(model, client=client, model_id="x") as other:
        other.get_or_prefill([*ids, *tokens(50, seed=4)])
        other.flush(WAIT_S)
        longest = client.match(model="x", token_ids=[*ids, *tokens(50, seed=4)]).prefix
    assert (longest.token_count, longest.base, longest.prefill_ms) == (350, 300, 0)


# Caches that are not kept


class NearlyKVCache(KVCache):
    """A subclass may keep anything."""


def unknown_caches(model):
    return [NearlyKVCache() for _ in model.layers]


@pytest.mark.parametrize("namespace", [None, "name"])
def test_a_cache_that_cannot_be_kept_exactly_is_not_stored_but_works(client, model, namespace):
    ids = tokens(40)
    with PionPromptCache(model, client=client, make_cache=unknown_caches) as prompt_cache:
        cache = prompt_cache.get_or_prefill(ids, namespace)
        _, rest = prompt_cache.reuse(ids)
        assert not prompt_cache.lookup("name")
        stats = prompt_cache.stats()
    assert [type(slot) for slot in cache] == [NearlyKVCache] * 2
    assert greedy(model, QUESTION, cache, 20).ids == (
        greedy(model, QUESTION, prefilled(model, ids), 20).ids
    )
    assert rest == ids
    ((reason, count),) = stats["skipped"].items()
    assert reason.startswith("NearlyKVCache: ")
    assert count == 2
    assert (stats["miss_reasons"], stats["stored_as"]) == ({"unsupported_cache": 2}, "not stored")
    assert stored(client) == {}


# A server that is down, slow or wrong


@pytest.fixture
def nobody():
    """An address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def silence():
    """An address that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def babble():
    """An address where something else speaks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def speak():
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(b"-ERR unknown command\r\n" * 10)

        thread = threading.Thread(target=speak)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("where", ["nobody", "silence", "babble"])
def test_a_server_that_does_not_answer_changes_nothing_and_is_left_alone(where, model, request):
    address, ids = request.getfixturevalue(where), tokens(60)
    with PionPromptCache(model, address=address, deadline_s=0.3) as prompt_cache:
        for turn in range(6):
            cache = prompt_cache.get_or_prefill(ids, "name" if turn % 2 else None)
            assert_same_bits(cache, prefilled(model, ids))
        _, rest = prompt_cache.reuse(ids)
        assert not prompt_cache.lookup("name")
        stats = prompt_cache.stats()
    assert rest == ids
    assert (stats["hits"], stats["misses"], stats["stores"]) == (0, 7, 0)
    assert stats["breaker"] == "open"
    asked = 7 - stats["miss_reasons"].pop("breaker_open")
    assert 1 <= asked <= 3
    assert sum(stats["miss_reasons"].values()) == asked
    assert sum(stats["skipped"].values()) == 7


def test_a_server_that_comes_back_is_not_given_up(start_server, model):
    server, ids = start_server(), tokens(100)
    with PionPromptCache(model, address=server.address) as prompt_cache:
        prompt_cache._exchange.breaker = Breaker(open_s=0)
        prompt_cache.get_or_prefill(ids)
        assert prompt_cache.flush(WAIT_S)
        server.kill()
        assert_same_bits(prompt_cache.get_or_prefill(ids), prefilled(model, ids))
        assert prompt_cache.stats()["skipped"] == {"unavailable": 1}
        start_server()
        for _ in range(10_000):  # the connection takes a moment to be tried anew
            cache = prompt_cache.get_or_prefill(ids)
            if prompt_cache.stats()["hits"]:
                break
        assert_same_bits(cache, prefilled(model, ids))
        assert prompt_cache.stats()["hits"] == 1
        assert prompt_cache.stats()["breaker"] == "closed"


def test_a_deadline_is_paid_once(silence, model):
    with PionPromptCache(model, address=silence, deadline_s=0.3) as prompt_cache:
        for _ in range(3):
            prompt_cache.get_or_prefill(tokens(40))
        reasons = prompt_cache.stats()["miss_reasons"]
    assert reasons == {"deadline_exceeded": 1, "breaker_open": 2}


def test_a_server_that_is_away_is_asked_once_per_call(model):
    asked = []

    def away(_, call):
        asked.append(call)
        call.abort(grpc.StatusCode.UNAVAILABLE, "from a proxy")

    handlers = {name: grpc.unary_unary_rpc_method_handler(away) for name in ("Match", "Lookup")}
    proxy = grpc.server(futures.ThreadPoolExecutor(1))
    proxy.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("pion.v1.PrefixStore", handlers),)
    )
    port = proxy.add_insecure_port("127.0.0.1:0")
    proxy.start()
    with PionPromptCache(model, port=port) as prompt_cache:
        for turn in range(4):
            prompt_cache.get_or_prefill(tokens(40), "name" if turn % 2 else None)
        reasons = prompt_cache.stats()["miss_reasons"]
    proxy.stop(None).wait()
    assert reasons == {"unavailable": 3, "breaker_open": 1}
    assert len(asked) == 3


# Options


@pytest.mark.parametrize(
    "option",
    [
        {"vquant": "fp12"},
        {"vquant": "mlx_affine(4,33,f16)"},
        {"admission_threshold": 0},
        {"boundary_protect": -1},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"model_id": "x" * 200},
        {"model_id": "\ud800"},
        {"address": "a:1", "port": 2},
    ],
    ids=str,
)
def test_options_without_sense_are_refused(model, option):
    with pytest.raises(ValueError, match=r"."):
        PionPromptCache(model, **option)


def test_host_and_port_are_not_another_address_than_both_in_one(start_server, model):
    server = start_server(listen="127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    with PionPromptCache(model, host=host, port=int(port)) as first:
        first.get_or_prefill(tokens(40))
    with PionPromptCache(model, address=server.address) as second:
        second.get_or_prefill(tokens(40))
        assert second.stats()["hits"] == 1


def test_a_namespace_made_of_parts_does_not_drift():
    assert PionPromptCache.make_namespace("m", "t", "fp16") == "61a226ee7dc6bcf4203f91316777d237"


def test_lookup_does_not_promise_what_the_next_call_does_not_keep(prompt_cache, model, client):
    assert not prompt_cache.lookup("name")
    prompt_cache.get_or_prefill(tokens(40), "name")
    prompt_cache.flush(WAIT_S)
    assert prompt_cache.lookup("name")
    with PionPromptCache(random_llama(seed=1), client=client) as other:
        assert not other.lookup("name")


def test_what_another_has_stored_meanwhile_is_not_counted_as_a_store(prompt_cache, client, model):
    ids, release = tokens(100), threading.Event()
    with PionPromptCache(model, client=client) as other:
        for cache in (prompt_cache, other):  # both miss, before either has stored
            cache._background.put(release.wait, size_bytes=0)
            cache.get_or_prefill(ids, "same")
        release.set()
        for cache in (prompt_cache, other):
            assert cache.flush(WAIT_S)
        counted = [
            (c.stats()["stores"], c.stats()["already_stored"]) for c in (prompt_cache, other)
        ]
    assert sorted(counted) == [(0, 1), (1, 0)]


def test_no_promised_figure_is_missing(prompt_cache):
    promised = (
        "hits misses hit_rate fetch_ms_total store_ms_total last_prefill_ms admission_skips "
        "admission_threshold skipped lane"
    )
    assert set(promised.split()) <= prompt_cache.stats().keys()
    assert prompt_cache.stats()["hit_rate"] == 0.0
    json.dumps(prompt_cache.stats())
