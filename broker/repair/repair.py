"""`duemq store repair`: rebuilds everything beside a store's commitlog, from the commitlog alone.

    consumequeue/, queuecheck        by `storage.durability.recovery`, all of them
    config/delayOffset.json          by `scheduler.levels.service`: deliveries recorded in the commitlog are done
    timerlog/, timerwheel,           by `scheduler.timers.service`, from the timer topic's queue
    config/timercheck, timermetrics
    checkpoint                       by `storage.durability.owner`, as of the commitlog's end
    config/topics.json               only if it lacks topics that have messages
    index/                           if requested: `broker.repair.index`

A repair is a start of the broker on an empty directory that has the store's commitlog, followed by the steps of a clean
stop after which RocketMQ's broker can continue. But nothing is delivered, and no byte of the commitlog is changed. The
records themselves show which messages were delivered, including RocketMQ's (`scheduler.delivery.deliveries`).

    <store>/repair.partial/new/   the rebuilt files; each file or directory is then moved to its name in the store
    <store>/repair.partial/old/   the files that they replace, until all are in place

With `to`, the new store is built in <to>.partial, and renamed at the end.

However a run ends, the commitlog is unchanged, and the next run puts back files in old/ that have no new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import subprocess
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.broker.errors import RepairError
from duemq.broker.repair import differences as store_differences
from duemq.broker.repair.differences import Difference, queue_names, written_units
from duemq.broker.repair.index import IndexMaker
from duemq.broker.repair.promised import PromisedDelays
from duemq.broker.settings import broker_conf
from duemq.broker.settings.config import FIELDS, BrokerConfig, limits_of, load
from duemq.broker.settings.parts import store_config, timer_config
from duemq.broker.tables.topics import is_own_topic, missing_topics
from duemq.protocol.topics import RETRY_PREFIX
from duemq.scheduler.delivery.deliveries import Deliveries
from duemq.scheduler.levels import runs, service
from duemq.scheduler.levels.delay_offsets import OFFSET_TABLE, DelayOffsets
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.runs import Note
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.timers import service as timers_module
from duemq.scheduler.timers.files.unit import UNIT_SIZE as TIMER_UNIT_SIZE
from duemq.scheduler.timers.index.sorted_offsets import union
from duemq.scheduler.timers.service import Timers
from duemq.storage import file_names
from duemq.storage.clock import Moment
from duemq.storage.config_file import ConfigFile
from duemq.storage.current import Current
from duemq.storage.durability import checkpoint
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.owner import Durability, DurabilityConfig
from duemq.storage.durability.recovery import Recovered, SkippedStretch
from duemq.storage.durability.retention import Retention, RetentionConfig
from duemq.storage.durability.wanted import WantedPosition
from duemq.storage.errors import StoreFormatError, StoreLocked
from duemq.storage.files import Lock, OsFiles
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.scan import ScannedRecord
from duemq.storage.queues import check as queue_check
from duemq.storage.queues.check import Key, QueueCheck
from duemq.storage.queues.consume_queue import PADDING_SIZE, UNIT_SIZE
from duemq.storage.queues.pull import ColdRead
from duemq.storage.store import MessageStore, queue_file_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

BytesRead = Callable[[int, int], None]
"""Called with the number of commitlog bytes read, and their total."""

_MADE_TABLES: Final = (file_names.DELAY_OFFSETS, file_names.TIMER_CHECK, file_names.TIMER_METRICS)
"""Files of config/ of which a copy of the store has either a rebuilt one or none."""
_NOT_COPIED: Final = (file_names.REPAIR, file_names.CONFIG, file_names.LOCK, file_names.ABORT, file_names.COMMITLOG)
"""Files and directories that a repair into a new store does not copy, or copies in a way of their own."""
_REPLACED: Final = (
    file_names.TOPICS,
    file_names.DELAY_OFFSETS,
    file_names.DELAY_OFFSETS + file_names.BACKUP,
    file_names.TIMER_CHECK,
    file_names.TIMER_METRICS,
    file_names.CONSUME_QUEUES,
    file_names.QUEUE_EXTENSIONS,
    file_names.TIMER_LOG,
    file_names.TIMER_WHEEL,
    file_names.INDEX,
    file_names.QUEUE_CHECK,
    file_names.CHECKPOINT,
    file_names.ABORT,
)
"""Replaced in this order. A file for which none was rebuilt is removed."""
_KEPT: Final = (file_names.TOPICS, file_names.INDEX)
"""Kept if none was rebuilt."""
_FOLDERS: Final = (
    file_names.CONFIG,
    file_names.CONSUME_QUEUES,
    file_names.QUEUE_EXTENSIONS,
    file_names.TIMER_LOG,
    file_names.INDEX,
    file_names.REPAIR,
)
_FILES: Final = (file_names.CONSUMER_OFFSETS, file_names.SUBSCRIPTION_GROUPS, file_names.LOCK)
"""Files that are read, or that must be regular files for a broker to start, besides those in `_REPLACED`."""
_USED_SETTINGS: Final = (
    "storePathCommitLog",
    "mappedFileSizeConsumeQueue",
    "mappedFileSizeTimerLog",
    "messageDelayLevel",
    "timerRollWindowSlot",
    "brokerName",
    "brokerClusterName",
    "msgTraceTopicName",
)
_SIZES: Final = (
    ("mappedFileSizeConsumeQueue", file_names.CONSUME_QUEUES, 2, UNIT_SIZE),
    ("mappedFileSizeTimerLog", file_names.TIMER_LOG, 0, TIMER_UNIT_SIZE),
)
"""Settings that follow from file sizes: the setting, the directory of the files, their depth in it, and the size of a
unit in bytes."""


@dataclass
class Report:
    """The findings and results of a repair. Sizes in bytes, offsets physical."""

    written_by: str
    """The last owner of the store: duemq, RocketMQ 4.x or RocketMQ 5.x."""
    commitlog_begin: int = 0
    commitlog_end: int = 0
    records: int = 0
    differences: list[Difference] = field(default_factory=list)
    """Faults in the files beside the commitlog."""
    damages: list[SkippedStretch] = field(default_factory=list)
    """Damaged stretches of the commitlog, which stay as they are."""
    torn: str | None = None
    """Why the commitlog ends where it does, if anything lies behind its end."""
    behind: int = 0
    """Whole records behind damage in the last files: a broker's start cuts them off."""
    levels: dict[int, int] = field(default_factory=dict)
    """The number of waiting messages by delay level."""
    timers: int = 0
    """The number of waiting messages in the timer wheel."""
    queues: int = 0
    index_files: int = 0
    """The number of index files written, if requested."""
    lacks_index: bool = False
    """Whether a store of RocketMQ's has no index."""
    topics_added: list[str] = field(default_factory=list)
    delays_assumed: list[int] = field(default_factory=list)
    """Levels in which RocketMQ's messages wait and whose delay is not known."""
    topics_left_out: list[str] = field(default_factory=list)
    """Deleted topics: the commitlog still has messages of theirs, but no other file names them."""
    repaired: bool = False
    target: str = ""
    """The store that was written, if any."""

    @property
    def is_sound(self) -> bool:
        """Whether the files beside the commitlog have no faults."""
        return not self.differences


def settings_of(file: str | None, overrides: list[str]) -> dict[str, str]:
    """Return the settings that a repair uses, from a broker's configuration file and from NAME=VALUE texts. Raises
    ConfigError."""
    values = dict(broker_conf.read(file)) if file is not None else {}
    for override in overrides:
        name, _, value = override.partition("=")
        values[name.strip()] = value
    return {name: value for name, value in values.items() if name in _USED_SETTINGS}


def repair(
    store_path: str,
    *,
    now: Moment,
    settings: Mapping[str, str] | None = None,
    to: str | None = None,
    dry_run: bool = False,
    with_index: bool = False,
    on_read: BytesRead = lambda done, total: None,
) -> Report:
    """Repair a store that no broker has open.

    `settings`: by RocketMQ's names, for values that the store itself does not show. `to`: a directory, missing or
    empty, for the repaired store; the old store is then only read. `dry_run`: only report the faults. `with_index`:
    also rebuild RocketMQ's index, even if there are no faults. Raises RepairError, StoreError, ConfigError, OSError."""
    root = os.path.abspath(store_path)
    source = _Source(root, settings or {})
    if to is not None and dry_run:
        raise RepairError("a dry run writes nothing: leave out the directory for the new store")
    if to is None:
        _refuse_links(root)
    with _lock_store(root, is_dry=dry_run) as lock:
        if dry_run:
            with tempfile.TemporaryDirectory(prefix="duemq-repair-") as scratch:
                return _Repair(source, scratch, now, on_read, with_index=with_index).run()
        if to is not None:
            return _repair_beside(source, os.path.abspath(to), now, on_read, with_index=with_index)
        assert lock is not None
        return _in_place(source, lock, now, on_read, with_index=with_index)


def _refuse_links(root: str) -> None:
    """Check that everything to be replaced is on the store's disk. Raises RepairError."""
    for name in _REPLACED:
        path = os.path.join(root, name)
        if os.path.islink(path) or os.path.ismount(path):
            raise RepairError(f"{path} is a link or a mount point: repair the store into another directory (--to)")


def _refuse_assumed(report: Report) -> None:
    """Check that the delays of all waiting messages are known: a wrong one delivers them early or late. Raises
    RepairError."""
    if report.delays_assumed:
        levels = ", ".join(map(str, report.delays_assumed))
        count = sum(report.levels[level] for level in report.delays_assumed)
        raise RepairError(
            f"{count:,} messages wait in delay levels whose delays the store does not show (level {levels}): give the "
            "broker's table with --config broker.conf or --set messageDelayLevel='1s 5s ...', even if it is RocketMQ's "
            "default"
        )


def _in_place(source: _Source, lock: Lock, now: Moment, on_read: BytesRead, *, with_index: bool) -> Report:
    root = source.root
    partial = os.path.join(root, file_names.REPAIR)
    _put_back(root, partial)
    new = os.path.join(partial, "new")
    os.makedirs(new)
    try:
        report = _Repair(source, new, now, on_read, with_index=with_index).run()
        if not report.is_sound or report.index_files:
            _refuse_assumed(report)
            _swap(root, partial, lock)
            report.repaired, report.target = True, root
    finally:
        _put_back(root, partial)
    return report


def _repair_beside(source: _Source, target: str, now: Moment, on_read: BytesRead, *, with_index: bool) -> Report:
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise RepairError(f"{target} exists and is not empty: give another path, or remove it first")
    if f"{os.path.realpath(target)}/".startswith(f"{os.path.realpath(source.root)}/"):
        raise RepairError(f"{target} lies in the store that is to be repaired; give a path outside it")
    partial = f"{target}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    try:
        report = _Repair(source, partial, now, on_read, with_index=with_index).run()
        _refuse_assumed(report)
        for name in sorted(os.listdir(source.root)):
            is_made = name in _REPLACED and not (name == file_names.INDEX and not report.index_files)
            if name not in _NOT_COPIED and not is_made:
                _copy(os.path.join(source.root, name), os.path.join(partial, name))
        os.makedirs(os.path.join(partial, file_names.COMMITLOG))
        _copy(f"{source.config.commitlog_directory}/.", os.path.join(partial, file_names.COMMITLOG))
        config = os.path.join(source.root, file_names.CONFIG)
        for name in sorted(os.listdir(config)) if os.path.isdir(config) else ():
            path = os.path.join(file_names.CONFIG, name)
            made = os.path.join(partial, path)
            if path.removesuffix(file_names.BACKUP) not in _MADE_TABLES and not os.path.exists(made):
                _copy(os.path.join(config, name), made)
        _sync_tree(partial)
        if os.path.isdir(target):
            os.rmdir(target)
        os.rename(partial, target)
        source.files.sync_directory(os.path.dirname(target))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report.repaired, report.target = True, target
    return report


# --- the store as it is


class _Source:
    """A store, and the settings that it was written with. Raises RepairError, ConfigError, OSError."""

    def __init__(self, root: str, settings: Mapping[str, str]) -> None:
        self.root = root
        self.files = OsFiles()
        known = {name: value for name, value in settings.items() if name in FIELDS}
        commitlog = known.get("storePathCommitLog") or os.path.join(root, file_names.COMMITLOG)
        if not os.path.isdir(commitlog):
            raise RepairError(f"{root} has no commitlog/, so it is not a duemq or RocketMQ store")
        _check_kinds(root, commitlog)
        for name in file_names.NOT_SUPPORTED:
            if self.files.list(os.path.join(root, name)):
                raise RepairError(f"{root}/{name}: queues of this kind are not supported; the store stays as it is")
        sizes = _sizes(commitlog)
        if not sizes:
            raise RepairError(f"{commitlog} has no files: there is nothing to rebuild the rest from")
        known["storePathRootDir"], known["storePathCommitLog"] = root, commitlog
        known["mappedFileSizeCommitLog"] = str(1 << 30)
        for name, directory, depth, unit in _SIZES:
            if size := _usual_size(os.path.join(root, directory), depth, unit, limits_of(name)):
                known.setdefault(name, str(size))
        self.has_table = "messageDelayLevel" in known
        loaded = load(None, [f"{name}={value}" for name, value in known.items()], {}).config
        # The size of the commitlog's files is that of the first one. It is set here, past the checks of `load`: the
        # maximum size of a message does not matter for a repair.
        self.config: BrokerConfig = dataclasses.replace(loaded, commitlog_segment_size=sizes[0])
        text = self.files.read_whole(os.path.join(root, file_names.LOCK)) or b""
        self.is_ours = text == b"duemq"
        is_5 = any(
            os.path.exists(os.path.join(root, name)) for name in (file_names.TIMER_WHEEL, file_names.TIMER_CHECK)
        )
        self.written_by = "duemq" if self.is_ours else "RocketMQ 5.x" if is_5 else "RocketMQ 4.x"

    def table(self, name: str) -> tuple[dict[str, Any], str]:
        """Return a table, and what is wrong with it or an empty text. `name`: its path below the store. Raises
        OSError."""
        file = ConfigFile(self.files, os.path.join(self.root, name))
        try:
            found = file.read()
        except StoreFormatError as error:
            return {}, str(error.why)
        if file.is_newest:
            return found, ""
        return found, "was taken from its backup" if found else "is missing"


@contextlib.contextmanager
def _lock_store(root: str, *, is_dry: bool) -> Iterator[Lock | None]:
    """Keep brokers from opening a store meanwhile. Raises RepairError if one has it open."""
    path = os.path.join(root, file_names.LOCK)
    if is_dry and not os.path.exists(path):  # no broker ever had the store
        yield None
        return
    try:
        lock = OsFiles().lock(path)
    except StoreLocked:
        raise RepairError(f"{root}: a broker has this store open; stop it first") from None
    try:
        yield lock
    finally:
        lock.release()


def _check_kinds(root: str, commitlog: str) -> None:
    """Check that files are where files belong, and directories where directories belong: anything else that was put
    there would be lost with the replaced files. Raises RepairError, OSError."""
    for name in _FOLDERS:
        _check_kind(os.path.join(root, name), is_folder=True)
    for name in (*_REPLACED, *_FILES):
        if name not in _FOLDERS:
            _check_kind(os.path.join(root, name), is_folder=False)
    for folder in (commitlog, os.path.join(root, file_names.TIMER_LOG), os.path.join(root, file_names.INDEX)):
        _check_files(folder)
    queues = os.path.join(root, file_names.CONSUME_QUEUES)
    for topic in _listed(queues):
        _check_kind(os.path.join(queues, topic), is_folder=True)
        for queue in _listed(os.path.join(queues, topic)):
            if queue.isdecimal():
                path = os.path.join(queues, topic, queue)
                _check_kind(path, is_folder=True)
                _check_files(path)


def _check_files(folder: str) -> None:
    for name in _listed(folder):
        if name.isdecimal():
            _check_kind(os.path.join(folder, name), is_folder=False)


def _listed(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _check_kind(path: str, *, is_folder: bool) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise RepairError(f"{path} is a link to {os.readlink(path)}, which does not exist; remove it") from None
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RepairError(f"{path} is a link that leads back to itself; remove it") from None
    if is_folder and not stat.S_ISDIR(mode):
        raise RepairError(f"{path} is a file, but must be a directory; move it away")
    if not is_folder and not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise RepairError(f"{path} is {kind}, but must be a file; move it away")


def _sizes(directory: str) -> list[int]:
    entries = sorted((entry for entry in os.scandir(directory) if entry.name.isdecimal()), key=lambda one: one.name)
    return [size for entry in entries if (size := entry.stat().st_size)]


def _usual_size(directory: str, depth: int, unit: int, limits: tuple[int, int]) -> int:
    """Return the most frequent file size, in bytes, at a depth below a directory; of two that are equally frequent, the
    larger one. Sizes that are not whole units, or that no setting allows, are of truncated files and do not count. 0 if
    no size is left."""
    low, high = limits
    sizes = Counter(size for size in _all_sizes(directory, depth) if size % unit == 0 and low <= size <= high)
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def _all_sizes(directory: str, depth: int) -> Iterator[int]:
    if not os.path.isdir(directory):
        return
    if not depth:
        yield from _sizes(directory)
        return
    for name in os.listdir(directory):
        yield from _all_sizes(os.path.join(directory, name), depth - 1)


# --- making


class _NoWorkers:
    """Workers that are given no work: the one checkpoint is made without them (`Durability.take_over`)."""

    def start(self, lane: Lane, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        raise AssertionError("a repair makes one checkpoint, and nothing else")


class _NoWatcher:
    def released(self, position: int) -> None: ...

    def noted(self) -> None: ...

    def poisoned(self, reason: str) -> None: ...

    def stopped(self, error: Exception | None) -> None: ...


class _Repair:
    """One rebuild of everything beside the commitlog, in a directory of its own."""

    def __init__(self, source: _Source, new: str, now: Moment, on_read: BytesRead, *, with_index: bool) -> None:
        self._source = source
        self._new = new
        self._now = now
        self._on_read = on_read
        self._index = IndexMaker(os.path.join(new, ".items")) if with_index else None
        self._report = Report(source.written_by)
        self._table = DelayLevels(source.config.delay_levels)
        self._promised: PromisedDelays | None = None
        self._known_levels = set[int]()
        """Levels whose delay is known."""
        self._levels_of_table = set[int]()
        """Levels with a message whose deliver time comes from the table."""

    def run(self) -> Report:
        source, report = self._source, self._report
        files, config = source.files, source.config
        os.makedirs(os.path.join(self._new, file_names.CONFIG), exist_ok=True)
        topics, topics_trouble = source.table(file_names.TOPICS)
        saved, _ = source.table(file_names.DELAY_OFFSETS)
        known = topics.get("topicConfigTable")
        known_topics = set(known) if isinstance(known, dict) and not topics_trouble else None
        store = MessageStore(
            dataclasses.replace(store_config(config), root=self._new, is_extended=False),
            files,
            ("127.0.0.1", config.listen_port),
            self._deliver_time,
        )
        try:
            check = self._queue_check()
            store.queue_check.removed = dict(check.removed)
            store.inspect(reads=False)
            self._promised = PromisedDelays(source.root, store.log)
            self._find_table(self._promised)
            old = checkpoint.load(files, os.path.join(source.root, file_names.CHECKPOINT))
            ours = old if source.is_ours and not old.is_foreign else Checkpoint()
            recovered = self._read(store, check, known_topics, ours.recovery_offset or 0)
            levels = LevelQueues(
                store,
                DelayOffsets(
                    ConfigFile(files, os.path.join(self._new, file_names.DELAY_OFFSETS)),
                    others={name: value for name, value in saved.items() if name != OFFSET_TABLE},
                ),
                self._table,
                recovered,
                self._now,
                config=Current(DeliveryConfig(save_interval=0)),
                rules=self._rules(ours),
            )
            timers = Timers(store, Current(timer_config(config)), recovered, self._now, levels=levels)
            while levels.hand_over_next(most=2**62):
                pass
            while timers.hand_over_next(self._now.wall_ms):
                pass
            durability = Durability(
                store,
                {service.NAME: levels, timers_module.NAME: timers},
                Retention(Current(RetentionConfig()), files, store.log),
                _NoWorkers(),
                Current(DurabilityConfig()),
                _NoWatcher(),
                WantedPosition(),
                self._now,
            )
            store.checkpoint.index_timestamp = old.index_timestamp
            if self._index is not None:
                seconds = self._now.wall_ms / 1000
                report.index_files = self._index.write(os.path.join(self._new, file_names.INDEX), seconds)
                store.checkpoint.index_timestamp = self._index.end_ms
            report.lacks_index = not source.is_ours and not files.list(os.path.join(source.root, file_names.INDEX))
            durability.take_over(self._now)
            report.levels = {number: level.waiting for number, level in sorted(levels.levels.items()) if level.waiting}
            report.delays_assumed = self._assumed_levels(levels)
            report.timers = timers.state(self._now.wall_ms).pending
            self._add_topics(store, topics, known_topics)
            offsets = {number: level.offset for number, level in levels.levels.items()}
            made = store_differences.Made(self._new, offsets, _waiting(timers), recovered.end)
            timers.close()
            report.differences += store_differences.find(source.root, made, files, is_ours=source.is_ours)
        finally:
            store.abandon()
            if self._index is not None:
                self._index.close()
        return report

    def _rules(self, ours: Checkpoint) -> Note:
        """Return the tables and clocks by which messages of levels have their deliver times. The commitlog does not
        contain them; without duemq's old checkpoint, each message is due at the time that was promised when its record
        was stored."""
        note = runs.decode(ours.notes.get(service.NAME, b""))
        return note or Note(runs.table_crc(self._table.text), {}, array("q"))

    def _assumed_levels(self, levels: LevelQueues) -> list[int]:
        if self._source.has_table:
            return []
        assumed = self._levels_of_table - self._known_levels
        return [number for number, level in sorted(levels.levels.items()) if level.waiting and number in assumed]

    def _deliver_time(self, level: int, stored_ms: int) -> int:
        """Return the deliver time (ms since the epoch) of one of RocketMQ's records, which does not contain it: the
        time that its old queue promises, or else the time by the table."""
        assert self._promised is not None, "the commitlog is open"
        delay = self._promised.find(level, stored_ms)
        if delay is not None:
            return stored_ms + delay
        self._levels_of_table.add(level)
        return self._table.deliver_time(level, stored_ms)

    def _find_table(self, promised: PromisedDelays) -> None:
        """Derive the levels' delays, if no table is configured, from the deliver times in what is left of the levels'
        queues. Only RocketMQ's records need that; each of duemq's contains its deliver time."""
        if self._source.has_table:
            return
        delays = self._table.delays_ms
        for level in promised.levels():
            delay = promised.newest(level)
            if delay is not None:
                delays += [delays[-1]] * (level - len(delays))
                delays[level - 1] = delay
                self._known_levels.add(level)
        self._table = DelayLevels(" ".join(f"{delay // 1000}s" for delay in delays))

    def _queue_check(self) -> QueueCheck:
        """Return the removed topics and queues in the store's queuecheck, if duemq wrote it."""
        source, files = self._source, self._source.files
        found = QueueCheck(
            files,
            os.path.join(source.root, file_names.QUEUE_CHECK),
            os.path.join(source.root, file_names.CONSUME_QUEUES),
            queue_file_size(source.config.queue_segment_size),
        )
        known = checkpoint.load(files, os.path.join(source.root, file_names.CHECKPOINT))
        if source.is_ours and not known.is_foreign and queue_check.NAME in known.notes:
            found.load(known.recovery_offset or 0)
        return found

    def _read(self, store: MessageStore, check: QueueCheck, known_topics: set[str] | None, served_to: int) -> Recovered:
        report, begin = self._report, store.log.begin
        total = store.log.allocated_end - begin
        left_out = _LeftOut(self._source, known_topics)
        deliveries = Deliveries(store.log) if self._index is None else _Indexing(store.log, self._index)
        recovered = store.make_anew(
            deliveries,
            self._goes_on_at(check, begin),
            left_out,
            served_to,
            lambda position: self._on_read(position - begin, total),
        )
        deliveries.finish()
        report.commitlog_begin, report.commitlog_end = begin, recovered.end
        report.records, report.damages = recovered.records, recovered.damages
        report.torn, report.behind = recovered.torn, recovered.behind
        report.queues = sum(1 for queue in store.all_queues() if queue.next_offset)
        report.topics_left_out = sorted(left_out.found)
        return recovered

    def _goes_on_at(self, check: QueueCheck, begin: int) -> dict[Key, int]:
        """Return the next queue offsets of queues whose records have all expired, from what is left of their files."""
        source, found = self._source, dict[Key, int]()
        directory = os.path.join(source.root, file_names.CONSUME_QUEUES)
        for topic, name in queue_names(source.files, directory):
            offset = _end_of_expired(os.path.join(directory, topic, name), begin)
            if offset:
                found[topic, int(name)] = offset
        for key in check.segments:
            found[key] = max(found.get(key, 0), check.next_offset(key))
        return found

    def _add_topics(self, store: MessageStore, topics: dict[str, Any], known: set[str] | None) -> None:
        """If topics.json lacks topics that have messages, write one that has them."""
        config = self._source.config
        table = topics.get("topicConfigTable")
        table = table if isinstance(table, dict) else {}
        added = list(missing_topics(store, table, lambda name: is_own_topic(name, config)))
        if not added:
            return
        made = {**table, **{topic.topic_name: topic.to_json() for topic in added}}
        file = ConfigFile(self._source.files, os.path.join(self._new, file_names.TOPICS))
        file.write({**topics, "topicConfigTable": made})
        self._report.topics_added = sorted(topic.topic_name for topic in added)
        why = "lacks" if known is not None else "is missing or damaged, and with it"
        self._report.differences.append(
            Difference(file_names.TOPICS, f"{why} topics that have messages: {_first_of(self._report.topics_added)}")
        )


class _Indexing(Deliveries):
    """Passes records to the index as well."""

    def __init__(self, log: Commitlog, index: IndexMaker) -> None:
        super().__init__(log)
        self._index = index

    def look(self, record: ScannedRecord) -> None:
        """Note which message a record delivers or moves, and pass the record to the index. May wait for the disk.
        Raises OSError."""
        super().look(record)
        self._index.look(record)


class _LeftOut:
    """The deleted topics: those that are not in topics.json, and whose queues have no files."""

    def __init__(self, source: _Source, known: set[str] | None) -> None:
        self._source = source
        self._known = known
        files, directory = source.files, os.path.join(source.root, file_names.CONSUME_QUEUES)
        # A directory alone shows nothing: Apache's deleteTopic leaves that of the topic.
        self._with_files = {
            topic
            for topic, queue in queue_names(files, directory)
            if any(name.isdecimal() for name in files.list(os.path.join(directory, topic, queue)))
        }
        self.found: set[str] = set()

    def __contains__(self, topic: object) -> bool:
        if self._known is None or topic in self._known or not isinstance(topic, str):
            return False
        if is_own_topic(topic, self._source.config) or topic.startswith(RETRY_PREFIX):
            return False
        if topic in self._with_files:
            return False
        self.found.add(topic)
        return True


def _waiting(timers: Timers) -> NDArray[np.int64]:
    """Return the physical offsets of the messages in the wheel, ascending."""
    found = [np.empty(0, np.int64)]
    for part in timers.units_waiting():
        assert not isinstance(part, ColdRead), "reads may wait here"
        found.append(part["physical"].astype(np.int64))
    return union(found)


def _end_of_expired(directory: str, begin: int) -> int:
    """Return the next queue offset of a queue whose last unit is of a record before the commitlog's begin; 0 for
    others."""
    names = sorted(name for name in os.listdir(directory) if name.isdecimal() and len(name) == 20)
    for name in reversed(names):
        units = written_units(os.path.join(directory, name))
        used = np.flatnonzero(units["size"] > 0)
        if len(used):
            last = units[used[-1]]
            is_expired = int(last["size"]) == PADDING_SIZE or int(last["physical_offset"]) < begin
            return int(name) // UNIT_SIZE + int(used[-1]) + 1 if is_expired else 0
    return int(names[0]) // UNIT_SIZE if names else 0


def _first_of(names: list[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- into the store


def _swap(root: str, partial: str, lock: Lock) -> None:
    """Move the rebuilt files into the store. Raises OSError."""
    files = OsFiles()
    new, old = os.path.join(partial, "new"), os.path.join(partial, "old")
    _sync_tree(new)
    os.makedirs(os.path.join(old, file_names.CONFIG))
    os.makedirs(os.path.join(root, file_names.CONFIG), exist_ok=True)
    for directory in (os.path.join(old, file_names.CONFIG), old, partial, root):
        files.sync_directory(directory)
    for name in _REPLACED:
        there, made, kept = (os.path.join(base, name) for base in (root, new, old))
        is_made = os.path.lexists(made)
        if not is_made and name in _KEPT:
            continue
        if os.path.lexists(there):
            os.rename(there, kept)
            files.sync_directory(os.path.dirname(kept))
        if is_made:
            os.rename(made, there)
        files.sync_directory(os.path.dirname(there))
    lock.claim()
    # From here on nothing is put back, and the store may be opened.
    os.rename(old, f"{old}.done")
    files.sync_directory(partial)


def _put_back(root: str, partial: str) -> None:
    """Undo an interrupted run: put back the files that it moved away and has not replaced. Raises OSError."""
    old = os.path.join(partial, "old")
    for name in _REPLACED:
        there, kept = os.path.join(root, name), os.path.join(old, name)
        if os.path.lexists(kept) and not os.path.lexists(there):
            os.rename(kept, there)
    shutil.rmtree(partial, ignore_errors=True)


def _copy(source: str, target: str) -> None:
    """Copy a file or a directory, keeping holes. Raises RepairError."""
    done = subprocess.run(
        ["cp", "-a", "--sparse=always", source, target], check=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise RepairError(f"{source} could not be copied: {done.stderr.strip().splitlines()[-1]}")


def _sync_tree(root: str) -> None:
    """Make everything in a directory durable. Raises OSError."""
    for directory, _, names in os.walk(root, topdown=False):
        for path in [*(os.path.join(directory, name) for name in names), directory]:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
