"""The progress of consumer groups: config/consumerOffset.json. A consumer offset is the next queue offset that a group
will read from a queue."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from duemq.broker.errors import Refused
from duemq.broker.settings.config import MAX_QUEUES
from duemq.broker.tables.persister import Persister, SavedTable, Table, Written
from duemq.broker.tables.table import refuse, section
from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames import fastjson
from duemq.storage.config_file import ConfigFile

SEPARATOR: Final = "@"
MAX_OFFSET: Final = (2**63 - 1) // 20
"""The largest queue offset: consume queue files are named by a 63-bit position in the queue, which has 20 bytes per
message."""
_NO_OFFSET: Final = -1
"""An offset that stands for "none" in RocketMQ's table."""


class ConsumerOffsets:
    """All consumer offsets, by "topic@group" and queue id."""

    def __init__(self, file: ConfigFile, persister: Persister) -> None:
        self._file = file
        self._saved = SavedTable(persister, file, self._snapshot)
        self._extra: dict[str, Any] = {}
        self._table: dict[str, dict[int, int]] = {}
        self._json: dict[str, msgspec.Raw] = {}
        """Offsets in the JSON form of consumerOffset.json, by the keys of the table; outdated for the keys in
        `_changed`."""
        self._changed: set[str] = set()
        """Keys whose offsets are not in `_json` yet."""
        self._is_saved = True
        """Whether everything is in the file, or in the most recently begun write of it."""
        self._pulled: dict[str, dict[int, int]] = {}
        """Where the last pulls of groups ended, by the keys of the table; only in memory, as in RocketMQ."""

    def load(self) -> None:
        """Read the table. Raises StoreFormatError."""
        data = self._file.read()
        for key, offsets in section(self._file, data, "offsetTable", dict[int, int]).items():
            for queue_id, offset in offsets.items():
                if not (0 <= queue_id < MAX_QUEUES and _NO_OFFSET <= offset <= MAX_OFFSET):
                    refuse(self._file, f"{key}: queue {queue_id} has the offset {offset}, which is not possible")
            self._table[key] = {queue_id: offset for queue_id, offset in offsets.items() if offset != _NO_OFFSET}
        self._extra = data
        self._changed.update(self._table)

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return a consumer offset, or None if the group has none."""
        offsets = self._table.get(f"{topic}{SEPARATOR}{group}")
        return offsets.get(queue_id) if offsets is not None else None

    def all_of(self, group: str, topic: str) -> dict[int, int]:
        """Return a group's offsets for a topic, by queue id."""
        return dict(self._table.get(f"{topic}{SEPARATOR}{group}", {}))

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set a consumer offset. Raises Refused if it is out of range."""
        if not 0 <= offset <= MAX_OFFSET:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"commitOffset={offset}: it must be 0 to {MAX_OFFSET}")
        key = f"{topic}{SEPARATOR}{group}"
        self._table.setdefault(key, {})[queue_id] = offset
        self._changed.add(key)
        self._is_saved = False

    def pulled(self, group: str, topic: str, queue_id: int, next_offset: int) -> None:
        """Note where a pull of a known group ended."""
        key = f"{topic}{SEPARATOR}{group}"
        offsets = self._pulled.get(key)
        if offsets is None:
            offsets = self._pulled[key] = {}
        offsets[queue_id] = next_offset

    def pull_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return where the last pull of a group ended since the start; None without one."""
        return self._pulled.get(f"{topic}{SEPARATOR}{group}", {}).get(queue_id)

    def topics_of(self, group: str) -> list[str]:
        """Return the topics for which a group has offsets."""
        return [topic for key in self._table for topic, _, name in (key.rpartition(SEPARATOR),) if name == group]

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups that have offsets for a topic."""
        return [name for key in self._table for of, _, name in (key.rpartition(SEPARATOR),) if of == topic]

    def remove_topic(self, topic: str) -> None:
        """Remove a topic's offsets."""
        for group in self.groups_of(topic):
            self._remove(f"{topic}{SEPARATOR}{group}")
        for key in [key for key in self._pulled if key.rpartition(SEPARATOR)[0] == topic]:
            del self._pulled[key]

    def remove_group(self, group: str) -> None:
        """Remove a group's offsets."""
        for topic in self.topics_of(group):
            self._remove(f"{topic}{SEPARATOR}{group}")
        for key in [key for key in self._pulled if key.rpartition(SEPARATOR)[2] == group]:
            del self._pulled[key]

    def to_json(self) -> dict[str, Any]:
        """Return the table in the form of consumerOffset.json and GET_ALL_CONSUMER_OFFSET; offsets are already JSON."""
        for key in self._changed:
            self._json[key] = msgspec.Raw(fastjson.dumps(self._table[key]))
        self._changed.clear()
        return {**self._extra, "offsetTable": dict(self._json)}

    def save_if_changed(self) -> None:
        """Write the table in the background if it changed since the last write, or if that write failed."""
        if not self._is_saved:
            self._saved.save()

    async def save(self) -> None:
        """Make the present table durable; it is written only if it changed since the last write. Raises OSError."""
        if self._is_saved:
            await self._saved.written()
        else:
            await self._saved.saved()

    def save_now(self) -> None:
        """Write the table and wait for the write."""
        self._saved.save_now()

    def _remove(self, key: str) -> None:
        del self._table[key]
        self._json.pop(key, None)
        self._changed.discard(key)
        self._is_saved = False

    def _snapshot(self) -> tuple[Table, Written]:
        def written(failure: OSError | None) -> None:
            self._is_saved = self._is_saved and failure is None

        table = self.to_json()
        self._is_saved = True
        return table, written
