"""The offsets of a consumer in each queue, and where they are stored between runs."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from duemq.errors import ArgumentError
from duemq.messages import MessageQueue

_MOST_QUEUE_ID: Final = 2**31 - 1
_MOST_OFFSET: Final = 2**63 - 1
"""The largest numbers that the fields of the protocol can hold."""


class OffsetTracker:
    """The unfinished messages of one queue, and the offset that may be committed.

    Invariant: `committable` never passes an unfinished message, so that a crash loses nothing; messages finished beyond
    it are delivered once more. Their number, `ahead`, is bounded by the reader.
    """

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset
        """Where to read on."""
        self._order: deque[int] = deque()
        """Queue offsets as they were read, ascending; a finished one stays until all before it are finished."""
        self._unfinished: set[int] = set()

    def __len__(self) -> int:
        """Number of unfinished messages."""
        return len(self._unfinished)

    @property
    def ahead(self) -> int:
        """Number of messages that are finished behind an unfinished one."""
        return len(self._order) - len(self._unfinished)

    @property
    def committable(self) -> int:
        """The lowest unfinished offset, or where to read on if there is none."""
        return self._order[0] if self._order else self.next_offset

    def read(self, offsets: Sequence[int], next_offset: int) -> None:
        """Messages at `offsets`, ascending, were read, and reading goes on at `next_offset`."""
        self._order.extend(offsets)
        self._unfinished.update(offsets)
        self.next_offset = next_offset

    def finish(self, offset: int) -> None:
        """A message is consumed. One that was not read, or was finished before, changes nothing."""
        self._unfinished.discard(offset)
        while self._order and self._order[0] not in self._unfinished:
            self._order.popleft()

    def reset(self, next_offset: int) -> None:
        """Drop everything and continue at another offset, as the broker has no message at the present one."""
        self._order.clear()
        self._unfinished.clear()
        self.next_offset = next_offset


class OffsetStore(Protocol):
    """Where consumer offsets are kept between runs."""

    async def load(self, queue: MessageQueue) -> int | None:
        """The stored offset, or None."""

    async def save(self, offsets: dict[MessageQueue, int]) -> None:
        """Store offsets. Raises DueMQError or OSError; they are then stored with the next ones."""


class LocalOffsets:
    """Offsets of a broadcasting consumer, each of whose members reads everything: in memory, or in a file.

    The file is JSON, {"topic": {"broker:queue id": offset}}, replaced as a whole. It belongs to one consumer. Raises
    ArgumentError for a path at which there is something else, or which cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._offsets: dict[MessageQueue, int] = {}
        if path is not None:
            self._offsets = _read_offsets(path)

    async def load(self, queue: MessageQueue) -> int | None:
        """The offset of a queue, or None."""
        return self._offsets.get(queue)

    async def save(self, offsets: dict[MessageQueue, int]) -> None:
        """Keep offsets, and write the file. Raises OSError."""
        self._offsets.update(offsets)
        if self._path is not None:
            await asyncio.to_thread(_replace, self._path, _format_offsets(self._offsets))


def _read_offsets(path: Path) -> dict[MessageQueue, int]:
    """The offsets in a file; none where there is no file yet. Raises ArgumentError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ArgumentError(f"no file of offsets can be made at {path}: {path.parent} is no directory") from None
        return {}
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"the file of offsets {str(path)!r} cannot be read: {reason}") from None
    try:
        tables = msgspec.json.decode(data, type=dict[str, dict[str, int]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is no file of offsets: {error}") from None
    offsets = {}
    for topic, table in tables.items():
        for name, offset in table.items():
            broker, _, queue_id = name.rpartition(":")
            if not broker or not _is_number(queue_id, _MOST_QUEUE_ID):
                raise ArgumentError(f"{path} is no file of offsets: {name!r} is no broker:queue")
            if not 0 <= offset <= _MOST_OFFSET:
                raise ArgumentError(f"{path} is no file of offsets: {offset} of {name!r} is no offset")
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
    # Written to a second file and renamed: a crash leaves the old file or the new one, never half of one.
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
