"""The checkpoint file: it records how much of the store is known to be durable, which bounds the work of recovery.

    0                  8                  16                 24           40        2048
    | physic timestamp | logic timestamp  | index timestamp  | 5.x's own  |  ...    | duemq's, below   | zeros | 4096
    | int64            | int64            | int64            | 16 bytes   |

    physic timestamp: store time of the last flushed record; logic: of the last record whose consume-queue unit is
    flushed; index: of the last record in a full index file. ms since the epoch; 0 is always safe.

    2048        2056              2064               2072              2080        2084
    | "DUEMQCP3"| recovery offset | physic timestamp | logic timestamp  | note size | note ... | crc32 from 2048 on |
    | 8 bytes   | int64           | int64            | int64            | uint32    |          | uint32             |

    recovery offset: the records before it, and their consume-queue units, are durable, so recovery starts there. It is
    valid unless RocketMQ has written the store since: then the timestamps at the beginning of the file differ from the
    copies here, and recovery goes by the timestamps, as RocketMQ does.
    note: the state of each part of the scheduler when the commitlog ended at the recovery offset, one after the other:
          | name size: uint8 | name | size: uint32 | bytes |  (see `scheduler.levels.runs` and
          `scheduler.timers.files.small_files`). Three further names: "rebuilding", which is empty, says that all
          consume queues are being rebuilt; "remaking" is a JSON list of the queues of which some files are being
          rebuilt, as [topic, queue, first offset of the first such file]; "queues" says that queuecheck has a block for
          this checkpoint (see `queues.check`).

All integers big-endian. The file is longer than 4096 bytes if the note needs more room. RocketMQ maps the first 4096
and touches only its own fields. Mirrors apache/rocketmq store/StoreCheckpoint.java (4.9.7, 5.3.3), except duemq's part.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec
import structlog

from duemq.storage.files import Files

log = structlog.get_logger(__name__)

SIZE: Final = 4096
_THEIRS: Final = struct.Struct(">qqq")
THEIR_SIZE: Final = _THEIRS.size
"""Size in bytes of the timestamps, without which a file is not read."""
_OURS: Final = struct.Struct(">8sqqqI")
_OURS_AT: Final = 2048
_MAGIC: Final = b"DUEMQCP3"
_CRC: Final = struct.Struct(">I")
_NOTE_SIZE: Final = struct.Struct(">I")
REBUILDING: Final = "rebuilding"
"""Name of the note that says that no unit of any consume queue is durable."""
REMAKING: Final = "remaking"
"""Name of the note that lists consume queues, and for each the file from which on its units are not durable."""


class Checkpoint(msgspec.Struct):
    """The values of the file. Timestamps are ms since the epoch. `recovery_offset` is a physical offset, None if the
    file has no valid one. `notes`: by name."""

    physic_timestamp: int = 0
    logic_timestamp: int = 0
    index_timestamp: int = 0
    recovery_offset: int | None = None
    notes: dict[str, bytes] = {}
    is_foreign: bool = False
    """Whether another broker wrote the file last."""

    def without_ours(self) -> Checkpoint:
        """Return the values without duemq's part, for a store that another broker has written since."""
        return Checkpoint(self.physic_timestamp, self.logic_timestamp, self.index_timestamp, is_foreign=True)


def load(files: Files, path: str, *, is_ours: bool = False) -> Checkpoint:
    """Read the checkpoint from a file; its timestamps are 0, and there is no recovery offset, if the file is missing or
    too short. `is_ours`: only duemq has written the store since its last start. If the file then differs from what
    duemq wrote, it is damaged: the whole checkpoint counts as missing, with a warning, and recovery reads all of the
    commitlog. Raises StoreFormatError, OSError."""
    data = files.read_whole(path)
    checkpoint = decode(data) if data is not None else Checkpoint()
    if not (is_ours and checkpoint.is_foreign):
        return checkpoint
    log.warning("checkpoint_damaged", file=path, reason="it differs from what was written; the whole commitlog is read")
    return Checkpoint()


def decode(data: bytes) -> Checkpoint:
    """Decode the checkpoint in the bytes of a file; its timestamps are 0 if there are too few bytes."""
    if len(data) < _THEIRS.size:
        return Checkpoint(is_foreign=True)
    physic, logic, index = _THEIRS.unpack_from(data)
    checkpoint = Checkpoint(physic, logic, index, is_foreign=True)
    ours = data[_OURS_AT : _OURS_AT + _OURS.size]
    if len(ours) == _OURS.size and ours.startswith(_MAGIC):
        _, offset, our_physic, our_logic, note_size = _OURS.unpack(ours)
        end = _OURS_AT + _OURS.size + note_size
        is_whole = data[end : end + _CRC.size] == _CRC.pack(zlib.crc32(data[_OURS_AT:end]))
        if is_whole and (our_physic, our_logic) == (physic, logic):
            checkpoint.recovery_offset = offset
            checkpoint.notes = _decode_notes(data[_OURS_AT + _OURS.size : end])
            checkpoint.is_foreign = False
    return checkpoint


def fault_in(data: bytes) -> str:
    """Return what is wrong with the bytes of a file, whoever wrote it last: its size, or duemq's part; an empty text if
    nothing is. A file without duemq's part, or with one that is older than the timestamps, is no fault."""
    size = SIZE
    ours = data[_OURS_AT : _OURS_AT + _OURS.size]
    if ours.startswith(_MAGIC) and len(ours) == _OURS.size:
        end = _OURS_AT + _OURS.size + _OURS.unpack(ours)[-1]
        if data[end : end + _CRC.size] != _CRC.pack(zlib.crc32(data[_OURS_AT:end])):
            return f"duemq's part, from byte {_OURS_AT} on, has a wrong checksum"
        size = max(SIZE, end + _CRC.size)
    if len(data) != size:
        return f"{len(data)} bytes instead of {size}"
    return f"byte {_OURS_AT} does not begin duemq's part" if any(ours) and not ours.startswith(_MAGIC) else ""


def start_over(files: Files, path: str, checkpoint: Checkpoint) -> Checkpoint:
    """Note in the file that no consume queue is durable, before all of them are rebuilt: if this start ends before its
    next checkpoint, the next start rebuilds them. Returns the new checkpoint, whose other notes stay valid. May wait
    for the disk. Raises OSError."""
    changed = msgspec.structs.replace(checkpoint, physic_timestamp=0, logic_timestamp=0)
    if checkpoint.recovery_offset is not None:
        changed.notes = {**checkpoint.notes, REBUILDING: b""}
        save(files, path, changed)
    elif data := files.read_whole(path):
        files.write_whole(path, bytes(_THEIRS.size - 8) + data[_THEIRS.size - 8 :])
    return changed


def remake(files: Files, path: str, checkpoint: Checkpoint, queues: list[tuple[str, int, int]]) -> Checkpoint:
    """Note in the file which consume queues are being rebuilt, and from which file on. `queues`: topic, queue id, and
    the offset of that file's first byte. Returns the new checkpoint. May wait for the disk. Raises OSError."""
    changed = msgspec.structs.replace(checkpoint, notes={**checkpoint.notes, REMAKING: msgspec.json.encode(queues)})
    save(files, path, changed)
    return changed


def being_remade(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Return the queues that `remake` noted, in the same form."""
    note = checkpoint.notes.get(REMAKING)
    return msgspec.json.decode(note, type=list[tuple[str, int, int]]) if note else []


def save(files: Files, path: str, checkpoint: Checkpoint) -> None:
    """Write and sync the file; RocketMQ 5.x's own fields in it are kept. May wait for the disk. Raises OSError."""
    data = bytearray((files.read_whole(path) or b"")[:SIZE].ljust(SIZE, b"\0"))
    data[: _THEIRS.size] = encode_theirs(checkpoint)[: _THEIRS.size]
    note = _encode_notes(checkpoint.notes)
    ours = _OURS.pack(
        _MAGIC,
        checkpoint.recovery_offset or 0,
        checkpoint.physic_timestamp,
        checkpoint.logic_timestamp,
        len(note),
    )
    ours += note
    ours += _CRC.pack(zlib.crc32(ours))
    data[_OURS_AT:] = ours.ljust(SIZE - _OURS_AT, b"\0")
    files.write_whole(path, bytes(data))


def encode_theirs(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a file as RocketMQ's broker makes it, without duemq's part."""
    times = checkpoint.physic_timestamp, checkpoint.logic_timestamp, checkpoint.index_timestamp
    return _THEIRS.pack(*times).ljust(SIZE, b"\0")


def _encode_notes(notes: dict[str, bytes]) -> bytes:
    parts: list[bytes] = []
    for name, note in notes.items():
        parts += (bytes((len(name),)), name.encode("ascii"), _NOTE_SIZE.pack(len(note)), note)
    return b"".join(parts)


def _decode_notes(data: bytes) -> dict[str, bytes]:
    """Decode the notes in duemq's part, whose checksum is right; if their format is another one, there are none."""
    notes: dict[str, bytes] = {}
    at = 0
    try:
        while at < len(data):
            name_end = at + 1 + data[at]
            start = name_end + _NOTE_SIZE.size
            end = start + _NOTE_SIZE.unpack_from(data, name_end)[0]
            if end > len(data):
                return {}
            notes[data[at + 1 : name_end].decode("ascii")] = data[start:end]
            at = end
    except (struct.error, UnicodeDecodeError):
        return {}
    return notes
