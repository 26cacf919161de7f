"""Recognises a store: whether it still has the bytes that were read from it up to a physical offset. A store has other
records there if another one took its path, or if it was restored from a backup, compacted, or cut and written to again.
Offsets noted before then mean nothing in it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from duemq.spark_jobs.store.store_files import StoreFiles

_TAIL: Final = 64 << 10


def tail_of(store: StoreFiles, end: int) -> int | None:
    """Return the first 63 bits of the SHA-256 of the last 64 KiB before a physical offset, within one file; any table
    can store that number. Records contain their own physical offset, their time and their body, so that no two stores
    agree. None if no file has these bytes any longer."""
    segment = store.written_segment_of(end - 1)
    if segment is None:
        return None
    begin = max(end - _TAIL, segment.first_offset)
    digest = hashlib.sha256(store.read(segment.path, begin - segment.first_offset, end - begin)).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def is_known(store: StoreFiles, end: int, tail: int) -> bool:
    """Return whether a store has this `tail` before a physical offset."""
    return end <= store.written_end and tail_of(store, end) == tail


def why_not(store: StoreFiles, end: int, tail: int) -> str | None:
    """Return why a store is not the one that had this `tail` before a physical offset; None where it is, or where the
    bytes are gone and this cannot be decided. A broker that was started since may hold readers back before that offset,
    until it has flushed again what was flushed before: the bytes are compared anyway."""
    if end > store.written_end:
        return f"ends at physical offset {store.written_end}, but went up to {end} before: it was cut or exchanged"
    if tail_of(store, end) not in (tail, None):
        return f"has other bytes before physical offset {end} than it had: it was exchanged, cut, compacted or restored"
    return None
