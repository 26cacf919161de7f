"""Reduces errors of Spark's processes, which Spark wraps in pages of its own text, to one line."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from duemq.spark_jobs.errors import CannotRead, JobError, NoStore, NotKept
from duemq.spark_jobs.store.local_files import reason

P = ParamSpec("P")
T = TypeVar("T")

TRACEBACK: Final = "DUEMQ_TRACEBACK"
"""An environment variable: if it is set, Spark's whole text is shown."""
OUT_OF_MEMORY: Final = (
    "a task ran out of memory, or its process was killed: let fewer tasks run at a time (--master 'local[1]'), or give "
    "the machine more memory"
)
_ENDED: Final = (
    "Spark's Java has ended: something killed it, as the system does when memory runs out, or it crashed; let fewer "
    "tasks run at a time (--master 'local[1]'), or give the machine more memory"
)
_JAVA_MEMORY: Final = "Spark's Java ran out of memory: give it more, such as --memory 3g"
_OURS: Final = tuple(f"{error.__name__}: " for error in (JobError, NoStore, CannotRead, NotKept))
_OF_SYSTEM: Final = re.compile(r"^\w+(?:Error|Exception): \[Errno \d+\] (.+?): '(.+)'$", re.MULTILINE)
_TRACEBACK: Final = "Traceback (most recent call last):\n"
_CALLING: Final = "An error occurred while calling "
"""The beginning of py4j's text, which has Java's exception in the next line: a colon, its class, its message."""
_CLASS: Final = re.compile(r"^: (?:(?:\w+\.)+[\w$]+: )?")


def advice(error: BaseException) -> str | None:
    """Return the text of an exception raised through Spark that a user can act on; None for every other exception."""
    if _is_of_dead_java(error):
        return _ENDED
    if not _is_of_spark(error):
        return None
    text = str(error)
    for line in reversed(text.splitlines()):
        for name in _OURS:
            if name in line:
                return line.split(name, 1)[1].strip()
    if "Python worker exited unexpectedly" in text or re.search(r"^MemoryError\b", text, re.MULTILINE):
        return OUT_OF_MEMORY
    if "java.lang.OutOfMemoryError" in text:
        return _JAVA_MEMORY
    _, separator, task = text.rpartition(_TRACEBACK)
    found = _OF_SYSTEM.search(task) if separator else None
    return f"{found[2]}: {found[1]}" if found is not None else None


def summary(error: BaseException) -> str | None:
    """Return the text that `advice` returns, or else Spark's own message in one line. None for exceptions that are not
    Spark's, and if the whole text is to be shown (TRACEBACK)."""
    found = advice(error)
    if found is not None:
        return found
    if not _is_of_spark(error) or os.environ.get(TRACEBACK):
        return None
    # The message of a task's exception is behind its traceback.
    _, _, task = str(error).rpartition(_TRACEBACK)
    lines = [line for line in task.splitlines() if line.strip() and not line.startswith(" ")]
    return f"Spark: {_first_of(lines) or type(error).__name__} ({TRACEBACK}=1 shows all of it)"


def first_line(error: BaseException) -> str:
    """Return an exception's message in one line; for one from Java its own message, without the failed call."""
    return _first_of(str(error).strip().splitlines()) or type(error).__name__


def _first_of(lines: list[str]) -> str:
    if len(lines) > 1 and lines[0].startswith(_CALLING) and lines[1].startswith(": "):
        return _CLASS.sub("", lines[1]).strip()
    return lines[0].strip() if lines else ""


def _is_of_spark(error: BaseException) -> bool:
    return type(error).__module__.startswith(("pyspark", "py4j"))


def _is_of_dead_java(error: BaseException) -> bool:
    """Return whether an error means that Java has ended. While py4j retries, it raises errors of the socket, not its
    own."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ == "Py4JNetworkError":
            return True
        seen = seen.__cause__ or seen.__context__
    if not isinstance(error, ConnectionError):
        return False
    return any("/py4j/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


@contextmanager
def in_one_line() -> Iterator[None]:
    """Raise Spark's exceptions that have an `advice` text as JobError with that text."""
    try:
        yield
    except Exception as error:
        found = advice(error)
        if found is None or os.environ.get(TRACEBACK):
            raise
        raise JobError(found) from None


def with_short_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function that Spark calls: errors that a user can act on lose the frames below this one, since Spark shows
    the whole traceback to the user."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (JobError, OSError, MemoryError) as error:
            short = _short(error)
        raise short

    return wrapper


def with_short_errors_each(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Wrap a generator function that Spark calls: errors that a user can act on lose the frames below this one, since
    Spark shows the whole traceback to the user."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from function(*args, **kwargs)
            return
        except (JobError, OSError, MemoryError) as error:
            short = _short(error)
        raise short

    return wrapper


def _short(error: JobError | OSError | MemoryError) -> JobError:
    if isinstance(error, NoStore):
        return NoStore(error.path, error.why)
    if isinstance(error, JobError):
        return JobError(str(error))
    if isinstance(error, MemoryError):
        return JobError(OUT_OF_MEMORY)
    return JobError(f"{error.filename}: {reason(error)}" if error.filename else reason(error))
