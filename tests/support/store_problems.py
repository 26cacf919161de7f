"""Tells what is wrong with a store that is open and at rest: its consume queues must list its records, no more."""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Iterator

from duemq.protocol.records import properties
from duemq.protocol.records.record import FLAG_TRANSACTION, TRANSACTION_COMMIT, TRANSACTION_NONE, RecordSummary
from duemq.storage.log.origins import Origins
from duemq.storage.log.scan import Scanner
from duemq.storage.queues.consume_queue import DELIVERED_SIZE, PADDING_SIZE, UNIT, WITHDRAWN_SIZE, ConsumeQueue
from duemq.storage.store import MessageStore


def problems(store: MessageStore, deleted: Container[str] = ()) -> Iterator[str]:
    """The faults found, a sentence each. Reads the whole commitlog, which may take long. `deleted`: deleted topics,
    which need no queues."""
    log = store.log
    if not log.begin <= log.flushed <= log.end <= max(log.allocated_end, log.begin):
        yield f"commitlog positions out of order: {log.begin}, {log.flushed}, {log.end}, {log.allocated_end}"
    scanner = Scanner(log, log.begin)
    origins = Origins()
    given_up: set[int] = set()
    expected: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {}
    for record in scanner:
        topic = record.topic.decode()
        if record.physical_offset < store.queue_check.removed.get(topic, 0):
            continue
        if record.sys_flag & FLAG_TRANSACTION not in (TRANSACTION_NONE, TRANSACTION_COMMIT):
            continue
        origins.look(record)
        text = record.properties.decode("utf-8", "replace")
        if properties.get(text, properties.REAL_TOPIC) in deleted:
            given_up.add(record.physical_offset)
        code = store.tags_code(topic, RecordSummary(record.store_timestamp, record.prepared_transaction_offset, text))
        units = expected.setdefault((topic, record.queue_id), {})
        if units and record.queue_offset <= next(reversed(units)):
            # The topic was deleted, and made again. Its first messages may have expired since.
            units = expected[topic, record.queue_id] = {
                offset: unit for offset, unit in units.items() if offset < record.queue_offset
            }
        units[record.queue_offset] = (record.physical_offset, record.size, code)
    if scanner.end.physical_offset != log.end:
        yield f"the commitlog's records end at {scanner.end.physical_offset} ({scanner.end.why}), not at {log.end}"
    marked = {WITHDRAWN_SIZE: set(origins.withdrawn), DELIVERED_SIZE: given_up | set(origins.delivered)}
    queues = {(queue.topic, queue.queue_id): queue for queue in store.all_queues()}
    for key in sorted(queues.keys() | expected.keys()):
        queue, units = queues.get(key), expected.get(key, {})
        if queue is None:
            if key[0] in deleted:
                continue
            yield f"queue {key} is missing, with {len(units)} messages"
            continue
        if units and (queue.min_offset, queue.next_offset) != (min(units), max(units) + 1):
            yield f"{queue} should have the messages {min(units)} to {max(units)}"
        for offset, unit in _units(store, queue):
            right = units.get(offset)
            if unit == right or (unit is not None and unit[1] == PADDING_SIZE):
                continue
            is_marked = unit is not None and unit[0] in marked.get(unit[1], ())
            if unit is not None and is_marked and right is not None and unit == (right[0], unit[1], right[2]):
                continue
            yield f"unit {offset} of {queue} is {unit}, but the commitlog says {right}"


def _units(store: MessageStore, queue: ConsumeQueue) -> Iterator[tuple[int, tuple[int, int, int] | None]]:
    """Yield the queue's offsets and units, with tags codes from consumequeue_ext, credible or not; None for a unit that
    cannot be read."""
    offset = queue.min_offset
    while offset < queue.next_offset:
        data = queue.read(offset, queue.next_offset - offset)
        for unit in UNIT.iter_unpack(data):
            yield offset, _with_code(store, queue, unit)
            offset += 1
        if not data:
            yield offset, None
            offset += 1


def _with_code(store: MessageStore, queue: ConsumeQueue, unit: tuple[int, int, int]) -> tuple[int, int, int]:
    if unit[2] >= -(2**31):
        return unit
    size = store.config.extension_segment_size
    number, at = divmod(unit[2] + 2**63, size)
    path = os.path.join(store.extension_directory, queue.topic, str(queue.queue_id), f"{number * size:020}")
    if not store.files.exists(path):
        return unit
    found = struct.unpack(">hqqh", store.files.open(path).read(at, 20).ljust(20, b"\0"))
    return (*unit[:2], found[1]) if found[0] == 20 + found[3] else unit
