"""`pion-vllm-mlx serve` over HTTP: a conversation goes on where it was, whoever was killed meanwhile."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import generate, load
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pion_grpc.cli.smollm2 import random_llama
from tests.conftest import ServerProcess
from tests.ports import free_ports
from tests.resp.wire import Wire, fields

pytest.importorskip("pion_vllm_mlx", reason="pion-vllm-mlx is not installed")

LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 16
ROW_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
SYSTEM = "You are a support agent. " * 12  # one token per byte
ANSWER_TOKENS = 24
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in binary16 as `mlx_lm.load` finds it; its tokens are bytes."""
    path = tmp_path_factory.mktemp("model")
    model = random_llama(layers=LAYERS, vocab=257, dtype="float16")
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


class Serve:
    """A `pion-vllm-mlx serve` of its own process."""

    def __init__(self, model_path: Path, resp_port: int, *flags: str) -> None:
        (self.port,) = free_ports(1)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pion_vllm_mlx", "serve", "--model", str(model_path),
             "--port", str(self.port), "--pion-port", str(resp_port), "--log-level", "INFO", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self.output: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(60), "".join(self.output)

    def say(self, messages: list[dict[str, str]]) -> str:
        """Answers a conversation, greedily."""
        body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        link.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = link.getresponse()
        text = answer.read()
        link.close()
        assert answer.status == 200, text
        return str(json.loads(text)["choices"][0]["message"]["content"])

    def restored(self) -> list[int]:
        """How many tokens came from the store, each time some did."""
        return [int(n) for n in re.findall(r"pion: restored (\d+) tokens", "".join(self.output))]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if "Starting httpd" in line:
                self._listening.set()
        self._listening.set()


@pytest.fixture
def start_serve(model_path: Path) -> Iterator[Callable[..., Serve]]:
    running: list[Serve] = []

    def start(server: ServerProcess, *flags: str) -> Serve:
        running.append(Serve(model_path, resp_port(server), *flags))
        return running[-1]

    yield start
    for serve in running:
        if serve.process.poll() is None:
            serve.kill()


def resp_port(server: ServerProcess) -> int:
    return int(server.ready["resp"].rpartition(":")[2])


def turn(*texts: str) -> list[dict[str, str]]:
    """A conversation: what the user and the assistant said in turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": SYSTEM}, *said]


def expected(model_path: Path, messages: list[dict[str, str]]) -> str:
    """What the model answers without any store."""
    model, tokenizer = load(str(model_path))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    cache = make_prompt_cache(model)
    return str(generate(model, tokenizer, prompt, max_tokens=ANSWER_TOKENS, prompt_cache=cache))


def test_a_conversation_goes_on_after_everything_was_killed(
    start_server: Callable[..., ServerProcess],
    start_serve: Callable[..., Serve],
    model_path: Path,
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    first = start_serve(server, "--durable", "8")
    question = "How do I reset my password? " * 4
    answer = first.say(turn(question))
    assert answer == expected(model_path, turn(question))
    assert first.restored() == []
    first.kill()
    server.kill()

    server = start_server("--resp", f"127.0.0.1:{resp_port(server)}")
    second = start_serve(server, "--durable", "8")
    follows = turn(question, answer, "And then?")
    again = second.say(follows)
    assert again == expected(model_path, follows)
    (restored,) = second.restored()
    assert restored >= len(SYSTEM) + len(question)

    # The store alone dies, and comes back, under a process that goes on.
    server.kill()
    more = turn(question, answer, "And then?", again, "Thank you.")
    gone = second.say(more)
    server = start_server("--resp", f"127.0.0.1:{resp_port(server)}")
    last = turn(question, answer, "And then?", again, "Thank you.", gone, "Bye.")
    assert second.say(last) == expected(model_path, last)
    assert gone == expected(model_path, more)


def test_leaves_go_before_what_they_grew_from(
    start_server: Callable[..., ServerProcess],
    start_serve: Callable[..., Serve],
    model_path: Path,
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    budget = (len(SYSTEM) + 900) * ROW_BYTES  # the first conversation's rows, and two more branches
    flags = ("--pion-budget-gb", str(budget / (1 << 30)), "--prompt-cache-size", "1")
    serve = start_serve(server, *flags)
    branches = [turn(f"{number} " * 128) for number in range(5)]
    for branch in branches:
        serve.say(branch)
    wire = Wire(server.ready["resp"])
    kept = fields(wire("KV.PREFIX.INFO"))
    assert int(kept["vstore_bytes"]) <= budget
    assert int(kept["vstore_evictions"]) > 0
    serve.kill()

    found = []
    for branch in (branches[4], branches[1], branches[0]):
        fresh = start_serve(server, *flags)
        assert fresh.say(branch) == expected(model_path, branch)
        found += fresh.restored()
        fresh.kill()
    live, evicted, root = found
    assert live > len(SYSTEM) + 200, "the chain that was just used went"
    assert 192 <= evicted < len(SYSTEM) + 100, "an evicted chain does not fall back"
    assert root > len(SYSTEM) + 200, "a root went before its leaves"
    wire.close()
