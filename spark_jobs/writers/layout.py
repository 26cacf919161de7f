"""Where records go in a new commitlog: one after the other, none across files.

    file of `segment_size` bytes: | record | record | ... | end marker: int32 space left, uint32 0xCBD43194 |

A record goes into the next file if the rest of a file has no room for it and the 8 bytes of an end marker. Records come
in parts (ranges of the old log); a part is laid out by its total size, and single records are considered only if a file
ends within it. So a layout costs nothing for most records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.spark_jobs.errors import JobError

if TYPE_CHECKING:
    from numpy.typing import NDArray

END_MARKER_SIZE: Final = 8


class Piece(NamedTuple):
    """Records `begin` to `end` of a part, which lie one after the other from physical offset `start` on, in one
    file."""

    begin: int
    end: int
    start: int


class Layout(NamedTuple):
    """`pieces` of each part; `markers`: (physical offset, bytes left) of the end markers; `begin`, `end`: physical
    offsets where the log begins, and where the next record would go."""

    pieces: list[list[Piece]]
    markers: list[tuple[int, int]]
    begin: int
    end: int

    def files(self, segment_size: int) -> list[int]:
        """Return the first physical offsets of the files; at least one."""
        first = self.begin - self.begin % segment_size
        return list(range(first, max(self.end, first + 1), segment_size))


def lay_out(
    parts: list[tuple[int, int]], sizes_of: Callable[[int], NDArray[np.int64]], segment_size: int, begin: int
) -> Layout:
    """Lay out parts, each given by the number and the bytes of its records. `sizes_of` returns the sizes of a part's
    records, and is called only if a file ends within the part. Raises JobError for a record larger than a file."""
    pieces: list[list[Piece]] = []
    markers: list[tuple[int, int]] = []
    position = begin
    for number, (count, size) in enumerate(parts):
        mine: list[Piece] = []
        first, left, ends = 0, size, None
        while first < count:
            file_end = position - position % segment_size + segment_size
            room = file_end - END_MARKER_SIZE - position
            if left <= room:
                mine.append(Piece(first, count, position))
                position += left
                break
            if ends is None:
                ends = np.cumsum(sizes_of(number))
            before = int(ends[first - 1]) if first else 0
            fits = int(np.searchsorted(ends, before + room, "right"))
            if fits > first:
                mine.append(Piece(first, fits, position))
                taken = int(ends[fits - 1]) - before
                position += taken
                left -= taken
                first = fits
            elif position % segment_size == 0:
                raise JobError(f"a record of {int(ends[first]) - before} bytes does not fit into {segment_size} bytes")
            markers.append((position, file_end - position))
            position = file_end
        pieces.append(mine)
    return Layout(pieces, markers, begin, position)


def offsets(pieces: list[Piece], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the new physical offset of each record of a part."""
    result = np.empty(len(sizes), np.int64)
    for piece in pieces:
        mine = sizes[piece.begin : piece.end]
        result[piece.begin : piece.end] = piece.start + np.cumsum(mine) - mine
    return result
