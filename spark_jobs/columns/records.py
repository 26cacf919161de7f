"""Records of the commitlog as columns: a range of bytes in, arrays out, a few operations for all records at once.

The layout is that of `protocol.records.record`. A walk follows the chain of sizes and checks the records as arrays:
each record must state the physical offset at which it lies, and its lengths must add up. Bytes that fail are damage,
which is reported and stepped over, up to the next bytes that state their own physical offset.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records import checksum
from duemq.protocol.records.properties import MAX_BYTES
from duemq.protocol.records.record import (
    FLAG_BORN_IPV6,
    FLAG_STORE_IPV6,
    MAGIC_END,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    MAX_TOPIC_BYTES,
    MIN_SIZE,
    PHYSICAL_OFFSET_AT,
    SIZE_AND_MAGIC,
)
from duemq.spark_jobs.columns.hashes import hash_slices
from duemq.spark_jobs.columns.slices import gather
from duemq.spark_jobs.columns.texts import Texts
from duemq.storage.log.copies import HEAD

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

ZEROS: Final = "zeros where a record should be"
"""The reason of a damage that is a stretch of zeros."""
_NOT_WRITTEN: Final = bytes(8)
PADDING: Final = 128
"""Number of zeros that readers put behind the bytes to be walked over, so that a whole head can always be taken."""


class Damage(NamedTuple):
    """A stretch of the commitlog that is no record. `size` in bytes; `reason` is text for people."""

    physical_offset: int
    size: int
    reason: str


class Walk(NamedTuple):
    """The result of `walk_records`. `end`: the position in the data behind the last thing understood; no whole record
    follows (the start of one that continues behind the data, or nothing). `at_end_marker`: the file has no more
    records. `zeros_at`: the position from which on there are only zeros, `end` where there are none: the end of the
    log, if nothing comes behind."""

    records: Records
    damages: list[Damage]
    end: int
    at_end_marker: bool
    zeros_at: int


class Records:
    """n records in `data`; all columns are arrays of n. Positions (`starts`, `body_at`, `topic_at`, `properties_at`)
    count from the start of `data`, whose first byte is at physical offset `base`. Times are ms since the epoch. `data`
    has PADDING bytes behind those walked over."""

    def __init__(self, data: Bytes, base: int, starts: Integers) -> None:
        self.data = data
        self.base = base
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, which: Integers | Flags) -> Records:
        """Return the records chosen by a mask or by indices."""
        some = Records(self.data, self.base, self.starts[which])
        # Columns already computed for all records are taken over.
        known = self.__dict__
        if "_heads" in known:
            some.__dict__["_heads"] = self._heads[which]
        if "_topics" in known:
            codes, names, hashes = self._topics
            some.__dict__["_topics"] = codes[which], names, hashes
        if "texts" in known:
            some.__dict__["texts"] = self.texts.take(which)
        return some

    @cached_property
    def _heads(self) -> NDArray[Any]:
        windows: NDArray[Any] = np.ndarray((max(len(self.data) - 87, 0),), "V88", self.data, strides=(1,))
        return windows[self.starts].view(HEAD)

    def _column(self, name: str, dtype: str = "i8") -> NDArray[Any]:
        return self._heads[name].astype(dtype)

    def _late(self, shift: Integers, at: int, name: str) -> Integers:
        """Return a field that lies behind the hosts, some of which may be IPv6 addresses, 12 bytes longer than
        others."""
        values: Integers = self._column(name)
        if self._has_ipv6:
            width = HEAD[name].itemsize
            rows = np.flatnonzero(shift)
            positions = (self.starts[rows] + at + shift[rows])[:, None] + np.arange(width)
            values[rows] = self.data[positions].view(HEAD[name]).ravel()
        return values

    @cached_property
    def _born_shift(self) -> Integers:
        return np.where(self.sys_flag & FLAG_BORN_IPV6, 12, 0)

    @cached_property
    def _shift(self) -> Integers:
        return self._born_shift + np.where(self.sys_flag & FLAG_STORE_IPV6, 12, 0)

    @cached_property
    def _has_ipv6(self) -> bool:
        return bool((self.sys_flag & (FLAG_BORN_IPV6 | FLAG_STORE_IPV6)).any())

    @cached_property
    def physical_offset(self) -> Integers:
        """The physical offset of each record."""
        return self.starts + self.base

    @cached_property
    def sizes(self) -> Integers:
        """Size of each record in bytes."""
        return self._column("size")

    @cached_property
    def magic(self) -> Integers:
        """MAGIC_V1, or MAGIC_V2, with which the topic's length has two bytes."""
        return self._column("magic")

    @cached_property
    def body_crc(self) -> Integers:
        """CRC32 of the body without the top bit."""
        return self._column("body_crc")

    @cached_property
    def queue_id(self) -> Integers:
        """Queue of the topic."""
        return self._column("queue_id")

    @cached_property
    def flag(self) -> Integers:
        """The producer's flag."""
        return self._column("flag")

    @cached_property
    def queue_offset(self) -> Integers:
        """Queue offset: the number of the record's unit in the consume queue."""
        return self._column("queue_offset")

    @cached_property
    def stored_physical_offset(self) -> Integers:
        """The physical offset that each record states."""
        return self._column("physical_offset")

    @cached_property
    def sys_flag(self) -> Integers:
        """Compression, transaction, address families: the bits of RocketMQ's MessageSysFlag."""
        return self._column("sys_flag")

    @cached_property
    def born_ms(self) -> Integers:
        """The producer's time of the send."""
        return self._column("born_ms")

    @cached_property
    def store_ms(self) -> Integers:
        """The store time, by the broker's clock."""
        return self._late(self._born_shift, 56, "store_ms")

    @cached_property
    def reconsume_times(self) -> Integers:
        """Number of times that the message was sent back."""
        return self._late(self._shift, 72, "reconsume_times")

    @cached_property
    def prepared_offset(self) -> Integers:
        """The prepared-transaction offset: in a record that duemq delivered, the origin's physical offset (-1 for
        0)."""
        return self._late(self._shift, 76, "prepared_offset")

    @cached_property
    def body_size(self) -> Integers:
        """Bytes of the body as stored, maybe compressed."""
        return self._late(self._shift, 84, "body_size")

    @cached_property
    def body_at(self) -> Integers:
        """Position of the body."""
        return self.starts + 88 + self._shift

    @cached_property
    def _is_v2(self) -> Flags:
        is_v2: Flags = self.magic == MAGIC_V2
        return is_v2

    @cached_property
    def topic_at(self) -> Integers:
        """Position of the topic's name."""
        return self.body_at + self.body_size + 1 + self._is_v2

    def _byte(self, positions: Integers) -> Integers:
        return self.data[np.clip(positions, 0, len(self.data) - 1)].astype(np.int64)

    @cached_property
    def topic_size(self) -> Integers:
        """Bytes of the topic's name."""
        low = self._byte(self.topic_at - 1)
        return np.where(self._is_v2, self._byte(self.topic_at - 2) << 8 | low, low) if self._is_v2.any() else low

    @cached_property
    def properties_at(self) -> Integers:
        """Position of the property text."""
        return self.topic_at + self.topic_size + 2

    @cached_property
    def properties_size(self) -> Integers:
        """Bytes of the property text."""
        return self._byte(self.properties_at - 2) << 8 | self._byte(self.properties_at - 1)

    @cached_property
    def _topics(self) -> tuple[NDArray[np.int32], list[str], Integers]:
        encoded = gather(self.data, self.topic_at, self.topic_size).dictionary_encode()
        raw = encoded.dictionary.to_pylist()
        size = np.array([len(name) for name in raw], np.int64)
        joined = np.frombuffer(b"".join(raw) + bytes(8), np.uint8)
        names = [name.decode("utf-8", "replace") for name in raw]
        return encoded.indices.to_numpy(), names, hash_slices(joined, np.cumsum(size) - size, size)

    def topics(self) -> tuple[NDArray[np.int32], list[str]]:
        """Return the topics as (codes of n, names): each code is an index into the list of names."""
        return self._topics[:2]

    @property
    def topic_hashes(self) -> Integers:
        """Hashes of the topics' names (`hashes.hash_slices`)."""
        codes, _, hashes = self._topics
        return hashes[codes]

    @cached_property
    def texts(self) -> Texts:
        """The property texts."""
        return Texts(self.data, self.properties_at, self.properties_size)

    def property(self, name: str) -> tuple[Integers, Integers]:
        """Return where the values of a property lie: positions in `texts.data`, -1 where there is none, and sizes."""
        return self.texts.find(name)

    def property_strings(self, name: str) -> pa.StringArray:
        """Return the values of one property; null where there is none."""
        return self.texts.strings(name)

    def property_ints(self, name: str) -> tuple[Integers, Flags]:
        """Return the values of a property that is a decimal number, and where there is one. A value that is no number
        counts as absent."""
        return self.texts.ints(name)

    def first_wrong(self) -> tuple[int, str] | None:
        """Return the index of the first inconsistent record and the reason; None where all are consistent."""
        ends = self.starts + self.sizes
        bad_offset = self.stored_physical_offset != self.physical_offset
        bad_body = (self.body_size < 0) | (self.topic_at + 2 > ends)
        bad_topic = (self.properties_at > ends) | (self.topic_size > MAX_TOPIC_BYTES) & ~self._is_v2
        bad_text = (self.properties_at + self.properties_size != ends) | (self.properties_size > MAX_BYTES)
        bad = np.flatnonzero(bad_offset | bad_body | bad_topic | bad_text)
        if not len(bad):
            return None
        i = int(bad[0])
        size = self.sizes[i]
        if bad_offset[i]:
            return i, f"a record that says it lies at {self.stored_physical_offset[i]}"
        if bad_body[i]:
            return i, f"a body of {self.body_size[i]} bytes in a record of {size}"
        if bad_topic[i]:
            return i, f"a topic of {self.topic_size[i]} bytes in a record of {size}"
        return i, f"properties of {self.properties_size[i]} bytes do not end at the record's end"

    def whole(self, limit: int) -> Records:
        """Return the whole records within the first `limit` bytes, for starts that were not found by a walk."""
        starts = self.starts[self.starts + MIN_SIZE <= limit]
        some = Records(self.data, self.base, starts)
        good = ((some.magic == MAGIC_V1) | (some.magic == MAGIC_V2)) & (some.sizes >= MIN_SIZE)
        some = some.take(good & (starts + some.sizes <= limit))
        while len(some) and (wrong := some.first_wrong()) is not None:
            some = some.take(np.arange(len(some)) != wrong[0])
        return some

    def corrupt(self) -> dict[int, str]:
        """Return the corrupt records as reasons by index: those whose body does not match its checksum, whose checksum
        of the record is wrong (RocketMQ 5 adds one with enabledAppendPropCRC), or whose properties were not written to
        their end."""
        view = memoryview(self.data)  # type: ignore[arg-type]
        wrong = {}
        crc32 = zlib.crc32
        at, size, crc = self.body_at.tolist(), self.body_size.tolist(), self.body_crc.tolist()
        for i in range(len(at)):
            # An empty body has no checksum to compare, and a stored checksum of 0 means none.
            if size[i] and crc32(view[at[i] : at[i] + size[i]]) & 0x7FFFFFFF != crc[i] and crc[i]:
                wrong[i] = "a wrong checksum of the body"
        # Only a checksum of the whole record covers the properties. A single zero may be part of them; a run of zeros,
        # maybe reaching into the next record, is left by a torn write.
        starts, at, size = self.starts.tolist(), self.properties_at.tolist(), self.properties_size.tolist()
        for i, start in enumerate(starts):
            end = at[i] + size[i]
            text = bytes(view[at[i] : end + len(_NOT_WRITTEN) - 1])
            if checksum.is_there(text[: size[i]]) and not checksum.is_right(view[start:end]):
                wrong.setdefault(i, "a wrong checksum of the record")
            if _NOT_WRITTEN in text:
                wrong.setdefault(i, "zeros in the properties")
        return wrong


def walk_records(data: Bytes, base: int, size: int, *, check_crc: bool, is_last: bool, room: int | None = None) -> Walk:
    """Find the records in the first `size` bytes of `data`, which begins at physical offset `base`.

    `data` has PADDING bytes behind them. `check_crc`: also leave out corrupt records (`Records.corrupt`) as damage.
    `is_last`: nothing comes behind these bytes, so that a record that is cut off is damage rather than one that
    continues. `room`: bytes from `base` to the end of the file, which no record crosses.
    """
    room = size if is_last else (1 << 62) if room is None else room
    buffer = memoryview(data)[:size]  # type: ignore[arg-type]
    starts: list[int] = []
    seen = None
    damages: list[Damage] = []
    at, checked, at_end_marker, zeros_at = 0, 0, False, -1
    while True:
        at = _chain(buffer, at, starts)
        why = None
        if len(starts) > checked:
            seen = Records(data, base, np.array(starts[checked:], np.int64))
            wrong = seen.first_wrong()
            if wrong is not None:
                at, why = starts[checked + wrong[0]], wrong[1]
                del starts[checked + wrong[0] :]
            checked = len(starts)
        if why is None:
            if size - at < 8:
                if is_last:
                    if any(buffer[at:]):
                        damages.append(Damage(base + at, size - at, "less than the start of a record"))
                    else:
                        zeros_at = at
                    at = size
                break
            record_size, magic = SIZE_AND_MAGIC.unpack_from(buffer, at)
            if magic == MAGIC_END:
                at, at_end_marker = size, True
                break
            if not record_size and not magic and not data[at:size].any():
                zeros_at, at = at, size
                break
            if magic in (MAGIC_V1, MAGIC_V2) and MIN_SIZE <= record_size <= room - at and not is_last:
                start = bytes(buffer[at + PHYSICAL_OFFSET_AT : at + PHYSICAL_OFFSET_AT + 8])
                if len(start) < 8 or int.from_bytes(start, "big") == base + at:
                    break  # It continues in the bytes that follow.
            why = _why(record_size, magic, room - at)
        following = next(starts_in(data, base, size, at + 1), -1)
        if following < 0 and not is_last and size - at < 2 * MIN_SIZE:
            break  # Too few bytes to decide.
        end = following if following >= 0 else size if is_last else size - MIN_SIZE
        damages.append(Damage(base + at, end - at, why))
        at = end
        if following < 0:
            break
    # Nearly always there is one chain, much of which the check has already decoded.
    records = seen if seen is not None and len(seen) == len(starts) else Records(data, base, np.array(starts, np.int64))
    if check_crc and starts:
        bodies = records.corrupt()
        if bodies:
            damages += [
                Damage(int(records.physical_offset[i]), int(records.sizes[i]), why) for i, why in bodies.items()
            ]
            damages.sort()
            records = records.take(np.delete(np.arange(len(starts)), list(bodies)))
    return Walk(records, damages, at, at_end_marker, at if zeros_at < 0 else zeros_at)


def _chain(buffer: memoryview, at: int, starts: list[int]) -> int:
    """Follow the sizes from a position on, as far as whole records go. Append their positions to `starts`; return the
    end."""
    unpack, add, last, limit = SIZE_AND_MAGIC.unpack_from, starts.append, len(buffer) - 8, len(buffer)
    while at <= last:
        size, magic = unpack(buffer, at)
        if (magic != MAGIC_V1 and magic != MAGIC_V2) or size < MIN_SIZE:  # noqa: PLR1714, it is called for each record
            break
        end = at + size
        if end > limit:
            break
        add(at)
        at = end
    return at


def starts_in(data: Bytes, base: int, size: int, at: int = 0) -> Iterator[int]:
    """Yield the positions, from `at` on in the first `size` bytes of `data`, at which a record states its own physical
    offset."""
    buffer = memoryview(data)[:size]  # type: ignore[arg-type]
    last = size - PHYSICAL_OFFSET_AT - 8
    for found in MAGICS.finditer(buffer, at + 4):
        start = found.start() - 4
        if start > last:
            break
        if int.from_bytes(buffer[start + PHYSICAL_OFFSET_AT : start + PHYSICAL_OFFSET_AT + 8], "big") == base + start:
            yield start


def _why(size: int, magic: int, room: int) -> str:
    if not size and not magic:
        return ZEROS
    if magic not in (MAGIC_V1, MAGIC_V2):
        return f"no record: magic {magic:#010x}, size {size}"
    return f"a record of {size} bytes, with {room} there"


def joined_damages(damages: list[Damage]) -> list[Damage]:
    """Return damages with neighbouring ones joined, with the first one's reason: damage may span reads."""
    joined: list[Damage] = []
    for damage in damages:
        if joined and joined[-1].physical_offset + joined[-1].size == damage.physical_offset:
            first = joined.pop()
            damage = Damage(first.physical_offset, first.size + damage.size, first.reason)  # noqa: PLW2901
        joined.append(damage)
    return joined
