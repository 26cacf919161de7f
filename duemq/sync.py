"""The client without async, for scripts, threads and notebooks: the same classes, whose methods wait.

    from duemq import sync

    with sync.Producer("127.0.0.1:9876") as producer:
        producer.send("orders", b"remember", delay="1h30m")

    with sync.Consumer("billing", nameserver="127.0.0.1:9876") as consumer:
        consumer.subscribe("orders")
        for message in consumer:
            print(message.body)
            message.ack()

Any thread may call any method. The work is done by an event loop in a thread of its own, which all objects of this
module share; it begins with the first call, in each process anew. Arguments, results and errors are those of the
classes of the same names in `duemq`.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import update_wrapper
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from duemq import admin as _admin
from duemq import consumer as _consumer
from duemq import messages as _messages
from duemq import pending as _pending
from duemq import producer as _producer
from duemq._consuming.member import Listener as _AsyncListener
from duemq._consuming.member import Target
from duemq._producing.changing import Changing
from duemq._values.times import Span, Time
from duemq.errors import ArgumentError, ClosedError

__all__ = ["Admin", "Consumer", "Producer", "ReceivedMessage"]

A_co = TypeVar("A_co", covariant=True)
C_co = TypeVar("C_co", bound=Changing, covariant=True)
T = TypeVar("T")
P = ParamSpec("P")

_DEFAULT_CONCURRENCY = 20
_MOST_TAKEN = 2048
"""Messages that `send_many` and `send_each` take ahead from a source."""


class _Worker:
    """The event loop of this process, and its thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="duemq sync", daemon=True)
        self.thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine."""
        if threading.current_thread() is self.thread:
            work.close()
            raise ArgumentError("call methods of duemq.sync from another thread than the one that runs callbacks")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result. It is cancelled if the wait is interrupted, as by Ctrl-C."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_workers: list[_Worker] = []
_lock = threading.Lock()


def _worker() -> _Worker:
    with _lock:
        # A process that was forked has the objects of its parent's thread, but not the thread.
        if not _workers or _workers[-1].pid != os.getpid():
            _workers[:] = [_Worker()]
        return _workers[-1]


class _Facade(Generic[A_co]):
    """An object of the client whose methods wait."""

    _inner: A_co

    def __enter__(self) -> Self:
        _worker().run(self._inner.__aenter__())  # type: ignore[attr-defined]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _worker().run(self._inner.__aexit__(kind, error, trace))  # type: ignore[attr-defined]


def _constructor(make: Callable[P, A_co]) -> Callable[Concatenate[_Facade[A_co], P], None]:
    def construct(self: _Facade[A_co], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._inner = make(*args, **kwargs)

    update_wrapper(construct, make)
    return construct


def _waiting(
    method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Facade[A_co], P], T]:
    """A method that waits for the result of the client's method."""

    def call(self: _Facade[A_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _worker().run(method(self._inner, *args, **kwargs))

    update_wrapper(call, method)
    return call


class _Source:
    """Messages that one thread gives and the event loop takes, at most `_MOST_TAKEN` of them ahead."""

    def __init__(self) -> None:
        self._loop = _worker().loop
        self._given: deque[_messages.Message] = deque()
        self._room = threading.Semaphore(_MOST_TAKEN)
        self._news = asyncio.Event()
        self._is_told = False
        self._is_over = False
        self._is_stopped = False

    def give_all(self, messages: Iterable[_messages.Message]) -> None:
        """Give messages until all are given, or no more are wanted. Raises what the source raises."""
        for message in messages:
            if not self.give(message):
                break
        self.end()

    def give(self, message: _messages.Message) -> bool:
        """Give a message; return whether more are wanted."""
        self._room.acquire()
        if self._is_stopped:
            self._room.release()
            return False
        self._given.append(message)
        self._tell()
        return True

    def end(self) -> None:
        """There are no more messages."""
        self._is_over = True
        self._is_told = False
        self._tell()

    def stop(self) -> None:
        """No more messages are wanted. Called in the event loop."""
        self._is_stopped = True
        self._room.release()

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._news.set)

    async def __aiter__(self) -> AsyncIterator[_messages.Message]:
        while True:
            self._news.clear()
            self._is_told = False
            is_over = self._is_over
            while self._given:
                message = self._given.popleft()
                self._room.release()
                yield message
            if is_over:
                return
            await self._news.wait()


class _Changing(_Facade[C_co]):
    """Methods that producer and admin share."""

    cancel = _waiting(Changing.cancel)
    reschedule = _waiting(Changing.reschedule)
    deliver_now = _waiting(Changing.deliver_now)


class Producer(_Changing[_producer.Producer]):
    """Sends messages; see `duemq.Producer`, whose arguments and methods it has."""

    __init__ = _constructor(_producer.Producer)
    start = _waiting(_producer.Producer.start)
    flush = _waiting(_producer.Producer.flush)
    close = _waiting(_producer.Producer.close)
    if TYPE_CHECKING:

        @overload
        def send(
            self, message: _messages.Message, /, *, retries: int | None = None, timeout: float | None = None
        ) -> _messages.SendResult: ...

        @overload
        def send(
            self,
            topic: str,
            body: bytes | str,
            *,
            tags: str | None = None,
            keys: str | Iterable[str] = (),
            properties: Mapping[str, str] | None = None,
            level: int | None = None,
            delay: Span | None = None,
            deliver_at: Time | None = None,
            replace: bool = False,
            sharding_key: str | None = None,
            queue: _messages.MessageQueue | None = None,
            message_id: str | None = None,
            retries: int | None = None,
            timeout: float | None = None,
        ) -> _messages.SendResult: ...

        def send(self, *args: Any, **options: Any) -> _messages.SendResult:
            """See `duemq.Producer.send`."""

        @overload
        def send_oneway(self, message: _messages.Message, /, *, timeout: float | None = None) -> str: ...

        @overload
        def send_oneway(
            self,
            topic: str,
            body: bytes | str,
            *,
            tags: str | None = None,
            keys: str | Iterable[str] = (),
            properties: Mapping[str, str] | None = None,
            level: int | None = None,
            delay: Span | None = None,
            deliver_at: Time | None = None,
            replace: bool = False,
            sharding_key: str | None = None,
            queue: _messages.MessageQueue | None = None,
            timeout: float | None = None,
        ) -> str: ...

        def send_oneway(self, *args: Any, **options: Any) -> str:
            """See `duemq.Producer.send_oneway`."""

    else:
        send = _waiting(_producer.Producer.send)
        send_oneway = _waiting(_producer.Producer.send_oneway)
    send_batch = _waiting(_producer.Producer.send_batch)
    schedule = _waiting(_producer.Producer.schedule)
    recall = _waiting(_producer.Producer.recall)

    def send_many(
        self,
        messages: Iterable[_messages.Message],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> list[_messages.SendResult]:
        """See `duemq.Producer.send_many`. The source is read in the calling thread."""
        source = _Source()

        async def work() -> list[_messages.SendResult]:
            try:
                return await self._inner.send_many(source, retries=retries, timeout=timeout)
            finally:
                source.stop()

        future = _worker().begin(work())
        try:
            source.give_all(messages)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def send_each(
        self,
        messages: Iterable[_messages.Message],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[_messages.SendOutcome]:
        """See `duemq.Producer.send_each`. The source is read in the calling thread, between the outcomes."""
        source = _Source()
        outcomes: SimpleQueue[_messages.SendOutcome | BaseException | None] = SimpleQueue()

        async def work() -> None:
            try:
                async for outcome in self._inner.send_each(source, retries=retries, timeout=timeout):
                    outcomes.put(outcome)
            except BaseException as error:
                outcomes.put(error)
                raise
            finally:
                source.stop()
                outcomes.put(None)

        def following() -> _messages.SendOutcome | None:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        future = _worker().begin(work())
        taken = 0
        try:
            for message in messages:
                source.give(message)
                taken += 1
                while taken >= _MOST_TAKEN or not outcomes.empty():
                    outcome = following()
                    if outcome is None:
                        return
                    taken -= 1
                    yield outcome
            source.end()
            while (outcome := following()) is not None:
                yield outcome
        finally:
            future.cancel()


class Admin(_Changing[_admin.Admin]):
    """Shows and changes messages that wait; see `duemq.Admin`, whose arguments and methods it has."""

    __init__ = _constructor(_admin.Admin)
    start = _waiting(_admin.Admin.start)
    close = _waiting(_admin.Admin.close)
    count = _waiting(_admin.Admin.count)
    due_curve = _waiting(_admin.Admin.due_curve)
    pause_recurring = _waiting(_admin.Admin.pause_recurring)
    resume_recurring = _waiting(_admin.Admin.resume_recurring)
    remove_recurring = _waiting(_admin.Admin.remove_recurring)

    def pending(self, *args: Any, **options: Any) -> Iterator[_pending.PendingMessage]:
        """The messages that wait, one after the other; arguments as of `duemq.Admin.pending`."""
        return _iterate(self._inner.pending(*args, **options))

    def recurring(self, *args: Any, **options: Any) -> Iterator[_pending.PendingMessage]:
        """The messages that recur, one after the other; arguments as of `duemq.Admin.recurring`."""
        return _iterate(self._inner.recurring(*args, **options))


if TYPE_CHECKING:

    class ReceivedMessage(_messages.ReceivedMessage):
        """A message as a consumer gets it; see `duemq.ReceivedMessage`."""

        def ack(self) -> None:  # type: ignore[override]
            """The message is consumed."""

        def retry(self, level: int = 0, *, delay: Span | None = None) -> None:  # type: ignore[override]
            """Deliver the message again later."""

        def dead_letter(self) -> None:  # type: ignore[override]
            """Give the message up."""

else:

    class ReceivedMessage:
        """A message as a consumer gets it; see `duemq.ReceivedMessage`, all of whose attributes it has."""

        __slots__ = ("_message",)

        def __init__(self, message):
            self._message = message

        def __getattr__(self, name):
            return getattr(self._message, name)

        def __repr__(self):
            return repr(self._message)

        def ack(self):
            """See `duemq.ReceivedMessage.ack`."""
            return _worker().run(self._message.ack())

        def retry(self, *args, **options):
            """See `duemq.ReceivedMessage.retry`."""
            return _worker().run(self._message.retry(*args, **options))

        def dead_letter(self):
            """See `duemq.ReceivedMessage.dead_letter`."""
            return _worker().run(self._message.dead_letter())


Handler = Callable[[ReceivedMessage], object]
Listener = Callable[[frozenset[_messages.MessageQueue]], object]


class Consumer(_Facade[_consumer.Consumer]):
    """Receives messages; see `duemq.Consumer`, whose arguments it has.

    `on_message` is an ordinary function, which is called in threads, for up to `concurrency` messages at once. Without
    a handler, call `receive` or loop over the consumer. A handler that takes longer than `handler_timeout` cannot be
    ended: its message is retried, and its thread is busy until it returns. `on_assigned` and `on_revoked` are ordinary
    functions, too.
    """

    def __init__(
        self,
        group: str,
        on_message: Handler | None = None,
        *,
        concurrency: int = _DEFAULT_CONCURRENCY,
        on_assigned: Listener | None = None,
        on_revoked: Listener | None = None,
        **options: Any,
    ) -> None:
        self._threads: ThreadPoolExecutor | None = None
        call = None
        if on_message is not None:
            if not callable(on_message):
                raise ArgumentError(f"the handler {on_message!r} is no function")
            self._threads = threads = ThreadPoolExecutor(max(1, concurrency), f"duemq {group}")

            async def call(message: _messages.ReceivedMessage) -> None:
                # With the context variables of interceptors, as `asyncio.to_thread` does it.
                run = contextvars.copy_context().run
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(threads, run, on_message, ReceivedMessage(message))  # type: ignore[call-arg, arg-type]

        self._inner = _consumer.Consumer(
            group,
            call,
            concurrency=concurrency,
            on_assigned=_in_thread("on_assigned", on_assigned),
            on_revoked=_in_thread("on_revoked", on_revoked),
            **options,
        )

    def subscribe(self, topic: str, tags: str = "*") -> None:
        """See `duemq.Consumer.subscribe`."""
        _run(self._inner.subscribe, topic, tags)

    def pause(self, *targets: Target) -> None:
        """See `duemq.Consumer.pause`."""
        _run(self._inner.pause, *targets)

    def resume(self, *targets: Target) -> None:
        """See `duemq.Consumer.resume`."""
        _run(self._inner.resume, *targets)

    @property
    def assignment(self) -> frozenset[_messages.MessageQueue]:
        """See `duemq.Consumer.assignment`."""
        return _run(lambda: self._inner.assignment)

    start = _waiting(_consumer.Consumer.start)
    seek = _waiting(_consumer.Consumer.seek)
    commit = _waiting(_consumer.Consumer.commit)
    caught_up = _waiting(_consumer.Consumer.caught_up)
    wait_closed = _waiting(_consumer.Consumer.wait_closed)

    def close(self) -> None:
        """See `duemq.Consumer.close`."""
        _worker().run(self._inner.close())
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """Return the next message, which then has to be settled with its `ack`, `retry` or `dead_letter`. Raises
        TimeoutError if none comes within `timeout` seconds, and what `duemq.Consumer.receive` raises."""

        async def receive() -> _messages.ReceivedMessage:
            async with asyncio.timeout(timeout):
                return await self._inner.receive()

        return ReceivedMessage(_worker().run(receive()))  # type: ignore[call-arg, arg-type]

    def receive_many(self, most: int, timeout: float | None = None) -> list[ReceivedMessage]:
        """Return the next message, and up to `most` in all with those that are there. Otherwise as `receive`."""

        async def receive() -> list[_messages.ReceivedMessage]:
            async with asyncio.timeout(timeout):
                return await self._inner.receive_many(most)

        return [ReceivedMessage(each) for each in _worker().run(receive())]  # type: ignore[call-arg, arg-type]

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """The messages, until the consumer is closed."""
        while True:
            try:
                message = self.receive()
            except ClosedError:
                return
            yield message


PushConsumer = Consumer
"""RocketMQ's name for it, which the pages do not use."""


def _run(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in the event loop, and return its result."""

    async def run() -> T:
        return call(*args, **kwargs)

    return _worker().run(run())


def _in_thread(name: str, listener: Listener | None) -> _AsyncListener | None:
    if listener is None:
        return None
    if not callable(listener):
        raise ArgumentError(f"{name}={listener!r} is no function")

    async def call(queues: frozenset[_messages.MessageQueue]) -> None:
        await asyncio.to_thread(listener, queues)

    return call


def _iterate(items: AsyncIterator[T]) -> Iterator[T]:
    async def following() -> T | None:
        return await anext(items, None)

    while (item := _worker().run(following())) is not None:
        yield item
