"""Where reading begins and ends in each queue, by options in the form of Spark's source for Kafka.

https://spark.apache.org/docs/latest/streaming/structured-streaming-kafka-integration.html describes the originals.

    startingOffsets, endingOffsets                          earliest, latest, or {"orders": {"0": 23, "1": -2}}: queue
                                                            offsets by topic and queue; -2: earliest, -1: latest
    startingOffsetsByTimestamp, endingOffsetsByTimestamp    {"orders": {"0": 1795392000000}}: ms since the epoch

For several stores the option holds for each, or has an entry for each: {"/data/a/store": {"orders": {"0": 23}}, ...}.
Starts are inclusive, ends exclusive. A topic must be given with all of its queues.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.source.filters import ALL, Span
from duemq.spark_jobs.store.local_files import is_same, real_path, shown
from duemq.storage import file_names
from duemq.storage.queues.consume_queue import PADDING_SIZE

if TYPE_CHECKING:
    from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles

EARLIEST: Final = -2
LATEST: Final = -1
_NO_RECORD: Final = 64
"""Unit sizes (bytes) up to here are marks: the message was withdrawn, or delivered before others."""
_EXAMPLE: Final = '{"orders": {"0": 23, "1": -2}}'

Queues = dict[str, dict[int, int]]
"""A number for each queue, by topic and queue id."""
Spans = dict[str, dict[int, Span]]


class Numbers(NamedTuple):
    """The parsed JSON of an option. Either `of_all` or `of_each` is None."""

    option: str
    of_all: Queues | None
    of_each: dict[str, Queues] | None
    """By path or URI of a store."""

    def topics(self) -> set[str]:
        """Return all topics named in the option."""
        return {topic for queues in self._queues() for topic in queues}

    def _queues(self) -> list[Queues]:
        return [self.of_all] if self.of_all is not None else list((self.of_each or {}).values())

    def values(self) -> Iterator[int]:
        """Return all numbers in the option."""
        return (value for queues in self._queues() for topic in queues.values() for value in topic.values())

    def of(self, store: str) -> Queues:
        """Return the numbers for a store. Raises JobError if it is not named."""
        if self.of_each is None:
            return self.of_all or {}
        for path, queues in self.of_each.items():
            if is_same(shown(path), store):
                return queues
        raise JobError(f"the option {self.option} does not name the store {store}, which is read")


def parse(option: str, text: str, *, lowest: int) -> Numbers:
    """Parse an option in JSON. `lowest`: the lowest number allowed. Raises JobError."""

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise JobError(f"the option {option} says {json.dumps(name)} twice")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise JobError(f"the option {option}={text} is no JSON of topics and queues, such as {_EXAMPLE}")
    if all(_is_of_topics(value) for value in found.values()):
        return Numbers(option, None, {store: _queues(option, value, lowest) for store, value in found.items()})
    return Numbers(option, _queues(option, found, lowest), None)


def _is_of_topics(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(queues, dict) for queues in value.values())


def _queues(option: str, found: dict[str, Any], lowest: int) -> Queues:
    result: Queues = {}
    for topic, queues in found.items():
        if not isinstance(queues, dict) or not queues:
            raise JobError(f"the option {option} has no queues for {topic}; write it as {_EXAMPLE}")
        for queue, value in queues.items():
            is_number = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= ALL[1]
            if not (queue.isascii() and queue.isdecimal()) or not is_number:
                raise JobError(
                    f"the option {option} says {json.dumps(value)} for queue {queue} of {topic}; write it as {_EXAMPLE}"
                )
            if int(queue) in result.setdefault(topic, {}):
                raise JobError(f"the option {option} says queue {int(queue)} of {topic} twice")
            result[topic][int(queue)] = value
    return result


class Bounds(NamedTuple):
    """The first queue offset of a queue and the one behind its last."""

    first: int
    end: int


class StoreQueues:
    """The queues of some topics in a store."""

    def __init__(self, store: StoreFiles, topics: set[str]) -> None:
        self._store = store
        self._files: dict[str, dict[int, list[QueueFile]]] = {}
        for file in store.queue_files():
            if file.topic in topics:
                self._files.setdefault(file.topic, {}).setdefault(file.queue_id, []).append(file)
        config = store.table(file_names.TOPICS, "topicConfigTable")
        for topic in topics:
            # Queues that nothing was sent to have no files yet.
            about = config.get(topic)
            for queue in range(int(about.get("writeQueueNums", 0))) if isinstance(about, dict) else ():
                self._files.setdefault(topic, {}).setdefault(queue, [])

    def __contains__(self, topic: str) -> bool:
        return topic in self._files

    def of(self, topic: str) -> dict[int, list[QueueFile]]:
        """Return the files of each queue of a topic, by queue id."""
        return dict(sorted(self._files.get(topic, {}).items()))

    def bounds(self, topic: str, queue: int) -> Bounds:
        """Return the bounds of the messages of a queue whose records have not expired."""
        begin, files = self._store.segments[0].first_offset, self._files[topic][queue]
        end = first = files[0].first_unit if files else 0
        for file in reversed(files):
            units = self._store.units(file)
            if len(units):
                end = first = file.first_unit + len(units)
                break
        for file in files:
            units = self._store.units(file)
            there = (units["physical_offset"] >= begin).nonzero()[0]
            if len(there):
                return Bounds(file.first_unit + int(there[0]), end)
        return Bounds(first, end)

    def behind(self, topic: str, queue: int, offset: int) -> int:
        """Return a physical offset that divides the records of a queue at a queue offset: those from the queue offset
        on lie there or behind, and earlier ones before it, even if the topic was deleted and created again."""
        for file in reversed(self._files[topic][queue]):
            if file.first_unit < offset:
                units = self._store.units(file)[: offset - file.first_unit]
                real = ((units["size"] > _NO_RECORD) & (units["size"] != PADDING_SIZE)).nonzero()[0]
                if len(real):
                    return int(units["physical_offset"][real[-1]]) + int(units["size"][real[-1]])
        return ALL[0]


class Asked(NamedTuple):
    """The options on queues: starts and ends, as queue offsets and as times."""

    starts: Numbers | None = None
    ends: Numbers | None = None
    start_times: Numbers | None = None
    end_times: Numbers | None = None

    def topics(self) -> set[str]:
        """Return all topics named in the options."""
        return {topic for numbers in self if numbers is not None for topic in numbers.topics()}

    def check_stores(self, stores: Iterable[str]) -> None:
        """Check that every store named in the options is read, and is named once. Raises JobError."""
        real = {real_path(shown(store)) for store in stores}
        for numbers in filter(None, self):
            seen = set[str]()
            for store in numbers.of_each or ():
                path = real_path(shown(store))
                if path not in real:
                    raise JobError(f"the option {numbers.option} names the store {shown(store)}, which is not read")
                if path in seen:
                    raise JobError(f"the option {numbers.option} names the store {shown(store)} twice")
                seen.add(path)

    def spans(self, store: StoreFiles, *, topics: frozenset[str] | None, is_strict: bool, is_one: bool) -> Spans:
        """Return the span that is read of each queue of a store. `topics`: those that are read, None for the named
        ones; `is_strict`: whether offsets that a queue does not have are refused, rather than replaced by the nearest
        ones; `is_one`: whether no other store is read. Raises JobError."""
        spans: Spans = {}
        if not any(self):
            return spans
        for starts, ends in ((self.starts, self.ends), (self.start_times, self.end_times)):
            if starts is not None and ends is not None:
                _check_order(starts, ends, store.path)
        queues = StoreQueues(store, self.topics() | (topics or set()))
        for numbers, is_start, are_times in (
            (self.starts, True, False),
            (self.ends, False, False),
            (self.start_times, True, True),
            (self.end_times, False, True),
        ):
            if numbers is None:
                continue
            for topic, named in _checked(numbers, store, queues, topics, is_one=is_one).items():
                for queue, value in named.items():
                    known = spans.setdefault(topic, {}).get(queue, Span())
                    if are_times:
                        known = known._replace(**{"start_ms" if is_start else "end_ms": value})
                    elif value == LATEST and is_start:
                        known = known._replace(start=store.records_end())
                    elif value >= 0:
                        offset = _within(numbers.option, store, queues, topic, queue, value, is_strict=is_strict)
                        start = queues.behind(topic, queue, offset)
                        if is_start:
                            known = known._replace(start_queue=offset, start=start)
                        else:
                            known = known._replace(end_queue=offset)
                    spans[topic][queue] = known
        return spans


def _check_order(starts: Numbers, ends: Numbers, store: str) -> None:
    """Check that no queue ends before it begins. Raises JobError."""
    of_ends = ends.of(store)
    for topic, queues in starts.of(store).items():
        for queue, start in queues.items():
            end = of_ends.get(topic, {}).get(queue, LATEST)
            if 0 <= end < start:
                raise JobError(
                    f"{store}: the option {starts.option} says {start} for queue {queue} of {topic}, which "
                    f"{ends.option} ends before, at {end}"
                )


def _checked(
    numbers: Numbers, store: StoreFiles, queues: StoreQueues, topics: frozenset[str] | None, *, is_one: bool
) -> Queues:
    """Return the numbers of an option for a store. Its topics and queues must be those of the store. Raises
    JobError."""
    option, found = f"{store.path}: the option {numbers.option}", numbers.of(store.path)
    if topics is not None:
        for topic in sorted(set(found) - topics):
            raise JobError(f"{option} names {topic}, which the option topics does not")
        for topic in sorted(topics - set(found)):
            if topic in queues:
                raise JobError(f"{option} does not name {topic}, which the option topics names")
    result: Queues = {}
    for topic, named in found.items():
        if topic not in queues:
            if is_one or numbers.of_each is not None:
                raise JobError(f"{option} names {topic}: the store has no queue of such a topic")
            continue  # Not every one of several brokers needs to have it.
        there = queues.of(topic)
        for queue in named:
            if queue not in there:
                raise JobError(f"{option} names queue {queue} of {topic}, which has {_listed(there)}")
        missing = {queue: None for queue, files in there.items() if files and queue not in named}
        if missing:
            raise JobError(f"{option} does not name {_listed(missing)} of {topic}; -2 is the earliest, -1 the latest")
        result[topic] = named
    return result


def _listed(queues: Mapping[int, object]) -> str:
    names = [str(queue) for queue in sorted(queues)]
    return f"queue {names[0]}" if len(names) == 1 else f"queues {', '.join(names)}"


def _within(
    option: str, store: StoreFiles, queues: StoreQueues, topic: str, queue: int, offset: int, *, is_strict: bool
) -> int:
    first, end = queues.bounds(topic, queue)
    nearest = min(max(offset, first), end)
    if nearest != offset and is_strict:
        why = f"begins at {first}: what was before that has expired" if offset < first else f"ends at {end}"
        raise JobError(
            f"{store.path}: {option} says {offset} for queue {queue} of {topic}, which {why}; "
            f"failOnDataLoss=false takes {nearest}"
        )
    return nearest
