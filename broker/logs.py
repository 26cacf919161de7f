"""Structured log lines on standard error, as JSON or in a form for people to read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from duemq.broker.log_output import LogOutput

STANDARD_ERROR: Final = 2


@contextmanager
def logging_to(descriptor: int, log_format: str) -> Iterator[None]:
    """Write all log lines to a descriptor, by a thread; `log_format` is "json" or "console". On exit, waits at most
    CLOSE_S seconds for the last lines."""
    processors = _processors(log_format, colors=os.isatty(descriptor))

    def describe_lost(lost: int, why: str) -> str:
        event: Any = {"event": "log_lines_lost", "lines": lost, "reason": why}
        for processor in processors:
            event = processor(None, "warning", event)
        return f"{event}\n"

    output = LogOutput(descriptor, describe_lost)

    class Logger(structlog.make_filtering_bound_logger(logging.INFO)):  # type: ignore[misc]
        """A logger that never fails: its caller may be half-way through a change."""

        def _proxy_to_logger(self, method_name: str, event: str | None = None, **values: Any) -> None:
            try:
                super()._proxy_to_logger(method_name, event, **values)
            except Exception as error:
                output.lose(f"{event} could not be logged: {type(error).__name__}")

    structlog.configure(
        processors=processors,
        wrapper_class=Logger,
        logger_factory=structlog.WriteLoggerFactory(output),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    of_libraries = logging.StreamHandler(output)
    logging.getLogger().addHandler(of_libraries)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(of_libraries)
        output.close()


def silence() -> None:
    """Log only critical errors: for commands that print their results."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _processors(log_format: str, *, colors: bool) -> list[Any]:
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        return [*processors, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Tracebacks are not formatted by rich: it imports modules when it prints, which fails if no descriptors are left.
    plain = structlog.dev.plain_traceback
    return [*processors, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
