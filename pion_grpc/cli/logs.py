"""Logs: one JSON object per line where a program reads them, readable lines on a terminal."""

import logging
from typing import TextIO

import structlog


def set_up_logs(stream: TextIO) -> None:
    """Sends the process's log to `stream`."""
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
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
