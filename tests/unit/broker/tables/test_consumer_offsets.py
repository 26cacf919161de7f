"""The table of consumer offsets: what is saved, and what is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.persister import Persister
from duemq.broker.workers import Background, ThreadWorkers
from duemq.storage.config_file import ConfigFile
from tests.crash.simulated_files import SimulatedFiles


class HeldWorkers:
    """Work that a test does when it wants."""

    def __init__(self) -> None:
        self.jobs: list[tuple[asyncio.Future[None], Callable[[], None]]] = []

    def run(self, _: Background, job: Callable[[], None]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.jobs.append((done, job))
        return done

    async def do(self) -> None:
        done, job = self.jobs.pop(0)
        job()
        done.set_result(None)
        await asyncio.sleep(0)


def table(files: SimulatedFiles, workers: HeldWorkers) -> ConsumerOffsets:
    file = ConfigFile(files, "/s/config/consumerOffset.json")
    return ConsumerOffsets(file, Persister(asyncio.get_running_loop(), cast("ThreadWorkers", workers)))


async def test_a_commit_during_a_write_is_written_by_the_next_one() -> None:
    files, workers = SimulatedFiles(), HeldWorkers()
    offsets = table(files, workers)
    offsets.commit("g", "T", 0, 1)
    offsets.save_if_changed()
    offsets.commit("g", "T", 0, 2)
    await workers.do()
    offsets.save_if_changed()
    await workers.do()
    again = table(files, workers)
    again.load()
    assert again.get("g", "T", 0) == 2
    offsets.save_if_changed()
    assert workers.jobs == [], "nothing changed since"


@pytest.mark.parametrize("what", ["topic", "group"])
async def test_where_pulls_ended_is_forgotten_with_the_topic_and_with_the_group(what: str) -> None:
    offsets = table(SimulatedFiles(), HeldWorkers())
    for group in ("g", "h"):
        for topic in ("T", "U"):
            offsets.pulled(group, topic, 0, 5)
    if what == "topic":
        offsets.remove_topic("T")
    else:
        offsets.remove_group("g")
    left = {(group, topic) for group in ("g", "h") for topic in ("T", "U") if offsets.pull_offset(group, topic, 0) == 5}
    gone = {("g", "T"), ("h", "T")} if what == "topic" else {("g", "T"), ("g", "U")}
    assert left == {("g", "T"), ("g", "U"), ("h", "T"), ("h", "U")} - gone
