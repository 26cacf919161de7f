"""The usage figures of ranges add up to those of the whole, and equal plain counts."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.record import StoredMessage
from duemq.spark_jobs.analyse import usage as module
from duemq.spark_jobs.analyse.usage import (
    HOUR_MS,
    KEYS,
    KEYS_KEPT,
    RangeUsage,
    Usage,
    UsageObserver,
    body_percentile,
    frequent_keys,
)
from duemq.spark_jobs.store.roles import NAMES, Roles
from tests.unit.spark_jobs.columns.test_records import log_of, walked

HOSTS = (b"\x7f\0\0\x01\0\0\x04\xd2", b"\xff\xff\xff\xff\0\0\0\x01", bytes(15) + b"\x01\0\0\x04\xd2")
TEXTS = (
    "",
    "KEYS\x01a",
    "KEYS\x01b\x02UNIQ_KEY\x01u1",
    "UNIQ_KEY\x01u2",
    "RETRY_TOPIC\x01orders\x02UNIQ_KEY\x01u2",
    "REAL_TOPIC\x01orders\x02DELAY\x013\x02UNIQ_KEY\x01u3",
)
MESSAGES = st.lists(
    st.builds(
        StoredMessage,
        queue_id=st.integers(0, 2),
        born_timestamp=st.just(1),
        born_host=st.sampled_from(HOSTS),
        store_timestamp=st.integers(0, HOUR_MS) | st.integers(0, 2 * HOUR_MS),
        store_host=st.sampled_from(HOSTS),
        reconsume_times=st.integers(0, 2),
        body=st.integers(0, 70).map(bytes),
        topic=st.sampled_from(("orders", "%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")),
        properties_text=st.sampled_from(TEXTS),
    ),
    max_size=25,
)


def look(messages: list[StoredMessage], base: int = 0) -> tuple[RangeUsage, list[int]]:
    observer = UsageObserver()
    for at in range(0, len(messages), 7):
        records = walked(log_of(messages[at : at + 7], base + at * 1000), base=base + at * 1000).records
        observer.look(records, Roles(records))
    return RangeUsage.decode(observer.usage()), observer.unique_hashes().tolist()


@given(MESSAGES, st.integers(0, 25))
def test_parts_add_up_to_the_whole(messages: list[StoredMessage], cut: int) -> None:
    first, one = look(messages[:cut])
    second, other = look(messages[cut:], cut * 1000)
    whole, unique = look(messages)
    assert sorted(one + other) == sorted(unique)
    both, alone = Usage([first, second]), Usage([whole])
    for name in ("traffic", "sizes"):
        parts, total = (getattr(found, name) for found in (both, alone))
        assert {key: row.tolist() for key, row in parts.items()} == {key: row.tolist() for key, row in total.items()}
    assert {topic: {hour: row.tolist() for hour, row in hours.items()} for topic, hours in both.topics.items()} == {
        topic: {hour: row.tolist() for hour, row in hours.items()} for topic, hours in alone.topics.items()
    }
    assert dict(both.producers) == dict(alone.producers)
    assert dict(both.retries) == dict(alone.retries)
    assert sorted(both.keys[["key", "count"]].tolist()) == sorted(alone.keys[["key", "count"]].tolist())


@given(MESSAGES)
def test_it_is_what_is_counted(messages: list[StoredMessage]) -> None:
    found, _ = look(messages)
    records = walked(log_of(messages, 0), base=0).records
    roles, sizes = Roles(records).role.tolist(), records.sizes.tolist()
    minutes = [message.store_timestamp // 60_000 for message in messages]
    step = 1 if not minutes or max(minutes) - min(minutes) <= 30 else 60
    traffic: dict[int, list[int]] = defaultdict(lambda: [0] * (2 * len(NAMES)))
    topics: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * (2 * len(NAMES)))
    producers: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for message, role, size in zip(messages, roles, sizes, strict=True):
        hour = message.store_timestamp // HOUR_MS
        for row in (traffic[message.store_timestamp // 1000 // step * step], topics[message.topic, hour]):
            row[role] += 1
            row[len(NAMES) + role] += size
        if role < 3:
            counts = producers[str(ipaddress.ip_address(message.born_host[:-4]))]
            counts[0] += 1
            counts[1] += size
    assert found.traffic == traffic
    assert {(topic, hour): row for topic, hours in found.topics.items() for hour, row in hours.items()} == topics
    assert found.producers == producers
    keys = Counter(
        (message.topic, message.get_property("KEYS")) for message in messages if message.get_property("KEYS")
    )
    assert sorted(np.frombuffer(found.keys, KEYS)["count"].tolist()) == sorted(keys.values())
    retries = Counter(
        f"{m.topic}\t{m.get_property('RETRY_TOPIC') or ''}\t{m.reconsume_times}" for m in messages if "%" in m.topic
    )
    assert found.retries == retries
    bodies = {topic: [len(m.body) for m in messages if m.topic == topic] for topic in {m.topic for m in messages}}
    for topic, lengths in bodies.items():
        bins = np.array(found.sizes[topic])
        assert bins.sum() == len(lengths)
        for percent in (50, 99, 100):
            told = body_percentile(bins, percent)
            share = sum(length < told or length == told == 0 for length in lengths) / len(lengths)
            assert share * 100 >= percent - 1e-9


def test_of_many_keys_the_most_frequent_go_on_and_the_error_is_told() -> None:
    count = KEYS_KEPT + 500
    messages = [
        StoredMessage(
            queue_id=0, born_timestamp=1, born_host=HOSTS[0], store_timestamp=1, store_host=HOSTS[0], body=b"",
            topic="t", properties_text=f"KEYS\x01{number}",
        )
        for number in [*range(count), *range(100), *range(10)]
    ]  # fmt: skip
    found, _ = look(messages)
    assert len(np.frombuffer(found.keys, KEYS)) == KEYS_KEPT
    assert found.key_error == 1
    (top,) = frequent_keys([Usage([found])], 100)
    assert list(top.values()) == [3] * 10 + [2] * 90


def test_no_bodies_no_percentile() -> None:
    assert body_percentile(np.zeros(module.SIZE_BINS, np.int64), 50) == 0
