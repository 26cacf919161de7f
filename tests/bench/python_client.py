"""A program that sends with duemq's producer, in a process of its own, and prints what it measured as a line of JSON.

    python -m tests.bench.python_client HOST:PORT COUNT many|each|single

`many`: send_many. `each`: send_each, which keeps no results, with the growth of this process's memory. `single`: one
`send` for each message, IN_FLIGHT of them at a time. Messages of 1 KiB; the loop is asyncio's own, as most users have
it. A warm-up of a fifth of the messages comes before; the results are checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from duemq import Message, Producer
from tests.bench.measure import memory

TOPIC = "python"
BODY = b"x" * 1024
IN_FLIGHT = 256


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


async def main(nameserver: str, count: int, kind: str) -> None:
    work = {"many": many, "each": each, "single": single}[kind]
    async with Producer(nameserver) as producer:
        await work(producer, max(1, count // 5))
        before = memory(os.getpid()).anonymous
        cpu, begun = time.process_time(), time.perf_counter()
        await work(producer, count)
        seconds = time.perf_counter() - begun
        figures = {
            "per_second": count / seconds,
            "cpu_us": (time.process_time() - cpu) / count * 1e6,
            "growth_mib": memory(os.getpid()).anonymous - before,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
