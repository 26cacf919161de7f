"""Reading the JSON tables: an invalid entry is an error that names the file, so that the broker does not start with
only part of a table."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgspec

from duemq.broker.settings.config import MAX_QUEUES
from duemq.storage.config_file import ConfigFile
from duemq.storage.errors import StoreFormatError

T = TypeVar("T")

Fields = dict[str, Any]


def section(file: ConfigFile, table: Fields, name: str, kind: type[T]) -> dict[str, T]:
    """Remove a section from a table, and return its values by name, typed; empty if there is none. Raises
    StoreFormatError."""
    return typed(file, table.pop(name, None) or {}, dict[str, kind], name)  # type: ignore[valid-type]


def typed(file: ConfigFile, value: object, kind: type[T], name: str) -> T:
    """Return a value of a table, typed. Raises StoreFormatError naming it."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        refuse(file, f"{name}: {error}")


def check_queues(file: ConfigFile, name: str, **counts: int) -> None:
    """Raise StoreFormatError if an entry of a table has an impossible number of queues."""
    for what, count in counts.items():
        if not 0 <= count <= MAX_QUEUES:
            refuse(file, f"{name}: {what} is {count}, it must be 0 to {MAX_QUEUES}")


def refuse(file: ConfigFile, why: str) -> NoReturn:
    """Raise StoreFormatError for a table with an impossible entry."""
    raise StoreFormatError(file.path, f"{why}. Correct it, or replace it with its previous edition, {file.backup}")
