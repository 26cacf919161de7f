"""A message that an application received and sends on, with all its properties, does not count as an unclaimed
delivery."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from duemq.spark_jobs.audit.events import DONE, WAITS, RangeEvents
from duemq.spark_jobs.audit.figures import STATUSES
from duemq.spark_jobs.audit.matching import match
from duemq.spark_jobs.store.progress import read_progress
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.unit.spark_jobs.compact_world import START_MS, Broker, new_broker


def statuses(root: Path) -> dict[int, str]:
    """The audit's verdict on each message, and on each delivery without one, by physical offset."""
    store = StoreFiles.open(str(root))
    progress = read_progress(store)
    waits, done = [np.empty(0, WAITS)], [np.empty(0, DONE)]
    for part in plan(store):
        for found in RangeEvents(store, part, progress):
            waits.append(found.waits)
            done.append(found.done)
    cases = match(np.concatenate(waits), np.concatenate(done))
    return {int(case["physical_offset"]): STATUSES[case["status"]] for case in cases}


def looks_delivered(broker: Broker, key: str, more: str) -> int:
    return broker.send("orders", b"body", f"UNIQ_KEY\x01{key}\x02REAL_TOPIC\x01orders\x02REAL_QID\x010{more}")


def test_a_delivered_message_that_is_sent_again(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    timer = broker.timer(START_MS + 1500, b"timer", "t")
    level = broker.schedule(1, b"level", "l")
    broker.pass_time(3000)
    looks_delivered(broker, "t", f"\x02TIMER_OUT_MS\x01{START_MS + 1000}")
    looks_delivered(broker, "l", "")
    broker.close()
    assert statuses(broker.root) == {timer: "delivered", level: "delivered"}


def test_a_delivery_of_a_message_that_is_not_there(tmp_path: Path) -> None:
    """A delivery whose message is missing is unclaimed: it was born before its deliver time, and stored at it."""
    broker = new_broker(tmp_path / "store")
    stray = looks_delivered(broker, "t", f"\x02TIMER_OUT_MS\x01{START_MS + 1000}")
    broker.close()
    assert statuses(broker.root) == {stray: "unclaimed"}
