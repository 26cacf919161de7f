"""The option `topics` leaves out ranges of the commitlog, but never a record, whichever parts of the queues are
missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from duemq.spark_jobs.source import source
from duemq.spark_jobs.source.filters import Filters
from duemq.spark_jobs.source.source import Options, _ranges
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.storage.queues.consume_queue import DELIVERED_SIZE, WITHDRAWN_SIZE
from tests.unit.spark_jobs.compact_world import Broker, new_broker
from tests.unit.spark_jobs.source.test_queue_offsets import read

RANGE = 4 << 20
SIZES = {"a range a file": (64 << 10, 3000), "several ranges a file": (16 << 20, 80_000)}
"""Bytes of a commitlog file, and of a body."""


@pytest.fixture(params=SIZES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store of several files; `rare` has one message early and, in another queue, one late."""
    root = tmp_path / "store"
    segment_size, body_size = SIZES[request.param]
    broker = new_broker(root, segment_size)
    for number in range(400):
        broker.send("common", b"x" * body_size, "", number % 3)
        if number in (20, 300):
            broker.send("rare", b"x" * body_size, "", int(number > 100))
    broker.close()
    return root


def _of_rare(root: Path) -> list[tuple[str, int, int]]:
    found = read(root, topics="rare", rangeBytes=RANGE)
    assert found == [row for row in read(root, rangeBytes=RANGE) if row[0] == "rare"]
    return found


def _read_ranges(root: Path) -> int:
    options = Options({"path": str(root), "topics": "rare", "rangeBytes": str(RANGE)})
    return len(_ranges(StoreFiles.open(root), options, Filters(topics=frozenset({"rare"}))))


def test_only_ranges_that_may_have_a_topic_are_read(store: Path) -> None:
    assert len(_of_rare(store)) == 2
    assert _read_ranges(store) == 2


def marked(root: Path) -> None:
    """Put marks in place of the sizes of some units, as duemq does in a level's queue."""
    for file in (root / "consumequeue" / "common").glob("*/*"):
        data = bytearray(file.read_bytes())
        for at, mark in ((0, WITHDRAWN_SIZE), (60, DELIVERED_SIZE)):
            if any(data[at : at + 20]):
                data[at + 8 : at + 12] = mark.to_bytes(4, "big")
        file.write_bytes(data)


def test_marks_in_place_of_sizes_have_no_more_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked(store)
    assert len(_of_rare(store)) == 2
    assert _read_ranges(store) == 2
    monkeypatch.setattr(source, "_MOST_MARKED", 0)
    assert _read_ranges(store) > 2


@pytest.mark.parametrize("queue", [0, 1])
def test_marks_hide_no_record(store: Path, queue: int) -> None:
    marked(store)
    shutil.rmtree(store / "consumequeue" / "rare" / str(queue))
    assert len(_of_rare(store)) == 2


@pytest.mark.parametrize("queue", [0, 1])
def test_a_queue_that_is_gone_hides_no_record(store: Path, queue: int) -> None:
    shutil.rmtree(store / "consumequeue" / "rare" / str(queue))
    assert len(_of_rare(store)) == 2


@pytest.mark.parametrize("number", [0, 3])
def test_units_that_are_gone_hide_no_record(store: Path, number: int) -> None:
    for file in sorted((store / "consumequeue" / "rare").glob("*/*"))[number : number + 1]:
        file.write_bytes(bytes(file.stat().st_size))
    for file in sorted((store / "consumequeue" / "common" / "2").iterdir())[number : number + 1]:
        file.write_bytes(bytes(file.stat().st_size))
    assert len(_of_rare(store)) == 2


def test_a_store_that_goes_on_after_all(store: Path) -> None:
    broker = Broker(store, new_broker(store.parent / "clock").clock, StoreFiles.open(store).segment_size)
    broker.send("rare", b"y", "", 5)
    broker.close()
    assert len(_of_rare(store)) == 3
    assert _read_ranges(store) == 3
