"""Where a scheduled message goes: its properties REAL_TOPIC and REAL_QID say so, and TAGS tells what its consumers
select by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from protocol import properties
from storage.consume_queue import ConsumeQueue
from storage.copies import Records
from storage.scan import is_topic_name
from storage.store import MessageStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""A half message must never reach its topic by its delay: it is not committed."""

_REAL_TOPIC: Final = f"{properties.REAL_TOPIC}{properties.NAME_END}".encode()
_REAL_QID: Final = f"{properties.PROPERTY_END}{properties.REAL_QID}{properties.NAME_END}".encode()
_TAGS: Final = f"{properties.TAGS}{properties.NAME_END}".encode()
_END: Final = ord(properties.PROPERTY_END)
_END_BYTE: Final = properties.PROPERTY_END.encode()
_MAX_KNOWN: Final = 10_000
_MAX_KEY: Final = 400


class Targets:
    """Finds queues for property texts. Our own texts end with REAL_TOPIC and REAL_QID, so that what follows from
    REAL_TOPIC on is the same for all messages of a queue, and known."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._queues: dict[bytes, ConsumeQueue | None] = {}
        self._codes: dict[bytes, int] = {}
        self._removals = store.removals

    def find(self, records: Records) -> tuple[list[ConsumeQueue | None], list[int]]:
        """For each record the queue that it belongs into, made if need be, None where it names none that there may be;
        and what that queue keeps of its tags."""
        if self._removals != self._store.removals or len(self._queues) > _MAX_KNOWN:
            self._removals = self._store.removals
            self._queues.clear()
        if len(self._codes) > _MAX_KNOWN:
            self._codes.clear()
        rows = records.text_rows()
        if rows is not None and self._say_the_same(rows):
            texts = [rows[0].tobytes()]
            return self._queues_of(texts) * len(rows), self._codes_of(texts) * len(rows)
        texts = records.properties()
        return self._queues_of(texts), self._codes_of(texts)

    @staticmethod
    def _say_the_same(rows: NDArray[np.uint8]) -> bool:
        """Whether the texts, all of one length, are the same from REAL_TOPIC on and in their tags."""
        first = rows[0].tobytes()
        at = first.rfind(_REAL_TOPIC)
        if at < 0 or _REAL_QID not in first[at:] or not bool((rows[:, at:] == rows[0, at:]).all()):
            return False
        tags = first.find(_TAGS)
        if tags < 0:
            # The others may have tags where this one has none.
            return bool((rows[:, :at] == rows[0, :at]).all()) or _TAGS not in rows.tobytes()
        end = first.find(_END_BYTE, tags)
        end = len(first) if end < 0 else end + 1
        start = max(0, tags - 1)
        return first.find(_TAGS, end) < 0 and bool((rows[:, start:end] == rows[0, start:end]).all())

    def _queues_of(self, texts: list[bytes]) -> list[ConsumeQueue | None]:
        known = self._queues
        result = []
        for text in texts:
            at = text.rfind(_REAL_TOPIC)
            key = text[at:] if at > 0 and text[at - 1] == _END else b""
            if key in known:
                result.append(known[key])
                continue
            queue = self._look(text)
            if _REAL_QID in key and len(key) <= _MAX_KEY:
                known[key] = queue
            result.append(queue)
        return result

    def _codes_of(self, texts: list[bytes]) -> list[int]:
        known = self._codes
        result = []
        for text in texts:
            at = text.find(_TAGS)
            if at < 0:
                result.append(0)
                continue
            end = text.find(_END_BYTE, at)
            if (at and text[at - 1] != _END) or text.find(_TAGS, end) >= 0 or end < 0:
                result.append(properties.tags_code_of(text.decode("utf-8", "replace")))
                continue
            key = text[at:end]
            code = known.get(key)
            if code is None:
                code = properties.tags_code_of(key.decode("utf-8", "replace"))
                if len(key) <= _MAX_KEY:
                    known[key] = code
            result.append(code)
        return result

    def queue(self, text: bytes) -> ConsumeQueue | None:
        """As `find`, for one text."""
        return self._look(text)

    def _look(self, text: bytes) -> ConsumeQueue | None:
        found = properties.parse(text.decode("utf-8", "replace"))
        topic, queue_id = found.get(properties.REAL_TOPIC), found.get(properties.REAL_QID)
        if not topic or topic == HALF_TOPIC or not is_topic_name(topic.encode()) or not _is_queue_id(queue_id):
            return None
        return self._store.ensure_queue(topic, int(queue_id or 0))


def _is_queue_id(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdecimal() and int(text) < 2**31
