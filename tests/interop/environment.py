"""The brokers and clients that the fixtures hand out."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from pathlib import Path

from tests.peers import ports
from tests.peers.brokers.apache import SHORT_LIVED, ApacheBroker
from tests.peers.brokers.broker import Broker
from tests.peers.brokers.duemq import DuemqBroker
from tests.peers.clients import Client, JavaClient, make_client
from tests.peers.mqadmin.tool import MqAdmin

TARGETS = ("duemq", "apache-4.9.7", "apache-5.3.3")

# One table for all tests of delays: levels 1 and 2 for delayed messages, 3 and on for retries, whose first is level 3.
# It has six levels, so that a higher one is out of range.
LEVELS = "1s 2s 1s 1s 1s 3s"
LEVEL_MS = (1000, 2000, 1000, 1000, 1000, 3000)
_SHARED_PROPERTIES = {
    "messageDelayLevel": LEVELS,
    "flushConsumerOffsetInterval": "1000",
    "recallMessageEnable": "true",
}

_CALM = {
    # A thread of Apache's 5.3.3 runs without a pause for this time after the start, 3 s by default.
    "transactionMetricFlushInterval": "300",
    # It has a thread for each of these queues, eight by default, and when it stops it waits most of a second for each.
    "reviveQueueNum": "1",
    # Each second by default it compares the wheel of timers in memory, 38 MB, with that on the disk, byte by byte. That
    # takes a third of a processor. See FLUSHES_TIMERS.
    "timerFlushIntervalMs": "120000",
}
FLUSHES_TIMERS = {"timerFlushIntervalMs": "1000"}
"""A setting for a broker of Apache's that is killed, where its timers matter: RocketMQ's default."""


def make_broker(
    target: str,
    directory: Path,
    properties: Mapping[str, object],
    *,
    store: Path | None = None,
    port: int | None = None,
    nameserver_port: int | None = None,
    nameserver: str | None = None,
) -> Broker:
    """Return a broker of one of the TARGETS, not started."""
    if target == "duemq":
        return DuemqBroker(
            directory,
            properties,
            store=store,
            port=port,
            nameserver_port=nameserver_port,
            nameserver=nameserver,
            is_warm=True,
        )
    return ApacheBroker(
        target.removeprefix("apache-"),
        directory,
        {**_CALM, **properties},
        store=store,
        port=port,
        nameserver_port=nameserver_port,
        nameserver=nameserver,
        java_options=SHORT_LIVED,
    )


class SharedBroker:
    """A broker that tests share: started on first use, and again after a test stopped it."""

    def __init__(self, target: str, directory: Path) -> None:
        self.target = target
        self._broker = make_broker(target, directory, _SHARED_PROPERTIES)
        self._starting = asyncio.Lock()

    async def running(self) -> Broker:
        """Return the broker, running."""
        async with self._starting:
            if not self._broker.running:
                await self._broker.start()
        return self._broker

    async def make_room(self) -> None:
        """Stop the broker if it is a JVM, since a test is about to start brokers of its own and two JVMs are too
        many."""
        if self.target != "duemq" and self._broker.running:
            await self._broker.stop()

    async def close(self) -> None:
        """Kill the broker, if it runs: the tests that shared it have ended."""
        if self._broker.running:
            await self._broker.kill()


class Peers:
    """A broker of each kind, for tests of duemq's own client."""

    def __init__(self, shared_broker: SharedBroker, directory: Path) -> None:
        self._shared_broker = shared_broker
        self._brokers = {target: SharedBroker(target, directory / target) for target in TARGETS}

    async def get(self, target: str) -> Broker:
        """Return a broker, running."""
        await self._shared_broker.make_room()
        return await self._brokers[target].running()

    async def close(self) -> None:
        """Kill those that run."""
        await asyncio.gather(*(broker.close() for broker in self._brokers.values()))


class BrokerFactory:
    """Brokers of one test, which end with it. They share ports, as they run one after the other."""

    def __init__(self, target: str, directory: Path) -> None:
        self.target = target
        self.directory = directory
        self.port = ports.free_broker_port()
        self.nameserver_port = ports.free_port()
        self._made: list[Broker] = []

    def make(self, target: str, properties: Mapping[str, object], *, nameserver: str | None = None) -> Broker:
        """Return a broker, not started. All brokers of a factory have the same store, so only one may run at a time."""
        made = make_broker(
            target,
            self.directory / f"{len(self._made)}-{target}",
            properties,
            store=self.directory / "store",
            port=self.port,
            nameserver_port=self.nameserver_port,
            nameserver=nameserver,
        )
        self._made.append(made)
        return made

    async def close(self) -> None:
        """Kill the brokers that still run."""
        for made in self._made:
            if made.running:
                await made.kill()


class ClientPool:
    """The client processes of the session."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._clients: dict[str, Client] = {}
        self._started = Counter[str]()
        self._starting = asyncio.Lock()

    async def get(self, name: str) -> Client:
        """Return a client by its name, started if it does not run."""
        async with self._starting:
            client = self._clients.get(name)
            if client is None or client.has_aborted_in_a_stop:
                self._started[name] += 1
                client = make_client(name, self._directory / f"{name}-{self._started[name]}")
                await client.start()
                self._clients[name] = client
            return client

    async def java(self, version: str) -> JavaClient:
        """Return the Java client of a version."""
        client = await self.get(f"java-{version}")
        assert isinstance(client, JavaClient)
        return client

    async def close(self) -> None:
        """End all client processes."""
        await asyncio.gather(*(client.stop() for client in self._clients.values()))


class MqAdmins:
    """The processes of mqadmin of the session, one of each version."""

    def __init__(self, directory: Path) -> None:
        self._of = {version: MqAdmin(version, directory / version) for version in ("4.9.7", "5.3.3")}

    def __getitem__(self, version: str) -> MqAdmin:
        return self._of[version]

    async def close(self) -> None:
        """End them."""
        await asyncio.gather(*(tool.stop() for tool in self._of.values()))


class Together:
    """Runs a scenario for all clients at the same time, and gives each test the outcome of its own client.

    The libraries have timers of tens of seconds (routes, heartbeats, rebalancing) that cannot be set everywhere. Four
    clients that wait one after the other would make the suite minutes longer. The first test that asks starts the
    scenario for every client that has a test; each test then awaits its own client's scenario, and fails if that
    failed.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._tasks: dict[Hashable, dict[str, asyncio.Task[None]]] = {}

    async def run(self, key: Hashable, name: str, scenario: Callable[[str], Awaitable[None]]) -> None:
        """Run the scenario for all clients, if it has not begun, and await this client's outcome."""

        async def one(client: str) -> None:
            await scenario(client)

        if key not in self._tasks:
            self._tasks[key] = {client: asyncio.create_task(one(client)) for client in self._names}
        await self._tasks[key][name]

    async def close(self) -> None:
        """Wait for scenarios whose tests did not run, so that they do not outlive their brokers."""
        tasks = [task for tasks in self._tasks.values() for task in tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
