"""Standard error without what looks like a failure in good runs of Spark's.

- The line that Java prints at each start, `WARNING: Using incubator modules`: Spark asks for the module, Java warns,
  and no setting of either leaves the line out.
- Tracebacks of pyspark's own loop around its workers that end with BrokenPipeError: Spark closes the socket of a worker
  that it has had enough of.
- Where Java was killed: those of all threads that talked to it.
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
# What a line of a traceback may begin with before its last one.
_FRAME: Final = b'  File "'
_SOURCE: Final = b"    "


def let_java_end() -> None:
    """Have this process's own pyspark and py4j print no tracebacks where Java has ended: all who talked to it fail at
    once, each in a thread of its own, and one line tells it."""
    from pyspark import accumulators

    for name in ("AccumulatorTCPServer", "AccumulatorUnixServer"):
        server = getattr(accumulators, name, None)
        if server is not None:
            server.handle_error = _say_nothing
    logging.getLogger().addFilter(_is_news)


def _say_nothing(server: object, request: object, client: object) -> None:
    """Instead of a traceback."""


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of a log is none of py4j's that it could not reach Java."""
    return not str(record.msg).startswith("Exception while sending command")


@contextmanager
def without_noise() -> Iterator[None]:
    """Processes that are started meanwhile write to this process's standard error through a filter, as long as they
    live; this process itself only meanwhile."""
    sys.stderr.flush()
    kept = os.dup(2)
    read_end, write_end = os.pipe()
    try:
        os.dup2(write_end, 2)
    finally:
        os.close(write_end)
    # Daemonic: whoever has the pipe lives until this process ends, and need not be waited for.
    threading.Thread(target=_copy, args=(read_end, kept), name="stderr of Spark", daemon=True).start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)


class Filter:
    """Leaves the noise out of bytes that come in parts, of any size."""

    def __init__(self) -> None:
        self._held = b""

    def passed(self, data: bytes) -> bytes:
        """What may be written by now: nothing is held back but what may be the beginning of what is to go."""
        text = _NOISE.sub(b"", self._held + data)
        at = _begun(text)
        self._held = text[at:]
        return text[:at]

    def rest(self) -> bytes:
        """What was held back, once no more comes."""
        return self._held


def _copy(source: int, target: int) -> None:
    """Copy until all writers are gone."""
    noise = Filter()
    with os.fdopen(source, "rb", buffering=0) as file:
        while data := file.read(1 << 16):
            _write(target, noise.passed(data))
    _write(target, noise.rest())
    os.close(target)


def _begun(text: bytes) -> int:
    """Where at the end of a text something begins that may have to go; its length where nothing does."""
    at = text.rfind(_FIRST)
    if at >= 0 and (at == 0 or text[at - 1] == 10):
        found = _BEGUN.match(text, at)
        if found is not None and any(_may_be(found[1], wanted) for wanted in (_LAST, _FRAME, _SOURCE)):
            return at
    at = text.rfind(b"\n") + 1
    rest = text[at:]
    return at if rest and (_LINE.startswith(rest) or _FIRST.startswith(rest)) else len(text)


def _may_be(line: bytes, wanted: bytes) -> bool:
    """Whether a line that has not ended yet may become one that begins so."""
    return wanted.startswith(line) or line.startswith(wanted)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
