"""The results that a run keeps for the next one, in a directory of their own.

    <directory>/manifest        the kept files, and their origin: `KeptManifest`, with its checksum
                range-XXXX      the contents of a range of the commitlog (`encode_range`)
                open-XXXX       WAITS, DONE and CLOSED of groups in which a message has no delivery, of a bucket
                matched-XXXX stray-XXXX keys-XXXX unique-XXXX    hashes, ascending
                figures-XXXX ahead-XXXX usage-XXXX     of all closed groups, and of all whole ranges
                .lock           held while a run works

All files are derived from the store, and are always checked. The manifest has the size and the checksum of each file; a
range is used only while its file of the commitlog is unchanged (`trusted`); and another version of this code uses none
of them.

A written file is not changed. The manifest is replaced once all others are on the disk, and files that it no longer
names are removed after that: a run that is killed leaves the earlier results intact.

Keeps invariant 28 of ARCHITECTURE.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pkgutil
import secrets
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from duemq.scheduler.levels.runs import Run
from duemq.spark_jobs.audit.events import CONTINUED, DONE, WAITS
from duemq.spark_jobs.audit.matching import HASHES, RangeFound
from duemq.spark_jobs.errors import NotKept
from duemq.spark_jobs.store.local_files import real_path
from duemq.spark_jobs.store.walks import Range
from duemq.storage.files import OsFiles
from duemq.storage.regular_files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from duemq.spark_jobs.store.progress import Progress
    from duemq.spark_jobs.store.store_files import StoreFiles, Version

_FORMAT: Final = 1
_MAGIC: Final = b"duemq kept\n"
_MANIFEST: Final = "manifest"
_LOCK: Final = ".lock"
_KINDS: Final = ("range", "open", "matched", "stray", "keys", "unique", "figures", "ahead", "usage")
_RULES: Final = (
    "columns/records", "columns/texts", "columns/slices", "columns/hashes", "store/roles", "store/ranges",
    "store/walks", "audit/events", "audit/matching", "audit/figures", "audit/lateness", "audit/steps", "audit/kept",
    "audit/incremental", "analyse/usage",
)  # fmt: skip
"""Modules that determine the kept results: if the source of one of these differs, nothing kept is used."""
_THREADS: Final = min(4, os.cpu_count() or 1)
_FRESH_NS: Final = 2_000_000_000
"""A file modified within this time (ns) before it was looked at may have changed again since with the same time."""


class Ref(msgspec.Struct, frozen=True):
    """A kept file."""

    name: str
    size: int
    crc: int


class KeptRange(msgspec.Struct):
    """A range of the commitlog that was read."""

    read: dict[str, Any]
    """The range's entry in `cases.Found.reads`."""
    levels: list[int]
    """Delay levels of messages in it."""
    file: Ref

    @property
    def range(self) -> Range:
        """Its physical offsets."""
        return Range(self.read["start"], self.read["end"])


class KeptSegment(msgspec.Struct):
    """The properties of a file of the commitlog when it was read."""

    node: int
    size: int
    modified_ns: int
    changed_ns: int
    is_fresh: bool
    """Whether it had been modified just before it was looked at."""


class Bucket(msgspec.Struct):
    """Groups with hashes from `low` on, up to the next bucket."""

    low: int
    file: Ref | None
    """None if the bucket has no open records."""


class Matches(msgspec.Struct, kw_only=True):
    """The matched records of all kept ranges together."""

    begin: int
    begin_ms: int
    step_ms: int
    levels: dict[int, list[tuple[int, int]]]
    """The progress in each level: start and cursor of its runs."""
    buckets: list[Bucket]
    figures: Ref | None
    ahead: Ref | None
    matched: list[Ref]
    stray: list[Ref]
    keys: list[Ref]
    unique: list[Ref]
    usage: Ref | None
    duplicates: int


class KeptManifest(msgspec.Struct, kw_only=True):
    """The kept files, and what they were made of."""

    format: int = _FORMAT
    rules: str
    with_usage: bool
    delays_ms: list[int]
    segments: dict[int, KeptSegment]
    """Files of the commitlog by their first physical offsets."""
    ranges: list[KeptRange]
    """The kept ranges, in order."""
    matches: Matches | None

    def files(self) -> set[str]:
        """Return the names of all kept files."""
        refs: list[Ref | None] = [part.file for part in self.ranges]
        if self.matches is not None:
            found = self.matches
            refs += [found.figures, found.ahead, found.usage]
            refs += [*found.matched, *found.stray, *found.keys, *found.unique]
            refs += [bucket.file for bucket in found.buckets]
        return {ref.name for ref in refs if ref is not None}


@cache
def rules() -> str:
    """Return a hash of the sources of `_RULES`, which differs between versions of this code."""
    digest = hashlib.sha256()
    for name in _RULES:
        digest.update(pkgutil.get_data("duemq.spark_jobs", f"{name}.py") or b"")
    return digest.hexdigest()


# --- files


def directory_of(state: str, store: str) -> str:
    """Return the directory for a store, given by path or URI, below the directory of all stores."""
    return os.path.join(state, hashlib.sha256(real_path(store).encode()).hexdigest()[:16])


def write_file(directory: str, kind: str, data: bytes) -> Ref:
    """Write a new file, durably. Raises OSError."""
    name = f"{kind}-{secrets.token_hex(8)}"
    path = os.path.join(directory, name)
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise
    return Ref(name, len(data), zlib.crc32(data))


def read_file(directory: str, ref: Ref) -> bytes:
    """Return the contents of a file. Raises NotKept if they differ from what was written."""
    try:
        data = read_regular(os.path.join(directory, ref.name), ref.size + 1)
    except OSError as error:
        raise NotKept(f"{ref.name} cannot be read: {error.strerror or error}") from None
    if len(data) != ref.size or zlib.crc32(data) != ref.crc:
        raise NotKept(f"{ref.name} differs from what was written")
    return data


class Folder:
    """The directory of one store, held by one run. Made by `open`."""

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: str) -> Folder:
        """Make the directory if it is missing, and hold it for this run. Raises OSError, BlockingIOError if another run
        holds it."""
        os.makedirs(path, exist_ok=True)
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return cls(path, lock)

    def close(self) -> None:
        """Release the directory."""
        os.close(self._lock)

    def read(self) -> KeptManifest | None:
        """Return the manifest; None if there is none. Raises NotKept if it is from another version, or damaged."""
        try:
            data = read_regular(os.path.join(self.path, _MANIFEST))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotKept(f"cannot be read: {error.strerror or error}") from None
        head, text = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
        if head != _MAGIC + hashlib.sha256(text).digest():
            raise NotKept("the manifest differs from what was written")
        try:
            head_of = msgspec.msgpack.decode(text, type=_Head)
            if head_of.format != _FORMAT or head_of.rules != rules():
                raise NotKept("they are from another version of duemq")
            return msgspec.msgpack.decode(text, type=KeptManifest)
        except msgspec.DecodeError:
            raise NotKept("the manifest differs from what was written") from None

    def write(self, manifest: KeptManifest) -> None:
        """Replace the manifest, and remove files that it does not name. Raises OSError."""
        text = msgspec.msgpack.encode(manifest)
        files = OsFiles()
        files.sync_directory(self.path)  # the files that it names
        files.write_whole(os.path.join(self.path, _MANIFEST), _MAGIC + hashlib.sha256(text).digest() + text)
        self.tidy()

    def tidy(self) -> None:
        """Remove kept files that the manifest does not name, left by earlier or killed runs."""
        with suppress(OSError, NotKept):
            manifest = self.read()
            known = manifest.files() if manifest is not None else set()
            for name in os.listdir(self.path):
                if name not in known and name.partition("-")[0] in _KINDS:
                    with suppress(OSError):
                        os.unlink(os.path.join(self.path, name))


class _Head(msgspec.Struct):
    format: int
    rules: str


# --- ranges


def encode_range(found: RangeFound) -> bytes:
    """Return the contents of a range as bytes, without `read`. The field `passed` of its WAITS is not kept, since it
    holds for this run only."""
    done = found.done.copy()
    # Records that name their origin are matched only by it, except that a record that continues another needs its key.
    named = done["origin"] >= 0
    for name in ("message", "slot"):
        done[name][named] = 0
    done["key"][named & (done["what"] != CONTINUED)] = 0
    return msgspec.msgpack.encode(
        [_columns(found.waits), _columns(done), _packed(found.unique), len(found.unique), found.usage]
    )


def decode_range(data: bytes, read: dict[str, Any]) -> RangeFound:
    """Return the contents of a range from the bytes of `encode_range`. `passed` of WAITS must be filled in."""
    waits, done, unique, count, usage = msgspec.msgpack.decode(data)
    return RangeFound(read, _rows(waits, WAITS), _rows(done, DONE), _unpacked(unique, HASHES, count), usage)


_ASCENDING: Final = {"offset", "at_ms", "queue_offset", "origin"}
"""Fields whose successive differences are small."""


def _columns(rows: NDArray[Any]) -> list[Any]:
    parts = []
    for name in rows.dtype.names or ():
        column = np.ascontiguousarray(rows[name])
        parts.append(_packed(np.diff(column, prepend=column.dtype.type(0)) if name in _ASCENDING else column))
    return [len(rows), parts]


def _rows(parts: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    count, columns = parts
    rows = np.zeros(count, dtype)
    for name, data in zip(dtype.names or (), columns, strict=True):
        column = _unpacked(data, dtype[name], count)
        rows[name] = np.cumsum(column) if name in _ASCENDING else column
    return rows


def _packed(values: NDArray[Any]) -> bytes:
    data = np.ascontiguousarray(values).tobytes()
    return bytes(pa.Codec("zstd", 1).compress(data, asbytes=True)) if data else b""


def _unpacked(data: bytes, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer(pa.Codec("zstd").decompress(data, count * dtype.itemsize, asbytes=True), dtype)


def keep_range(directory: str, found: RangeFound) -> KeptRange:
    """Write the contents of a range. Raises OSError."""
    return KeptRange(
        found.read,
        np.unique(found.waits["level"]).tolist(),
        write_file(directory, "range", encode_range(found)),
    )


def _is_as_hashed(store: StoreFiles, read: Mapping[str, Any]) -> bool:
    """Return whether all bytes of a range still have the SHA-256 in `read`."""
    segment = store.segment_of(read["start"])
    if segment is None:
        return False
    digest, at, left = hashlib.sha256(), read["start"] - segment.first_offset, read["hashed"]
    buffer = memoryview(bytearray(1 << 20))
    while left > 0:
        got = store.read_into(segment.path, at, buffer[: min(left, len(buffer))])
        if not got:
            return False
        digest.update(buffer[:got])
        at, left = at + got, left - got
    return bool(digest.hexdigest() == read["sha256"])


# --- which of it can be used


def segments_of(store: StoreFiles, versions: Mapping[str, Version], now_ns: int) -> dict[int, KeptSegment]:
    """Return the files of a store's commitlog with `versions`, taken before they were read."""
    found = {}
    for segment in store.segments:
        version = versions.get(os.path.basename(segment.path))
        if version is not None:
            is_fresh = version.modified_ns > now_ns - _FRESH_NS
            found[segment.first_offset] = KeptSegment(*version, is_fresh=is_fresh)
    return found


def trusted(store: StoreFiles, manifest: KeptManifest, now: Mapping[int, KeptSegment]) -> list[KeptRange]:
    """Return the kept ranges whose bytes in the commitlog are unchanged. The same inode, size and times of the file
    show that. If they differ, usually only for the file that was the last one, all bytes of the range are read and
    compared by hash."""
    possible: list[tuple[KeptRange, bool]] = []
    for part in manifest.ranges:
        start, end = part.range
        segment = store.segment_of(start)
        if segment is None or end > min(segment.end, store.readable_end):
            continue
        was, known = manifest.segments.get(segment.first_offset), now.get(segment.first_offset)
        if was is None or known is None:
            continue
        is_proven = not was.is_fresh and msgspec.structs.replace(known, is_fresh=False) == was
        possible.append((part, is_proven))
    # Hashing is most of the work of a run with little to read; hashlib releases the GIL meanwhile.
    with ThreadPoolExecutor(_THREADS) as pool:
        is_same = pool.map(lambda each: each[1] or _is_as_hashed(store, each[0].read), possible)
        return [part for (part, _), same in zip(possible, is_same, strict=True) if same]


def is_same_table(part: KeptRange, old: list[int], new: list[int]) -> bool:
    """Return whether the messages of a range have the same times by two tables of delays, ms."""
    return min(old) == min(new) and all(
        old[min(level, len(old)) - 1] == new[min(level, len(new)) - 1] for level in part.levels if level
    )


def runs_of(progress: Progress) -> dict[int, list[tuple[int, int]]]:
    """Return the progress in the levels in the form that is kept."""
    return {level: [(run.start, run.cursor) for run in runs] for level, runs in progress.levels.items()}


def has_gone_on(old: Mapping[int, Iterable[tuple[int, int]]], progress: Progress) -> bool:
    """Return whether a progress in the levels has passed everything that an older progress had passed."""
    for level, parts in old.items():
        runs = [Run(start, cursor) for start, cursor in parts]
        now = progress.levels.get(level, [])
        # A stretch passed only by the older one begins where a run of either begins, or at a cursor of the newer.
        points = {0, *(run.start for run in (*runs, *now)), *(run.cursor for run in now)}
        at = np.array(sorted(points), np.int64)
        levels = np.full(len(at), level)
        before = progress._replace(levels={level: runs}).is_level_done(levels, at)
        if (before & ~progress.is_level_done(levels, at)).any():
            return False
    return True
