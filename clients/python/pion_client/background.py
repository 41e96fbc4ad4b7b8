"""Work in the background: a short queue, one thread, and a clean end.

Knows neither prefixes nor servers: a job is a function.

The one decision: the thread lives only while there is work, and is not a daemon. When the main thread
has ended, the interpreter waits for such threads and lets them start others meanwhile (gRPC needs some).
So queued work is finished even if nobody called `close()`, for at most `EXIT_GRACE_S`; then the rest is
abandoned. Daemon threads would be cut off wherever they happen to be, and functions registered with
`atexit` run when no thread can be started any more.
"""

import collections
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

JOBS_MAX = 64
BYTES_MAX = 2 << 30
"""Arrays that queued jobs keep in memory, which the caller would have freed by now."""
EXIT_GRACE_S = 10.0
"""How long the program's exit waits for queued jobs."""

_log = logging.getLogger(__name__)


class Abandoned(Exception):
    """The job is no longer wanted; `check` raises this."""


class _Job(NamedTuple):
    run: Callable[[], None]
    abandoned: Callable[[], None]
    size_bytes: int
    due_s: float
    """On the monotonic clock: when it may start; earlier if somebody waits for it."""


class Background:
    """Runs jobs one after the other on a thread of their own.

    Args:
        jobs_max: how many may wait.
        bytes_max: how much they may keep in memory, including the one that is running.
        interrupt: called when the work is abandoned, to end whatever a job may be waiting for.

    Jobs handle their own errors: an exception is logged, and the next job runs. Abandoned is not an
    error.
    """

    def __init__(
        self,
        *,
        jobs_max: int = JOBS_MAX,
        bytes_max: int = BYTES_MAX,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._jobs_max, self._bytes_max, self._interrupt = jobs_max, bytes_max, interrupt
        self._changed = threading.Condition()
        self._jobs: collections.deque[_Job] = collections.deque()
        self._bytes = 0  # including the job that is running
        self._running = False
        self._hurried = False
        self._ended = False

    def put(
        self,
        run: Callable[[], None],
        *,
        size_bytes: int,
        delay_s: float = 0.0,
        abandoned: Callable[[], None] = lambda: None,
    ) -> bool:
        """Queues a job; returns False, and forgets it, if the queue is full or has ended.

        Args:
            run: the job.
            size_bytes: what the job keeps in memory. A single job may be larger than the limit.
            delay_s: how long to leave the processor to the caller, unless `flush` is called or the
                program ends before.
            abandoned: called instead of `run` if the job never starts.
        """
        with self._changed:
            full = self._bytes and self._bytes + size_bytes > self._bytes_max
            if self._ended or full or len(self._jobs) >= self._jobs_max:
                return False
            if not self._running and not self._start():
                return False
            self._jobs.append(_Job(run, abandoned, size_bytes, time.monotonic() + delay_s))
            self._bytes += size_bytes
        return True

    @property
    def pending_bytes(self) -> int:
        """Bytes kept in memory by jobs that have not ended."""
        return self._bytes

    @property
    def ended(self) -> bool:
        """Whether it takes no more jobs."""
        return self._ended

    def check(self, *_: object) -> None:
        """Raises Abandoned if the work is no longer wanted; jobs call it now and then."""
        if self._ended:
            raise Abandoned

    def flush(self, timeout_s: float | None = None) -> bool:
        """Runs everything queued now, and waits for it; returns False if that took too long."""
        with self._changed:
            self._hurried = self._running
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def abandon(self) -> None:
        """Takes no more jobs, drops those that wait, and tells the running one."""
        with self._changed:
            self._ended = True
            dropped = list(self._jobs)
            self._jobs.clear()
            self._bytes -= sum(job.size_bytes for job in dropped)
            self._changed.notify_all()
        for job in dropped:
            job.abandoned()
        self._interrupt()

    def _start(self) -> bool:
        try:
            threading.Thread(target=self._work, name="pion-background").start()
        except RuntimeError:  # the interpreter is past starting threads
            return False
        self._running = True
        _mind_exit(self)
        return True

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            except Abandoned:
                pass
            except Exception:
                _log.exception("a background job failed")
            size_bytes = job.size_bytes
            del job  # its arrays must not outlive it
            with self._changed:
                self._bytes -= size_bytes

    def _next(self) -> _Job | None:
        with self._changed:
            while self._jobs:
                early_s = self._jobs[0].due_s - time.monotonic()
                if early_s <= 0 or self._hurried:
                    return self._jobs.popleft()
                self._changed.wait(early_s)
            self._running = self._hurried = False
            self._changed.notify_all()
            return None


_minded: "weakref.WeakSet[Background]" = weakref.WeakSet()
_minder: list[threading.Thread] = []


def _mind_exit(background: Background) -> None:
    _minded.add(background)
    if not _minder:
        _minder.append(threading.Thread(target=_end_in_time, name="pion-exit", daemon=True))
        _minder[0].start()


def _end_in_time() -> None:
    threading.main_thread().join()
    deadline = time.monotonic() + EXIT_GRACE_S
    for background in list(_minded):
        if not background.flush(max(0.0, deadline - time.monotonic())):
            background.abandon()
