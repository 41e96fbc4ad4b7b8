"""What commands show: tables and bars for people, one JSON value for programs.

Knows nothing of prefixes. The one decision: whatever came from elsewhere (names, model ids, paths) is
shown without markup and with every unprintable character escaped, so that nobody can name a prefix so
that it moves the cursor or hides a line. Results go to stdout, progress to stderr.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

PIPE_WIDTH = 200
"""Columns where the output is no terminal: names are not cut to a width that does not exist."""

Advance: TypeAlias = Callable[[int, int], None]
"""Takes (bytes done, bytes in all)."""


def console(*, stderr: bool = False) -> Console:
    """Returns the console that people read."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def show(options: argparse.Namespace, value: Any, render: Callable[[Console], None]) -> None:
    """Prints `value` as JSON with `--json`; else lets `render` show it to a person."""
    if options.json:
        print(json.dumps(value, indent=2), flush=True)
    else:
        render(console())


def table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Returns an empty table; the columns in `numbers` are aligned to the right."""
    empty = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        right = column in numbers
        empty.add_column(column, justify="right" if right else "left", no_wrap=right)
        empty.columns[-1].overflow = "fold"
    return empty


def pairs(title: str, rows: "list[tuple[str, str]]") -> Table:
    """Returns a table of names and values."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def printable(text: str) -> str:
    """Returns a text with every unprintable character escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, one: str, many: str) -> str:
    """Returns a number with its noun, such as `1 prefix` or `2 prefixes`."""
    return f"{count:,} {one if count == 1 else many}"


def size(count: int) -> str:
    """Returns bytes for people, such as `24.0 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(value: float) -> str:
    """Returns a duration for people."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


@contextlib.contextmanager
def progress(options: argparse.Namespace, what: str) -> Iterator[Advance]:
    """Shows a bar on a terminal's stderr; elsewhere, and with `--json`, nothing."""
    shown = console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=shown,
        transient=True,
        disable=options.json or not shown.is_terminal,
    )
    with bar:
        task = bar.add_task(printable(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
