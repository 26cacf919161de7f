"""Marks: four bytes of a unit in a file that change when its message is withdrawn.

The record that withdraws a message is in the commitlog; a mark repeats that at the message's own unit. After a power
cut the disk may have any of the bytes that were written but not synced. A mark on the disk without its record would
lose the message, with nothing in its place. So a mark waits in memory, where every reader sees it, until its record is
durable. The job that makes the next checkpoint, which lies behind the record, puts the mark into the file. Until then
recovery needs no mark: it reads the records behind the older checkpoint, which name the withdrawn messages.

Keeps invariant 22 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from duemq.storage.files import File
from duemq.storage.log.segments import Segments

SIZE: Final = 4
_BLOCK: Final = 65_536


class Marks:
    """Marks that the files do not have yet. Owned by one thread."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._blocks: dict[int, dict[int, bytes]] = {}
        """The marks, by the number of the block in which a position lies, then by position."""
        self._for_the_next: set[int] = set()
        """Positions of marks that the checkpoint in progress does not cover."""
        self._planned: _Planned | None = None

    def set(self, position: int, mark: bytes) -> None:
        """Set the bytes of a mark at a position, to be written soon. A position is that of a mark within a unit: units
        are read whole, so a read has all bytes of a mark or none."""
        block = self._blocks.setdefault(position // _BLOCK, {})
        if position not in block:
            self._for_the_next.add(position)
        block[position] = mark

    def begin(self) -> None:
        """Begin another checkpoint: it covers the records stored so far, and the marks set so far."""
        self._for_the_next.clear()

    def over(self, start: int, data: bytes) -> bytes:
        """Return units that were read at a position, with their marks applied. `data`: whole units."""
        if not self._blocks:
            return data
        end = start + len(data)
        found = [
            (position - start, mark)
            for block in range(start // _BLOCK, -(-end // _BLOCK))
            for position, mark in self._blocks.get(block, {}).items()
            if start <= position < end
        ]
        if not found:
            return data
        marked = bytearray(data)
        for at, mark in found:
            marked[at : at + SIZE] = mark
        return bytes(marked)

    def __bool__(self) -> bool:
        """Return whether there are marks that the files may not have yet."""
        self._forget_written()
        return bool(self._blocks)

    def plan(self, end: int) -> Callable[[], None]:
        """Return the work that puts marks into the files and makes them durable: the marks at positions before `end`
        that were set before the last `begin`. Any thread may run the work, one at a time, once the records stored at
        the time of that `begin` are durable. It raises OSError; the marks then go on waiting."""
        self._forget_written()
        planned = self._planned = _Planned()
        for block in self._blocks.values():
            for position, mark in block.items():
                if position < end and position not in self._for_the_next:
                    planned.marks[position] = mark
                    at = position - self._segments.base_of(position)
                    for file in self._segments.files_between(position, position + 1):
                        planned.writes.setdefault(file, []).append((at, mark))
        return planned.run

    def _forget_written(self) -> None:
        if self._planned is None or not self._planned.is_done:
            return
        for position, mark in self._planned.marks.items():
            block = self._blocks.get(position // _BLOCK, {})
            if block.get(position) == mark:
                del block[position]
                if not block:
                    del self._blocks[position // _BLOCK]
        self._planned = None


class _Planned:
    """Marks on their way to the disk."""

    def __init__(self) -> None:
        self.marks: dict[int, bytes] = {}
        self.writes: dict[File, list[tuple[int, bytes]]] = {}
        self.is_done = False

    def run(self) -> None:
        for file, writes in self.writes.items():
            file.write_apart(writes)
        self.is_done = True
