"""The command: what it runs, what it keeps, and what it says where something is missing."""

import json
import pkgutil
import re
import subprocess
import sys

import pytest

from pion_grpc.cli.bench import ROWS, Entry, chart, command, first_token, texts
from pion_grpc.cli.bench.measuring import Context, Workload
from pion_grpc.cli.bench.models import Sizes
from pion_grpc.cli.bench.results import Report, Result, Row, Samples
from pion_grpc.cli.bench.workload import requests
from pion_grpc.cli.main import main
from tests.bench.test_bench_results import report

HERE = __name__


def counted(context: Context) -> list[Result]:
    calls: list[str] = []

    def side(name: str):
        return lambda: float(len(calls.append(name) or calls))

    sides = {name: side(name) for name in ("a", "b", "rare")}
    samples = context.interleaved(sides, 3, warm_ups=1, rarely={"rare": 1})
    (context.scratch / "file").write_text("".join(calls))
    return [
        Result("".join(calls), "", Samples("a", samples["a"]), Samples("rare", samples["rare"]))
    ]


def broken(context: Context) -> list[Result]:
    raise ValueError("no\nluck")


def redis(context: Context) -> list[Result]:
    from pion_grpc.cli.bench.transfer import redis

    return redis(context)


def tiny(context: Context) -> list[Result]:
    sizes = Sizes(layers=2, hidden=64, heads=4, kv_heads=2)
    return first_token.measured(context, sizes, (300,))


def run(path, *names: str) -> tuple[Report, bool]:
    entries = [Entry(name, f"what {name} is", f"{HERE}:{name}") for name in names]
    return command.run(entries, path, quick=False, workload=Workload())


def test_sides_do_not_always_come_in_the_same_order_and_warm_ups_do_not_count(tmp_path):
    measured, failed = run(tmp_path / "new" / "r.json", "counted")
    (result,) = measured.rows[0].results
    assert not failed
    # One warm-up of those that are not rare, then three rounds, each begun by the next side.
    assert result.what == "ab" + "abrare" + "ba" + "ab"
    assert result.ours == Samples("a", (3.0, 7.0, 8.0))
    assert result.peer == Samples("rare", (5.0,))


def test_a_row_that_fails_does_not_take_the_others_along(tmp_path, capfd):
    path = tmp_path / "r.json"
    measured, failed = run(path, "broken", "counted")
    assert failed
    first, second = measured.rows
    assert first.results[0].note == "failed: ValueError: no"
    assert second.results[0].figure is not None
    assert Report.from_json(json.loads(path.read_text())) == measured
    assert "luck" in capfd.readouterr().err


def test_a_missing_peer_is_not_a_failure_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    measured, failed = run(tmp_path / "r.json", "redis")
    (result,) = measured.rows[0].results
    assert (failed, result.verdict) == (False, "not measured")
    assert result.note == "redis-server is not installed: apt-get install redis-server"


@pytest.mark.model
def test_no_way_to_a_first_token_gives_another_token(tmp_path):
    measured, failed = run(tmp_path / "r.json", "tiny")
    assert not failed, measured.rows[0].results[0].note
    assert [result.ours.name for result in measured.rows[0].results] == [
        "export",
        "stream",
        "export",
    ]
    assert measured.rows[0].results[-1].note == "3 of 3 agree with cold"
    drawn = chart.first_tokens(measured.rows[0])
    assert re.search(r'\["\d+"\]', drawn), "what is measured is what is drawn"


def test_no_row_is_without_a_function():
    for entry in ROWS:
        assert callable(pkgutil.resolve_name(entry.where)), entry


def test_help_does_not_wait_for_what_measures():
    heavy = {"numpy", "grpc", "mlx", "rich"}
    code = f"import sys, pion_grpc.cli.bench; print(*{heavy} & {{*sys.modules}})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def test_an_unknown_row_does_not_start_anything(capsys):
    assert main(["bench", "fetch", "nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err
    assert main(["bench", "list"]) == 0
    assert "first-token" in capsys.readouterr().out


def test_markdown_does_not_come_from_older_quick_or_empty_measurements(tmp_path):
    def row(name: str, *values: float) -> Row:
        results = (Result(name, "ms", Samples("x", values)),) if values else ()
        return Row(name, 1.0, 0.0, results)

    command.write(report(row("fetch", 1.0), row("store", 2.0), started=1), tmp_path / "1.json")
    command.write(report(row("fetch", 3.0), row("store"), started=2), tmp_path / "2.json")
    command.write(report(row("fetch", 4.0), started=3, quick=True), tmp_path / "3.json")
    (tmp_path / "4.json").write_text("{")
    text = command.as_markdown(command.newest(tmp_path), ["fetch", "store", "calls"])
    assert "| `fetch` | fetch | 3 ms |" in text
    assert "| `store` | store | 2 ms |" in text
    assert "commit abc: abc, 2 cores, 4 GiB" in text


def test_the_workload_does_not_miss_more_than_once_per_prompt():
    size = Workload(prompts=5, queries=30, prompt_repeats=8)
    assert (size.hit_count, size.request_count) == (145, 150)
    asked = list(requests(size))
    assert len(asked) == 150
    assert sum(request.first for request in asked) == 5
    assert [r.prompt for r in asked[:6]] == [0, 1, 2, 3, 4, 0]
    assert len({request.question for request in asked}) == 150
    assert sum(request.cold_too for request in asked) == 5 * size.cold_queries
    assert not any(request.first and request.cold_too for request in asked)


@pytest.mark.parametrize("repeats", [1, 8])
def test_prompts_are_neither_equal_nor_different_from_run_to_run(repeats):
    prompts = [texts.prompt(number, repeats) for number in range(5)]
    assert len(set(prompts)) == 5
    assert prompts == [texts.prompt(number, repeats) for number in range(5)]
    assert [len(prompt) for prompt in prompts] == [
        repeats * (len(texts.prompt(number)) + 1) - 1 for number in range(5)
    ]
