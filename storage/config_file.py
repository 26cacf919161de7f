"""The JSON tables beside the messages: config/topics.json, subscriptionGroup.json, consumerOffset.json,
delayOffset.json, each with the edition before it in <name>.bak.

RocketMQ writes them with fastjson, tabs and integer keys without quotes, and reads strict JSON as well, which is what
we write. Fields that we do not know are kept by those who own a table.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from protocol import fastjson
from protocol.errors import BodyError
from storage.errors import StoreFormatError
from storage.files import Files


class ConfigFile:
    """One table. `write` may wait for the disk and may run in any thread, once at a time."""

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self._backup = f"{path}.bak"
        self._files = files

    def read(self) -> dict[str, Any]:
        """The table, from the backup if the file is missing, empty or broken; empty where there is neither.

        Raises StoreFormatError where there is a file but no readable one: to start without a table that was there
        would lose it.
        """
        why = ""
        for path in (self.path, self._backup):
            data = self._files.read_whole(path)
            if not data or not data.strip():
                continue
            try:
                table = fastjson.loads(data)
            except BodyError as error:
                why = why or str(error)
                continue
            if isinstance(table, dict):
                return table
            why = why or "is no JSON object"
        if why:
            raise StoreFormatError(self.path, f"{why}; and {self._backup} does not help")
        return {}

    def write(self, table: dict[str, Any]) -> None:
        """Replace the table, durably; the old edition becomes the backup. Raises OSError."""
        self._files.make_directories(os.path.dirname(self.path))
        if self._files.exists(self.path):
            self._files.copy(self.path, self._backup)
        self._files.write_whole(self.path, msgspec.json.format(msgspec.json.encode(table), indent=1))
