"""The journal, an SQLite file: the state of QoS 2 that must survive a kill of the bridge. A commit has many rows.

    received       packet_id | unique_key, digest, topic, broker, queue_id, floor, is_delayed, is_released,
                   is_stored                                                               from MQTT
    published      grp, topic, broker, queue_id, queue_offset, fingerprint | packet_id, state   to MQTT
    passed         grp, topic, broker, queue_id | low, middle, high, turned_ms, unknown_before  to MQTT
    passed_done    grp, topic, broker, queue_id, turned_ms, messages                            to MQTT
    subscriptions  filter | qos                                                                 of the broker's session
    delayed        topic | grp                                                                    of earlier rules, too

`received`: a message with QoS 2 from MQTT, from before it is sent to RocketMQ until its PUBREL. If the MQTT broker
sends its packet id again, it is the same message, and the bridge searches for its unique key in the queue, from the
offset `floor` on; the message cannot lie before that offset. The digest is that of the PUBLISH: an MQTT broker that
lost its last seconds may use the packet id for another message. The messages that were released last stay in the table,
since such a broker sends them again. `is_stored` is written to the disk for delayed messages and for recalls, before
their PUBREC: a delayed message that has been cancelled or replaced since is found nowhere.

`published`: a message with QoS 2 to MQTT, from before its PUBLISH until the group's offset has passed it. The
fingerprint, made from its id and its store time, distinguishes it from messages of other stores at the same offset: the
brokers of another name server may have the same names, and a broker may get a new store.

`passed`: for rules with QoS 2, the group's offset in each queue: now (`high`), and one to two minutes ago (`low`).
RocketMQ's brokers save offsets every five seconds, so after a kill they deliver the last messages again. `passed_done`
has the offsets and fingerprints of those between `low` and `high` that were published, many in a row. A message with
another fingerprint at such an offset is of another store; so may be one before `low`, unless an administrator has reset
the group's offset. Both are published. Before `unknown_before`, all messages count as published: journals of the
versions 1 and 2 had no fingerprints; their rows in `published` have the fingerprint 0, and fit any message.

`subscriptions`: the QoS of each subscription that the session at the MQTT broker may have.

`delayed`: the topics in which delayed messages wait, and the group that takes them when they are due.

The rows are also in memory. A change is visible immediately; `saved` waits until it is on the disk. Only one process
can open the file; others get JournalError.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from duemq.errors import DueMQError
from duemq.messages import MessageQueue

FILE_NAME: Final = "journal.db"
KEPT_RELEASED: Final = 10_000
"""Maximum number of released messages in the journal."""
TURN_MS: Final = 60_000
"""Minimum time between `low` and `high` of a queue, in ms; the maximum is twice as long."""
UNKNOWN: Final = 0
"""The fingerprint in rows of a journal that had no fingerprints: it matches any message."""
_VERSION: Final = 3
_PASSED_BYTES: Final = 12
"""Size of the offset and the fingerprint of a message in `passed_done`, in bytes."""

_TABLES: Final = """
CREATE TABLE received (packet_id INTEGER PRIMARY KEY, unique_key TEXT NOT NULL, digest BLOB NOT NULL,
    topic TEXT NOT NULL, broker TEXT NOT NULL, queue_id INTEGER NOT NULL, floor INTEGER NOT NULL,
    is_delayed INTEGER NOT NULL, is_released INTEGER NOT NULL, is_stored INTEGER NOT NULL DEFAULT 0);
CREATE TABLE published (grp TEXT, topic TEXT, broker TEXT, queue_id INTEGER, queue_offset INTEGER, fingerprint INTEGER,
    packet_id INTEGER NOT NULL, state INTEGER NOT NULL,
    PRIMARY KEY (grp, topic, broker, queue_id, queue_offset, fingerprint)) WITHOUT ROWID;
CREATE TABLE passed (grp TEXT, topic TEXT, broker TEXT, queue_id INTEGER, low INTEGER NOT NULL, middle INTEGER NOT NULL,
    high INTEGER NOT NULL, turned_ms INTEGER NOT NULL, unknown_before INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (grp, topic, broker, queue_id)) WITHOUT ROWID;
CREATE TABLE passed_done (grp TEXT NOT NULL, topic TEXT NOT NULL, broker TEXT NOT NULL, queue_id INTEGER NOT NULL,
    turned_ms INTEGER NOT NULL, messages BLOB NOT NULL);
CREATE INDEX passed_done_of_queue ON passed_done (grp, topic, broker, queue_id, turned_ms);
CREATE TABLE subscriptions (filter TEXT PRIMARY KEY, qos INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE delayed (topic TEXT PRIMARY KEY, grp TEXT NOT NULL) WITHOUT ROWID;
"""
_TO_VERSION_2: Final = """
ALTER TABLE received ADD COLUMN is_stored INTEGER NOT NULL DEFAULT 0;
CREATE TABLE delayed (topic TEXT PRIMARY KEY, grp TEXT NOT NULL) WITHOUT ROWID;
"""
_TO_VERSION_3: Final = """
CREATE TABLE published_3 (grp TEXT, topic TEXT, broker TEXT, queue_id INTEGER, queue_offset INTEGER,
    fingerprint INTEGER, packet_id INTEGER NOT NULL, state INTEGER NOT NULL,
    PRIMARY KEY (grp, topic, broker, queue_id, queue_offset, fingerprint)) WITHOUT ROWID;
INSERT INTO published_3 SELECT grp, topic, broker, queue_id, queue_offset, 0, packet_id, state FROM published;
DROP TABLE published;
ALTER TABLE published_3 RENAME TO published;
ALTER TABLE passed ADD COLUMN unknown_before INTEGER NOT NULL DEFAULT 0;
UPDATE passed SET unknown_before = high;
CREATE TABLE passed_done (grp TEXT NOT NULL, topic TEXT NOT NULL, broker TEXT NOT NULL, queue_id INTEGER NOT NULL,
    turned_ms INTEGER NOT NULL, messages BLOB NOT NULL);
CREATE INDEX passed_done_of_queue ON passed_done (grp, topic, broker, queue_id, turned_ms);
"""
_TO_VERSION: Final = {0: _TABLES, 1: _TO_VERSION_2 + _TO_VERSION_3, 2: _TO_VERSION_3, _VERSION: ""}
"""By version of the file, the statements that make its tables those of the present version."""


class JournalError(DueMQError):
    """The journal cannot be opened or written; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A message with QoS 2 from MQTT."""

    packet_id: int
    unique_key: str
    """Its message id in RocketMQ."""
    digest: bytes
    """Digest of the PUBLISH."""
    queue: MessageQueue
    """The queue to which it is sent; of a delayed message, the queue to which it will be delivered."""
    floor: int
    """The lowest offset of the queue at which it can lie."""
    is_delayed: bool
    is_stored: bool = False
    """Whether RocketMQ is known to have it, or no longer gets it. For plain messages this is not in the file: after a
    start the bridge searches for them."""
    is_released: bool = False
    """Whether its PUBREL has arrived."""


class MessagePosition(NamedTuple):
    """The position of a message to MQTT: the group that reads it, its queue, and its offset in the queue. The
    fingerprint distinguishes it from the message that another store has there."""

    group: str
    queue: MessageQueue
    offset: int
    fingerprint: int


def fingerprint_of(message_id: str, store_time_ms: int) -> int:
    """Return 32 bits, not UNKNOWN, that distinguish a message from those of other stores at the same offset."""
    return zlib.crc32(message_id.encode(errors="replace"), store_time_ms & 0xFFFFFFFF) or 1


class State(IntEnum):
    """State of a message with QoS 2 to MQTT."""

    PUBLISHED = 0
    """PUBREC has not arrived: over a new connection, PUBLISH is sent again."""
    RELEASED = 1
    """PUBREC has arrived: over a new connection, PUBREL is sent again."""
    DONE = 2
    """PUBCOMP has arrived; the group's offset has not passed the message."""


@dataclass(frozen=True, slots=True)
class Published:
    """Packet id and state of a message with QoS 2 to MQTT."""

    packet_id: int
    """0 for `DONE`: another message may have the id."""
    state: State


@dataclass(frozen=True, slots=True)
class Passed:
    """A group's offset in a queue: one to two turns ago, at the last turn, and now. `turned_ms`: time of the last turn,
    ms since the epoch. Nobody knows the fingerprints of messages before `unknown_before`."""

    low: int
    middle: int
    high: int
    turned_ms: int
    unknown_before: int = 0


class Fingerprints:
    """Fingerprints of messages of one queue, by offset: 12 bytes for each."""

    def __init__(self) -> None:
        self._offsets = array("q")
        self._fingerprints = array("I")

    def add(self, messages: Iterable[tuple[int, int]]) -> None:
        """Add offsets and fingerprints, in the order of the offsets. A new fingerprint replaces an old one."""
        new = list(messages)
        if new and self._offsets and new[0][0] <= self._offsets[-1]:
            new = sorted({**dict(zip(self._offsets, self._fingerprints, strict=True)), **dict(new)}.items())
            del self._offsets[:], self._fingerprints[:]
        self._offsets.extend(offset for offset, _ in new)
        self._fingerprints.extend(fingerprint for _, fingerprint in new)

    def get(self, offset: int) -> int | None:
        """Return the fingerprint of the message at an offset, or None."""
        index = bisect_left(self._offsets, offset)
        is_there = index < len(self._offsets) and self._offsets[index] == offset
        return self._fingerprints[index] if is_there else None


@dataclass(slots=True)
class History:
    """The messages that a group has passed in a queue, and the fingerprints of those that were published: before the
    last turn (`older`) and since (`newer`)."""

    passed: Passed
    older: Fingerprints = field(default_factory=Fingerprints)
    newer: Fingerprints = field(default_factory=Fingerprints)


_Change = tuple[str, list[tuple[Any, ...]]]


class Journal:
    """The journal of one bridge, opened by `open_journal`. Only its owner changes it, from one event loop."""

    def __init__(
        self,
        database: sqlite3.Connection,
        thread: ThreadPoolExecutor,
        received: dict[int, Taken],
        published: dict[MessagePosition, Published],
        histories: dict[tuple[str, MessageQueue], History],
        subscriptions: dict[str, int],
        delayed: dict[str, str],
    ) -> None:
        self._database = database
        self._thread = thread
        self.received: Mapping[int, Taken] = received
        """By packet id."""
        self.published: Mapping[MessagePosition, Published] = published
        self.subscriptions: Mapping[str, int] = subscriptions
        """QoS by filter, with $share, of the subscriptions that the session at the MQTT broker may have."""
        self.delayed: Mapping[str, str] = delayed
        """Groups by topic: where delayed messages wait, or waited when earlier rules were in use."""
        self._received = received
        self._delayed = delayed
        self._released = dict.fromkeys(each.packet_id for each in received.values() if each.is_released)
        """Packet ids of messages that were released, the oldest first."""
        self._published = published
        self._unknown = {position for position in published if position.fingerprint == UNKNOWN}
        self._histories = histories
        self._subscriptions = subscriptions
        self._changes: list[_Change] = []
        self._writing: asyncio.Task[None] | None = None

    # --- from MQTT

    def take(self, taken: Iterable[Taken]) -> None:
        """Add messages that are about to be sent to RocketMQ."""
        rows = []
        for each in taken:
            self._received[each.packet_id] = each
            self._released.pop(each.packet_id, None)
            queue = each.queue
            rows.append(
                (
                    each.packet_id,
                    each.unique_key,
                    each.digest,
                    queue.topic,
                    queue.broker,
                    queue.queue_id,
                    each.floor,
                    int(each.is_delayed),
                    0,
                    int(each.is_stored),
                )
            )
        self._change("INSERT OR REPLACE INTO received VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def is_stored(self, taken: Taken) -> bool:
        """Return whether a message is marked as stored."""
        found = self._received.get(taken.packet_id)
        return found is not None and found.unique_key == taken.unique_key and found.is_stored

    def set_stored(self, taken: Iterable[Taken]) -> list[int]:
        """Mark messages as stored by RocketMQ, in memory only, unless other messages have their packet ids by now.
        Return the packet ids of those that were marked."""
        marked = []
        for each in taken:
            found = self._received.get(each.packet_id)
            if found is not None and found.unique_key == each.unique_key:
                self._received[each.packet_id] = replace(found, is_stored=True)
                marked.append(each.packet_id)
        return marked

    def note_stored(self, taken: Iterable[Taken]) -> None:
        """Mark messages as stored by RocketMQ, also in the file."""
        marked = self.set_stored(taken)
        self._change("UPDATE received SET is_stored = 1 WHERE packet_id = ?", [(each,) for each in marked])

    def release(self, packet_ids: Iterable[int]) -> None:
        """Mark messages as released: their PUBREL has arrived, and other messages may get their packet ids."""
        now = [each for each in packet_ids if each in self._received and each not in self._released]
        for each in now:
            self._received[each] = replace(self._received[each], is_stored=True, is_released=True)
        self._released.update(dict.fromkeys(now))
        self._change("UPDATE received SET is_released = 1 WHERE packet_id = ?", [(each,) for each in now])
        too_many = len(self._released) - KEPT_RELEASED
        if too_many > 0:
            self.forget_received(list(itertools.islice(self._released, too_many)))

    def forget_received(self, packet_ids: Iterable[int]) -> None:
        """Remove messages that were refused, or that the MQTT broker cannot send again."""
        gone = [(each,) for each in packet_ids if self._received.pop(each, None) is not None]
        for (each,) in gone:
            self._released.pop(each, None)
        self._change("DELETE FROM received WHERE packet_id = ?", gone)

    # --- to MQTT

    def find(self, position: MessagePosition) -> Published | None:
        """Return the packet id and the state of the message at a position, or None. A row without a fingerprint gets
        that of the message."""
        found = self._published.get(position)
        if found is None and self._unknown and (old := position._replace(fingerprint=UNKNOWN)) in self._unknown:
            found = self._published[old]
            self.forget_published([old])
            self.set_published([(position, found)])
        return found

    def set_published(self, changes: Iterable[tuple[MessagePosition, Published]]) -> None:
        """Set the states of messages."""
        rows = []
        for position, published in changes:
            self._published[position] = published
            rows.append(
                (
                    position.group,
                    *position.queue,
                    position.offset,
                    position.fingerprint,
                    published.packet_id,
                    int(published.state),
                )
            )
        self._change("INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def is_passed(self, position: MessagePosition, now_ms: int) -> bool:
        """Return whether a message that RocketMQ delivers was published and removed from the journal before, since the
        broker has lost the group's last offsets. `now_ms`: the time, ms since the epoch."""
        history = self._histories.get(position[:2])
        if history is None or position.offset < history.passed.low:
            self._begin_history(position, now_ms)
            return False
        if position.offset >= history.passed.high:
            return False
        if position.offset < history.passed.unknown_before:
            return True
        found = history.newer.get(position.offset)
        if found is None:
            found = history.older.get(position.offset)
        if found is None or found in (position.fingerprint, UNKNOWN):
            return found is not None
        # The queue now belongs to another store.
        self._begin_history(position, now_ms)
        return False

    def in_hand(self, group: str) -> dict[MessageQueue, int]:
        """Return, by queue, the offset after the last message with QoS 2 of a group that was published and that
        RocketMQ may deliver again."""
        found: dict[MessageQueue, int] = {}
        for position in self.published:
            if position.group == group:
                found[position.queue] = max(found.get(position.queue, 0), position.offset + 1)
        return found

    def forget_before(self, group: str, offsets: Mapping[MessageQueue, int], now_ms: int) -> list[MessagePosition]:
        """Remove the completed messages before the stored offsets of a group. Return the positions of the others, which
        an administrator skipped. `now_ms`: the time, ms since the epoch."""
        before = [
            (position, published.state is State.DONE)
            for position, published in self._published.items()
            if position.group == group and position.offset < offsets.get(position.queue, 0)
        ]
        done: dict[MessageQueue, dict[int, int]] = {queue: {} for queue in offsets}
        for position, is_done in before:
            if is_done:
                # Of two stores, the newer one has the later row.
                done[position.queue][position.offset] = position.fingerprint
        for queue, offset in offsets.items():
            self._pass(group, queue, offset, done[queue], now_ms)
        self.forget_published(position for position, is_done in before if is_done)
        return [position for position, is_done in before if not is_done]

    def _begin_history(self, position: MessagePosition, now_ms: int) -> None:
        """Forget the messages that a group has passed in a queue, since it begins anew at `position`."""
        history = History(Passed(position.offset, position.offset, position.offset, now_ms))
        self._histories[position.group, position.queue] = history
        self._set_passed(position.group, position.queue, history.passed)
        self._change(
            "DELETE FROM passed_done WHERE grp = ? AND topic = ? AND broker = ? AND queue_id = ?",
            [(position.group, *position.queue)],
        )

    def _pass(self, group: str, queue: MessageQueue, offset: int, done: Mapping[int, int], now_ms: int) -> None:
        """Take the stored offset of a group, and the fingerprints by offset of the completed messages before it."""
        history = self._histories.get((group, queue))
        if history is None:
            return
        passed = history.passed
        if offset > passed.high:
            if now_ms - passed.turned_ms >= TURN_MS:
                self._change(
                    "DELETE FROM passed_done WHERE grp = ? AND topic = ? AND broker = ? AND queue_id = ? "
                    "AND turned_ms < ?",
                    [(group, *queue, passed.turned_ms)],
                )
                history.older, history.newer = history.newer, Fingerprints()
                passed = replace(passed, low=passed.middle, middle=passed.high, turned_ms=now_ms)
            history.passed = replace(passed, high=offset)
            self._set_passed(group, queue, history.passed)
        if done:
            messages = sorted(done.items())
            history.newer.add(messages)
            row = (group, *queue, history.passed.turned_ms, _pack_messages(messages))
            self._change("INSERT INTO passed_done VALUES (?, ?, ?, ?, ?, ?)", [row])

    def _set_passed(self, group: str, queue: MessageQueue, passed: Passed) -> None:
        row = (group, *queue, passed.low, passed.middle, passed.high, passed.turned_ms, passed.unknown_before)
        self._change("INSERT OR REPLACE INTO passed VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [row])

    def forget_published(self, positions: Iterable[MessagePosition]) -> None:
        """Remove messages in any state."""
        gone = [position for position in positions if self._published.pop(position, None) is not None]
        if self._unknown:
            self._unknown.difference_update(gone)
        self._change(
            "DELETE FROM published WHERE grp = ? AND topic = ? AND broker = ? AND queue_id = ? AND queue_offset = ? "
            "AND fingerprint = ?",
            [(position.group, *position.queue, position.offset, position.fingerprint) for position in gone],
        )

    # --- the session

    def forget_session(self) -> None:
        """Remove the rows that belong to a session that the MQTT broker has lost: those of messages from MQTT, and the
        subscriptions."""
        self.forget_received(list(self._received))
        self.forget_subscriptions(list(self._subscriptions))

    def subscribe(self, topic: str, qos: int) -> None:
        """Add a subscription, before it is made."""
        if self._subscriptions.get(topic) != qos:
            self._subscriptions[topic] = qos
            self._change("INSERT OR REPLACE INTO subscriptions VALUES (?, ?)", [(topic, qos)])

    def forget_subscriptions(self, filters: Iterable[str]) -> None:
        """Remove subscriptions that were ended."""
        gone = [(each,) for each in filters if self._subscriptions.pop(each, None) is not None]
        self._change("DELETE FROM subscriptions WHERE filter = ?", gone)

    # --- delayed messages

    def set_delayed(self, topic: str, group: str) -> None:
        """Note that delayed messages wait in a topic for a group."""
        if self._delayed.get(topic) != group:
            self._delayed[topic] = group
            self._change("INSERT OR REPLACE INTO delayed VALUES (?, ?)", [(topic, group)])

    # --- the file

    @property
    def is_saved(self) -> bool:
        """Whether all changes that were made are on the disk."""
        return not self._changes and self._writing is None

    async def saved(self) -> None:
        """Wait until all changes that were made are on the disk. Raises JournalError."""
        while not self.is_saved:
            if self._writing is None:
                changes, self._changes = self._changes, []
                self._writing = asyncio.create_task(self._save(changes), name="duemq journal")
            is_all = not self._changes
            await asyncio.shield(self._writing)
            if is_all:
                return

    async def close(self) -> None:
        """Save all changes and close the file. Raises JournalError."""
        try:
            await self.saved()
        finally:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
            self._thread.shutdown(wait=False)

    def _change(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self._changes.append((statement, rows))

    async def _save(self, changes: list[_Change]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, _write, self._database, changes)
        except sqlite3.Error as error:
            raise JournalError(f"cannot write the bridge's journal: {error}") from None
        finally:
            self._writing = None


def _pack_messages(messages: Sequence[tuple[int, int]]) -> bytes:
    """Return the column `messages` of `passed_done`: all offsets, then all fingerprints; little-endian."""
    number = len(messages)
    return struct.pack(f"<{number}q{number}I", *(each for each, _ in messages), *(each for _, each in messages))


def _unpack_messages(packed: bytes) -> Iterator[tuple[int, int]]:
    number = len(packed) // _PASSED_BYTES
    values = struct.unpack(f"<{number}q{number}I", packed)
    return zip(values[:number], values[number:], strict=True)


def _write(database: sqlite3.Connection, changes: list[_Change]) -> None:
    with database:
        for statement, rows in changes:
            database.executemany(statement, rows)


async def open_journal(directory: Path) -> Journal:
    """Open or create the journal of a directory. Raises JournalError, also if another bridge has opened it."""
    thread = ThreadPoolExecutor(1, "duemq journal")
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(thread, _open, directory, thread)
    except JournalError:
        thread.shutdown()
        raise


def try_journal(directory: Path) -> None:
    """Check that the journal of a directory, which no bridge of this process has open, can be opened or created.
    Blocks. Raises JournalError like `open_journal`."""
    with _errors(directory):
        _connect(directory).close()


@contextmanager
def _errors(directory: Path) -> Iterator[None]:
    """Turn the errors of opening a journal into JournalError."""
    path = directory / FILE_NAME
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"cannot create the directory {directory} of the journal: {error.strerror or error}; "
            "give another one as `state`"
        ) from None
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise JournalError(
                f"another bridge runs with {directory}; give each bridge its own `state` and `client_id`"
            ) from None
        raise JournalError(
            f"cannot open the journal {path}: {error}; the bridge must be able to write files in this directory"
        ) from None
    except sqlite3.Error as error:
        raise JournalError(
            f"cannot read the journal {path}: {error}. The bridge starts without it (move it away), but messages with "
            "QoS 2 that were in flight may then arrive twice"
        ) from None


def _connect(directory: Path) -> sqlite3.Connection:
    """Open or create the file, with its tables, for this process alone. Raises sqlite3.DatabaseError if another process
    has it open, if it is damaged, or if its version is unknown; OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    database = sqlite3.connect(path, timeout=0, isolation_level="IMMEDIATE", check_same_thread=False)
    try:
        # Exclusive mode before WAL, so that there is no shared memory and the lock lasts as long as the process.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version not in _TO_VERSION:
            raise sqlite3.DatabaseError(f"it has version {version}, and this bridge supports up to {_VERSION}")
        if version != _VERSION:
            statements = _TO_VERSION[version]
            database.executescript(f"BEGIN IMMEDIATE; {statements} PRAGMA user_version = {_VERSION}; COMMIT")
        # A write takes the lock, even one that changes nothing.
        database.execute("BEGIN IMMEDIATE")
        database.execute(f"PRAGMA user_version = {_VERSION}")
        database.commit()
    except BaseException:
        database.close()
        raise
    return database


def _open(directory: Path, thread: ThreadPoolExecutor) -> Journal:
    with _errors(directory):
        database = _connect(directory)
        try:
            return _load(database, thread)
        except BaseException:
            database.close()
            raise


def _load(database: sqlite3.Connection, thread: ThreadPoolExecutor) -> Journal:
    received = {
        row[0]: Taken(
            packet_id=row[0],
            unique_key=row[1],
            digest=row[2],
            queue=MessageQueue(row[3], row[4], row[5]),
            floor=row[6],
            is_delayed=bool(row[7]),
            is_stored=bool(row[8] or row[9]),
            is_released=bool(row[8]),
        )
        for row in database.execute("SELECT * FROM received ORDER BY rowid")
    }
    published = {
        MessagePosition(row[0], MessageQueue(row[1], row[2], row[3]), row[4], row[5]): Published(row[6], State(row[7]))
        for row in database.execute("SELECT * FROM published")
    }
    histories = {
        (row[0], MessageQueue(row[1], row[2], row[3])): History(Passed(*row[4:]))
        for row in database.execute("SELECT * FROM passed")
    }
    for row in database.execute("SELECT * FROM passed_done ORDER BY rowid"):
        history = histories[row[0], MessageQueue(row[1], row[2], row[3])]
        is_newer = row[4] == history.passed.turned_ms
        (history.newer if is_newer else history.older).add(_unpack_messages(row[5]))
    subscriptions: dict[str, int] = dict(database.execute("SELECT filter, qos FROM subscriptions"))
    delayed: dict[str, str] = dict(database.execute("SELECT topic, grp FROM delayed"))
    return Journal(database, thread, received, published, histories, subscriptions, delayed)
