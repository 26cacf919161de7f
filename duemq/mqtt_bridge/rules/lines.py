"""The lines of a TOML file at which keys are set, since Python's tomllib does not report positions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_HEADER: Final = re.compile(r"\s*(\[\[|\[)\s*([^\[\]]+?)\s*\]")
_KEY: Final = re.compile(r"""\s*("[^"]*"|'[^']*'|[A-Za-z0-9_-]+)\s*[=.]""")
_QUOTES: Final = ('"""', "'''")

Path = tuple[str | int, ...]
"""The place of a value: names of keys and tables, numbers of tables in arrays, such as ("to_mqtt", 1, "qos")."""


def line_of(text: str, path: Path) -> int:
    """Return the number, from 1 on, of the line of the value at `path`: that of its key, or else of the header of its
    table, or else 1. `text` is a TOML document. Values in inline tables and arrays have the line of the key."""
    places = _places(text)
    return next((places[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in places), 1)


@lru_cache(maxsize=1)
def _places(text: str) -> dict[Path, int]:
    """Return the lines of all keys and headers of tables. Cached, since each rule asks for some."""
    found: dict[Path, int] = {}
    table: Path = ()
    counts: dict[str, int] = {}
    quote = ""
    for number, line in enumerate(text.split("\n"), 1):
        if quote:  # within a multi-line string
            quote = "" if quote in line else quote
            continue
        quote = next((mark for mark in _QUOTES if line.count(mark) % 2), "")
        header = _HEADER.match(line)
        if header is not None:
            name = header[2]
            table = tuple(part.strip("\"' ") for part in name.split("."))
            if header[1] == "[[":
                counts[name] = counts.get(name, -1) + 1
                table = (*table, counts[name])
            found.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key is not None:
            found.setdefault((*table, key[1].strip("\"'")), number)
    return found


def path_of(where: str) -> Path:
    """Return the path for a text such as `$.to_mqtt[1].qos`, as msgspec's errors name places."""
    return tuple(int(number) if number else name for name, number in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", where))
