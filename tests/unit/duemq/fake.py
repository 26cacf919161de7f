"""A broker and its name server in one, in memory, for tests of the client, which may script its answers.

It speaks the wire protocol over a real socket, built on protocol/, and has only the features that the tests need. `on`
replaces its answer to a request code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.frames import codec, fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, FrameReader
from duemq.protocol.records import batch, properties, record
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.requests.bodies import BrokerData, HeartbeatData, QueueData, TopicConfig, TopicRoute, decode
from duemq.protocol.requests.headers import (
    Header,
    OffsetResponse,
    PullMessageResponse,
    SendMessageResponse,
    SendMessageV2,
    decode_ext,
)

LEVELS = "messageDelayLevel=1s 5s 10s 30s 1m 2m\n"
NOW_MS = 1_800_000_000_000
HOST = pack_host("127.0.0.1", 10911)

Answer = Command | None
Handler = Callable[["Request"], Answer | Awaitable[Answer]]


@dataclass
class Request:
    """One request as it arrived."""

    command: Command
    codec: int
    connection: FakeConnection

    @property
    def code(self) -> int:
        return self.command.code

    @property
    def ext(self) -> dict[str, str]:
        return self.command.ext

    @property
    def body(self) -> bytes:
        return bytes(self.command.body)

    def send_header(self) -> SendMessageV2:
        return decode_ext(SendMessageV2, self.ext)

    def properties(self) -> dict[str, str]:
        return properties.parse(self.send_header().properties or "")


@dataclass
class FakeBroker:
    """See the module. `topics`: the number of queues of each topic; `brokers`: those in its routes."""

    name: str = "broker-a"
    language: str = "JAVA"
    version: int = 407
    config: str = LEVELS
    auto_create: bool = True
    topics: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    queues: dict[tuple[str, int], list[StoredMessage]] = field(default_factory=dict)
    offsets: dict[tuple[str, str, int], int] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    locks: dict[tuple[str, str, int], str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    overrides: dict[int, Handler] = field(default_factory=dict)
    connections: list[FakeConnection] = field(default_factory=list)
    brokers: list[FakeBroker] = field(default_factory=list)
    physical_offset: int = 0
    port: int = 0

    async def __aenter__(self) -> Self:
        self.changed = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: FakeConnection(self), "127.0.0.1", self.port)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.brokers = self.brokers or [self]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        for connection in self.connections:
            connection.transport.abort()
        await self.server.wait_closed()

    # --- for tests ------------------------------------------------------------------------------------------------

    def on(self, code: RequestCode, *answers: Command | Handler | None) -> None:
        """Answer a request code with these in turn, the last one from then on. None: no answer."""
        script = list(answers)

        def handler(request: Request) -> Answer | Awaitable[Answer]:
            answer = script.pop(0) if len(script) > 1 else script[0]
            return answer(request) if callable(answer) else answer

        self.overrides[code] = handler

    def requests_of(self, code: RequestCode) -> list[Request]:
        return [request for request in self.requests if request.code == code]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a request has made the condition true."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    async def until_requests(self, code: RequestCode, count: int = 1) -> list[Request]:
        await self.until(lambda: len(self.requests_of(code)) >= count)
        return self.requests_of(code)

    def notify(self, code: RequestCode, ext: dict[str, str], *, oneway: bool = True, codec: int = JSON) -> None:
        """Send a request to all clients."""
        for connection in self.connections:
            command = Command(code=code, opaque=9, ext=ext, flag=FLAG_ONEWAY if oneway else 0, language="JAVA")
            connection.send(command, codec)

    def cut(self) -> None:
        """Break all connections."""
        for connection in self.connections:
            connection.transport.abort()
        self.connections.clear()

    async def store(
        self, topic: str, *bodies: bytes, queue_id: int = 0, text: str = "", reconsume_times: int = 0, sys_flag: int = 0
    ) -> None:
        """Put messages into a queue and wake the waiting pulls."""
        for body in bodies:
            self.append(topic, queue_id, body, text, reconsume_times, sys_flag)
        async with self.changed:
            self.changed.notify_all()

    def append(
        self, topic: str, queue_id: int, body: bytes, text: str, reconsume_times: int = 0, sys_flag: int = 0
    ) -> StoredMessage:
        self.topics.setdefault(topic, 4)
        queue = self.queues.setdefault((topic, queue_id), [])
        message = StoredMessage(
            queue_id=queue_id,
            queue_offset=len(queue),
            physical_offset=self.physical_offset,
            sys_flag=sys_flag,
            born_timestamp=NOW_MS,
            born_host=HOST,
            store_timestamp=NOW_MS + 1,
            store_host=HOST,
            reconsume_times=reconsume_times,
            body=body,
            topic=topic,
            properties_text=text,
        )
        self.physical_offset += len(record.encode(message))
        queue.append(message)
        return message

    # --- the broker's work ----------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> None:
        """Answer one request and wake the test's waits."""
        self.requests.append(request)
        async with self.changed:
            self.changed.notify_all()
        override = self.overrides.get(request.code)
        answer = override(request) if override else HANDLERS[request.code](self, request)
        if answer is not None and not isinstance(answer, Command):
            answer = await answer
        if answer is not None and not request.command.is_oneway:
            request.connection.answer(request, answer)
        async with self.changed:
            self.changed.notify_all()

    def route(self, request: Request) -> Answer:
        topic = request.ext["topic"]
        queues = self.topics.get(topic, 8 if topic == "TBW102" and self.auto_create else 0)
        if not queues:
            return failure(ResponseCode.TOPIC_NOT_EXIST, f"No topic route info in name server for the topic: {topic}")
        route = TopicRoute(
            broker_datas=[BrokerData({0: broker.address}, broker.name, "cluster") for broker in self.brokers],
            queue_datas=[QueueData(broker.name, 6, queues, queues) for broker in self.brokers],
        )
        return success(body=route.to_json(strict=False))

    def heartbeat(self, request: Request) -> Answer:
        data = decode(request.body, HeartbeatData)
        if data.consumer_data_set and data.client_id not in self.members:
            self.members.append(data.client_id)
        return success()

    def unregister(self, request: Request) -> Answer:
        if request.ext["clientID"] in self.members:
            self.members.remove(request.ext["clientID"])
        return success()

    def list_members(self, request: Request) -> Answer:
        return success(body=fastjson.dumps({"consumerIdList": self.members}))

    def lock(self, request: Request) -> Answer:
        held = []
        for key, client, queue in locked(request):
            if self.locks.setdefault(key, client) == client:
                held.append(queue)
        return success(body=fastjson.dumps({"lockOKMQSet": held}))

    def unlock(self, request: Request) -> Answer:
        for key, client, _ in locked(request):
            if self.locks.get(key) == client:
                del self.locks[key]
        return success()

    def send(self, request: Request) -> Answer:
        header = request.send_header()
        stored = self.append(
            header.topic, header.queue_id, request.body, header.properties or "", sys_flag=header.sys_flag
        )
        return sent(stored.offset_message_id, header.queue_id, stored.queue_offset)

    def send_batch(self, request: Request) -> Answer:
        header = request.send_header()
        stored = [
            self.append(header.topic, header.queue_id, body, text) for _, body, text in batch.decode(request.body)
        ]
        ids = ",".join(message.offset_message_id for message in stored)
        return sent(ids, header.queue_id, stored[0].queue_offset)

    async def pull(self, request: Request) -> Answer:
        topic, queue_id = request.ext["topic"], int(request.ext["queueId"])
        begin, hold = int(request.ext["queueOffset"]), int(request.ext["sysFlag"]) & 2
        queue = self.queues.setdefault((topic, queue_id), [])
        if hold:
            async with self.changed:
                await self.changed.wait_for(lambda: len(queue) > begin)
        if begin > len(queue):
            return pulled(ResponseCode.PULL_OFFSET_MOVED, len(queue), len(queue))
        found = queue[begin : begin + 32]
        if not found:
            return pulled(ResponseCode.PULL_NOT_FOUND, begin, len(queue))
        return pulled(ResponseCode.SUCCESS, begin + len(found), len(queue), found)

    def query_offset(self, request: Request) -> Answer:
        offset = self.offsets.get(self.offset_key(request))
        if offset is None:
            return failure(
                ResponseCode.QUERY_NOT_FOUND, "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
            )
        return success(OffsetResponse(offset=offset))

    def update_offset(self, request: Request) -> Answer:
        self.offsets[self.offset_key(request)] = int(request.ext["commitOffset"])
        return success()

    def min_offset(self, _: Request) -> Answer:
        return success(OffsetResponse(offset=0))

    def max_offset(self, request: Request) -> Answer:
        queue = self.queues.get((request.ext["topic"], int(request.ext["queueId"])), [])
        return success(OffsetResponse(offset=len(queue)))

    def get_config(self, _: Request) -> Answer:
        return success(body=self.config.encode())

    def topic_config(self, request: Request) -> Answer:
        topic = request.ext["topic"]
        if topic not in self.topics:
            return failure(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        config = TopicConfig(topic, attributes=self.attributes.get(topic))
        return success(body=fastjson.dumps(config.to_json()))

    def just_succeed(self, _: Request) -> Answer:
        return success()

    @staticmethod
    def offset_key(request: Request) -> tuple[str, str, int]:
        return request.ext["consumerGroup"], request.ext["topic"], int(request.ext["queueId"])


HANDLERS: dict[int, Callable[[FakeBroker, Request], Answer | Awaitable[Answer]]] = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC: FakeBroker.route,
    RequestCode.HEART_BEAT: FakeBroker.heartbeat,
    RequestCode.UNREGISTER_CLIENT: FakeBroker.unregister,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: FakeBroker.list_members,
    RequestCode.LOCK_BATCH_MQ: FakeBroker.lock,
    RequestCode.UNLOCK_BATCH_MQ: FakeBroker.unlock,
    RequestCode.SEND_MESSAGE_V2: FakeBroker.send,
    RequestCode.SEND_BATCH_MESSAGE: FakeBroker.send_batch,
    RequestCode.PULL_MESSAGE: FakeBroker.pull,
    RequestCode.QUERY_CONSUMER_OFFSET: FakeBroker.query_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: FakeBroker.update_offset,
    RequestCode.GET_MIN_OFFSET: FakeBroker.min_offset,
    RequestCode.GET_MAX_OFFSET: FakeBroker.max_offset,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: FakeBroker.max_offset,
    RequestCode.CONSUMER_SEND_MSG_BACK: FakeBroker.just_succeed,
    RequestCode.GET_BROKER_CONFIG: FakeBroker.get_config,
    RequestCode.GET_TOPIC_CONFIG: FakeBroker.topic_config,
}


class FakeConnection(asyncio.Protocol):
    """A client's connection on the broker's side."""

    transport: asyncio.Transport

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.frames = FrameReader()
        self.responses: list[Command] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.broker.connections.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.broker.connections:
            self.broker.connections.remove(self)
        if self.broker.server.is_serving():  # else the loop may end before a task begins
            self.start(self.wake())

    def data_received(self, data: bytes) -> None:
        for frame in self.frames.receive_data(data):
            if frame[0] != JSON and self.broker.language == "JAVA":
                self.transport.abort()
                return
            command = codec.decode(frame)
            if command.is_response:
                self.responses.append(command)
                self.start(self.wake())
            else:
                self.start(self.broker.handle(Request(command, frame[0], self)))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.broker.tasks.add(task)
        task.add_done_callback(self.broker.tasks.discard)

    async def wake(self) -> None:
        async with self.broker.changed:
            self.broker.changed.notify_all()

    def answer(self, request: Request, answer: Command) -> None:
        answer.opaque = request.command.opaque
        answer.flag = FLAG_RESPONSE
        answer.language = self.broker.language
        answer.version = self.broker.version
        self.send(answer, request.codec)

    def send(self, command: Command, header_codec: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(codec.encode(command, header_codec))


def locked(request: Request) -> list[tuple[tuple[str, str, int], str, dict[str, Any]]]:
    """Of each queue of a request for locks: group, topic and queue id; the client; and the queue as it was written."""
    body = fastjson.loads(request.body)
    group, client = body["consumerGroup"], body["clientId"]
    return [((group, each["topic"], each["queueId"]), client, each) for each in body["mqSet"]]


def success(header: Header | None = None, body: bytes = b"") -> Command:
    return Command(code=ResponseCode.SUCCESS, ext=header.to_ext() if header else {}, body=body)


def failure(code: int, remark: str = "no") -> Command:
    return Command(code=code, remark=remark)


def sent(message_id: str, queue_id: int, queue_offset: int, code: int = ResponseCode.SUCCESS) -> Command:
    header = SendMessageResponse(msg_id=message_id, queue_id=queue_id, queue_offset=queue_offset)
    return Command(code=code, ext=header.to_ext())


def pulled(
    code: int, next_offset: int, end: int, messages: Sequence[StoredMessage] = (), broker_id: int = 0
) -> Command:
    header = PullMessageResponse(
        suggest_which_broker_id=broker_id, next_begin_offset=next_offset, min_offset=0, max_offset=end
    )
    return Command(code=code, ext=header.to_ext(), body=b"".join(record.encode(message) for message in messages))
