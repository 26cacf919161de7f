"""Copies made as a block are the same as copies made one by one."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records import record
from duemq.storage.log.copies import ORIGIN_ZERO, PackedRecords, origin_of
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import SimulatedFiles
from tests.unit.storage.conftest import HOST, NOW_MS, make_store

MESSAGES = st.lists(
    st.tuples(st.binary(max_size=300), st.sampled_from([b"", b"TAGS\x01a", b"KEYS\x01k\x02x\x01y"]), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)
"""Body, properties, and the target, one of three queues."""
TARGETS = (("a", 0), ("a", 7), ("longer-topic-name", 1))


def stored(store: MessageStore, messages: list[tuple[bytes, bytes, int]]) -> list[tuple[int, int]]:
    """Store messages in some topic; return the positions of their records."""
    queue = store.ensure_queue("from", 2)
    for number, (body, text, _) in enumerate(messages):
        store.appender.begin(NOW_MS)
        store.appender.add(queue, body, text, number, number, HOST, 3, 0, number)
    store.appender.commit()
    units = [queue.unit(queue.min_offset + number) for number in range(queue.next_offset)]
    return [(unit[0], unit[1]) for unit in units if unit is not None]


@given(MESSAGES, st.booleans(), st.one_of(st.none(), st.randoms(use_true_random=False)))
def test_a_block_is_what_single_copies_are(
    messages: list[tuple[bytes, bytes, int]], alike: bool, chance: random.Random | None
) -> None:
    if alike:
        messages = [(b"%03d" % number, *messages[0][1:]) for number in range(len(messages))]
    order = list(range(len(messages)))
    if chance is not None:
        chance.shuffle(order)
    block_store, single_store = (make_store("/s", SimulatedFiles(), segment_size=8192) for _ in range(2))
    for store in (block_store, single_store):
        store.open()
        extents = stored(store, messages)
        before = store.log.end
        if store is block_store:
            copy_as_block(store, extents, messages, order)
        else:
            copy_singly(store, [extents[at] for at in order], [messages[at] for at in order])
        assert store.log.end > before
    size = block_store.log.end
    assert size == single_store.log.end
    for topic, queue_id in TARGETS:
        ours, theirs = block_store.queue(topic, queue_id), single_store.queue(topic, queue_id)
        count = theirs.next_offset if theirs is not None else 0
        assert (ours.next_offset if ours is not None else 0) == count
        for offset in range(count):
            assert ours is not None
            assert theirs is not None
            unit = ours.unit(offset)
            assert unit is not None
            assert unit == theirs.unit(offset)
            assert block_store.record_at(unit[0]) == single_store.record_at(unit[0])
    block_store.abandon()
    single_store.abandon()


def copy_as_block(
    store: MessageStore, extents: list[tuple[int, int]], messages: list[tuple[bytes, bytes, int]], order: list[int]
) -> None:
    data = b"".join(store.log.read(*extent) or b"" for extent in extents)
    physical, sizes = (np.array(column, np.int64) for column in zip(*extents, strict=True))
    records = PackedRecords(data, physical, sizes)
    assert records.is_usual.all()
    records, messages = records.part(np.array(order)), [messages[at] for at in order]
    assert records.properties() == [text for _, text, _ in messages]
    queues = [store.ensure_queue(*target) for target in TARGETS]
    which = np.array([number for _, _, number in messages])
    used = sorted(set(which.tolist()))
    which = np.searchsorted(used, which)
    store.appender.begin(NOW_MS)
    store.appender.add_copies(records, [queues[number] for number in used], which, np.arange(len(extents)) + 5)
    store.appender.commit()


def copy_singly(store: MessageStore, extents: list[tuple[int, int]], messages: list[tuple[bytes, bytes, int]]) -> None:
    for number, ((physical, _), (_, text, target)) in enumerate(zip(extents, messages, strict=True)):
        found = store.message_at(physical)
        assert found is not None
        store.appender.begin(NOW_MS)
        store.appender.add(
            store.ensure_queue(*TARGETS[target]),
            found.body,
            text,
            number + 5,
            found.born_timestamp,
            found.born_host,
            found.flag,
            found.sys_flag,
            found.reconsume_times,
            physical or ORIGIN_ZERO,
        )
    store.appender.commit()


@pytest.mark.parametrize("at", [0, 3, 4, 7, 28, 35, 84, 87, 88 + 4, -1 - 9])
def test_what_is_damaged_is_not_usual(at: int) -> None:
    """A record with a damaged size, magic, physical offset, body size, topic length or properties length is not
    usual."""
    data = bytearray(USUAL)
    assert PackedRecords(bytes(data), np.array([64]), np.array([len(data)])).is_usual.all()
    data[at] ^= 0x81
    assert not PackedRecords(bytes(data), np.array([64]), np.array([len(data)])).is_usual.any()


def test_ipv6_hosts_are_not_usual() -> None:
    data = record.encode(msgspec.structs.replace(MESSAGE, born_host=bytes(20)))
    assert not PackedRecords(data, np.array([64]), np.array([len(data)])).is_usual.any()


MESSAGE = record.StoredMessage(
    queue_id=1,
    physical_offset=64,
    born_timestamp=1,
    born_host=HOST,
    store_timestamp=2,
    store_host=HOST,
    body=b"body",
    topic="topic",
    properties_text="TAGS\x01tag",
)
USUAL = record.encode(MESSAGE)


@pytest.mark.parametrize(("stored_as", "origin"), [(0, None), (ORIGIN_ZERO, 0), (5, 5)])
def test_the_record_at_offset_zero_can_be_named(stored_as: int, origin: int | None) -> None:
    assert origin_of(stored_as) == origin
