"""Analyses for reports, without a store behind them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from duemq.spark_jobs.analyse.analysis import (
    Ahead,
    Analysis,
    BusySecond,
    Count,
    GroupAtQueue,
    HeatCell,
    Key,
    LatenessFigures,
    LatePoint,
    SentBack,
    Space,
    StoreInCluster,
    TopicSize,
    Traffic,
)
from duemq.spark_jobs.analyse.forecast import Episode, Forecast, LateSecond
from duemq.spark_jobs.analyse.history import Lag, Listed, Night, RunFigures
from duemq.spark_jobs.audit.audit import Cluster, Input, Lateness, Missing, Offender, Summary
from duemq.spark_jobs.audit.starts import StartOutcome

MONDAY = 1_763_337_600_000
"""2025-11-17 00:00:00 UTC."""
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;<!--{{ 7*7 }}"
TOPICS = ["orders", "payments", "reminders", "invoices", "carts", "mails", "pushes", "audits", "others"]


def summary(**changes: Any) -> Summary:
    """An audit of an empty store."""
    nothing = dict.fromkeys(("delivered", "twice", "cancelled", "pending", "lost", "destroyed"), 0)
    known: dict[str, Any] = {
        **nothing,
        "store": "/var/lib/duemq",
        "written_by": "duemq",
        "is_running": False,
        "made_ms": MONDAY,
        "begin": 0,
        "end": 0,
        "records": 0,
        "scheduled": 0,
        "unreachable": 0,
        "starts": [],
        "levels": dict(nothing),
        "timers": dict(nothing),
        "overdue": 0,
        "superfluous": 0,
        "unclaimed": 0,
        "expired": 0,
        "lateness": Lateness(0, 0, 0.0, {}),
        "damaged": 0,
        "damages": [],
        "corrupt": None,
        "corruptions": [],
        "offenders": [],
        "inputs": [],
        "inputs_sha256": hashlib.sha256(b"").hexdigest(),
        "digest": hashlib.sha256(b"digest").hexdigest(),
    }
    return Summary(**known | changes)


def analysis(**changes: Any) -> Analysis:
    """An analysis of an empty store."""
    known: dict[str, Any] = {
        "store": "/var/lib/duemq",
        "made_ms": MONDAY,
        "first_ms": 0,
        "last_ms": 0,
        "bytes": 0,
        "audit": summary(),
        "key_error": 0,
        "duplicates": 0,
        "traffic_step_ms": MINUTE,
        "lateness_step_ms": 1000,
        "ahead_step_ms": 1000,
        "overdue": 0,
        "forecast": Forecast(0.0, 0, 0, 0, [], []),
    }
    lists = (
        "traffic topics producers keys retries late_by_topic late_by_level late_by_hour lateness heat ahead busiest"
        " consumers space"
    )
    return Analysis(**known | {name: [] for name in lists.split()} | changes)


def offender(number: int, what: str, **changes: Any) -> Offender:
    known: dict[str, Any] = {
        "what": what,
        "physical_offset": 1_000_000 + number * 377,
        "kind": "timer" if number % 3 else "level",
        "topic": TOPICS[number % 5],
        "unique_key": f"7F0000010{number:07X}18B4AAC2{number:08X}",
        "keys": f"order-{number}",
        "store_ms": MONDAY + number * 1234,
        "due_ms": MONDAY + HOUR + number * 1234,
        "deliveries": 2 if what == "twice" else 0,
        "delivered_ms": MONDAY + HOUR + number * 1234 + 17 if what == "twice" else None,
        "delivered_offset": 5_000_000 + number * 377 if what == "twice" else None,
        "last_delivered_ms": MONDAY + 2 * HOUR + number * 1234 + 29 if what == "twice" else None,
        "last_delivered_offset": 9_000_000 + number * 377 if what == "twice" else None,
    }
    return Offender(**known | changes)


def small(**changes: Any) -> Analysis:
    """A store of one minute: one point in each curve."""
    known: dict[str, Any] = {
        "first_ms": MONDAY,
        "last_ms": MONDAY + 1000,
        "bytes": 900,
        "audit": summary(
            records=4,
            end=900,
            scheduled=2,
            delivered=1,
            pending=1,
            levels={"delivered": 1, "twice": 0, "cancelled": 0, "pending": 1, "lost": 0},
            lateness=Lateness(1, 0, 3.0, {"p50": 3, "p90": 3, "p99": 3, "p99.9": 3, "p100": 3}),
            inputs=[Input(0, 900, hashlib.sha256(b"x").hexdigest(), 4)],
        ),
        "traffic": [Traffic(MONDAY, 1, 2, 1, 0, 900)],
        "topics": [TopicSize("orders", 1, 0, 1, 0, 400, 16, 16, MONDAY, MONDAY)],
        "producers": [Count("10.0.0.7", 3, 600)],
        "late_by_topic": [LatenessFigures("orders", 1, 0, 3, 3, 3, 3)],
        "late_by_level": [LatenessFigures("level 1 (1 s)", 1, 0, 3, 3, 3, 3)],
        "late_by_hour": [LatenessFigures("00", 1, 0, 3, 3, 3, 3)],
        "lateness": [LatePoint(MONDAY, 1, 3, 3, 3)],
        "heat": [HeatCell(0, 0, 1, 3)],
        "ahead": [Ahead(MONDAY + HOUR, "orders", 1)],
        "busiest": [BusySecond(MONDAY + HOUR, 1)],
        "consumers": [GroupAtQueue("billing", "orders", 0, 1, 2, 1, 500)],
        "forecast": Forecast(120.0, 0, 1, 0, [], [], "fastest"),
    }
    return analysis(**known | changes)


def week(seed: int = 1) -> Analysis:
    """Seven days of traffic with a bad hour, messages lost and delivered twice, and a busy time ahead."""
    chance = random.Random(seed)
    step, end = 10 * MINUTE, MONDAY + 7 * DAY
    traffic, lateness = [], []
    for start in range(MONDAY, end, step):
        hour = start % DAY / HOUR
        load = 0.15 + max(0.0, 1 - abs(hour - 13) / 9) + (1.4 if abs(hour - 9) < 0.2 else 0)
        sent = int(load * 90_000 * chance.uniform(0.85, 1.15))
        traffic.append(Traffic(start, sent, sent // 2, int(sent * 0.48), sent // 90, sent * 412))
        bad = 400 if MONDAY + 3 * DAY + 9 * HOUR <= start < MONDAY + 3 * DAY + 11 * HOUR else 1
        p50 = int(chance.uniform(2, 6) * (1 + load) * bad)
        lateness.append(LatePoint(start, sent // 2, p50, p50 * chance.randint(5, 9), p50 * chance.randint(12, 90)))
    heat = [
        HeatCell(at // 60, at % 60, int(900 * (0.1 + max(0, 1 - abs(at - 780) / 560)) * (5 if at % 30 == 0 else 1)),
                 int(chance.lognormvariate(3.2, 0.8) * (300 if 540 <= at < 600 else 1)))
        for at in range(1440)
        if not 200 <= at < 215
    ]  # fmt: skip
    ahead = [
        Ahead(end + i * 15 * MINUTE, topic, int(chance.uniform(200, 900) * (9 - k) * (1 + 4 * (i % 96 == 36))))
        for i in range(300)
        for k, topic in enumerate(TOPICS)
        if chance.random() < 0.9
    ]
    late = [LateSecond(end + 9 * HOUR + i * 1000, 9000, 200 * min(i, 300 - i)) for i in range(1, 300)]
    late += [LateSecond(end + 33 * HOUR + i * 1000, 7000, 90 * i) for i in range(1, 60)]
    delivered, pending = 23_456_789, 4_700_123
    offenders = [offender(i, "lost") for i in range(3)] + [offender(i, "twice") for i in range(3, 12)]
    audit = summary(
        is_running=True,
        begin=1 << 30,
        end=(1 << 30) + 21_987_654_321,
        records=60_123_456,
        scheduled=delivered + pending + 12_345 + 3 + 9,
        delivered=delivered,
        cancelled=12_345,
        pending=pending,
        lost=3,
        twice=9,
        levels={"delivered": 13_456_789, "twice": 6, "cancelled": 0, "pending": 700_123, "lost": 1},
        timers={"delivered": 10_000_000, "twice": 3, "cancelled": 12_345, "pending": 4_000_000, "lost": 2},
        overdue=812,
        superfluous=11,
        unclaimed=2,
        expired=40_321,
        lateness=Lateness(delivered, 4, 81.25, {"p50": 6, "p90": 42, "p99": 911, "p99.9": 21_400, "p100": 154_000}),
        damaged=2,
        damages=[(5_368_709_120, 4096, "the checksum of the body is another"), (9_663_676_416, 1 << 30, "no file")],
        offenders=offenders,
        inputs=[Input(i << 27, (i + 1) << 27, hashlib.sha256(b"%d" % i).hexdigest(), 366_000) for i in range(164)],
        signature="ab" * 64,
    )  # fmt: skip

    def late_row(name: str, count: int, scale: int) -> LatenessFigures:
        return LatenessFigures(name, count, 0, 3 * scale, 14 * scale, 90 * scale, 700 * scale)

    return analysis(
        store="/var/lib/duemq",
        made_ms=end + 2 * HOUR,
        first_ms=MONDAY,
        last_ms=end,
        bytes=21_987_654_321,
        audit=audit,
        traffic=traffic,
        traffic_step_ms=step,
        topics=[
            TopicSize(topic, 9_000_000 // k, 5_000_000 // k, 4_000_000 // k, 0, 9 << 30 >> k, 256, 4096, MONDAY, end)
            for k, topic in enumerate([*TOPICS, "SCHEDULE_TOPIC_XXXX", *(f"topic-{i}" for i in range(30))], 1)
        ],
        producers=[Count(f"10.1.{i}.7", 9_000_000 // (i + 1), 3 << 30 >> i) for i in range(12)],
        keys=[Key(TOPICS[i % 5], f"customer-{chance.randint(1000, 9999)}", 90_000 // (i + 1)) for i in range(50)],
        key_error=17,
        duplicates=391,
        retries=[SentBack("billing", "orders", i, 4000 >> i, False) for i in range(1, 6)]
        + [SentBack("billing", "orders", 16, 37, True)],
        late_by_topic=[late_row(topic, 4_000_000 >> k, 1 + k * k) for k, topic in enumerate(TOPICS)],
        late_by_level=[late_row(f"level {k} ({5 * k} s)", 900_000 >> k, k) for k in range(1, 18)]
        + [late_row("timer", 9_000_000, 2)],
        late_by_hour=[late_row(f"{k:02}", 1_000_000, 400 if k in {9, 10} else 1 + k % 3) for k in range(24)],
        lateness=lateness,
        lateness_step_ms=step,
        heat=heat,
        ahead=ahead,
        ahead_step_ms=15 * MINUTE,
        busiest=[BusySecond(end + 9 * HOUR + i * 1000, 41_000 - i * 613) for i in range(50)],
        overdue=812,
        consumers=[
            GroupAtQueue(group, topic, queue, 1_000_000, 1_000_000 + lag, lag, lag * 7)
            for group, topic, lag in (("billing", "orders", 41_234), ("search", "orders", 0), ("mailer", "mails", 987))
            for queue in range(4)
        ] + [GroupAtQueue("gone", "dropped", 0, 77, None, None, None)],
        space=[
            Space("delivered", delivered, 11_111_111_111),
            Space("cancelled", 12_345, 5 << 20),
            Space("ended transactions", 991, 430_000),
        ],
        forecast=Forecast(
            8412.0, 611, pending, 91_234, late,
            [
                Episode(end + 9 * HOUR, end + 9 * HOUR + 400_000, 2_700_000, 30_000),
                Episode(end + 33 * HOUR, end + 33 * HOUR + 70_000, 413_000, 5310),
            ],
            "measured",
        ),
    )  # fmt: skip


def offenders() -> Analysis:
    """Thousands of messages that were lost or delivered twice, some with names of hundreds of characters."""
    made = week()
    made.audit.lost, made.audit.twice = 2300, 900
    made.audit.offenders = [offender(i, "lost" if i % 3 else "twice") for i in range(100)]
    for i, one in enumerate(made.audit.offenders[::7]):
        one.topic = "a-topic-of-a-team-that-likes-to-say-it-all-" * (1 + i % 5)
        one.keys = "customer:" + "x" * 60 * (1 + i % 11)
        one.unique_key = "FD00" + "0" * 48 + f"{i:04X}"
    return made


def history(count: int = 30, made_ms: int = MONDAY + 7 * DAY + 2 * HOUR) -> list[RunFigures]:
    """Nightly runs, the last one at a given time."""
    chance = random.Random(count)
    groups = [("billing", "orders"), ("search", "orders"), ("mailer", "reminders")]
    runs = []
    for i in range(count):
        bad = 60 if i == count // 2 else 1
        lags = [
            Lag(group, topic, lag := chance.randint(0, 40_000) * (3 - k) // 3, lag * 7)
            for k, (group, topic) in enumerate(groups)
            if not (k == 2 and i < 9)
        ]
        runs.append(
            RunFigures(
                made_ms=made_ms - (count - 1 - i) * DAY,
                store="/var/lib/duemq",
                bytes=(16 << 30) + i * (200 << 20),
                scheduled=27_000_000 + i * 40_000,
                delivered=23_000_000,
                pending=4_000_000,
                overdue=chance.randint(0, 900),
                lost=3 if i >= count - 2 else 0,
                twice=9 if i == count - 1 else 0,
                p50_ms=chance.randint(4, 8) * bad,
                p99_ms=chance.randint(200, 900) * bad,
                lags=lags,
            )
        )
    return runs


def hostile() -> Analysis:
    """Names that would break a page, and numbers that would break a scale."""
    long = "a-very-long-name-" * 400
    unseen = "reversed\u202eback\u2028line\x00\x07\ud800"
    names = [HOSTILE, long, unseen, "<b>bold</b>", "'\"`", "${x}", "\U0001f680 rocket"]
    huge = 1 << 62
    made = week()
    made.store = made.audit.store = f"/data/{HOSTILE}"
    made.topics = [TopicSize(name, huge, huge, huge, huge, huge, 1 << 40, 1 << 50, 0, huge) for name in names]
    made.producers = [Count(name, huge, huge) for name in names]
    made.keys = [Key(name, name, huge) for name in names]
    made.retries = [SentBack(name, name, 16, huge, True) for name in names]
    made.consumers = [GroupAtQueue(name, name, 7, huge, huge, huge, huge) for name in names]
    made.late_by_topic = [LatenessFigures(name, huge, huge, -huge, 0, huge // 2, huge) for name in names]
    made.ahead = [Ahead(MONDAY + i * HOUR, name, 10**i) for i, name in enumerate(names)]
    made.ahead += [Ahead(huge, "after all calendars", 1), Ahead(-5, "before", 1)]
    made.busiest = [BusySecond(huge, huge), BusySecond(MONDAY, 3)]
    made.lateness = [LatePoint(MONDAY, 1, -500, 3, 10**15), LatePoint(MONDAY + DAY, 1, 0, 0, 0)]
    made.lateness_step_ms = HOUR
    made.audit.offenders = [
        offender(i, "lost", topic=name, unique_key=name, keys=name, due_ms=huge) for i, name in enumerate(names)
    ]
    made.audit.damages = [(0, 5, name) for name in names]
    return made


def many_nights() -> list[Listed]:
    """Thirty nights, the last two with problems."""
    made = []
    for i, one in enumerate(reversed(history(30))):
        mood = ("bad", "warn", "good")[min(i, 2)]
        counts: dict[str, Any] = {
            "destroyed": 0,
            "unclaimed": 0,
            "damaged": 0,
            "max_ms": 154_000,
            "compared_ms": MONDAY,
            "new": i,
        }
        told = Night(duemq_night=1, run=one, mood=mood, headline="So it was.", **counts, worse=0)
        made.append(Listed(f"2025-01-{i + 1:02}T000000Z", told))
    return made


def write_audit(audit: Summary, directory: Path) -> None:
    """The files of an audit, with all of its offenders."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "audit.json").write_bytes(msgspec.json.encode(audit))
    text, number = pa.string(), pa.int64()
    types = {"what": text, "kind": text, "topic": text, "unique_key": text, "keys": text}
    names = [field.name for field in msgspec.structs.fields(Offender)]
    schema = pa.schema([(name, types.get(name, number)) for name in names])
    table = pa.Table.from_pylist([msgspec.structs.asdict(one) for one in audit.offenders], schema)
    table = table.rename_columns(["status" if name == "what" else name for name in names])
    pq.write_table(table, directory / "offenders.parquet")


def cluster(count: int = 14) -> Analysis:
    """A cluster of a number of stores and one more, which could not be read, with problems in the first and the last of
    them."""
    made = week()
    names = [f"/data/broker-{number:02}/store" for number in range(count)]
    gone = Missing("/data/broker-zz/store", f"has no commitlog/, so it is not a duemq or RocketMQ store ({HOSTILE})")
    made.store = made.audit.store = "/data/*/store"
    made.audit.cluster = Cluster([*names, gone.store], [gone])
    made.audit.begin, made.audit.end = 0, 21_987_654_321
    made.audit.written_by = "4.9.7, duemq"
    made.audit.unreachable = 3
    made.audit.starts = [StartOutcome("4.9.7", True, 97, 3, 0, ["consumequeue/x lacks units 1 to 3"], names[1])]
    for number, one in enumerate(made.audit.offenders):
        one.store = names[0 if number % 2 else -1]
    made.audit.damages = [(at, size, f"{names[2]}: {why}") for at, size, why in made.audit.damages]
    made.audit.inputs = [
        Input(i << 30, (i + 1) << 30, hashlib.sha256(b"%d" % i).hexdigest(), 4_000_000, name)
        for i, name in enumerate(names)
    ]
    for number, consumer in enumerate(made.consumers):
        consumer.store = names[number % count]
    moods = {0: ("bad", "3 scheduled messages were lost."), count - 1: ("warn", "Nothing was lost, but it came twice.")}
    made.stores = [
        StoreInCluster(
            store=name,
            report=f"../2025-11-24T0200{number:02}Z/report.html",
            mood=moods.get(number, ("good", ""))[0],
            headline=moods.get(number, ("", "Every scheduled message was delivered."))[1],
            last_ms=MONDAY + 7 * DAY - number * 1000,
            bytes=made.bytes // count,
            records=made.audit.records // count,
            scheduled=made.audit.scheduled // count,
            delivered=made.audit.delivered // count,
            cancelled=100,
            pending=made.audit.pending // count,
            overdue=58 if number == 3 else 0,
            lost=3 if number == 0 else 0,
            twice=9 if number == count - 1 else 0,
            destroyed=0,
            unclaimed=0,
            damaged=0,
            p50_ms=6,
            p99_ms=100 * number,
            max_ms=11_000 * number,
        )
        for number, name in enumerate(names)
    ]
    made.stores.append(StoreInCluster(store=gone.store, why=gone.why))
    return made
