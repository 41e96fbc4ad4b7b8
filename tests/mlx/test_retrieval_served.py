"""What a server may do to retrieved chunks: save their prefill, and nothing else."""

import socket

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from pion_client import Client
from pion_client.errors import PionError, Unavailable
from pion_client.mlx import HybridRetrievalCache, PionPromptCache
from pion_grpc.cli.decode import greedy
from tests.mlx import programs
from tests.mlx.families import build, tokens

CHUNK, OTHER, SUFFIX = tokens(120), tokens(90, seed=2), tokens(7, seed=3)
STUB, PACKS = tokens(40, seed=4), [tokens(30 + n, seed=5 + n) for n in range(3)]
WAIT_S = 120


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        client.drop(*(prefix.namespace for prefix in client.list()))
        yield client


@pytest.fixture
def retrieval(model, client):
    with HybridRetrievalCache(model, backend="pion", client=client) as retrieval:
        yield retrieval


def answer(model, cache, ids=SUFFIX, count=32):
    return greedy(model, ids, cache, count).ids


def expected(model, ids):
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    return answer(model, cache)


def names(client):
    return {prefix.namespace for prefix in client.list()}


# A server that is there


def test_a_kept_chunk_is_not_prefilled_again(model, client):
    with HybridRetrievalCache(model, backend="pion", client=client) as first:
        done = first.ingest("c", CHUNK)
        assert (done.computed, done.replaced, done.kept) == (True, False, True)
        assert names(client) == {done.namespace}
    with HybridRetrievalCache(model, backend="pion", client=client) as second:
        assert second.has("c")
        cache, rest = second.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, CHUNK)
        again = second.ingest("c", CHUNK)
        assert (again.computed, again.replaced, again.kept) == (False, False, True)
        stats = second.stats()["prompt_cache"]
        assert (stats["hits"], stats["tokens_prefilled"]) == (1, 0)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "rwkv7", "gemma3_text"])
def test_a_chunk_of_recurrent_state_or_windows_is_not_less_than_whole(client, family):
    model = build(family)
    with HybridRetrievalCache(model, backend="pion", client=client) as first:
        assert first.ingest("c", CHUNK).kept
        done = first.ingest("c", OTHER)
        assert (done.replaced, done.kept) == (True, True)
    with HybridRetrievalCache(model, backend="pion", client=client) as second:
        cache, rest = second.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, OTHER)
        stats = second.stats()["prompt_cache"]
        assert (stats["hits"], stats["tokens_prefilled"]) == (1, 0)


@pytest.mark.parametrize("vquant", ["fp8", "int8"])
def test_a_lossy_chunk_is_not_served_to_whom_asks_for_every_bit(client, vquant):
    model = build("llama", hidden_size=64)  # wide enough for a codec's groups
    with HybridRetrievalCache(model, backend="pion", client=client, vquant=vquant) as lossy:
        done = lossy.ingest("c", CHUNK)
        assert done.kept
        assert not lossy.ingest("c", CHUNK).computed
        cache, _ = lossy.prepare("c", SUFFIX)
        assert lossy.stats()["prompt_cache"]["hits"] == 1
        assert cache[0].offset == len(CHUNK)
    with HybridRetrievalCache(model, backend="pion", client=client) as exact:
        assert not exact.has("c")
        assert exact.ingest("c", CHUNK).computed
        cache, rest = exact.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, CHUNK)
    assert len(names(client)) == 2


def test_a_chunk_in_a_quantised_cache_is_not_that_of_plain_rows(client):
    model = build("llama", hidden_size=256)

    def quantised(model):
        return [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]

    ways = {"backend": "pion", "client": client}
    with HybridRetrievalCache(model, make_cache=quantised, **ways) as first:
        assert first.ingest("c", CHUNK).kept
    with HybridRetrievalCache(model, make_cache=quantised, **ways) as second:
        whole = quantised(model)
        model(mx.array([CHUNK]), cache=whole)
        cache, rest = second.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == answer(model, whole)
        assert second.stats()["prompt_cache"]["tokens_prefilled"] == 0
    with HybridRetrievalCache(model, **ways) as plain:
        assert not plain.has("c")


OTHER_PROCESS = """
    import json, sys
    from pion_client.mlx import HybridRetrievalCache
    from pion_grpc.cli.decode import greedy
    from tests.mlx.families import build

    address, chunk_id, chunk_ids, suffix = json.loads(sys.argv[1])
    with HybridRetrievalCache(build("llama"), backend="pion", address=address) as retrieval:
        if chunk_ids:
            retrieval.ingest(chunk_id, chunk_ids)
        cache, rest = retrieval.prepare(chunk_id, suffix)
        answer = greedy(retrieval._model, rest, cache, 32).ids
        print(json.dumps([answer, retrieval.stats()["prompt_cache"]]))
"""


@pytest.mark.usefixtures("client")
def test_a_process_that_knows_only_the_id_does_not_answer_otherwise(server, model):
    first, stats = programs.asked(OTHER_PROCESS, server.address, "c", CHUNK, SUFFIX)
    assert stats["stores"] == 1
    second, stats = programs.asked(OTHER_PROCESS, server.address, "c", None, SUFFIX)
    assert (stats["hits"], stats["misses"], stats["tokens_prefilled"]) == (1, 0, 0)
    assert first == second == expected(model, CHUNK)


def test_what_another_process_put_in_its_place_is_not_mixed_with_it(model, client):
    with (
        HybridRetrievalCache(model, backend="pion", client=client) as one,
        HybridRetrievalCache(model, backend="pion", client=client) as two,
    ):
        one.ingest("c", CHUNK)
        done = two.ingest("c", [*CHUNK[:64], *OTHER])
        assert (done.computed, done.replaced, done.kept) == (True, True, True)
        cache, rest = one.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, [*CHUNK[:64], *OTHER])
        assert names(client) == {done.namespace}


def test_a_chunk_of_another_model_is_not_found(retrieval, client):
    done = retrieval.ingest("c", CHUNK)
    other = build("llama", tie_word_embeddings=True)
    with HybridRetrievalCache(other, backend="pion", client=client) as theirs:
        assert not theirs.has("c")
        with pytest.raises(KeyError):
            theirs.prepare("c", SUFFIX)
        also = theirs.ingest("c", CHUNK)
        assert also.namespace != done.namespace
    assert names(client) == {done.namespace, also.namespace}


def test_tokens_beyond_the_vocabulary_are_not_run_because_a_server_has_them(
    retrieval, client, model
):
    retrieval.ingest("c", CHUNK)
    (prefix,) = client.list()
    rows = client.fetch(prefix.namespace)
    ids = [*CHUNK[:-1], 10**6]
    client.store(
        prefix.namespace,
        layers=rows.layers,
        slots=rows.slots,
        token_ids=ids,
        model=prefix.model,
        replace=True,
    )
    with HybridRetrievalCache(model, backend="pion", client=client) as other:
        assert not other.has("c")
        with pytest.raises(KeyError):
            other.prepare("c", SUFFIX)
        assert other.ingest("c", CHUNK).replaced
        assert answer(model, other.prepare("c", SUFFIX)[0]) == expected(model, CHUNK)
    with PionPromptCache(model, client=client) as prompt_cache:
        for call in (prompt_cache.get_or_prefill, prompt_cache.reuse):
            with pytest.raises(ValueError, match="vocabulary"):
                call(ids)


def test_a_chunk_that_the_server_evicted_is_not_lost(retrieval, client, model):
    namespace = retrieval.ingest("c", CHUNK).namespace
    client.drop(namespace)
    assert retrieval.has("c")
    cache, rest = retrieval.prepare("c", SUFFIX)
    assert answer(model, cache, rest) == expected(model, CHUNK)
    retrieval.prepare("c", SUFFIX)  # which has waited until it was stored
    assert names(client) == {namespace}


def test_who_stored_an_evicted_chunk_again_does_not_insist_on_it(model, client):
    with (
        HybridRetrievalCache(model, backend="pion", client=client) as one,
        HybridRetrievalCache(model, backend="pion", client=client) as two,
    ):
        namespace = one.ingest("c", CHUNK).namespace
        two.prepare("c", SUFFIX)
        client.drop(namespace)
        two.prepare("c", SUFFIX)
        one.ingest("c", OTHER)
        for each in (two, one):
            cache, rest = each.prepare("c", SUFFIX)
            assert answer(model, cache, rest) == expected(model, OTHER)


def test_an_evicted_chunk_is_gone_from_the_server_with_its_packs(retrieval, client):
    retrieval.ingest("c", CHUNK)
    kept = retrieval.ingest("d", CHUNK).namespace
    retrieval.set_shared_stub(STUB)
    retrieval.ingest_pack("c", PACKS[0])
    retrieval.set_shared_stub(SUFFIX)
    retrieval.ingest_pack("c", PACKS[0])
    assert len(names(client)) == 4
    assert retrieval.evict("c")
    assert names(client) == {kept}
    assert not retrieval.has("c")
    with pytest.raises(KeyError, match="ingest it first"):
        retrieval.prepare("c", SUFFIX)
    assert not retrieval.evict("c")


def test_packs_from_the_server_do_not_compose_to_another_prompt(model, client):
    def logits(cache):
        return np.asarray(model(mx.array([SUFFIX]), cache=cache)[0, -1])

    order = ["2", "0", "1"]
    with HybridRetrievalCache(model) as inproc:
        inproc.set_shared_stub(STUB)
        for number, pack in enumerate(PACKS):
            inproc.ingest_pack(str(number), pack)
        wanted = logits(inproc.prepare_multi(order, SUFFIX)[0])
    with HybridRetrievalCache(model, backend="pion", client=client) as first:
        first.set_shared_stub(STUB)
        for number, pack in enumerate(PACKS):
            assert first.ingest_pack(str(number), pack).kept
    with HybridRetrievalCache(model, backend="pion", client=client) as second:
        second.set_shared_stub(STUB)
        assert [second.has_pack(name) for name in ("0", "3")] == [True, False]
        cache, _ = second.prepare_multi(order, SUFFIX)
        assert np.abs(logits(cache) - wanted).max() < 1e-4
        stats = second.stats()["prompt_cache"]
        assert (stats["hits"], stats["tokens_prefilled"]) == (3, 0)
        with pytest.raises(KeyError, match="ingest_pack it after this stub"):
            second.prepare_multi(["3"], SUFFIX)


# A server that is not


def test_a_server_that_is_down_costs_no_answer(start_server, model):
    server = start_server()
    with HybridRetrievalCache(model, backend="pion", address=server.address) as retrieval:
        retrieval.set_shared_stub(STUB)
        retrieval.ingest("c", CHUNK)
        retrieval.ingest_pack("p", PACKS[0])
        server.kill()
        cache, rest = retrieval.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, CHUNK)
        cache, rest = retrieval.prepare_multi(["p"], SUFFIX)
        assert cache[0].offset == len(STUB) + len(PACKS[0])
        late = retrieval.ingest("late", OTHER)
        assert (late.computed, late.kept) == (False, False)
        cache, rest = retrieval.prepare("late", SUFFIX)
        assert answer(model, cache, rest) == expected(model, OTHER)
        assert retrieval.stats()["alone"] == 3
        with pytest.raises(PionError):
            retrieval.evict("c")
        assert retrieval.has("c")
        assert not retrieval.has("unknown")
        with pytest.raises(Unavailable):
            retrieval.prepare("unknown", SUFFIX)


def test_a_server_that_never_answers_is_not_asked_again(model):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with HybridRetrievalCache(
            model, backend="pion", address=address, deadline_s=0.3
        ) as retrieval:
            assert not retrieval.ingest("c", CHUNK).kept
            for _ in range(2):
                cache, rest = retrieval.prepare("c", SUFFIX)
                assert answer(model, cache, rest) == expected(model, CHUNK)
            with pytest.raises(Unavailable, match="it is not asked"):
                retrieval.prepare("unknown", SUFFIX)


def test_tokens_that_came_while_the_server_was_down_are_not_forgotten_for_its_own(
    start_server, short_tmp, model
):
    address = f"unix:{short_tmp}/s"
    server = start_server(listen=address)
    manifest = short_tmp / "manifest"
    with HybridRetrievalCache(
        model, backend="pion", address=address, directory=manifest
    ) as retrieval:
        retrieval.ingest("c", OTHER)
        server.kill()
        assert not retrieval.ingest("c", CHUNK).kept
    start_server(listen=address)
    with HybridRetrievalCache(
        model, backend="pion", address=address, directory=manifest
    ) as retrieval:
        cache, rest = retrieval.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, CHUNK)
        retrieval.prepare("c", SUFFIX)
    with HybridRetrievalCache(model, backend="pion", address=address) as elsewhere:
        cache, rest = elsewhere.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, CHUNK)


def test_a_manifest_on_disk_outlives_what_the_server_had(start_server, short_tmp, model):
    manifest = short_tmp / "manifest"
    server = start_server()
    with HybridRetrievalCache(
        model, backend="pion", address=server.address, directory=manifest
    ) as retrieval:
        retrieval.ingest("c", CHUNK)
    server.kill()
    empty = start_server(directory=short_tmp / "empty")
    with HybridRetrievalCache(
        model, backend="pion", address=empty.address, directory=manifest
    ) as retrieval:
        cache, rest = retrieval.prepare("c", SUFFIX)
        assert answer(model, cache, rest) == expected(model, CHUNK)


# How


def test_options_that_make_no_sense_are_refused(model, client):
    with pytest.raises(ValueError, match="one of address and client"):
        HybridRetrievalCache(model, backend="pion", client=client, address="127.0.0.1:1")
    with pytest.raises(ValueError, match="unknown codec 'nonsense'"):
        HybridRetrievalCache(model, backend="pion", client=client, vquant="nonsense")
