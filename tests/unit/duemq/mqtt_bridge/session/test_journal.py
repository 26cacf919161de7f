from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duemq.messages import MessageQueue
from duemq.mqtt_bridge.session import journal as module
from duemq.mqtt_bridge.session.journal import (
    FILE_NAME,
    TURN_MS,
    JournalError,
    MessagePosition,
    Published,
    State,
    Taken,
    open_journal,
)

QUEUE = MessageQueue("T", "broker-a", 3)


def taken(packet_id: int) -> Taken:
    return Taken(packet_id, f"KEY{packet_id}", b"digest", QUEUE, 7, is_delayed=packet_id % 2 == 1)


def place(offset: int, group: str = "g", fingerprint: int = 1) -> MessagePosition:
    return MessagePosition(group, QUEUE, offset, fingerprint)


VERSION_1 = """
CREATE TABLE received (packet_id INTEGER PRIMARY KEY, unique_key TEXT NOT NULL, digest BLOB NOT NULL,
    topic TEXT NOT NULL, broker TEXT NOT NULL, queue_id INTEGER NOT NULL, floor INTEGER NOT NULL,
    is_delayed INTEGER NOT NULL, is_released INTEGER NOT NULL);
CREATE TABLE published (grp TEXT, topic TEXT, broker TEXT, queue_id INTEGER, queue_offset INTEGER,
    packet_id INTEGER NOT NULL, state INTEGER NOT NULL,
    PRIMARY KEY (grp, topic, broker, queue_id, queue_offset)) WITHOUT ROWID;
CREATE TABLE passed (grp TEXT, topic TEXT, broker TEXT, queue_id INTEGER, low INTEGER NOT NULL, middle INTEGER NOT NULL,
    high INTEGER NOT NULL, turned_ms INTEGER NOT NULL, PRIMARY KEY (grp, topic, broker, queue_id)) WITHOUT ROWID;
CREATE TABLE subscriptions (filter TEXT PRIMARY KEY, qos INTEGER NOT NULL) WITHOUT ROWID;
"""
VERSION_2 = f"""{VERSION_1}
ALTER TABLE received ADD COLUMN is_stored INTEGER NOT NULL DEFAULT 0;
CREATE TABLE delayed (topic TEXT PRIMARY KEY, grp TEXT NOT NULL) WITHOUT ROWID;
"""


async def test_what_is_saved_is_there_after_a_start(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path / "new")
    journal.take([taken(1), taken(2), taken(3)])
    journal.release([2, 99])
    journal.forget_received([3])
    journal.set_published([(place(5), Published(9, State.PUBLISHED)), (place(6), Published(8, State.RELEASED))])
    journal.set_published([(place(5), Published(0, State.DONE))])
    journal.subscribe("a/#", 1)
    journal.subscribe("b", 2)
    journal.forget_subscriptions(["b"])
    await journal.close()
    again = await open_journal(tmp_path / "new")
    assert again.received[1] == taken(1)
    assert again.received[2].is_released
    assert again.received[2].is_stored
    assert set(again.received) == {1, 2}
    assert again.published == {place(5): Published(0, State.DONE), place(6): Published(8, State.RELEASED)}
    assert again.subscriptions == {"a/#": 1}
    assert (again.in_hand("g"), again.in_hand("h")) == ({QUEUE: 7}, {})
    again.forget_session()
    assert (again.received, again.subscriptions) == ({}, {})
    await again.close()


async def test_what_is_stored_is_known_after_a_start_if_it_was_noted(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    journal.take([taken(1), taken(2), taken(3), taken(4)])
    journal.set_stored([taken(1)])
    other = replace(taken(2), unique_key="another message")
    journal.note_stored([other, taken(3)])
    assert [journal.is_stored(taken(number)) for number in range(1, 6)] == [True, False, True, False, False]
    assert not journal.is_stored(replace(taken(3), unique_key="another message"))
    await journal.close()
    again = await open_journal(tmp_path)
    assert [again.is_stored(taken(number)) for number in range(1, 5)] == [False, False, True, False]
    await again.close()


async def test_a_journal_of_version_1_is_read(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as old:
        old.executescript(f"{VERSION_1}PRAGMA user_version = 1;")
        old.execute("INSERT INTO received VALUES (1, 'KEY1', X'00', 'T', 'broker-a', 3, 7, 1, 0)")
        old.commit()
    for is_stored in (False, True):
        journal = await open_journal(tmp_path)
        assert journal.received[1].is_stored is is_stored
        journal.note_stored([journal.received[1]])
        assert journal.delayed == ({"t": "g"} if is_stored else {})
        journal.set_delayed("t", "g")
        await journal.close()


@pytest.mark.parametrize(("version", "tables"), [(1, VERSION_1), (2, VERSION_2)])
async def test_rows_of_a_journal_without_fingerprints_fit_any_message(
    tmp_path: Path, version: int, tables: str
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as old:
        old.executescript(f"{tables}PRAGMA user_version = {version};")
        old.executemany("INSERT INTO published VALUES ('g', 'T', 'broker-a', 3, ?, ?, ?)", [(12, 0, 2), (13, 9, 0)])
        old.execute("INSERT INTO passed VALUES ('g', 'T', 'broker-a', 3, 10, 10, 12, 0)")
        old.commit()
    for _ in range(2):
        journal = await open_journal(tmp_path)
        assert [journal.is_passed(place(each), 0) for each in (10, 11, 12)] == [True, True, False]
        assert journal.find(place(13)) == Published(9, State.PUBLISHED)
        assert journal.find(place(13, fingerprint=2)) is None, "the row is that of the message now"
        await journal.close()
    journal = await open_journal(tmp_path)
    assert journal.forget_before("g", {QUEUE: 13}, 0) == []
    assert [journal.is_passed(place(each), 0) for each in (11, 12, 13)] == [True, True, False]
    await journal.close()


async def test_messages_of_another_store_have_not_passed(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    assert not journal.is_passed(place(10), 0)
    journal.set_published((place(10 + each), Published(0, State.DONE)) for each in range(4))
    journal.forget_before("g", {QUEUE: 14}, 0)
    await journal.close()
    journal = await open_journal(tmp_path)
    assert [journal.is_passed(place(each), 0) for each in (10, 13)] == [True, True]
    others = [place(each, fingerprint=2) for each in range(11, 15)]
    assert [journal.is_passed(each, 0) for each in others] == [False] * 4
    journal.set_published((each, Published(0, State.DONE)) for each in others)
    journal.forget_before("g", {QUEUE: 14}, 0)
    await journal.close()
    journal = await open_journal(tmp_path)
    assert [journal.is_passed(each, 0) for each in others] == [True, True, True, False]
    await journal.close()


async def test_many_changes_are_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = await open_journal(tmp_path)
    commits: list[int] = []
    write = module._write

    def counted(database: Any, changes: Any) -> None:
        commits.append(1)
        write(database, changes)

    monkeypatch.setattr(module, "_write", counted)
    for number in range(1, 500):
        journal.take([taken(number)])
    await journal.saved()
    await journal.saved()
    assert commits == [1]
    await journal.close()


async def test_two_bridges_cannot_have_one_journal(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    with pytest.raises(JournalError, match="another bridge"):
        await open_journal(tmp_path)
    await journal.close()
    await (await open_journal(tmp_path)).close()


async def test_what_is_no_journal_is_told(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(JournalError, match="move it away"):
        await open_journal(tmp_path)


async def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    journal.take([taken(1)])
    journal._change("INSERT INTO nowhere VALUES (?)", [(1,)])
    with pytest.raises(JournalError, match="cannot write the bridge"):
        await journal.saved()
    await journal.close()


async def test_the_last_that_were_released_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_RELEASED", 2)
    journal = await open_journal(tmp_path)
    journal.take(taken(number) for number in range(1, 5))
    journal.release([1, 2])
    journal.take([taken(1)])  # the packet id has another message
    journal.release([3, 4])
    assert set(journal.received) == {1, 3, 4}
    assert not journal.received[1].is_released
    await journal.close()


async def test_messages_are_forgotten_when_the_offset_has_passed_them(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    assert not journal.is_passed(place(10), 0)
    journal.set_published((place(10 + each), Published(0, State.DONE)) for each in range(4))
    journal.set_published([(place(9), Published(77, State.PUBLISHED)), (place(10, "other"), Published(0, State.DONE))])
    assert journal.forget_before("g", {QUEUE: 12}, 0) == [place(9)]
    assert set(journal.published) == {place(9), place(12), place(13), place(10, "other")}
    # A broker that lost its last offsets gives them again.
    assert [journal.is_passed(place(each), 0) for each in (10, 11, 12)] == [True, True, False]
    await journal.close()
    journal = await open_journal(tmp_path)
    assert [journal.is_passed(place(each), 0) for each in (10, 11, 12)] == [True, True, False]
    # Somebody sends the group back: further than a broker can have lost.
    assert not journal.is_passed(place(3), 0)
    assert not journal.is_passed(place(11), 0)
    await journal.close()


async def test_what_passed_long_ago_may_be_given_again(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    assert not journal.is_passed(place(0), 0)
    for turn in range(4):
        journal.set_published((place(100 * turn + each), Published(0, State.DONE)) for each in range(100))
        journal.forget_before("g", {QUEUE: 100 * (turn + 1)}, turn * TURN_MS)
    await journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        assert file.execute("SELECT count(*) FROM passed_done").fetchone() == (2,)
    journal = await open_journal(tmp_path)
    assert [journal.is_passed(place(each), 0) for each in (200, 299, 300, 399, 400)] == [True] * 4 + [False]
    assert not journal.is_passed(place(199), 0)
    await journal.close()
