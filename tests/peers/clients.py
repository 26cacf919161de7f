"""Apache's clients for tests: the same producers and consumers over the Java, the Go and the C++ library.

    client = make_client("go", directory)
    await client.start()
    async with (
        await client.producer(broker.names.nameserver) as producer,
        await client.consumer(broker.names.nameserver, "group", "topic") as consumer,
    ):
        await producer.send("topic", [Outgoing(b"hello")])
        await consumer.receive(1)

capabilities.py lists the features that a library lacks.
"""

import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.peers import install, tools
from tests.peers.admin import Admin
from tests.peers.capabilities import CLIENTS
from tests.peers.class_archives.options import options as class_archive
from tests.peers.errors import PeerDiedError
from tests.peers.messages import Json, Outgoing, Pulled, Received, Sent
from tests.peers.program import Program

Mode = Literal["sync", "async", "oneway", "batch"]
MODES: tuple[Mode, ...] = ("sync", "async", "oneway", "batch")

Account = tuple[str, str]
"""An access key and its secret key."""

_numbers = itertools.count(1)


def _keys(account: Account | None) -> Json:
    return {"access_key": account[0], "secret_key": account[1]} if account is not None else {}


def unique(prefix: str) -> str:
    """Return a name for a topic or group that no other test uses."""
    return f"{prefix}_{uuid.uuid4().hex[:10]}"


def _handle(prefix: str) -> str:
    """Return a name for a client instance; it is part of its client id, which must be unique at a broker. A group
    allots queues to its members in the order of these names, which is that of their starts."""
    return f"{prefix}-{os.getpid()}-{next(_numbers):06}"


class _Member:
    """The common part of producers and consumers: they belong to a client and can be stopped once."""

    _stop_op: str

    def __init__(self, client: "Client", handle: str) -> None:
        self.client = client
        self.handle = handle
        self._stopped = False

    async def stop(self) -> None:
        """Stop it; a second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        try:
            await self.client.program.call(self._stop_op, handle=self.handle)
        except PeerDiedError:
            if not self.client.has_aborted_in_a_stop:
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class Producer(_Member):
    """A started producer."""

    _stop_op = "producer_stop"

    async def send(
        self,
        topic: str,
        messages: Sequence[Outgoing],
        mode: Mode = "sync",
        *,
        queue_id: int | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> list[Sent]:
        """Send messages, one after the other or all at once as the mode says, and return the library's results.

        With `check` the first error is raised instead.
        """
        reply = await self.client.program.call(
            "send",
            handle=self.handle,
            topic=topic,
            mode=mode,
            messages=[message.to_json() for message in messages],
            queue_id=queue_id,
            timeout=timeout,
        )
        results = [Sent.from_json(result) for result in reply["results"]]
        if check:
            for result in results:
                if result.error is not None:
                    raise result.error
        return results

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Recall a waiting message by the handle in its send result; return its id. Raises CallError if refused."""
        reply = await self.client.program.call("recall", handle=self.handle, topic=topic, recall_handle=recall_handle)
        return str(reply["msg_id"])


Outcome = Literal["commit", "rollback", "open"]


class TransactionProducer(_Member):
    """A started transactional producer. It answers a broker's check of an open transaction with "unknown"."""

    _stop_op = "transactions_stop"

    async def send(self, topic: str, messages: Sequence[Outgoing], outcomes: Sequence[Outcome]) -> list[Sent]:
        """Send half messages, each with the outcome of its transaction; raise the first error.

        The outcome is sent to the broker in a one-way request.
        """
        reply = await self.client.program.call(
            "transactions_send",
            handle=self.handle,
            topic=topic,
            messages=[message.to_json() for message in messages],
            outcomes=list(outcomes),
        )
        results = [Sent.from_json(result) for result in reply["results"]]
        for result in results:
            if result.error is not None:
                raise result.error
        return results


class Remoting(_Member):
    """A started remoting client of the Java library, which keeps its connections."""

    _stop_op = "remoting_stop"

    async def ask(self, address: str) -> int:
        """Ask a broker for its settings; return the code of the answer. Raises CallError with the library's error."""
        return int((await self.client.program.call("remoting_ask", handle=self.handle, address=address))["code"])


class PushConsumer(_Member):
    """A started push consumer. `messages` has everything received so far, in order."""

    _stop_op = "consumer_stop"

    def __init__(self, client: "Client", handle: str, group: str) -> None:
        super().__init__(client, handle)
        self.group = group
        self.messages: list[Received] = []
        self.watchers: set[asyncio.Event] = set()  # set by each message; see until()

    def take(self, message: Received) -> None:
        """Add a message; the client calls this for each event."""
        self.messages.append(message)
        for watcher in self.watchers:
            watcher.set()

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of all messages so far."""
        return [message.body for message in self.messages]

    async def until(self, done: Callable[[list[Received]], bool], timeout: float = 90) -> list[Received]:
        """Wait until the received messages satisfy a condition, and return them."""
        await until(lambda: done(self.messages), [self], timeout)
        return self.messages

    async def receive(self, count: int, timeout: float = 90) -> list[Received]:
        """Wait until a number of messages have arrived, and return all that did."""
        return await self.until(lambda messages: len(messages) >= count, timeout)

    async def receive_bodies(self, bodies: Sequence[bytes], timeout: float = 90) -> list[Received]:
        """Wait until each of these bodies has arrived, and return all messages so far."""
        wanted = set(bodies)
        return await self.until(lambda messages: wanted <= {message.body for message in messages}, timeout)


async def until(done: Callable[[], bool], consumers: Sequence[PushConsumer], timeout: float = 90) -> None:
    """Wait until a condition on the messages of these consumers holds; it is evaluated with each message."""
    news = asyncio.Event()
    for consumer in consumers:
        consumer.watchers.add(news)
    try:
        async with asyncio.timeout(timeout):
            while not done():
                news.clear()
                await news.wait()
    except TimeoutError:
        got = "; ".join(
            f"{consumer.client.name} in {consumer.group} has {len(consumer.messages)} messages, "
            f"the last {consumer.messages[-2:]}"
            for consumer in consumers
        )
        raise TimeoutError(f"still waiting after {timeout:.0f} s: {got}") from None
    finally:
        for consumer in consumers:
            consumer.watchers.discard(news)


class Client:
    """One client library in a process of its own, used by many tests."""

    def __init__(self, name: str, command: list[str], directory: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.program = Program(name, command, directory, env or {}, self._event)
        self._consumers: dict[str, PushConsumer] = {}

    async def start(self) -> None:
        """Start the process."""
        await self.program.start()

    async def stop(self) -> None:
        """End the process."""
        await self.program.stop()

    @property
    def has_aborted_in_a_stop(self) -> bool:
        """Whether the process ended because librocketmq aborted it, as rarely happens when a consumer is stopped: the
        library interrupts its threads, and one of them does not expect that where it is."""
        return not self.program.running and "boost::thread_interrupted" in self.program.log.read_text()

    def _event(self, event: Json) -> None:
        self._consumers[event["consumer"]].take(Received.from_json(event["message"]))

    async def producer(
        self,
        nameserver: str,
        group: str | None = None,
        *,
        timeout_ms: int = 30_000,
        retries: int | None = None,
        compress_over: int | None = None,
        vip: bool | None = None,
        account: Account | None = None,
        trace_topic: str | None = None,
    ) -> Producer:
        """Start a producer. `account` signs its requests. `trace_topic`: a Java client sends its traces there.

        `timeout_ms`: for one send. The libraries' own 3 s are not enough for RocketMQ's broker on a busy machine.
        """
        producer = Producer(self, _handle("p"))
        await self.program.call(
            "producer_start",
            handle=producer.handle,
            nameserver=nameserver,
            group=group or unique("pg"),
            timeout_ms=timeout_ms,
            retries=retries,
            compress_over=compress_over,
            vip=vip,
            trace_topic=trace_topic,
            **_keys(account),
        )
        return producer

    async def consumer(
        self,
        nameserver: str,
        group: str,
        topics: str | Mapping[str, str],
        *,
        model: Literal["cluster", "broadcast"] = "cluster",
        orderly: bool = False,
        begin: str = "first",
        fail_first: int = 0,
        max_reconsume_times: int | None = None,
        property_names: Sequence[str] = (),
        handle: str | None = None,
        account: Account | None = None,
        trace_topic: str | None = None,
    ) -> PushConsumer:
        """Start a push consumer of a topic, or of topics with a tag expression each.

        `begin`: where a new group begins, "first" or "last"; with Java also "time:" and a local time, yyyyMMddHHmmss.

        It answers "later" to a message until that has been redelivered `fail_first` times. `property_names`: the
        properties that matter, for the client that cannot list them. `handle`: the instance name, for a consumer that
        must come back under the same id. `trace_topic`: a Java client sends its traces there.
        """
        subscriptions = {topics: "*"} if isinstance(topics, str) else topics
        consumer = PushConsumer(self, handle or _handle("c"), group)
        self._consumers[consumer.handle] = consumer
        await self.program.call(
            "consumer_start",
            handle=consumer.handle,
            nameserver=nameserver,
            group=group,
            subscriptions=[{"topic": topic, "expression": text} for topic, text in subscriptions.items()],
            model=model,
            orderly=orderly,
            fail_first=fail_first,
            max_reconsume_times=max_reconsume_times,
            property_names=list(property_names),
            begin=begin,
            trace_topic=trace_topic,
            **_keys(account),
        )
        return consumer

    async def pull(
        self,
        nameserver: str,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        group: str = "peer_pull",
        expression: str = "*",
        count: int = 32,
        property_names: Sequence[str] = (),
    ) -> Pulled:
        """Read one queue from an offset on, once.

        librocketmq has no error for a failed pull: it returns BROKER_TIMEOUT, with meaningless offsets.
        """
        for _ in range(5):
            reply = await self.program.call(
                "pull",
                nameserver=nameserver,
                group=group,
                topic=topic,
                queue_id=queue_id,
                offset=offset,
                expression=expression,
                count=count,
                property_names=list(property_names),
            )
            if reply["status"] != "BROKER_TIMEOUT":
                break
        messages = [Received.from_json(message) for message in reply.pop("messages")]
        return Pulled(messages=messages, **reply)

    async def pull_all(
        self, nameserver: str, topic: str, queue_id: int, offset: int = 0, *, expression: str = "*"
    ) -> list[Received]:
        """Read one queue from an offset to its end (and not beyond: some libraries then wait for new messages)."""
        messages: list[Received] = []
        while True:
            pulled = await self.pull(nameserver, topic, queue_id, offset, expression=expression)
            messages += pulled.messages
            if pulled.next_offset >= pulled.max_offset or pulled.next_offset == offset:
                return messages
            offset = pulled.next_offset

    async def consumer_offset(self, nameserver: str, group: str, topic: str, queue_id: int) -> int:
        """Return the offset that the broker has stored for a group, -1 if none."""
        reply = await self.program.call(
            "consumer_offset", nameserver=nameserver, group=group, topic=topic, queue_id=queue_id
        )
        return int(reply["offset"])

    async def queues(self, nameserver: str, topic: str) -> list[int]:
        """Return the ids of a topic's queues in the library's route."""
        reply = await self.program.call("queues", nameserver=nameserver, topic=topic)
        ids: list[int] = reply["queues"]
        return ids


class JavaClient(Client):
    """The Java client, which also has the admin API and the offset queries."""

    def admin(self, nameserver: str, account: Account | None = None) -> Admin:
        """Return the admin API of the brokers that a name server knows. `account` signs its requests."""

        async def call(name: str, **fields: Any) -> Json:
            return await self.program.call("admin", call=name, nameserver=nameserver, **_keys(account), **fields)

        return Admin(call)

    async def remoting(self, tls_file: Path | None) -> Remoting:
        """Start a remoting client of the library, with TLS by the properties in a file, None: without TLS."""
        remoting = Remoting(self, _handle("r"))
        await self.program.call(
            "remoting_start", handle=remoting.handle, tls=tls_file is not None, tls_file=str(tls_file or "")
        )
        return remoting

    async def transaction_producer(self, nameserver: str, group: str | None = None) -> TransactionProducer:
        """Start a transactional producer."""
        producer = TransactionProducer(self, _handle("t"))
        await self.program.call(
            "transactions_start", handle=producer.handle, nameserver=nameserver, group=group or unique("tg")
        )
        return producer

    async def offset(
        self,
        nameserver: str,
        topic: str,
        queue_id: int,
        which: Literal["min", "max", "earliest", "search"],
        timestamp: int | None = None,
    ) -> int:
        """Return an offset of a queue, or the store time of its earliest message."""
        reply = await self.program.call(
            "offset", nameserver=nameserver, topic=topic, queue_id=queue_id, which=which, timestamp=timestamp
        )
        return int(reply["offset"])

    async def lite_pull(
        self, nameserver: str, group: str, topic: str, count: int, *, expression: str = "*", timeout: float = 60
    ) -> list[Received]:
        """Receive a number of messages with the lite pull consumer, commit, and leave."""
        reply = await self.program.call(
            "lite_pull",
            nameserver=nameserver,
            group=group,
            topic=topic,
            expression=expression,
            count=count,
            timeout_ms=int(timeout * 1000),
            timeout=timeout + 10,
        )
        return [Received.from_json(message) for message in reply["messages"]]


def make_client(name: str, directory: Path) -> Client:
    """Return a client by its name in capabilities.CLIENTS, not started; `directory` is its home."""
    if name == "go":
        return Client(
            name,
            [str(install.go_program().require() / "peer")],
            directory,
            {"rocketmq.client.localOffsetStoreDir": str(directory / "offsets")},
        )
    if name == "cpp":
        site = install.cpp_library().require() / "site"
        return Client(
            name, [sys.executable, str(install.HERE / "cpp" / "program.py")], directory, {"PYTHONPATH": str(site)}
        )
    if name in CLIENTS:
        return java_client(name.removeprefix("java-"), directory)
    raise ValueError(f"no client {name}; there are {', '.join(CLIENTS)}")


def java_client(version: str, directory: Path, options: tuple[str, ...] = ()) -> JavaClient:
    """Return the Java client of one version, not started. `options`: further ones of its JVM."""
    program = install.java_program(version).require() / "program.jar"
    jars = install.apache(version).require() / "lib"
    command = [
        tools.find("java"),
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        *class_archive(version, "client"),
        "-Xmx512m",
        f"-Duser.home={directory}",
        f"-Drocketmq.client.logRoot={directory / 'logs'}",
        "-Drocketmq.client.logLevel=WARN",
        f"-Drocketmq.client.localOffsetStoreDir={directory / 'offsets'}",
        # A missing queue or lock is asked for again after one second instead of twenty.
        "-Drocketmq.client.rebalance.waitInterval=1000",
        "-Drocketmq.client.rebalance.minInterval=200",
        # By default the library closes its connection to a broker that does not answer a heartbeat within 3 s, and
        # sends again the messages in flight there: on a busy machine, they would be in the store twice.
        "-Dcom.rocketmq.remoting.client.closeSocketIfTimeout=false",
        *options,
        "-cp",
        f"{program}:{jars}/*",
        "duemq.peer.Main",
    ]
    return JavaClient(f"java-{version}", command, directory)
