"""What a consumer without async can do with its queues and messages, against a broker in this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from duemq import ArgumentError, DelayError, MessageQueue, sync
from duemq.testing import BrokerClock, TestBroker


def test_a_consumer_seeks_pauses_retries_and_gives_up(duemq_broker: TestBroker, duemq_clock: BrokerClock) -> None:
    address = duemq_broker.nameserver
    told: list[tuple[str, int]] = []
    assigned = threading.Event()

    def on_assigned(queues: frozenset[MessageQueue]) -> None:
        told.append(("assigned", len(queues)))
        assert consumer.assignment >= queues  # its methods may be called
        assigned.set()

    consumer = sync.Consumer(
        "g",
        nameserver=address,
        ordered=True,
        on_assigned=on_assigned,
        on_revoked=lambda queues: told.append(("revoked", len(queues))),
    )
    with sync.Producer(address) as producer, consumer:
        for body in (b"1", b"2"):
            producer.send("t", body, sharding_key="k")
        consumer.subscribe("t")
        assert assigned.wait(30)
        consumer.seek("t", "first")
        first = consumer.receive(timeout=30)
        assert (first.body, first.reconsume_times) == (b"1", 0)
        first.retry(delay=0)
        first = consumer.receive(timeout=30)
        assert (first.body, first.reconsume_times) == (b"1", 1)
        consumer.pause("t")
        first.ack()
        with pytest.raises(TimeoutError):
            consumer.receive(timeout=0.05)
        consumer.resume()
        second = consumer.receive(timeout=30)
        assert second.body == b"2"
        second.dead_letter()
    assert told == [("assigned", 4), ("revoked", 4)]
    with sync.Consumer("undertaker", nameserver=address, from_="first") as undertaker:
        undertaker.subscribe("%DLQ%g")
        assert undertaker.receive(timeout=30).body == b"2"


def test_a_retry_after_a_delay_is_never_early(duemq_broker: TestBroker, duemq_clock: BrokerClock) -> None:
    address = duemq_broker.nameserver
    with (
        sync.Producer(address) as producer,
        sync.Consumer("g", nameserver=address, from_="first") as consumer,
    ):
        consumer.subscribe("t")
        producer.send("t", b"x")
        message = consumer.receive(timeout=30)
        with pytest.raises(DelayError, match="longest delay level is 2h"):
            message.retry(delay="3h")
        message.retry(delay="70s")  # the levels are 1m and 2m
        duemq_clock.advance("119s")
        with pytest.raises(TimeoutError):
            consumer.receive(timeout=0.1)
        duemq_clock.advance("1s")
        again = consumer.receive(timeout=30)
        assert (again.body, again.reconsume_times) == (b"x", 1)
        again.ack()


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked"])
def test_a_listener_may_close_its_consumer(duemq_broker: TestBroker, name: str) -> None:
    closed = threading.Event()

    def closes(_: frozenset[MessageQueue]) -> None:
        consumer.close()
        closed.set()

    with sync.Producer(duemq_broker.nameserver) as producer:
        producer.send("t", b"x")
    assigned = threading.Event()
    listeners: dict[str, Any] = {"on_assigned": lambda _: assigned.set(), name: closes}
    consumer = sync.Consumer("closing", nameserver=duemq_broker.nameserver, close_timeout=600, **listeners)
    consumer.subscribe("t")
    consumer.start()
    if name == "on_revoked":
        assert assigned.wait(30)
        consumer.close()
    assert closed.wait(30)


def test_listeners_are_functions() -> None:
    with pytest.raises(ArgumentError, match="on_revoked"):
        sync.Consumer("g", on_revoked="x")  # type: ignore[arg-type]
