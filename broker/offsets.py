"""How far consumer groups are: config/consumerOffset.json. A consumer offset is the next queue offset a group will
read of a queue."""

from __future__ import annotations

from typing import Any, Final

from broker.persister import Persister, SavedTable
from broker.tables import section
from storage.config_file import ConfigFile

SEPARATOR: Final = "@"


class ConsumerOffsets:
    """All consumer offsets, by "topic@group" and queue id."""

    def __init__(self, file: ConfigFile, persister: Persister) -> None:
        self._file = file
        self._saved = SavedTable(persister, file, self.to_json)
        self._extra: dict[str, Any] = {}
        self._table: dict[str, dict[int, int]] = {}
        self._changed = False

    def load(self) -> None:
        """Read the table. Raises StoreFormatError."""
        data = self._file.read()
        self._table = section(self._file, data, "offsetTable", dict[int, int])
        self._extra = data

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """A consumer offset, or None where the group has none."""
        offsets = self._table.get(f"{topic}{SEPARATOR}{group}")
        return offsets.get(queue_id) if offsets is not None else None

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set a consumer offset."""
        self._table.setdefault(f"{topic}{SEPARATOR}{group}", {})[queue_id] = offset
        self._changed = True

    def topics_of(self, group: str) -> list[str]:
        """Topics of which a group has offsets."""
        return [topic for key in self._table for topic, _, name in (key.rpartition(SEPARATOR),) if name == group]

    def groups_of(self, topic: str) -> list[str]:
        """Groups that have offsets of a topic."""
        return [name for key in self._table for of, _, name in (key.rpartition(SEPARATOR),) if of == topic]

    def remove_topic(self, topic: str) -> None:
        """Forget a topic's offsets."""
        for group in self.groups_of(topic):
            self._table.pop(f"{topic}{SEPARATOR}{group}")
            self._changed = True

    def remove_group(self, group: str) -> None:
        """Forget a group's offsets."""
        for topic in self.topics_of(group):
            self._table.pop(f"{topic}{SEPARATOR}{group}")
            self._changed = True

    def to_json(self) -> dict[str, Any]:
        """The table as consumerOffset.json and GET_ALL_CONSUMER_OFFSET have it."""
        return {
            **self._extra,
            "offsetTable": {
                key: {str(queue_id): offset for queue_id, offset in offsets.items()}
                for key, offsets in self._table.items()
            },
        }

    def save_if_changed(self) -> None:
        """Have the table written in the background, if it changed since the last time."""
        if self._changed:
            self._changed = False
            self._saved.save()

    def save_now(self) -> None:
        """Write the table and wait for it."""
        self._saved.save_now()
