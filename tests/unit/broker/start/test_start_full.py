"""Goal: a broker whose disk is full can be restarted: it serves the stored messages, refuses new ones, and goes on when
there is room.

Method: a store with waiting messages, ended cleanly or cut off, on a file layer without room for another byte. Existing
data can be overwritten, as on a real disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duemq.storage.files import OsFile, OsFiles
from tests.support.loop import SteppedLoop
from tests.support.wire import send
from tests.unit.broker.start.test_start import SENDS, Life


def no_room(path: str) -> OSError:
    return OSError(28, "No space left on device", path)


def full_disk() -> AbstractContextManager[Any]:
    """A disk on which no file gets another block; a file without bytes can still be created."""
    write = OsFile.write

    def checked(file: OsFile, offset: int, data: bytes) -> None:
        fd = os.open(file.path, os.O_RDONLY)
        try:
            end = offset
            with suppress(OSError):  # there is no hole behind it
                end = os.lseek(fd, offset, os.SEEK_HOLE) if os.lseek(fd, offset, os.SEEK_DATA) == offset else offset
        finally:
            os.close(fd)
        if offset + len(data) > end:
            raise no_room(file.path)
        write(file, offset, data)

    def refused(file: OsFile, writes: Sequence[tuple[int, bytes]]) -> None:
        raise no_room(file.path)

    def not_replaced(files: OsFiles, path: str, data: bytes, *, durable: bool = True) -> None:
        raise no_room(path)

    patches = ExitStack()
    patches.enter_context(patch.object(OsFile, "write", checked))
    patches.enter_context(patch.object(OsFile, "write_apart", refused))
    patches.enter_context(patch.object(OsFiles, "write_whole", not_replaced))
    patches.enter_context(patch.object(OsFiles, "used_ratio", lambda files, path: 1.0))
    return patches


@pytest.mark.parametrize("how", ["stopped", "killed", "killed before queues were written"])
async def test_a_start_on_a_full_disk_serves_what_is_there_until_there_is_room(
    tmp_path: Path, loop: SteppedLoop, how: str, logged: list[Any]
) -> None:
    life = Life(tmp_path / "store", loop)
    await life.write(cleanly=how == "stopped")
    if how == "killed before queues were written":
        for name in ("checkpoint", "queuecheck"):
            (life.root / name).unlink()
        shutil.rmtree(life.root / "consumequeue")
    logged.clear()
    with full_disk():
        broker = await life.start()
        assert (life.root / "abort").exists(), "a kill from now on is seen by the next start"
        assert len(await life.bodies(broker)) == SENDS
        peer = broker.connect()
        answers = [await peer.ask(send("T", b"x" * 9000)) for _ in range(20)]
        assert {answer.code for answer in answers} == {14}
        for _ in range(30):
            await life.pass_time(0.5)
        assert broker.store.health.verdict.name == "FULL"
        assert len(await life.bodies(broker)) == SENDS
    assert [line["event"] for line in logged].count("append_failed") <= 1
    await life.pass_time(15)
    assert broker.store.health.verdict.name == "HEALTHY"
    await life.cut_off(broker)
    await life.each_once()


async def test_sends_that_a_full_disk_refuses_are_told_once_a_minute(
    tmp_path: Path, loop: SteppedLoop, logged: list[Any]
) -> None:
    life = Life(tmp_path / "store", loop)
    broker = await life.start()
    peer = broker.connect()
    assert (await peer.ask(send("T", b"x"))).code == 0
    refuse: Callable[..., None] = lambda *_: (_ for _ in ()).throw(no_room("commitlog"))  # noqa: E731
    with patch.object(type(broker.store.log), "write", refuse):
        for _ in range(3):
            for _ in range(50):
                assert (await peer.ask(send("T", b"x"))).code == 14
            await life.pass_time(61)
    told = [line["messages"] for line in logged if line["event"] == "append_failed"]
    assert told == [1, 50, 50]
    assert (await peer.ask(send("T", b"x"))).code == 0
    assert await broker.stop() is None
