"""Checks the Spark jobs' view of a store on a simulated disk against the records, and against the view of a broker that
opens the same bytes: of the store at the end of a life, and of its state at one moment in the middle, right after a
kill."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from duemq.broker.settings.parts import timer_config
from duemq.protocol.records import properties
from duemq.scheduler.levels.delay_offsets import read_delay_offsets
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.search import Selection, WaitingMessage, WaitingMessages
from duemq.scheduler.timers.service import Timers
from duemq.spark_jobs.audit import events
from duemq.spark_jobs.audit.figures import STATUSES
from duemq.spark_jobs.audit.matching import match
from duemq.spark_jobs.store import progress
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import Segment, walks
from duemq.storage.clock import Moment, look
from duemq.storage.config_file import ConfigFile
from duemq.storage.current import Current
from duemq.storage.store import MessageStore, StoreConfig
from tests.simulation.machine.disk import PAGE, Disk
from tests.simulation.world import ROOT
from tests.support.store_problems import problems

if TYPE_CHECKING:
    from duemq.broker.settings.config import BrokerConfig
    from tests.simulation.clients import Attempt
    from tests.simulation.life import Life

_SCHEDULED = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")


@dataclass
class Left:
    """The disk as a kill left it, and the time of the kill."""

    disk: Disk
    at: float
    now: Moment


class DiskStore(StoreFiles):
    """The files of a store on a simulated disk whose broker has ended."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(ROOT)
        self._disk = disk
        self._look(0, unflushed=False)

    def _is_locked(self) -> bool:
        return False

    def _written(self, segment: Segment) -> int:
        pages = self._disk.names[f"{ROOT}/{segment.path}"].pages
        return min(segment.size, (max(pages, default=-1) + 1) * PAGE)

    def _entries(self, folder: str) -> list[tuple[str, int]] | None:
        path = f"{ROOT}/{folder}".rstrip("/")
        if path not in self._disk.directories:
            return None
        names = self._disk.names
        return [(name, names[at].size if (at := f"{path}/{name}") in names else 0) for name in self._disk.list(path)]

    def read(self, path: str, at: int, size: int) -> bytes:
        return self._disk.names[f"{ROOT}/{path}"].read(at, size)

    def read_into(self, path: str, at: int, buffer: memoryview) -> int:
        data = self.read(path, at, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_whole(self, name: str) -> bytes | None:
        node = self._disk.names.get(f"{ROOT}/{name}")
        return node.read(0, node.size) if node is not None else None


def open_store(config: BrokerConfig, disk: Disk) -> tuple[MessageStore, Any]:
    """Open the store as its next broker would; return the store and the result of its recovery."""
    opened = StoreConfig(
        ROOT,
        commitlog_segment_size=config.commitlog_segment_size,
        queue_segment_size=config.queue_segment_size,
        max_message_size=config.max_message_size,
    )
    store = MessageStore(opened, disk, ("127.0.0.1", 10911), DelayLevels(config.delay_levels).deliver_time)
    return store, store.open()


def complaints(life: Life) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong."""
    config = life.world.config
    if life.left is not None:
        for sentence in _of_bytes(life, life.left.disk, config, life.left.now, life.left.at):
            yield f"after the kill at {life.left.at:.3f} {sentence}"
    loop, clock = life.world.loop, life.world.clock
    now = look(clock)
    for sentence in _of_bytes(life, life.world.disk.image(), config, now, loop.time()):
        yield f"in the end {sentence}"


def _of_bytes(life: Life, disk: Disk, config: BrokerConfig, now: Moment, at: float) -> Iterator[str]:
    if not any(path.startswith(f"{ROOT}/commitlog/") for path in disk.names):
        return  # no message was ever stored
    files = DiskStore(disk)
    bodies, come, named, last, is_whole = _records(files)
    waiting = set(progress.waiting(files).offsets.tolist())
    cases = _cases(files)
    store, recovered = open_store(config, disk)
    if last >= recovered.end:
        # Behind the bytes that a power cut took there are unacknowledged records: a start cuts them off, but jobs read
        # on.
        store.abandon()
        return
    told = _told(store, recovered, config, now)
    yield from _same("the jobs say, and not the broker, that what waits is", waiting - told, bodies)
    yield from _same("the broker says, and not the jobs, that what waits is", told - waiting, bodies)
    deleted = {name for name in life.deleted if life.deleted[name][0] <= at}
    yield from problems(store, deleted)
    store.abandon()
    if not is_whole:
        return  # retention removed records that others refer to
    scheduled = {offset for offset in bodies if offset not in named}
    if not deleted:  # a message for a deleted topic is passed over
        yield from _same("no record says what became of these, and they do not wait:", scheduled - waiting, bodies)
    yield from _same("these wait, and a record says what became of them:", waiting - scheduled, bodies)
    delivered = sum(cases["deliveries"].tolist())
    if delivered != sum(come[body] for body in set(bodies.values())):
        yield f"an audit finds {delivered} deliveries, and there are others"
    yield from _audited(cases, waiting, bodies, is_any_deleted=bool(deleted))
    yield from _accounted(life, come, bodies, waiting, at)


def _records(files: StoreFiles) -> tuple[dict[int, bytes], Counter[bytes], set[int], int, bool]:
    """Return, from the records alone by RocketMQ's layout: the body of each scheduled record by its physical offset,
    the number of other records per body, the named origins, the offset of the last record, and whether all records are
    there."""
    bodies: dict[int, bytes] = {}
    come: Counter[bytes] = Counter()
    named: set[int] = set()
    last = -1
    for part in plan(files):
        for found in walks(files, part, check_crc=False):
            records = found.records
            last = max(last, int(records.physical_offset.max(initial=-1)))
            codes, names = records.topics()
            texts = records.property_strings
            again = texts(properties.TIMER_ROLL_TIMES).to_pylist()
            deletes = texts(properties.TIMER_DEL_UNIQKEY).to_pylist()
            raw = bytes(memoryview(records.data))  # type: ignore[arg-type]
            for row, code in enumerate(codes.tolist()):
                offset, prepared = int(records.physical_offset[row]), int(records.prepared_offset[row])
                is_scheduled = names[code] in _SCHEDULED and deletes[row] is None
                names_one = names[code] not in _SCHEDULED or again[row] is not None or deletes[row] is not None
                if names_one and prepared and names[code] != _SCHEDULED[0]:
                    named.add(max(prepared, 0))
                start = offset - records.base
                size = int.from_bytes(raw[start + 84 : start + 88], "big")
                body = raw[start + 88 : start + 88 + size]
                if is_scheduled:
                    bodies[offset] = body
                elif names[code] not in _SCHEDULED:
                    come[body] += 1
    return bodies, come, named, last, files.segments[0].first_offset == 0 and not files.gaps()


def _cases(files: StoreFiles) -> Any:
    """Do as `spark_jobs.audit.matching.find`, without Spark."""
    how_far = progress.read_progress(files)
    waits, done = [np.empty(0, events.WAITS)], [np.empty(0, events.DONE)]
    for part in plan(files):
        for found in events.RangeEvents(files, part, how_far):
            waits.append(found.waits)
            done.append(found.done)
    return match(np.concatenate(waits), np.concatenate(done))


def _told(store: MessageStore, recovered: Any, config: BrokerConfig, now: Moment) -> set[int]:
    """Return the offsets of the messages that a broker lists as waiting."""
    file = ConfigFile(store.files, f"{ROOT}/config/delayOffset.json")
    table = DelayLevels(config.delay_levels)
    levels = LevelQueues(store, read_delay_offsets(file, is_needed=False), table, recovered, now)
    timers = Timers(store, Current(timer_config(config)), recovered, now, levels=levels)
    pending = WaitingMessages(store, timers, levels)
    found = [each for each in pending.select(Selection(), now.wall_ms) if isinstance(each, WaitingMessage)]
    timers.close()
    return {each.message.physical_offset for each in found}


def _same(what: str, offsets: set[int], bodies: dict[int, bytes]) -> Iterator[str]:
    if offsets:
        names = [f"{_name(bodies.get(offset, b'?|'))} at {offset}" for offset in sorted(offsets)]
        yield f"{what} {', '.join(names[:5])} ({len(names)} in all)"


def _name(body: bytes) -> str:
    return body.split(b"|")[0].decode()


def _audited(cases: Any, waiting: set[int], bodies: dict[int, bytes], *, is_any_deleted: bool) -> Iterator[str]:
    """Check that the audit finds nothing wrong, and counts exactly the waiting messages as pending."""
    status = [STATUSES[each] for each in cases["status"].tolist()]
    offsets = cases["physical_offset"].tolist()
    of_status: defaultdict[str, set[int]] = defaultdict(set)
    for each, offset in zip(status, offsets, strict=True):
        of_status[each].add(offset)
    allowed = {"delivered", "cancelled", "pending"} | ({"lost"} if is_any_deleted else set())
    for wrong in of_status.keys() - allowed:
        yield from _same(f"an audit finds {wrong}:", of_status[wrong], bodies)
    yield from _same("an audit has pending what does not wait:", of_status["pending"] - waiting, bodies)
    yield from _same("what waits is not pending in an audit:", waiting - of_status["pending"], bodies)


def _accounted(
    life: Life, come: Counter[bytes], bodies: dict[int, bytes], waiting: set[int], at: float
) -> Iterator[str]:
    """Check that each message acknowledged by then is delivered once, or waits once, or was taken back by an operator
    or a replacement."""
    scheduled = set(bodies.values())
    left = Counter(bodies[offset] for offset in waiting if offset in bodies)
    for attempt in life.attempts:
        if attempt.code != 0 or attempt.answered > at or not (attempt.level or attempt.deliver_ms is not None):
            continue
        count = come[attempt.body] + left[attempt.body]
        if count > 1:
            yield f"message {_name(attempt.body)} is there {count} times"
        if count == 0 and attempt.body not in scheduled:
            yield f"message {_name(attempt.body)} was acknowledged, and has no record"
        elif count == 0 and not _may_be_taken_back(life, attempt, at):
            yield f"message {_name(attempt.body)} was acknowledged, and neither waits nor was delivered"


def _may_be_taken_back(life: Life, attempt: Attempt, at: float) -> bool:
    if any(change.how == "cancel" and change.asked <= at for change in attempt.changes):
        return True
    if attempt.topic in life.deleted:
        return True
    return attempt.key is not None and any(
        other.key == attempt.key and other.topic == attempt.topic and other is not attempt and other.asked <= at
        for other in life.attempts
    )
