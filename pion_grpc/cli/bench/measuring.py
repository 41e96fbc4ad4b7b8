"""How a row measures: its sides take turns, in rounds, with a progress bar for whoever waits.

Knows no server and no peer. The one decision: the sides of a comparison alternate within every round,
and each round begins with a different side, after warm-up rounds that are discarded. Whatever the
machine does meanwhile (another process, a slower clock, memory touched for the first time) affects all
of them alike.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rich.progress import Progress

Side: TypeAlias = Callable[[], float]
"""Measures once and returns seconds, or whatever the row's unit is; preparations are not timed."""


_REDRAW_S = 0.2


class Workload(NamedTuple):
    """The size of the `workload` row."""

    prompts: int = 5
    queries: int = 30
    prompt_repeats: int = 8
    cold_queries: int = 3
    """Queries of each prompt that are answered without the store too."""

    @property
    def request_count(self) -> int:
        """Requests in all."""
        return self.prompts * self.queries

    @property
    def hit_count(self) -> int:
        """Hits that are expected: every request except the first of each prompt."""
        return self.prompts * (self.queries - 1)


_HEADLINE = Workload()


class Context:
    """What a row may use."""

    def __init__(
        self,
        scratch: Path,
        progress: Progress,
        *,
        quick: bool = False,
        workload: Workload = _HEADLINE,
    ) -> None:
        self.scratch = scratch
        """A directory for the row's files; removed after it."""
        self.quick = quick
        """Whether to be done soon rather than to be sure."""
        self.workload = workload
        self._progress = progress

    def interleaved(
        self,
        sides: Mapping[str, Side],
        rounds: int,
        *,
        warm_ups: int = 1,
        rounds_when_quick: int = 5,
        rarely: Mapping[str, int] | None = None,
    ) -> dict[str, tuple[float, ...]]:
        """Measures every side once per round; returns the samples of each.

        Args:
            sides: by name.
            rounds: how many.
            warm_ups: rounds before, which do not count.
            rounds_when_quick: how many at most with `--quick`.
            rarely: of sides that take long, how many rounds they take part in, without a warm-up.
        """
        rarely = rarely or {}
        rounds = min(rounds, rounds_when_quick) if self.quick else rounds
        names = list(sides)
        samples: dict[str, list[float]] = {name: [] for name in names}
        with self.waiting(" and ".join(names), warm_ups + rounds) as advance:
            for _ in range(warm_ups):
                for name in names:
                    if name not in rarely:
                        sides[name]()
                advance()
            for turn in range(rounds):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    if turn < rarely.get(name, rounds):
                        samples[name].append(sides[name]())
                advance()
        return {name: tuple(values) for name, values in samples.items()}

    @contextlib.contextmanager
    def waiting(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Shows a bar; the function it yields advances it by one. Nothing is drawn in between."""
        task = self._progress.add_task(what, total=total)
        self._progress.refresh()
        drawn = time.monotonic()

        def advance() -> None:
            nonlocal drawn
            self._progress.advance(task)
            if time.monotonic() - drawn > _REDRAW_S:
                self._progress.refresh()
                drawn = time.monotonic()

        try:
            yield advance
        finally:
            self._progress.remove_task(task)


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds an action takes; its result is freed after the clock has stopped."""
    started = time.perf_counter()
    kept = action()
    elapsed = time.perf_counter() - started
    del kept
    return elapsed
