"""Standard input, output and error of the commands. Any of them may be closed (`>&-`), and a disk or a pipe to which
they lead may be full or gone.

Closed descriptors are opened: otherwise the first socket or file would get one of them, and what is printed would go
there. Output that cannot be written ends a command with one line; a line on standard error that cannot be written is
lost, and the exit code stays what it is.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_OUTPUT: Final = 1
_ERROR: Final = 2
_WHEN_CLOSED: Final = {0: os.O_RDONLY, _OUTPUT: os.O_RDONLY, _ERROR: os.O_WRONLY}
"""How `/dev/null` is opened in the place of each closed descriptor: writes to standard output still fail."""


class _OutputError(OSError):
    """Standard output cannot be written. The text of the error is for the user."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.errno, f"standard output cannot be written: {error.strerror}")

    def __str__(self) -> str:
        return str(self.strerror)


class _Output(io.FileIO):
    """Standard output. The first write that fails raises _OutputError, or BrokenPipeError if the reader is gone; later
    ones are left out, such as those of the buffers at the end of the process."""

    _has_failed = False

    def write(self, data: ReadableBuffer) -> int:
        """Write bytes; return how many were written."""
        if self._has_failed:
            return len(memoryview(data))
        try:
            return super().write(data)
        except BrokenPipeError:
            self._has_failed = True
            raise
        except OSError as error:
            self._has_failed = True
            raise _OutputError(error) from None


class _Errors(io.FileIO):
    """Standard error. A write that fails is left out."""

    def write(self, data: ReadableBuffer) -> int:
        """Write bytes; return how many were written or left out."""
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data))


@contextmanager
def standard_streams() -> Iterator[None]:
    """Prepare the standard streams for a command. If its output cannot be written, exit with 1, and with one line
    unless the reader of the output is gone."""
    _prepare()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(1)
    except _OutputError as error:
        click.echo(f"duemq: {error}", err=True)
        sys.exit(1)


def _prepare() -> None:
    """Open the standard descriptors that are closed, and replace `sys.stdout` and `sys.stderr` as described above. They
    stay if they are not the process's own, as in tests of commands. A character that the encoding of the output lacks
    is replaced: messages and names may have any, and none may end a command."""
    for descriptor, flags in _WHEN_CLOSED.items():
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # the system takes the lowest descriptor that is free
    if _leads_to(sys.stdout, _OUTPUT):
        sys.stdout = _text(_Output(_OUTPUT, "w", closefd=False), sys.stdout, "replace")
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if _leads_to(sys.stderr, _ERROR):
        sys.stderr = _text(_Errors(_ERROR, "w", closefd=False), sys.stderr, "backslashreplace")


def _leads_to(stream: object, descriptor: int) -> bool:
    """Whether a stream writes to a descriptor, or is missing since the descriptor was closed when the process began."""
    with suppress(OSError, AttributeError):
        return stream is None or stream.fileno() == descriptor  # type: ignore[attr-defined]
    return False


def _text(raw: io.FileIO, before: object, errors: str) -> io.TextIOWrapper:
    """Return a text stream with the encoding of the one before, or with Python's default if there was none. `errors`:
    what becomes of a character that the encoding lacks, as for `open`."""
    encoding, is_by_line = None, raw.isatty() or raw.fileno() == _ERROR
    if isinstance(before, io.TextIOWrapper):
        before.flush()
        encoding = before.encoding
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_by_line)
