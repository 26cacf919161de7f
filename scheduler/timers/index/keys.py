"""An index of the waiting messages that the next message of their topic and key replaces (TIMER_REPLACE).

An entry is a tag and the position of a unit. The tag is the topic's hash and 20 bits of the key's hash, both of which
the unit in the timer log has, so that its record need not be read. Two keys may have the same tag, so a search must
read the records of the entries that it finds.

There are 4096 tables by the hash of the tag, each with open addressing in two arrays. An entry takes 16 bytes, or up to
40 with the free room. Each table grows separately, so that no step takes long, however many entries there are.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Final

from duemq.protocol.records.timer_properties import stored_key

KEY_BITS: Final = 20
_TABLES_BITS: Final = 12
_FIRST_SIZE: Final = 8
_MIX: Final = 0x9E3779B97F4A7C15
_MASK_64: Final = 2**64 - 1
_EMPTY: Final = -1


def key_hash(key: str) -> int:
    """Return the hash of a key as units have it: 1 to 2**20 - 1."""
    return zlib.crc32(key.encode(errors="surrogatepass")) & ((1 << KEY_BITS) - 1) or 1


def key_of(text: str) -> int:
    """Return the hash of the key by which a stored message with these properties is to be replaced; 0 without one."""
    key = stored_key(text)
    return key_hash(key) if key is not None else 0


def tag_of(topic_hash: int, hashed_key: int) -> int:
    """Return the tag of a topic, by Java's hash of its name, and a key, by `key_hash`."""
    return (topic_hash & 0xFFFFFFFF) << KEY_BITS | hashed_key


class KeyIndex:
    """The index from tags to the positions of units. Owned by one thread."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}

    def __len__(self) -> int:
        return sum(table.used for table in self._tables.values())

    def find(self, tag: int) -> list[int]:
        """Return the positions of the units with a tag, the newest first."""
        mixed = tag * _MIX & _MASK_64
        table = self._tables.get(mixed >> 64 - _TABLES_BITS)
        return sorted(table.find(tag, mixed), reverse=True) if table is not None else []

    def add(self, tag: int, position: int) -> None:
        """Add an entry, unless it exists."""
        mixed = tag * _MIX & _MASK_64
        number = mixed >> 64 - _TABLES_BITS
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = _Table()
        table.add(tag, mixed, position)

    def remove(self, tag: int, position: int) -> None:
        """Remove an entry, if it exists."""
        mixed = tag * _MIX & _MASK_64
        number = mixed >> 64 - _TABLES_BITS
        table = self._tables.get(number)
        if table is None:
            return
        table.remove(tag, mixed, position)
        if not table.used:
            del self._tables[number]


class _Table:
    """The entries whose mixed tags begin with the same bits. The bits behind those choose the place."""

    __slots__ = ("_mask", "_positions", "_tags", "used")

    def __init__(self, size: int = _FIRST_SIZE) -> None:
        self._tags = array("q", [_EMPTY]) * size
        self._positions = array("q", [0]) * size
        self._mask = size - 1
        self.used = 0

    @staticmethod
    def _home(mixed: int) -> int:
        return mixed >> 64 - _TABLES_BITS - 32

    def find(self, tag: int, mixed: int) -> list[int]:
        tags, mask, found = self._tags, self._mask, []
        at = self._home(mixed) & mask
        while (there := tags[at]) != _EMPTY:
            if there == tag:
                found.append(self._positions[at])
            at = at + 1 & mask
        return found

    def add(self, tag: int, mixed: int, position: int) -> None:
        if (self.used + 1) * 3 > len(self._tags) * 2:
            self._grow()
        tags, positions, mask = self._tags, self._positions, self._mask
        at = self._home(mixed) & mask
        while (there := tags[at]) != _EMPTY:
            if there == tag and positions[at] == position:
                return
            at = at + 1 & mask
        tags[at], positions[at] = tag, position
        self.used += 1

    def remove(self, tag: int, mixed: int, position: int) -> None:
        tags, positions, mask = self._tags, self._positions, self._mask
        at = self._home(mixed) & mask
        while tags[at] != tag or positions[at] != position:
            if tags[at] == _EMPTY:
                return
            at = at + 1 & mask
        self.used -= 1
        # Entries that follow without a gap move into the free place, except for those whose home is behind it.
        behind = at + 1 & mask
        while (moving := tags[behind]) != _EMPTY:
            home = self._home(moving * _MIX & _MASK_64) & mask
            if (behind - home & mask) >= (behind - at & mask):
                tags[at], positions[at] = moving, positions[behind]
                at = behind
            behind = behind + 1 & mask
        tags[at] = _EMPTY

    def _grow(self) -> None:
        new = _Table(len(self._tags) * 2)
        for tag, position in zip(self._tags, self._positions, strict=True):
            if tag != _EMPTY:
                new.add(tag, tag * _MIX & _MASK_64, position)
        self._tags, self._positions, self._mask = new._tags, new._positions, new._mask
