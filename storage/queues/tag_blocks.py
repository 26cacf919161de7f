"""A filter of tags for blocks of a consume queue: a pull with tags skips the blocks that have none of them.

A block is BLOCK units. Its filter is a 64-bit integer: the bitwise or of the hashes of all its tags codes. A hash has
one or two of the 64 bits. A block can have a tags code only if its filter has all bits of the code's hash. Bits of
different codes may coincide, so the units of the remaining blocks are looked at one by one.

The filters are kept in memory only. They are made when pulls look at blocks for the second time: for a single group
that reads the queue once they would cost more than they save, since looking at a unit takes less time than hashing its
tags code. From the third look on, by other groups or by consumers that start over, blocks are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK: Final = 1024
"""Number of units in a block. Blocks begin at multiples of it."""
_MORE: Final = 16
"""Least number of blocks for which room is added."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_ONE, _LOW, _NEXT, _HIGH = (np.uint64(number) for number in (1, 63, 52, 58))


def hashes(codes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hash of each tags code: a 64-bit integer with one or two bits set, never 0."""
    mixed = codes.view(np.uint64) * _ODD
    return (_ONE << (mixed >> _HIGH)) | (_ONE << ((mixed >> _NEXT) & _LOW))


_NO_LOOKS: Final = np.zeros(0, np.uint8)
_NO_FILTERS: Final = np.zeros(0, np.uint64)


class TagBlocks:
    """The filters of the blocks of one consume queue. Block n has the units from queue offset n * BLOCK on."""

    def __init__(self) -> None:
        self._first = 0
        # By block, from block `_first` on.
        self._looks = _NO_LOOKS
        self._filters = _NO_FILTERS

    def looked_at(self, block: int, codes: NDArray[np.int64]) -> None:
        """Note that a pull has looked at the whole blocks from number `block` on without finding a message. `codes`:
        the tags codes of these blocks."""
        count = len(codes) // BLOCK
        if not count:
            return
        self._make_room(block, block + count)
        part = slice(block - self._first, block - self._first + count)
        looks = self._looks[part]
        if not looks.all():
            looks[:] = np.maximum(looks, 1)
        elif (looks == 1).any():
            looks[:] = 2
            self._filters[part] = np.bitwise_or.reduce(hashes(codes).reshape(-1, BLOCK), axis=1)
        # Else the filters are known, and have the bits of the wanted tags although the blocks have only other tags.

    def _make_room(self, block: int, end: int) -> None:
        """Make room for the blocks with the numbers from `block` to before `end`."""
        if not len(self._looks):
            self._first = block
        before = max(0, self._first - block)
        after = max(0, end - self._first - len(self._looks))
        if before or after:
            after = max(after, _MORE, len(self._looks)) if after else 0
            self._looks = np.pad(self._looks, (before, after))
            self._filters = np.pad(self._filters, (before, after))
            self._first -= before

    def next_block(self, block: int, wanted: NDArray[np.uint64]) -> int:
        """Return the number of the first block, from `block` on, that may have a tags code with one of the wanted
        hashes, or whose filter is not known."""
        if block < self._first:
            return block
        part = slice(block - self._first, None)
        filters = self._filters[part]
        if not len(filters):
            return block
        may_have = self._looks[part] < 2
        for each in wanted:
            may_have |= (filters & each) == each
        found = int(may_have.argmax())
        return block + (found if may_have[found] else len(filters))
