"""The figures of a cluster, compared with counts over the events of all its stores together."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.record import StoredMessage
from duemq.spark_jobs.analyse.analyse import SERIES, TOP, Analysed, Material, figures_of, load_of
from duemq.spark_jobs.analyse.analysis import Analysis, LatenessFigures
from duemq.spark_jobs.analyse.cluster import StoreRun, join
from duemq.spark_jobs.analyse.forecast import Forecast
from duemq.spark_jobs.analyse.usage import RangeUsage, Usage, UsageObserver
from duemq.spark_jobs.audit.audit import Missing, lateness_of, sign, verify
from duemq.spark_jobs.audit.figures import (
    CANCELLED,
    CASE,
    DELIVERED,
    LOST,
    PENDING,
    STATUSES,
    TWICE,
    UNCLAIMED,
    Figures,
)
from duemq.spark_jobs.audit.steps import BARS, POINTS, STEPS_MS
from duemq.spark_jobs.store.roles import LEVEL, MESSAGE, TIMER, Roles
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import Segment
from tests.unit.spark_jobs.analyse.test_usage import MESSAGES
from tests.unit.spark_jobs.columns.test_records import log_of, walked
from tests.unit.spark_jobs.report import report_analyses as given_by

TABLES_MS = ([1000, 5000, 10_000], [1000, 7000, 10_000])
TOPICS = {11: "orders", 12: "mails", 13: "carts"}


class Event(NamedTuple):
    """The outcome of a scheduled message, and its store."""

    store: int
    offset: int
    size: int
    due_ms: int
    level: int
    topic: int
    status: int
    late_ms: int


EVENT = st.builds(
    Event,
    store=st.integers(0, 3),
    offset=st.integers(0, 2000),
    size=st.integers(91, 300),
    due_ms=st.integers(0, 3_000_000) | st.integers(0, 300_000_000) | st.integers(0, 60_000_000_000),
    level=st.integers(0, 3),
    topic=st.sampled_from(sorted(TOPICS)),
    status=st.sampled_from((DELIVERED, DELIVERED, TWICE, CANCELLED, PENDING, PENDING, LOST)),
    late_ms=st.integers(-300, 300) | st.integers(-1000, 3_000_000),
)
STORES = st.lists(st.tuples(st.sampled_from(STEPS_MS[:14]), st.sampled_from(TABLES_MS)), min_size=4, max_size=4)
"""For each store the step of its curve, and its table of levels."""


def cases_of(events: Iterable[Event]) -> np.ndarray[Any, Any]:
    rows = list(events)
    cases = np.zeros(len(rows), CASE)
    for case, one in zip(cases, rows, strict=True):
        count = {DELIVERED: 1, TWICE: 2}.get(one.status, 0)
        case["physical_offset"], case["size"], case["due_ms"] = one.offset, one.size, one.due_ms
        case["delay_level"], case["topic_hash"], case["status"] = one.level, one.topic, one.status
        case["deliveries"], case["origin"] = count, -1
        if count:
            case["first_ms"], case["last_ms"] = one.due_ms + one.late_ms, one.due_ms + one.late_ms + 5
    return cases


class Log:
    """The part of a store that is read for its keys."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def segment_of(self, offset: int) -> Segment | None:
        return Segment(0, "log", len(self.data)) if 0 <= offset < len(self.data) else None

    def read(self, _: str, at: int, size: int) -> bytes:
        return self.data[at : at + size]

    def read_into(self, _: str, at: int, buffer: memoryview) -> int:
        part = self.data[at : at + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


def material_of(events: Iterable[Event], messages: list[StoredMessage], step_ms: int, delays_ms: list[int]) -> Material:
    data = log_of(messages, 0)
    observer = UsageObserver()
    records = walked(data, base=0).records
    observer.look(records, Roles(records))
    figures = Figures.of(cases_of(events), step_ms, 0)
    usage = Usage([RangeUsage.decode(observer.usage())])
    load = load_of(figures, 0, None)
    known = dict(enumerate(delays_ms, 1))
    return Material(cast(StoreFiles, Log(data)), figures, usage, step_ms, dict(TOPICS), known, load)


def percentiles_of(values: Sequence[int], percent: float) -> list[int]:
    """The values that count as a percentile: at an integer rank also the next one."""
    ordered = sorted(values)
    rank = percent * len(ordered) / 100
    return [ordered[min(max(math.ceil(at), 1), len(ordered)) - 1] for at in (rank - 1e-9, rank + 1e-9)]


def check_percentile(told: int, values: Sequence[int], percent: float) -> None:
    """Check that a percentile is exact up to 255 ms, beyond that to 1/128, and never above the maximum."""
    near = [
        abs(told - value) <= (0 if abs(value) < 256 else abs(value) / 128) for value in percentiles_of(values, percent)
    ]
    assert any(near), (told, percentiles_of(values, percent), percent)
    assert told <= max(values)


def check_late(found: Sequence[LatenessFigures], events: Iterable[Event], name: Callable[[Event], str]) -> None:
    groups = defaultdict[str, list[int]](list)
    for one in events:
        groups[name(one)].append(one.late_ms)
    assert {late.name: (late.count, late.early, late.max_ms) for late in found} == {
        key: (len(values), sum(value < 0 for value in values), max(values)) for key, values in groups.items()
    }
    for late in found:
        for told, percent in ((late.p50_ms, 50), (late.p90_ms, 90), (late.p99_ms, 99)):
            check_percentile(told, groups[late.name], percent)


def level_name(one: Event, delays_ms: list[int]) -> str:
    return f"level {one.level} ({delays_ms[one.level - 1] / 1000:g} s)" if one.level else "timer"


@given(st.lists(EVENT, max_size=60), STORES)
def test_what_was_delivered_and_what_waits(events: list[Event], stores: list[tuple[int, list[int]]]) -> None:
    """The figures of a cluster are those of one set of events, however these are spread over stores with different
    steps and tables."""
    materials = [
        material_of((one for one in events if one.store == number), [], *stores[number]) for number in range(4)
    ]
    found = figures_of(materials)
    done = [one for one in events if one.status in (DELIVERED, TWICE)]
    check_late(found["late_by_topic"], done, lambda one: TOPICS[one.topic])
    check_late(found["late_by_level"], done, lambda one: level_name(one, stores[one.store][1]))
    check_late(found["late_by_hour"], done, lambda one: f"{one.due_ms // 3_600_000 % 24:02}")
    minutes = defaultdict[tuple[int, int], list[int]](list)
    for one in done:
        minutes[one.due_ms // 3_600_000 % 24, one.due_ms // 60_000 % 60].append(one.late_ms)
    assert {(cell.hour, cell.minute): cell.due for cell in found["heat"]} == {
        at: len(values) for at, values in minutes.items()
    }
    for cell in found["heat"]:
        check_percentile(cell.p99_ms, minutes[cell.hour, cell.minute], 99)
    step = found["lateness_step_ms"]
    assert step in STEPS_MS
    assert all(step % of_store == 0 for of_store, _ in stores), "no store's point is cut in two"
    points = defaultdict[int, list[int]](list)
    for one in done:
        points[one.due_ms // step * step].append(one.late_ms)
    assert {point.start_ms: (point.count, point.max_ms) for point in found["lateness"]} == {
        start: (len(values), max(values)) for start, values in points.items()
    }
    for point in found["lateness"]:
        check_percentile(point.p50_ms, points[point.start_ms], 50)
        check_percentile(point.p99_ms, points[point.start_ms], 99)
    late = lateness_of([one.figures for one in materials])
    values = [one.late_ms for one in done]
    assert (late.count, late.early) == (len(values), sum(ms < 0 for ms in values))
    if values:
        assert abs(late.mean_ms - sum(values) / len(values)) < 0.001
        for name, told in late.percentiles_ms.items():
            check_percentile(told, values, float(name[1:]))
    check_ahead(found, [one for one in events if one.status == PENDING])


def check_ahead(found: dict[str, Any], waits: list[Event]) -> None:
    seconds = Counter(one.due_ms // 1000 * 1000 for one in waits)
    assert [one.count for one in found["busiest"]] == sorted(seconds.values(), reverse=True)[:TOP]
    assert all(seconds[one.second_ms] == one.count for one in found["busiest"])
    step = found["ahead_step_ms"]
    assert len({one.topic for one in waits}) <= SERIES
    assert {(one.start_ms, one.topic): one.count for one in found["ahead"]} == Counter(
        (one.due_ms // 1000 * 1000 // step * step, TOPICS[one.topic]) for one in waits
    )
    assert len({one.start_ms for one in found["ahead"]}) <= BARS + len(waits) // 100 + 2
    assert found["forecast"].messages == len(waits)


@given(st.lists(st.tuples(st.integers(0, 2), MESSAGES), max_size=6))
def test_what_it_is_used_for(runs: list[tuple[int, list[StoredMessage]]]) -> None:
    """The usage figures are those of the records, however these are spread over stores."""
    per_store: list[list[StoredMessage]] = [[], [], []]
    for number, messages in runs:
        per_store[number] += messages
    found = figures_of([material_of([], messages, 1000, TABLES_MS[0]) for messages in per_store])
    every = [message for messages in per_store for message in messages]
    sizes = [size for messages in per_store for size in walked(log_of(messages, 0), base=0).records.sizes.tolist()]
    assert found["bytes"] == sum(sizes)
    step = found["traffic_step_ms"]
    stretches, counts = Counter[int](), Counter[int]()
    for message, size in zip(every, sizes, strict=True):
        stretches[message.store_timestamp // step * step] += size
        counts[message.store_timestamp // step * step] += 1
    assert {part.start_ms: part.bytes for part in found["traffic"]} == stretches
    told = {part.start_ms: part.messages + part.scheduled + part.delivered + part.other for part in found["traffic"]}
    assert told == counts
    assert len(told) <= POINTS
    topics = {topic.topic: topic for topic in found["topics"]}
    assert set(topics) == {message.topic for message in every}, "a topic that several stores have is one"
    for name, topic in topics.items():
        mine = [number for number, message in enumerate(every) if message.topic == name]
        assert topic.bytes == sum(sizes[number] for number in mine)
        assert topic.messages + topic.scheduled + topic.delivered + topic.other == len(mine)
        hours = [every[number].store_timestamp // 3_600_000 * 3_600_000 for number in mine]
        assert (topic.first_ms, topic.last_ms) == (min(hours), max(hours))
        bodies = sorted(len(every[number].body) for number in mine)
        assert topic.body_p50 // 2 <= bodies[(len(bodies) - 1) // 2] < max(topic.body_p50, 1)
    senders = Counter[str]()
    for messages in per_store:
        roles = Roles(walked(log_of(messages, 0), base=0).records).role.tolist()
        senders.update(
            str(ipaddress.ip_address(message.born_host[:-4]))
            for message, role in zip(messages, roles, strict=True)
            if role in (MESSAGE, LEVEL, TIMER)
        )
    assert {one.name: one.count for one in found["producers"]} == senders
    keys = Counter((m.topic, m.get_property("KEYS")) for m in every if m.get_property("KEYS"))
    assert {(key.topic, key.key): key.count for key in found["keys"]} == keys
    assert [key.count for key in found["keys"]] == sorted(keys.values(), reverse=True)
    retries = Counter(
        ("g", m.get_property("RETRY_TOPIC") or "", m.reconsume_times, m.topic.startswith("%DLQ%"))
        for m in every
        if m.topic.startswith("%")
    )
    assert {(one.consumer_group, one.topic, one.attempt, one.is_dead): one.count for one in found["retries"]} == retries


def analysed(number: int, events: list[Event], step_ms: int, delays_ms: list[int]) -> StoreRun:
    """A store's run, with an audit counted here."""
    material = material_of(events, [], step_ms, delays_ms)
    counts = Counter(STATUSES[one.status] for one in events)
    kinds = [
        Counter(STATUSES[one.status] for one in events if bool(one.level) == is_level) for is_level in (True, False)
    ]
    name = f"/data/{number}/store"
    summary = given_by.summary(
        store=name,
        records=len(events) * 2,
        scheduled=len(events),
        begin=1000 * number,
        end=1000 * number + 500,
        lateness=lateness_of([material.figures]),
        levels=dict(kinds[0]),
        timers=dict(kinds[1]),
        offenders=[given_by.offender(one.offset, "lost") for one in events if one.status == LOST]
        + [given_by.offender(one.offset, "twice") for one in events if one.status == TWICE],
        **{status: counts[status] for status in STATUSES[:UNCLAIMED]},
    )
    analysis = given_by.analysis(store=name, audit=summary, last_ms=number, forecast=Forecast(0.0, 0, 0, 0, [], []))
    return StoreRun(Analysed(analysis, material), "", "")


@given(st.lists(EVENT, max_size=60), STORES)
def test_the_audit_of_all(events: list[Event], stores: list[tuple[int, list[int]]]) -> None:
    runs = [analysed(number, [one for one in events if one.store == number], *stores[number]) for number in range(4)]
    missing = Missing("/data/4/store", "is empty")
    names = [*(run.store for run in runs), missing.store]
    found: Analysis = join("/data/*/store", [run.analysed for run in runs], stores=names, missing=[missing], made_ms=7)
    summary = found.audit
    counts = Counter(STATUSES[one.status] for one in events)
    assert {status: getattr(summary, status) for status in STATUSES[:UNCLAIMED]} == {
        status: counts[status] for status in STATUSES[:UNCLAIMED]
    }
    assert (summary.scheduled, summary.records, summary.end) == (len(events), 2 * len(events), 2000)
    of_levels = Counter(STATUSES[one.status] for one in events if one.level)
    assert Counter(summary.levels) == of_levels
    assert Counter(summary.timers) == counts - of_levels
    values = [one.late_ms for one in events if one.status in (DELIVERED, TWICE)]
    assert summary.lateness.count == len(values)
    for name, told in summary.lateness.percentiles_ms.items():
        check_percentile(told, values, float(name[1:]))
    wrong = Counter((names[one.store], STATUSES[one.status]) for one in events if one.status in (LOST, TWICE))
    assert Counter((one.store, one.what) for one in summary.offenders) == wrong
    assert [one.what for one in summary.offenders] == sorted(one.what for one in summary.offenders), "lost before twice"
    assert [(one.store, one.why) for one in found.stores] == [
        *((run.store, None) for run in runs),
        (missing.store, missing.why),
    ]
    for member, run in zip(found.stores, runs, strict=False):
        assert member.lost == run.analysed.analysis.audit.lost
    # It is signed and verified as that of one store is, and names the missing store.
    sign(summary, None)
    assert verify(msgspec.json.encode(summary)).missing == [missing]
