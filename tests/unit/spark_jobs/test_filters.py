"""Filters leave every row that Spark's own filter would keep."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from protocol.record import StoredMessage
from spark_jobs.filters import Filters
from spark_jobs.roles import NAMES, Roles
from tests.unit.spark_jobs.test_records import log_of, walked

TOPICS = ("orders", "mail", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NUMBERS = ("physical_offset", "store_ms", "born_ms", "queue_offset", "queue_id", "reconsume_times", "size", "flag")
MESSAGES = st.lists(
    st.builds(
        StoredMessage,
        queue_id=st.integers(0, 4),
        flag=st.integers(0, 3),
        queue_offset=st.integers(0, 20),
        born_timestamp=st.integers(0, 100),
        born_host=st.just(bytes(8)),
        store_timestamp=st.integers(0, 100),
        store_host=st.just(bytes(8)),
        reconsume_times=st.integers(0, 3),
        body=st.just(b"x"),
        topic=st.sampled_from(TOPICS),
        properties_text=st.sampled_from(("", "TAGS\x01a", "REAL_TOPIC\x01orders\x02TIMER_OUT_MS\x0112")),
    ),
    max_size=12,
)
Row = dict[str, Any]
COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    EqualNullSafe: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
}


def rows_of(messages: list[StoredMessage]) -> list[Row]:
    records = walked(log_of(messages, 0), base=0).records
    roles = Roles(records).role.tolist()
    return [
        {
            "physical_offset": m.physical_offset,
            "size": size,
            "topic": m.topic,
            "queue_id": m.queue_id,
            "queue_offset": m.queue_offset,
            "store_ms": m.store_timestamp,
            "store_time": EPOCH + timedelta(milliseconds=m.store_timestamp),
            "born_ms": m.born_timestamp,
            "born_time": EPOCH + timedelta(milliseconds=m.born_timestamp),
            "reconsume_times": m.reconsume_times,
            "flag": m.flag,
            "tags": m.get_property("TAGS"),
            "role": NAMES[role],
            "kind": NAMES[role],
        }
        for m, size, role in zip(messages, records.sizes.tolist(), roles, strict=True)
    ]


def is_kept(item: Filter, row: Row) -> bool:
    """What Spark does with a row: what is not known to be true is not kept."""
    if isinstance(item, Not):
        return not is_kept(item.child, row)
    attribute = item.attribute  # type: ignore[attr-defined]
    if attribute[0] not in row or len(attribute) > 1:
        return True  # a column of a map, which no row here has: any may be kept
    value = row[attribute[0]]
    if isinstance(item, IsNull | IsNotNull):
        return (value is None) == isinstance(item, IsNull)
    if isinstance(item, EqualNullSafe) and (value is None or item.value is None):
        return value is item.value
    if value is None:
        return False
    if isinstance(item, In):
        return value in item.value
    if isinstance(item, StringStartsWith):
        return str(value).startswith(item.value)
    return item.value is not None and COMPARISONS[type(item)](value, item.value)  # type: ignore[attr-defined]


def times() -> st.SearchStrategy[datetime]:
    return st.integers(-1000, 101_000).map(lambda us: EPOCH + timedelta(microseconds=us))


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    kind = draw(st.sampled_from(list(COMPARISONS)))
    choice = draw(st.integers(0, 6))
    if choice == 0:
        return kind((draw(st.sampled_from(NUMBERS)),), draw(st.integers(-1, 130)))  # type: ignore[no-any-return]
    if choice == 1:
        return kind((draw(st.sampled_from(("store_time", "born_time"))),), draw(times()))  # type: ignore[no-any-return]
    if choice == 2:
        return kind((draw(st.sampled_from(("topic", "tags"))),), draw(st.sampled_from((*TOPICS, "a"))))  # type: ignore[no-any-return]
    if choice == 3:
        column = draw(st.sampled_from(("topic", "role", "queue_id", "tags")))
        values = st.integers(0, 4) if column == "queue_id" else st.sampled_from((*TOPICS, *NAMES, "a"))
        return In((column,), tuple(draw(st.lists(values, max_size=4))))
    if choice == 4:
        return kind(("role",), draw(st.sampled_from(NAMES)))  # type: ignore[no-any-return]
    if choice == 5:
        return draw(st.sampled_from((IsNull(("tags",)), IsNotNull(("topic",)), StringStartsWith(("topic",), "m"))))
    return draw(
        st.sampled_from(
            (Not(EqualTo(("topic",), "mail")), EqualTo(("properties", "topic"), "mail"), EqualTo(("topic",), None))
        )
    )


@given(MESSAGES, st.lists(filters(), max_size=4))
def test_no_row_is_dropped_that_spark_would_keep(messages: list[StoredMessage], chosen: list[Filter]) -> None:
    rows = rows_of(messages)
    wanted = {row["physical_offset"] for row in rows if all(is_kept(item, row) for item in chosen)}
    found = Filters()
    found.add(chosen)
    found = pickle.loads(pickle.dumps(found))
    records = found.keep(walked(log_of(messages, 0), base=0).records)
    kept = set(records.physical_offset.tolist())
    if len(records):
        mask = found.role_mask(Roles(records).role)
        kept = kept if mask is None else set(records.physical_offset[mask].tolist())
    assert kept >= wanted
    for row in rows:
        if row["physical_offset"] in wanted:
            for name in ("physical_offset", "store_ms"):
                low, high = found.span(name)
                assert low <= row[name] <= high
            assert found.topics is None or row["topic"] in found.topics


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (EqualTo(("topic",), "mail"), 1),
        (In(("topic",), ("mail", "orders")), 2),
        (GreaterThan(("store_ms",), 10), 2),
        (GreaterThanOrEqual(("store_time",), EPOCH + timedelta(milliseconds=11)), 2),
        (LessThan(("queue_offset",), 1), 1),
        (LessThanOrEqual(("queue_id",), 1), 2),
        (EqualTo(("physical_offset",), 0), 1),
        (EqualTo(("role",), "timer"), 3),  # roles are looked at later
    ],
)
def test_what_is_understood_leaves_out_rows(chosen: Filter, count: int) -> None:
    messages = [
        StoredMessage(
            queue_id=i, queue_offset=i, born_timestamp=1, born_host=bytes(8), store_timestamp=10 + i,
            store_host=bytes(8), body=b"x", topic=topic,
        )
        for i, topic in enumerate(("mail", "orders", "rmq_sys_wheel_timer"))
    ]  # fmt: skip
    found = Filters()
    found.add([chosen])
    records = walked(log_of(messages, 0), base=0).records
    assert len(found.keep(records)) == count


def test_filters_on_one_column_are_taken_together() -> None:
    found = Filters()
    found.add([In(("topic",), ("a", "b")), EqualTo(("topic",), "b"), GreaterThan(("store_ms",), 5)])
    found.add([LessThanOrEqual(("store_ms",), 9), GreaterThan(("store_ms",), 7)])
    assert found.topics == frozenset("b")
    assert found.span("store_ms") == (8, 9)
    found.add([EqualTo(("topic",), "c")])
    assert found.topics == frozenset()
