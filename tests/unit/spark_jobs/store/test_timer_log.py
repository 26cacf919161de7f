"""The units of the timer log are read a part at a time, and no more of a file than has units."""

from __future__ import annotations

from pathlib import Path

import pytest

from duemq.scheduler.timers.files.unit import UNIT_SIZE
from duemq.spark_jobs.store import progress
from duemq.spark_jobs.store.progress import EVERYTHING, timer_units
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.unit.spark_jobs.compact_world import START_MS, new_broker


def positions(store: StoreFiles, start: int = 0, end: int = EVERYTHING) -> list[int]:
    return [base + n * UNIT_SIZE for base, units in timer_units(store, start, end) for n in range(len(units))]


@pytest.fixture
def store(tmp_path: Path) -> StoreFiles:
    """A store of 23 timers, whose timer log goes on with zeros, as RocketMQ's does."""
    broker = new_broker(tmp_path / "store")
    for number in range(23):
        broker.timer(START_MS + 3_600_000 + number, b"x")
    broker.run()
    broker.close()
    path = max((tmp_path / "store" / "timerlog").iterdir())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 1000 * UNIT_SIZE)
    return StoreFiles.open(str(tmp_path / "store"))


def test_parts_of_any_size_give_the_same(store: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = positions(store)
    assert len(whole) >= 23
    for first, most in ((1, 1), (1, 2), (2, 8), (3, 3)):
        monkeypatch.setattr(progress, "_FIRST_UNITS", first)
        monkeypatch.setattr(progress, "_SCAN_UNITS", most)
        assert positions(store) == whole
        for start, end in ((0, 7), (5, 6), (3, 20), (22, 10**6)):
            wanted = [at for at in whole if start * UNIT_SIZE <= at < end * UNIT_SIZE]
            assert positions(store, start * UNIT_SIZE, end * UNIT_SIZE) == wanted


def test_zeros_behind_the_units_are_hardly_read(store: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of RocketMQ's has 100 MB from the start."""
    monkeypatch.setattr(progress, "_FIRST_UNITS", 10)
    sizes: list[int] = []
    read = store.read

    def noted(path: str, at: int, size: int) -> bytes:
        sizes.append(size)
        return read(path, at, size)

    monkeypatch.setattr(store, "read", noted)
    count = len(positions(store))
    assert sum(sizes) <= 4 * max(count, 10) * UNIT_SIZE
