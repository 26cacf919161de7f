"""Filters standard error: removes output of Spark that looks like a failure although the run is good.

- The line that Java prints at each start, `WARNING: Using incubator modules`: Spark asks for the module, Java warns,
  and no setting of either removes the line.
- Tracebacks of pyspark's own loop around its workers that end with BrokenPipeError: Spark closes the socket of a worker
  that it no longer needs.
- After Java was killed, the tracebacks of all threads that talked to it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_LINE: Final = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
_FIRST: Final = b"Traceback (most recent call last):\n"
_LAST: Final = b"BrokenPipeError: [Errno 32] Broken pipe\n"
_FRAMES: Final = rb'(?:  File "[^"\n]*/pyspark/daemon\.py", [^\n]*\n(?:    [^\n]*\n)*)'
_NOISE: Final = re.compile(
    rb"^(?:" + re.escape(_LINE) + rb"|" + re.escape(_FIRST) + _FRAMES + rb"+" + re.escape(_LAST) + rb")", re.MULTILINE
)
_BEGUN: Final = re.compile(re.escape(_FIRST) + _FRAMES + rb"*([^\n]*)\Z")
# The possible beginnings of a line of a traceback before its last one.
_FRAME: Final = b'  File "'
_SOURCE: Final = b"    "


def let_java_end() -> None:
    """Keep this process's pyspark and py4j from printing tracebacks after Java has ended: every thread that talked to
    it then fails and would print one, and one line is enough."""
    from pyspark import accumulators

    for name in ("AccumulatorTCPServer", "AccumulatorUnixServer"):
        server = getattr(accumulators, name, None)
        if server is not None:
            server.handle_error = _say_nothing
    logging.getLogger().addFilter(_is_news)


def _say_nothing(server: object, request: object, client: object) -> None:
    """Replaces a method that prints a traceback."""


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a log record is anything else than py4j's message that it could not reach Java."""
    return not str(record.msg).startswith("Exception while sending command")


@contextmanager
def without_noise() -> Iterator[None]:
    """Filter the standard error of processes started within the block, for as long as they live; that of this process
    only within the block."""
    sys.stderr.flush()
    kept = os.dup(2)
    read_end, write_end = os.pipe()
    try:
        os.dup2(write_end, 2)
    finally:
        os.close(write_end)
    # A daemon thread: processes that have the pipe may live until this one ends, and are not waited for.
    threading.Thread(target=_copy, args=(read_end, kept), name="stderr of Spark", daemon=True).start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)


class NoiseFilter:
    """Removes the noise from bytes that come in parts of any size."""

    def __init__(self) -> None:
        self._held = b""

    def passed(self, data: bytes) -> bytes:
        """Return the bytes that can be written by now: only a possible beginning of noise is held back."""
        text = _NOISE.sub(b"", self._held + data)
        at = _begun(text)
        self._held = text[at:]
        return text[:at]

    def rest(self) -> bytes:
        """Return the bytes still held back at the end."""
        return self._held


def _copy(source: int, target: int) -> None:
    """Copy until all writers are gone."""
    noise = NoiseFilter()
    with os.fdopen(source, "rb", buffering=0) as file:
        while data := file.read(1 << 16):
            _write(target, noise.passed(data))
    _write(target, noise.rest())
    os.close(target)


def _begun(text: bytes) -> int:
    """Return the position at which possible, still incomplete noise at the end of a text begins; the text's length if
    there is none."""
    at = text.rfind(_FIRST)
    if at >= 0 and (at == 0 or text[at - 1] == 10):
        found = _BEGUN.match(text, at)
        if found is not None and any(_may_be(found[1], wanted) for wanted in (_LAST, _FRAME, _SOURCE)):
            return at
    at = text.rfind(b"\n") + 1
    rest = text[at:]
    return at if rest and (_LINE.startswith(rest) or _FIRST.startswith(rest)) else len(text)


def _may_be(line: bytes, wanted: bytes) -> bool:
    """Return whether an unfinished line may become one that begins with `wanted`."""
    return wanted.startswith(line) or line.startswith(wanted)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
