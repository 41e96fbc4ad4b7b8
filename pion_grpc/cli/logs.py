"""Logs: readable lines on a terminal, one JSON object per line anywhere else."""

import contextlib
import logging
from typing import TextIO, cast

import structlog


class _Unbreakable:
    """A stream whose reader may go away: a server must not stop because nobody reads its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # the latter of one that is closed
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def set_up_logs(stream: TextIO) -> None:
    """Sends the log of this process to `stream`."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer()
        if stream.isatty()
        else structlog.processors.JSONRenderer(sort_keys=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Unbreakable(stream))),
        cache_logger_on_first_use=True,
    )
