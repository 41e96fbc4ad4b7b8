"""How much memory a process has had at its worst, and how much more a call costs."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil


def clear_peak(pid: int) -> None:
    """Begins to look anew."""
    if Path("/proc/self/clear_refs").exists():
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The most memory since `clear_peak`; where the system does not say, what there is now."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return int(psutil.Process(pid).memory_info().rss)
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def growth_bytes(call: Callable[[], object]) -> int:
    """By how much a fresh process grows with what that function returns.

    The process of the tests is no place to look: its memory moves also for what ran before.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_growth_bytes_here, call).result()


def _growth_bytes_here(call: Callable[[], object]) -> int:
    process = psutil.Process()
    before: int = process.memory_info().rss
    kept = call()
    grown: int = process.memory_info().rss - before
    del kept
    return grown
