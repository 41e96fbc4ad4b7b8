"""What a composition of packs must never be: at wrong positions, of other stubs, of another model."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from pion_client.mlx import HybridRetrievalCache
from pion_client.positions import PositionsFixed, Reach, Rotation, moved, rotations, rows_at
from pion_grpc.cli import smollm2
from pion_grpc.cli.decode import greedy
from tests.mlx.families import build, tokens

STUB, SUFFIX = tokens(20, seed=10), tokens(7, seed=11)
PACKS = {f"p{number}": tokens(15 + 5 * number, seed=20 + number) for number in range(9)}
MOVABLE = ["llama", "qwen3"]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def retrieval(model):
    with HybridRetrievalCache(model) as retrieval:
        retrieval.set_shared_stub(STUB)
        for name, ids in PACKS.items():
            retrieval.ingest_pack(name, ids)
        yield retrieval


def logits(model, ids, cache=None):
    return np.asarray(model(mx.array([ids]), cache=cache or make_prompt_cache(model))[0, -1])


def bits(array):
    return np.asarray(array.view(mx.uint32 if array.itemsize == 4 else mx.uint16))


# On the real model


@pytest.mark.model
def test_a_pack_of_text_is_not_another_prompt_for_the_real_model():
    model, tokenizer = smollm2.load()
    stub, pack, question = (
        tokenizer.encode(text)
        for text in (
            "<|im_start|>user\n",
            "Log of Brenholm: The lighthouse of Brenholm is painted green.\n",
            "What colour?<|im_end|>\n<|im_start|>assistant\nThe lighthouse of Brenholm is",
        )
    )
    whole = logits(model, [*stub, *pack, *question])
    with HybridRetrievalCache(model) as retrieval:
        retrieval.set_shared_stub(stub)
        retrieval.ingest_pack("p", pack)
        cache, rest = retrieval.prepare_multi(["p"], question)
        assert np.abs(logits(model, rest, cache) - whole).max() < 1e-4
        retrieval.ingest("c", [*stub, *pack])
        cache, rest = retrieval.prepare("c", question)
        expected = greedy(model, [*stub, *pack, *question], make_prompt_cache(model), 8).ids
        assert greedy(model, rest, cache, 8).ids == expected


# Moving


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_keys_moved_by_nothing_do_not_change_a_bit(dtype):
    keys = mx.random.normal((1, 2, 5, 16), key=mx.random.key(0)).astype(dtype)
    keys[0, 0, 0] = mx.array([float("nan"), float("inf"), -0.0, 0.0] * 4)
    same = moved(keys, Rotation(16, 10_000.0), 0)
    assert same.dtype == dtype
    assert np.array_equal(bits(same), bits(keys))


@pytest.mark.parametrize("dims", [16, 8])
@pytest.mark.parametrize("delta", [1, 7, 500, -3])
def test_moved_keys_do_not_differ_from_those_rotated_there(dims, delta):
    rope = RoPE(dims, traditional=False, base=10_000.0)
    plain = mx.random.normal((1, 2, 6, 16), key=mx.random.key(1))
    here, there = rope(plain, offset=20), rope(plain, offset=20 + delta)
    ours = moved(here, Rotation(dims, 10_000.0), delta)
    assert np.allclose(np.asarray(ours), np.asarray(there), atol=2e-4)
    assert np.array_equal(np.asarray(ours[..., dims:]), np.asarray(here[..., dims:]))


def test_far_moves_do_not_lose_the_angle():
    keys = mx.random.normal((1, 1, 4, 64), key=mx.random.key(2))
    rotation = Rotation(64, 500_000.0)
    back = moved(moved(keys, rotation, 84_000), rotation, -84_000)
    assert np.allclose(np.asarray(back), np.asarray(keys), atol=1e-5)


# Composing


@pytest.mark.parametrize("family", MOVABLE)
def test_one_pack_behind_the_stub_is_not_another_prompt(family):
    model = build(family)
    with HybridRetrievalCache(model) as retrieval:
        retrieval.set_shared_stub(STUB)
        retrieval.ingest_pack("p", PACKS["p1"])
        cache, rest = retrieval.prepare_multi(["p"], SUFFIX)
        whole = [*STUB, *PACKS["p1"], *SUFFIX]
        assert np.abs(logits(model, rest, cache) - logits(model, whole)).max() < 1e-4


@pytest.mark.parametrize("family", MOVABLE)
def test_a_pack_does_not_stand_elsewhere_than_where_it_is_put(family):
    """Behind its stub at any position a pack has the same relative positions, so the same values."""
    model = build(family)
    with HybridRetrievalCache(model) as retrieval:
        retrieval.set_shared_stub(STUB)
        for name in ("p1", "p2"):
            retrieval.ingest_pack(name, PACKS[name])
        cache, _ = retrieval.prepare_multi(["p2", "p1"], SUFFIX)
    first = len(PACKS["p2"])
    begin = len(STUB) + first
    assert [slot.offset for slot in cache] == [begin + len(PACKS["p1"])] * len(cache)
    there = rows_at(model, first, [*STUB, *PACKS["p1"]])
    for slot, rows in zip(cache, there, strict=True):
        for mine, theirs in zip((slot.keys, slot.values), rows, strict=True):
            ours = np.asarray(mine[..., begin : slot.offset, :])
            assert np.allclose(ours, np.asarray(theirs[..., len(STUB) :, :]), atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_moved_keeps_its_bits(dtype):
    model = build("llama", dtype)
    with HybridRetrievalCache(model) as retrieval:
        retrieval.set_shared_stub(STUB)
        retrieval.ingest_pack("p", PACKS["p1"])
        retrieval.ingest_pack("q", PACKS["p2"])
        one, _ = retrieval.prepare_multi(["p"], SUFFIX)
        two, _ = retrieval.prepare_multi(["p", "q"], SUFFIX)
        again, _ = retrieval.prepare_multi(["q", "p"], SUFFIX)
    end, total = one[0].offset, two[0].offset
    cut = end - len(STUB)
    for a, b, c in zip(one, two, again, strict=True):
        assert np.array_equal(bits(a.keys[..., :end, :]), bits(b.keys[..., :end, :]))
        assert np.array_equal(bits(a.values[..., :end, :]), bits(b.values[..., :end, :]))
        last = bits(c.values[..., total - cut : total, :])
        assert np.array_equal(bits(a.values[..., len(STUB) : end, :]), last)


def test_a_composition_is_not_changed_by_what_follows_it(retrieval, model):
    names = ["p3", "p0", "p3"]
    first, rest = retrieval.prepare_multi(names, SUFFIX)
    answers = [greedy(model, rest, first, 16).ids]
    second, rest = retrieval.prepare_multi(names, SUFFIX)
    answers.append(greedy(model, rest, second, 16).ids)
    assert answers[0] == answers[1]


def test_more_packs_than_agreed_are_refused(retrieval):
    with pytest.raises(ValueError, match="1 to 8 packs"):
        retrieval.prepare_multi(list(PACKS), SUFFIX)
    cache, _ = retrieval.prepare_multi(list(PACKS), SUFFIX, max_packs=9)
    assert cache[0].offset == len(STUB) + sum(map(len, PACKS.values()))
    for wrong in ([], "p0"):
        with pytest.raises(ValueError, match="packs is needed"):
            retrieval.prepare_multi(wrong, SUFFIX)
    with pytest.raises(ValueError, match="no token ids"):
        retrieval.prepare_multi(["p0"], [])


# Which pack it is


def test_a_pack_of_another_stub_is_not_used(retrieval, model):
    retrieval.set_shared_stub([*STUB, 1])
    assert not retrieval.has_pack("p0")
    with pytest.raises(KeyError, match="ingest_pack it after this stub"):
        retrieval.prepare_multi(["p0"], SUFFIX)
    retrieval.ingest_pack("p0", PACKS["p0"])
    cache, rest = retrieval.prepare_multi(["p0"], SUFFIX)
    whole = [*STUB, 1, *PACKS["p0"], *SUFFIX]
    assert np.abs(logits(model, rest, cache) - logits(model, whole)).max() < 1e-4
    retrieval.set_shared_stub(STUB)
    assert retrieval.has_pack("p0")


def test_a_pack_is_no_chunk_and_a_chunk_no_pack(retrieval):
    with pytest.raises(KeyError):
        retrieval.prepare("p0", SUFFIX)
    retrieval.ingest("c", PACKS["p0"])
    with pytest.raises(KeyError):
        retrieval.prepare_multi(["c"], SUFFIX)
    assert (retrieval.has("p0"), retrieval.has_pack("c")) == (False, False)


def test_no_pack_of_an_evicted_chunk_is_left(retrieval):
    retrieval.ingest("p0", PACKS["p1"])
    retrieval.set_shared_stub(SUFFIX)
    retrieval.ingest_pack("p0", PACKS["p2"])
    assert retrieval.evict("p0")
    assert not retrieval.has("p0")
    assert not retrieval.has_pack("p0")
    retrieval.set_shared_stub(STUB)
    assert (retrieval.has_pack("p0"), retrieval.has_pack("p1")) == (False, True)


def test_a_replaced_pack_does_not_mix_with_the_former_one(retrieval, model):
    assert retrieval.ingest_pack("p0", PACKS["p5"]).replaced
    cache, rest = retrieval.prepare_multi(["p0"], SUFFIX)
    whole = [*STUB, *PACKS["p5"], *SUFFIX]
    assert np.abs(logits(model, rest, cache) - logits(model, whole)).max() < 1e-4


def test_packs_are_not_forgotten_by_a_restart(model, tmp_path):
    with HybridRetrievalCache(model, directory=tmp_path) as first:
        first.set_shared_stub(STUB)
        first.ingest_pack("p", PACKS["p1"])
    with HybridRetrievalCache(model, directory=tmp_path) as second:
        second.set_shared_stub(STUB)
        cache, rest = second.prepare_multi(["p"], SUFFIX)
        whole = [*STUB, *PACKS["p1"], *SUFFIX]
        assert np.abs(logits(model, rest, cache) - logits(model, whole)).max() < 1e-4


def test_without_a_stub_nothing_is_composed(model):
    with HybridRetrievalCache(model) as retrieval:
        for call in (
            lambda: retrieval.ingest_pack("p", PACKS["p0"]),
            lambda: retrieval.has_pack("p"),
            lambda: retrieval.prepare_multi(["p"], SUFFIX),
        ):
            with pytest.raises(RuntimeError, match="call set_shared_stub first"):
                call()
        with pytest.raises(ValueError, match="no token ids"):
            retrieval.set_shared_stub([])


def test_a_model_with_other_weights_does_not_get_the_stub_of_the_former():
    model = build("llama")
    with HybridRetrievalCache(model) as retrieval:
        retrieval.set_shared_stub(STUB)
        retrieval.ingest_pack("p", PACKS["p1"])
        embedding = model.model.embed_tokens.weight
        model.model.embed_tokens.weight = embedding[::-1]
        mx.eval(model.parameters())
        assert not retrieval.has_pack("p")
        retrieval.ingest_pack("p", PACKS["p1"])
        cache, rest = retrieval.prepare_multi(["p"], SUFFIX)
        whole = [*STUB, *PACKS["p1"], *SUFFIX]
        assert np.abs(logits(model, rest, cache) - logits(model, whole)).max() < 1e-4


# Models whose keys stay where they are

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
SCALED = {"num_hidden_layers": 2, "head_dim": 16}
BETA = {
    "rope_theta": 1e4,
    "type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 8192,  # far behind where a model is probed
}
REFUSED = {
    "interleaved": ("llama", {"rope_traditional": True}, "interleaved RoPE"),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled by 0.5"),
    "llama3": ("llama", {"rope_scaling": LLAMA3}, "Llama3RoPE is not a plain RoPE"),
    "yarn": ("llama", {"rope_scaling": YARN}, "YarnRoPE is not a plain RoPE"),
    "latent": ("deepseek_v3", {}, "interleaved RoPE|no rows to move"),
    "scaled attention": ("ministral3", {**SCALED, "rope_parameters": BETA}, "scaling_beta"),
    "window": ("gemma3_text", {}, "RotatingKVCache: it has no rows to move"),
    "recurrent": ("rwkv7", {}, "ArraysCache: it has no rows to move"),
    "hybrid": ("qwen3_next", {}, "ArraysCache: it has no rows to move"),
}


@pytest.mark.parametrize(("family", "changes", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_whose_positions_are_fixed_is_refused(family, changes, why):
    with HybridRetrievalCache(build(family, **changes)) as retrieval:
        with pytest.raises(PositionsFixed, match=why):
            retrieval.set_shared_stub(STUB)
        with pytest.raises(RuntimeError, match="call set_shared_stub first"):
            retrieval.ingest_pack("p", PACKS["p0"])
        retrieval.ingest("c", PACKS["p0"])  # which is no reason not to keep chunks
        assert retrieval.prepare("c", SUFFIX)[1] == SUFFIX


def test_attention_that_is_scaled_by_nothing_is_no_reason_to_refuse():
    model = build("ministral3", **SCALED, rope_parameters={**BETA, "llama_4_scaling_beta": 0})
    assert len(rotations(model)) == len(model.layers)


class Learned(llama.Model):
    """A llama that adds a vector per position to its tokens, as GPT-2 does, besides its RoPE."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        offset = cache[0].offset if cache else 0
        places = mx.arange(offset, offset + inputs.shape[1])[:, None]
        places = mx.sin(places * mx.arange(1, self.args.hidden_size + 1))
        embedded = self.model.embed_tokens(inputs) + places
        return super().__call__(inputs, cache, embedded)


class FarAway(llama.Model):
    """A llama in which something is scaled by the position, but only behind so many tokens."""

    begins, what = 1_500, "keys"

    def __call__(self, inputs, cache=None, input_embeddings=None):
        first = cache[0].offset if cache else 0
        places = mx.arange(first, first + inputs.shape[1])[:, None]
        scale = 1 + mx.maximum(places - self.begins, 0) * 1e-3
        if self.what == "keys":
            embedded = self.model.embed_tokens(inputs)
            return super().__call__(inputs, cache, mx.roll(embedded, 1, -1) * scale - embedded)
        return super().__call__(inputs, cache, input_embeddings) * scale


@pytest.mark.parametrize("what", ["keys", "logits"])
def test_keys_are_not_moved_to_where_the_model_scales_them(what):
    plain = build("llama")
    model = FarAway(plain.args)
    model.what = what
    model.update(plain.parameters())
    pack = tokens(300, seed=4)
    with HybridRetrievalCache(model) as retrieval:
        retrieval.set_shared_stub(STUB)
        retrieval.ingest_pack("p", pack)
        cache, _ = retrieval.prepare_multi(["p"] * 3, SUFFIX)
        assert cache[0].offset == len(STUB) + 900
        for _ in range(2):
            with pytest.raises(PositionsFixed, match="moved to 2048 differ"):
                retrieval.prepare_multi(["p"] * 5, SUFFIX)
        retrieval.prepare_multi(["p"] * 3, SUFFIX)


def test_a_plain_model_is_not_refused_far_away():
    for dtype in ("float32", "bfloat16"):
        model = build("llama", dtype)
        reach = Reach(model, rotations(model))
        for end in (1_000, 8_192, 131_072, 1_000_000):
            reach.extend(end)


class Turned(RoPE):
    """Another rotation under another name."""


def test_positions_that_enter_in_an_unknown_way_do_not_pass():
    known = build("llama")
    rotations(known)
    strange = Learned(known.args)
    strange.update(known.parameters())
    with pytest.raises(PositionsFixed, match=r"layer 0: (keys|values) moved to 1000"):
        rotations(strange)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda attention: setattr(attention, "rope", Turned(8)), "0 rotary|no plain RoPE"),
        (lambda attention: attention.rope.__setattr__("dims", 4), None),
        (lambda attention: attention.pop("rope"), "0 rotary embeddings"),
    ],
)
def test_a_layer_unlike_the_others_is_not_overlooked(change, why):
    model = build("llama")
    change(model.layers[1].self_attn)
    if why is None:
        assert [rotation.dims for rotation in rotations(model)] == [8, 4]
        return
    with pytest.raises(PositionsFixed, match=f"layer 1: ({why})"):
        rotations(model)
