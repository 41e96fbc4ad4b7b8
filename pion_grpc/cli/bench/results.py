"""What a measurement is: samples, the bound they must meet, and how they are written down.

Knows neither what is measured nor how it is shown. The one decision: a result compares one of our
figures with at most one peer's. Its ratio is ours divided by the peer's, whatever the unit; only the
bound says whether more or less is better.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["met", "missed", "reported", "not measured"]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a result must meet."""

    limit: float
    at_least: bool
    """True: not less than the limit; False: not more."""
    of_ratio: bool = True
    """False: our own figure is bounded."""
    aim: float | None = None
    """What would be better still; no verdict depends on it."""

    def holds(self, value: float) -> bool:
        """Whether a value meets the bound."""
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self, unit: str) -> str:
        """The bound as the table shows it."""
        sign, unit = "≥" if self.at_least else "≤", "×" if self.of_ratio else unit
        aim = "" if self.aim is None else f", aim {self.aim:g}"
        return f"{sign} {self.limit:g}{aim} {unit}"


def at_least(limit: float, *, of_ratio: bool = True, aim: float | None = None) -> Bound:
    """A lower bound."""
    return Bound(limit, True, of_ratio, aim)


def at_most(limit: float, *, of_ratio: bool = True) -> Bound:
    """An upper bound."""
    return Bound(limit, False, of_ratio)


@dataclass(frozen=True, slots=True)
class Samples:
    """One side of a comparison: what was measured there, once per round."""

    name: str
    values: tuple[float, ...]

    def quantile(self, fraction: float) -> float:
        """The sample that this share of them does not exceed; 0.5 is the median."""
        if fraction == 0.5:
            return statistics.median(self.values)
        ordered = sorted(self.values)
        return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    what: str
    unit: str
    ours: Samples | None
    """None: it could not be measured; `note` says why."""
    peer: Samples | None = None
    bound: Bound | None = None
    fraction: float = 0.5
    """Which quantile of the samples is the figure."""
    note: str = ""

    @property
    def figure(self) -> float | None:
        """Ours."""
        return self.ours.quantile(self.fraction) if self.ours else None

    @property
    def peer_figure(self) -> float | None:
        """The peer's."""
        return self.peer.quantile(self.fraction) if self.peer else None

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        ours, peers = self.figure, self.peer_figure
        return ours / peers if ours is not None and peers else None

    @property
    def verdict(self) -> Verdict:
        """Whether the bound holds."""
        if self.figure is None:
            return "not measured"
        if self.bound is None:
            return "reported"
        value = self.ratio if self.bound.of_ratio else self.figure
        if value is None:
            return "not measured"
        return "met" if self.bound.holds(value) else "missed"


def not_measured(what: str, why: str) -> Result:
    """A line that says why there is no figure."""
    return Result(what, "", None, note=why)


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one row of the registry."""

    name: str
    seconds: float
    load_average: float
    """Of the machine at the end: 1 or more per core means that others were at work too."""
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One run: every row, and the machine it ran on."""

    started_unix_ms: int
    quick: bool
    machine: dict[str, Any]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as it is written; figures, ratios and verdicts are there for other readers."""
        document = dataclasses.asdict(self)
        for row, written in zip(self.rows, document["rows"], strict=True):
            for result, entry in zip(row.results, written["results"], strict=True):
                entry |= {
                    "figure": result.figure,
                    "peer_figure": result.peer_figure,
                    "ratio": result.ratio,
                    "verdict": result.verdict,
                }
        return {"format": _FORMAT, **document}

    @staticmethod
    def from_json(document: dict[str, Any]) -> "Report":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: it is something else, or of another version.
        """
        if document.get("format") != _FORMAT:
            raise ValueError(f"not a benchmark of format {_FORMAT}")
        try:
            rows = tuple(
                Row(
                    row["name"],
                    row["seconds"],
                    row["load_average"],
                    tuple(map(_result, row["results"])),
                )
                for row in document["rows"]
            )
            return Report(document["started_unix_ms"], document["quick"], document["machine"], rows)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a benchmark of format {_FORMAT} with parts missing") from error


_FORMAT = 1


def _result(entry: dict[str, Any]) -> Result:
    return Result(
        what=entry["what"],
        unit=entry["unit"],
        ours=_samples(entry["ours"]),
        peer=_samples(entry["peer"]),
        bound=Bound(**entry["bound"]) if entry["bound"] else None,
        fraction=entry["fraction"],
        note=entry["note"],
    )


def _samples(entry: dict[str, Any] | None) -> Samples | None:
    return Samples(entry["name"], tuple(entry["values"])) if entry else None


def rates(name: str, size_bytes: int, seconds: Sequence[float]) -> Samples:
    """Samples in GB/s, from the seconds that moving this many bytes took."""
    return Samples(name, tuple(size_bytes / 1e9 / s for s in seconds))


def milliseconds(name: str, seconds: Sequence[float]) -> Samples:
    """Samples in ms."""
    return Samples(name, tuple(s * 1e3 for s in seconds))
