"""The real topics of waiting messages, read from their records: a unit of the timer log has only Java's hash of the
name, and two names may have the same hash (`ordersAa`, `ordersBB`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records import properties
from duemq.storage.errors import NotInMemory
from duemq.storage.log.copies import PackedRecords
from duemq.storage.queues.pull import ColdRead
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from duemq.scheduler.timers.seconds.second import Waits

_MARK: Final = f"{properties.PROPERTY_END}{properties.REAL_TOPIC}{properties.NAME_END}".encode()
_FROM_LEVEL: Final = f"{properties.PROPERTY_END}{properties.TIMER_FROM_LEVEL}{properties.NAME_END}".encode()
_END: Final = properties.PROPERTY_END.encode()
_AT_ONCE_BYTES: Final = 8 * 1024 * 1024


class RealTopics:
    """Reads the real topics of waiting messages from their records."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def of(self, waits: Waits) -> list[str]:
        """Return the real topic of each message; an empty text if its record is gone. Raises NotInMemory, OSError."""
        return self._read(waits, _real_topic)

    def _read(self, waits: Waits, topic_in: Callable[[bytes], str]) -> list[str]:
        if not len(waits):
            return []
        waits = waits[["physical", "size"]]
        data = []
        for each in waits.tolist():
            try:
                data.append(self._store.log.read(*each) or b"")
            except NotInMemory as missing:
                raise self._more_than(missing, waits[len(data) :]) from None
        sizes = np.array([len(each) for each in data], np.int64)
        if (sizes == waits["size"]).all():
            records = PackedRecords(b"".join(data), waits["physical"], sizes)
            if records.is_usual.all():
                return [topic_in(text) for text in records.properties()]
        messages = (self._store.message_at(*each) for each in waits.tolist())
        return [topic_in(message.properties_text.encode()) if message is not None else "" for message in messages]

    def with_policies(self, waits: Waits) -> list[str]:
        """Return the topics as `of` does, but an empty text also for a message to which its topic's policy does not
        apply, since it waits for the time of a delay level (TIMER_FROM_LEVEL)."""
        return self._read(waits, _topic_with_policies)

    def _more_than(self, missing: NotInMemory, waits: Waits) -> NotInMemory:
        """Return the same error with a read that covers the next records, too, as they may also be missing from memory.
        If memory is short and they were read one by one, the first would be dropped before the last is read."""
        count = max(1, int(np.searchsorted(np.cumsum(waits["size"], dtype=np.int64), _AT_ONCE_BYTES, "right")))
        ranges: list[tuple[int, int]] = sorted(waits[:count].tolist())
        return NotInMemory("the commitlog", missing.position, ColdRead(self._store.log, ranges).run)


def _real_topic(text: bytes) -> str:
    _, _, rest = (_END + text).partition(_MARK)
    return rest.partition(_END)[0].decode(errors="replace")


def _topic_with_policies(text: bytes) -> str:
    return "" if _FROM_LEVEL in _END + text else _real_topic(text)
