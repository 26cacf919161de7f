"""A disk for simulated processes: its content, its page cache, the time that operations take, and its faults.

The model promises this and no more. A successful sync of a file makes its bytes so far durable; of later writes, a
power cut keeps any 512-byte sectors and loses any others. A sync of a directory makes its names so far durable; of
later changes, a power cut keeps any prefix of their sequence, in each directory independently. After a failed sync the
unsynced bytes never become durable, though they can still be read; the next sync succeeds as if nothing had happened,
as on Linux. A kill of a process loses nothing.

A read of bytes outside the page cache waits for the disk. A job may wait; the loop of a running broker must not:
`loop_waits` counts the places where it did.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duemq.storage.errors import NotDurable, NotInMemory, StoreFormatError, StoreLocked
from duemq.storage.files import Ranges
from tests.simulation.machine.loop import Killed, Process, SimulatedLoop

SECTOR = 512
PAGE = 4096
_ZEROS = bytes(PAGE)


class Node:
    """A file's content, apart from its name."""

    __slots__ = ("cold", "durable", "pages", "size", "unsynced")

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.pages: dict[int, bytearray] = {}
        """The content that reads see, by page number; zeros elsewhere."""
        self.durable: dict[int, bytes] = {}
        self.unsynced: list[tuple[int, bytes]] = []
        """Writes since the last sync: offset and bytes."""
        self.cold: set[int] = set()
        """Pages that are not in memory."""

    def read(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        first, last = offset // PAGE, (offset + size - 1) // PAGE
        if size == 0:
            return b""
        if first == last:
            page = self.pages.get(first)
            at = offset - first * PAGE
            return bytes(page[at : at + size]) if page is not None else bytes(size)
        result = bytearray(size)
        numbers = range(first, last + 1)
        for number in self.pages.keys() & numbers if len(self.pages) < len(numbers) else numbers:
            page = self.pages.get(number)
            if page is None:
                continue
            start = number * PAGE - offset
            low, high = max(0, start), min(size, start + PAGE)
            result[low:high] = page[low - start : high - start]
        return bytes(result)

    def write(self, offset: int, data: bytes) -> None:
        self.size = max(self.size, offset + len(data))
        _put(self.pages, offset, data)
        self.unsynced.append((offset, data))
        for number in range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1):
            self.cold.discard(number)

    def sync(self) -> None:
        for offset, data in self.unsynced:
            _put_bytes(self.durable, offset, data)
        self.unsynced.clear()

    def copy(self) -> Node:
        """Return a copy of the content that reads see."""
        node = Node(self.size)
        node.pages = {number: bytearray(page) for number, page in self.pages.items()}
        return node

    def new_pages(self, offset: int, size: int) -> int:
        """Number of new pages that a write needs."""
        return sum(number not in self.pages for number in range(offset // PAGE, (offset + size - 1) // PAGE + 1))

    def after_power_cut(self, chance: random.Random) -> Node:
        node = Node(self.size)
        node.durable = self.durable
        for offset, data in self.unsynced:
            share = chance.choice((0.0, 0.5, 1.0))
            at = 0
            while at < len(data):
                stop = min(len(data), ((offset + at) // SECTOR + 1) * SECTOR - offset)
                if chance.random() < share:
                    _put_bytes(node.durable, offset + at, data[at:stop])
                at = stop
        node.pages = {number: bytearray(page) for number, page in node.durable.items()}
        node.cold = set(node.pages)
        return node


def _put(pages: dict[int, bytearray], offset: int, data: bytes) -> None:
    at = 0
    while at < len(data):
        number, start = divmod(offset + at, PAGE)
        count = min(PAGE - start, len(data) - at)
        page = pages.get(number)
        if page is None:
            page = pages[number] = bytearray(PAGE)
        page[start : start + count] = data[at : at + count]
        at += count


def _put_bytes(pages: dict[int, bytes], offset: int, data: bytes) -> None:
    at = 0
    while at < len(data):
        number, start = divmod(offset + at, PAGE)
        count = min(PAGE - start, len(data) - at)
        page = pages.get(number, _ZEROS)
        pages[number] = page[:start] + data[at : at + count] + page[start + count :]
        at += count


@dataclass
class Work:
    """Operations and bytes so far: the work that a broker makes of its requests."""

    operations: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    written_bytes: int = 0


Fault = Callable[[str, str], OSError | None]
"""Returns the error of an operation on a path, or None."""


class Disk:
    """Implements storage.files.Files, for the process that is running."""

    def __init__(self, loop: SimulatedLoop, chance: random.Random) -> None:
        self._loop = loop
        self._chance = chance
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, dict[str, Node]] = {}
        self.renamed: dict[str, list[tuple[str, Node | None]]] = {}
        """Changes of names in each directory since its last sync."""
        self.directories: set[str] = set()
        self.locked: dict[str, Process] = {}
        self.used = 0.1
        self.room: int | None = None
        """Pages that may still be written; None for no limit."""
        self.fault: Fault = lambda kind, path: None
        self.kill_at: int | None = None
        """The number of the operation in the middle of which its process is killed."""
        self.on_kill: Callable[[Process], None] = lambda process: None
        self.latency: Callable[[str], float] = lambda kind: 0.0
        """Returns the seconds that an operation takes in a job."""
        self.count = 0
        self.work = Work()
        self.evicted = (-1e9, -1e9)
        """Times of the last two evictions."""
        self.loop_must_not_wait = False
        self.loop_waits: Counter[str] = Counter()
        """Reads of the loop that had to wait for the disk, by path."""
        self.may_wait = True
        self.has_read_failed = False
        """Whether a read has failed: after that the loop may wait for the disk, to learn what is wrong."""

    # --- the path of every operation

    def operate(self, kind: str, path: str, size: int = 0) -> None:
        """Account for one operation. Raises OSError where a fault is injected, Killed where the process ends here."""
        process = self._loop.process
        if not process.is_alive:
            raise Killed
        if self._loop.is_in_job:
            self._loop.pause_job(self.latency(kind))
        self.count += 1
        self.work.operations[kind] += 1
        if self.kill_at is not None and self.count >= self.kill_at:
            self.kill_at = None
            self.on_kill(process)
            raise Killed
        error = self.fault(kind, path)
        if error is not None:
            self.has_read_failed |= kind == "read"
            raise error

    @property
    def is_short_of_memory(self) -> bool:
        """Whether memory is being evicted again and again: a read may then never finish unless a thread waits for the
        disk."""
        return self._loop.time() - self.evicted[0] < 5.0

    @property
    def is_read_to_wait(self) -> bool:
        """Whether a read may wait here: in a job, or after a failed read, when the caller waits to learn why the job
        failed."""
        return self._loop.is_in_job or self.has_read_failed

    # --- storage.files.Files

    def create(self, path: str, size: int) -> DiskFile:
        self.operate("create", path)
        if os.path.dirname(path) not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if path in self.names:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        self._take_room(1)
        self._name(path, Node(size))
        return DiskFile(self, path)

    def open(self, path: str, *, for_reading: bool = False) -> DiskFile:
        return DiskFile(self, path)

    def exists(self, path: str) -> bool:
        return path in self.names or path in self.directories

    def require_file(self, path: str) -> None:
        if path in self.directories:
            raise StoreFormatError(path, "is a directory")

    def require_directory(self, path: str) -> None:
        if path in self.names:
            raise StoreFormatError(path, "is a file")

    def list(self, path: str) -> list[str]:
        self.operate("list", path)
        prefix = path.rstrip("/") + "/"
        entries = {name[len(prefix) :].split("/")[0] for name in self.names if name.startswith(prefix)}
        entries |= {name[len(prefix) :].split("/")[0] for name in self.directories if name.startswith(prefix)}
        return sorted(entries)

    def make_directories(self, path: str, *, durable: bool = False) -> None:
        at, made = path, []
        while at not in ("", "/") and at not in self.directories:
            made.append(at)
            at = os.path.dirname(at)
        for each in reversed(made):
            self.operate("mkdir", each)
            self.directories.add(each)
            if durable:
                self.sync_directory(os.path.dirname(each))

    def remove(self, path: str) -> None:
        self.operate("remove", path)
        if path in self.names:
            self._name(path, None)

    def remove_tree(self, path: str) -> None:
        for name in sorted(name for name in self.names if name.startswith(path + "/")):
            self.operate("remove", name)
            if name in self.names:
                self._name(name, None)
        if any(name.startswith(path + "/") for name in self.names):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        self.directories = {name for name in self.directories if name != path and not name.startswith(path + "/")}

    def read_whole(self, path: str) -> bytes | None:
        self.operate("read", path)
        node = self.names.get(path)
        if node is None:
            return None
        self.work.read_bytes += node.size
        return node.read(0, node.size)

    def write_whole(self, path: str, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
        self.operate("write", path)
        if os.path.dirname(path) not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        node = Node()
        self._take_room(len(data) // PAGE + 1)
        node.write(0, data)
        self.work.written_bytes += len(data)
        if durable:
            self.sync(node, path)
        self.operate("rename", path)
        self._name(path, node)
        if durable:
            self.sync_directory(os.path.dirname(path))

    def link(self, source: str, target: str) -> None:
        self.operate("link", target)
        self._name(target, self.names[source])

    def sync_directory(self, path: str) -> None:
        try:
            self.operate("sync", path)
        except OSError as error:
            raise NotDurable(error.errno, error.strerror, path) from error
        entries = self.durable_names.setdefault(path, {})
        for name, node in self.renamed.pop(path, []):
            _rename(entries, name, node)

    def lock(self, path: str) -> DiskLock:
        self.operate("lock", path)
        holder = self.locked.get(path)
        if holder is not None and holder.is_alive:
            raise StoreLocked(path)
        self.make_directories(os.path.dirname(path), durable=True)
        self.locked[path] = self._loop.process
        return DiskLock(self, path)

    def lock_directory(self, path: str) -> Callable[[], None]:
        self.operate("lock", path)
        holder = self.locked.get(path)
        if holder is not None and holder.is_alive:
            raise StoreLocked(path)
        self.locked[path] = self._loop.process

        def let_go() -> None:
            self.locked.pop(path, None)

        return let_go

    def used_ratio(self, path: str) -> float:
        self.operate("statvfs", path)
        return self.used

    def space(self, path: str) -> tuple[int, int]:
        self.operate("statvfs", path)
        return 1 << 40, int((1 - self.used) * (1 << 40))

    def blocks_read(self) -> int:
        return 0

    def image(self) -> Disk:
        """Another disk with the present content of this one, all of it in memory, without faults."""
        other = Disk(self._loop, self._chance)
        nodes = {node: node.copy() for node in self.names.values()}
        other.names = {name: nodes[node] for name, node in self.names.items()}
        other.directories = set(self.directories)
        return other

    def keep(self, directory: Path) -> None:
        """Write the present files into a directory of this machine, with holes as holes."""
        for name, node in self.names.items():
            path = directory / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for number, page in sorted(node.pages.items()):
                    file.seek(number * PAGE)
                    file.write(page)
                file.truncate(node.size)

    # --- changes by others

    def spoil(self, path: str, how: str, where: float) -> None:
        """Damage a file: fill it with "zeros", remove it ("remove..."), "flip" bits at a place, or "cut" it there.
        `where`: the place, as a fraction (0 to 1) of its content."""
        old = self.names[path]
        data = bytearray(old.read(0, old.size))
        at = int(where * len(data.rstrip(b"\0")))
        if how == "zeros":
            data[:] = bytes(len(data))
        elif how == "flip" and at < len(data):
            data[at] ^= 0x55
        elif how == "cut":
            del data[at:]
        self.put(path, None if how.startswith("remove") else bytes(data))

    def put(self, path: str, data: bytes | None) -> None:
        """Replace a file durably with other bytes, or remove it (None), outside of any process's operations."""
        node = None
        if data is not None:
            node = Node(len(data))
            node.write(0, data)
            node.sync()
        directory, name = os.path.split(path)
        self._name(path, node)
        _rename(self.durable_names.setdefault(directory, {}), name, node)
        self.renamed[directory] = [change for change in self.renamed.get(directory, []) if change[0] != name]

    # --- operations of files

    def sync(self, node: Node, path: str) -> None:
        try:
            self.operate("sync", path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or error.errno == errno.EMFILE:
                raise
            node.unsynced.clear()
            raise NotDurable(error.errno, error.strerror, path) from error
        node.sync()

    def write(self, node: Node, path: str, offset: int, data: bytes) -> None:
        try:
            self.operate("write", path)
        except OSError:
            if data and self._chance.random() < 0.5:  # a part of it may be written
                node.write(offset, data[: self._chance.randrange(len(data))])
            raise
        if not data:
            return
        pages = node.new_pages(offset, len(data))
        if self.room is not None and pages > self.room:
            kept = data[: max(0, (offset // PAGE + 1 + self.room) * PAGE - offset - PAGE)]
            self.room = 0
            if kept:
                node.write(offset, kept)
            raise OSError(errno.ENOSPC, "No space left on device", path)
        if self.room is not None:
            self.room -= pages
        node.write(offset, data)
        self.work.written_bytes += len(data)

    def read(self, node: Node, path: str, ranges: Ranges) -> bytes:
        self.operate("read", path)
        self.work.read_bytes += sum(size for _, size in ranges)
        for offset, size in ranges:
            for number in range(offset // PAGE, (offset + max(1, size) - 1) // PAGE + 1):
                node.cold.discard(number)
        return b"".join([node.read(offset, size) for offset, size in ranges])

    def is_in_memory(self, node: Node, ranges: Ranges) -> bool:
        return not any(
            number in node.cold
            for offset, size in ranges
            for number in range(offset // PAGE, (offset + max(1, size) - 1) // PAGE + 1)
        )

    def evict(self) -> None:
        """The system takes back the page cache of files."""
        self.evicted = (self.evicted[1], self._loop.time())
        for node in self.names.values():
            node.cold.update(node.pages)

    def _take_room(self, pages: int) -> None:
        if self.room is None:
            return
        if pages > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= pages

    def _name(self, path: str, node: Node | None) -> None:
        if node is None:
            del self.names[path]
        else:
            self.names[path] = node
        self.renamed.setdefault(os.path.dirname(path), []).append((os.path.basename(path), node))

    # --- power

    def cut_power(self) -> None:
        """Lose any part of the bytes and names that are not durable, and everything in memory."""
        for directory, changes in self.renamed.items():
            entries = self.durable_names.setdefault(directory, {})
            for name, node in changes[: self._chance.randint(0, len(changes))]:
                _rename(entries, name, node)
        self.renamed.clear()
        copies: dict[Node, Node] = {}
        for entries in self.durable_names.values():
            for name, node in entries.items():
                if node not in copies:
                    copies[node] = node.after_power_cut(self._chance)
                entries[name] = copies[node]
        self.names = {
            os.path.join(directory, name): node
            for directory, entries in self.durable_names.items()
            for name, node in entries.items()
        }
        kept = {os.path.dirname(name) for name in self.names}
        self.directories = {each for each in self.directories if any(name.startswith(each) for name in kept)}


class DiskFile:
    """Implements storage.files.File. The loop has it open; jobs open it by its path, which may be gone."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self.path = path
        self._node = disk.names[path]

    def _opened(self) -> Node:
        node = self._disk.names.get(self.path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", self.path)
        return node

    def read(self, offset: int, size: int) -> bytes:
        ranges = ((offset, size),)
        if not self._disk.may_wait and not self._disk.is_in_memory(self._node, ranges):
            raise NotInMemory(self.path, (self.path, offset), lambda: self.read_apart(ranges))
        disk = self._disk
        may_wait = disk.is_read_to_wait or disk.is_short_of_memory
        if disk.loop_must_not_wait and not may_wait and not disk.is_in_memory(self._node, ranges):
            disk.loop_waits[self.path] += 1
        return disk.read(self._node, self.path, ranges)

    def read_ranges(self, ranges: Ranges) -> bytes:
        return self._disk.read(self._node, self.path, ranges)

    def read_cached(self, ranges: Ranges) -> bytes | None:
        if not self._disk.is_in_memory(self._node, ranges):
            return None
        return self._disk.read(self._node, self.path, ranges)

    def read_apart(self, ranges: Ranges) -> bytes:
        return self._disk.read(self._opened(), self.path, ranges)

    def read_ahead(self, ranges: Ranges) -> None:
        node = self._opened()
        self._disk.operate("read ahead", self.path)
        for offset, size in ranges:
            node.cold.difference_update(range(offset // PAGE, (offset + size) // PAGE + 1))

    def next_data(self, offset: int) -> int:
        """Know of no holes, so that each read of a start remains an operation in which its process may be killed."""
        return min(offset, self._node.size)

    def write(self, offset: int, data: bytes) -> None:
        assert offset + len(data) <= self._node.size, "a file of fixed size does not grow"
        self._disk.write(self._node, self.path, offset, data)

    def write_apart(self, writes: Sequence[tuple[int, bytes]]) -> None:
        node = self._opened()
        for offset, data in writes:
            self._disk.write(node, self.path, offset, data)
        self._disk.sync(node, self.path)

    def allocate(self, offset: int, size: int) -> None:
        self._disk.operate("allocate", self.path)

    def clear(self, offset: int) -> None:
        self._disk.operate("clear", self.path)
        node = self._node
        for number in [number for number in node.pages if (number + 1) * PAGE > offset]:
            start = max(offset, number * PAGE)
            stop = min(node.size, (number + 1) * PAGE)
            if any(node.read(start, stop - start)):
                node.write(start, bytes(stop - start))

    def sync(self) -> None:
        self._disk.sync(self._opened(), self.path)

    def size(self) -> int:
        return self._opened().size

    def close(self) -> None:
        pass


class DiskLock:
    """Implements storage.files.Lock."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._text = disk.read_whole(path) or b""

    @property
    def is_last_owner_rocketmq(self) -> bool:
        return self._text.startswith(b"lock")

    @property
    def is_last_owner_duemq(self) -> bool:
        return self._text == b"duemq"

    def claim(self) -> None:
        if not self.is_last_owner_duemq:
            self._disk.write_whole(self._path, b"duemq")
            self._text = b"duemq"

    def release(self) -> None:
        self._disk.locked.pop(self._path, None)


def _rename(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node
