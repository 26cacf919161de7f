"""The table of levels that RocketMQ used, as found from its records with few reads, whichever broker has written since;
and the names of levels in a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.table import DelayLevels
from duemq.spark_jobs.analyse.analyse import analyse
from duemq.spark_jobs.store import progress
from duemq.spark_jobs.store.ranges import at_offsets
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.support.messages import HOST
from tests.unit.spark_jobs import compact_world
from tests.unit.spark_jobs.compact_world import QUEUE_UNITS, Broker, as_apache, new_broker

LEVEL = 2
USUAL_MS = 5000
MESSAGES = QUEUE_UNITS
"""As many as a file of a queue holds."""


def theirs(broker: Broker, delay_ms: int) -> int:
    """Store a message as RocketMQ does, with the deliver time in its queue alone; return its physical offset."""
    appender = broker.store.appender
    now_ms = appender.begin(broker.clock.now_ms())
    text = f"DELAY\x01{LEVEL}\x02UNIQ_KEY\x01k\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
    queue = broker.store.ensure_queue(SCHEDULE_TOPIC, LEVEL - 1)
    appender.add(queue, b"x", text.encode(), now_ms + delay_ms, 7, HOST, 8, 0, 0, 0)
    appender.commit()
    return appender.last_physical_offset


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return new_broker(tmp_path / "store")


def told(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The delay of the level, and the number of records that were asked for."""
    broker.close()
    asked = 0

    def counted(store: StoreFiles, offsets: Any, sizes: Any, **more: Any) -> Any:
        nonlocal asked
        asked += len(offsets)
        return at_offsets(store, offsets, sizes, **more)

    monkeypatch.setattr(progress, "at_offsets", counted)
    return progress._delays(StoreFiles.open(str(broker.root)), None)[LEVEL - 1], asked


def no_spark() -> Any:
    raise AssertionError("so little is read without Spark")


def destroy(broker: Broker, *offsets: int) -> None:
    (path, *_) = sorted((broker.root / "commitlog").iterdir())
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(bytes(100))


def test_in_a_store_of_duemqs_one_record_of_each_end_is_read(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(MESSAGES):
        broker.schedule(LEVEL, b"x")
    assert told(broker, monkeypatch) == (USUAL_MS, 1 + progress._LOOKED_AT)


def test_rocketmqs_newest_record_tells(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MESSAGES):
        theirs(broker, 300 + number)
    found, asked = told(broker, monkeypatch)
    assert found == 300 + MESSAGES - 1
    assert asked <= 1 + progress._LOOKED_AT


def test_where_that_is_damaged_the_one_before_tells(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = [theirs(broker, 300 + number) for number in range(MESSAGES)]
    destroy(broker, *offsets[-5:])
    assert told(broker, monkeypatch)[0] == 300 + MESSAGES - 6


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 25, MESSAGES - 1])
@pytest.mark.parametrize("damaged", [0, 3])
def test_in_a_store_that_duemq_took_over_the_last_of_rocketmqs_tells(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, count: int, damaged: int
) -> None:
    offsets = [theirs(broker, 300 + number) for number in range(count)]
    for _ in range(MESSAGES - count):
        broker.schedule(LEVEL, b"x")
    if damaged < count:
        destroy(broker, *offsets[count - damaged :])
        found, asked = told(broker, monkeypatch)
        assert found == 300 + count - damaged - 1
        assert asked <= 8 * progress._LOOKED_AT


def test_a_level_whose_records_are_all_destroyed_has_the_usual_delay(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroy(broker, *[theirs(broker, 300) for _ in range(MESSAGES)])
    assert told(broker, monkeypatch)[0] == USUAL_MS


def known(broker: Broker, delay_levels: str | None = None) -> dict[int, int]:
    broker.close()
    return progress.known_delays(StoreFiles.open(str(broker.root)), delay_levels)


def test_levels_of_duemqs_are_called_by_the_table_of_the_store(broker: Broker) -> None:
    """Levels of duemq's are named by the table of the store: its third level is not RocketMQ's, and the unused one is
    unknown."""
    for level in (1, 2, 3):
        broker.schedule(level, b"x")
    assert known(broker) == {1: 1000, 2: 5000, 3: 30_000}


def test_a_table_that_is_noted_is_known_without_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_world, "TABLE", DelayLevels())
    broker = new_broker(tmp_path / "store")
    broker.schedule(2, b"x")
    assert known(broker) == dict(enumerate(DelayLevels().delays_ms, 1))
    as_apache(broker.root)
    assert progress.known_delays(StoreFiles.open(str(broker.root))) == {2: 5000}


def test_a_table_that_is_given_stands_for_what_no_message_tells(broker: Broker) -> None:
    broker.schedule(3, b"x")
    assert known(broker, "9s 8s 7s 6s") == {1: 9000, 2: 8000, 3: 30_000, 4: 6000}


@pytest.mark.parametrize("by_theirs", [True, False])
def test_a_level_whose_delay_was_another_one_has_none(broker: Broker, by_theirs: bool) -> None:
    for _ in range(20):
        theirs(broker, 300)
    assert progress.known_delays(StoreFiles.open(str(broker.root))) == {2: 300}
    for _ in range(20):
        theirs(broker, 500) if by_theirs else broker.schedule(LEVEL, b"x")
    broker.schedule(1, b"x")
    assert known(broker) == {1: 1000}
    assert progress.known_delays(StoreFiles.open(str(broker.root)), "1s 5s") == {1: 1000}


def test_a_report_calls_levels_by_what_is_known(broker: Broker, tmp_path: Path) -> None:
    """A report names levels by what is known, also one beyond any table, which is not a timer."""
    appender = broker.store.appender
    for level in (1, 2, 3):
        broker.schedule(level, b"x", f"k{level}")
    for number, delay_ms in enumerate((300, 700)):  # the table was changed
        broker.clock.advance(1)
        now_ms = appender.begin(broker.clock.now_ms())
        text = f"DELAY\x0119\x02UNIQ_KEY\x01b{number}\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
        queue = broker.store.ensure_queue(SCHEDULE_TOPIC, 18)
        appender.add(queue, b"x", text.encode(), now_ms + delay_ms, 7, HOST, 8, 0, 0, now_ms + delay_ms)
        appender.commit()
        origin = appender.last_physical_offset
        done = f"DELAY\x0119\x02UNIQ_KEY\x01b{number}\x02REAL_TOPIC\x01orders"
        broker.send("orders", b"x", done, 3, prepared=origin)
    broker.timer(broker.clock.now_ms() + 2000, b"x", "t")
    broker.pass_time(60_000)
    broker.close()
    found = analyse(no_spark, str(broker.root), state=str(tmp_path / "state"))
    assert {late.name: late.count for late in found.late_by_level} == {
        "timer": 1,
        "level 1 (1 s)": 1,
        "level 2 (5 s)": 1,
        "level 3 (30 s)": 1,
        "level 19": 2,
    }
