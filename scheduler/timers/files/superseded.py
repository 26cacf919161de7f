"""Superseded units of the timer log: their messages got newer units before the turn of their slots. They are the units
of parked messages whose pause has ended (`timers.seconds.parking`).

Such a unit lies in a future slot, but its message has a newer unit or is delivered, so it stands for no message. No
record of the commitlog says so. Instead, the note of the checkpoint with which the newer unit becomes durable lists the
superseded units, as runs of positions. Once that checkpoint is on the disk, each superseded unit is marked as well: its
magic number gets RocketMQ's 4. So Apache's broker, which goes by the wheel, does not deliver the message again, and
later notes need not list the unit. A crash before that checkpoint loses both the newer unit and the fact that the older
unit is superseded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.scheduler.timers.index.sorted_offsets import is_among, union

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.storage.log.segments import Segments

    Positions = NDArray[np.int64]
    Units = NDArray[Any]

_UNIT_SIZE: Final = 52
_MARK: Final = 4
_BLOCK: Final = 65_536
_WRITTEN_AT_ONCE: Final = 1 << 22
_MAGIC: Final = np.dtype({"names": ["magic"], "formats": [">i4"], "offsets": [12], "itemsize": _UNIT_SIZE})
RUN: Final = np.dtype([("position", ">i8"), ("count", ">u4")])
"""A run of adjacent units in the note: position of the first one, number of units."""


class Superseded:
    """The superseded units that are not marked in their files yet. Owned by one thread. Needs 8 bytes for each unit."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._blocks: dict[int, Positions] = {}
        """Ascending positions, by the number of their block of 65,536 bytes."""
        self._noted: dict[int, Positions] = {}
        """The positions listed by the checkpoint that is being made."""
        self._planned: _Marking | None = None

    def add(self, positions: Positions) -> None:
        """Add the positions of superseded units, in any order, each once."""
        positions = np.sort(positions)
        blocks = positions // _BLOCK
        starts = np.flatnonzero(np.concatenate(([True], blocks[1:] != blocks[:-1]))) if len(blocks) else blocks
        for number, part in zip(blocks[starts].tolist(), np.split(positions, starts[1:]), strict=False):
            known = self._blocks.get(number)
            # Arrays are never changed in place: a checkpoint that is being made keeps the earlier ones.
            self._blocks[number] = part if known is None else union([known, part])

    def over(self, position: int, units: Units) -> Units:
        """Return adjacent units that were read at a position, with the mark set in the superseded ones."""
        if not self._blocks:
            return units
        end = position + len(units) * _UNIT_SIZE
        found = [
            self._blocks[number] for number in range(position // _BLOCK, -(-end // _BLOCK)) if number in self._blocks
        ]
        return marked(position, units, np.concatenate(found)) if found else units

    def drop_before(self, position: int) -> None:
        """Forget units before a position, whose files are gone. Blocks that extend beyond the position are kept."""
        for number in [number for number in self._blocks if (number + 1) * _BLOCK <= position]:
            del self._blocks[number]

    # --- the note

    def encode(self) -> bytes:
        """Encode the runs of all unmarked superseded units for a checkpoint's note."""
        self._forget_marked()
        return _runs(self._blocks).tobytes()

    def load(self, data: bytes) -> None:
        """Add the units that a note lists."""
        self.add(positions_of(data))

    # --- the files

    def begin(self) -> None:
        """Begin a checkpoint whose note has just been encoded."""
        self._noted = dict(self._blocks)

    def plan(self) -> Callable[[], None]:
        """Return a job that marks the units which that checkpoint lists, and makes the marks durable. Any thread may
        run it, once the checkpoint is durable. The job raises OSError, NotDurable; then the next checkpoint lists the
        units again."""
        self._planned = _Marking(self._segments, self._noted)
        return self._planned.run

    def _forget_marked(self) -> None:
        if self._planned is None or not self._planned.is_done:
            return
        for number, marked in self._planned.blocks.items():
            known = self._blocks.get(number)
            if known is None:
                continue
            left = known[~is_among(known, marked)]
            if len(left):
                self._blocks[number] = left
            else:
                del self._blocks[number]
        self._planned = None


class _Marking:
    """The job that marks units in their files."""

    def __init__(self, segments: Segments, blocks: dict[int, Positions]) -> None:
        self.blocks = blocks
        self.is_done = False
        self._runs = [
            (file, position - segments.base_of(position), count)
            for position, count in _runs(blocks).tolist()
            for file in segments.files_between(position, position + 1)
        ]

    def run(self) -> None:
        writes: list[tuple[int, bytes]] = []
        for number, (file, at, count) in enumerate(self._runs):
            data = bytearray(file.read_apart([(at, count * _UNIT_SIZE)]))
            np.frombuffer(data, _MAGIC)["magic"] |= _MARK
            writes.append((at, bytes(data)))
            is_last = number + 1 == len(self._runs) or self._runs[number + 1][0] is not file
            if is_last or sum(len(each) for _, each in writes) >= _WRITTEN_AT_ONCE:
                file.write_apart(writes)
                writes = []
        self.is_done = True


def positions_of(data: bytes) -> Positions:
    """Return the positions listed in a note, ascending."""
    runs = [position + np.arange(count) * _UNIT_SIZE for position, count in np.frombuffer(data, RUN).tolist()]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


def marked(position: int, units: Units, superseded: Positions) -> Units:
    """Return adjacent units, which lie at a position, with the mark set in those at the `superseded` positions."""
    at = superseded[(superseded >= position) & (superseded < position + len(units) * _UNIT_SIZE)]
    if not len(at):
        return units
    result = units.copy()
    result["magic"][(at - position) // _UNIT_SIZE] |= _MARK
    return result


def _runs(blocks: dict[int, Positions]) -> NDArray[Any]:
    """Return positions as runs. No run spans two files, since no unit begins directly behind the last unit of another
    file."""
    if not blocks:
        return np.empty(0, RUN)
    positions = np.concatenate([blocks[number] for number in sorted(blocks)])
    starts = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1] + _UNIT_SIZE)))
    runs = np.empty(len(starts), RUN)
    runs["position"] = positions[starts]
    runs["count"] = np.diff(np.append(starts, len(positions)))
    return runs
