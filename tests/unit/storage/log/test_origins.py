"""The origins that records name: record by record, as recovery reads them, and many at once, as jobs do."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from duemq.storage.log.origins import NO_ORIGIN, Origins, origins_of
from duemq.storage.log.scan import ScannedRecord

COMMIT = 2 << 2


def record(
    topic: bytes, promise: int, at: int = 1000, flag: int = 0, properties: bytes = b"", stored: int = 5
) -> ScannedRecord:
    return ScannedRecord(at, 100, 0, 0, flag, stored, topic, properties, promise, 0, 0)


@given(
    st.integers(-2, 2000) | st.integers(-2, 2),
    st.integers(0, 1500) | st.integers(0, 2),
    st.sampled_from([0, 1, 4, COMMIT, 12, 16 | COMMIT]),
)
def test_one_and_many_are_the_same(promise: int, at: int, flag: int) -> None:
    one = Origins()
    one.look(record(b"orders", promise, at, flag))
    many = origins_of(np.array([promise]), np.array([flag]), np.array([at]))
    assert (list(one.delivered) or [NO_ORIGIN]) == many.tolist()


def test_who_names_one() -> None:
    """Deliveries, rolls and deletions name their origin. In other records the same field has the deliver time, or the
    offset of a half message."""
    origins = Origins()
    for each in (
        record(b"orders", 0),
        record(b"orders", 400),
        record(b"orders", -1),
        record(b"orders", 500, flag=COMMIT),
        record(b"SCHEDULE_TOPIC_XXXX", 600),
        record(b"rmq_sys_wheel_timer", 700),
        record(b"rmq_sys_wheel_timer", 800, properties=b"TIMER_ROLL_TIMES\x011"),
        record(b"rmq_sys_wheel_timer", 900, properties=b"TIMER_DEL_UNIQKEY\x01a"),
        record(b"rmq_sys_wheel_timer", 1_700_000_000_000, properties=b"TIMER_ROLL_TIMES\x011"),
    ):
        origins.look(each)
    assert list(origins.delivered) == [400, 0]
    assert list(origins.withdrawn) == [800, 900]


def test_the_latest_time_is_not_that_of_the_last_record_where_the_clock_was_set_back() -> None:
    origins = Origins()
    for stored in (1000, 3000, 2000):
        origins.look(record(b"orders", 400, stored=stored))
    origins.look(record(b"orders", 0, stored=9000))  # no delivery
    assert origins.newest_ms == 3000
