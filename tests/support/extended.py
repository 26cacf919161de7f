"""Makes a store look as RocketMQ leaves it with enableConsumeQueueExt: each unit of a consume queue has an address in
place of its tags code, which is in consumequeue_ext. Shares no code with `storage.queues.extension`."""

from __future__ import annotations

import struct
from pathlib import Path

from duemq.protocol.records.record import decode
from duemq.protocol.topics import TIMER_TOPIC

FILE_SIZE = 48 << 20
_FIRST_ADDRESS = -(2**63)


def extend(root: Path) -> int:
    """Change all consume queues of a stopped store; return the number of changed units. RocketMQ 5 has a hash of tags
    in the timer topic's queue, duemq the time: so do the new units."""
    logs = {int(path.name): path.read_bytes() for path in (root / "commitlog").iterdir() if path.name.isdecimal()}
    size = len(next(iter(logs.values())))
    count = 0
    for queue in sorted((root / "consumequeue").glob("*/*")):
        units = bytearray()
        for path in sorted(queue.iterdir()):
            data = bytearray(path.read_bytes())
            for at in range(0, len(data) - 19, 20):
                physical, record_size, code = struct.unpack_from(">qiq", data, at)
                base = physical - physical % size
                if not record_size or record_size == 0x7FFFFFFF or base not in logs:
                    continue
                stored = decode(logs[base], physical - base, check_crc=False).store_timestamp
                code = 0 if queue.parent.name == TIMER_TOPIC else code
                struct.pack_into(">q", data, at + 12, len(units) + _FIRST_ADDRESS)
                units += struct.pack(">hqqh", 20, code, stored, 0)
                count += 1
            path.write_bytes(data)
        target = root / "consumequeue_ext" / queue.parent.name / queue.name
        target.mkdir(parents=True)
        with (target / f"{0:020}").open("wb") as file:
            file.write(units)
            file.truncate(FILE_SIZE)
    return count


def extensions(root: Path) -> list[Path]:
    """The files of all extensions of a store."""
    return sorted((root / "consumequeue_ext").glob("*/*/*"))
