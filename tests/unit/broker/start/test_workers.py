"""Worker threads: all are there from the start, and work that cannot be run is reported as failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duemq.broker import workers as module
from duemq.broker.errors import ConfigError
from duemq.broker.workers import _THREADS, Background, ThreadWorkers
from duemq.storage.durability.jobs import Lane
from tests.support.broker import UnboundBroker, config


class _Limit:
    """The number of further threads that the system allows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1_000
        real: Callable[[threading.Thread], None] = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.left <= 0:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> _Limit:
    return _Limit(monkeypatch)


async def test_no_thread_is_started_later(limit: _Limit) -> None:
    workers = ThreadWorkers(asyncio.get_running_loop())
    limit.left = 0
    try:
        lanes: list[Lane | Background] = [*Lane, *Background]
        for lane in lanes:
            together = [workers.run(lane, threading.get_ident) for _ in range(20)]
            assert len(set(await asyncio.gather(*together))) <= _THREADS[lane]
    finally:
        workers.stop()


async def test_threads_that_there_are_not_stop_the_start_before_it_looks_at_the_store(
    limit: _Limit, tmp_path: Path
) -> None:
    needed = sum(_THREADS.values())
    before = threading.active_count()
    for left in range(needed):
        limit.left = left
        with pytest.raises(ConfigError, match=f"can't start new thread: the broker needs {needed}"):
            ThreadWorkers(asyncio.get_running_loop())
        assert threading.active_count() == before
    limit.left = 0
    with pytest.raises(ConfigError):
        await UnboundBroker(config(tmp_path / "store")).start()
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("lane", [Lane.FLUSH, Background.READS])
async def test_work_that_cannot_be_run_is_work_that_failed(
    monkeypatch: pytest.MonkeyPatch, lane: Lane | Background
) -> None:
    loop = asyncio.get_running_loop()
    workers = ThreadWorkers(loop)

    def refuse(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(workers._lanes[lane], "submit", refuse)
    ended: asyncio.Future[Exception | None] = loop.create_future()
    workers.start(lane, lambda: None, ended.set_result)
    assert not ended.done()
    assert isinstance(await ended, MemoryError)
    with pytest.raises(MemoryError):
        await workers.run(lane, lambda: None)
    workers.stop()


async def test_work_on_a_mount_that_hangs_holds_up_neither_other_work_nor_the_stop(
    monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(module, "_LEAVE_SECONDS", 0.05)
    workers, goes_on = ThreadWorkers(asyncio.get_running_loop()), threading.Event()
    hanging = workers.run(Background.ACCESS, goes_on.wait)
    assert await workers.run(Background.TABLES, lambda: "table") == "table"
    workers.stop()
    assert [line["event"] for line in logged] == ["work_abandoned"]
    left = [thread for thread in threading.enumerate() if thread.name == "access" and thread.is_alive()]
    assert [thread.daemon for thread in left] == [True], "the end of the process does not wait for it"
    goes_on.set()
    assert await hanging
    for thread in left:
        thread.join()


async def test_a_stop_waits_for_a_file_that_is_written(logged: list[Any]) -> None:
    workers, order = ThreadWorkers(asyncio.get_running_loop()), list[int]()
    for number in range(3):
        workers.start(Background.ACCESS, lambda number=number: order.append(number), lambda _: None)  # type: ignore[misc]
    workers.stop()
    assert order == [0, 1, 2]
    assert logged == []
