"""How far consumer groups and delay levels are: config/consumerOffset.json and config/delayOffset.json, with the bounds
of the consume queues.

    consumerOffset.json   {"offsetTable": {"<topic>@<group>": {"<queue id>": next queue offset, ...}, ...}}
    delayOffset.json      {"offsetTable": {"<level>": next queue offset, ...}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.storage import file_names
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import PADDING_SIZE

if TYPE_CHECKING:
    from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles


def queue_bounds(store: StoreFiles) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the first and the next queue offset of each queue, by topic and queue id, as the consume queues have
    them."""
    bounds: dict[tuple[str, int], tuple[int, int]] = {}
    for file in store.queue_files():
        key = (file.topic, file.queue_id)
        if (bounds_of := _bounds_of_full(store, file)) is not None:
            begin, end = bounds_of
        else:
            units = store.units(file)
            real = np.flatnonzero(units["size"] != PADDING_SIZE)
            end = file.first_unit + len(units)
            begin = file.first_unit + int(real[0]) if len(real) else end
        known = bounds.get(key)
        bounds[key] = (known[0], max(known[1], end)) if known is not None and known[0] < known[1] else (begin, end)
    return bounds


def _bounds_of_full(store: StoreFiles, file: QueueFile) -> tuple[int, int] | None:
    """Return the bounds of a file that has a unit at its begin and at its end; None for any other file."""
    count = file.size // UNITS.itemsize
    first, last = (store.read(file.path, at * UNITS.itemsize, UNITS.itemsize) for at in (0, max(count - 1, 0)))
    sizes = [int(np.frombuffer(data, UNITS)["size"][0]) for data in (first, last) if len(data) == UNITS.itemsize]
    if len(sizes) < 2 or 0 in sizes or sizes[0] == PADDING_SIZE:
        return None
    return file.first_unit, file.first_unit + count


def offset_rows(store: StoreFiles) -> list[dict[str, Any]]:
    """Return the rows of the table `offsets`."""
    bounds = queue_bounds(store)
    rows = []
    consumers = store.table(file_names.CONSUMER_OFFSETS, "offsetTable")
    for name, queues in consumers.items():
        topic, _, group = name.partition("@")
        for queue_id, offset in (queues or {}).items():
            rows.append(_row("consumer", group, topic, int(queue_id), int(offset), bounds))
    levels = store.table(file_names.DELAY_OFFSETS, "offsetTable")
    for level, offset in levels.items():
        rows.append(_row("delay_level", None, SCHEDULE_TOPIC, int(level) - 1, int(offset), bounds))
    return rows


def _row(
    kind: str,
    group: str | None,
    topic: str,
    queue_id: int,
    offset: int,
    bounds: dict[tuple[str, int], tuple[int, int]],
) -> dict[str, Any]:
    begin, end = bounds.get((topic, queue_id), (None, None))
    return {
        "kind": kind,
        "consumer_group": group,
        "topic": topic,
        "queue_id": queue_id,
        "next_offset": offset,
        "min_offset": begin,
        "max_offset": end,
        "lag": max(end - offset, 0) if end is not None else None,
    }
