"""Reading the JSON tables: what is not as it must be is an error that names the file, so that the broker does not start
with less than was there."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgspec

from duemq.broker.settings.config import MAX_QUEUES
from duemq.storage.config_file import ConfigFile
from duemq.storage.errors import StoreFormatError

T = TypeVar("T")

Fields = dict[str, Any]


def section(file: ConfigFile, table: Fields, name: str, kind: type[T]) -> dict[str, T]:
    """A part of a table taken out of it, names to values of a kind; empty where there is none. Raises
    StoreFormatError."""
    return typed(file, table.pop(name, None) or {}, dict[str, kind], name)  # type: ignore[valid-type]


def typed(file: ConfigFile, value: object, kind: type[T], name: str) -> T:
    """A value of a table, typed. Raises StoreFormatError naming it."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        refuse(file, f"{name}: {error}")


def check_queues(file: ConfigFile, name: str, **counts: int) -> None:
    """Raise StoreFormatError where an entry of a table has a number of queues that there cannot be."""
    for what, count in counts.items():
        if not 0 <= count <= MAX_QUEUES:
            refuse(file, f"{name}: {what} is {count}, allowed are 0 to {MAX_QUEUES}")


def refuse(file: ConfigFile, why: str) -> NoReturn:
    """Raise StoreFormatError for a table with an entry that cannot be."""
    raise StoreFormatError(file.path, f"{why}. Correct it, or put the edition before it, {file.backup}, in its place")
