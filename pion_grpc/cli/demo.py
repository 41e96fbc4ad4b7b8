"""`demo`: the main job on a real model, in three processes.

A server with its own directory; a first client that misses, prefills a prompt and stores it; and, after
that has ended, a second client that hits and never prefills the prompt. What is shown is what the server
and the clients counted, and the verdict compares token ids.

The one decision: nothing outlives the demo. Server and clients are in process groups of their own, so
that Ctrl-C reaches only this process, which ends them and removes the directory, however it ends itself.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console

from pion_client import Client, Receipt
from pion_grpc.cli.blas import with_fast_blas
from pion_grpc.cli.failure import CommandFailed
from pion_grpc.cli.output import console, seconds, show, size, table

END_TIMEOUT_S = 15.0

Say = Callable[[str, str], None]
"""Takes who did something, and what."""


class Run(NamedTuple):
    """What one client process reported."""

    prompt_tokens: int
    question_tokens: int
    cache_ms: float
    """Time until the prompt's cache was there: prefilled, or fetched and installed."""
    ttft_ms: float
    answer: str
    answer_ids: list[int]
    hit: bool
    stats: dict[str, Any]


def demo(options: argparse.Namespace) -> int:
    """Runs the demo; 1 if the answers differ or the second process did not hit."""
    lines = console(stderr=options.json)

    def say(who: str, text: str) -> None:
        lines.print(f"{who:<10}{text}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_in_order())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pion-")))
        address = stack.enter_context(_server(directory, say))
        first = _client("client 1", address, say)
        if first.stats["stores"] != 1:
            raise CommandFailed(f"the prompt was not stored: {first.stats['skipped']}")
        second = _client("client 2", address, say)
        with Client(address) as client:
            receipt = client.stats()

    works, verdict = judged(first, second)
    value = {
        "ok": works,
        "verdict": verdict,
        "same_answer": first.answer_ids == second.answer_ids,
        "second_hit": second.hit,
        "prompt_tokens": first.prompt_tokens,
        "question_tokens": first.question_tokens,
        "tokens_not_computed_again": second.stats["tokens_served"],
        "bytes_served": receipt.bytes_exported + receipt.bytes_streamed,
        "lane": second.stats["lane"],
        "cold": _as_json(first),
        "warm": _as_json(second),
    }
    show(options, value, lambda out: _render(out, first, second, receipt, verdict))
    return 0 if works else 1


def judged(first: Run, second: Run) -> tuple[bool, str]:
    """Returns whether the demo showed what it promises, and a sentence about it."""
    if not second.hit or second.stats["tokens_prefilled"]:
        return False, f"FAILED: the second process did not use what was stored: {second.stats}"
    if first.answer_ids != second.answer_ids:
        return False, f"FAILED: the answers differ: {first.answer_ids} and {second.answer_ids}"
    return True, (
        f"Both answers are the same, token for token ({len(first.answer_ids)} tokens); the first token "
        f"came {first.ttft_ms / second.ttft_ms:.1f} times sooner."
    )


def _render(out: Console, first: Run, second: Run, receipt: Receipt, verdict: str) -> None:
    shown = table(
        f"A prompt of {first.prompt_tokens} tokens, a question of {first.question_tokens}", "",
        "client 1, cold", "client 2, warm",
    )  # fmt: skip
    served = receipt.bytes_exported + receipt.bytes_streamed
    rows = [
        ("prompt", "miss, prefilled", f"hit, fetched by {second.stats['lane']}"),
        ("time to first token", seconds(first.ttft_ms / 1e3), seconds(second.ttft_ms / 1e3)),
        ("of that, for the prompt", seconds(first.cache_ms / 1e3), seconds(second.cache_ms / 1e3)),
        ("tokens not computed again", "0", f"{second.stats['tokens_served']:,}"),
        ("bytes of K/V", "", size(served)),
        ("answer", first.answer, second.answer),
    ]
    for row in rows:
        shown.add_row(*row)
    out.print(shown)
    out.print(verdict)


def _as_json(run: Run) -> dict[str, Any]:
    fields = ("ttft_ms", "cache_ms", "answer", "answer_ids", "hit")
    return {name: getattr(run, name) for name in fields}


# Processes


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Lets SIGTERM and a closed terminal end the demo as Ctrl-C does, with everything cleaned up.

    Even if these signals were ignored when it started, as in the background of a script.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _server(directory: Path, say: Say) -> Iterator[str]:
    """Runs a server until the end; yields its address."""
    listen = f"unix:{directory}/socket"
    command = ["pion_grpc", "serve", "--data", f"{directory}/data", "--listen", listen]
    with _process([*command, "--drain-ms", "0"]) as process:
        printed = []
        for line in _lines(process):
            printed.append(line)
            if _event(line) == "ready":
                break
        else:
            raise CommandFailed("the server did not start:\n" + "".join(printed).rstrip())
        say("server", f"listens on {listen}")
        yield listen


def _client(name: str, address: str, say: Say) -> Run:
    """Runs a client process to its end."""
    told: dict[str, Any] = {}
    output = []
    with _process(["pion_grpc.cli.demo_client", address]) as process:
        for line in _lines(process):
            if event := _event(line):
                told.update(json.loads(line))
                say(name, _progress(event, told))
            else:
                output.append(line)
        status = process.wait()
    if status != 0:
        raise CommandFailed(f"{name} failed with status {status}:\n" + "".join(output).rstrip())
    return Run(**{field: told[field] for field in Run._fields})


def _progress(event: str, told: dict[str, Any]) -> str:
    if event == "loading":
        return (
            "loads SmolLM2-135M (the first time on a machine, it is converted, which takes longer)"
        )
    if event == "asking":
        return f"asks for its prompt of {told['prompt_tokens']} tokens"
    if event == "answered":
        how = "a hit: fetched it" if told["hit"] else "a miss: prefilled it"
        return f"{how} in {seconds(told['cache_ms'] / 1e3)}, then answered"
    return "stored the prompt and ended" if told["stats"]["stores"] else "ended"


@contextlib.contextmanager
def _process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs a module of ours; it ends with the block."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PION_")}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=with_fast_blas(ours),
        process_group=0,
    )
    with process:  # closes the pipe, and waits
        try:
            yield process
        finally:
            _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _lines(process: "subprocess.Popen[str]") -> Iterator[str]:
    """Yields what a process prints. The pipe stays open: the process may go on writing to it."""
    assert process.stdout is not None
    for line in process.stdout:  # noqa: UP028 - `yield from` would close it with the generator
        yield line


def _event(line: str) -> str:
    """Returns what a line of JSON reports; empty for any other line."""
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):
        return ""
