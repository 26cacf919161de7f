"""Tables on their way to the disk: one write at a time, requests during a write share the next one, and the last state
counts."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.tables.persister import Outcome, Persister, SavedTable
from duemq.broker.workers import ThreadWorkers
from duemq.storage.config_file import ConfigFile
from duemq.storage.files import OsFiles
from tests.support.broker import running
from tests.support.wire import pull


class SlowFile(ConfigFile):
    """A table whose writes wait until they are let go, and may fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(OsFiles(), str(path))
        self.gate = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.written: list[dict[str, Any]] = []
        self.error: OSError | None = None

    def write(self, table: dict[str, Any]) -> None:
        self.started.release()
        self.gate.acquire()
        if self.error is not None:
            raise self.error
        self.written.append(table)


class Table:
    def __init__(self, path: Path) -> None:
        self.value = 0
        self.file = SlowFile(path)
        loop = asyncio.get_running_loop()
        self.workers = ThreadWorkers(loop)
        self.persister = Persister(loop, self.workers)
        self.outcomes: list[OSError | None] = []
        self.saved = SavedTable(self.persister, self.file, lambda: ({"value": self.value}, self.outcomes.append))

    def save(self, value: int) -> Outcome:
        self.value = value
        return self.saved.save()

    @property
    def written(self) -> list[int]:
        return [table["value"] for table in self.file.written]


@pytest.fixture
async def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "table.json")


@pytest.fixture(autouse=True)
def ended(table: Table) -> Iterator[None]:
    yield
    table.file.gate.release(10)
    table.workers.stop()


async def test_who_asks_while_a_write_runs_is_served_by_one_more(table: Table) -> None:
    """Requests during a write are all served by one more write, with the table as it was when that write began, or
    later."""
    first = table.save(1)
    table.file.started.acquire()
    others = [table.save(2), table.save(3), table.save(4)]
    assert len({id(future) for future in others}) == 1
    table.file.gate.release()
    await first
    assert table.written == [1]
    assert not others[0].done()
    table.file.gate.release()
    await asyncio.gather(*others)
    assert table.written == [1, 4]


async def test_a_failed_write_fails_for_those_who_wait_and_the_next_is_tried(table: Table, logged: list[Any]) -> None:
    table.file.error = OSError(28, "full")
    table.file.gate.release()
    assert str(await table.save(1)) == "[Errno 28] full"
    assert [line["event"] for line in logged] == ["table_not_saved"]
    table.file.error = None
    table.file.gate.release()
    assert await table.save(2) is None
    assert table.written == [2]
    assert list(map(str, table.outcomes)) == ["[Errno 28] full", "None"]


async def test_each_who_waits_for_a_write_that_fails_has_an_error_of_its_own(table: Table) -> None:
    """Each waiter for a failing write gets an exception of its own: a shared one would collect the stacks of all
    waiters, and keep their objects alive."""
    table.file.error = OSError(28, "full")
    waiting = [asyncio.ensure_future(table.saved.saved()) for _ in range(10)]
    table.file.gate.release(2)
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert len({id(error) for error in errors}) == 10
    for error in errors:
        assert isinstance(error, OSError)
        assert (error.errno, len(traceback.extract_tb(error.__traceback__))) == (28, 2)


async def test_what_cannot_be_written_when_the_broker_stops_keeps_no_other_table_from_it(
    table: Table, tmp_path: Path, logged: list[Any]
) -> None:
    other = SavedTable(table.persister, ConfigFile(OsFiles(), str(tmp_path / "other.json")), lambda: ({"a": 1}, print))
    first, second = table.save(1), table.save(2)
    table.file.started.acquire()
    table.file.error = OSError(28, "full")
    table.file.gate.release(3)  # the last try is that of the stop
    await other.save()
    third = other.save()
    await table.persister.stop()
    assert [str(await done) for done in (first, second)] == ["[Errno 28] full"] * 2
    assert await third is None
    assert [line["event"] for line in logged] == ["table_not_saved"] * 2


async def test_what_waited_is_written_when_the_broker_stops(table: Table) -> None:
    """A waiting write is done when the broker stops, since the write under way has an older edition."""
    first = table.save(1)
    table.file.started.acquire()
    second = table.save(2)
    table.file.gate.release(2)
    await table.persister.stop()
    assert table.written == [1, 2]
    await asyncio.gather(first, second)
    assert table.written == [1, 2]


async def test_a_group_made_just_before_the_stop_is_there_at_the_next_start(tmp_path: Path) -> None:
    groups = [f"g{number}" for number in range(5)]
    async with running(tmp_path) as broker:
        peer = broker.connect()
        for group in groups:
            peer.post(pull("TBW102", group=group))
    async with running(tmp_path) as broker:
        assert set(groups) <= set(broker.groups.table)


async def test_a_table_that_could_not_be_written_is_written_later(
    table: Table, logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that could not be written is written later: clients that got the error see the change all the same, and a
    restart must not undo it."""
    monkeypatch.setattr("duemq.broker.tables.persister.RETRY_SECONDS", 0.0)
    table.file.error = OSError(28, "full")
    table.file.gate.release(3)
    assert await table.save(1) is not None
    while len(table.outcomes) < 3:
        await asyncio.sleep(0)
    assert [line["event"] for line in logged] == ["table_not_saved"], "told once"
    table.file.error = None
    table.file.gate.release(2)
    while not table.written:
        await asyncio.sleep(0)
    assert table.written == [1]


async def test_a_table_that_could_not_be_written_is_written_at_the_stop(table: Table) -> None:
    table.file.error = OSError(28, "full")
    table.file.gate.release(2)
    assert await table.save(1) is not None
    table.file.error = None
    await table.persister.stop()
    assert table.written == [1]
