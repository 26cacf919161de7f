"""The files of a store, wherever they lie: on this machine or in any file system that pyarrow knows (hdfs://, s3://).

Files of this machine are read with `os`, not with pyarrow: pyarrow reports neither inodes, by which files that were
exchanged are found, nor the holes of sparse files, which need not be read.

`storage.file_names` says what each file is for. `StoreFiles` knows which files there are and up to where they may be
read; it is small, and is sent to Spark's tasks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import threading
from functools import cached_property
from itertools import chain, pairwise, repeat
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records.record import MAGIC_END, MAGIC_V1, MAGIC_V2, MIN_SIZE, RecordSummary, summarize
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.table import DelayLevels
from duemq.spark_jobs.columns.records import PADDING, walk_records
from duemq.spark_jobs.errors import CannotRead, JobError, NoStore, cannot_read
from duemq.spark_jobs.store.local_files import file_system, is_local, local_path, shown
from duemq.spark_jobs.store.walks import Range, Segment, walks
from duemq.storage import file_names
from duemq.storage.durability import checkpoint
from duemq.storage.errors import NotRegular
from duemq.storage.log.commitlog import DEFAULT_SEGMENT_SIZE
from duemq.storage.log.copies import UNITS
from duemq.storage.queues import extension
from duemq.storage.queues.consume_queue import DEFAULT_SEGMENT_SIZE as DEFAULT_QUEUE_FILE_SIZE
from duemq.storage.queues.consume_queue import MARK_SIZES, PADDING_SIZE
from duemq.storage.queues.consume_queue import UNIT as _UNIT
from duemq.storage.queues.tags_codes import unit_tags_code
from duemq.storage.regular_files import open_regular, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

_SEGMENT_NAME: Final = re.compile(r"\d{20}")
_TABLES: Final = {
    file_names.TOPICS: "topicConfigTable",
    file_names.CONSUMER_OFFSETS: "offsetTable",
    file_names.DELAY_OFFSETS: "offsetTable",
}
"""Tables that jobs read, each with the field that holds its entries."""
_LOCAL: Final = threading.local()
_TABLE: Final = DelayLevels()
"""RocketMQ's default table of delay levels, since jobs do not know the broker's table."""
_NOT_KNOWN: Final = -1
"""In place of a deliver time."""
_GAP: Final = 65_536
"""Largest distance, in bytes, of records that are read together."""
_MAX_EXTENTS: Final = 4096
_READ_SIZE: Final = 4 << 20
"""Bytes of a file that are read at a time to find one that is not zero."""
_TRIES: Final = 3
"""Number of attempts to read a store's directories while its files disappear."""


_FOLDERS: Final = (file_names.COMMITLOG, file_names.CONSUME_QUEUES, file_names.TIMER_LOG, file_names.CONFIG)
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Error numbers that mean that no file has this name."""


def _size_of(entry: os.DirEntry[str], *, is_file: bool) -> int | None:
    """Return the bytes of a file; None if it is gone since its directory was listed, as when a broker replaces its
    files. `is_file`: whether it must be a regular file. Raises OSError if it must be one and is not,
    or if a link leads nowhere."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        if entry.is_symlink() and os.path.lexists(entry.path):
            raise
        return None
    if is_file and stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), entry.path)
    if is_file and not stat.S_ISREG(status.st_mode):  # reading a pipe would block
        raise NotRegular(errno.EINVAL, "is not a regular file", entry.path)
    return status.st_size


def is_segment(name: str) -> bool:
    """Return whether a file has the name of a file of a commitlog or of a consume queue."""
    return _SEGMENT_NAME.fullmatch(name) is not None


def _can_be_topic(name: str) -> bool:
    """Return whether a text, maybe of a damaged record, can name a directory of consumequeue/ and cannot lead out of
    it."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _cut(segment: Segment) -> str:
    """Return the reason of a gap that exists since a file is shorter than it was."""
    return f"the file was cut to {segment.size} bytes"


class Version(NamedTuple):
    """The properties that distinguish a file from other files, and from itself before it was written to."""

    node: int
    """The inode; 0 where the file system has none."""
    size: int
    modified_ns: int
    """Time of the last change of its bytes, ns since the epoch."""
    changed_ns: int
    """Time of the last change of the file or its inode, ns since the epoch, which no program can set; 0 if the file
    system does not have it."""


class QueueFile(NamedTuple):
    """A file of a consume queue. `first_unit`: the queue offset of its first unit; `size` in bytes."""

    topic: str
    queue_id: int
    first_unit: int
    path: str
    size: int


class StoreFiles:
    """A store's files. Made by `open`."""

    def __init__(self, path: str) -> None:
        self._uri = path
        self.path = shown(path)
        """The path or URI as given, without credentials."""
        self.segments: list[Segment] = []
        self.segment_size = DEFAULT_SEGMENT_SIZE
        """Bytes of each commitlog file."""
        self.readable_end = 0
        """The physical offset where readers stop."""
        self.written_end = 0
        """The physical offset up to which there are bytes; in a running broker's store these may be unflushed."""
        self._unflushed: list[Segment] = []
        """Files at the end, in order of removal from `segments`, that may not be read yet."""
        self._unwritten: list[Segment] = []
        """The files at the end in which no byte was written, in order."""
        self.is_running = False
        """Whether a broker has the store open: by its lock, or elsewhere than on this machine by its file `abort`."""
        self.is_clean = True
        """Whether the last broker was stopped cleanly, as the missing file `abort` shows."""
        self._recovery: int | None = None
        self.written_by = "rocketmq"
        """Which broker wrote the store last: duemq or rocketmq."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, since: int = 0, unflushed: bool = False) -> StoreFiles:
        """Open the store at a path or URI. `since`: a physical offset at which a record starts, known to be flushed, so
        that less is read to find the end. `unflushed`: if a broker has the store open, read on to the last whole
        record. Raises NoStore if there is none, JobError if it cannot be read."""
        store = cls(os.fspath(path))
        for looks_left in reversed(range(_TRIES)):
            try:
                store._look(since, unflushed=unflushed)
                break
            except JobError:
                raise
            except FileNotFoundError as error:
                # A running broker removes expired files.
                if not looks_left:
                    raise JobError(f"{store.path}: cannot be read: {error}") from None
            except (OSError, ValueError) as error:
                raise JobError(f"{store.path}: cannot be read: {error}") from None
        return store

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    # Finding the files

    def _look(self, since: int, *, unflushed: bool) -> None:
        entries = self._entries("")
        if entries is None:
            raise NoStore(self.path, "there is no such directory; give the directory that holds commitlog/")
        names = [name for name, _ in entries]
        if file_names.COMMITLOG not in names:
            if any(_SEGMENT_NAME.fullmatch(name) for name in names):
                raise NoStore(self.path, "holds commitlog files; give the directory above it")
            if "store" in names:
                raise NoStore(self.path, f"is not a store; did you mean {self.path.rstrip('/')}/store?")
            why = (
                "has no commitlog/, so it is not a duemq or RocketMQ store"
                if names
                else "is empty: no broker wrote here"
            )
            raise NoStore(self.path, why)
        found = [(name, size) for name, size in self.sizes(file_names.COMMITLOG) if _SEGMENT_NAME.fullmatch(name)]
        if not any(size for _, size in found):
            self._be_new(is_clean=file_names.ABORT not in names, has_files=bool(found))
            return
        # Retention leaves no file of 0 bytes: unless it is the last one, its records were destroyed.
        self.segments = [Segment(int(name), f"{file_names.COMMITLOG}/{name}", size) for name, size in sorted(found)]
        self.segment_size = max(segment.size for segment in self.segments)
        self._check_sequence()
        self.is_clean = file_names.ABORT not in names
        self.is_running = self._is_locked()
        self._drop_empty()
        self._find_end(since)
        if self.is_running and unflushed:
            self.readable_end = self.written_end = self._written_end()
            self.readable_end = self.records_end(since)
        while len(self.segments) > 1 and self.segments[-1].first_offset >= self.readable_end:
            # Nothing of a running broker's last file is flushed yet.
            self._unflushed.append(self.segments.pop())

    def _be_new(self, *, is_clean: bool, has_files: bool) -> None:
        """Treat the store as one in which no message was stored yet: RocketMQ makes its first file for the first
        message. `has_files`: whether there are files, of 0 bytes. Raises NoStore if messages were stored."""
        stored_ms = checkpoint.decode(self.read_whole(file_names.CHECKPOINT) or b"").physic_timestamp
        if stored_ms or any(len(self.units(file)) for file in self.queue_files()):
            has = "only files of 0 bytes" if has_files else "no files"
            gone = "what they had is gone" if has_files else "its files are gone"
            raise NoStore(self.path, f"its commitlog/ has {has}, but messages were stored: {gone}")
        self.segments = [Segment(0, f"{file_names.COMMITLOG}/{0:020d}", 0)]
        self.is_clean, self.is_running = is_clean, self._is_locked()

    def _check_sequence(self) -> None:
        first = next(segment for segment in self.segments if segment.size)
        head = self.read(first.path, 0, 8)
        magic = struct.unpack(">iI", head)[1] if len(head) == 8 else 0
        if magic not in (0, MAGIC_V1, MAGIC_V2, MAGIC_END) and not self._is_any_record(first):
            raise NoStore(self.path, f"{first.path} starts with {head.hex()}: this is not a RocketMQ commitlog")

    def _is_any_record(self, segment: Segment) -> bool:
        size = min(segment.size, 4 << 20)
        data = np.zeros(size + PADDING, np.uint8)
        data[:size] = np.frombuffer(self.read(segment.path, 0, size), np.uint8)
        return len(walk_records(data, segment.first_offset, size, check_crc=False, is_last=False).records) > 0

    def gaps(self) -> list[tuple[int, int, str]]:
        """Return the stretches of physical offsets that no file has, though records were there: offset, bytes and
        reason. Between two files one is missing, or the one before was cut, maybe to 0 bytes. If the last file with any
        bytes or a later one was cut, the stretch behind it ends at the last record that consume queues and checkpoint
        know."""
        return self.gaps_between() + self._gap_at_end

    def gaps_between(self) -> list[tuple[int, int, str]]:
        """Return those of `gaps` that have a file behind them, without reading consume queues."""
        return [
            (a.end, b.first_offset - a.end, _cut(a) if a.size < self.segment_size else "a file is missing")
            for a, b in pairwise(self.segments)
            if b.first_offset > a.end
        ]

    @cached_property
    def _gap_at_end(self) -> list[tuple[int, int, str]]:
        """The stretch behind the last file that no file has, in the form of `gaps`. Empty where no other file knows of
        records there: a broker that was killed while it made a file may leave one of 0 bytes."""
        files = [*self.segments, *self._unflushed, *self._unwritten]
        last = files[len(files) - len(self._unwritten) - 1]
        # The right size of the only file is unknown.
        cut = next((one for one in (last, *self._unwritten) if one.size < self.segment_size or len(files) == 1), None)
        if cut is None:
            return []
        end = self._known_end()
        if end <= max(cut.end, last.end):
            if not cut.size and len(files) > 1 and self._is_known_later():  # no file shows which record
                end = cut.first_offset + self.segment_size
            else:
                return []
        if self.is_running and dict(self.sizes(file_names.COMMITLOG)).get(os.path.basename(cut.path), 0) > cut.size:
            return []  # the broker was about to make it
        return [(last.end, end - last.end, _cut(cut))]

    def _is_known_later(self) -> bool:
        """Return whether the checkpoint has the time of a record stored later than every record of the last file."""
        known_ms = checkpoint.decode(self.read_whole(file_names.CHECKPOINT) or b"").physic_timestamp
        last = self.segments[-1]
        return not any(
            (chunk.store_ms >= known_ms).any()
            for chunk in self.chunks(last.first_offset, min(last.end, self.readable_end))
        )

    def _known_end(self) -> int:
        """Return the physical offset up to which consume queues and checkpoint know of records."""
        end = self._recovery or 0
        for file in self.queue_files():
            units = self.units(file)
            units = units[units["size"] != PADDING_SIZE]
            if len(units):
                sizes = np.maximum(units["size"].astype(np.int64), 1)  # a mark is not a size
                end = max(end, int((units["physical_offset"].astype(np.int64) + sizes).max()))
        return end

    def _drop_empty(self) -> None:
        """Remove the files at the end without a written byte from `segments`: RocketMQ makes files ahead of need."""
        self._unwritten = []
        while len(self.segments) > 1 and self._is_empty(self.segments[-1]):
            self._unwritten.insert(0, self.segments.pop())

    def _is_empty(self, segment: Segment) -> bool:
        # A file that has a record begins with one, but its first records may have been destroyed.
        end = self._written(segment)
        sizes = chain([MIN_SIZE], repeat(_READ_SIZE))
        at = 0
        while at < end:
            size = min(next(sizes), end - at)
            data = self.read(segment.path, at, size)
            if not data:
                return True
            if np.frombuffer(data, np.uint8).any():
                return False
            at += len(data)
        return True

    def _is_locked(self) -> bool:
        if not self.is_local:
            # Locks are not visible through a URI. A broker that is stopped in order removes the file `abort`.
            return not self.is_clean
        try:
            fd = open_regular(self._local(file_names.LOCK))
        except NotRegular as error:
            raise self._cannot(file_names.LOCK, error) from None
        except OSError:
            return False
        try:
            # Java locks with fcntl; F_GETLK only queries the lock, and does not acquire it.
            query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, query)
            return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _find_end(self, since: int) -> None:
        last = self.segments[-1]
        self._unflushed = []
        self.readable_end = self.written_end = self._written_end()
        data = self.read_whole(file_names.CHECKPOINT) or b""
        found = checkpoint.decode(data)
        recovery = found.recovery_offset
        if not (self.read_whole(file_names.LOCK) or b"").startswith(b"duemq"):
            recovery = None  # RocketMQ had the store since
        if recovery is not None:
            self.written_by = "duemq"
            self._recovery = recovery
        if self.is_running and not data:
            self.readable_end = last.first_offset
        elif self.is_running:
            self.readable_end = self._flushed_end(max(since, recovery or 0), found.physic_timestamp)

    def _flushed_end(self, known: int, physic_ms: int) -> int:
        """Return the physical offset up to which the log is flushed, by the checkpoint. `known`: flushed up to here for
        certain."""
        for segment in reversed(self.segments):
            start, limit = max(known, segment.first_offset), min(segment.end, self.readable_end)
            end = self._flushed(start, limit, physic_ms) if start < limit else limit
            if end > segment.first_offset or known >= segment.first_offset:
                return end
        return self.segments[0].first_offset

    def _written_end(self) -> int:
        return self.segments[-1].first_offset + self._written(self.segments[-1])

    def _flushed(self, start: int, limit: int, physic_ms: int) -> int:
        """Return the physical offset up to which a part of a file is flushed: behind the last record before the first
        one that was not stored before the checkpoint's time, `physic_ms`. `start`: the start of a record, before which
        all is flushed."""
        end = start
        for chunk in self.chunks(start, limit):
            stored = chunk.store_ms
            if not len(stored):
                continue
            later = np.flatnonzero(stored >= physic_ms)
            if len(later):
                return int(chunk.physical_offset[later[0]])
            end = int(chunk.physical_offset[-1] + chunk.sizes[-1])
        return end

    def chunks(self, start: int, end: int) -> Any:
        """Yield the records between two physical offsets of one file, a few MiB at a time."""
        for found in walks(self, Range(start, end), check_crc=False):
            yield found.records

    def records_end(self, since: int = 0) -> int:
        """Return the physical offset behind the last record that may be read. `since` as for `open`."""
        last = self.segments[-1]
        end = since if since >= last.first_offset else last.first_offset
        if end >= self.readable_end:
            return end
        for chunk in self.chunks(end, self.readable_end):
            if len(chunk):
                end = int(chunk.physical_offset[-1] + chunk.sizes[-1])
        return end

    def queues_whole_to(self) -> int:
        """Return the physical offset up to which the consume queues are known to have all units."""
        if self.is_clean and not self.is_running:
            return self.readable_end
        return self._recovery or 0

    def _written(self, segment: Segment) -> int:
        """Return the bytes of a file before the hole at its end."""
        if not self.is_local:
            return segment.size
        try:
            fd = open_regular(self._local(segment.path))
        except OSError as error:
            raise self._cannot(segment.path, error) from None
        try:
            at = 0
            for _ in range(_MAX_EXTENTS):
                try:
                    data = os.lseek(fd, at, os.SEEK_DATA)
                except OSError:
                    return at
                at = os.lseek(fd, data, os.SEEK_HOLE)
                if at >= segment.size:
                    return segment.size
            return segment.size
        finally:
            os.close(fd)

    def segment_of(self, offset: int) -> Segment | None:
        """Return the file that has a physical offset; None without one."""
        for segment in self.segments:
            if segment.first_offset <= offset < segment.end:
                return segment
        return None

    def written_segment_of(self, offset: int) -> Segment | None:
        """Return the file that has a physical offset, even beyond where readers stop; None without one."""
        found = self.segment_of(offset)
        return found or next((one for one in self._unflushed if one.first_offset <= offset < one.end), None)

    def queue_files(self) -> list[QueueFile]:
        """Return the files of all consume queues, ordered by topic, queue and offset."""
        result = []
        for topic in self.names(file_names.CONSUME_QUEUES):
            for queue in self.names(f"{file_names.CONSUME_QUEUES}/{topic}"):
                if not queue.isdecimal():
                    continue
                folder = f"{file_names.CONSUME_QUEUES}/{topic}/{queue}"
                result += [
                    QueueFile(topic, int(queue), int(name) // UNITS.itemsize, f"{folder}/{name}", size)
                    for name, size in self.sizes(folder)
                    if _SEGMENT_NAME.fullmatch(name) and size
                ]
        return sorted(result, key=lambda file: (file.topic, file.queue_id, file.first_unit))

    def unit(self, topic: str, queue_id: int, queue_offset: int) -> tuple[int, int] | None:
        """Return the physical offset and the size in a unit of a consume queue; None if there is no such unit. The
        topic may be any text, even one that cannot name a directory."""
        if not _can_be_topic(topic):
            return None
        file_size = self._queue_file_size
        at = queue_offset * UNITS.itemsize
        name = f"{file_names.CONSUME_QUEUES}/{topic}/{queue_id}/{at // file_size * file_size:020}"
        try:
            data = self.read(name, at % file_size, UNITS.itemsize)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return None
        if len(data) < UNITS.itemsize:
            return None
        offset, size, _ = _UNIT.unpack(data)
        return (offset, size) if size else None

    def units_at(self, topic: str, queue_id: int, first: int, count: int) -> NDArray[Any]:
        """Return `count` units of a consume queue from a queue offset on, as UNITS; zeros where there are none. The
        topic may be any text, even one that cannot name a directory. Addresses in consumequeue_ext are looked up, see
        `storage.queues.extension`."""
        if not _can_be_topic(topic):
            return np.zeros(count, UNITS)
        file_size, size = self._queue_file_size, UNITS.itemsize
        parts = []
        at, end = first * size, (first + count) * size
        while at < end:
            stop = min(end, at // file_size * file_size + file_size)
            name = f"{file_names.CONSUME_QUEUES}/{topic}/{queue_id}/{at // file_size * file_size:020}"
            try:
                data = self.read(name, at % file_size, stop - at)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                data = b""
            parts.append(data.ljust(stop - at, b"\0"))
            at = stop
        return self._looked_up(topic, queue_id, np.frombuffer(b"".join(parts), UNITS), _TABLE.deliver_time)

    def _looked_up(
        self, topic: str, queue_id: int, units: NDArray[Any], deliver_time: Callable[[int, int], int]
    ) -> NDArray[Any]:
        """Return units of a queue with tags codes in place of addresses. `deliver_time`: returns the deliver time of a
        record for which no file has it, or _NOT_KNOWN, in which case the address stays."""
        codes = units["tags_code"].astype(np.int64)
        is_address = codes <= extension.EXT_ADDRESS_MAX
        if not is_address.any():
            return units
        folder = f"{file_names.QUEUE_EXTENSIONS}/{topic}/{queue_id}"
        files = [(int(name), f"{folder}/{name}") for name, size in self.sizes(folder) if is_segment(name) and size]

        def read_file(path: str, at: int, size: int) -> bytes:
            try:
                return self.read(path, at, size)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                return b""  # a running broker has removed the file

        def read(offset: int, size: int) -> bytes:
            return extension.read_of(files, read_file, offset, size)

        is_level = topic == SCHEDULE_TOPIC

        def own_code(told: RecordSummary) -> int | None:
            code = unit_tags_code(topic, told, deliver_time)
            return None if is_level and code == _NOT_KNOWN else code

        found = extension.tags_codes_of(units, self._summaries, own_code, read, is_level=is_level)
        return extension.with_codes(units, found)

    def _summaries(self, units: NDArray[Any]) -> list[RecordSummary | None]:
        """Return the summaries of the records of some units; None for units that have no record. Neighbours are read
        together. Raises CannotRead."""
        records = zip(units["physical_offset"].tolist(), units["size"].tolist(), range(len(units)), strict=True)
        found = list[RecordSummary | None]([None]) * len(units)
        group: list[tuple[int, int, int]] = []
        begin = end = 0
        for offset, noted, row in sorted(records):
            size = noted
            if size in MARK_SIZES or size > _READ_SIZE:  # it is marked, or large, or the unit is damaged
                size = int.from_bytes(self._bytes_at(offset, 4), "big", signed=True)
            if not end <= offset <= end + _GAP or offset + size > begin + _READ_SIZE:
                self._summarize(group, found)
                group, begin = [], offset
            group.append((offset, size, row))
            end = offset + max(size, 0)
        self._summarize(group, found)
        return found

    def _summarize(self, group: list[tuple[int, int, int]], found: list[RecordSummary | None]) -> None:
        """Note the summaries of neighbouring records: physical offset, size and row of each, in ascending order."""
        if group:
            begin, end = group[0][0], group[-1][0] + group[-1][1]
            data = self._bytes_at(begin, end - begin)
            for offset, size, row in group:
                found[row] = summarize(data[offset - begin : offset - begin + size], offset) if size > 0 else None

    def _bytes_at(self, offset: int, size: int) -> bytes:
        """Return bytes of the commitlog, fewer where there is none. Raises CannotRead."""
        parts = list[bytes]()
        for segment in self.segments:
            start, stop = max(offset, segment.first_offset), min(offset + size, segment.end)
            if start < stop:
                try:
                    parts.append(self.read(segment.path, start - segment.first_offset, stop - start))
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise
        return b"".join(parts)

    @cached_property
    def _queue_file_size(self) -> int:
        """Bytes of a consume queue's file (mappedFileSizeConsumeQueue): the largest found, else RocketMQ's default."""
        return max((file.size for file in self.queue_files()), default=DEFAULT_QUEUE_FILE_SIZE)

    def units(self, file: QueueFile) -> NDArray[Any]:
        """Return the units of a file of a consume queue, as UNITS, without the zeros behind the last one. Addresses in
        consumequeue_ext are looked up, see `storage.queues.extension`."""
        return self._looked_up(file.topic, file.queue_id, self.stored_units(file), _TABLE.deliver_time)

    def units_to_copy(self, file: QueueFile) -> NDArray[Any]:
        """Return the units of a file of a consume queue for another store, as UNITS, with addresses in consumequeue_ext
        looked up. If a deliver time can be found only with the broker's table of delay levels, the address stays, and
        the broker finds the time."""
        return self._looked_up(file.topic, file.queue_id, self.stored_units(file), lambda level, stored: _NOT_KNOWN)

    def stored_units(self, file: QueueFile) -> NDArray[Any]:
        """Return the units of a file of a consume queue as they are stored, else as `units` does."""
        size = file.size
        if self.is_local:
            size = min(size, self._written(Segment(0, file.path, file.size)))
        units = np.frombuffer(self.read(file.path, 0, size - size % UNITS.itemsize), UNITS)
        used = np.flatnonzero(units["size"])
        return units[: used[-1] + 1] if len(used) else units[:0]

    # Reading

    @property
    def is_local(self) -> bool:
        """Whether the store lies in this machine's file system."""
        return is_local(self.path)

    @property
    def local_path(self) -> str:
        """The store's path in this machine's file system. Raises JobError for a URI of another one."""
        return local_path(self.path)

    def _local(self, name: str) -> str:
        return os.path.join(self.local_path, name)

    def _remote(self) -> tuple[Any, str]:
        """Return pyarrow's file system and the path in it. One for each thread, since it cannot be sent to other
        processes."""
        known: dict[str, tuple[Any, str]] = _LOCAL.__dict__.setdefault("file_systems", {})
        if self._uri not in known:
            known[self._uri] = file_system(self._uri)
        return known[self._uri]

    def read(self, path: str, at: int, size: int) -> bytes:
        """Read bytes of a file of the store, fewer at its end. Raises CannotRead, an OSError; another OSError if there
        is no such file."""
        try:
            if self.is_local:
                with os.fdopen(open_regular(self._local(path)), "rb", buffering=0) as file:
                    data = os.pread(file.fileno(), size, at)
                    while len(data) < size and (piece := os.pread(file.fileno(), size - len(data), at + len(data))):
                        data += piece  # an unreadable page ends a piece, and raises when the next one begins with it
                    return data
            system, root = self._remote()
            with system.open_input_file(f"{root.rstrip('/')}/{path}") as remote:
                return bytes(remote.read_at(min(size, max(remote.size() - at, 0)), at))
        except OSError as error:
            raise self._cannot(path, error) from None

    def read_into(self, path: str, at: int, buffer: memoryview) -> int:
        """Fill a buffer from a file of the store; return the number of bytes read. Raises OSError as `read`."""
        if not self.is_local:
            data = self.read(path, at, len(buffer))
            buffer[: len(data)] = data
            return len(data)
        try:
            return self._fill(path, at, buffer)
        except OSError as error:
            raise self._cannot(path, error) from None

    def _fill(self, path: str, at: int, buffer: memoryview) -> int:
        fd = open_regular(self._local(path))
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(fd, [buffer[done:]], at + done)
                if not got:
                    break
                done += got
            return done
        finally:
            os.close(fd)

    def read_whole(self, name: str) -> bytes | None:
        """Read a small file of the store; None where it is missing. Raises CannotRead."""
        try:
            if self.is_local:
                return read_regular(self._local(name))
            system, root = self._remote()
            with system.open_input_file(f"{root.rstrip('/')}/{name}") as remote:
                return bytes(remote.read())
        except OSError as error:
            found = self._cannot(name, error)
            if isinstance(found, FileNotFoundError):
                return None
            raise found from None

    def _cannot(self, name: str, error: OSError) -> OSError:
        """Return the error to raise where a file or directory cannot be read: `error` if it is missing, else a
        CannotRead."""
        if isinstance(error, CannotRead):
            return error
        is_link = self.is_local and os.path.islink(self._local(name))
        if error.errno in _ABSENT and not is_link:
            return error
        if self.is_local:
            error.filename = self._local(name)
        return cannot_read(f"{self.path.rstrip('/')}/{name}".rstrip("/"), error)

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a file of config/, in the format of RocketMQ's ConfigManager, or else its last backup. None if both are
        missing or empty. fastjson's deviations from JSON (numbers as names) are understood. Raises CannotRead if there
        is one but none is whole."""
        from duemq.protocol.errors import BodyFormatError
        from duemq.storage.config_file import decode_table

        why = ""
        for path in (name, name + file_names.BACKUP):
            data = self.read_whole(path)
            if data and data.strip():
                try:
                    return decode_table(data, path)
                except BodyFormatError as error:
                    why = why or f"{self.path.rstrip('/')}/{path}: {error}"
        if why:
            raise CannotRead(f"{why}; restore an intact copy, or move it away")
        return None

    def table(self, name: str, content: str) -> dict[str, Any]:
        """Return the table in the field `content` of a file of config/, read as by `json`; empty where there is none.
        Raises CannotRead."""
        found = (self.json(name) or {}).get(content) or {}
        if not isinstance(found, dict):
            where = f"{self.path.rstrip('/')}/{name}"
            raise CannotRead(f"{where}: its {content} is not a table; restore an intact copy, or move it away")
        return found

    def check_files(self) -> None:
        """Check that the files, directories and tables that jobs read are of the right kind, before long work begins.
        Raises CannotRead."""
        for folder in (file_names.TIMER_LOG, file_names.CONFIG):
            self.sizes(folder)
        self.queue_files()
        for name in (file_names.CHECKPOINT, file_names.TIMER_WHEEL, file_names.TIMER_CHECK):
            self.read_head(name)
        for name, content in _TABLES.items():
            self.table(name, content)

    def read_head(self, name: str) -> bytes:
        """Return the first byte of a file of the store; b"" where it is missing or empty. Raises CannotRead."""
        try:
            return self.read(name, 0, 1)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return b""

    def names(self, folder: str) -> list[str]:
        """Return the names in a directory of the store, sorted; none where it is missing."""
        return [name for name, _ in self.sizes(folder)]

    def sizes(self, folder: str) -> list[tuple[str, int]]:
        """Return the names in a directory of the store with the sizes of the files in bytes, sorted; none where it is
        missing."""
        return self._entries(folder) or []

    def versions(self, folder: str) -> dict[str, Version]:
        """Return the versions of the files in a directory of the store, by name; none where it is missing. Raises
        OSError."""
        if self.is_local:
            found = {}
            for name in self.names(folder):
                try:
                    status = os.stat(self._local(f"{folder}/{name}"))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise self._cannot(f"{folder}/{name}", error) from None
                found[name] = Version(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            return found
        from pyarrow import fs

        system, root = self._remote()
        infos = system.get_file_info(fs.FileSelector(f"{root.rstrip('/')}/{folder}", allow_not_found=True))
        return {PurePosixPath(info.path).name: Version(0, info.size or 0, info.mtime_ns or 0, 0) for info in infos}

    def _sizes_in(self, folder: str, entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, int]]:
        for entry in entries:
            # A topic may have such a name, and a directory then.
            is_file = folder not in ("", file_names.CONSUME_QUEUES) and _SEGMENT_NAME.fullmatch(entry.name) is not None
            try:
                size = _size_of(entry, is_file=is_file)
            except OSError as error:
                if folder:
                    raise self._cannot(f"{folder}/{entry.name}", error) from None
                size = 0  # files beside the store's directories do not matter
            if size is not None:
                yield entry.name, size

    def _entries(self, folder: str) -> list[tuple[str, int]] | None:
        """Return the names in a directory of the store with the sizes of the files in bytes, sorted; None if there is
        no such directory. Raises OSError if that cannot be found out, CannotRead if something else has its name."""
        if self.is_local:
            try:
                entries = os.scandir(self._local(folder))
            except OSError as error:
                found = self._cannot(folder, error)
                if isinstance(found, CannotRead):
                    raise found from None
                if isinstance(error, NotADirectoryError) and folder in _FOLDERS:
                    raise cannot_read(f"{self.path.rstrip('/')}/{folder}", error) from None
                return None
            with entries as each:
                return sorted(self._sizes_in(folder, each))
        from pyarrow import fs

        system, root = self._remote()
        path = f"{root.rstrip('/')}/{folder}".rstrip("/")
        try:
            # allow_not_found is not used: it shows empty directories for an HDFS whose name node does not answer.
            infos = system.get_file_info(fs.FileSelector(path))
        except FileNotFoundError:
            return None
        except OSError:
            if system.get_file_info(path).type == fs.FileType.File:
                return None
            raise
        return sorted((PurePosixPath(info.path).name, info.size or 0) for info in infos)
