"""Checksums of the timer log, a file at a time: of its units but for their magic numbers, and of those.

The magic numbers change when messages are withdrawn, in any order, and the files have that later. So theirs is a sum
over all units of a hash of position and magic number: what changes is taken out and added again. RocketMQ's 2 is not in
it: a unit that is withdrawn loses it, and the deliver time tells the same.

Most calls of numpy cost as much for one unit as for a thousand. So units wait until there are some, or a sum is asked
for.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.protocol.records.record import crc32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.log import Units

_UNIT_SIZE: Final = 52
_SLOT_MS: Final = 1000
_SOME: Final = 4096
_MASK: Final = 2**64 - 1
_POSITION: Final = 0x9E3779B97F4A7C15
_MAGIC: Final = 0xC2B2AE3D27D4EB4F
_ROLL: Final = 2
_DELETE: Final = 4
_NO_MESSAGE: Final = 4 | 8
_MIX: Final = 0xD6E8FEB86659FD93


class FileSum(NamedTuple):
    """Of the units in one file."""

    crc: int = 0
    """CRC-32 of the units, with 0 for their magic numbers."""
    magic: int = 0
    """Sum, modulo 2**64, over the units."""


class LogSums:
    """Checksums by the position at which a file begins."""

    def __init__(self, segment_size: int) -> None:
        self._segment_size = segment_size
        self._by_file: dict[int, FileSum] = {}
        self._last: dict[int, int] = {}
        """The last second in whose slot a unit of a file is."""
        self._waiting: list[tuple[int, Units]] = []
        """Units that are in no sum yet: runs of them that follow each other in one file, each with its position."""
        self._count = 0
        """How many units those are."""
        self._changes: list[tuple[int, int, int]] = []
        """What is to be changed then: position, old and new magic number."""

    @property
    def by_file(self) -> dict[int, FileSum]:
        """The sums of all units."""
        self._settle()
        return self._by_file

    def needed(self, second: int, position: int) -> dict[int, FileSum]:
        """The sums of the files that a start has to find which goes back to a second, and has what is behind a position
        put in again: from the first one on that has a slot of that second or later, or ends behind that position. Those
        before may go at any time, and the last one never does."""
        sums = self.by_file
        bases = sorted(sums)
        first = next(
            (base for base in bases if self._last[base] >= second or base + self._segment_size > position),
            bases[-1] if bases else 0,
        )
        return {base: sums[base] for base in bases if base >= first}

    def add(self, position: int, units: Units) -> None:
        """Units from a position on, in one file, behind those that are known of it. The caller leaves them as they
        are. Never fails: they are in the file by now."""
        self._waiting.append((position, units))
        self._count += len(units)
        if self._count >= _SOME:
            with suppress(MemoryError):  # then another time
                self._settle()

    def change(self, position: int, old: int, new: int) -> None:
        """The magic number of the unit at a position is another one. Never fails."""
        self._changes.append((position, old, new))
        if len(self._changes) >= _SOME:
            with suppress(MemoryError):  # then another time
                self._settle()

    def _settle(self) -> None:
        """Take what waits into the sums, all or nothing. Raises MemoryError."""
        if not self._waiting and not self._changes:
            return
        sums, last = dict(self._by_file), dict(self._last)
        for base, each in groupby(self._waiting, lambda run: run[0] - run[0] % self._segment_size):
            runs = list(each)
            # numpy would join them field by field.
            plain = np.frombuffer(bytearray().join([units.data for _, units in runs]), runs[0][1].dtype)
            # The note tells of these, or they are marked: it comes to the same.
            plain["magic"][is_superseded(plain)] &= ~_DELETE
            positions = np.concatenate([start + np.arange(len(units)) * _UNIT_SIZE for start, units in runs])
            before = sums.get(base, FileSum())
            total = int(mixed(positions, plain["magic"]).sum())
            plain["magic"] = 0
            newest = int((plain["write_ms"].astype(np.int64) + plain["delay_ms"]).max()) // _SLOT_MS
            last[base] = max(last.get(base, newest), newest)
            sums[base] = FileSum(crc32(plain.view(np.uint8), before.crc), before.magic + total & _MASK)
        if self._changes:
            positions, old, new = np.array(self._changes, np.int64).T
            bases = positions - positions % self._segment_size
            for base in set(bases.tolist()):
                mine = bases == base
                taken, added = (int(mixed(positions[mine], magic[mine]).sum()) for magic in (old, new))
                sums[base] = sums[base]._replace(magic=sums[base].magic - taken + added & _MASK)
        self._by_file, self._last = sums, last
        self._waiting, self._changes, self._count = [], [], 0

    def drop_before(self, position: int) -> None:
        """Forget the files that end at or before a position."""
        for base in [base for base in self.by_file if base + self._segment_size <= position]:
            del self._by_file[base], self._last[base]


def is_superseded(units: Units) -> NDArray[np.bool_]:
    """Which units are marked as `timers.files.superseded` marks them."""
    result: NDArray[np.bool_] = (units["magic"] & _NO_MESSAGE == _DELETE) & (units["due_ms"] > 0)
    return result


def mixed(positions: NDArray[np.int64], magic: NDArray[np.integer]) -> NDArray[np.uint64]:
    """A hash of each position and magic number."""
    magic = magic & ~_ROLL
    both = positions.astype(np.uint64) * np.uint64(_POSITION) ^ magic.astype(np.uint64) * np.uint64(_MAGIC)
    both = (both ^ both >> np.uint64(29)) * np.uint64(_MIX)
    result: NDArray[np.uint64] = both ^ both >> np.uint64(32)
    return result
