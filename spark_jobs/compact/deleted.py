"""Finds the records of deleted topics, which stay in the commitlog until retention removes them. A topic that is
created again under the same name counts its queue offsets from 0 again.

duemq notes which topics it deleted, and where the commitlog ended then (`queuecheck`). Apache's brokers note nothing,
but it can be seen from the queues:

    a record lies before its queue's first one, and has no less queue offset     deleted, and created again since
    a topic has no queues, and is not in a whole topics.json                     deleted; `duemq store repair` has the
                                                                                 same rule
    a queue is missing of a topic that has others                                deleted, if another record of the topic
                                                                                 was, and it lies before the first one
                                                                                 of all queues; else it stays

In a store without any queues nothing counts as deleted: the queues were removed, and can be rebuilt.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.spark_jobs.writers.spill import load
from duemq.storage import file_names
from duemq.storage.config_file import decode_table
from duemq.storage.files import OsFiles
from duemq.storage.log.copies import UNITS
from duemq.storage.queues import check as queue_check
from duemq.storage.queues.check import QueueCheck
from duemq.storage.queues.consume_queue import PADDING_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.store.store_files import StoreFiles
    from duemq.storage.durability.checkpoint import Checkpoint

    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

UNOWNED: Final = np.dtype([("physical_offset", "<i8"), ("topic", "<i4"), ("is_deleted", "?")])
"""A record that is, or may be, of a deleted topic (see the module). `topic`: its index in a list of names."""
_OF_BROKERS: Final = ("%", "rmq_sys_", "RMQ_SYS_")
"""Prefixes of topics that brokers themselves make when needed."""


class First(NamedTuple):
    """The first unit of a queue that stands for a record."""

    queue_offset: int
    physical_offset: int


class Owners(NamedTuple):
    """The facts that show which records are of deleted topics. `removed`: by topic, the physical offset before which
    its records are of the deleted topic; `firsts`: the first unit of each existing queue, None if none of its units
    stands for a record; `topics`: those that have queues or are in topics.json, None if that is unknown."""

    removed: dict[str, int]
    firsts: dict[tuple[str, int], First | None]
    topics: frozenset[str] | None


def owners_of(store: StoreFiles, checkpoint: Checkpoint) -> Owners:
    """Return the facts about deleted topics in a store at rest. Raises CannotRead."""
    firsts: dict[tuple[str, int], First | None] = {}
    for file in store.queue_files():
        key = file.topic, file.queue_id
        if firsts.get(key) is None:
            units = store.units(file)
            real = np.flatnonzero((units["size"] > 0) & (units["size"] != PADDING_SIZE))
            firsts[key] = (
                First(file.first_unit + int(real[0]), int(units["physical_offset"][real[0]])) if len(real) else None
            )
    return Owners(_removed(store, checkpoint), firsts, _topics(store, firsts))


def _removed(store: StoreFiles, checkpoint: Checkpoint) -> dict[str, int]:
    """Return duemq's own note of deleted topics; empty if another broker had the store since, which makes it void.
    Raises CannotRead."""
    if store.written_by != "duemq" or checkpoint.is_foreign or queue_check.NAME not in checkpoint.notes:
        return {}
    store.read_head(file_names.QUEUE_CHECK)  # the storage's own error for a file of another kind is no JobError
    root = store.local_path
    file_size = next((file.size for file in store.queue_files()), UNITS.itemsize)
    path, queues = os.path.join(root, file_names.QUEUE_CHECK), os.path.join(root, file_names.CONSUME_QUEUES)
    check = QueueCheck(OsFiles(), path, queues, file_size)
    check.load(checkpoint.recovery_offset or 0)
    return dict(check.removed)


def _topics(store: StoreFiles, firsts: dict[tuple[str, int], First | None]) -> frozenset[str] | None:
    from duemq.protocol.errors import BodyFormatError

    data = store.read_whole(file_names.TOPICS)
    if not firsts or not data:
        return None
    try:
        # The backup of topics.json is of an earlier state, and lacks topics created since.
        table = decode_table(data, file_names.TOPICS).get("topicConfigTable")
    except BodyFormatError:
        return None
    return frozenset([*table, *(topic for topic, _ in firsts)]) if isinstance(table, dict) else None


def unowned(records: Records, owners: Owners, codes: NDArray[np.int32], names: Sequence[str]) -> NDArray[np.void]:
    """Return the messages that are, or may be, of a deleted topic, as UNOWNED with indexes in `names`."""
    queues, offsets, physical = records.queue_id, records.queue_offset, records.physical_offset
    is_deleted, may_be = np.zeros(len(records), np.bool_), np.zeros(len(records), np.bool_)
    if not len(records):
        return np.zeros(0, UNOWNED)
    begin = int(physical[0])
    for code, queue_id in np.unique(np.stack([codes, queues.astype(np.int64)]), axis=1).T.tolist():
        topic = names[code]
        first = owners.firsts.get((topic, queue_id))
        is_gone = (topic, queue_id) not in owners.firsts
        removed = owners.removed.get(topic, 0)
        is_before_first = first is not None and first.physical_offset > begin
        if not is_gone and not is_before_first and removed <= begin:
            continue
        mine = (codes == code) & (queues == queue_id)
        if first is not None:
            is_deleted |= mine & (offsets >= first.queue_offset) & (physical < first.physical_offset)
        if removed:
            is_deleted |= mine & (physical < removed)
        if is_gone and _was_deleted(topic, owners):
            is_deleted |= mine
        elif is_gone:
            may_be |= mine
    rows = np.flatnonzero(is_deleted | may_be)
    found = np.zeros(len(rows), UNOWNED)
    found["physical_offset"], found["topic"], found["is_deleted"] = physical[rows], codes[rows], is_deleted[rows]
    return found


def _was_deleted(topic: str, owners: Owners) -> bool:
    return owners.topics is not None and topic not in owners.topics and not topic.startswith(_OF_BROKERS)


def deleted(scratch: str, names: Sequence[Sequence[str]], owners: Owners) -> Integers:
    """Return the physical offsets, ascending, of the records of deleted topics. `names`: the topics of each range."""
    parts = [load(scratch, f"{number}.unowned") for number in range(len(names))]
    were_deleted = {
        of_range[row]
        for rows, of_range in zip(parts, names, strict=True)
        for row in np.unique(rows["topic"][rows["is_deleted"]]).tolist()
    }
    # All queues of a topic are deleted together, so records before the first one of the new queues are older.
    ends: dict[str, int] = {}
    for (topic, _), first in owners.firsts.items():
        if topic in were_deleted and first is not None:
            ends[topic] = min(first.physical_offset, ends.get(topic, first.physical_offset))
    found = []
    for rows, of_range in zip(parts, names, strict=True):
        limits = np.array([ends.get(name, -1) for name in of_range] or [-1], np.int64)
        found.append(rows["physical_offset"][rows["is_deleted"] | (rows["physical_offset"] < limits[rows["topic"]])])
    return np.sort(np.concatenate([np.empty(0, np.int64), *found]))
