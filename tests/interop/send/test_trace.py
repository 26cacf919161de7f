"""Message traces of Java's clients: what producers and consumers did with messages, sent to a topic of its own."""

import time
from collections.abc import Sequence

import pytest

from tests.interop.environment import ClientPool
from tests.interop.support import not_on
from tests.peers.brokers.broker import Broker
from tests.peers.clients import unique
from tests.peers.messages import Outgoing, Received


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
async def test_consumers_send_traces_of_plain_and_delayed_messages(
    broker: Broker, topic: str, clients: ClientPool, version: str
) -> None:
    """A 5.x consumer sends no trace of a message whose record does not tell its region."""
    if version == "5.3.3":
        not_on(broker, "apache-4.9.7", "its records have no region")
    java = await clients.java(version)
    traces = unique("traces")
    due = str(time.time_ns() // 1_000_000 + 1500)
    messages = [Outgoing(b"plain"), Outgoing(b"level", level=1)]
    if broker.kind != "apache-4.9.7":
        messages.append(Outgoing(b"timer", properties={"TIMER_DELIVER_MS": due}))
    nameserver = broker.nameserver
    async with (
        await java.producer(nameserver, trace_topic=traces) as producer,
        await java.consumer(nameserver, unique("group"), topic, trace_topic=traces) as consumer,
    ):
        results = await producer.send(topic, messages)
        await consumer.receive(len(messages))
        ids = {result.msg_id for result in results}
        wanted = {(kind, message_id) for kind in ("Pub", "SubBefore") for message_id in ids}
        async with await java.consumer(nameserver, unique("group"), traces) as reader:
            await reader.until(lambda received: wanted <= _traced(received, ids), 90)


def _traced(received: Sequence[Received], ids: set[str | None]) -> set[tuple[str, str]]:
    """Return the kinds of traces, each with the id of a message."""
    texts = (text for message in received for text in message.body.decode().split("\x02"))
    parts = [text.split("\x01") for text in texts]
    return {(fields[0], field) for fields in parts for field in fields if field in ids}
