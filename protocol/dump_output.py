"""The output of the commands that print bytes as lines of text, `duemq.protocol.dump` and `duemq.broker.dump`. Neither
the bytes that they read nor the names of files may end them, or reach a terminal as control characters.

This module imports nothing that could be missing, so that a command can say which package is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Final, NoReturn

_SHORT: Final = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def shown_path(path: str) -> str:
    r"""Return the path of a file for a line of text: as it is if it is printable, else quoted for bash, as in
    $'a\nb\xff'."""
    if path.isprintable():
        return path
    return "$'" + "".join(each if each.isprintable() and each not in _SHORT else _quoted(each) for each in path) + "'"


def _quoted(character: str) -> str:
    found = "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
    return _SHORT.get(character, found)


def write_line(line: str) -> None:
    """Print a line, with unprintable characters escaped. Raises SystemExit if standard output cannot be written, so
    that this is not taken for an error of the file that is read."""
    if not line.isprintable():
        line = "".join(each if each.isprintable() else _quoted(each) for each in line)
    try:
        sys.stdout.write(f"{line}\n")
    except OSError as error:
        _end_without_output(error)


def report(path: str, error: Exception) -> None:
    """Print an error about a file to standard error, if that is open."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if sys.stderr is not None:
        sys.stderr.write(f"{shown_path(path)}: {why if why.isprintable() else shown_path(why)}\n")


def run(command: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of a command: 1 if its standard output is closed, or cannot be written."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may close the pipe early
    if sys.stdout is None:
        sys.exit("standard output is closed: nothing can be shown")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # the encoding may lack letters of names and texts
    code = command()
    try:
        sys.stdout.flush()
    except OSError as error:
        _end_without_output(error)
    sys.exit(code)


def _end_without_output(error: OSError) -> NoReturn:
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())  # Python writes the rest at its end, and would complain again
    sys.exit(f"standard output cannot be written: {error.strerror or error}")


def needs_package(command: str, error: ModuleNotFoundError, extra: str) -> NoReturn:
    """End the process since a package is not installed. `extra`: what to install, for pip. Raises the error again if
    what is missing is a module of duemq, which pip does not bring."""
    if (error.name or "").partition(".")[0] == "duemq":
        raise error
    # The same text as from the commands of `duemq`, whose code cannot catch this error.
    sys.exit(f"python -m {command} needs the package {error.name}: pip install {extra}")
