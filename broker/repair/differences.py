"""Finds faults in the files beside a commitlog: their differences from files that were rebuilt from it.

    consumequeue/      unit by unit: the record and its size, except for marks of withdrawn and delivered messages; in
                       the schedule topic also the deliver time
    consumequeue_ext/  whether the units of messages there have the tags codes
    abort              whether the broker that last had the store stopped cleanly; in duemq's stores also whether the
                       checkpoint is of the commitlog's end. If not, the last deliveries are missing from the two files
                       below, and Apache's brokers, which go by these, would repeat them
    delayOffset.json   by level
    timercheck         of duemq's stores: whether it agrees with the checkpoint
    timer wheel        whether each waiting message is in a slot that is still to come, or in the timer topic's queue
                       behind the part already read; and whether the wheel's slots lead to the timer log's units

Each file is reported once, with the first position in it that is wrong.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler import waiting as waits
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import UNIT_SIZE as TIMER_UNIT_SIZE
from duemq.scheduler.timers.files.unit import seconds_of
from duemq.scheduler.timers.files.wheel import TimerWheel
from duemq.scheduler.timers.index.sorted_offsets import is_among, union
from duemq.storage import file_names
from duemq.storage.config_file import ConfigFile
from duemq.storage.durability import checkpoint
from duemq.storage.errors import StoreFormatError
from duemq.storage.files import Files
from duemq.storage.log.copies import UNITS
from duemq.storage.queues import extension
from duemq.storage.queues.consume_queue import MARK_SIZES, PADDING_SIZE, UNIT_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]

_AT_ONCE: Final = 65_536
"""Number of units that are compared at a time."""


class Difference(NamedTuple):
    """A fault in a file."""

    path: str
    """Path relative to the store's directory."""
    why: str


class Made(NamedTuple):
    """The rebuilt files and what they contain."""

    root: str
    levels: dict[int, int]
    """The next queue offset of each level."""
    waiting: Integers
    """Physical offsets, ascending, of messages in the timer wheel."""
    end: int
    """The end of the commitlog, a physical offset."""


def find(root: str, made: Made, files: Files, *, is_ours: bool) -> list[Difference]:
    """Return the differences of the files under `root` from the rebuilt ones. `is_ours`: whether duemq had the store
    last. Raises OSError."""
    found = list(_queues(root, made.root, files))
    found += _ending(root, made.end, files, is_ours=is_ours)
    found += _delay_offsets(root, made.levels, files)
    if is_ours:
        found += _timercheck(root, files)
    if len(made.waiting):
        found += _timers(root, made.waiting, files, is_ours=is_ours)
    return found


# --- consume queues


class _Queue:
    """The files of one queue, as bytes."""

    def __init__(self, directory: str) -> None:
        names = numbered(directory)
        self.sizes = {os.path.getsize(os.path.join(directory, name)) for name in names}
        """Sizes of the queue's files, in bytes; a broker requires that all have one size."""
        self._files = [
            (int(name), size, os.path.join(directory, name))
            for name in names
            if (size := _written(os.path.join(directory, name)))
        ]

    @property
    def bounds(self) -> tuple[int, int]:
        """The first queue offset in the files, and the one behind the last."""
        if not self._files:
            return 0, 0
        first, last = self._files[0], self._files[-1]
        return first[0] // UNIT_SIZE, (last[0] + last[1]) // UNIT_SIZE

    def units(self, start: int, end: int) -> NDArray[Any]:
        """Return the units from queue offset `start` up to, but without, `end`; zeros where there is no file."""
        result = bytearray((end - start) * UNIT_SIZE)
        low, high = start * UNIT_SIZE, end * UNIT_SIZE
        for base, size, path in self._files:
            first, last = max(low, base), min(high, base + size)
            if first < last:
                with open(path, "rb") as file:
                    file.seek(first - base)
                    data = file.read(last - first)
                result[first - low : first - low + len(data)] = data
        return np.frombuffer(bytes(result), UNITS)


class ExtensionFiles:
    """The files of the extension of one queue, as bytes."""

    def __init__(self, directory: str) -> None:
        names = numbered(directory)
        self._files = [(int(name), os.path.join(directory, name)) for name in names]

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at an offset over all files: fewer where the files end, zeros before they begin. Raises
        OSError."""
        return extension.read_of(self._files, _read_file, offset, size)


def _read_file(path: str, at: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(at)
        return file.read(size)


def numbered(directory: str) -> list[str]:
    """Return the names in a directory that are numbers, sorted; none if there is no directory. Raises OSError."""
    return sorted(name for name in os.listdir(directory) if name.isdecimal()) if os.path.isdir(directory) else []


def written_units(path: str) -> NDArray[Any]:
    """Return the units of a consume queue file, as `storage.log.copies.UNITS`, without the hole behind them. Raises
    OSError."""
    with open(path, "rb") as file:
        data = file.read(_written(path))
    return np.frombuffer(data, UNITS, len(data) // UNIT_SIZE)


def _written(path: str) -> int:
    """Return the number of bytes before a file's trailing hole, rounded up to whole units: most of a queue's file is a
    hole."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, end = os.fstat(fd).st_size, 0
        while end < size:
            try:
                end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # only a hole follows
                    return size
                break
        return min(size, -(-end // UNIT_SIZE) * UNIT_SIZE)
    finally:
        os.close(fd)


def _queues(root: str, new: str, files: Files) -> Iterator[Difference]:
    old_directory, new_directory = (
        os.path.join(root, file_names.CONSUME_QUEUES),
        os.path.join(new, file_names.CONSUME_QUEUES),
    )
    names = chain.from_iterable(queue_names(files, each) for each in (old_directory, new_directory))
    known = {(topic, int(name)) for topic, name in names}
    for topic, queue_id in sorted(known):
        path = f"{file_names.CONSUME_QUEUES}/{topic}/{queue_id}"
        old = _Queue(os.path.join(old_directory, topic, str(queue_id)))
        made = _Queue(os.path.join(new_directory, topic, str(queue_id)))
        extended = ExtensionFiles(os.path.join(root, file_names.QUEUE_EXTENSIONS, topic, str(queue_id)))
        why, wrong_extension = _compared(topic, old, made, extended.read)
        if made.sizes and (others := sorted(old.sizes - made.sizes)):
            sizes = " and ".join(map(str, others))
            why = f"{why}{' and ' if why else ''}has files of {sizes} bytes instead of {max(made.sizes)}"
        if why:
            yield Difference(path, why)
        if wrong_extension:
            yield Difference(f"{file_names.QUEUE_EXTENSIONS}/{topic}/{queue_id}", wrong_extension)


def queue_names(files: Files, directory: str) -> Iterator[tuple[str, str]]:
    """Yield topic and queue id, as their directories in consumequeue/ are named, of each queue that has one."""
    for topic in files.list(directory):
        for name in files.list(os.path.join(directory, topic)):
            if name.isdecimal():
                yield topic, name


def _compared(topic: str, old: _Queue, made: _Queue, read_extension: extension.Read) -> tuple[str, str]:
    """Return what is wrong with a queue, and what with its extension; an empty text if nothing is."""
    lacks, others, more, not_there = _QueueOffsets(), _QueueOffsets(), _QueueOffsets(), _QueueOffsets()
    start, end = min(old.bounds[0], made.bounds[0]), max(old.bounds[1], made.bounds[1])
    for at in range(start, end, _AT_ONCE):
        stop = min(end, at + _AT_ONCE)
        a, b = old.units(at, stop), made.units(at, stop)
        is_there, has_to_be = _is_unit(a), _is_unit(b)
        is_same = (a["physical_offset"] == b["physical_offset"]) & _is_same_size(a["size"], b["size"])
        codes = a["tags_code"].astype(np.int64)
        is_extended = codes <= extension.EXT_ADDRESS_MAX
        codes[is_extended] = extension.heads(codes[is_extended], read_extension)["tags_code"]
        if topic != TIMER_TOPIC:  # in the timer topic, RocketMQ's units have the hash of the tags, duemq's the time
            not_there.add(at, is_same & is_extended & (codes != b["tags_code"]))
            is_same &= is_extended | (codes == b["tags_code"])
        is_same |= (a["size"] == PADDING_SIZE) & (b["size"] == PADDING_SIZE)
        lacks.add(at, has_to_be & ~is_there)
        others.add(at, has_to_be & is_there & ~is_same)
        more.add(at, is_there & ~has_to_be & (a["size"] != PADDING_SIZE) & (b["size"] == 0))
    parts = []
    if lacks.count:
        parts.append(f"lacks {lacks.text}")
    if others.count:
        parts.append(f"has other bytes in {others.text}")
    # Units of expired records remain until their file is deleted.
    if more.count and more.first >= made.bounds[0] and made.bounds[1]:
        parts.append(f"has {more.text} of no record")
    return " and ".join(parts), f"has other tags codes, or none, for {not_there.text}" if not_there.count else ""


def _is_unit(units: NDArray[Any]) -> Mask:
    sizes = units["size"]
    found: Mask = (sizes > 0) & ((sizes != PADDING_SIZE) | (units["physical_offset"] > 0))
    return found


def _is_same_size(a: NDArray[Any], b: NDArray[Any]) -> Mask:
    same: Mask = (a == b) | np.isin(a, MARK_SIZES) | np.isin(b, MARK_SIZES)
    return same


class _QueueOffsets:
    """Queue offsets, described in a few words."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = -1

    def add(self, start: int, mask: Mask) -> None:
        at = np.flatnonzero(mask)
        if len(at):
            self.first = self.first if self.count else start + int(at[0])
            self.last = start + int(at[-1])
            self.count += len(at)

    @property
    def text(self) -> str:
        if self.count == 1:
            return f"unit {self.first}"
        if self.last - self.first + 1 == self.count:
            return f"units {self.first} to {self.last}"
        return f"{self.count} units from {self.first} to {self.last}"


# --- how the broker ended


def _ending(root: str, end: int, files: Files, *, is_ours: bool) -> Iterator[Difference]:
    is_whole = True
    if is_ours:
        known = checkpoint.load(files, os.path.join(root, file_names.CHECKPOINT))
        is_whole = known.is_foreign or known.recovery_offset in (None, end)
    if os.path.exists(os.path.join(root, file_names.ABORT)) or not is_whole:
        yield Difference(file_names.ABORT, "the broker was killed: Apache's would repeat its last deliveries")


def _timercheck(root: str, files: Files) -> Iterator[Difference]:
    """Check timercheck of duemq's stores; RocketMQ's have nothing to compare it with."""
    note = _timer_note(root, files)
    if note is None or not note.queue_offset:
        return
    check = small_files.load_check(files, os.path.join(root, file_names.TIMER_CHECK))
    if check is None:
        yield Difference(file_names.TIMER_CHECK, "is missing or cut off")
    elif (waits.second_of(check), check.queue_offset) != (note.second, note.queue_offset):
        yield Difference(file_names.TIMER_CHECK, "disagrees with the checkpoint")


def _timer_note(root: str, files: Files) -> small_files.TimerNote | None:
    """Return the progress of the timers in the checkpoint; None if it does not contain that."""
    known = checkpoint.load(files, os.path.join(root, file_names.CHECKPOINT))
    return None if known.is_foreign else small_files.decode_note(known.notes.get("timers", b""))


# --- delay levels


def _delay_offsets(root: str, levels: dict[int, int], files: Files) -> Iterator[Difference]:
    path = file_names.DELAY_OFFSETS
    file = ConfigFile(files, os.path.join(root, path))
    try:
        table = file.read()
        known = {int(level): int(offset) for level, offset in (table.get("offsetTable") or {}).items()}
    except (StoreFormatError, ValueError, TypeError, AttributeError) as error:
        yield Difference(path, f"cannot be read: {error}")
        return
    wrong = {level: offset for level, offset in levels.items() if known.get(level, 0) != offset}
    if wrong:
        parts = [f"level {level} at {known.get(level, 0)} instead of {offset}" for level, offset in wrong.items()]
        yield Difference(path, ("is missing: " if not table and not file.is_newest else "has ") + ", ".join(parts))


# --- timers


def _timers(root: str, waiting: Integers, files: Files, *, is_ours: bool) -> Iterator[Difference]:
    check = small_files.load_check(files, os.path.join(root, file_names.TIMER_CHECK))
    note = None
    if is_ours:
        note = _timer_note(root, files)
        if note is None:
            yield Difference(file_names.CHECKPOINT, "does not say how far the timers are")
            return
    elif check is None:
        yield Difference(file_names.TIMER_CHECK, "is missing or cut off")
        return
    if note is not None:
        second, queue_offset = note.second, note.queue_offset
    else:
        assert check is not None
        second, queue_offset = waits.second_of(check), check.queue_offset
    directory = os.path.join(root, file_names.TIMER_LOG)
    sizes = [os.path.getsize(os.path.join(directory, name)) for name in files.list(directory)]
    log = TimerLog(files, directory, sizes[0] if sizes and sizes[0] else 1 << 20)
    try:
        log.load()
        log.recover(log.begin)
    except StoreFormatError as error:
        yield Difference(file_names.TIMER_LOG, error.why)
        return
    found, last = [np.empty(0, np.int64)], dict[int, int]()
    for position, units in log.scan(log.begin, log.end):
        seconds = seconds_of(units)
        live = waits.is_live(units, seconds, second)
        found.append(units["physical_offset"][live].astype(np.int64))
        at = position + np.flatnonzero(seconds >= second) * TIMER_UNIT_SIZE
        last.update(zip(seconds[seconds >= second].tolist(), at.tolist(), strict=True))
    log.close()
    behind = _behind(root, queue_offset)
    in_log = is_among(waiting, union(found))
    missing = int((~in_log & ~is_among(waiting, behind)).sum())
    if missing:
        there = "is missing, and with it" if not sizes else "lacks"
        yield Difference(file_names.TIMER_LOG, f"{there} {missing} of {len(waiting)} messages that wait")
    yield from _wheel(root, last, files, waiting)


def _behind(root: str, queue_offset: int) -> Integers:
    """Return the physical offsets in the timer topic's queue from a queue offset on."""
    queue = _Queue(os.path.join(root, file_names.CONSUME_QUEUES, TIMER_TOPIC, "0"))
    units = queue.units(queue_offset, max(queue_offset, queue.bounds[1]))
    return union([units["physical_offset"][_is_unit(units)].astype(np.int64)])


def _wheel(root: str, last: dict[int, int], files: Files, waiting: Integers) -> Iterator[Difference]:
    wheel = TimerWheel(files, os.path.join(root, file_names.TIMER_WHEEL))
    try:
        if not wheel.open():
            yield Difference(file_names.TIMER_WHEEL, f"is missing; {len(waiting)} messages wait in it")
            return
    except StoreFormatError as error:
        yield Difference(file_names.TIMER_WHEEL, error.why)
        return
    wrong = sum(wheel.last(second) != position for second, position in last.items())
    wheel.close()
    if wrong:
        yield Difference(
            file_names.TIMER_WHEEL, f"has other positions for {wrong} of {len(last)} seconds with messages"
        )
