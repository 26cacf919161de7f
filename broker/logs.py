"""Structured log lines on standard error, as JSON for machines or for a person to read."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure(log_format: str) -> None:
    """Set up structlog; `log_format` is "json" or "console"."""
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Not by rich: it imports modules when it prints, which fails where there are no descriptors left.
        plain = structlog.dev.plain_traceback
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def silence() -> None:
    """Log nothing but what ends a process: for commands that print what they find."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
