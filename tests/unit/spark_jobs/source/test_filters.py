"""Filters keep exactly the records within the given spans."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.record import StoredMessage
from duemq.spark_jobs.source.filters import ALL, Filters
from tests.unit.spark_jobs.columns.test_records import log_of, walked

MESSAGES = st.lists(
    st.builds(
        StoredMessage,
        queue_id=st.just(0),
        queue_offset=st.integers(0, 20),
        born_timestamp=st.just(1),
        born_host=st.just(bytes(8)),
        store_timestamp=st.integers(0, 100),
        store_host=st.just(bytes(8)),
        body=st.just(b"x"),
        topic=st.just("orders"),
    ),
    max_size=12,
)
SPANS = st.just(ALL) | st.tuples(st.integers(-1, 101), st.integers(-1, 101))


@given(MESSAGES, SPANS, st.tuples(st.integers(0, 12), st.integers(0, 12)) | st.none(), st.integers(-1, 1))
def test_spans(messages: list[StoredMessage], times: tuple[int, int], between: tuple[int, int] | None, by: int) -> None:
    records = walked(log_of(messages, 0), base=0).records
    starts = [*records.physical_offset.tolist(), 1 << 40]
    offsets = ALL
    if between is not None:
        offsets = tuple(starts[min(number, len(starts) - 1)] + by for number in between)
    found: Filters = pickle.loads(pickle.dumps(Filters(store_ms=times, physical_offset=offsets)))
    kept = found.keep(records)
    assert kept.physical_offset.tolist() == [
        message.physical_offset
        for message in messages
        if times[0] <= message.store_timestamp < times[1] and offsets[0] <= message.physical_offset < offsets[1]
    ]
