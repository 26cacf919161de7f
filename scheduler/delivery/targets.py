"""The real queue of a scheduled message, from its properties REAL_TOPIC and REAL_QID, and its tags code, from TAGS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records import properties
from duemq.protocol.topics import HALF_TOPIC
from duemq.scheduler.timers.index.keys import key_of
from duemq.storage.log.copies import PackedRecords
from duemq.storage.log.scan import is_topic_name
from duemq.storage.queues.consume_queue import ConsumeQueue
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REAL_TOPIC: Final = f"{properties.REAL_TOPIC}{properties.NAME_END}".encode()
_REAL_QID: Final = f"{properties.PROPERTY_END}{properties.REAL_QID}{properties.NAME_END}".encode()
_REPLACE: Final = properties.TIMER_REPLACE.encode()
_TAGS: Final = f"{properties.TAGS}{properties.NAME_END}".encode()
_END: Final = ord(properties.PROPERTY_END)
_END_BYTE: Final = properties.PROPERTY_END.encode()
_MAX_KNOWN: Final = 10_000
_MAX_KEY: Final = 400


class Targets:
    """Finds the real queues of messages by their property texts. duemq's texts end with REAL_TOPIC and REAL_QID, so the
    part from REAL_TOPIC on is the same for all messages of a queue: the queue is cached by that part."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._queues: dict[bytes, ConsumeQueue | None] = {}
        self._removals = store.removals

    def find(self, records: PackedRecords) -> tuple[list[ConsumeQueue | None], list[int]]:
        """Return, for each record, its real queue, which is made if it does not exist (None if the record does not name
        a valid one), and its tags code."""
        if self._removals != self._store.removals or len(self._queues) > _MAX_KNOWN:
            self._removals = self._store.removals
            self._queues.clear()
        rows = records.text_rows()
        queues = self._queues_of_rows(rows) if rows is not None else None
        codes = self._codes_of_rows(rows) if rows is not None else None
        if queues is None or codes is None:
            texts = records.properties()
            queues = self._queues_of(texts) if queues is None else queues
            codes = self._codes_of(texts) if codes is None else codes
        return queues, codes

    def queue(self, text: bytes) -> ConsumeQueue | None:
        """Return the real queue for one property text, as `find` does."""
        found = properties.parse(text.decode("utf-8", "replace"))
        topic, queue_id = found.get(properties.REAL_TOPIC), found.get(properties.REAL_QID)
        if not topic or topic == HALF_TOPIC or not is_topic_name(topic.encode()) or not _is_queue_id(queue_id):
            return None
        # The topic may have fewer queues by now: in a queue that consumers do not read, the message would be lost.
        limit = self._store.queue_limits.get(topic)
        return self._store.ensure_queue(topic, int(queue_id or 0) % limit if limit else int(queue_id or 0))

    def _queues_of_rows(self, rows: NDArray[np.uint8]) -> list[ConsumeQueue | None] | None:
        """Return the queues for texts of one length with REAL_TOPIC at the same place; None if the texts are not of
        this form."""
        keys = _endings_of_rows(rows)
        if keys is None:
            return None
        for key in set(keys).difference(self._queues):
            # Texts with REAL_TOPIC twice, or REAL_QID before it, need to be looked at one by one.
            if _REAL_QID not in key or key.rfind(_REAL_TOPIC) > 0:
                return None
            self._queues[key] = self.queue(key)
        return [self._queues[key] for key in keys]

    @staticmethod
    def _codes_of_rows(rows: NDArray[np.uint8]) -> list[int] | None:
        """Return the tags codes of texts of one length, with tags of one length at the same place, or all without tags;
        None if the texts are not of this form."""
        count = rows.tobytes().count(_TAGS)
        if not count:
            return [0] * len(rows)
        first = rows[0].tobytes()
        at = first.find(_TAGS)
        value, end = at + len(_TAGS), first.find(_END_BYTE, at)
        if count != len(rows) or at < 0 or end < 0 or (at and first[at - 1] != _END):
            return None
        if (
            not _same(rows, max(0, at - 1), value)
            or (rows[:, value:end] == _END).any()
            or not _same(rows, end, end + 1)
        ):
            return None
        keys = _columns(rows, at, end)
        codes = {key: _tags_code(key) for key in set(keys)}
        return [codes[key] for key in keys]

    def _queues_of(self, texts: list[bytes]) -> list[ConsumeQueue | None]:
        known = self._queues
        result = []
        for text in texts:
            at = text.rfind(_REAL_TOPIC)
            key = text[at:] if at > 0 and text[at - 1] == _END else b""
            if key in known:
                result.append(known[key])
                continue
            queue = self.queue(text)
            if _REAL_QID in key and len(key) <= _MAX_KEY:
                known[key] = queue
            result.append(queue)
        return result

    @staticmethod
    def _codes_of(texts: list[bytes]) -> list[int]:
        known: dict[bytes, int] = {}
        result = []
        for text in texts:
            at = text.find(_TAGS)
            if at < 0:
                result.append(0)
                continue
            end = text.find(_END_BYTE, at)
            if (at and text[at - 1] != _END) or text.find(_TAGS, end) >= 0 or end < 0:
                result.append(_tags_code(text))
                continue
            key = text[at:end]
            if key not in known:
                known[key] = _tags_code(key)
            result.append(known[key])
        return result


class TopicHashes:
    """Finds the hashes for units of the timer log by property texts: the hash of the real topic, and the hash of the
    key by which a message is to be replaced. The former is cached, for most texts by the part from REAL_TOPIC on."""

    def __init__(self, hash_of: Callable[[str], int]) -> None:
        """Make the finder. `hash_of`: returns the hash of a topic's name."""
        self._hash_of = hash_of
        self._known: dict[bytes, int] = {}

    def find(self, records: PackedRecords) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return, for each record, the hash of its real topic, and the hash of its key, 0 if it is not to be
        replaced."""
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        rows = records.text_rows()
        endings = _endings_of_rows(rows) if rows is not None else None
        # If a text has the name twice, or in the value of another property, texts are looked at one by one.
        if rows is not None and endings is not None and rows.tobytes().count(_REAL_TOPIC) == len(rows):
            has_keys = _REPLACE in rows.tobytes()
            texts = records.properties() if has_keys else []
            hashes = [self._of_ending(ending) for ending in endings]
        else:
            texts = records.properties()
            has_keys = any(_REPLACE in text for text in texts)
            hashes = [self._of_text(text) for text in texts]
        keys = [key_of(_decoded(text)) for text in texts] if has_keys else np.zeros(len(records), np.int32)
        return np.array(hashes, np.int32), np.array(keys, np.int32)

    def _of_text(self, text: bytes) -> int:
        at = text.find(_REAL_TOPIC)
        if at > 0 and text[at - 1] == _END and len(text) - at <= _MAX_KEY and text.find(_REAL_TOPIC, at + 1) < 0:
            return self._of_ending(text[at:])
        return self._hash_of(properties.get(_decoded(text), properties.REAL_TOPIC) or "")

    def _of_ending(self, ending: bytes) -> int:
        found = self._known.get(ending)
        if found is None:
            found = self._hash_of(properties.get(_decoded(ending), properties.REAL_TOPIC) or "")
            self._known[ending] = found
        return found


def _endings_of_rows(rows: NDArray[np.uint8]) -> list[bytes] | None:
    """Return the parts from REAL_TOPIC on of texts of one length, if all have it at the same place; else None."""
    first = rows[0].tobytes()
    at = first.rfind(_REAL_TOPIC)
    if at < 1 or len(first) - at > _MAX_KEY or first[at - 1] != _END or not _same(rows, at - 1, at + len(_REAL_TOPIC)):
        return None
    return _columns(rows, at, len(first))


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _tags_code(text: bytes) -> int:
    return properties.tags_code_of(text.decode("utf-8", "replace"))


def _same(rows: NDArray[np.uint8], start: int, end: int) -> bool:
    """Whether all rows are equal in the columns from `start` to `end`."""
    return bool((rows[:, start:end] == rows[0, start:end]).all())


def _columns(rows: NDArray[np.uint8], start: int, end: int) -> list[bytes]:
    """Return the columns from `start` to `end` of each row. This relies on columns without zeros, which the store
    refuses in properties: numpy drops zeros at the end."""
    part = np.ascontiguousarray(rows[:, start:end])
    found: list[bytes] = part.view(f"S{end - start}")[:, 0].tolist()
    return found


def _is_queue_id(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdecimal() and int(text) < 2**31
