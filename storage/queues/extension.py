"""consumequeue_ext: the extension of a consume queue, which RocketMQ writes with enableConsumeQueueExt.

    consumequeue_ext/<topic>/<queue id>/00000000000000000000, ...     files of 48 MiB (mappedFileSizeConsumeQueueExt)
    0       2           10           18            20
    | size  | tags code | store time | bitmap size | bitmap |     size: of the whole unit, 20 and more
    | int16 | int64     | int64      | int16       |        |     store time: of the record, ms since the epoch
    all integers big-endian; one unit after the other, zeros after the last one. A unit never crosses files: if the next
    unit does not fit in before the last 4 bytes of a file, the file ends with the int16 -1 and arbitrary bytes.

The unit of a message in the consume queue then has, in place of the tags code, the address of its unit here: the offset
over all files, less 2^63. Addresses ascend along a queue. A queue may have units with and without addresses, if the
setting was changed. The bitmaps are for filters of SQL92 expressions (enableCalcFilterBitMap); duemq does not write
them.

`ConsumeQueue` puts tags codes in place of addresses when it reads units from its files. The files here cannot be
trusted. They have no checksum, whether RocketMQ or duemq wrote them; RocketMQ may lose their end in a crash and then
use an address twice; and a copy of an older file, or of another queue's file, may have been put in their place. So a
tags code comes from the record of its message, as for a consume queue that is rebuilt. The extension is used in one
case only: RocketMQ's records in SCHEDULE_TOPIC_XXXX do not have the deliver time, which followed from the table of
levels at the time when they were stored. A deliver time in the extension is believed if its unit has the store time of
the record, and the difference between the two is the delay of the level, or a whole number of seconds, as in a former
table. Otherwise the deliver time is computed again from the record.

An address is left in place if there is no record, or if the table of levels is not known.

Mirrors apache/rocketmq store/ConsumeQueueExt.java (4.9.7). The format is RocketMQ's and frozen.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from duemq.protocol.records.record import RecordSummary
from duemq.protocol.records.timer_properties import MAX_DELIVER_AHEAD_MS, promised_ms
from duemq.storage import file_names
from duemq.storage.errors import StoreFormatError
from duemq.storage.files import File, Files
from duemq.storage.log.copies import UNITS
from duemq.storage.log.segments import Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]

log = structlog.get_logger(__name__)

DEFAULT_SEGMENT_SIZE: Final = 48 << 20
EXT_ADDRESS_MAX: Final = -(2**31) - 1
"""The largest tags code that is an address."""
HEAD: Final = np.dtype([("size", ">i2"), ("tags_code", ">i8"), ("store_time", ">i8"), ("bitmap_size", ">i2")])
"""A unit without its bitmap."""
HEAD_SIZE: Final = HEAD.itemsize
assert HEAD_SIZE == 20
END_SIZE: Final = 4
"""Number of bytes at the end of each file that no unit occupies."""
END_OF_FILE: Final = -1
"""In place of a size: the file ends here."""
_END: Final = END_OF_FILE.to_bytes(2, "big", signed=True)
FIRST_ADDRESS: Final = -(2**63)
"""The address of offset 0."""
_MAX_END: Final = EXT_ADDRESS_MAX - FIRST_ADDRESS - (1 << 40)
"""The offset beyond which nothing more is written: addresses of much higher offsets could not be distinguished from
hashes of tags."""
_GAP: Final = 4096
"""Largest distance, in bytes, between units that are read with one call: there may be bitmaps between them."""
_MAX_READ: Final = 1 << 20
_HEAD_BYTES: Final = np.arange(HEAD_SIZE)
_NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers of a file that cannot be opened for writing but may still be readable."""
_LEAST_HASH, _MAX_HASH = -(2**31), 2**31 - 1
_HELP: Final = (
    "its messages keep their tags and times, which are read from the commitlog. If all files have another size, set "
    "mappedFileSizeConsumeQueueExt to it; otherwise stop the broker and remove the directory"
)

Read = Callable[[int, int], bytes]
"""Returns `size` bytes at an offset over all files: fewer where the files end, zeros before they begin."""
Tell = Callable[["NDArray[Any]"], Sequence[RecordSummary | None]]
"""Returns the summaries of the records of UNITS; None for a unit without a record."""
OwnCode = Callable[[RecordSummary], int | None]
"""Returns the tags code of a record in its queue; None if it is not known: the address is then left in place."""
StoreTimes = Callable[["Integers"], "Integers"]
"""Returns the store times, ms since the epoch, of the records at physical offsets; 0 where there is none."""


def tags_codes_of(
    units: NDArray[Any], tell: Tell, own_code: OwnCode, read: Read, *, is_level: bool, delay_ms: int | None = None
) -> Integers:
    """Return the tags codes of UNITS, with the tags codes of their records in place of addresses. `is_level`: for a
    queue of the schedule topic; `delay_ms`: the delay of its level, None if it is not known. `read` reads the
    extension. Raises the errors of `tell` and `read`."""
    codes: Integers = units["tags_code"].astype(np.int64)
    rows = np.flatnonzero(codes <= EXT_ADDRESS_MAX)
    if not len(rows):
        return codes
    told = tell(units[rows])
    extended = heads(codes[rows], read).tolist() if is_level else [None] * len(rows)
    for row, record, unit in zip(rows.tolist(), told, extended, strict=True):
        if record is None:
            continue
        code = None
        if unit is not None and promised_ms(*record[:2]) is None:
            code = _deliver_time(unit, record.store_timestamp, delay_ms)
        if code is None:
            code = own_code(record)
        if code is not None:
            codes[row] = code
    return codes


def _deliver_time(unit: tuple[int, int, int, int], stored: int, delay_ms: int | None) -> int | None:
    """Return the deliver time in a unit (HEAD) for a record with a store time; None if it is not believed. Times are ms
    since the epoch."""
    size, code, store_time, bitmap_size = unit
    if bitmap_size < 0 or size != HEAD_SIZE + bitmap_size or store_time != stored or stored <= 0:
        return None
    delay = code - stored
    if delay == delay_ms:
        return code
    return code if is_delay(delay) else None


def is_delay(delay_ms: int) -> bool:
    """Whether this may be the delay of a level, so that a deliver time with it is believed. Of the 2040 ways to damage
    one byte of a deliver time, 4 leave a whole number of seconds: those that change it by a multiple of 32 s."""
    return 0 < delay_ms <= MAX_DELIVER_AHEAD_MS and delay_ms % 1000 == 0


def heads(addresses: Integers, read: Read) -> NDArray[Any]:
    """Return the units at addresses, as HEAD; zeros where there is no unit. Units that lie close together are read
    together. Raises the errors of `read`."""
    result = np.zeros(len(addresses), HEAD)
    offsets = addresses - FIRST_ADDRESS
    steps = offsets[1:] - offsets[:-1]
    first = int(offsets[0]) if len(offsets) else 0
    if len(offsets) * HEAD_SIZE <= _MAX_READ and (steps == HEAD_SIZE).all():  # the usual case: no bitmaps
        data = read(first, len(offsets) * HEAD_SIZE)
        whole = data[: len(data) - len(data) % HEAD_SIZE]
        return np.frombuffer(whole.ljust(len(offsets) * HEAD_SIZE, b"\0"), HEAD)
    is_apart = (steps < HEAD_SIZE) | (steps > _GAP)
    for run in np.split(np.arange(len(offsets)), np.flatnonzero(is_apart) + 1):
        at = 0
        while at < len(run):
            first = int(offsets[run[at]])
            stop = int(np.searchsorted(offsets[run], first + _MAX_READ, "right"))
            part = run[at : max(stop, at + 1)]
            at += len(part)
            starts = offsets[part] - first
            stored = np.frombuffer(read(first, int(starts[-1]) + HEAD_SIZE), np.uint8)
            is_there = starts + HEAD_SIZE <= len(stored)
            found = stored[starts[is_there][:, None] + _HEAD_BYTES]
            result[part[is_there]] = np.ascontiguousarray(found).view(HEAD)[:, 0]
    return result


def read_of(files: Sequence[tuple[int, str]], read: Callable[[str, int, int], bytes], offset: int, size: int) -> bytes:
    """Return the bytes at an offset over all files of a directory, as `Read` does. `files`: the offset of the first
    byte and the path of each file, ascending; `read` returns bytes of one file, given its path, a position and a size.
    Raises the errors of `read`."""
    pieces, at, end = list[bytes](), offset, offset + size
    for number in range(max(0, bisect_right(files, offset, key=itemgetter(0)) - 1), len(files)):
        base, path = files[number]
        if base >= end:
            break
        pieces.append(bytes(max(0, base - at)))
        at = max(at, base)
        following = files[number + 1][0] if number + 1 < len(files) else end
        pieces.append(piece := read(path, at - base, min(end, following) - at))
        at += len(piece)
    return b"".join(pieces)


def with_codes(units: NDArray[Any], codes: Integers) -> NDArray[Any]:
    """Return a copy of UNITS with other tags codes."""
    result = units.copy()
    result["tags_code"] = codes
    return result


def has_addresses(units: bytes) -> bool:
    """Whether any of these units of a consume queue has an address."""
    if len(units) == UNITS.itemsize:  # for a single unit, numpy would take five times as long
        return int.from_bytes(units[12:], "big", signed=True) <= EXT_ADDRESS_MAX
    if units[12 :: UNITS.itemsize].count(0) * UNITS.itemsize == len(units):
        return False  # no code is negative, which takes a tenth of the time to find out
    return bool((np.frombuffer(units, UNITS)["tags_code"] <= EXT_ADDRESS_MAX).any())


def addresses_in(units: bytes) -> Integers:
    """Return the addresses in units of a consume queue, in the order of the units."""
    codes = np.frombuffer(units, UNITS)["tags_code"].astype(np.int64)
    return codes[codes <= EXT_ADDRESS_MAX]


class Extension:
    """The extension of one queue. Its `ConsumeQueue` owns it. Offsets count bytes over all files."""

    def __init__(
        self,
        files: Files,
        directory: str,
        segment_size: int,
        tell: Tell,
        own_code: OwnCode,
        delay_ms: Callable[[], int] | None,
        store_times: StoreTimes | None,
    ) -> None:
        """`directory`: of this queue's extension. `delay_ms`: for a queue of the schedule topic, returns the present
        delay of its level. `store_times`: None if nothing is to be written."""
        self._files = files
        self._directory = directory
        self._segment_size = segment_size
        self._tell = tell
        self._own_code = own_code
        self._delay_ms = delay_ms
        self._store_times = store_times
        self._segments = self._new_segments(for_reading=store_times is None)
        self._is_readable = True
        """Whether loading the files and all reads so far have succeeded."""
        self._is_writable = store_times is not None
        """Whether the extension is to be written, and loading the files and all writes so far have succeeded."""
        self._end = 0
        """Offset behind the last unit that the queue uses."""
        self._next_end = 0
        """The value that `_end` gets once the units that were written last are in the queue."""
        self.is_end_known = False
        """Whether `go_on_behind` has been called since the queue was loaded or cut."""

    def note_cut(self) -> None:
        """Note that units of the queue were removed at its end, so the extension's end is no longer known."""
        self.is_end_known = False

    # --- reading

    def load(self) -> None:
        """Find the files, changing nothing. If there is anything wrong with them, none are used, and a warning says
        why."""
        self._segments.forget_all()
        self._reset()
        try:
            self._segments.load()
        except (StoreFormatError, OSError) as error:
            self._segments.forget_all()
            self._pass_over(error)

    def _reset(self) -> None:
        self._is_readable, self._is_writable = True, self._store_times is not None
        self.is_end_known = False

    def _new_segments(self, *, for_reading: bool) -> Segments:
        return Segments(self._files, self._directory, self._segment_size, for_reading=for_reading)

    def _pass_over(self, error: StoreFormatError | OSError) -> None:
        self._is_readable = False
        self.write_no_more(error)

    def write_no_more(self, error: StoreFormatError | OSError) -> None:
        """Write nothing more until the next start, and log a warning that says why. Units then keep their tags
        codes."""
        self._is_writable = False
        log.warning("consumequeue_ext_passed_over", directory=self.directory, reason=str(error), help=_HELP)

    @property
    def directory(self) -> str:
        """The directory of the files."""
        return self._segments.directory

    @property
    def has_files(self) -> bool:
        """Whether there are files that can be used."""
        return len(self._segments) > 0

    def translate(self, units: bytes) -> bytes:
        """Return units of the consume queue with tags codes instead of addresses; see `tags_codes_of`. Raises OSError
        or NotInMemory if a record cannot be read."""
        if not has_addresses(units):
            return units
        array = np.frombuffer(units, UNITS)
        delay_ms = self._delay_ms() if self._delay_ms is not None else None
        is_level = delay_ms is not None
        codes = tags_codes_of(array, self._tell, self._own_code, self._read, is_level=is_level, delay_ms=delay_ms)
        return with_codes(array, codes).tobytes()

    def _read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at an offset over all files: fewer where the files end, zeros before they begin; none if
        the files cannot be read, because the extension is only an aid: the records have the tags, too. Raises
        NotInMemory."""
        if not self._is_readable:
            return b""
        try:
            return self._read_stored(offset, size)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE or not self._is_writable:
                # The extension is only an aid: the records have what cannot be read here.
                self._pass_over(error)
                return b""
            self.write_no_more(error)
        self._segments.forget_all()
        self._segments = self._new_segments(for_reading=True)
        try:
            self._segments.load()
            return self._read_stored(offset, size)
        except (StoreFormatError, OSError):
            self._is_readable = False
            return b""

    def _read_stored(self, offset: int, size: int) -> bytes:
        before = min(max(0, self._segments.begin - offset), size)
        return bytes(before) + self._segments.read(offset + before, size - before)

    # --- writing

    @property
    def is_written(self) -> bool:
        """Whether units go into the extension."""
        return self._is_writable

    def go_on_behind(self, find_last: Callable[[], int | None]) -> None:
        """Cut the extension behind the last unit that the queue uses. `find_last` returns the last address in the
        queue, None if there is none. If the unit at that address is lost or damaged, the extension continues with a new
        file; if the address lies behind all files, nothing more is written. Waits for the disk, whatever
        `Files.may_wait` says: the units to be written belong to messages that are stored already. Raises OSError."""
        before, self._files.may_wait = self._files.may_wait, True
        try:
            self._go_on_behind(find_last())
        finally:
            self._files.may_wait = before

    def _go_on_behind(self, last: int | None) -> None:
        segments = self._segments
        if last is None:
            segments.remove_from(0)
            end = 0
        else:
            at = last - FIRST_ADDRESS
            size, _, _, bitmap_size = heads(np.array([last], np.int64), self._read)[0].item()
            end = at + size
            room = segments.base_of(at) + segments.segment_size - END_SIZE
            if bitmap_size < 0 or size != HEAD_SIZE + bitmap_size or end > room:  # it is lost or damaged
                end = segments.base_of(at) + segments.segment_size
                if len(segments) and at >= segments.end:
                    # The last files are missing, or the address is wrong. The files that are left may be needed, and
                    # new files would have to follow them directly, so that their addresses would be used twice.
                    self.write_no_more(StoreFormatError(self.directory, f"has no file for the last address, {last}"))
                    return
                if at < segments.begin:
                    # The first files are missing; those that are left lie behind the last unit that is used.
                    segments.remove_from(0)
            segments.clear_from(end)
        self._end = self._next_end = end
        self.is_end_known = True

    def write(self, units: bytes) -> bytes:
        """Write the extension's units for units of the queue, and return the latter with addresses in place of tags
        codes. Some units stay as they are: those without a record, and those whose deliver time does not follow from
        the present delay of the level. Call `wrote` once the result is in the queue's file; until then the next call
        writes to the same position again. Raises OSError."""
        assert self._store_times is not None, "only an extension that is written has store times"
        if self._end > _MAX_END:
            return units
        array = np.frombuffer(units, UNITS)
        codes = array["tags_code"].astype(np.int64)
        times = self._store_times(array["physical_offset"].astype(np.int64))
        if self._delay_ms is not None:
            kept = codes == times + self._delay_ms()
        else:
            kept = (codes >= _LEAST_HASH) & (codes <= _MAX_HASH)
        rows = np.flatnonzero(kept & (times > 0))
        codes[rows] = self._append(codes[rows], times[rows])
        return with_codes(array, codes).tobytes()

    def _append(self, codes: Integers, times: Integers) -> Integers:
        """Write units behind the end; return their addresses."""
        new = np.zeros(len(codes), HEAD)
        new["size"], new["tags_code"], new["store_time"] = HEAD_SIZE, codes, times
        segments, at, done = self._segments, self._end, 0
        offsets = np.empty(len(codes), np.int64)
        while done < len(codes):
            base = segments.base_of(at)
            room = max(0, (base + segments.segment_size - END_SIZE - at) // HEAD_SIZE)
            if not room:
                if at > base:
                    segments.write(at, _END[: base + segments.segment_size - at])
                at = base + segments.segment_size
                continue
            segments.ensure(at)
            count = min(room, len(codes) - done)
            segments.write(at, new[done : done + count].tobytes())
            offsets[done : done + count] = at + HEAD_SIZE * np.arange(count)
            at, done = at + HEAD_SIZE * count, done + count
        self._next_end = at
        return offsets + FIRST_ADDRESS

    def wrote(self) -> None:
        """Note that the units of the last `write` are in the queue's file."""
        self._end = self._next_end

    # --- files

    def files_from(self, address: int) -> list[File]:
        """Return the files from an address on."""
        return self._segments.files_between(address - FIRST_ADDRESS, self._segments.end)

    @property
    def names_made(self) -> int:
        """Number of files made so far."""
        return self._segments.names_made

    def drop_before(self, address: int | None) -> list[str]:
        """Forget the files that end at or before an address, but never the last one; if `address` is None, forget all
        files. Returns their paths, for the caller to remove."""
        segments = self._segments
        if address is not None:
            return segments.drop_before(address - FIRST_ADDRESS)
        paths = [file.path for file in segments.files_between(segments.begin, segments.end)]
        segments.forget_all()
        return paths

    def close(self) -> None:
        """Close the descriptors."""
        self._segments.close()

    def forget(self) -> None:
        """Forget the files of a queue that no longer exists; the caller removes them."""
        self._segments.forget_all()

    def remove(self) -> None:
        """Remove the files. Raises OSError."""
        self._segments.remove_all()
        self._reset()


def extension_of(queue_directory: str) -> str:
    """Return the directory of the extensions in a store, from that of its consume queues."""
    return os.path.join(os.path.dirname(queue_directory), file_names.QUEUE_EXTENSIONS)
