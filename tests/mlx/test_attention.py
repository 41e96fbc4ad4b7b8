"""Attention over prefixes on the server, through mlx-lm: what a model writes must not change by it."""

import contextlib
import copy
import os
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, llama, mamba
from mlx_lm.models.cache import (
    KVCache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from pion_client import AttendState, Client, attention
from pion_client.caches import UnsupportedCache
from pion_client.errors import Cold, NotStored, NotSupported, OverBudget
from pion_client.mlx import (
    PatchError,
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_client.residency import Kept, NotResident, Residency, session_name
from pion_grpc.backends import Dense
from pion_grpc.backends.reference import attend as reference
from pion_grpc.cli.decode import greedy
from pion_grpc.cli.smollm2 import random_llama
from tests.mlx import families, programs

WAIT_S = 60.0
"""Longer than anything here takes; only a broken test waits so long."""
QUESTION = [5, 6, 7, 8]
NO_INPROC = {"PION_PROMPT_CACHE_NO_INPROC": "1"}
LANES = {
    "in-process": {},
    "stream": NO_INPROC,
    "unary": {**NO_INPROC, "PION_PROMPT_CACHE_NO_STREAM": "1"},
    "stream, joined here": {**NO_INPROC, "PION_DISABLE_FUSED_ATTEND": "1"},
}
MODELS = {
    "grouped": {"heads": 4, "kv_heads": 2},
    "one K/V head": {"heads": 4, "kv_heads": 1},
    "not grouped": {"heads": 4, "kv_heads": 4},
    "wide heads": {"heads": 2, "kv_heads": 2, "head_dim": 96},
}
SPARSE = {"K_block": 16, "K_blocks": 3}


@pytest.fixture(autouse=True)
def patch():
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


@pytest.fixture(params=LANES)
def lane(request, monkeypatch):
    """Switches every other lane off; the name that `stats` has for it."""
    for name, value in LANES[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param.partition(",")[0]


@pytest.fixture
def served(monkeypatch):
    """Attention runs on the server."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        client.drop(*(prefix.namespace for prefix in client.list()))
        client.attend_drop(session_name("prefix"))
        yield client


@pytest.fixture(scope="module")
def model():
    return random_llama()


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


IDS = tokens(150)


def prefilled(model, ids=None):
    cache = make_prompt_cache(model)
    model(mx.array([ids or IDS]), cache=cache)
    mx.eval([slot.state for slot in cache])
    return cache


def alone(model, ids=None, count=50):
    """What the model writes without any server."""
    return greedy(model, QUESTION, prefilled(model, ids), count).ids


def begun(model, client, ids=None, name="prefix"):
    """A prompt cache whose prefix is stored and resident."""
    prompt_cache = PionPromptCache(model, client=client, stage2=True)
    prompt_cache.get_or_prefill(ids or IDS, name)
    assert prompt_cache.flush(WAIT_S)
    return prompt_cache


def session_of(client, name="prefix"):
    """The session of what is stored under a name now."""
    prefix = client.lookup(name).prefix
    return session_name(name, prefix.generation, prefix.token_count)


def resident(client, name="prefix", layers=2):
    entries = client.attend_lookup(session_of(client, name), range(layers))
    return [entry.state is AttendState.RESIDENT for entry in entries]


# What is written


@pytest.mark.parametrize("kind", MODELS)
def test_fifty_tokens_do_not_differ_on_any_lane(client, lane, kind):
    model = random_llama(**MODELS[kind])
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)
        stats = prompt_cache.stats()
    assert stats["lane"] == lane
    assert stats["attend"]["reason"] == ""
    # Two passes for the question, one for each token, and the last is begun with: two layers each.
    assert stats["attend"]["calls"] == (0 if lane == "in-process" else 2 * 52)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_not_lost_on_the_way(client, lane, dtype):
    """Logits, not tokens: with random weights the best two are closer than the last bits reach."""
    model = random_llama(dtype=dtype)
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert prompt_cache.stats()["stored_as"] == f"raw {'F16' if dtype == 'float16' else 'BF16'}"
        assert_logits(model, cache, prefilled(model), 0.05 if dtype == "float16" else 0.3)


def assert_logits(model, cache, other, tolerance):
    for ids in (QUESTION, [9], [10, 11]):
        got, want = (
            np.asarray(model(mx.array([ids]), cache=one).astype(mx.float32))
            for one in (cache, other)
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
    assert [slot.offset for slot in cache] == [slot.offset for slot in other]


def test_logits_do_not_drift_from_those_of_a_local_cache(client, lane, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert_logits(model, cache, prefilled(model), 1e-4)


def test_twenty_tokens_of_a_half_precision_model_survive_half_precision_residency(
    start_server, served
):
    model = random_llama(dtype="float16")
    server = start_server("--attend-dtype", "f16")
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, count=20)
        assert prompt_cache.stats()["lane"] == "stream"


def test_a_server_that_shows_others_a_window_shows_a_model_everything(start_server, served, model):
    server = start_server("--fa-window", "5")
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, count=20)


def test_long_questions_are_not_cut(client, served, model, monkeypatch):
    """In pieces, because a message has an end; and joined here, because the suffix is long."""
    monkeypatch.setattr(attention, "QUERY_BYTES_MAX", 4 * 4 * 16 * 7)  # seven queries
    question = tokens(60, seed=3)
    want = greedy(model, question, prefilled(model), 10).ids
    for fused_bytes in (0, 4_000, 1 << 30):
        monkeypatch.setattr(attention, "FUSED_BYTES_MAX", fused_bytes)
        with begun(model, client) as prompt_cache:
            cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
            assert greedy(model, question, cache, 10).ids == want


OTHER_PROCESS = """
    import json, sys
    import pion_client.mlx as pion
    from pion_grpc.cli.decode import greedy
    from pion_grpc.cli.smollm2 import random_llama

    address, ids, question = json.loads(sys.argv[1])
    model = random_llama()
    pion.install_pion_attention_patch()
    with pion.PionPromptCache(model, address=address, stage2=True) as prompt_cache:
        first = prompt_cache.get_or_prefill(ids, "prefix")
        answers = [greedy(model, question, first, 50).ids]
        cache = pion.make_pion_prompt_cache(model, "prefix", prompt_cache, len(ids))
        answers.append(greedy(model, question, cache, 50).ids)
        print(json.dumps([answers, prompt_cache.stats()]))
"""


def test_a_second_process_sends_queries_and_fetches_nothing(server, client, model):
    with begun(model, client):
        pass
    before = client.stats()
    answers, stats = programs.asked(OTHER_PROCESS, server.address, IDS, QUESTION)
    assert answers == [alone(model)] * 2
    assert (stats["hits"], stats["misses"], stats["tokens_prefilled"]) == (1, 0, 0)
    assert (stats["lane"], stats["fetch_ms_total"]) == ("stream", 0.0)
    after = client.stats()
    assert after.bytes_streamed == before.bytes_streamed
    assert after.bytes_exported == before.bytes_exported


# Rows and residency


def test_rows_without_residency_are_not_prefilled_again(client, served, model):
    with begun(model, client) as first:
        assert first.attend_drop("prefix") == 2
        assert resident(client) == [False, False]
    with PionPromptCache(model, client=client, stage2=True) as second:
        cache = second.get_or_prefill(IDS, "prefix")
        assert resident(client) == [True, True]
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)
        assert second.stats()["tokens_prefilled"] == 0
        second.attend_drop("prefix")
        assert second.lookup("prefix")
        assert resident(client) == [True, True]
        assert not second.lookup("nothing")


def test_one_layer_that_is_not_resident_is_noticed(client, served, model):
    with begun(model, client) as prompt_cache:
        session = session_of(client)
        client.attend_drop(session, 1)
        assert prompt_cache.lookup("prefix")
        assert resident(client) == [True, True]


def test_without_the_patch_a_hit_is_fetched_and_the_rows_are_resident_all_the_same(
    client, served, model
):
    uninstall_pion_attention_patch()
    with begun(model, client):
        pass
    with PionPromptCache(model, client=client, stage2=True) as second:
        cache = second.get_or_prefill(IDS, "prefix")
        assert {type(slot) for slot in cache} == {KVCache}
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)
        assert second.stats()["lane"] in ("export", "stream")
        assert resident(client) == [True, True]


def test_rows_at_hand_are_not_prefilled_again_when_the_server_has_lost_them(client, model):
    with begun(model, client) as prompt_cache:
        client.drop("prefix")
        cache = prompt_cache.get_or_prefill(IDS, "prefix")
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)
        assert prompt_cache.stats()["tokens_prefilled"] == len(IDS)  # once, at first
        assert prompt_cache.flush(WAIT_S)
        assert client.lookup("prefix").hit


def test_rows_at_hand_are_not_changed_by_who_uses_them(client, model):
    with begun(model, client) as prompt_cache:
        for _ in range(3):
            cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
            assert greedy(model, QUESTION, cache, 50).ids == alone(model)
            assert greedy(model, QUESTION, prompt_cache.get_or_prefill(IDS, "prefix"), 5).ids
        assert prompt_cache.stats()["attend"]["calls"] == 0


def test_other_tokens_under_a_name_do_not_meet_rows_at_hand(client, model):
    others = tokens(150, seed=7)
    with begun(model, client) as prompt_cache:
        cache = prompt_cache.get_or_prefill(others, "prefix")
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, others, 20)
        assert prompt_cache.stats()["miss_reasons"]["tokens_differ"] == 1


def test_rows_of_other_weights_are_not_at_hand_any_more(client, model):
    changing = random_llama(seed=5)
    with begun(changing, client) as prompt_cache:
        changing.model.layers[0].self_attn.k_proj.weight[0] = 1.0
        cache = prompt_cache.get_or_prefill(IDS, "prefix")
        assert greedy(changing, QUESTION, cache, 20).ids == alone(changing, count=20)
        cache = make_pion_prompt_cache(changing, "prefix", prompt_cache, len(IDS))
        assert greedy(changing, QUESTION, cache, 20).ids == alone(changing, count=20)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_name_that_others_use_for_other_tokens_is_not_attended_to(
    client, model, monkeypatch, elsewhere
):
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", str(int(elsewhere)))
    others = tokens(150, seed=7)
    with (
        begun(model, client, others),
        PionPromptCache(model, client=client, stage2=True) as mine,
    ):
        mine.get_or_prefill(IDS, "prefix")
        cache = make_pion_prompt_cache(model, "prefix", mine, len(IDS))
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, count=20)


def test_a_prefix_that_grows_does_not_change_what_is_written(client, served, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        session = session_of(client)
        more = np.ones((2, 8, 16), np.float32)

        def grow():
            for slot in range(2):
                for side in "kv":
                    client.write_rows("prefix", slot=slot, side=side, first_row=150, rows=more)
            assert PionPromptCache(model, client=client).warm("prefix") == 2
            assert session_of(client) != session
            assert client.attend_lookup(session, [0])[0].rows == 150
            client.attend_drop(session)

        assert interrupted(model, cache, 10, grow) == by_hand(model, 10)
        assert prompt_cache.stats()["lane"] == "stream"  # of 158 rows the server shows it 150


def test_kept_rows_do_not_exceed_their_budget(client):
    residency = Residency(client, kept_bytes_max=2_500)

    def kept(size):
        rows = Kept("", b"\0" * 4, [_Sized(size)])
        assert rows.size_bytes == size
        return rows

    for name, size in (("a", 1_000), ("b", 1_000), ("c", 1_000)):
        residency.keep(name, kept(size))
    assert [residency.kept(name, 1) is not None for name in "abc"] == [False, True, True]
    residency.keep("b", kept(3_000))
    assert residency.kept("b", 1) is None
    assert residency.stats()["kept_bytes"] == 1_000


def _Sized(size):  # noqa: N802
    return (mx.zeros(size, mx.uint8),)


def test_a_prefix_of_nobody_cannot_be_attended_to(client, model, lane):
    with (
        PionPromptCache(model, client=client, stage2=True) as prompt_cache,
        pytest.raises(NotStored, match="get_or_prefill"),
    ):
        make_pion_prompt_cache(model, "nothing", prompt_cache, 10)


def test_a_part_of_a_prefix_is_attended_to_here(client, served, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, 70)
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, IDS[:70], 20)
        assert prompt_cache.stats()["attend"]["reason"] == "not_resident"
        with pytest.raises(NotResident, match="150 tokens, not 151"):
            make_pion_prompt_cache(model, "prefix", prompt_cache, 151)


# When the server loses what it had


def steps(model, cache, count):
    """Decodes by hand, a token at a time; yields each before the next is computed."""
    ids = QUESTION
    for _ in range(count):
        logits = model(mx.array([ids]), cache=cache)[0, -1]
        ids = [int(mx.argmax(logits))]
        yield ids[0]


def interrupted(model, cache, count, accident):
    """What is written if something happens after the third token."""
    written = []
    for token in steps(model, cache, count):
        written.append(token)
        if len(written) == 3:
            accident()
    return written


def by_hand_over(model, cache, count):
    return list(steps(model, cache, count))


def by_hand(model, count, ids=None):
    return by_hand_over(model, prefilled(model, ids), count)


def test_an_entry_that_went_cold_comes_back_and_nobody_notices(start_server, served, model):
    size = 2 * 2 * 2 * 16 * 150 * 4  # both layers
    server = start_server("--resident-budget", str(size))
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))

        def push_out():
            rows = np.zeros((2, 150, 16), np.float32)
            client.attend_store("another", 0, rows, rows)
            client.attend_store("another", 1, rows, rows)
            assert resident(client) == [False, False]

        assert interrupted(model, cache, 10, push_out) == by_hand(model, 10)
        assert prompt_cache.cold_rehydrates_observed == 1
        assert prompt_cache.stats()["attend"]["cold_rehydrates"] == 1
        assert prompt_cache.stats()["lane"] == "stream"
        assert client.describe().attend_rehydrates == 2


def test_a_restart_of_the_server_is_not_noticed(start_server, served, model):
    server = start_server()
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))

        def restart():
            assert server.stop() == 0
            start_server()

        assert interrupted(model, cache, 10, restart) == by_hand(model, 10)
        assert prompt_cache.stats()["lane"] == "stream"
        assert prompt_cache.stats()["tokens_prefilled"] == len(IDS)  # once, at first


def test_a_server_that_dies_costs_a_prefill_and_no_token(start_server, served, model):
    server = start_server()
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        # What was at hand is not: as in a process that has not prefilled it.
        prompt_cache.residency.keep("prefix", Kept("", b"", []))
        assert interrupted(model, cache, 10, server.kill) == by_hand(model, 10)
        stats = prompt_cache.stats()
        assert (stats["lane"], stats["attend"]["reason"]) == ("in-process", "unavailable")
        assert stats["tokens_prefilled"] == 2 * len(IDS)
        assert [slot.offset for slot in cache] == [len(IDS) + len(QUESTION) + 9] * 2


def test_a_prefix_replaced_meanwhile_does_not_change_what_is_written(client, served, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))

        def replaced():
            replace(model, client)

        assert interrupted(model, cache, 10, replaced) == by_hand(model, 10)
        stats = prompt_cache.stats()
        assert (stats["lane"], stats["attend"]["reason"]) == ("in-process", "generation")


OTHERS = tokens(150, seed=9)


def replace(model, client):
    """Stores other tokens under the name, and lets the server forget what it held of it."""
    session = session_of(client)
    client.store(
        "prefix",
        layers=[
            (slot.keys[0, :, :150], slot.values[0, :, :150]) for slot in prefilled(model, OTHERS)
        ],
        token_ids=OTHERS,
        model=client.lookup("prefix").prefix.model,
        replace=True,
    )
    with contextlib.suppress(NotSupported):
        client.attend_drop(session)


HIDING = mx.arange(153)[None] > mx.arange(3)[:, None] + 9


@pytest.mark.parametrize("hidden", [False, True], ids=["pushed out", "hidden by a mask"])
def test_who_knows_only_a_name_does_not_go_on_with_what_has_taken_it(client, served, model, hidden):
    with begun(model, client), PionPromptCache(model, client=client, stage2=True) as second:
        cache = make_pion_prompt_cache(model, "prefix", second, len(IDS))
        q, k, v = given()
        attended = cache[0].update_and_fetch(k, v)
        if not hidden:
            base.scaled_dot_product_attention(q, *attended, cache[0], 0.25, "causal")
        replace(model, client)
        mask = HIDING if hidden else "causal"
        with pytest.raises(NotStored, match="not known"):
            base.scaled_dot_product_attention(q, *attended, cache[0], 0.25, mask)


def test_who_wants_something_else_under_a_name_by_now_goes_on_with_what_it_had(
    client, served, model
):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        by_hit = prompt_cache.get_or_prefill(IDS, "prefix")

        def replaced():
            replace(model, client)
            prompt_cache.get_or_prefill(OTHERS, "prefix")

        assert interrupted(model, cache, 10, replaced) == by_hand(model, 10)
        assert by_hand_over(model, by_hit, 10) == by_hand(model, 10)
        others = make_pion_prompt_cache(model, "prefix", prompt_cache, len(OTHERS))
        assert by_hand_over(model, others, 10) == by_hand(model, 10, OTHERS)


def test_rows_of_a_generation_are_fetched_as_long_as_they_are_stored(client, served, model):
    """By who knows only the name: nothing has changed, so nothing must be refused."""
    with begun(model, client), PionPromptCache(model, client=client, stage2=True) as second:
        cache = make_pion_prompt_cache(model, "prefix", second, len(IDS))
        q, k, v = given()
        got = base.scaled_dot_product_attention(
            q, *cache[0].update_and_fetch(k, v), cache[0], 0.25, HIDING
        )
        want = expected(model, q, k, v, HIDING)
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)


def test_rows_of_unknown_tokens_are_not_taken_for_none(client, served, model):
    with begun(model, client), PionPromptCache(model, client=client, stage2=True) as second:
        for slot, pair in enumerate(client.fetch("prefix", rows=(0, 1)).layers):
            for side, row in zip("kv", pair, strict=True):
                client.write_rows("prefix", slot=slot, side=side, first_row=len(IDS), rows=row)
        with pytest.raises(NotStored):
            second.rows_for("prefix", len(IDS) + 1)


@pytest.mark.parametrize("attend", ["auto", "off"])
def test_rows_fetched_by_name_do_not_outlive_what_the_name_means(start_server, model, attend):
    server = start_server("--attend", attend)
    with (
        Client(server.address) as client,
        begun(model, client),
        PionPromptCache(model, client=client, stage2=True) as second,
    ):
        second.rows_for("prefix", len(IDS))

        def written():
            cache = make_pion_prompt_cache(model, "prefix", second, len(IDS))
            return by_hand_over(model, cache, 10)

        assert written() == by_hand(model, 10)
        assert second.stats()["lane"] == "in-process"
        replace(model, client)
        assert written() == by_hand(model, 10, OTHERS)
        client.drop("prefix")
        with pytest.raises(NotStored):
            written()


def test_a_server_without_attend_is_no_worse_than_one_that_only_stores(start_server, served, model):
    server = start_server("--attend", "off")
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        assert prompt_cache.stats()["attend"]["reason"] == "no_backend"
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)
        assert prompt_cache.lookup("prefix")
        with PionPromptCache(model, client=client, stage2=True) as second:
            second.get_or_prefill(IDS, "prefix")
            assert second.stats()["hits"] == 1
            assert second.stats()["breaker"] == "closed"


def test_a_server_without_room_is_no_worse_than_one_that_only_stores(start_server, served, model):
    server = start_server("--resident-budget", "10000")
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        assert prompt_cache.stats()["attend"]["reason"] == "budget"
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)


def test_no_server_at_all_leaves_a_model_to_itself(model, served):
    with PionPromptCache(model, address="127.0.0.1:1", stage2=True, deadline_s=0.5) as prompt_cache:
        prompt_cache.get_or_prefill(IDS, "prefix")
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, count=20)


# What the server cannot say


def served_cache(model, client):
    prompt_cache = begun(model, client)
    cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
    return prompt_cache, cache[0]


def given(count=3):
    """What a layer hands to attention: q, k, v of the tokens after the prefix."""
    noise = mx.random.normal((1, 8, count, 16), key=mx.random.key(1))
    return noise[:, :4], noise[:, 4:6], noise[:, 6:]


def expected(model, q, k, v, mask, sinks=None):
    keys, values = prefilled(model)[0].keys_and_values()
    return mx.fast.scaled_dot_product_attention(
        q,
        mx.concatenate([keys, k], axis=2),
        mx.concatenate([values, v], axis=2),
        scale=0.25,
        mask=mask,
        sinks=sinks,
    )


MASKS = {
    "prefix visible": (lambda: mx.tril(mx.ones((3, 153), mx.bool_), 150), ""),
    "added": (lambda: mx.where(mx.tril(mx.ones((1, 1, 3, 153)), 150) > 0, 0.0, -1e9), ""),
    "prefix partly hidden": (lambda: mx.arange(153)[None] > mx.arange(3)[:, None] + 9, "mask"),
    "added to the prefix": (lambda: mx.random.normal((3, 153), key=mx.random.key(2)), "mask"),
    "none": (lambda: None, ""),
    "causal": (lambda: "causal", ""),
}


@pytest.mark.parametrize("kind", MASKS)
def test_no_mask_is_ignored(client, served, model, kind):
    make, reason = MASKS[kind]
    prompt_cache, cache = served_cache(model, client)
    with prompt_cache:
        q, k, v = given()
        keys, values = cache.update_and_fetch(k, v)
        got = base.scaled_dot_product_attention(q, keys, values, cache, 0.25, make())
        want = expected(model, q, k, v, make())
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)
        assert prompt_cache.stats()["attend"]["reason"] == reason


def test_what_the_server_does_not_know_is_computed_here(client, served, model):
    prompt_cache, cache = served_cache(model, client)
    with prompt_cache:
        q, k, v = given()
        sinks = mx.array([1.0, -2.0, 0.5, 3.0])
        keys, values = cache.update_and_fetch(k, v)
        got = base.scaled_dot_product_attention(q, keys, values, cache, 0.25, "causal", sinks)
        want = expected(model, q, k, v, "causal", sinks)
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)
        assert prompt_cache.stats()["attend"]["reason"] == "sinks"


def test_layers_that_attend_to_anothers_rows_see_none_of_them_twice(client, served, model):
    prompt_cache, cache = served_cache(model, client)
    with prompt_cache:
        q, k, v = given()
        cache.update_and_fetch(k, v)
        keys, values = cache.keys_and_values()
        hidden = MASKS["prefix partly hidden"][0]()
        for mask in ("causal", hidden, "causal"):  # the second brings the rows here
            got = base.scaled_dot_product_attention(q, keys, values, None, 0.25, mask)
            want = expected(model, q, k, v, mask)
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)
        assert prompt_cache.stats()["lane"] == "in-process"


SERVED_FAMILIES = {
    "attention of another module": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
    "a language model within": ("qwen2_vl", {"num_hidden_layers": 2}),
    "layers without rows": (
        "afm7",
        {"hidden_dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
        | {"num_kv_reuse_layers": 2},
    ),
}
OTHER_FAMILIES = {
    "attention of its own": ("gemma2", {"num_hidden_layers": 2, "head_dim": 8}),
    "keys in another type": (
        "stablelm",
        {"num_hidden_layers": 2, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5}
        | {"use_qkv_bias": False},
    ),
}


def family_served(client, kind):
    """A model of a family, and its tokens, stored and resident; another cache for them."""
    name, changes = kind
    model, ids = families.build(name, **changes), families.tokens(60)
    begun(model, client, ids).close()
    second = PionPromptCache(model, client=client, stage2=True)
    return model, ids, second


@pytest.mark.parametrize("kind", SERVED_FAMILIES)
def test_attention_that_comes_on_other_ways_is_not_sent_away(client, served, kind):
    model, ids, second = family_served(client, SERVED_FAMILIES[kind])
    with second:
        for cache in (
            second.get_or_prefill(ids, "prefix"),
            make_pion_prompt_cache(model, "prefix", second, len(ids)),
        ):
            assert {type(slot) for slot in cache} == {attention.PionCache}
            assert greedy(model, QUESTION, cache, 20).ids == alone(model, ids, 20)
            assert second.stats()["lane"] == "stream"


@pytest.mark.parametrize("kind", OTHER_FAMILIES)
def test_a_model_that_goes_past_the_patch_meets_nothing_but_rows(client, served, kind):
    model, ids, second = family_served(client, OTHER_FAMILIES[kind])
    with second:
        cache = second.get_or_prefill(ids, "prefix")
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, ids, 20)
        stats = second.stats()
        assert (stats["hits"], stats["attend"]["reason"]) == (1, "attention")
        with pytest.raises(RuntimeError, match="does not go through"):
            make_pion_prompt_cache(model, "prefix", second, len(ids))


def test_a_model_that_goes_past_the_patch_is_not_said_to_choose_among_rows(client):
    model = families.build("gemma2", num_hidden_layers=2, head_dim=8)
    ids = families.tokens(60)
    with (
        begun(model, client, ids) as prompt_cache,
        pytest.raises(RuntimeError, match="does not go through"),
    ):
        make_pion_prompt_cache(model, "prefix", prompt_cache, len(ids), SPARSE)


def test_several_sequences_do_not_share_one_cache(client, lane, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        with pytest.raises(ValueError, match="2 sequences"):
            model(mx.array([QUESTION, QUESTION]), cache=cache)


# The patch


def test_other_caches_are_treated_as_before(model):
    patched = alone(model)
    uninstall_pion_attention_patch()
    assert alone(model) == patched
    assert not attention.is_installed()


def test_installing_twice_is_not_installing_over_itself():
    install_pion_attention_patch()
    uninstall_pion_attention_patch()
    assert base.scaled_dot_product_attention is attention._original


OTHER_RELEASE = """
    from mlx_lm.models import base

    def scaled_dot_product_attention(queries, keys, values, mask, *, softcap):
        raise AssertionError("never called")

    base.scaled_dot_product_attention = scaled_dot_product_attention

    from mlx_lm.models import llama
    from pion_client.mlx import PatchError, install_pion_attention_patch

    try:
        install_pion_attention_patch()
    except PatchError as error:
        assert "(queries, keys, values, mask, *, softcap)" in str(error), error
    else:
        raise SystemExit("patched all the same")
    assert base.scaled_dot_product_attention is scaled_dot_product_attention
    assert llama.scaled_dot_product_attention is scaled_dot_product_attention
"""


def test_another_release_of_mlx_lm_is_named_and_left_alone():
    programs.run(OTHER_RELEASE)


def wrapped(queries, keys, values, cache, scale, mask=None, sinks=None, softcap=0):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    "modules", [[base, llama], [base], [llama]], ids=["all", "base", "model's"]
)
def test_attention_that_was_wrapped_since_is_named_and_left_alone(monkeypatch, modules):
    """By another patch, after this one was imported."""
    uninstall_pion_attention_patch()
    for module in modules:
        monkeypatch.setattr(module, attention.PATCHED, wrapped)
    before = [getattr(module, attention.PATCHED) for module in (base, llama)]
    with pytest.raises(PatchError, match="softcap"):
        install_pion_attention_patch()
    assert [getattr(module, attention.PATCHED) for module in (base, llama)] == before
    assert not attention.is_installed()


def test_a_patch_that_was_there_before_is_not_skipped(model, monkeypatch):
    uninstall_pion_attention_patch()
    original, asked = base.scaled_dot_product_attention, []

    def counting(queries, keys, values, cache, scale, mask=None, sinks=None):
        asked.append(queries.shape)
        return original(queries, keys, values, cache, scale, mask, sinks)

    with monkeypatch.context() as others:
        for module in attention._users().values():
            others.setattr(module, attention.PATCHED, counting)
        install_pion_attention_patch()
        prefilled(model)
        assert len(asked) == 2
        uninstall_pion_attention_patch()
        assert base.scaled_dot_product_attention is llama.scaled_dot_product_attention is counting


def test_a_cache_of_the_server_is_of_no_use_without_the_patch(client, served, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        uninstall_pion_attention_patch()
        with pytest.raises(TypeError):
            model(mx.array([QUESTION]), cache=cache)
        with pytest.raises(RuntimeError, match="install_pion_attention_patch"):
            make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))


def test_rows_at_hand_need_no_patch(client, model):
    uninstall_pion_attention_patch()
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)


def test_a_model_whose_cache_is_not_rows_is_refused(client):
    args = mamba.ModelArgs(
        model_type="mamba",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        state_size=4,
        num_hidden_layers=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=2,
    )
    model = mamba.Model(args)
    with (
        PionPromptCache(model, client=client, stage2=True, model_id="m") as prompt_cache,
        pytest.raises(UnsupportedCache),
    ):
        make_pion_prompt_cache(model, "prefix", prompt_cache, 5)


# What mlx-lm does with caches


def test_trimming_takes_nothing_of_the_prefix(client, lane, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        first = greedy(model, QUESTION, cache, 10).ids
        more = cache[0].offset - len(IDS)
        for asked in (more, 10_000):
            assert trim_prompt_cache(cache, asked) == more
            assert [slot.offset for slot in cache] == [len(IDS)] * 2
            assert greedy(model, QUESTION, cache, 10).ids == first == alone(model, count=10)


def test_a_part_of_a_cache_is_not_saved_as_if_it_were_all(client, lane, model, tmp_path):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        for run in ([], QUESTION):
            if run:
                model(mx.array([run]), cache=cache)
            mx.eval([slot.state for slot in cache])
            with pytest.raises(ValueError, match="not written to a file"):
                save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
            assert not list(tmp_path.iterdir())
        cache[0].state = cache[1].state
        assert cache[0].offset == len(IDS) + len(QUESTION)


def test_a_copy_of_a_cache_goes_its_own_way(client, lane, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        local = prefilled(model)
        for one in (cache, local):
            model(mx.array([[1, 2, 3]]), cache=one)
        twin, twin_local = copy.deepcopy(cache), copy.deepcopy(local)
        assert greedy(model, [7], cache, 10).ids == greedy(model, [7], local, 10).ids
        assert greedy(model, [8], twin, 10).ids == greedy(model, [8], twin_local, 10).ids


def test_threads_do_not_write_each_others_text(client, served, model):
    prompt_caches = [begun(model, client, tokens(100, seed), f"p{seed}") for seed in range(3)]
    want = [alone(model, tokens(100, seed), 20) for seed in range(3)]
    got = [None] * 3

    def write(seed):
        cache = make_pion_prompt_cache(model, f"p{seed}", prompt_caches[seed], 100)
        got[seed] = greedy(model, QUESTION, cache, 20).ids

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want
    for prompt_cache in prompt_caches:
        prompt_cache.close()


# A few blocks instead of everything


@pytest.mark.parametrize("selector", [None, "mean", "quest"])
def test_sparse_lanes_do_not_choose_other_blocks(client, model, monkeypatch, selector):
    logits = {}
    for lane, environment in LANES.items():
        with monkeypatch.context() as switches:
            for name, value in environment.items():
                switches.setenv(name, value)
            with begun(model, client) as prompt_cache:
                cache = make_pion_prompt_cache(
                    model, "prefix", prompt_cache, len(IDS), SPARSE, selector=selector
                )
                model(mx.array([QUESTION]), cache=cache)
                outs = [model(mx.array([[n]]), cache=cache) for n in range(5)]
                logits[lane] = np.concatenate([np.asarray(out) for out in outs])
                assert prompt_cache.stats()["lane"] == lane.partition(",")[0]
    dense = prefilled(model)
    model(mx.array([QUESTION]), cache=dense)
    whole = np.concatenate([np.asarray(model(mx.array([[n]]), cache=dense)) for n in range(5)])
    for lane in LANES:
        np.testing.assert_allclose(logits[lane], logits["in-process"], rtol=0, atol=1e-4)
        assert np.abs(logits[lane] - whole).max() > 0.01, "nothing was left out"


def test_what_one_thread_leaves_unevaluated_does_not_fail_another(client, model):
    with begun(model, client) as prompt_cache:

        def decoding():
            cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS), SPARSE)
            mx.eval(model(mx.array([QUESTION]), cache=cache))
            return model(mx.array([[1]]), cache=cache)

        thread = threading.Thread(target=decoding)  # which nobody wants to see the end of
        thread.start()
        thread.join()
        mx.eval(decoding())


@pytest.mark.parametrize("sparse", [None, SPARSE])
def test_a_forward_pass_over_rows_at_hand_evaluates_nothing(client, model, tmp_path, sparse):
    file = tmp_path / "ids.safetensors"
    mx.save_safetensors(str(file), {"ids": mx.array([[1]])})
    poison = mx.load(str(file))["ids"]
    os.truncate(file, 64)  # lazy: evaluating it fails
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS), sparse)
        mx.eval(model(mx.array([QUESTION]), cache=cache))
        model(poison, cache=cache)
        assert prompt_cache.stats()["lane"] == "in-process"
    with pytest.raises(RuntimeError):
        mx.eval(poison)  # alone: what is computed from such ids may be read from anywhere


def test_enough_blocks_are_everything(client, lane, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(
            model, "prefix", prompt_cache, len(IDS), {"K_block": 16, "K_blocks": 10}
        )
        assert greedy(model, QUESTION, cache, 50).ids == alone(model)


def test_a_question_of_several_tokens_is_not_sparse(client, lane, model):
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS), SPARSE)
        got = model(mx.array([QUESTION]), cache=cache)
        want = model(mx.array([QUESTION]), cache=prefilled(model))
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "selector"),
    [
        ({}, None),
        ({"K_block": 64}, None),
        ({"K_block": 0, "K_blocks": 8}, None),
        ({"K_block": 64, "K_blocks": 8, "K": 1}, None),
        ({"K_block": 1.5, "K_blocks": 8}, None),
        ({"K_block": 64, "K_blocks": 8}, "best"),
        (None, "best"),
    ],
)
def test_sparse_settings_that_make_no_sense_are_refused(client, model, settings, selector):
    with begun(model, client) as prompt_cache, pytest.raises(ValueError, match=r"please|neither"):
        make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS), settings, selector=selector)


@pytest.mark.parametrize("count", [0, -1, 1.5, "150"])
def test_a_number_of_tokens_that_is_none_is_refused(client, lane, model, count):
    with begun(model, client) as prompt_cache:
        with pytest.raises(ValueError, match="prefix_len"):
            make_pion_prompt_cache(model, "prefix", prompt_cache, count)
        if count != 0:
            with pytest.raises(ValueError, match="prefix_tokens"):
                prompt_cache.suggest_stage(count)


# By namespace


def rows_of(model, layer=0):
    keys, values = prefilled(model)[layer].keys_and_values()
    return np.asarray(keys[0]), np.asarray(values[0])


def test_queries_by_namespace_do_not_reach_other_rows(client, model):
    q = np.random.default_rng(3).standard_normal((4, 2, 16), np.float32)
    k, v = rows_of(model, 1)
    want = reference(k, v, Dense(q=q, with_lse=True))
    with begun(model, client) as prompt_cache:
        out, lse = prompt_cache.attend_query("prefix", 1, q, with_lse=True)
        np.testing.assert_allclose(out, want.out, rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse, want.lse, rtol=1e-6, atol=1e-5)
        one = q[:, :1]
        empty = np.zeros((2, 0, 16), np.float32)
        dense = prompt_cache.attend_query("prefix", 1, one)
        every = np.tile(np.arange(150), (4, 1))
        for got in (
            prompt_cache.attend_query_fused("prefix", 1, one, empty, empty),
            prompt_cache.attend_query_sparse("prefix", 1, one, every),
            prompt_cache.attend_query_sparse_auto("prefix", 1, one, 16, 10),
            prompt_cache.attend_query_sparse_auto_fused("prefix", 1, one, 16, 10, empty, empty),
        ):
            np.testing.assert_allclose(got, dense, rtol=0, atol=1e-5)
        assert prompt_cache.stats()["lane"] == "stream"


def test_a_namespace_that_another_process_made_resident_is_found(client, model):
    with begun(model, client):
        pass
    q = np.random.default_rng(3).standard_normal((2, 1, 16), np.float32)
    with PionPromptCache(model, client=client) as second:  # of any stage
        got = second.attend_query("prefix", 0, q)
        np.testing.assert_allclose(got, reference(*rows_of(model), Dense(q=q)).out, atol=1e-5)
        assert second.cold_rehydrates_observed == 0
        assert second.warm("prefix") == 2


def test_what_is_uploaded_by_hand_never_passes_for_a_stored_prefix(client, served, model):
    other = np.random.default_rng(5).standard_normal((2, 150, 16), np.float32)
    q = np.random.default_rng(3).standard_normal((2, 1, 16), np.float32)
    with begun(model, client) as prompt_cache:
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        prompt_cache.attend_store("prefix", 0, other, other)
        got = prompt_cache.attend_query("prefix", 0, q)
        np.testing.assert_allclose(got, reference(other, other, Dense(q=q)).out, atol=1e-5)
        assert greedy(model, QUESTION, cache, 20).ids == alone(model, count=20)
        assert prompt_cache.attend_drop("prefix") == 1 + 2
        # Now the name means what is stored again.
        got = prompt_cache.attend_query("prefix", 0, q)
        np.testing.assert_allclose(got, reference(*rows_of(model), Dense(q=q)).out, atol=1e-5)


def test_a_query_of_another_layer_does_not_change_what_one_is_about(client, model):
    other = np.random.default_rng(5).standard_normal((2, 20, 16), np.float32)
    q = np.random.default_rng(3).standard_normal((2, 1, 16), np.float32)
    with begun(model, client) as prompt_cache:
        prompt_cache.attend_store("prefix", 0, other, other)
        for layer, rows in ((0, (other, other)), (1, rows_of(model, 1)), (0, (other, other))):
            got = prompt_cache.attend_query("prefix", layer, q)
            np.testing.assert_allclose(got, reference(*rows, Dense(q=q)).out, atol=1e-5)


def test_uploaded_rows_that_are_gone_are_not_replaced_by_stored_ones(start_server, model):
    server = start_server("--resident-budget", str(2 * 2 * 2 * 16 * 150 * 4))
    rows, q = np.zeros((2, 150, 16), np.float32), np.zeros((2, 1, 16), np.float32)
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        prompt_cache.attend_store("prefix", 0, rows, rows)
        for layer in range(2):
            client.attend_store("another", layer, rows, rows)
        with pytest.raises(Cold):
            prompt_cache.attend_query("prefix", 0, q)
        with pytest.raises(OverBudget):
            prompt_cache.attend_store("prefix", 1, *([np.zeros((2, 500, 16), np.float32)] * 2))
        got = prompt_cache.attend_query("prefix", 1, q)  # refused, it changed nothing
        np.testing.assert_allclose(got, reference(*rows_of(model, 1), Dense(q=q)).out, atol=1e-5)


def test_queries_by_namespace_do_not_outlive_what_it_means(client, model):
    q = np.random.default_rng(3).standard_normal((2, 1, 16), np.float32)
    with begun(model, client), PionPromptCache(model, client=client) as second:
        second.warm("prefix")
        for ids in (IDS, OTHERS):
            k, v = (np.asarray(a[0]) for a in prefilled(model, ids)[0].keys_and_values())
            got = second.attend_query("prefix", 0, q)
            np.testing.assert_allclose(got, reference(k, v, Dense(q=q)).out, atol=1e-5)
            replace(model, client)
        client.drop("prefix")
        with pytest.raises(NotStored):
            second.attend_query("prefix", 0, q)


def test_nothing_that_others_made_resident_survives_a_drop(client, model):
    rows = np.zeros((2, 20, 16), np.float32)
    with begun(model, client) as first, PionPromptCache(model, client=client) as second:
        first.attend_store("prefix", 0, rows, rows)
        assert resident(client) == [True, True]
        assert second.attend_drop("prefix") == 1 + 2
        assert resident(client) == [False, False]
        assert second.attend_drop("prefix") == 0


def test_a_query_about_nothing_is_an_error(client, model):
    q = np.zeros((2, 1, 16), np.float32)
    with PionPromptCache(model, client=client) as prompt_cache:
        with pytest.raises(NotStored):
            prompt_cache.attend_query("nothing", 0, q)
        with pytest.raises(NotStored):
            prompt_cache.warm("nothing")


def test_a_cold_entry_is_warmed_once_for_a_query_by_namespace(start_server, model):
    server = start_server("--resident-budget", str(2 * 2 * 2 * 16 * 150 * 4))
    q = np.random.default_rng(3).standard_normal((2, 1, 16), np.float32)
    with Client(server.address) as client, begun(model, client) as prompt_cache:
        rows = np.zeros((2, 150, 16), np.float32)
        client.attend_store("another", 0, rows, rows)
        got = prompt_cache.attend_query("prefix", 0, q)
        np.testing.assert_allclose(got, reference(*rows_of(model), Dense(q=q)).out, atol=1e-5)
        assert prompt_cache.cold_rehydrates_observed == 1
        assert prompt_cache.stats()["attend"]["calls"] == 1
        with pytest.raises(OverBudget):
            prompt_cache.attend_store("large", 0, *([np.zeros((2, 500, 16), np.float32)] * 2))


def test_rows_that_were_never_resident_are_not_counted_as_gone(client, served, model):
    q = np.random.default_rng(3).standard_normal((2, 1, 16), np.float32)
    with begun(model, client) as prompt_cache:
        client.attend_drop(session_of(client))
        with PionPromptCache(model, client=client) as second:
            got = second.attend_query("prefix", 0, q)
            np.testing.assert_allclose(got, reference(*rows_of(model), Dense(q=q)).out, atol=1e-5)
            assert second.cold_rehydrates_observed == 0
        cache = make_pion_prompt_cache(model, "prefix", prompt_cache, len(IDS))
        client.attend_drop(session_of(client))
        assert greedy(model, QUESTION, cache, 5).ids == alone(model, count=5)
        assert prompt_cache.cold_rehydrates_observed == 1


# Which stage


def test_a_stage_is_suggested_by_what_was_measured(client, served, model):
    with begun(model, client) as prompt_cache:
        assert prompt_cache.suggest_stage(1) == 1
        assert prompt_cache.suggest_stage(1_000_000) == 2
        residency = prompt_cache.residency
        for _ in range(300):
            residency.answered(150, 1e6)  # a server that takes a quarter of an hour for a query
        assert prompt_cache.suggest_stage(1_000_000) == 1
        for _ in range(300):
            residency.answered(150, 1e-3)
        assert prompt_cache.suggest_stage(1_000) == 2
        for rows in (100, 200) * 200:
            residency.answered(rows, 1.0 + rows / 100)
        assert residency.call_ms_expected(1_000) == pytest.approx(11.0)
        assert residency.call_ms_expected(0) == pytest.approx(2.0)  # no less than any took
