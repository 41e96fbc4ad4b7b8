"""What a chunk from a retrieval cache must never be: another one, half of it, changed, or lost."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from pion_client.chunks import Key
from pion_client.mlx import HybridRetrievalCache
from pion_client.positions import PositionsFixed
from pion_grpc.cli.decode import greedy
from tests.mlx import programs
from tests.mlx.families import build, tokens

CHUNK, OTHER, SUFFIX = tokens(40), tokens(50, seed=2), tokens(7, seed=3)
FAMILIES = ["llama", "qwen3", "qwen3_next", "lfm2", "gemma3_text", "rwkv7", "deepseek_v3"]
MODELS = [*((family, "float32") for family in FAMILIES), ("llama", "bfloat16"), ("lfm2", "float16")]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def retrieval(model):
    with HybridRetrievalCache(model) as retrieval:
        yield retrieval


def run(model, *pieces):
    """A cache after these pieces, and the logits behind the last token."""
    cache = make_prompt_cache(model)
    for piece in pieces:
        logits = model(mx.array([piece]), cache=cache)
        mx.eval(logits, [slot.state for slot in cache])
    return cache, logits[0, -1]


def bits(array):
    return np.asarray(array.view(mx.uint32 if array.itemsize == 4 else mx.uint16))


def assert_continues_as(model, cache, other, count=16):
    """Both run to the same logits, bit for bit, for some tokens."""
    ids = SUFFIX
    for _ in range(count):
        mine, theirs = (model(mx.array([ids]), cache=c)[0, -1] for c in (cache, other))
        assert np.array_equal(bits(mine), bits(theirs))
        ids = [int(mx.argmax(mine))]


# Whole, and as the model would have it


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_a_prepared_chunk_does_not_continue_otherwise_than_a_prefill(family, dtype):
    model = build(family, dtype)
    with HybridRetrievalCache(model) as retrieval:
        retrieval.ingest("c", CHUNK)
        for _ in range(2):  # what the first caller appended is not there for the second
            cache, rest = retrieval.prepare("c", SUFFIX)
            assert rest == SUFFIX
            assert_continues_as(model, cache, run(model, CHUNK)[0])
        assert retrieval.stats()["computed"] == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_next", "lfm2"])
def test_chunk_and_suffix_do_not_decode_other_tokens_than_one_prompt(family):
    model = build(family)
    with HybridRetrievalCache(model) as retrieval:
        retrieval.ingest("c", CHUNK)
        cache, rest = retrieval.prepare("c", SUFFIX)
        whole = greedy(model, [*CHUNK, *SUFFIX], make_prompt_cache(model), 32)
        assert greedy(model, rest, cache, 32).ids == whole.ids


def test_a_chunk_longer_than_a_step_is_not_split_otherwise_than_mlx_lm_does(model, monkeypatch):
    monkeypatch.setattr("pion_client.retrieval.PREFILL_STEP", 16)
    with HybridRetrievalCache(model) as retrieval:
        retrieval.ingest("c", CHUNK)
        cache, _ = retrieval.prepare("c", SUFFIX)
        assert_continues_as(model, cache, run(model, CHUNK[:16], CHUNK[16:32], CHUNK[32:])[0])


def test_a_cache_is_not_copied_before_it_is_written_to():
    model = build("llama")
    with HybridRetrievalCache(model) as retrieval:
        retrieval.ingest("c", tokens(2_000))
        held = retrieval.stats()["held_bytes"]
        mx.clear_cache()
        before = mx.get_active_memory()
        caches = [retrieval.prepare("c", SUFFIX)[0] for _ in range(20)]
        assert mx.get_active_memory() - before < held / 2
        assert all(slot.offset == 2_000 for slot in caches[-1])


def test_no_room_for_rows_to_come_is_held(retrieval):
    retrieval.ingest("c", CHUNK)
    cache, _ = retrieval.prepare("c", SUFFIX)
    rows = sum(leaf.nbytes for _, leaf in tree_flatten([[s.keys, s.values] for s in cache]))
    assert retrieval.stats()["held_bytes"] == rows
    assert cache[0].keys.shape[2] == len(CHUNK)


def test_rows_of_a_quantised_cache_do_not_become_others(tmp_path):
    model = build("llama", hidden_size=256)

    def quantised(model):
        return [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]

    with HybridRetrievalCache(model, make_cache=quantised, directory=tmp_path) as retrieval:
        retrieval.ingest("c", CHUNK)
        expected = quantised(model)
        model(mx.array([CHUNK]), cache=expected)
        assert_continues_as(model, retrieval.prepare("c", SUFFIX)[0], expected)
        with pytest.raises(PositionsFixed, match="QuantizedKVCache: it has no rows to move"):
            retrieval.set_shared_stub(SUFFIX)
    with HybridRetrievalCache(model, directory=tmp_path) as plain:
        assert not plain.has("c")


# Which chunk it is


def test_other_tokens_under_an_id_do_not_mix_with_the_former_ones(retrieval, model):
    first = retrieval.ingest("c", CHUNK)
    second = retrieval.ingest("c", [*CHUNK[:20], *OTHER])
    assert (first.replaced, second.replaced, second.computed) == (False, True, True)
    cache, _ = retrieval.prepare("c", SUFFIX)
    assert_continues_as(model, cache, run(model, [*CHUNK[:20], *OTHER])[0])
    assert retrieval.stats()["held"] == 1


def test_tokens_that_are_as_many_are_not_taken_for_the_same(retrieval, model):
    retrieval.ingest("c", CHUNK)
    assert retrieval.ingest("c", OTHER[: len(CHUNK)]).replaced
    cache, _ = retrieval.prepare("c", SUFFIX)
    assert_continues_as(model, cache, run(model, OTHER[: len(CHUNK)])[0])


def test_the_same_chunk_is_not_computed_twice(retrieval):
    assert retrieval.ingest("c", CHUNK).computed
    again = retrieval.ingest(chunk_id="c", ids=np.array(CHUNK))
    assert (again.computed, again.replaced, again.kept) == (False, False, True)
    assert retrieval.stats()["computed"] == 1
    assert retrieval.stats()["unchanged"] == 1


def test_ids_that_look_alike_are_not_the_same_chunk(retrieval):
    names = ["a", "A", "a ", "a|b", "a\x00b", "ä", "a\u0308", "", "\ud800", "x" * 10_000]
    for count, name in enumerate(names, start=1):
        retrieval.ingest(name, CHUNK[:count])
    for count, name in enumerate(names, start=1):
        assert retrieval.prepare(name, SUFFIX)[0][0].offset == count


def test_the_names_under_which_others_look_do_not_change():
    digests = hashlib.sha256("Ångström".encode()).hexdigest()[:24]
    model = hashlib.sha256(b"mlx1:0123").hexdigest()[:16]
    stub = hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0])).hexdigest()[:16]
    assert Key("Ångström", "mlx1:0123").namespace == f"chunk_{digests}_{model}"
    pack = Key("Ångström", "mlx1:0123", bytes([1, 0, 0, 0, 2, 0, 0, 0]))
    assert pack.namespace == f"pack_{digests}_{model}_{stub}"
    lossy = hashlib.sha256(b"mlx1:0123|int8").hexdigest()[:16]
    assert Key("Ångström", "mlx1:0123", vquant="int8").namespace == f"chunk_{digests}_{lossy}"


def test_a_model_with_other_weights_does_not_get_the_chunks_of_the_former():
    model = build("llama")
    with HybridRetrievalCache(model) as retrieval:
        retrieval.ingest("c", CHUNK)
        norm = model.model.norm.weight
        model.model.norm.weight = norm * 2
        mx.eval(model.parameters())
        assert not retrieval.has("c")
        with pytest.raises(KeyError, match="'c' is not known for this model"):
            retrieval.prepare("c", SUFFIX)
        model.model.norm.weight = norm
        assert retrieval.has("c")


def test_an_evicted_chunk_is_gone(retrieval):
    retrieval.ingest("c", CHUNK)
    retrieval.ingest("d", OTHER)
    assert retrieval.evict("c")
    assert not retrieval.evict("c")
    assert (retrieval.has("c"), retrieval.has("d")) == (False, True)
    with pytest.raises(KeyError, match="ingest it first"):
        retrieval.prepare("c", SUFFIX)
    assert retrieval.evict("d")
    stats = retrieval.stats()
    assert (stats["held"], stats["held_bytes"], stats["known"]) == (0, 0, 0)


def test_memory_does_not_grow_beyond_its_limit_and_no_chunk_is_lost(model):
    with HybridRetrievalCache(model) as roomy:
        roomy.ingest("c", CHUNK)
        one = roomy.stats()["held_bytes"]
    with HybridRetrievalCache(model, memory_bytes_max=2 * one) as retrieval:
        for name in "abc":
            assert retrieval.ingest(name, CHUNK).kept
        retrieval.prepare("b", SUFFIX)  # used, so that the other one goes first
        retrieval.ingest("d", CHUNK)
        stats = retrieval.stats()
        assert (stats["held"], stats["held_bytes"], stats["forgotten"]) == (2, 2 * one, 2)
        retrieval.prepare("b", SUFFIX)
        assert retrieval.stats()["computed"] == 4
        cache, _ = retrieval.prepare("a", SUFFIX)  # forgotten, but known
        assert retrieval.stats()["computed"] == 5
        assert_continues_as(model, cache, run(model, CHUNK)[0])
        big = retrieval.ingest("big", tokens(200))
        assert (big.computed, big.kept) == (True, False)
        assert retrieval.prepare("big", SUFFIX)[0][0].offset == 200
        assert retrieval.stats()["held_bytes"] <= 2 * one


def test_threads_do_not_get_each_others_chunks(model):
    chunks = {str(number): tokens(20 + number, seed=number) for number in range(6)}
    expected = {name: run(model, ids, SUFFIX)[1].tolist() for name, ids in chunks.items()}
    with HybridRetrievalCache(model) as roomy:
        roomy.ingest("0", chunks["0"])
        room = 3 * roomy.stats()["held_bytes"]

    def work(retrieval, seed):
        for name in np.random.default_rng(seed).choice(list(chunks), 30):
            retrieval.ingest(str(name), chunks[name])
            cache, rest = retrieval.prepare(str(name), SUFFIX)
            logits = model(mx.array([rest]), cache=cache)[0, -1]
            assert logits.tolist() == expected[name]

    with (
        HybridRetrievalCache(model, memory_bytes_max=room) as retrieval,
        ThreadPoolExecutor(4) as pool,
    ):
        for done in [pool.submit(work, retrieval, seed) for seed in range(4)]:
            done.result()
        stats = retrieval.stats()
        assert stats["held_bytes"] <= room
        assert stats["forgotten"] > 0


# Restarts


def test_a_chunk_is_not_forgotten_by_a_restart(model, tmp_path):
    with HybridRetrievalCache(model, directory=tmp_path / "chunks") as first:
        first.ingest("c", CHUNK)
        first.ingest("gone", OTHER)
        first.evict("gone")
    with HybridRetrievalCache(model, directory=tmp_path / "chunks") as second:
        assert (second.has("c"), second.has("gone")) == (True, False)
        cache, _ = second.prepare("c", SUFFIX)
        assert_continues_as(model, cache, run(model, CHUNK)[0])
        assert second.stats()["known"] == 1
    other = build("llama", tie_word_embeddings=True)
    with HybridRetrievalCache(other, directory=tmp_path / "chunks") as third:
        assert not third.has("c")


def test_nobody_else_can_read_what_chunks_say(model, tmp_path):
    with HybridRetrievalCache(model, directory=tmp_path / "chunks") as retrieval:
        retrieval.ingest("c", CHUNK)
        (entry,) = (tmp_path / "chunks").iterdir()
    assert [path.stat().st_mode & 0o077 for path in (entry.parent, entry)] == [0, 0]


def test_what_another_process_wrote_into_the_directory_is_not_overlooked(model, tmp_path):
    with (
        HybridRetrievalCache(model, directory=tmp_path) as one,
        HybridRetrievalCache(model, directory=tmp_path) as two,
    ):
        one.ingest("c", CHUNK)
        two.ingest("c", OTHER)
        cache, _ = one.prepare("c", SUFFIX)
        assert_continues_as(model, cache, run(model, OTHER)[0])


def resealed(entry, **changes):
    """An entry with other contents, and a checksum that is right."""
    entry = {**entry, **changes}
    told = [entry[name] for name in ("chunk_id", "model", "tokens", "kept")]
    checksum = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
    return json.dumps({**entry, "checksum": checksum})


DAMAGE = {
    "empty": lambda entry: "",
    "torn": lambda entry: json.dumps(entry)[:-5],
    "no object": lambda entry: "[]",
    "nothing": lambda entry: "null",
    "not UTF-8": lambda entry: "\udcff",
    "a part missing": lambda entry: json.dumps({"format": 1}),
    "no token ids": lambda entry: json.dumps({**entry, "tokens": [-1]}),
    "not integers": lambda entry: json.dumps({**entry, "tokens": ["x"]}),
    "a later format": lambda entry: json.dumps({**entry, "format": 3}),
    "nested too deeply": lambda entry: "[" * 100_000,
    "other tokens": lambda entry: json.dumps({**entry, "tokens": [1, 2, 3]}),
    "another word on the server": lambda entry: json.dumps({**entry, "kept": not entry["kept"]}),
    "no checksum": lambda entry: json.dumps({**entry, "checksum": ""}),
    "no tokens": lambda entry: resealed(entry, tokens=[]),
    "tokens of another vocabulary": lambda entry: resealed(entry, tokens=[1, 10**6]),
    "another chunk": lambda entry: json.dumps({**entry, "chunk_id": "d"}),
    "another model": lambda entry: json.dumps({**entry, "model": "other"}),
}


@pytest.mark.parametrize("damaged", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_manifest_is_not_believed(model, tmp_path, damaged):
    with HybridRetrievalCache(model, directory=tmp_path) as retrieval:
        retrieval.ingest("c", CHUNK)
        (path,) = tmp_path.iterdir()
        path.write_bytes(damaged(json.loads(path.read_text())).encode(errors="surrogateescape"))
        assert not retrieval.has("c")
        with pytest.raises(KeyError):
            retrieval.prepare("c", SUFFIX)
        assert retrieval.ingest("c", CHUNK).kept
        assert retrieval.has("c")


def test_what_is_no_file_in_the_place_of_an_entry_does_not_raise(model, tmp_path):
    with HybridRetrievalCache(model, directory=tmp_path) as retrieval:
        retrieval.ingest("c", CHUNK)
        (path,) = tmp_path.iterdir()
        path.unlink()
        path.symlink_to(path)
        assert not retrieval.has("c")
        assert retrieval.ingest("c", CHUNK).kept
        assert retrieval.has("c")
        path.unlink()
        path.mkdir()
        assert not retrieval.has("c")
        with pytest.raises(KeyError):
            retrieval.prepare("c", SUFFIX)


def in_the_way(path):
    path.mkdir()
    (path / "file").touch()


def nothing_can_be_written(path):
    path.parent.rename(path.parent.with_name("away"))


IN_THE_WAY = {
    "a directory": in_the_way,
    "a pipe": os.mkfifo,
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
    "no directory": nothing_can_be_written,
}


@pytest.mark.parametrize("put", IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_what_is_in_the_place_of_an_entry_does_not_fail_a_request(model, tmp_path, put):
    directory = tmp_path / "chunks"
    with HybridRetrievalCache(model, directory=directory) as retrieval:
        retrieval.ingest("other", OTHER)
        retrieval.ingest("c", OTHER)
        path = directory / f"{retrieval.ingest('c', OTHER).namespace}.json"
        path.unlink()
        put(path)
        assert not retrieval.has("c")
        assert retrieval.ingest("c", CHUNK).kept
        cache, _ = retrieval.prepare("c", SUFFIX)
        assert_continues_as(model, cache, run(model, CHUNK)[0])
        unwritten = 1 if path.is_dir() or not directory.exists() else 0
        assert retrieval.stats()["unwritten"] == unwritten
        assert retrieval.evict("c")
        assert not retrieval.has("c")
        assert not retrieval.evict("c")
        assert retrieval.stats()["known"] == (1 if directory.exists() else 0)


def test_what_could_not_be_written_does_not_go_behind_what_is_there(model, tmp_path):
    directory, away = tmp_path / "chunks", tmp_path / "away"
    with HybridRetrievalCache(model, directory=directory) as retrieval:
        retrieval.ingest("c", OTHER)
        directory.rename(away)
        assert retrieval.ingest("c", CHUNK).kept
        assert retrieval.evict("d") is False
        away.rename(directory)
        cache, _ = retrieval.prepare("c", SUFFIX)
        assert_continues_as(model, cache, run(model, CHUNK)[0])
        retrieval.ingest("c", SUFFIX)  # written again, and nothing is remembered beside it
        assert retrieval.stats()["unwritten"] == 0
        (directory / f"{retrieval.ingest('c', SUFFIX).namespace}.json").unlink()
        assert not retrieval.has("c")


# Neither texts nor servers


@pytest.mark.parametrize("ids", ["text", b"text", [], [-1], [1 << 32], [[1, 2]], [1.5]])
def test_what_are_no_token_ids_is_refused(retrieval, ids):
    with pytest.raises(ValueError, match="token id"):
        retrieval.ingest("c", ids)
    retrieval.ingest("c", CHUNK)
    with pytest.raises(ValueError, match="token id"):
        retrieval.prepare("c", ids)


@pytest.mark.parametrize("quantized", [False, True])
def test_ids_beyond_the_vocabulary_do_not_reach_the_model(quantized):
    """MLX reads what lies behind the embedding, or dies."""
    model = build("llama")
    size = model.args.vocab_size
    if quantized:
        nn.quantize(model, 32, class_predicate=lambda _, one: isinstance(one, nn.Embedding))
    with HybridRetrievalCache(model) as retrieval:
        assert retrieval.ingest("c", [size - 1]).kept
        retrieval.set_shared_stub([1])
        for ids in ([size], [1, 10**6], [1 << 31], [(1 << 32) - 1]):
            for refused in (
                lambda ids=ids: retrieval.ingest("c", ids),
                lambda ids=ids: retrieval.ingest_pack("c", ids),
                lambda ids=ids: retrieval.set_shared_stub(ids),
                lambda ids=ids: retrieval.prepare("c", ids),
            ):
                with pytest.raises(ValueError, match=f"not below {size}"):
                    refused()


def test_an_embedding_of_several_tokens_is_not_taken_for_the_vocabulary():
    model = build("longcat_flash_ngram")
    with HybridRetrievalCache(model) as retrieval:
        assert retrieval.ingest("c", [model.args.vocab_size - 1]).kept
        with pytest.raises(ValueError, match=f"not below {model.args.vocab_size}"):
            retrieval.ingest("c", [model.args.vocab_size])


def test_an_id_that_is_no_text_is_refused(retrieval):
    with pytest.raises(TypeError, match="a chunk's id is a text"):
        retrieval.ingest(7, CHUNK)


@pytest.mark.parametrize(
    "options", [{"backend": "other"}, {"vquant": "fp16"}, {"address": "127.0.0.1:1"}]
)
def test_options_that_would_do_nothing_are_refused(model, options):
    with pytest.raises(ValueError, match="inproc"):
        HybridRetrievalCache(model, **options)


MODEL = """
    import os, sys
    from mlx_lm.models import llama
    from pion_client.retrieval import HybridRetrievalCache

    model = llama.Model(llama.ModelArgs(
        model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=48,
        num_attention_heads=4, rms_norm_eps=1e-5, vocab_size=64))
"""
WITHOUT_GRPC = """
    with HybridRetrievalCache(model, directory=sys.argv[1]) as retrieval:
        retrieval.ingest("c", [1, 2, 3])
        retrieval.prepare("c", [4])
        retrieval.set_shared_stub([1, 2])
        retrieval.ingest_pack("p", [3, 4])
        retrieval.prepare_multi(["p", "p"], [4])
        retrieval.evict("p")
        retrieval.stats()
        try:
            retrieval.prepare("unknown", [4])
        except KeyError:
            pass
    loaded = [name for name in sys.modules if name.split(".")[0].startswith("grpc")]
    print(loaded)
"""


FORKED = """
    from pion_client.errors import Forked

    retrieval = HybridRetrievalCache(model, directory=sys.argv[1])
    retrieval.ingest("c", [1, 2, 3])
    if not os.fork():
        for call in (lambda: retrieval.prepare("c", [4]), lambda: HybridRetrievalCache(model)):
            try:
                call()
            except Forked:
                print("raised", flush=True)
        os._exit(0)
    os.wait()
"""


def test_without_a_server_grpc_is_not_loaded(tmp_path):
    assert programs.run(MODEL + WITHOUT_GRPC, str(tmp_path)) == "[]\n"


def test_a_forked_process_raises_rather_than_hangs(tmp_path):
    assert programs.run(MODEL + FORKED, str(tmp_path)) == "raised\nraised\n"
