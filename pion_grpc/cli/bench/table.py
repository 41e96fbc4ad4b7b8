"""How results are shown: one table for people, the same as Markdown for the documentation."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pion_grpc.cli import output
from pion_grpc.cli.bench.results import Result, Row, Samples

_STYLES = {"met": "green", "missed": "bold red", "reported": "", "not measured": "yellow"}
_HEADINGS = ("what", "ours", "peer", "ratio", "bound", "verdict")


def rich_table(rows: Sequence[Row]) -> Table:
    """The table: a section for each row."""
    table = output.table("median (smallest to largest sample)", *_HEADINGS)
    for row in rows:
        for result in row.results:
            what, *cells, verdict = cells_of(result)
            shown = Text(what)
            if result.note:
                shown.append(f"\n{result.note}", style="dim")
            table.add_row(shown, *cells, Text(verdict, style=_STYLES[verdict]))
        table.add_section()
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The same as Markdown."""
    lines = []
    for row in rows:
        for result in row.results:
            what, *cells = cells_of(result)
            note = f"<br>{result.note}" if result.note else ""
            lines.append([f"`{row.name}`", what + note, *cells])
    return markdown_table(("row", *_HEADINGS), lines)


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *escaped)
    )


def cells_of(result: Result) -> tuple[str, str, str, str, str, str]:
    """The columns of one result."""
    return (
        result.what,
        side_text(result.ours, result.figure, result.unit),
        result.peer.name + " " + side_text(result.peer, result.peer_figure, result.unit)
        if result.peer
        else "",
        "" if result.ratio is None else f"{number(result.ratio)} ×",
        result.bound.text(result.unit) if result.bound else "",
        result.verdict,
    )


def side_text(samples: Samples | None, figure: float | None, unit: str) -> str:
    """A figure with its unit, and the range of its samples if there are several."""
    if samples is None or figure is None:
        return ""
    text = f"{number(figure)} {unit}"
    if len(samples.values) == 1:
        return text
    return f"{text} ({number(min(samples.values))} to {number(max(samples.values))})"


def number(value: float) -> str:
    """Three significant digits, whole numbers in full."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.{digits}f}"
