"""RocketMQ and an MQTT connection as a test wants them, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from duemq.errors import ArgumentError, DueMQError
from duemq.messages import Message, MessageQueue, SendResult, SendStatus
from duemq.mqtt_bridge.rules.file import parse
from duemq.mqtt_bridge.rules.model import Rules
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import ServerLimits
from duemq.mqtt_bridge.session.packets import Ack, Cutter, Publish

QUEUE = 0
MANY_BYTES = 100_000


def rules(text: str, directory: Path, mqtt: str = "") -> Rules:
    """The rules of a file with these tables."""
    return parse(f'[mqtt]\nclient_id = "b"\n{mqtt}\n{text}', directory / "bridge.toml", {})


@lru_cache(4)
def _many_acks(data: bytes) -> tuple[Ack, ...]:
    """Decode acknowledgements; the same ones, of all packet ids, are sent in many tests."""
    return tuple(packets.decode_ack(first, body) for first, body, _ in Cutter(len(data)).feed(data))


class FakeSession:
    """A connection that keeps the packets which were sent over it."""

    def __init__(self, *, is_v5: bool = True, is_present: bool = True, limits: ServerLimits | None = None) -> None:
        self.is_v5 = is_v5
        self.is_present = is_present
        self.is_lost = False
        self.limits = limits or ServerLimits()
        self.sent: list[Publish | Ack] = []
        self.pauses: list[str] = []
        self.on_send: Callable[[], None] = lambda: None
        self._cutter = Cutter(1 << 24)
        self._changed = asyncio.Event()

    def send(self, data: bytes | bytearray) -> None:
        self.on_send()
        if len(data) > MANY_BYTES and data[0] & 0xF0 != packets.PUBLISH:
            self.sent += _many_acks(bytes(data))
            self._changed.set()
            return
        for first, body, _ in self._cutter.feed(bytes(data)):
            if first & 0xF0 == packets.PUBLISH:
                self.sent.append(packets.decode_publish(first, body, is_v5=self.is_v5))
            else:
                self.sent.append(packets.decode_ack(first, body))
        self._changed.set()

    def pause(self) -> None:
        self.pauses.append("pause")

    def resume(self) -> None:
        self.pauses.append("resume")

    async def drained(self) -> None:
        """Always."""

    async def until(self, count: int) -> list[Publish | Ack]:
        """Return the packets that were sent, as soon as there are `count`."""
        async with asyncio.timeout(10):
            while len(self.sent) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.sent

    def acks(self) -> list[tuple[int, int, int]]:
        """Return kind, packet id and reason of the packets that were sent, except messages."""
        return [(each.kind, each.packet_id, each.reason) for each in self.sent if isinstance(each, Ack)]


@dataclass
class FakeProducer:
    """Keeps messages. `failures` are raised by the next sends, each after or before the message was stored."""

    queues: int = 1
    failures: list[tuple[DueMQError, bool]] = field(default_factory=list)
    denied: dict[str, DueMQError] = field(default_factory=dict)
    """Errors of the question for the end of a queue, by topic."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    may_choose: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    on_send: Callable[[], None] = lambda: None
    status: SendStatus = SendStatus.SEND_OK
    """Of the sends."""
    ids: int = 0

    def __post_init__(self) -> None:
        self.may_go.set()
        self.may_choose.set()

    def new_message_id(self) -> str:
        self.ids += 1
        return f"ID{self.ids}"

    async def choose_queue(self, topic: str, sharding_key: str | None = None) -> MessageQueue:
        self.has_begun.set()
        await self.may_choose.wait()
        return MessageQueue(topic, "broker-a", QUEUE)

    async def end_offset(self, queue: MessageQueue) -> int:
        if queue.topic in self.denied:
            raise self.denied[queue.topic]
        return len(self.messages)

    async def stored(self, message_ids: Iterable[str], queue: MessageQueue, from_offset: int) -> dict[str, int]:
        self.calls.append("stored")
        wanted = set(message_ids)
        found = enumerate(self.messages)
        return {each["message_id"]: at for at, each in found if at >= from_offset and each["message_id"] in wanted}

    async def send_batch(self, messages: list[Message], **options: Any) -> list[SendResult]:
        self.calls.append("send_batch")
        stored = [
            {
                "topic": each.topic,
                "body": each.body,
                "message_id": each.message_id,
                "keys": each.keys,
                "properties": each.properties,
                **options,
            }
            for each in messages
        ]
        return await self._store(stored)

    async def send(self, topic: str, body: bytes, **options: Any) -> SendResult:
        self.calls.append("send")
        return (await self._store([{"topic": topic, "body": body, **options}]))[0]

    async def _store(self, stored: list[dict[str, Any]]) -> list[SendResult]:
        queue = stored[0].get("queue")
        if queue is not None and queue.topic != stored[0]["topic"]:
            raise ArgumentError("`queue` has to be of the topic")  # as the real one
        self.on_send()
        self.has_begun.set()
        await self.may_go.wait()
        error, is_stored = self.failures.pop(0) if self.failures else (None, True)
        if is_stored:
            self.messages += stored
        if error is not None:
            raise error
        queue = MessageQueue(stored[0]["topic"], "broker-a", QUEUE)
        begin = len(self.messages) - len(stored)
        return [SendResult(self.status, "id", "offset id", queue, begin + at) for at in range(len(stored))]

    @property
    def bodies(self) -> list[bytes]:
        return [each["body"] for each in self.messages]


class FakeRecaller:
    """Cancels messages, and knows the waiting ones."""

    def __init__(self, producer: FakeProducer) -> None:
        self._producer = producer
        self.cancelled: list[str] = []
        self.durable: list[bool | DueMQError] = []
        """The next answers to the question whether messages are durable; then they are."""

    async def cancel_key(self, topic: str, key: str) -> int:
        self._producer.calls.append("cancel")
        self.cancelled.append(key)
        return 1

    async def waits(self, topic: str, message_id: str) -> bool:
        self._producer.calls.append("waits")
        return message_id in self._producer.waiting

    async def is_durable(self, queue: MessageQueue) -> bool:
        self._producer.calls.append("is_durable")
        answer = self.durable.pop(0) if self.durable else True
        if isinstance(answer, DueMQError):
            raise answer
        return answer


CONNACK = "2003000000"
CONNACK_PRESENT = "2003010000"
CONNACK_311 = "20020000"


class Peer:
    """A broker: answers CONNECT with `connack`, SUBSCRIBE with `suback`, and does nothing else by itself, but that a
    packet of the kind `ends` ends the connection."""

    def __init__(self, connack: str, ends: int | None = None) -> None:
        self._connack = bytes.fromhex(connack)
        self._ends = ends
        self.suback: int | None = None
        """The QoS that it grants (None: the one that is asked for), or a code from 0x80 on to refuse."""
        self.answers_subscribe = True
        self.received: list[tuple[int, bytes]] = []
        self.changed = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        cutter = packets.Cutter(1 << 28)
        while data := await reader.read(65_536):
            for first, body, _ in cutter.feed(data):
                self.received.append((first, body))
                if first & 0xF0 == self._ends:
                    writer.transport.abort()
                elif first & 0xF0 == 0x10:
                    writer.write(self._connack)
                elif first & 0xF0 == 0x80 and self.answers_subscribe:
                    is_v5 = self.received[0][1][6] == 5
                    answer = b"\x90\x04" + body[:2] + b"\0" if is_v5 else b"\x90\x03" + body[:2]
                    writer.write(answer + bytes((body[-1] & 3 if self.suback is None else self.suback,)))
            self.changed.set()
        writer.close()

    async def until(self, kind: int, count: int = 1) -> list[bytes]:
        """Return the bodies of the packets of a kind, as soon as there are `count`."""
        return await self._until(lambda first, _: first & 0xF0 == kind, count)

    async def until_carried(self, count: int) -> list[bytes]:
        """Return the bodies of the messages that are not the bridge's reports, as soon as there are `count`."""
        return await self._until(
            lambda first, body: first & 0xF0 == packets.PUBLISH and not body[2:].startswith(b"duemq/bridge/"), count
        )

    async def _until(self, fits: Callable[[int, bytes], bool], count: int) -> list[bytes]:
        async with asyncio.timeout(10):
            while len(found := [body for first, body in self.received if fits(first, body)]) < count:
                self.changed.clear()
                await self.changed.wait()
        return found

    def send(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)


@asynccontextmanager
async def peer(connack: str = CONNACK, ends: int | None = None) -> AsyncIterator[Peer]:
    made = Peer(connack, ends)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        if made.writer is not None:
            made.writer.close()
