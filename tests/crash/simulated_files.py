"""A file layer in memory that records every write, sync and change of a name, and can build any disk that a power cut
at any moment could have left.

The model of the disk promises this and no more: after a sync of a file its bytes so far are durable; of later writes,
any 512-byte sectors may be there and any may be missing. After a sync of a directory its names so far are durable; of
later changes, any prefix of their sequence may have happened, in each directory independently. A file's name never
appears before its size. A new directory is a name in its parent, and its content is there if that name is.

The model of the system promises that an open file stays readable when its name is gone; a call that opens it anew, as a
sync does, does not find it.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from duemq.storage.errors import NotDurable, StoreFormatError, StoreLocked
from duemq.storage.files import Ranges

SECTOR = 512

Call = Literal["open", "read", "write", "sync", "name", "remove"]
"""The calls that can fail: opening a file, also by a call that opens it anew; reading an open file; writing; syncing a
file or a directory; creating or renaming a file or a directory; removing one."""


_LARGE = 1 << 20
_PART = 115_200
_ZEROS = bytes(_PART)


class _Lazy:
    """A large file's content, with the interface of a bytearray. It is kept in parts, without those that are all zeros.
    A part is as large as an hour of the timer wheel, which is written and read as a whole: such a part is the written
    object itself, and no copy of it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: dict[int, bytes | bytearray] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            number, place = divmod(range(self._size)[at], _PART)
            return self._part(number)[place]
        start, stop, step = at.indices(self._size)
        if step != 1:
            return bytes(self)[at]
        found = [self._part(number)[begin:end] for number, begin, end, _ in _pieces(start, stop)]
        return bytes(found[0]) if len(found) == 1 else b"".join(found)

    def __setitem__(self, at: Any, value: Any) -> None:
        if not isinstance(at, slice):
            number, place = divmod(range(self._size)[at], _PART)
            self._changed(number)[place] = value
            return
        start, stop, _ = at.indices(self._size)
        if len(value) != max(0, stop - start):
            value = b"".join((self[:start], value, self[stop:]))
            start, stop = 0, len(value)
            self._size = stop
            self._parts.clear()
        data = bytes(value)
        for number, begin, end, place in _pieces(start, stop):
            piece = data[place : place + end - begin]
            if piece == _ZEROS:
                self._parts.pop(number, None)
            elif len(piece) == _PART:
                self._parts[number] = piece
            else:
                self._changed(number)[begin:end] = piece

    def __delitem__(self, at: slice) -> None:
        self[at] = b""

    def __bytes__(self) -> bytes:
        return b"".join(self._part(number)[begin:end] for number, begin, end, _ in _pieces(0, self._size))

    def extend(self, data: bytes) -> None:
        self[self._size :] = data

    def rstrip(self, zeros: bytes) -> bytes:
        assert zeros == b"\0"
        used = [number for number, part in self._parts.items() if part.strip(zeros)]
        last = max(used, default=-1)
        return b"".join((*map(self._part, range(last)), self._part(last).rstrip(zeros)))

    def next_data(self, offset: int) -> int:
        """Return the first offset from `offset` on that lies in a kept part, the size without one."""
        first = min((number for number in self._parts if (number + 1) * _PART > offset), default=None)
        return self._size if first is None else max(offset, first * _PART)

    def _part(self, number: int) -> bytes | bytearray:
        return self._parts.get(number, _ZEROS)

    def _changed(self, number: int) -> bytearray:
        """Return a part, to be changed."""
        part = self._part(number)
        if not isinstance(part, bytearray):
            part = self._parts[number] = bytearray(part)
        return part


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each part of a range the number of the part, where the range begins and ends in it, and where that
    begin lies in the range."""
    at = start
    while at < stop:
        number, begin = divmod(at, _PART)
        end = min(_PART, begin + stop - at)
        yield number, begin, end, at - start
        at += end - begin


class Node:
    """A file's content, apart from its name."""

    def __init__(self, size: int = 0) -> None:
        self.data: Any = bytearray(size) if size < _LARGE else _Lazy(size)


class Folder:
    """A directory, apart from its name: a second directory with the same name is another Folder."""


@dataclass(frozen=True)
class Write:
    node: Node
    offset: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    node: Node


@dataclass(frozen=True)
class Name:
    """A directory entry is set to a file or a directory, or removed."""

    folder: Folder
    name: str
    entry: Node | Folder | None


@dataclass(frozen=True)
class SyncDirectory:
    folder: Folder


Writes = list[Write]
Entries = dict[str, Node | Folder]
Operation = Write | Sync | Name | SyncDirectory


@dataclass
class SimulatedFiles:
    """Implements storage.files.Files. `operations` is every operation since the beginning, in order."""

    names: dict[str, Node] = field(default_factory=dict)
    """Files by their paths."""
    operations: list[Operation] = field(default_factory=list)
    folders: dict[str, Folder] = field(default_factory=lambda: {"/": Folder()})
    """Directories by their paths."""
    locked: set[str] = field(default_factory=set)
    used: float = 0.1
    room: int | None = None
    """Bytes that may still be written before the disk is full."""
    faults: dict[tuple[Call, str], int] = field(default_factory=dict)
    """Error numbers by failing call and path prefix: see `fail`."""
    may_wait: bool = True
    uncached: int = 0
    """Bytes of a file before this offset are never in memory, even after a read."""
    blocks: int = 0

    # --- storage.files.Files

    def create(self, path: str, size: int) -> SimulatedFile:
        self.check("open", path)
        self._name(path, Node(size))
        return SimulatedFile(self, path)

    def open(self, path: str, *, for_reading: bool = False) -> SimulatedFile:
        return SimulatedFile(self, path)

    def exists(self, path: str) -> bool:
        return path in self.names or path in self.folders

    def require_file(self, path: str) -> None:
        if path in self.folders:
            raise StoreFormatError(path, "is a directory")

    def require_directory(self, path: str) -> None:
        if path in self.names:
            raise StoreFormatError(path, "is a file")

    def list(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        inside = (
            entry[len(prefix) :]
            for entries in (self.names, self.folders)
            for entry in entries
            if entry.startswith(prefix)
        )
        return sorted(entry for entry in inside if entry and "/" not in entry)

    def make_directories(self, path: str, *, durable: bool = False) -> None:
        missing = []
        while path not in self.folders:
            missing.append(path)
            path = os.path.dirname(path)
        for made in reversed(missing):
            self._name(made, Folder())
        for made in reversed(missing) if durable else ():
            self.sync_directory(os.path.dirname(made))

    def remove(self, path: str) -> None:
        self.check("remove", path)
        if path in self.names:
            self._name(path, None)

    def remove_tree(self, path: str) -> None:
        inside = [name for name in [*self.names, *reversed(self.folders)] if f"{name}/".startswith(f"{path}/")]
        for name in inside:
            self.check("remove", name)
            self._name(name, None)

    def read_whole(self, path: str) -> bytes | None:
        self.check("open", path)
        node = self.names.get(path)
        return bytes(node.data) if node is not None else None

    def write_whole(self, path: str, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
        self.check("open", path)
        node = Node(len(data))
        self.write(path, node, 0, data)
        if durable:
            self.sync(path, node)
        self._name(path, node)
        if durable:
            self.sync_directory(os.path.dirname(path))

    def link(self, source: str, target: str) -> None:
        self._name(target, self.names[source])

    def sync_directory(self, path: str) -> None:
        self.check("open", path)
        if path not in self.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._check_sync(path)
        self.operations.append(SyncDirectory(self.folders[path]))

    def lock(self, path: str) -> SimulatedLock:
        if path in self.locked:
            raise StoreLocked(path)
        made: list[str] = []
        while (above := os.path.dirname(made[-1] if made else path)) not in self.folders:
            made.append(above)
        self.make_directories(os.path.dirname(path), durable=True)
        self.locked.add(path)
        return SimulatedLock(self, path, made)

    def lock_directory(self, path: str) -> Callable[[], None]:
        if path in self.locked:
            raise StoreLocked(path)
        self.locked.add(path)
        return partial(self.locked.discard, path)

    def used_ratio(self, path: str) -> float:
        return self.used

    def space(self, path: str) -> tuple[int, int]:
        return 1 << 40, int((1 - self.used) * (1 << 40))

    def blocks_read(self) -> int:
        return self.blocks

    # --- failures

    def fail(self, call: Call, number: int, path: str = "/") -> None:
        """From now on a call fails with an error number, everywhere or for paths with this prefix."""
        self.faults[call, path] = number

    def heal(self) -> None:
        """From now on nothing fails."""
        self.faults.clear()

    def check(self, call: Call, path: str) -> None:
        """Raise the error injected for a call on a path, if any."""
        for (failing, where), number in self.faults.items():
            if failing == call and path.startswith(where):
                raise OSError(number, os.strerror(number), path)

    def _check_sync(self, path: str) -> None:
        try:
            self.check("sync", path)
        except OSError as error:
            raise NotDurable(error.errno, error.strerror, path) from error

    # --- operations of files

    def node_at(self, path: str) -> Node:
        """The node of a path, as opening it finds it. Raises OSError."""
        self.check("open", path)
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.names[path]

    def write(self, path: str, node: Node, offset: int, data: bytes) -> None:
        self.check("write", path)
        if self.room is not None and len(data) > self.room:
            data = data[: self.room]
            self.overwrite(node, offset, data)
            self.room = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self.room is not None:
            self.room -= len(data)
        self.overwrite(node, offset, data)

    def overwrite(self, node: Node, offset: int, data: bytes) -> None:
        _put(node.data, offset, data)
        self.operations.append(Write(node, offset, bytes(data)))

    def sync(self, path: str, node: Node) -> None:
        self._check_sync(path)
        self.operations.append(Sync(node))

    def _name(self, path: str, entry: Node | Folder | None) -> None:
        """Set a path to a file or a directory, or remove it (None)."""
        above = os.path.dirname(path)
        if entry is not None:
            self.check("name", path)
            if above not in self.folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.names.pop(path, None)
        self.folders.pop(path, None)
        if isinstance(entry, Node):
            self.names[path] = entry
        elif entry is not None:
            self.folders[path] = entry
        self.operations.append(Name(self.folders[above], os.path.basename(path), entry))

    # --- crashes

    def after_kill(self) -> None:
        """The state after a kill of the process: written bytes stay, locks are free, injected failures end."""
        self.locked.clear()
        self.heal()

    def after_crash(self, when: int, chance: random.Random, style: str) -> SimulatedFiles:
        """Return a disk as a power cut before operation `when` may leave it. `style`: "nothing" that was not synced is
        there, "everything" is, or "some", chosen by `chance`."""
        durable: dict[Node, Writes] = {}
        unsynced: dict[Node, Writes] = {}
        named: dict[Folder, Entries] = {}
        renamed: dict[Folder, list[Name]] = {}
        for operation in self.operations[:when]:
            match operation:
                case Write(node):
                    unsynced.setdefault(node, []).append(operation)
                case Sync(node):
                    durable.setdefault(node, []).extend(unsynced.pop(node, []))
                case Name(folder):
                    renamed.setdefault(folder, []).append(operation)
                case SyncDirectory(folder):
                    for change in renamed.pop(folder, []):
                        _rename(named.setdefault(folder, {}), change)
        for folder, changes in renamed.items():
            count = {"nothing": 0, "everything": len(changes), "some": chance.randint(0, len(changes))}[style]
            for change in changes[:count]:
                _rename(named.setdefault(folder, {}), change)
        return self._image(named, durable, unsynced, chance, style)

    def _image(
        self,
        named: dict[Folder, Entries],
        durable: dict[Node, Writes],
        unsynced: dict[Node, Writes],
        chance: random.Random,
        style: str,
    ) -> SimulatedFiles:
        image = SimulatedFiles()
        copies: dict[Node, Node] = {}

        def fill(folder: Folder, path: str) -> None:
            for name, entry in named.get(folder, {}).items():
                at = os.path.join(path, name)
                if isinstance(entry, Folder):
                    image.folders[at] = Folder()
                    fill(entry, at)
                    continue
                if entry not in copies:
                    copy = copies[entry] = Node(len(entry.data))
                    for write in durable.get(entry, []):
                        _put(copy.data, write.offset, write.data)
                    for write in unsynced.get(entry, []):
                        _tear(copy.data, write, chance, style)
                image.names[at] = copies[entry]

        fill(self.folders["/"], "/")
        return image

    def remember(self) -> None:
        """Take the present content as the durable beginning of `operations`: for a crash after a crash."""
        self.operations.clear()
        for path, folder in sorted(self.folders.items()):
            if path != "/":
                above = self.folders[os.path.dirname(path)]
                self.operations += Name(above, os.path.basename(path), folder), SyncDirectory(above)
        written = set()
        for path, node in self.names.items():
            if node not in written:
                written.add(node)
                self.operations += Write(node, 0, bytes(node.data.rstrip(b"\0"))), Sync(node)
            above = self.folders[os.path.dirname(path)]
            self.operations += Name(above, os.path.basename(path), node), SyncDirectory(above)


class SimulatedFile:
    """Implements storage.files.File."""

    def __init__(self, files: SimulatedFiles, path: str) -> None:
        self._files = files
        self.path = path
        self._opened: Node | None = None

    def read(self, offset: int, size: int) -> bytes:
        self._files.check("read", self.path)
        return bytes(self._node.data[offset : offset + size])

    def read_ranges(self, ranges: Ranges) -> bytes:
        self._files.blocks += sum(offset < self._files.uncached for offset, _ in ranges)
        return b"".join(self.read(offset, size) for offset, size in ranges)

    def read_apart(self, ranges: Ranges) -> bytes:
        data = self._files.node_at(self.path).data
        self._files.check("read", self.path)
        return b"".join(bytes(data[offset : offset + size]) for offset, size in ranges)

    def read_cached(self, ranges: Ranges) -> bytes | None:
        if any(offset < self._files.uncached for offset, _ in ranges):
            self._files.blocks += 1
            return None
        return self.read_ranges(ranges)

    def read_ahead(self, ranges: Ranges) -> None:
        self._files.node_at(self.path)

    def next_data(self, offset: int) -> int:
        data = self._node.data
        return data.next_data(offset) if isinstance(data, _Lazy) else min(offset, len(data))

    def write(self, offset: int, data: bytes) -> None:
        self._write(self._node, offset, data)

    def write_apart(self, writes: Sequence[tuple[int, bytes]]) -> None:
        node = self._files.node_at(self.path)
        for offset, data in writes:
            self._write(node, offset, data)
        self._files.sync(self.path, node)

    def allocate(self, offset: int, size: int) -> None:
        assert offset + size <= len(self._files.node_at(self.path).data), "a file of fixed size does not grow"

    def clear(self, offset: int) -> None:
        end = len(self._node.data.rstrip(b"\0"))
        if end > offset:  # these bytes have their place on the disk already, so the disk cannot be full
            self._files.overwrite(self._node, offset, bytes(end - offset))

    def sync(self) -> None:
        self._files.sync(self.path, self._files.node_at(self.path))

    def size(self) -> int:
        return len(self._files.node_at(self.path).data)

    def close(self) -> None:
        self._opened = None

    @property
    def _node(self) -> Node:
        """The node of the open file; opens it if necessary."""
        if self._opened is None:
            self._opened = self._files.node_at(self.path)
        return self._opened

    def _write(self, node: Node, offset: int, data: bytes) -> None:
        assert offset + len(data) <= len(node.data), "a file of fixed size does not grow"
        self._files.write(self.path, node, offset, data)


class SimulatedLock:
    """Implements storage.files.Lock."""

    def __init__(self, files: SimulatedFiles, path: str, made: Sequence[str]) -> None:
        self._files = files
        self._path = path
        self._made = made
        self._is_new = path not in files.names
        if self._is_new:
            files.write_whole(path, b"", durable=False)

    @property
    def is_last_owner_rocketmq(self) -> bool:
        return bytes(self._files.names[self._path].data).startswith(b"lock")

    @property
    def is_last_owner_duemq(self) -> bool:
        return bytes(self._files.names[self._path].data) == b"duemq"

    def claim(self) -> None:
        node = self._files.names[self._path]
        if bytes(node.data) != b"duemq":
            self._files.write(self._path, node, 0, b"duemq")
            self._files.sync(self._path, node)
        self._is_new = False

    def release(self) -> None:
        if self._is_new:
            self._files.remove(self._path)
            for directory in self._made:
                if not self._files.list(directory):
                    self._files.remove_tree(directory)
        self._files.locked.discard(self._path)


def _put(content: Any, offset: int, data: bytes) -> None:
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


def _rename(entries: Entries, change: Name) -> None:
    if change.entry is None:
        entries.pop(change.name, None)
    else:
        entries[change.name] = change.entry


def _tear(content: bytearray, write: Write, chance: random.Random, style: str) -> None:
    """Put a write that was not synced onto the disk: none of it, all, or some of its sectors."""
    if style == "nothing":
        return
    start, end = write.offset, write.offset + len(write.data)
    whole = style == "everything" or chance.random() < 0.4
    if whole:
        content[start:end] = write.data
        return
    torn = bytearray(content[start:end])
    position = start
    while position < end:
        stop = min(end, (position // SECTOR + 1) * SECTOR)
        if chance.random() < 0.5:
            torn[position - start : stop - start] = write.data[position - start : stop - start]
        position = stop
    content[start:end] = torn
