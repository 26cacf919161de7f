"""Messages with a time of their own (RocketMQ 5): never early, at once when late, refused when too far.

Every client can send them, since they are only properties; the broker decides.
"""

import time

import pytest

from tests.interop.support import not_on
from tests.peers.broker import Broker
from tests.peers.clients import Client, JavaClient, unique
from tests.peers.errors import CallError
from tests.peers.messages import Outgoing

MESSAGE_ILLEGAL = 13
DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def _timers(target: str) -> None:
    not_on(target, "duemq", "there is no timer wheel yet: it refuses the properties")
    not_on(target, "apache-4.9.7", "timers came with 5.0: it ignores the properties and delivers at once")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def test_message_is_delivered_at_its_time_and_not_before(broker: Broker, topic: str, client: Client) -> None:
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        now = _now_ms()
        odd, whole = now + 1537, (now // 1000 + 3) * 1000
        # A delay counts from when the broker has the message; that is after now.
        due = {b"odd": odd, b"whole": whole, b"milliseconds": now + 1700, b"seconds": now + 2000}
        properties = {
            b"odd": {"TIMER_DELIVER_MS": str(odd)},
            b"whole": {"TIMER_DELIVER_MS": str(whole)},
            b"milliseconds": {"TIMER_DELAY_MS": "1700"},
            b"seconds": {"TIMER_DELAY_SEC": "2"},
        }
        await producer.send(topic, [Outgoing(body, tags="t", properties=properties[body]) for body in due])
        received = {message.body: message for message in await consumer.receive(len(due))}
    for body, at in due.items():
        assert received[body].store_time >= at
        assert received[body].topic == topic
        assert received[body].tags == "t"


async def test_time_that_has_passed_means_at_once(broker: Broker, topic: str, client: Client) -> None:
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        past = str(_now_ms() - 5000)
        await producer.send(topic, [Outgoing(b"late", properties={"TIMER_DELIVER_MS": past})])
        await consumer.receive(1)


async def test_level_wins_over_a_time(broker: Broker, topic: str, client: Client) -> None:
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        tomorrow = str(_now_ms() + DAY_MS)
        await producer.send(topic, [Outgoing(b"soon", level=1, properties={"TIMER_DELIVER_MS": tomorrow})])
        await consumer.receive(1)


async def test_time_beyond_the_longest_delay_is_refused(broker: Broker, topic: str, java: JavaClient) -> None:
    """timerMaxDelaySec is three days in RocketMQ; a broker with a longer horizon says so in its settings."""
    settings = await java.admin(broker.nameserver).broker_config(broker.address)
    beyond = _now_ms() + int(settings["timerMaxDelaySec"]) * 1000 + DAY_MS
    async with await java.producer(broker.nameserver, retries=0) as producer:
        (result,) = await producer.send(
            topic, [Outgoing(b"far", properties={"TIMER_DELIVER_MS": str(beyond)})], check=False
        )
    assert isinstance(result.error, CallError)
    assert result.error.code == MESSAGE_ILLEGAL
