from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from duemq.protocol.records.record import RecordSummary
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.files import Files, OsFiles
from duemq.storage.store import MessageStore, StoreConfig

GOLDEN = Path(__file__).parent / "golden"
HOST = b"\x7f\0\0\x01\0\0\x04\xd2"
LEVELS = DelayLevels()
NOW_MS = 1_700_000_000_000


def make_store(
    root: Path | str,
    files: Files | None = None,
    *,
    segment_size: int = 65536,
    queue_size: int = 400,
    host: str = "127.0.0.1",
    with_checksums: bool = False,
    is_extended: bool = False,
    extension_size: int = 1024,
) -> MessageStore:
    config = StoreConfig(
        str(root),
        commitlog_segment_size=segment_size,
        queue_segment_size=queue_size,
        max_message_size=16384,
        with_checksums=with_checksums,
        is_extended=is_extended,
        extension_segment_size=extension_size,
    )
    return MessageStore(config, files or OsFiles(), (host, 10911), LEVELS.deliver_time)


def append(
    store: MessageStore, topic: str, queue_id: int, *bodies: bytes, properties: bytes = b"", now_ms: int = NOW_MS
) -> list[int]:
    """Append messages in one batch; return their physical offsets."""
    offsets = []
    code = store.tags_code(topic, RecordSummary(store.appender.begin(now_ms), 0, properties.decode()))
    for body in bodies:
        store.appender.add(store.ensure_queue(topic, queue_id), body, properties, code, 1, HOST)
        offsets.append(store.appender.last_physical_offset)
    store.appender.commit()
    return offsets


@pytest.fixture(params=["4.9.7", "5.3.3"])
def apache_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the directory of a store that Apache's broker of a version wrote."""
    subprocess.run(["tar", "-xzf", GOLDEN / f"apache-{request.param}.tar.gz", "-C", tmp_path], check=True)
    return tmp_path
