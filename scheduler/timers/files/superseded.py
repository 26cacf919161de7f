"""Units of the timer log whose messages got others before the turn of their slots came: those of messages that a pause
held back, when it ended (`timers.parking`).

Such a unit lies in a slot to come, and its message has another one by then, or is delivered: it stands for nothing any
more. No record of the commitlog says so. That is told by the note of each checkpoint, with which the newer unit becomes
durable, as runs of positions; and by the unit itself, as soon as that checkpoint is on the disk: its magic number gets
RocketMQ's 4 then, so that no broker of Apache's, which goes by the wheel, delivers the message once more, and the next
note need not tell any more. A crash before loses the newer unit and what is known of the older one together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.scheduler.timers.index.sorted_offsets import is_among, joined

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
"""Units that follow each other, as the note has them."""


class Superseded:
    """Those whose files do not say so yet. One thread owns it. 8 bytes each."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._blocks: dict[int, Positions] = {}
        """Ascending positions, by number of a block of positions."""
        self._noted: dict[int, Positions] = {}
        """Those that the checkpoint tells of that is being made."""
        self._planned: _Marking | None = None

    def add(self, positions: Positions) -> None:
        """More of them, in any order, each once."""
        positions = np.sort(positions)
        blocks = positions // _BLOCK
        starts = np.flatnonzero(np.concatenate(([True], blocks[1:] != blocks[:-1]))) if len(blocks) else blocks
        for number, part in zip(blocks[starts].tolist(), np.split(positions, starts[1:]), strict=False):
            known = self._blocks.get(number)
            # Another array each time: a checkpoint that is being made has those that there were.
            self._blocks[number] = part if known is None else joined([known, part])

    def over(self, position: int, units: Units) -> Units:
        """Units that were read at a position, one behind the other, marked where they are among these."""
        if not self._blocks:
            return units
        end = position + len(units) * _UNIT_SIZE
        found = [
            self._blocks[number] for number in range(position // _BLOCK, -(-end // _BLOCK)) if number in self._blocks
        ]
        return marked(position, units, np.concatenate(found)) if found else units

    def drop_before(self, position: int) -> None:
        """Forget those before a position, whose files are gone."""
        for number in [number for number in self._blocks if (number + 1) * _BLOCK <= position]:
            del self._blocks[number]

    # --- the note

    def encode(self) -> bytes:
        """All of them, for the note of a checkpoint."""
        self._forget_marked()
        return _runs(self._blocks).tobytes()

    def load(self, data: bytes) -> None:
        """Take in what a note says."""
        self.add(positions_of(data))

    # --- the files

    def begin(self) -> None:
        """A checkpoint begins, whose note was taken just now."""
        self._noted = dict(self._blocks)

    def plan(self) -> Callable[[], None]:
        """What marks the units that that checkpoint tells of, and makes the marks durable; run by any thread when the
        checkpoint is durable. It raises OSError, NotDurable; then the next checkpoint tells of them again."""
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
    """Marks on their way to the disk."""

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
    """The positions that a note has, ascending."""
    runs = [position + np.arange(count) * _UNIT_SIZE for position, count in np.frombuffer(data, RUN).tolist()]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


def marked(position: int, units: Units, superseded: Positions) -> Units:
    """Units that lie at a position, one behind the other, marked where they are superseded."""
    at = superseded[(superseded >= position) & (superseded < position + len(units) * _UNIT_SIZE)]
    if not len(at):
        return units
    result = units.copy()
    result["magic"][(at - position) // _UNIT_SIZE] |= _MARK
    return result


def _runs(blocks: dict[int, Positions]) -> NDArray[Any]:
    """Positions as runs. None is of two files, since no unit begins right behind another file's last one."""
    if not blocks:
        return np.empty(0, RUN)
    positions = np.concatenate([blocks[number] for number in sorted(blocks)])
    starts = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1] + _UNIT_SIZE)))
    runs = np.empty(len(starts), RUN)
    runs["position"] = positions[starts]
    runs["count"] = np.diff(np.append(starts, len(positions)))
    return runs
