"""`duemq store repair` on stores that Apache's brokers wrote: started on the repaired stores, Apache's brokers deliver
all waiting messages once, and nothing that they had delivered before.

Without the repair, 4.9.7 never delivers the messages in a queue of the schedule topic that is gone or all zeros, and
delivers a level again from its beginning if delayOffset.json is gone; 5.3.3 never delivers waiting timers if timerlog/
is gone, and delivers the timer topic's messages again if timercheck is gone; a killed broker delivers the messages of
the last ten seconds twice. The second run has a shorter table of levels, by which the waiting messages are due.
"""

import asyncio
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.interop.environment import ClientPool, make_broker
from tests.interop.stores.apache_stores import (
    COUNT,
    PROPERTIES,
    SCHEDULE,
    SHORTENED,
    TOPIC,
    ZEROED,
    ApacheStores,
    bodies,
    damage,
    stored,
)
from tests.interop.support import eventually
from tests.peers.messages import Outgoing
from tests.soak import sampled
from tests.spark.world.stores import copy_store
from tests.support import rows

TIMERS = ("timerlog", "timerwheel", "config/timercheck")
OFFSETS = ("config/delayOffset.json", "config/delayOffset.json.bak")
EVERYTHING = ("consumequeue", "checkpoint", *TIMERS, *OFFSETS)
CASES = [
    ("apache-4.9.7", "stop", (SCHEDULE,)),
    ("apache-4.9.7", "stop", OFFSETS),
    ("apache-4.9.7", "stop", (ZEROED,)),
    ("apache-4.9.7", "kill", EVERYTHING),
    ("apache-5.3.3", "stop", (SCHEDULE, "consumequeue/rmq_sys_wheel_timer")),
    ("apache-5.3.3", "stop", TIMERS),
    ("apache-5.3.3", "stop", OFFSETS),
    ("apache-5.3.3", "kill", ()),
    ("apache-5.3.3", "kill", EVERYTHING),
]
ALWAYS = [CASES[3], CASES[8]]


def repair(store: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from duemq.cli import main; main()", "store", "repair", str(store), *options]
    for name in ("messageDelayLevel", "mappedFileSizeConsumeQueue"):
        command += ["--set", f"{name}={PROPERTIES[name]}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("kind", "end", "lost"), sampled(CASES, ALWAYS))
async def test_apache_goes_on_with_a_repaired_store(
    apache_stores: ApacheStores, clients: ClientPool, tmp_path: Path, kind: str, end: str, lost: tuple[str, ...]
) -> None:
    written = await apache_stores.get(kind, end)
    store = copy_store(written, tmp_path / "store")
    before = bodies(store)
    damage(store, lost)
    done = await asyncio.to_thread(repair, store)
    assert done.returncode == 0, done.stderr
    assert f"repaired: {store}" in done.stdout, done.stdout
    checked = await asyncio.to_thread(repair, store, "--dry-run")
    assert "nothing to repair" in checked.stdout, checked.stdout
    waits = {b"waits level %d" % n for n in range(COUNT)}
    if kind == "apache-5.3.3":
        waits |= {b"waits timer %d" % n for n in range(COUNT)}
    assert not waits & before.keys(), "this machine was too slow"
    java = await clients.java(kind.removeprefix("apache-"))
    broker = make_broker(kind, tmp_path / "broker", SHORTENED, store=store)
    try:
        await broker.start()
        await eventually(partial(java.admin(broker.nameserver).route, TOPIC))
        await eventually(partial(stored, broker, java), lambda found: found >= before.total() + len(waits), timeout=60)
        # The delivery of messages sent behind all others shows that a second copy of those would be there as well.
        ends = [Outgoing(b"end", level=1), Outgoing(b"end", level=3)]
        if kind == "apache-5.3.3":
            ends.append(Outgoing(b"end", properties={"TIMER_DELIVER_MS": str(time.time_ns() // 1_000_000 + 3000)}))
        async with await java.producer(broker.nameserver) as producer:
            await producer.send(TOPIC, ends)
        expected = before.total() + len(waits) + len(ends)
        await eventually(partial(stored, broker, java), lambda found: found >= expected, timeout=60)
        await broker.stop()
    finally:
        if broker.running:
            await broker.kill()
    found, wanted = bodies(store), before + Counter(waits) + Counter({b"end": len(ends)})
    assert found == wanted, rows.about(store, [*(found - wanted), *(wanted - found)])
