"""The offsets of a consumer in its queues, and their storage from run to run."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, Literal, Protocol

import msgspec

from duemq.errors import ArgumentError
from duemq.messages import MessageQueue

_MOST_QUEUE_ID: Final = 2**31 - 1
"""The largest number that the protocol's field can hold."""
_MOST_OFFSET: Final = 2**63 - 1
"""The largest number that the protocol's field can hold."""


class OffsetTracker:
    """The unfinished messages of one queue, and the offset that may be committed.

    Invariant: `committable` never passes an unfinished message, so that a crash loses no message. Messages that are
    finished beyond it are delivered again after a crash; the reader limits their number, `ahead`.
    """

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset
        """The queue offset at which reading continues."""
        self._order: deque[int] = deque()
        """Queue offsets in the order in which they were read, ascending. That of a finished message stays until all
        messages before it are finished."""
        self._unfinished: set[int] = set()

    def __len__(self) -> int:
        """Number of unfinished messages."""
        return len(self._unfinished)

    @property
    def ahead(self) -> int:
        """Number of finished messages beyond the first unfinished one."""
        return len(self._order) - len(self._unfinished)

    @property
    def committable(self) -> int:
        """The offset of the first unfinished message, or `next_offset` if all messages are finished."""
        return self._order[0] if self._order else self.next_offset

    def read(self, offsets: Sequence[int], next_offset: int) -> None:
        """Note that the messages at `offsets`, ascending, were read, and that reading continues at `next_offset`."""
        self._order.extend(offsets)
        self._unfinished.update(offsets)
        self.next_offset = next_offset

    def finish(self, offset: int) -> None:
        """Note that a message is finished. Does nothing if it was not read or is already finished."""
        self._unfinished.discard(offset)
        while self._order and self._order[0] not in self._unfinished:
            self._order.popleft()

    def reset(self, next_offset: int) -> None:
        """Forget all messages and continue at another offset, as the broker has no message at the present one."""
        self._order.clear()
        self._unfinished.clear()
        self.next_offset = next_offset


class OffsetStore(Protocol):
    """Storage that keeps consumer offsets from run to run."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Return the stored offset of a queue, or None if it has none."""

    async def save(self, offsets: dict[MessageQueue, int]) -> None:
        """Store offsets. Raises DueMQError or OSError; the caller then stores them with the next ones."""


class LocalOffsets:
    """The offsets of a broadcasting consumer, which reads all messages: in memory, or in a file.

    The file is JSON, {"topic": {"broker:queue id": offset}}, replaced as a whole. It belongs to one consumer. Raises
    ArgumentError if the file cannot be read, is not a regular file, or contains something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._offsets: dict[MessageQueue, int] = {}
        if path is not None:
            self._offsets = _read_offsets(path)

    async def load(self, queue: MessageQueue) -> int | None:
        """Return the offset of a queue, or None if it has none."""
        return self._offsets.get(queue)

    async def save(self, offsets: dict[MessageQueue, int]) -> None:
        """Keep offsets, and write the file if there is one. Raises OSError."""
        self._offsets.update(offsets)
        if self._path is not None:
            await asyncio.to_thread(_replace, self._path, _format_offsets(self._offsets))


def _read_offsets(path: Path) -> dict[MessageQueue, int]:
    """Return the offsets in a file; none if the file does not exist yet. Raises ArgumentError."""
    try:
        with _open_regular(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ArgumentError(f"cannot create the offset file {path}: {path.parent} is not a directory") from None
        return {}
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"cannot read the offset file {str(path)!r}: {reason}") from None
    try:
        tables = msgspec.json.decode(data, type=dict[str, dict[str, int]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is not an offset file: {error}") from None
    offsets = {}
    for topic, table in tables.items():
        for name, offset in table.items():
            broker, _, queue_id = name.rpartition(":")
            if not broker or not _is_number(queue_id, _MOST_QUEUE_ID):
                raise ArgumentError(f"{path} is not an offset file: {name!r} is not BROKER:QUEUE-ID")
            if not 0 <= offset <= _MOST_OFFSET:
                raise ArgumentError(f"{path} is not an offset file: {offset}, of {name!r}, is not an offset")
            offsets[MessageQueue(topic, broker, int(queue_id))] = offset
    return offsets


def _is_number(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most


def _format_offsets(offsets: dict[MessageQueue, int]) -> bytes:
    tables: dict[str, dict[str, int]] = {}
    for queue in sorted(offsets):
        tables.setdefault(queue.topic, {})[f"{queue.broker}:{queue.queue_id}"] = offsets[queue]
    return msgspec.json.format(msgspec.json.encode(tables), indent=2)


def _replace(path: Path, data: bytes) -> None:
    # Written to a second file and renamed: a crash leaves either the old file or the new one, never a part of one.
    temporary = path.with_name(f"{path.name}.new")
    with _open_regular(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def _open_regular(path: Path, mode: Literal["rb", "wb"]) -> Iterator[BinaryIO]:
    """Open a regular file for a block. Raises OSError, also if the path is something else, and ValueError for a path
    with a null character. Never waits: opening a FIFO would wait for its other end, and reading a device may never
    end."""
    with open(path, mode, opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # Windows has neither FIFOs nor the flag
