"""Queues and tags codes of many texts at once are the same as those of each text alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.protocol.records import properties, record
from duemq.protocol.topics import HALF_TOPIC
from duemq.scheduler.delivery.targets import Targets, TopicHashes
from duemq.scheduler.timers.index.keys import key_of
from duemq.storage.log.copies import PackedRecords
from duemq.storage.store import MessageStore
from tests.support.messages import HOST
from tests.unit.scheduler.world import World

PIECES = st.sampled_from(
    [
        "TAGS\x01a",
        "TAGS\x01b",
        "TAGS\x01",
        "XTAGS\x01a",
        "KEYS\x01TAGS",
        "UNIQ_KEY\x0100",
        "UNIQ_KEY\x0111",
        "DELAY\x013",
        "REAL_TOPIC\x01T",
        "REAL_TOPIC\x01U",
        "XREAL_TOPIC\x01T",
        f"REAL_TOPIC\x01{HALF_TOPIC}",
        "REAL_TOPIC\x01../x",
        "REAL_QID\x010",
        "REAL_QID\x017",
        "REAL_QID\x01x",
    ]
)
TEXT = st.lists(PIECES, max_size=6).map("\x02".join)
OURS = st.builds(
    lambda tag, key, topic, queue_id: (
        f"TAGS\x01{tag}\x02UNIQ_KEY\x01{key}\x02DELAY\x011\x02REAL_TOPIC\x01{topic}\x02REAL_QID\x01{queue_id}"
    ),
    st.sampled_from("ab"),
    st.sampled_from(("00", "11")),
    st.sampled_from("TU"),
    st.integers(0, 9),
)
"""Properties as duemq's send handler stores them, all of one length."""


@pytest.fixture(scope="module")
def store() -> MessageStore:
    return World().store


def records_of(texts: list[str]) -> PackedRecords:
    encoded = [
        record.encode(
            record.StoredMessage(
                queue_id=0,
                born_timestamp=1,
                born_host=HOST,
                store_timestamp=1,
                store_host=HOST,
                body=b"body",
                topic="SCHEDULE_TOPIC_XXXX",
                properties_text=text,
            )
        )
        for text in texts
    ]
    sizes = np.array([len(data) for data in encoded])
    return PackedRecords(b"".join(encoded), np.zeros(len(texts), np.int64), sizes)


def expected(text: str) -> tuple[tuple[str, int] | None, int]:
    found = properties.parse(text)
    topic, queue_id = found.get("REAL_TOPIC", ""), found.get("REAL_QID", "")
    is_good = topic in ("T", "U") and queue_id.isdecimal()
    return ((topic, int(queue_id)) if is_good else None), properties.tags_code(found.get("TAGS"))


@given(st.one_of(st.lists(TEXT, min_size=1, max_size=8), st.lists(OURS, min_size=1, max_size=12)))
@example(["REAL_QID\x010\x02REAL_TOPIC\x01T", "REAL_QID\x017\x02REAL_TOPIC\x01T"])
@example(["TAGS\x01a\x02REAL_TOPIC\x01T\x02REAL_QID\x010", "XXXX\x01a\x02REAL_TOPIC\x01T\x02REAL_QID\x010"])
@example(["XXXX\x01a\x02REAL_TOPIC\x01T\x02REAL_QID\x010", "TAGS\x01a\x02REAL_TOPIC\x01T\x02REAL_QID\x010"])
@example(["TAGS\x01aaa\x02REAL_TOPIC\x01T\x02REAL_QID\x010", "TAGS\x01a\x02b\x01REAL_TOPIC\x01T\x02REAL_QID\x010"[:34]])
def test_many_at_once_are_as_each_alone(store: MessageStore, texts: list[str]) -> None:
    targets = Targets(store)
    for _ in range(2):
        queues, codes = targets.find(records_of(texts))
        found = [((queue.topic, queue.queue_id) if queue is not None else None) for queue in queues]
        assert list(zip(found, codes, strict=True)) == [expected(text) for text in texts]


REPLACED = st.sampled_from(
    ["TIMER_REPLACE\x01true", "TIMER_REPLACE\x01false", "KEYS\x01k", "KEYS\x01k l", "a\x01REAL_TOPIC\x01T"]
)


@given(
    st.one_of(
        st.lists(st.lists(PIECES | REPLACED, max_size=6).map("\x02".join), min_size=1, max_size=8),
        st.lists(OURS, min_size=1, max_size=12),
        st.lists(OURS.map(lambda text: "KEYS\x01k\x02TIMER_REPLACE\x01true\x02" + text), min_size=1, max_size=12),
    )
)
@example(["KEYS\x01REAL_TOPIC\x01U\x02REAL_TOPIC\x01T", "KEYS\x01REAL_TOPIC\x01U\x02REAL_TOPIC\x01U"])
def test_hashes_of_many_at_once_are_as_of_each_alone(texts: list[str]) -> None:
    found = TopicHashes(properties.java_hash)
    for _ in range(2):
        hashes, keys = found.find(records_of(texts))
        assert hashes.tolist() == [properties.java_hash(properties.get(text, "REAL_TOPIC") or "") for text in texts]
        assert keys.tolist() == [key_of(text) for text in texts]


def test_a_deleted_topic_gets_new_queues(store: MessageStore) -> None:
    targets = Targets(store)
    records = records_of(["REAL_TOPIC\x01gone\x02REAL_QID\x010"] * 3)
    (before, *_), _ = targets.find(records)
    store.forget_topic("gone")
    (after, *_), _ = targets.find(records)
    assert after is not before
    assert after is store.queue("gone", 0)
