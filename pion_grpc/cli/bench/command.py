"""The command: runs rows, shows what they gave, and keeps it.

Knows the registry and the report, nothing of what is measured. The one decision: the JSON file is
rewritten after every row, so that the results of an interrupted run are not lost.
"""

import argparse
import dataclasses
import json
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pion_grpc.cli import blas, output
from pion_grpc.cli.bench import ROWS, Entry, chart, figures, machine, table
from pion_grpc.cli.bench.measuring import Context, Workload
from pion_grpc.cli.bench.models import ModelMissing
from pion_grpc.cli.bench.processes import PeerMissing
from pion_grpc.cli.bench.results import Report, Result, Row, not_measured
from pion_grpc.cli.failure import CommandFailed

RESULTS = Path("bench-results")


def bench(options: argparse.Namespace) -> int:
    """Does what the options say; returns 1 if a row failed, which is never because of a figure."""
    console = output.console()
    if options.rows == ["list"]:
        console.print(_list())
        return 0
    entries = chosen(options.rows)
    if options.markdown:
        # Not through the console, which would wrap it.
        print(as_markdown(newest(RESULTS), [entry.name for entry in entries]))
        return 0
    os.environ.update(blas.with_fast_blas(os.environ))  # for the processes with a model
    size = Workload(options.prompts, options.queries, options.prompt_repeats, options.cold_queries)
    path = Path(options.json or RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
    report, failed = run(entries, path, quick=options.quick, workload=size)
    console.print(table.rich_table(report.rows))
    load = report.machine["load_average"]
    console.print(f"{machine_text(report)}; load average {load:g}\n{path}")
    return int(failed)


def run(
    entries: Sequence[Entry], path: Path, *, quick: bool, workload: Workload
) -> tuple[Report, bool]:
    """Measures rows and writes the report; also says whether a row failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    with _progress() as progress, tempfile.TemporaryDirectory(prefix="pion-bench-") as scratch:
        description = machine.description(Path(scratch))
        report = Report(int(time.time() * 1e3), quick, description, ())
        for entry in entries:
            with tempfile.TemporaryDirectory(dir=scratch) as directory:
                context = Context(Path(directory), progress, quick=quick, workload=workload)
                row, whole = _measured(entry, context, progress)
            failed |= not whole
            report = dataclasses.replace(report, rows=(*report.rows, row))
            write(report, path)
            took = output.seconds(row.seconds)
            progress.console.print(f"{row.name}: {took}, load average {row.load_average:g}")
    return report, failed


def chosen(names: Sequence[str]) -> list[Entry]:
    """The rows with these names, in the registry's order; all of them if there are no names.

    Raises:
        CommandFailed: there is no such row.
    """
    known = {entry.name for entry in ROWS}
    for name in names:
        if name not in known:
            raise CommandFailed(f"there is no row {name!r}: `pion-grpc bench list` lists them")
    return [entry for entry in ROWS if not names or entry.name in names]


def write(report: Report, path: Path) -> None:
    """Writes a report; whoever reads it meanwhile finds the old one or the new one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n")
    os.replace(new, path)


def newest(directory: Path) -> dict[str, tuple[Report, Row]]:
    """Each row's newest full-size measurement, and the run it belongs to."""
    found: dict[str, tuple[Report, Row]] = {}
    for report in sorted(_reports(directory), key=lambda report: report.started_unix_ms):
        for row in report.rows:
            if any(result.ours for result in row.results):
                found[row.name] = report, row
    return found


def as_markdown(measured: dict[str, tuple[Report, Row]], names: Sequence[str]) -> str:
    """The results, the machines they come from, and the product's figures beside them."""
    rows = [measured[name][1] for name in names if name in measured]
    machines = dict.fromkeys(machine_text(measured[row.name][0]) for row in rows)
    loads = sorted(row.load_average for row in rows) or [0.0]
    return "\n\n".join(
        [
            "<!-- results -->",
            *(chart.first_tokens(row) for row in rows if row.name == "first-token"),
            table.markdown(rows),
            "\n".join(f"* {text}" for text in machines),
            f"Load average at the end of a row: {loads[0]:.2g} to {loads[-1]:.2g}.",
            "<!-- /results -->",
            "<!-- figures -->",
            figures.markdown({row.name: row for row in rows}),
            "<!-- /figures -->",
        ]
    )


def _measured(entry: Entry, context: Context, progress: Progress) -> tuple[Row, bool]:
    """One row, and whether it ran to its end."""
    started, whole = time.monotonic(), True
    try:
        measure: Callable[[Context], list[Result]] = pkgutil.resolve_name(entry.where)
        results = measure(context)
    except (PeerMissing, ModelMissing) as missing:
        results = [not_measured(entry.what, str(missing))]
    except Exception as error:  # the other rows are worth having
        progress.console.print_exception()
        first_line, _, _ = f"{type(error).__name__}: {error}".partition("\n")
        results, whole = [not_measured(entry.what, f"failed: {first_line}")], False
    seconds = time.monotonic() - started
    return Row(entry.name, seconds, machine.load_average(), tuple(results)), whole


def _reports(directory: Path) -> Iterator[Report]:
    for path in directory.glob("*.json"):
        try:
            report = Report.from_json(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue  # not one of ours, or of another version
        if not report.quick:
            yield report


def machine_text(report: Report) -> str:
    """When and on what a report was measured, in a line."""
    of = report.machine
    blas_of = of["blas"]
    libraries = ", ".join(f"{name} {version}" for name, version in of["libraries"].items())
    when = datetime.fromtimestamp(report.started_unix_ms / 1e3, UTC)
    return (
        f"{when:%Y-%m-%d}, commit {of['commit'] or 'unknown'}: {of['cpu']}, {of['cores']} cores, "
        f"{of['memory_gib']:g} GiB, {of['system']}, {of['file_system']}; Python {of['python']}, "
        f"{libraries}; BLAS of NumPy {blas_of['numpy']}, of MLX {blas_of['mlx']}"
    )


def _list() -> Table:
    listing = output.table("", "row", "what it measures")
    for entry in ROWS:
        listing.add_row(entry.name, entry.what)
    return listing


def _progress() -> Progress:
    # Drawn by the thread that measures, between samples: one that draws by itself would be measured.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=output.console(stderr=True),
        auto_refresh=False,
        transient=True,
    )
