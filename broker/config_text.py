"""The configuration file: properties text, `name=value` a line; # and ! start comments. Of a name that comes more than
once the last line counts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from broker.errors import ConfigError

_COMMENTS: Final = "#!"
_MAX_REPEATED: Final = 100


def parse(text: str, source: str) -> dict[str, str]:
    """The properties in a text; `source` is what an error calls it. Raises ConfigError."""
    values = {}
    for number, line in _entries(text.splitlines()):
        name, separator, value = line.partition("=")
        if not separator:
            raise ConfigError(f"{source}, line {number + 1}: {line.strip()[:_MAX_REPEATED]!r} is not NAME=VALUE")
        values[name.strip()] = value.strip()
    return values


def read(path: str) -> dict[str, str]:
    """The properties in a file. Raises ConfigError."""
    return parse(_text_of(path), path)


def save(path: str, changes: Mapping[str, str]) -> None:
    """Change properties in a file, durably: readers and crashes see the old or the new text. May wait for the disk.
    Raises ConfigError where the file cannot be read, OSError where it cannot be written."""
    path = os.path.realpath(path)
    text = changed(_text_of(path), changes)
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            os.fchmod(file.fileno(), os.stat(path).st_mode & 0o7777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def changed(text: str, changes: Mapping[str, str]) -> str:
    """A text with other values: in the lines that have the properties, else in new lines at its end. All else stays
    as it is."""
    lines = text.splitlines(keepends=True)
    at = {line.partition("=")[0].strip(): number for number, line in _entries(lines)}
    for name, value in changes.items():
        if name in at:
            line = lines[at[name]]
            head, _, old = line.partition("=")
            gap = old[: len(old) - len(old.lstrip(" \t"))]
            end = line[len(line.rstrip("\r\n")) :]
            lines[at[name]] = f"{head}={gap}{value}{end}"
        else:
            if lines and not lines[-1].endswith(("\n", "\r")):
                lines[-1] += "\n"
            lines.append(f"{name}={value}\n")
    return "".join(lines)


def _entries(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The lines that are neither blank nor comments, each with its place, from 0 on."""
    for number, line in enumerate(lines):
        text = line.strip()
        if text and text[0] not in _COMMENTS:
            yield number, line


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from None
