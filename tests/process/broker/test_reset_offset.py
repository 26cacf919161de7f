"""A broker process resets the offsets of a group while duemq's client is consuming."""

from __future__ import annotations

from pathlib import Path

from duemq import Consumer, Producer
from duemq._net.connection import connect
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import ResetOffset
from tests.peers.brokers.duemq import DuemqBroker


async def test_our_consumer_goes_back_when_an_administrator_says_so(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path, is_warm=True)
    await broker.start()
    consumer = Consumer("g", nameserver=broker.nameserver, from_="first")
    consumer.subscribe("demo")

    async def received(count: int) -> set[bytes]:
        found = set()
        for _ in range(count):
            message = await consumer.receive()
            await message.ack()
            found.add(message.body)
        return found

    sent = {b"%d" % number for number in range(8)}
    async with Producer(broker.nameserver) as producer:
        for body in sorted(sent):
            await producer.send("demo", body)
        async with consumer:
            assert await received(8) == sent
        consumer = Consumer("g", nameserver=broker.nameserver)
        consumer.subscribe("demo")
        async with consumer:
            await consumer.caught_up()
            admin = await connect(broker.address, codec="json", on_request=lambda command: None, timeout=3)
            header = ResetOffset("demo", "g", 0, is_force=True)
            answer = await admin.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header, timeout=3)
            assert answer.code == ResponseCode.SUCCESS, answer.remark
            assert await received(8) == sent
            admin.close()
            await admin.wait_closed()
    await broker.stop()
