"""Apache's Java clients for all tests of a session, one process for each version: a start takes Java some seconds.

    with Peers(directory) as peers:
        peers.run(coroutine)

A client belongs to an event loop, so all that uses one runs in the same loop: `Peers.run`, in a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient, java_client

T = TypeVar("T")
Version = Literal["4.9.7", "5.3.3"]


class Peers:
    """The clients, and the loop in which they and the brokers of the tests run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="peers", daemon=True)
        self._clients: dict[Version, JavaClient] = {}
        self._started = 0
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result."""
        running = self.begin(work)
        try:
            return running.result()
        except BaseException:
            running.cancel()  # if this thread was interrupted
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine in the loop. It is cancelled if it runs when this object ends."""

        async def known() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                return await work
            finally:
                self._tasks.remove(task)

        return asyncio.run_coroutine_threadsafe(known(), self._loop)

    async def client(self, version: Version) -> JavaClient:
        """Return the client of a version; only for code in the loop."""
        async with self._starting:
            found = self._clients.get(version)
            if found is None or not found.program.running:
                self._started += 1
                found = self._clients[version] = java_client(version, self._directory / f"{version}-{self._started}")
                await found.start()
            return found

    async def client_for(self, broker: Broker) -> JavaClient:
        """Return a client whose version sends no request unknown to the broker; only for code in the loop."""
        return await self.client("4.9.7" if broker.kind == "apache-4.9.7" else "5.3.3")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._end())
        for client in self._clients.values():
            self.run(client.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Cancel all that runs, and wait for its end."""
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
