"""A program that sends or receives with duemq's client, in a process of its own, and prints what it measured as a line
of JSON.

    python -m tests.bench.python_client HOST:PORT COUNT many|each|single|handle|iterate|take

`many`: send_many. `each`: send_each, which keeps no results, with the growth of this process's memory. `single`: one
`send` for each message, IN_FLIGHT of them at a time. Messages of 1 KiB; the loop is asyncio's own, as most users have
it. A warm-up of a fifth of the messages comes before; the results are checked.

`handle`: a consumer with a handler takes a backlog of COUNT messages, which this program has sent before; `iterate` and
`take`: one without a handler does, with `async for` or receive_many, and ack. The first fifth is the warm-up. Each
message has to come once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from duemq import Consumer, Message, Producer, ReceivedMessage
from tests.bench.measure import memory

TOPIC = "python"
BODY = b"x" * 1024
IN_FLIGHT = 256
TAKEN = 256
"""Messages that `take` asks for at a time."""


async def many(producer: Producer, count: int) -> None:
    results = await producer.send_many(Message(TOPIC, BODY) for _ in range(count))
    if len({result.message_id for result in results}) != count:
        raise RuntimeError(f"{len(results)} results for {count} messages")


async def each(producer: Producer, count: int) -> None:
    stored = 0
    async for outcome in producer.send_each(Message(TOPIC, BODY) for _ in range(count)):
        stored += outcome.error is None
    if stored != count:
        raise RuntimeError(f"{stored} of {count} messages are stored")


async def single(producer: Producer, count: int) -> None:
    left = count

    async def send() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await producer.send(TOPIC, BODY)

    await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))


class Measurement:
    """What a process took since the start of the measurement."""

    def __init__(self) -> None:
        self._memory = memory(os.getpid()).anonymous
        self._cpu, self._begun = time.process_time(), time.perf_counter()

    def figures(self, count: int) -> dict[str, float]:
        """Figures for `count` messages."""
        seconds = time.perf_counter() - self._begun
        return {
            "per_second": count / seconds,
            "cpu_us": (time.process_time() - self._cpu) / count * 1e6,
            "growth_mib": memory(os.getpid()).anonymous - self._memory,
        }


class Received:
    """Counts messages, the first fifth of which are the warm-up."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._warm = count // 5
        self._seen = 0
        self._offsets: dict[int, int] = {}
        self._measurement: Measurement | None = None
        self.figures: dict[str, float] = {}
        self.is_all = asyncio.Event()

    def note(self, queue_id: int, queue_offset: int, body: bytes) -> None:
        """Count a message."""
        self._seen += 1
        self._offsets[queue_id] = self._offsets.get(queue_id, 0) + queue_offset + 1
        if len(body) != len(BODY):
            raise RuntimeError(f"a body of {len(body)} bytes")
        if self._seen == self._warm:
            self._measurement = Measurement()
        if self._seen == self._count and self._measurement is not None:
            self.figures = self._measurement.figures(self._count - self._warm)
            self.is_all.set()

    def check(self, ends: dict[int, int]) -> None:
        """Compare with the ends of the queues, by queue id: each message came once if the sums of the offsets are
        right."""
        expected = {queue_id: end * (end + 1) // 2 for queue_id, end in ends.items() if end}
        if self._offsets != expected:
            raise RuntimeError(f"sums of offsets {self._offsets}, and not {expected}")


async def handle(consumer: Consumer, received: Received) -> None:
    await received.is_all.wait()


async def iterate(consumer: Consumer, received: Received) -> None:
    async for message in consumer:
        received.note(message.queue.queue_id, message.queue_offset, message.body)
        await message.ack()
        if received.is_all.is_set():
            break


async def take(consumer: Consumer, received: Received) -> None:
    while not received.is_all.is_set():
        for message in await consumer.receive_many(TAKEN):
            received.note(message.queue.queue_id, message.queue_offset, message.body)
            await message.ack()


_RECEIVE = {"handle": handle, "iterate": iterate, "take": take}


async def receive(nameserver: str, count: int, kind: str) -> dict[str, float]:
    received = Received(count)

    async def on_message(message: ReceivedMessage) -> None:
        received.note(message.queue.queue_id, message.queue_offset, message.body)

    async with Producer(nameserver) as producer:
        results = await producer.send_many(Message(f"python-{kind}", BODY) for _ in range(count))
    ends: dict[int, int] = {}
    for result in results:
        ends[result.queue.queue_id] = max(ends.get(result.queue.queue_id, 0), result.queue_offset + 1)
    del results
    options: dict[str, Any] = {"nameserver": nameserver, "from_": "first"}
    consumer = Consumer(f"readers-{kind}", on_message if kind == "handle" else None, **options)
    consumer.subscribe(f"python-{kind}")
    async with consumer:
        await _RECEIVE[kind](consumer, received)
    received.check(ends)
    return received.figures


async def send(nameserver: str, count: int, kind: str) -> dict[str, float]:
    work = {"many": many, "each": each, "single": single}[kind]
    async with Producer(nameserver) as producer:
        await work(producer, max(1, count // 5))
        measurement = Measurement()
        await work(producer, count)
        return measurement.figures(count)


async def main(nameserver: str, count: int, kind: str) -> None:
    measure = receive if kind in _RECEIVE else send
    print(json.dumps(await measure(nameserver, count, kind)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
