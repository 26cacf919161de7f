"""What a store is known again by: whether what somebody has read of it up to a physical offset is still what it has
there. A store that was exchanged behind its path, restored from a backup, compacted, or cut and written on has other
records there, and offsets of before mean nothing in it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from duemq.spark_jobs.store.store_files import StoreFiles

_TAIL: Final = 64 << 10


def tail_of(store: StoreFiles, end: int) -> int | None:
    """What a store has in the last 64 KiB before a physical offset, of one file: the first 63 bits of their SHA-256,
    which any table can keep. Records have their own physical offset, their time and their body in them, so that no
    two stores agree. None where the bytes are not there any more."""
    segment = store.written_segment_of(end - 1)
    if segment is None:
        return None
    begin = max(end - _TAIL, segment.first_offset)
    digest = hashlib.sha256(store.read(segment.path, begin - segment.first_offset, end - begin)).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def is_known(store: StoreFiles, end: int, tail: int) -> bool:
    """Whether a store has this `tail` before a physical offset."""
    return end <= store.written_end and tail_of(store, end) == tail


def why_not(store: StoreFiles, end: int, tail: int) -> str | None:
    """Why a store is not the one that had this `tail` before a physical offset; None where it is, or where the bytes
    are not there any more and nobody can tell. A broker that was started since may hold readers back before that
    offset, until it has flushed again what was flushed before: then the bytes are there all the same."""
    if end > store.written_end:
        return f"ends at physical offset {store.written_end}, and {end} was there before: it was cut or exchanged"
    if tail_of(store, end) not in (tail, None):
        return f"has other bytes before physical offset {end} than it had: it was exchanged, cut, compacted or restored"
    return None
