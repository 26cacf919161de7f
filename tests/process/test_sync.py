"""The client without async, against a broker in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from duemq import ArgumentError, ClosedError, ConnectError, Message, sync
from duemq.messages import ChangeResult
from duemq.testing import BrokerClock, TestBroker


def test_send_receive_look_and_change(duemq_broker: TestBroker, duemq_clock: BrokerClock) -> None:
    address = duemq_broker.nameserver
    with (
        sync.Producer(address) as producer,
        sync.PushConsumer("g", nameserver=address) as consumer,
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


def test_handlers_are_ordinary_functions_in_threads(duemq_broker: TestBroker) -> None:
    address = duemq_broker.nameserver
    together, seen, lock = threading.Barrier(3), set[tuple[bytes, str]](), threading.Lock()

    def handle(message: sync.ReceivedMessage) -> None:
        together.wait(timeout=30)
        with lock:
            seen.add((message.body, threading.current_thread().name))

    handling = sync.PushConsumer("g", handle, nameserver=address, from_="first", concurrency=3)
    with sync.Producer(address) as producer, handling as consumer:
        consumer.subscribe("t")
        for body in (b"1", b"2", b"3"):
            producer.send("t", body)
        while len(seen) < 3:
            time.sleep(0.01)
    assert {body for body, _ in seen} == {b"1", b"2", b"3"}
    assert len({thread for _, thread in seen}) == 3
    with pytest.raises(ArgumentError, match="no function"):
        sync.PushConsumer("g", "handler")  # type: ignore[arg-type]


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
