"""The broker goes away in the middle of sending and consuming, and comes back on the same store: what the clients of
each library saw of it. Some notice only with their next heartbeat, up to half a minute later, that the broker does not
know them any more, so all go through the restart at the same time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.interop.environment import ClientPool
from tests.interop.support import make_topic, numbered, stored_offset
from tests.peers.brokers.broker import Broker
from tests.peers.capabilities import CLIENTS
from tests.peers.clients import Client, PushConsumer, unique
from tests.peers.errors import PeerError
from tests.peers.messages import Outgoing

ENOUGH = 40
BEFORE = 30
HOWS = ("stop", "kill")
PROPERTIES = {"flushConsumerOffsetInterval": "1000"}


@dataclass(eq=False)
class Witness:
    """The messages that one client sent and received around a restart."""

    client: Client
    broker: Broker
    topic: str
    steady_group: str = field(default_factory=lambda: unique("steady"))
    paused_group: str = field(default_factory=lambda: unique("paused"))
    acknowledged: list[bytes] = field(default_factory=list)
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    steady: PushConsumer | None = None
    paused: PushConsumer | None = None
    failure: BaseException | None = None

    @property
    def before(self) -> list[bytes]:
        """The messages that the paused group consumed before the restart."""
        return [message.body for message in numbered("before", BEFORE)]

    async def prepare(self) -> None:
        """Let one group consume the first messages and leave, and another stay."""
        nameserver = self.broker.nameserver
        async with await self.client.producer(nameserver) as producer:
            await producer.send(self.topic, numbered("before", BEFORE))
        async with await self.client.consumer(nameserver, self.paused_group, self.topic) as consumer:
            await consumer.receive_bodies(self.before)
        # SIGKILL keeps the content of files: the offsets are written to theirs every second.
        await stored_offset(self.broker, self.client, self.topic, self.paused_group, BEFORE)
        self.steady = await self.client.consumer(nameserver, self.steady_group, self.topic)

    async def keep_sending(self) -> None:
        """Send one message after the other, also while the broker is away, and note the acknowledged ones."""
        async with await self.client.producer(self.broker.nameserver, retries=0, timeout_ms=3000) as producer:
            number = 0
            while not self.finished.is_set():
                number += 1
                body = f"message-{number}".encode()
                try:
                    (result,) = await producer.send(self.topic, [Outgoing(body)], check=False)
                except PeerError:
                    continue
                if result.stored:
                    self.acknowledged.append(body)
                    self.progress.set()
                await asyncio.sleep(0.01)  # a stream, not a flood, with the restart in its middle

    async def sends_more(self) -> None:
        """Wait until some more messages have been acknowledged."""
        goal = len(self.acknowledged) + ENOUGH
        async with asyncio.timeout(90):
            while len(self.acknowledged) < goal:
                self.progress.clear()
                await self.progress.wait()

    async def receive_all(self) -> None:
        """Stop sending, and wait until both groups have all acknowledged messages."""
        assert self.steady is not None
        await self.steady.receive_bodies(self.acknowledged)
        self.paused = await self.client.consumer(self.broker.nameserver, self.paused_group, self.topic)
        await self.paused.receive_bodies(self.acknowledged)

    async def leave(self) -> None:
        """Stop the consumers."""
        for consumer in (self.steady, self.paused):
            if consumer is not None:
                await consumer.stop()


async def _each(witnesses: list[Witness], step: Callable[[Witness], Awaitable[None]]) -> list[Witness]:
    """Have all take a step at the same time; return those that succeeded. The others keep their exception."""
    outcomes = await asyncio.gather(*(step(witness) for witness in witnesses), return_exceptions=True)
    for witness, outcome in zip(witnesses, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            witness.failure = outcome
    return [witness for witness in witnesses if witness.failure is None]


async def restart(broker: Broker, clients: ClientPool, how: str) -> dict[str, Witness]:
    """Start a broker, and end and start it again while clients send and consume; return a witness of each library. A
    witness to whom something went wrong has the reason."""
    await broker.start()
    admin = (await clients.java("4.9.7")).admin(broker.nameserver)
    witnesses = [Witness(await clients.get(name), broker, await make_topic(admin, broker)) for name in CLIENTS]
    able = await _each(witnesses, Witness.prepare)
    sending = [asyncio.create_task(witness.keep_sending()) for witness in able]
    try:
        able = await _each(able, Witness.sends_more)
        await (broker.stop() if how == "stop" else broker.kill())
        await broker.start()
        able = await _each(able, Witness.sends_more)
    finally:
        for witness in witnesses:
            witness.finished.set()
        await asyncio.gather(*sending)
    await _each(able, Witness.receive_all)
    await _each(witnesses, Witness.leave)
    await broker.kill()
    return {witness.client.name: witness for witness in witnesses}
