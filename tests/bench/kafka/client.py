"""The tasks of `python_client` with aiokafka, an asyncio client whose API has the same shape, and Kafka's own broker. A
process of its own prints what it measured as a line of JSON.

    python -m tests.bench.kafka.client HOST:PORT COUNT single|many|iterate|take

`single`: `send_and_wait` for each message, IN_FLIGHT of them at a time. `many`: `send`, and the futures are awaited in
the end. `iterate`: `async for` over a backlog of COUNT messages, which this program has sent before; `take`: `getmany`,
with a commit after each. A warm-up of a fifth of the messages comes before; the results are checked.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from tests.bench.python_client import BODY, IN_FLIGHT, TAKEN, Measurement, Received


async def _single(producer: AIOKafkaProducer, topic: str, count: int) -> dict[int, int]:
    left, ends = count, dict[int, int]()

    async def send() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            _note_end(ends, await producer.send_and_wait(topic, BODY))

    await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))
    return ends


async def _many(producer: AIOKafkaProducer, topic: str, count: int) -> dict[int, int]:
    ends = dict[int, int]()
    for stored in await asyncio.gather(*[await producer.send(topic, BODY) for _ in range(count)]):
        _note_end(ends, stored)
    return ends


def _note_end(ends: dict[int, int], stored: object) -> None:
    partition, offset = stored.partition, stored.offset  # type: ignore[attr-defined]
    ends[partition] = max(ends.get(partition, 0), offset + 1)


async def _send(address: str, count: int, kind: str) -> dict[str, float]:
    work = {"single": _single, "many": _many}[kind]
    async with AIOKafkaProducer(bootstrap_servers=address) as producer:
        warm = await work(producer, "python", max(1, count // 5))
        measurement = Measurement()
        ends = await work(producer, "python", count)
        figures = measurement.figures(count)
    if sum(ends.values()) != count + sum(warm.values()):
        raise RuntimeError(f"the partitions end at {ends}, and {count} messages were sent behind {warm}")
    return figures


async def _receive(address: str, count: int, kind: str) -> dict[str, float]:
    topic, received = f"python-{kind}", Received(count)
    async with AIOKafkaProducer(bootstrap_servers=address) as producer:
        ends = await _many(producer, topic, count)

    def note(record: ConsumerRecord) -> None:
        received.note(record.partition, record.offset, record.value)

    options = {"group_id": f"readers-{kind}", "auto_offset_reset": "earliest", "bootstrap_servers": address}
    async with AIOKafkaConsumer(topic, **options) as consumer:
        if kind == "iterate":
            async for record in consumer:
                note(record)
                if received.is_all.is_set():
                    break
        while not received.is_all.is_set():
            for records in (await consumer.getmany(max_records=TAKEN, timeout_ms=1000)).values():
                for record in records:
                    note(record)
            await consumer.commit()
    received.check(ends)
    return received.figures


async def main(address: str, count: int, kind: str) -> None:
    measure = _receive if kind in ("iterate", "take") else _send
    print(json.dumps(await measure(address, count, kind)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
