"""Apache's brokers, started on a store, do what the audit says of such a start (`spark_jobs.audit.starts`).

The stores are those of the tests of `duemq store repair`; here they are not repaired."""

import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from duemq.spark_jobs.audit.events import RangeEvents
from duemq.spark_jobs.audit.figures import Figures
from duemq.spark_jobs.audit.matching import match
from duemq.spark_jobs.audit.starts import StartOutcome, starts
from duemq.spark_jobs.store.progress import read_progress
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.interop.environment import ClientPool, make_broker
from tests.interop.stores.apache_stores import (
    PROPERTIES,
    SCHEDULE,
    SHORTENED,
    TOPIC,
    ZEROED,
    ApacheStores,
    bodies,
    damage,
)
from tests.interop.support import eventually
from tests.peers.messages import Outgoing
from tests.soak import sampled
from tests.spark.world.stores import copy_store

TIMER_QUEUE = "consumequeue/rmq_sys_wheel_timer"
CASES = [
    ("apache-4.9.7", "stop", (SCHEDULE,)),
    ("apache-4.9.7", "stop", (ZEROED,)),
    ("apache-4.9.7", "stop", ("consumequeue",)),
    ("apache-4.9.7", "kill", (SCHEDULE,)),
    ("apache-5.3.3", "stop", (SCHEDULE,)),
    ("apache-5.3.3", "stop", (TIMER_QUEUE,)),
    ("apache-5.3.3", "stop", ("timerlog",)),
    ("apache-5.3.3", "stop", ("timerwheel",)),
    ("apache-5.3.3", "kill", ("timerlog", "timerwheel")),
    ("apache-5.3.3", "kill", (SCHEDULE, TIMER_QUEUE)),
]
ALWAYS = [CASES[0], CASES[3], CASES[8]]


def told(path: Path) -> StartOutcome:
    """The audit's statement about the broker that wrote the store."""
    store = StoreFiles.open(path)
    progress = read_progress(store, str(PROPERTIES["messageDelayLevel"]))
    found = [events for part in plan(store) for events in RangeEvents(store, part, progress)]
    cases = match(*(np.concatenate([getattr(each, name) for each in found]) for name in ("waits", "done")))
    (own,) = [each for each in starts(store, Figures.of(cases, 1000, 0), []) if each.wrote_it]
    return own


@pytest.mark.parametrize(("kind", "end", "lost"), sampled(CASES, ALWAYS))
async def test_a_broker_finds_what_the_audit_says(
    apache_stores: ApacheStores, clients: ClientPool, tmp_path: Path, kind: str, end: str, lost: tuple[str, ...]
) -> None:
    written = await apache_stores.get(kind, end)
    assert told(written).misses == 0, "nothing is wrong with it"
    store = copy_store(written, tmp_path / "store")
    damage(store, lost)
    expected = told(store)
    assert expected.broker == kind.removeprefix("apache-")
    java = await clients.java(expected.broker)
    broker = make_broker(kind, tmp_path / "broker", SHORTENED, store=store)
    try:
        await broker.start()
        await eventually(partial(java.admin(broker.nameserver).route, TOPIC))

        async def waiting_ones() -> int:
            return sum(count for body, count in bodies(store).items() if body.startswith(b"waits"))

        await eventually(waiting_ones, lambda found: found >= expected.finds, timeout=60)
        # Messages sent behind all others, by each delivery path that still works, show when no more deliveries follow.
        ends = [Outgoing(b"end level 1", level=1), Outgoing(b"end level 3", level=3)]
        if kind == "apache-5.3.3" and TIMER_QUEUE not in lost:
            at = str(time.time_ns() // 1_000_000 + 3000)
            ends.append(Outgoing(b"end timer", properties={"TIMER_DELIVER_MS": at}))
        async with await java.producer(broker.nameserver) as producer:
            await producer.send(TOPIC, ends)

        async def has_ended() -> bool:
            return {message.body for message in ends} <= bodies(store).keys()

        await eventually(has_ended, timeout=60)
        await broker.stop()
    finally:
        if broker.running:
            await broker.kill()
    came = Counter(body.split()[1] for body in bodies(store) if body.startswith(b"waits"))
    assert came.total() == expected.finds
    assert expected.reasons or not expected.misses
    twice = [body for body, count in bodies(store).items() if body.startswith(b"soon level") and count > 1]
    assert len(twice) == expected.again
