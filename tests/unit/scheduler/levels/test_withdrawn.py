"""Cancelled messages are still reported as cancelled after a level's queue was made anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from duemq.broker.repair.repair import repair
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.timers.config import Cancelled
from duemq.storage.clock import look
from tests.unit.broker.commands.test_repair import SETTINGS
from tests.unit.spark_jobs.compact_world import Broker, new_broker


def _cancelled(broker: Broker, place: int) -> Cancelled:
    """Return the result of a cancel, as the handlers do it."""
    changes, now_ms = broker.timers.changes, broker.clock.now_ms()
    while (result := changes.cancel(place, now_ms)) is None:
        while not changes.ids.is_complete:
            read = changes.ids.look(now_ms)
            if read is not None:
                read.run()
    return result


@pytest.mark.parametrize("lost", ["queue", "all that is derived"])
def test_a_cancelled_message_of_a_level_whose_queue_is_made_anew(tmp_path: Path, lost: str) -> None:
    """A cancelled message whose level's queue is made anew stays cancelled: it lies before everything that a note
    covers, and the record that cancels it is read once more."""
    root = tmp_path / "store"
    broker = new_broker(root)
    placed = [broker.schedule(2, b"%d" % number) for number in range(6)]
    for number in (1, 3):
        broker.cancel(placed[number])
    broker.clock.set_wall(broker.clock.now_ms() + 3_600_000)
    broker.run()
    placed.append(broker.schedule(2, b"6"))
    broker.pass_time(6000)
    delivered = broker.bodies()
    assert delivered == [b"0", b"2", b"4", b"5", b"6"]
    assert [run.start for run in broker.levels.levels[2].runs] == [6], "what came before the clock was set is done"
    if lost == "queue":
        broker.close()
        shutil.rmtree(root / "consumequeue" / SCHEDULE_TOPIC)
    else:
        broker.owned.checkpoint()
        Broker.let_go_of_all()
        repair(str(root), now=look(broker.clock), settings=SETTINGS)
    again = Broker(root, broker.clock)
    again.pass_time(6000)
    assert again.bodies() == delivered
    outcomes = [_cancelled(again, place) for place in placed]
    assert outcomes == [Cancelled.CANCELLED_BEFORE if number in (1, 3) else Cancelled.DELIVERED for number in range(7)]
    again.close()


@pytest.mark.parametrize("at", [0, 8, 9, 11, 12])
def test_wrong_bytes_beside_a_cancelled_message_are_found(tmp_path: Path, at: int) -> None:
    """Wrong bytes beside the mark of a cancelled message, which takes the place of a size, are found. In a store that
    RocketMQ had meanwhile all units are noted anew: earlier the sum of their sizes was unknown then, and a wrong size
    was not found."""
    broker = new_broker(tmp_path / "store")
    placed = [broker.schedule(2, b"%d" % number) for number in range(6)]
    broker.cancel(placed[1])
    broker.close()
    (broker.root / "lock").write_bytes(b"lock")
    Broker(broker.root, broker.clock).close()
    (file,) = (broker.root / "consumequeue" / SCHEDULE_TOPIC / "1").iterdir()
    units = bytearray(file.read_bytes())
    units[20 * 4 + at] ^= 0x55
    file.write_bytes(units)
    again = Broker(broker.root, broker.clock)
    again.pass_time(6000)
    assert again.bodies() == [b"0", b"2", b"3", b"4", b"5"]
    again.close()
