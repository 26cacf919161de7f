"""The client without async, against a broker in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from duemq import ArgumentError, ClosedError, ConnectError, Message, SendManyError, sync
from duemq.pending import ChangeResult
from duemq.testing import BrokerClock, TestBroker


def test_send_receive_look_and_change(duemq_broker: TestBroker, duemq_clock: BrokerClock) -> None:
    address = duemq_broker.nameserver
    with (
        sync.Producer(address) as producer,
        sync.Consumer("g", nameserver=address) as consumer,
        sync.Admin(address) as admin,
    ):
        consumer.subscribe("t")
        sent = producer.send("t", b"later", delay="2h", keys="7")
        producer.send_batch([Message("t", "a"), Message("t", "b")])
        for _ in range(2):
            message = consumer.receive(timeout=30)
            assert message.body in (b"a", b"b")
            message.ack()
        with pytest.raises(TimeoutError):
            consumer.receive(timeout=0.05)
        assert [each.offset_message_id for each in admin.pending("t")] == [sent.offset_message_id]
        other = producer.send(Message("t", b"not at all", delay="2h"))
        assert producer.cancel(str(other.handle)).result is ChangeResult.CANCELLED
        assert admin.cancel(other.handle).result is ChangeResult.ALREADY_CANCELLED
        assert admin.count(topic="t") == 1
        changed = admin.reschedule(topic="t", key="7", delay="1h")
        assert [each.result for each in changed.messages] == [ChangeResult.RESCHEDULED]
        duemq_clock.advance("1h")
        (message,) = consumer.receive_many(10, timeout=30)
        assert (message.body, message.keys, message.topic) == (b"later", ("7",), "t")
        message.retry(level=1)
        duemq_clock.advance("10s")
        again = consumer.receive(timeout=30)
        assert again.body == b"later"
        again.ack()
        consumer.caught_up()
        consumer.commit()
    with pytest.raises(ClosedError):
        consumer.receive()
    with pytest.raises(ClosedError):
        producer.send("t", b"x")
    assert list(consumer) == []


def test_many_are_sent_from_a_source_in_the_callers_thread(duemq_broker: TestBroker) -> None:
    caller = threading.current_thread()
    given = 0

    def source(count: int) -> Iterator[Message]:
        nonlocal given
        for given in range(1, count + 1):
            assert threading.current_thread() is caller
            yield Message("t", f"{given}")

    with sync.Producer(duemq_broker.nameserver, max_in_flight=100) as producer:
        results = producer.send_many(source(5000))
        assert len({each.offset_message_id for each in results}) == 5000
        bodies = [outcome.message.body for outcome in producer.send_each(source(5000))]
        assert bodies == [f"{number}" for number in range(1, 5001)]
        for outcome in producer.send_each(source(1_000_000)):
            assert outcome.result is not None
            break
        assert given < 3000, "no more is taken than goes on its way"
        with pytest.raises(SendManyError) as caught:
            producer.send_many([Message("t", b"x"), Message("t", b"")])
        assert len(caught.value.stored) == len(caught.value.refused) == 1
        with pytest.raises(RuntimeError, match="the source"):
            producer.send_many(failing())
        with pytest.raises(RuntimeError, match="the source"):
            list(producer.send_each(failing()))
    with pytest.raises(ClosedError):
        producer.send_many(source(1_000_000))
    assert given < 3000


def failing() -> Iterator[Message]:
    yield Message("t", b"x")
    raise RuntimeError("the source")


def test_handlers_are_ordinary_functions_in_threads(duemq_broker: TestBroker) -> None:
    address = duemq_broker.nameserver
    together, seen, lock = threading.Barrier(3), set[tuple[bytes, str]](), threading.Lock()

    def handle(message: sync.ReceivedMessage) -> None:
        together.wait(timeout=30)
        with lock:
            seen.add((message.body, threading.current_thread().name))

    handling = sync.Consumer("g", handle, nameserver=address, from_="first", concurrency=3)
    with sync.Producer(address) as producer, handling as consumer:
        consumer.subscribe("t")
        for body in (b"1", b"2", b"3"):
            producer.send("t", body)
        while len(seen) < 3:
            time.sleep(0.01)
    assert {body for body, _ in seen} == {b"1", b"2", b"3"}
    assert len({thread for _, thread in seen}) == 3
    with pytest.raises(ArgumentError, match="no function"):
        sync.Consumer("g", "handler")  # type: ignore[arg-type]


def test_any_thread_and_any_loop_may_call(duemq_broker: TestBroker) -> None:
    with sync.Producer(duemq_broker.nameserver) as producer, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: producer.send("t", f"{number}"), range(200)))

        async def from_a_loop() -> None:
            producer.send("t", b"x")

        asyncio.run(from_a_loop())
    assert len({each.message_id for each in results}) == 200


def test_errors_are_those_of_the_client() -> None:
    with pytest.raises(ConnectError), sync.Producer("127.0.0.1:9"):
        pass


def test_a_forked_process_begins_anew(duemq_broker: TestBroker) -> None:
    program = f"""
import os
from duemq import sync
with sync.Producer({duemq_broker.nameserver!r}) as producer:
    producer.send("t", b"parent")
child = os.fork()
with sync.Producer({duemq_broker.nameserver!r}) as producer:
    producer.send("t", b"child" if child == 0 else b"parent")
if child:
    print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
