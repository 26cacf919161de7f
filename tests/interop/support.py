"""Helpers for several interop tests: numbered messages, sharing of queues, the check that no message arrived twice, and
a connection for single requests."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, FrameReader
from tests.peers.admin import Admin
from tests.peers.brokers.broker import HOST, Broker
from tests.peers.capabilities import Can, gap
from tests.peers.clients import Client, JavaClient, Producer, PushConsumer, unique, until
from tests.peers.errors import CallError
from tests.peers.messages import Outgoing, Received, Sent

T = TypeVar("T")


def need(client: Client | str, *abilities: Can) -> None:
    """Skip the test for a client library that lacks the feature it tests, with the reason from the table."""
    name = client if isinstance(client, str) else client.name
    for ability in abilities:
        reason = gap(name, ability)
        if reason is not None:
            pytest.skip(f"{name} cannot {ability.value}: {reason}")


def not_on(broker: Broker | str, kind: str, reason: str) -> None:
    """Skip the test on a broker of Apache's that is known to fail it."""
    if (broker if isinstance(broker, str) else broker.kind) == kind:
        pytest.skip(f"not on {kind}: {reason}")


def numbered(prefix: str, count: int, tags: str | None = None) -> list[Outgoing]:
    """Return messages with the bodies prefix-0, prefix-1, ..."""
    return [Outgoing(f"{prefix}-{n}".encode(), tags=tags) for n in range(count)]


async def eventually(
    attempt: Callable[[], Awaitable[T]], right: Callable[[T], bool] = bool, timeout: float = 20, every: float = 0.05
) -> T:
    """Repeat a question until the answer is right, for effects that follow a broker's answer with a delay. The
    question is asked every `every` seconds, and less often the longer it takes, since each costs two JVMs a request.

    A refusal counts as a wrong answer.
    """
    problem: object = None
    begun = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    answer = await attempt()
                except CallError as error:
                    problem = error
                else:
                    if right(answer):
                        return answer
                    problem = answer
                await asyncio.sleep(max(every, (time.monotonic() - begun) / 20))
    except TimeoutError:
        raise TimeoutError(f"still not so after {timeout:.0f} s: {problem!r}") from None


async def make_topic(admin: Admin, broker: Broker, queues: int = 4) -> str:
    """Make a topic with a new name, and wait until the name server has a route to it; return the name."""
    topic = unique("topic")
    await admin.create_topic(broker.address, topic, queues)
    # A broker of Apache's that has just started tells the name server later, sometimes only after half a minute.
    await eventually(partial(admin.route, topic), timeout=60)
    return topic


async def waiting_record(java: JavaClient, broker: Broker, topic: str, queue_id: int, result: Sent) -> Received:
    """Return the record that waits in a queue of SCHEDULE_TOPIC_XXXX or of the timer topic, found by the offset in the
    send result. Apache's broker answers a send before the record is in its consume queue.
    """
    assert result.queue_offset is not None
    ask = partial(java.pull, broker.nameserver, topic, queue_id, result.queue_offset, count=1)
    (record,) = (await eventually(ask, lambda pulled: bool(pulled.messages))).messages
    return record


async def refused_soon(attempt: Callable[[], Awaitable[object]], timeout: float = 20) -> CallError:
    """Repeat a question until it is refused, and return the refusal.

    For state that changes when the broker reads the end of a connection: a question over another connection may arrive
    first.
    """

    async def outcome() -> object:
        try:
            return await attempt()
        except CallError as error:
            return error

    refusal = await eventually(outcome, lambda answer: isinstance(answer, CallError), timeout)
    assert isinstance(refusal, CallError)
    return refusal


async def stored_offset(broker: Broker, client: Client, topic: str, group: str, total: int) -> None:
    """Wait until the sum of a group's offsets over all queues is in the broker's file, which survives a crash.

    The group's consumer has left, and its last commits were one-way requests. Apache's client may send an older offset
    after the last one, from the thread that commits every few seconds, and Apache's broker may handle them in either
    order; it keeps the last one handled. In that case the group joins again, and commits the messages that it then
    receives.
    """
    path, name = broker.store / "config" / "consumerOffset.json", f"{topic}@{group}"
    for _ in range(2):
        try:
            # Apache's broker begins to write the file 10 s after its start.
            await _in_file(path, name, total, timeout=15)
        except TimeoutError:
            async with await client.consumer(broker.nameserver, group, topic) as consumer:
                await consumer.receive(1)
        else:
            return
    await _in_file(path, name, total)


async def delivered_offset(broker: Broker, level: int, offset: int) -> None:
    """Wait until the broker's file says that a delay level was delivered up to this offset."""
    path = broker.store / "config" / "delayOffset.json"

    async def value() -> int:
        text = path.read_text() if path.exists() else ""
        found = re.search(rf"\b{level}\"?\s*:\s*(\d+)", text)
        return int(found[1]) if found else -1

    await eventually(value, lambda found: found >= offset)


async def _in_file(path: Path, name: str, total: int, timeout: float = 20) -> None:
    async def value() -> int:
        text = path.read_text() if path.exists() else ""
        # fastjson does not quote numbers as keys, so this is not JSON: "topic@group":{0:5,1:4}
        found = re.search(re.escape(f'"{name}"') + r"\s*:\s*\{([^}]*)\}", text)
        return sum(int(offset) for offset in re.findall(r":\s*(\d+)", found[1])) if found else -1

    await eventually(value, lambda found: found >= total, timeout)


async def share_queues(
    producer: Producer, topic: str, queues: int, consumers: Sequence[PushConsumer], admin: Admin | None = None
) -> None:
    """Wait until each of the consumers has its share of the queues, and all queues are being read.

    This sends probes, one message to each queue, again and again until they are spread evenly. While the queues change
    hands a probe may arrive twice, and the second copy may arrive after the spread looked even: a consumer that has not
    given up a queue yet goes on reading it, and gets the next messages too. For consumers of one group, pass the admin
    API: then each of them is also asked which queues it holds, and messages sent after this arrive once.
    """
    share = queues // len(consumers)
    for attempt in range(400):
        probes = [f"probe-{attempt}-{queue}".encode() for queue in range(queues)]
        for queue, probe in enumerate(probes):
            await producer.send(topic, [Outgoing(probe)], queue_id=queue)
        wanted = set(probes)

        def arrived(wanted: set[bytes] = wanted) -> bool:
            return wanted <= {body for consumer in consumers for body in consumer.bodies}

        await until(arrived, consumers)
        counts = [sum(body in wanted for body in consumer.bodies) for consumer in consumers]
        if counts == [share] * len(consumers) and (
            admin is None or await _held_once(admin, consumers[0].group, topic, queues)
        ):
            return
        await asyncio.sleep(0.25)  # the library gives no event when it rebalances
    raise TimeoutError(f"the {queues} queues of {topic} were never shared evenly")


async def _held_once(admin: Admin, group: str, topic: str, queues: int) -> bool:
    """Whether every queue of the topic is held by exactly one member of the group, by asking all members."""
    try:
        members = (await admin.consumer_connection(group))["clients"]
        infos = [await admin.running_info(group, member["clientId"]) for member in members]
    except CallError:
        return False  # a member has just left, or does not answer yet
    held = [queue for info in infos for queue in info["queues"] if queue.startswith(f"{topic}@")]
    return sorted(held) == sorted(f"{topic}@{queue}" for queue in range(queues))


async def each_once(
    producer: Producer, topic: str, queues: int, consumers: Sequence[PushConsumer], bodies: Sequence[bytes]
) -> None:
    """Assert that the consumers together received each of the bodies exactly once.

    A last message in each queue follows them; once it has arrived, a second copy of the others would have arrived too.
    """
    ends = [f"end-{producer.handle}-{queue}".encode() for queue in range(queues)]
    await until(lambda: set(bodies) <= {body for consumer in consumers for body in consumer.bodies}, consumers)
    for queue, end in enumerate(ends):
        await producer.send(topic, [Outgoing(end)], queue_id=queue)
    await until(lambda: set(ends) <= {body for consumer in consumers for body in consumer.bodies}, consumers)
    wanted = set(bodies)
    copies: dict[bytes, list[str]] = {body: [] for body in wanted}
    for number, consumer in enumerate(consumers):
        for message in consumer.messages:
            if message.body in wanted:
                copies[message.body].append(
                    f"consumer {number}: queue {message.queue_id}, offset {message.queue_offset}, "
                    f"sent again {message.reconsume_times} times, stored {message.store_time}, "
                    f"came {message.receive_time}"
                )
    # Two offsets mean that the producer sent twice, one offset that it was read twice.
    assert {body: places for body, places in copies.items() if len(places) != 1} == {}


class Wire:
    """A connection to a broker, for requests that no client sends. `source`: the address to come from."""

    def __init__(self, broker: Broker, source: str = HOST) -> None:
        self._port = broker.port
        self._source = source
        self._frames = FrameReader()
        self._answers: dict[int, Command] = {}

    async def __aenter__(self) -> "Wire":
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port, local_addr=(self._source, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def ask(self, command: Command, kind: int = JSON) -> Command:
        """Return the answer to a request."""
        self._writer.write(codec.encode(command, kind))
        async with asyncio.timeout(20):
            while command.opaque not in self._answers:
                data = await self._reader.read(65536)
                assert data, "the broker closed the connection"
                for frame in self._frames.receive_data(data):
                    answer = codec.decode(frame)
                    answer.body = bytes(answer.body)
                    self._answers[answer.opaque] = answer
        return self._answers.pop(command.opaque)
