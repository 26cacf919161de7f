"""The client without async, against a broker in this process."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest

from duemq import (
    ArgumentError,
    ClosedError,
    ConnectError,
    ConsumerInterceptor,
    Message,
    ProducerInterceptor,
    SendManyError,
    sync,
)
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


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # interrupted before it could begin
def test_an_interrupt_of_a_source_leaves_the_event_loop_free(duemq_broker: TestBroker) -> None:
    """Ctrl-C may come at each line of the thread that gives messages; all others go on."""

    def interrupted(at: int) -> bool:
        """Send, and be interrupted at the event with this number, if there are as many."""
        events = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal events
            if not frame.f_code.co_filename.endswith(("/duemq/sync.py", "/threading.py")):
                return None
            events += frame.f_code.co_name != "send_each"
            if events == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        outcomes = producer.send_each(Message("t", b"x") for _ in range(3))
        sys.settrace(trace)
        try:
            for _ in outcomes:
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            outcomes.close()  # type: ignore[attr-defined]
        return False

    with sync.Producer(duemq_broker.nameserver) as producer:
        producer.send("t", b"x")
        number = next(number for number in itertools.count(1) if not interrupted(number))
        assert number > 10
        producer.send("t", b"y", timeout=30)


def test_handlers_are_ordinary_functions_in_threads(duemq_broker: TestBroker) -> None:
    address = duemq_broker.nameserver
    together, seen, lock = threading.Barrier(3), set[tuple[bytes, str]](), threading.Lock()

    def handle(message: sync.ReceivedMessage) -> None:
        together.wait(timeout=30)
        with lock:
            seen.add((message.body, threading.current_thread().name))

    threaded = sync.Consumer("g", handle, nameserver=address, from_="first", concurrency=3)
    with sync.Producer(address) as producer, threaded as consumer:
        consumer.subscribe("t")
        for body in (b"1", b"2", b"3"):
            producer.send("t", body)
        while len(seen) < 3:
            time.sleep(0.01)
    assert {body for body, _ in seen} == {b"1", b"2", b"3"}
    assert len({thread for _, thread in seen}) == 3
    with pytest.raises(ArgumentError, match="no function"):
        sync.Consumer("g", "handler")  # type: ignore[arg-type]


def handling(broker: TestBroker, on_message: sync.Handler, **options: Any) -> sync.Consumer:
    """A consumer of the topic t with a handler."""
    consumer = sync.Consumer("g", on_message, nameserver=broker.nameserver, from_="first", **options)
    consumer.subscribe("t")
    return consumer


def test_no_message_is_handed_out_while_all_threads_are_busy(
    duemq_broker: TestBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages behind a handler that hangs would be given up although nobody handled them."""
    hangs, let_go, handled = threading.Event(), threading.Event(), SimpleQueue[tuple[bytes, int]]()

    def handle(message: sync.ReceivedMessage) -> None:
        if message.body == b"hangs":
            hangs.set()
            let_go.wait(60)
            raise RuntimeError("too late")
        handled.put((message.body, message.reconsume_times))

    options = {"concurrency": 1, "handler_timeout": 0.05, "max_reconsume_times": 0}
    with sync.Producer(duemq_broker.nameserver) as producer, handling(duemq_broker, handle, **options) as consumer:
        producer.send("t", b"hangs")
        assert hangs.wait(30)
        for number in range(3):
            producer.send("t", b"%d" % number)
        with sync.Consumer("dead", nameserver=duemq_broker.nameserver, from_="first") as dead:
            dead.subscribe("%DLQ%g")
            given_up = dead.receive(30)  # its time is over, and many times its time has passed
            assert given_up.body == b"hangs"
            given_up.ack()
            with pytest.raises(TimeoutError):
                dead.receive(0.3)
        assert handled.empty()
        let_go.set()
        assert sorted(handled.get(timeout=30) for _ in range(3)) == [(b"0", 0), (b"1", 0), (b"2", 0)]
        consumer.caught_up()
    assert "failed after its time limit" in caplog.text


def test_a_handler_that_hangs_does_not_hold_up_the_close(duemq_broker: TestBroker) -> None:
    """Its message was sent back: nothing is lost by leaving it alone."""
    hangs, let_go = threading.Event(), threading.Event()

    def handle(message: sync.ReceivedMessage) -> None:
        hangs.set()
        let_go.wait(60)

    with sync.Producer(duemq_broker.nameserver) as producer:
        producer.send("t", b"hangs")
        with handling(duemq_broker, handle, handler_timeout=0.05, close_timeout=3600) as consumer:
            assert hangs.wait(30)
            consumer.caught_up()
    let_go.set()


def test_handlers_may_close_their_consumer(duemq_broker: TestBroker) -> None:
    together, closed = threading.Barrier(2), SimpleQueue[bytes]()

    def handle(message: sync.ReceivedMessage) -> None:
        together.wait(30)
        message.ack()
        consumer.close()
        closed.put(message.body)

    with sync.Producer(duemq_broker.nameserver) as producer:
        for body in (b"1", b"2"):
            producer.send("t", body)
        consumer = handling(duemq_broker, handle, close_timeout=3600)
        consumer.start()
        assert sorted(closed.get(timeout=30) for _ in range(2)) == [b"1", b"2"]
        with sync.Consumer("g", nameserver=duemq_broker.nameserver) as other:
            other.subscribe("t")
            other.caught_up()  # nothing is left to be finished


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit()], ids=repr)
def test_whatever_a_handler_a_listener_or_an_interceptor_raises_the_rest_goes_on(
    duemq_broker: TestBroker, duemq_clock: BrokerClock, error: BaseException
) -> None:
    tries = SimpleQueue[int]()

    def handle(message: sync.ReceivedMessage) -> None:
        tries.put(message.reconsume_times)
        if message.reconsume_times == 0:
            raise error

    def listen(_: object) -> None:
        raise error

    def raise_it(*_: object) -> None:
        raise error

    fail: Any = raise_it

    class Failing(ProducerInterceptor, ConsumerInterceptor):
        before_send = before_handling = fail

    interceptors = [Failing()]
    options = {"on_assigned": listen, "on_revoked": listen, "interceptors": interceptors, "concurrency": 1}
    with (
        sync.Producer(duemq_broker.nameserver, interceptors=interceptors) as producer,
        handling(duemq_broker, handle, **options) as consumer,
    ):
        producer.send("t", b"x")
        assert tries.get(timeout=30) == 0
        consumer.caught_up()  # it was sent back
        duemq_clock.advance("1m")
        assert tries.get(timeout=30) == 1
        assert len(producer.send_many([Message("t", b"y")])) == 1


def test_nothing_ends_the_event_loop_that_all_share(duemq_broker: TestBroker, caplog: pytest.LogCaptureFixture) -> None:
    with sync.Producer(duemq_broker.nameserver) as producer:

        def end() -> None:
            raise SystemExit(3)

        loop = producer._worker().loop
        loop.call_soon_threadsafe(end)
        loop.call_soon_threadsafe(loop.stop)
        producer.send("t", b"x")
    assert "continues" in caplog.text


def test_a_script_that_ends_hands_out_nothing_more(duemq_broker: TestBroker) -> None:
    """Its consumer is closed: what was not handled is not sent back, and what was is stored."""
    program = f"""
import logging, threading, time
from duemq import sync
logging.basicConfig()
began = threading.Semaphore(0)
def handle(message):
    began.release()
    time.sleep(0.2)
    print("handled")
consumer = sync.Consumer("g", handle, nameserver={duemq_broker.nameserver!r}, from_="first", concurrency=2)
consumer.subscribe("t")
consumer.start()
began.acquire()
began.acquire()
"""
    with sync.Producer(duemq_broker.nameserver) as producer:
        producer.send_many(Message("t", b"%d" % number) for number in range(20))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    handled = done.stdout.count("handled")
    assert 2 <= handled < 10
    with sync.Consumer("g", nameserver=duemq_broker.nameserver) as consumer:
        consumer.subscribe("t")
        again = [consumer.receive(30) for _ in range(20 - handled)]
        assert {each.reconsume_times for each in again} == {0}
        for each in again:
            each.ack()
        consumer.caught_up()


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
from duemq import ArgumentError, sync
with sync.Producer({duemq_broker.nameserver!r}) as producer:
    producer.send("t", b"parent")
    consumer = sync.Consumer("g", nameserver={duemq_broker.nameserver!r}, from_="first")
    consumer.subscribe("t")
    consumer.start()
    message = consumer.receive(30)
    child = os.fork()
    if child == 0:
        for call in (consumer.receive, message.ack, lambda: producer.send("t", b"x"), consumer.start):
            try:
                call()
            except ArgumentError as error:
                assert "forked" in str(error)
            else:
                raise AssertionError(call)
    else:
        message.ack()
    consumer.close()
with sync.Producer({duemq_broker.nameserver!r}) as producer:
    producer.send("t", b"child" if child == 0 else b"parent")
if child:
    print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
