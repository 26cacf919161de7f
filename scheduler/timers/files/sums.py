"""Checksums of the timer log, two for each file: one of the units without their magic numbers, and one of the magic
numbers.

Magic numbers change when messages are withdrawn, in any order, and the changes reach the files later. So their checksum
is a sum, over all units, of a hash of position and magic number: for a change the old hash is subtracted and the new
one added. RocketMQ's bit 2 is left out: a withdrawn unit loses it, and the deliver time says the same.

Most numpy calls cost as much for one unit as for a thousand. So units are collected until there are enough of them, or
until a sum is needed.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.protocol.records.record import crc32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.unit import Units

_UNIT_SIZE: Final = 52
_SLOT_MS: Final = 1000
_MAX_PENDING: Final = 4096
_MASK: Final = 2**64 - 1
_POSITION: Final = 0x9E3779B97F4A7C15
_MAGIC: Final = 0xC2B2AE3D27D4EB4F
_ROLL: Final = 2
_DELETE: Final = 4
_NO_MESSAGE: Final = 4 | 8
_MIX: Final = 0xD6E8FEB86659FD93


class FileSum(NamedTuple):
    """The checksums of the units in one file."""

    crc: int = 0
    """CRC-32 of the units, with 0 for their magic numbers."""
    magic: int = 0
    """Sum of the units' hashes of position and magic number, modulo 2**64."""


class LogSums:
    """The checksums of all files, by the position at which each file begins."""

    def __init__(self, segment_size: int) -> None:
        self._segment_size = segment_size
        self._by_file: dict[int, FileSum] = {}
        self._last: dict[int, int] = {}
        """The latest second in whose slot the file has a unit, by the file's position."""
        self._waiting: list[tuple[int, Units]] = []
        """Units not in any sum yet: runs of adjacent units in one file, each with its position."""
        self._count = 0
        """Number of units in `_waiting`."""
        self._changes: list[tuple[int, int, int]] = []
        """Changes not in any sum yet: position, old and new magic number."""

    @property
    def by_file(self) -> dict[int, FileSum]:
        """The sums of all units. Raises MemoryError."""
        self._settle()
        return self._by_file

    def needed(self, second: int, position: int) -> dict[int, FileSum]:
        """Return the sums of the files that a start needs if it goes back to a second and puts the units behind a
        position in again. These are all files from the first one on that has a unit in a slot of that second or later,
        or that ends behind that position. Earlier files may be removed at any time; the last file never is."""
        sums = self.by_file
        bases = sorted(sums)
        first = next(
            (base for base in bases if self._last[base] >= second or base + self._segment_size > position),
            bases[-1] if bases else 0,
        )
        return {base: sums[base] for base in bases if base >= first}

    def add(self, position: int, units: Units) -> None:
        """Add the units from a position on, which are in one file and behind those already added. The caller must not
        change the array. Never fails, since the units are already in the file."""
        self._waiting.append((position, units))
        self._count += len(units)
        if self._count >= _MAX_PENDING:
            with suppress(MemoryError):  # tried again later
                self._settle()

    def change(self, position: int, old: int, new: int) -> None:
        """Note that the magic number of the unit at a position has changed. Never fails."""
        self._changes.append((position, old, new))
        if len(self._changes) >= _MAX_PENDING:
            with suppress(MemoryError):  # tried again later
                self._settle()

    def _settle(self) -> None:
        """Bring all collected units and changes into the sums. Raises MemoryError; then nothing has changed."""
        if not self._waiting and not self._changes:
            return
        sums, last = dict(self._by_file), dict(self._last)
        for base, each in groupby(self._waiting, lambda run: run[0] - run[0] % self._segment_size):
            runs = list(each)
            # The units are joined as bytes, since numpy would join them field by field.
            plain = np.frombuffer(bytearray().join([units.data for _, units in runs]), runs[0][1].dtype)
            # A superseded unit is either listed in the note or marked in its file; the sum must be the same in both
            # cases.
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
    """Whether each unit has the mark of `timers.files.superseded`."""
    result: NDArray[np.bool_] = (units["magic"] & _NO_MESSAGE == _DELETE) & (units["due_ms"] > 0)
    return result


def mixed(positions: NDArray[np.int64], magic: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return the hash of each position and magic number, without RocketMQ's bit 2."""
    magic = magic & ~_ROLL
    both = positions.astype(np.uint64) * np.uint64(_POSITION) ^ magic.astype(np.uint64) * np.uint64(_MAGIC)
    both = (both ^ both >> np.uint64(29)) * np.uint64(_MIX)
    result: NDArray[np.uint64] = both ^ both >> np.uint64(32)
    return result
