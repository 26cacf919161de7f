"""Scripts that once broke a promise, kept as they were found: a seed gives another life once the script generator
changes."""

from __future__ import annotations

from tests.simulation.script import LEVELS, Action, Script

_BASE = {
    "flushDiskType": "ASYNC_FLUSH",
    "enableScheduleAsyncDeliver": "true",
    "messageDelayLevel": LEVELS,
    "timerRollWindowSlot": "172800",
    "scheduleDeliverBatchSize": "512",
}


def _send(at: float, topic: str, queue: int, size: int, **how: object) -> Action:
    return Action(at, "send", {"topic": topic, "queue": queue, "size": size, **how})


def _evicted(until: float) -> list[Action]:
    return [Action(0.5 + 0.37 * number, "evict") for number in range(int(until / 0.37))]


FOUND = {
    "a file of the timer log went whose slots were past, but not for the last checkpoint": Script(
        "1691",
        {**_BASE, "timerRollWindowSlot": "4", "scheduleDeliverBatchSize": "1"},
        (
            Action(
                1.297,
                "burst",
                {"topic": "mails", "queue": 1, "size": 10, "how": "plain", "count": 40, "spread_ms": 700},
            ),
            _send(1.374, "mails", 1, 3000, how="level", level=3),
            _send(2.050, "orders", 0, 0, how="level", level=2),
            _send(2.280, "orders", 1, 300, how="level", level=2),
            _send(2.931, "orders", 0, 10, how="level", level=1),
            _send(3.024, "mails", 1, 10, how="level", level=2),
            Action(
                3.088,
                "burst",
                {
                    "topic": "mails",
                    "queue": 1,
                    "size": 0,
                    "how": "timer",
                    "delay_ms": 8000,
                    "count": 120,
                    "spread_ms": 0,
                },
            ),
            _send(4.134, "orders", 0, 300, how="level", level=1),
            Action(4.236, "setting", {"name": "flushIntervalConsumeQueue", "value": "5000"}),
            _send(4.403, "mails", 0, 300, how="timer", delay_ms=1, key="a"),
            _send(4.653, "mails", 1, 300, how="timer", delay_ms=8000, key="b"),
            Action(10.489, "kill"),
        ),
        26.0,
    ),
    "a level waited for a read that was never begun": Script(
        "87",
        {
            **_BASE,
            "flushDiskType": "SYNC_FLUSH",
            "enableScheduleAsyncDeliver": "false",
            "scheduleDeliverBatchSize": "1",
        },
        (
            Action(
                5.040,
                "burst",
                {"topic": "orders", "queue": 0, "size": 10, "how": "level", "level": 4, "count": 120, "spread_ms": 0},
            ),
            Action(6.025, "kill"),
            *_evicted(15.0),
        ),
        11.0,
    ),
    "what a process before could not sync was in memory only, and nothing wrote it again": Script(
        "124",
        {**_BASE, "flushDiskType": "SYNC_FLUSH", "scheduleDeliverBatchSize": "1"},
        (
            Action(0.506, "fail", {"kind": "sync", "errno": "EIO", "where": "commitlog", "share": 0.5}),
            _send(0.513, "mails", 0, 10, how="timer", delay_ms=3000),
            Action(0.606, "fail no more"),
            _send(0.641, "orders", 1, 10, how="timer", delay_ms=1000),
            Action(0.706, "power cut"),
        ),
        5.0,
    ),
}
