"""A file layer in memory that remembers what was written, synced and named when, and can build what a power cut at any
moment could have left on the disk.

What the model of the disk promises, and no more: after a sync of a file its bytes so far are there; of what was written
since, any 512-byte sectors may be there and any may not. After a sync of a directory its names so far are there; of the
changes since, any beginning of their sequence may have happened, in each directory on its own. A file's name never
appears before its size.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.errors import StoreLocked
from storage.files import Ranges

SECTOR = 512


class Node:
    """A file's content, apart from its name."""

    def __init__(self, size: int = 0) -> None:
        self.data = bytearray(size)


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
    """A directory entry is set to a file, or removed."""

    directory: str
    name: str
    node: Node | None


@dataclass(frozen=True)
class SyncDirectory:
    directory: str


Writes = list[Write]
Operation = Write | Sync | Name | SyncDirectory


@dataclass
class SimulatedFiles:
    """Implements storage.files.Files. `operations` is everything that ever happened, in order."""

    names: dict[str, Node] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    directories: set[str] = field(default_factory=set)
    locked: set[str] = field(default_factory=set)
    was_theirs: bool = False
    """Whether RocketMQ had the store since."""
    used: float = 0.1
    room: int | None = None
    """Bytes that may still be written before the disk is full."""
    write_error: OSError | None = None
    fail_syncs: bool = False
    uncached: int = 0
    """What lies before this in a file is never in memory, also not after it was read."""
    blocks: int = 0

    # --- storage.files.Files

    def create(self, path: str, size: int) -> SimulatedFile:
        node = Node(size)
        self._name(path, node)
        return SimulatedFile(self, path)

    def open(self, path: str) -> SimulatedFile:
        return SimulatedFile(self, path)

    def exists(self, path: str) -> bool:
        return path in self.names or path in self.directories

    def list(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        entries = {name[len(prefix) :].split("/")[0] for name in self.names if name.startswith(prefix)}
        return sorted(entries)

    def make_directories(self, path: str) -> None:
        while path not in ("", "/"):
            self.directories.add(path)
            path = os.path.dirname(path)

    def remove(self, path: str) -> None:
        if path in self.names:
            self._name(path, None)

    def remove_tree(self, path: str) -> None:
        for name in [name for name in self.names if name.startswith(path + "/")]:
            self._name(name, None)
        self.directories.discard(path)

    def read_whole(self, path: str) -> bytes | None:
        node = self.names.get(path)
        return bytes(node.data) if node is not None else None

    def write_whole(self, path: str, data: bytes, *, durable: bool = True) -> None:
        node = Node(len(data))
        self.write(node, 0, data)
        if durable:
            self.sync(node)
        self._name(path, node)
        if durable:
            self.sync_directory(os.path.dirname(path))

    def copy(self, source: str, target: str) -> None:
        self._name(target, self.names[source])

    def sync_directory(self, path: str) -> None:
        self._check_sync()
        self.operations.append(SyncDirectory(path))

    def lock(self, path: str) -> SimulatedLock:
        if path in self.locked:
            raise StoreLocked(path)
        self.locked.add(path)
        return SimulatedLock(self, path)

    def used_ratio(self, path: str) -> float:
        return self.used

    def blocks_read(self) -> int:
        return self.blocks

    # --- what files do

    def write(self, node: Node, offset: int, data: bytes) -> None:
        if self.write_error is not None:
            raise self.write_error
        if self.room is not None and len(data) > self.room:
            data = data[: self.room]
            self.overwrite(node, offset, data)
            self.room = 0
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.room is not None:
            self.room -= len(data)
        self.overwrite(node, offset, data)

    def overwrite(self, node: Node, offset: int, data: bytes) -> None:
        if len(node.data) < offset + len(data):
            node.data.extend(bytes(offset + len(data) - len(node.data)))
        node.data[offset : offset + len(data)] = data
        self.operations.append(Write(node, offset, bytes(data)))

    def sync(self, node: Node) -> None:
        self._check_sync()
        self.operations.append(Sync(node))

    def _check_sync(self) -> None:
        if self.fail_syncs:
            raise OSError(errno.EIO, "Input/output error")

    def _name(self, path: str, node: Node | None) -> None:
        if node is None:
            del self.names[path]
        else:
            self.names[path] = node
        self.operations.append(Name(os.path.dirname(path), os.path.basename(path), node))

    # --- crashes

    def after_crash(self, when: int, chance: random.Random, style: str) -> SimulatedFiles:
        """What the disk may hold after a power cut before operation `when`. `style`: "nothing" that was not synced
        is there, "everything" is, or "some" as `chance` has it."""
        durable: dict[Node, bytearray] = {}
        unsynced: dict[Node, Writes] = {}
        named: dict[str, dict[str, Node]] = {}
        renamed: dict[str, list[Name]] = {}
        for operation in self.operations[:when]:
            match operation:
                case Write(node):
                    durable.setdefault(node, bytearray())
                    unsynced.setdefault(node, []).append(operation)
                case Sync(node):
                    content = durable.setdefault(node, bytearray())
                    for write in unsynced.pop(node, []):
                        _apply(content, write.offset, write.data)
                case Name(directory):
                    renamed.setdefault(directory, []).append(operation)
                case SyncDirectory(directory):
                    for change in renamed.pop(directory, []):
                        _rename(named.setdefault(directory, {}), change)
        for directory, changes in renamed.items():
            count = {"nothing": 0, "everything": len(changes), "some": chance.randint(0, len(changes))}[style]
            for change in changes[:count]:
                _rename(named.setdefault(directory, {}), change)
        return self._image(named, durable, unsynced, chance, style)

    def _image(
        self,
        named: dict[str, dict[str, Node]],
        durable: dict[Node, bytearray],
        unsynced: dict[Node, Writes],
        chance: random.Random,
        style: str,
    ) -> SimulatedFiles:
        image = SimulatedFiles()
        copies: dict[Node, Node] = {}
        for directory, entries in named.items():
            for name, node in entries.items():
                if node not in copies:
                    copy = copies[node] = Node(len(node.data))
                    content = durable.get(node, bytearray())
                    copy.data[: len(content)] = content
                    for write in unsynced.get(node, []):
                        _tear(copy.data, write, chance, style)
                image.names[os.path.join(directory, name)] = copies[node]
                image.make_directories(directory)
        return image


class SimulatedFile:
    """Implements storage.files.File."""

    def __init__(self, files: SimulatedFiles, path: str) -> None:
        self._files = files
        self.path = path
        self._node = files.names[path]

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._node.data[offset : offset + size])

    def read_ranges(self, ranges: Ranges) -> bytes:
        self._files.blocks += sum(offset < self._files.uncached for offset, _ in ranges)
        return self.read_apart(ranges)

    def read_apart(self, ranges: Ranges) -> bytes:
        return b"".join(self.read(offset, size) for offset, size in ranges)

    def read_cached(self, ranges: Ranges) -> bytes | None:
        if any(offset < self._files.uncached for offset, _ in ranges):
            self._files.blocks += 1
            return None
        return self.read_ranges(ranges)

    def read_ahead(self, ranges: Ranges) -> None:
        pass

    def write(self, offset: int, data: bytes) -> None:
        assert offset + len(data) <= len(self._node.data), "a file of fixed size does not grow"
        self._files.write(self._node, offset, data)

    def write_apart(self, writes: Sequence[tuple[int, bytes]]) -> None:
        for offset, data in writes:
            self.write(offset, data)
        self.sync()

    def clear(self, offset: int) -> None:
        end = len(self._node.data.rstrip(b"\0"))
        if end > offset:  # over bytes that have their place on the disk already: it cannot be full
            self._files.overwrite(self._node, offset, bytes(end - offset))

    def sync(self) -> None:
        self._files.sync(self._node)

    def size(self) -> int:
        return len(self._node.data)

    def close(self) -> None:
        pass


class SimulatedLock:
    """Implements storage.files.Lock."""

    def __init__(self, files: SimulatedFiles, path: str) -> None:
        self._files = files
        self._path = path

    @property
    def was_theirs(self) -> bool:
        return self._files.was_theirs

    def claim(self) -> None:
        self._files.was_theirs = False

    def release(self) -> None:
        self._files.locked.discard(self._path)


def _apply(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


def _rename(entries: dict[str, Node], change: Name) -> None:
    if change.node is None:
        entries.pop(change.name, None)
    else:
        entries[change.name] = change.node


def _tear(content: bytearray, write: Write, chance: random.Random, style: str) -> None:
    """Put a write that was not synced onto the disk: none of it, all, or some of its sectors."""
    if style == "nothing":
        return
    start, end = write.offset, write.offset + len(write.data)
    whole = style == "everything" or chance.random() < 0.4
    position = start
    while position < end:
        stop = min(end, (position // SECTOR + 1) * SECTOR)
        if whole or chance.random() < 0.5:
            content[position:stop] = write.data[position - start : stop - start]
        position = stop
