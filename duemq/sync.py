"""The client without async, for scripts, threads and notebooks: the same classes with blocking methods.

    from duemq import sync

    with sync.Producer("127.0.0.1:9876") as producer:
        producer.send("orders", b"remember", delay="1h30m")

    with sync.Consumer("billing", nameserver="127.0.0.1:9876") as consumer:
        consumer.subscribe("orders")
        for message in consumer:
            print(message.body)
            message.ack()

Any thread may call any method. All objects of this module share one event loop, which runs in a thread of its own; the
first call in a process starts it. That thread calls interceptors; a method that is called there raises ArgumentError.
Otherwise arguments, results and errors are those of the classes of the same names in `duemq`.

An object belongs to the process that started it: in a forked process its `close` does nothing and its other methods
raise ArgumentError. When the main thread ends, consumers with a handler are closed.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextvars import ContextVar
from functools import update_wrapper
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from duemq import admin as _admin
from duemq import consumer as _consumer
from duemq import messages as _messages
from duemq import producer as _producer
from duemq._consuming.member import Listener as _AsyncListener
from duemq._consuming.member import Target
from duemq._consuming.threads import ThreadedHandler, returning
from duemq._net import timeouts
from duemq._net.connection import Codec
from duemq._net.tls import Tls
from duemq._producing.changing import Changing
from duemq._values import checks
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, Span, Time, now_ms
from duemq.errors import ArgumentError, ClosedError

if TYPE_CHECKING:
    from duemq.interceptors import ConsumerInterceptor

__all__ = ["Admin", "Consumer", "Producer", "ReceivedMessage"]

A_co = TypeVar("A_co", covariant=True)
C_co = TypeVar("C_co", bound=Changing, covariant=True)
T = TypeVar("T")
P = ParamSpec("P")

_MOST_TAKEN = 2048
"""The most messages that `send_many` and `send_each` take from a source before the event loop has taken them."""

log = logging.getLogger("duemq.sync")


class _Call(Generic[T]):
    """A coroutine that the event loop runs for another thread.

    It has no concurrent.futures.Future, whose lock is taken in Python code: if Ctrl-C interrupted a thread that held
    the lock, the event loop would wait for the lock for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
        loop.call_soon_threadsafe(self._start)

    def result(self) -> T:
        """Wait for the coroutine and return its result. Raises the coroutine's exception, or CancelledError if it was
        cancelled."""
        task = self._ended.get()
        if task.cancelled():
            raise CancelledError
        return task.result()

    def cancel(self) -> None:
        """Cancel the coroutine, if it has not ended."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None, "it starts before anything else that this object asks of the event loop"
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs it if the waiting thread was interrupted
        self._ended.put(task)


class _Worker:
    """The event loop of this process, and its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.handling: set[Consumer] = set()
        """The open consumers that have a handler."""
        self._process_id = os.getpid()
        self.thread = threading.Thread(target=self._go_on, name="duemq sync", daemon=True)
        self.thread.start()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread runs in this process: a forked process has only copies of its parent's thread objects."""
        # Thread.is_alive may report a running thread as ended after Ctrl-C has interrupted the call.
        return self._process_id == os.getpid()

    def begin(self, work: Coroutine[Any, Any, T]) -> _Call[T]:
        """Begin to run a coroutine. Raises ArgumentError in the thread that runs the event loop and its callbacks."""
        if threading.current_thread() is self.thread:
            work.close()
            raise ArgumentError("call methods of duemq.sync from a thread other than the one that runs callbacks")
        return _Call(self.loop, work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. The coroutine is cancelled if Ctrl-C or another exception interrupts
        the wait."""
        call = self.begin(work)
        try:
            return call.result()
        except BaseException:
            call.cancel()
            raise

    def _go_on(self) -> None:
        """Run the event loop as long as the process lives: all objects of this module need it."""
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except BaseException:
                # run_forever raises the SystemExit of any callback, which would silently end only this thread.
                log.exception("a callback raised SystemExit or the like; the event loop of duemq.sync continues")


class _Process:
    """The worker of this process, and what happens when the process is forked or ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def worker(self) -> _Worker:
        """Return the worker; the first call starts it."""
        worker = self._worker
        if worker is not None and worker.is_of_this_process:
            return worker
        with self._lock:
            if self._worker is None or not self._worker.is_of_this_process:
                self._worker = _Worker()
            return self._worker

    def forked(self) -> None:
        """Replace the lock in a forked process, since another thread may have held it at the fork."""
        self._lock = threading.Lock()

    def end(self) -> None:
        """Close the consumers that have a handler: once the main thread has ended, Python runs nothing more in thread
        pools, so every message would fail."""
        worker = self._worker
        if worker is None or not worker.is_of_this_process or not worker.handling:
            return

        async def close_all(consumers: list[Consumer]) -> None:
            await asyncio.gather(*(each._inner.close() for each in consumers), return_exceptions=True)

        worker.run(close_all(list(worker.handling)))


_process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forked)
# Functions of `atexit` are called after the pools have ended. This one is called before, as it is registered after
# that of `concurrent.futures`.
getattr(threading, "_register_atexit", atexit.register)(_process.end)


class _Facade(Generic[A_co]):
    """An object of the client whose methods wait."""

    _inner: A_co
    _home: _Worker | None = None
    """The worker that ran `start`."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect to the name server; see `start` of the class of the same name in `duemq` for details and errors."""
        worker = self._worker()
        worker.run(self._inner.start())  # type: ignore[attr-defined]
        self._home = worker

    def close(self) -> None:
        """Close the connections. Does nothing in a process that was forked after `start`. See `close` of the class of
        the same name in `duemq` for details."""
        self._close(self._inner.close)  # type: ignore[attr-defined]

    def _close(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        worker = _process.worker()
        if self._home is None or self._home is worker:
            worker.run(close())

    def _worker(self) -> _Worker:
        """Return the worker to call the client's methods in. Raises ArgumentError in a process other than that of
        `start`."""
        return _at_home(self._home)

    def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the event loop, and return its result."""

        async def run() -> T:
            return call(*args, **kwargs)

        return self._worker().run(run())


def _at_home(home: _Worker | None) -> _Worker:
    worker = _process.worker()
    if home is not None and home is not worker:
        raise ArgumentError("the object was started before this process was forked: make a new one in this process")
    return worker


def _constructor(make: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorate a constructor that takes the arguments of the client's class."""

    def decorate(_: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            self._inner = make(*args, **kwargs)

        update_wrapper(construct, vars(make)["__init__"])
        return construct

    return decorate


def _waiting(
    method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Facade[A_co], P], T]:
    """Return a method that calls the client's method and waits for its result."""

    def call(self: _Facade[A_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._worker().run(method(self._inner, *args, **kwargs))

    update_wrapper(call, method)
    return call


def _iterating(
    method: Callable[Concatenate[A_co, P], AsyncIterator[T]],
) -> Callable[Concatenate[_Facade[A_co], P], Iterator[T]]:
    """Return a method that iterates over the items of the client's method."""

    def call(self: _Facade[A_co], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self._inner, *args, **kwargs)

        async def following() -> T | None:
            return await anext(items, None)

        while (item := self._worker().run(following())) is not None:
            yield item

    update_wrapper(call, method)
    return call


class _Source:
    """A bounded queue of messages from one thread to the event loop, of at most `_MOST_TAKEN` messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._given: deque[_messages.Message] = deque()
        # One item for each free place. A threading.Semaphore, which is Python code, would not do: Ctrl-C may interrupt
        # the thread while it holds the semaphore's lock, and the event loop would wait for the lock for ever.
        self._room: SimpleQueue[None] = SimpleQueue()
        deque(map(self._room.put, repeat(None, _MOST_TAKEN)), maxlen=0)
        self._news = asyncio.Event()
        self._is_told = False
        self._is_over = False
        self._is_stopped = False

    def give_all(self, messages: Iterable[_messages.Message]) -> None:
        """Put messages into the queue until the source ends or no more are wanted. Raises the source's exception."""
        for message in messages:
            if not self.give(message):
                break
        self.end()

    def give(self, message: _messages.Message) -> bool:
        """Put a message into the queue; return whether more are wanted."""
        self._room.get()
        if self._is_stopped:
            self._room.put(None)
            return False
        self._given.append(message)
        self._tell()
        return True

    def end(self) -> None:
        """Mark the end of the messages."""
        self._is_over = True
        self._is_told = False
        self._tell()

    def stop(self) -> None:
        """Ask for no more messages. Called in the event loop."""
        self._is_stopped = True
        self._room.put(None)

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
                self._room.put(None)
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
    """Sends messages, with the arguments and methods of `duemq.Producer`."""

    @_constructor(_producer.Producer)
    def __init__(self) -> None:
        """Make a producer, which `start` connects. See `duemq.Producer` for the arguments."""

    flush = _waiting(_producer.Producer.flush)

    def close(self, timeout: float | None = None) -> None:
        """Accept no more sends, wait for those in flight, at most `timeout` seconds (None: the time limit of a send),
        and close the connections. Never raises. Does nothing in a process that was forked after `start`."""
        self._close(lambda: self._inner.close(timeout))

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
            """Send a message and wait until the broker has stored it: `send(Message(...))` or `send(topic, body, ...)`.
            See `duemq.Producer.send` for the arguments and errors."""

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
            """Send a message without waiting for the broker's answer; return its message id. See
            `duemq.Producer.send_oneway` for the arguments and errors."""

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
        """Send messages to any topics, and return their results in the same order. The source is read in the calling
        thread. Raises SendManyError if messages failed. See `duemq.Producer.send_many` for details."""
        worker = self._worker()
        source = _Source(worker.loop)

        async def work() -> list[_messages.SendResult]:
            try:
                return await self._inner.send_many(source, retries=retries, timeout=timeout)
            finally:
                source.stop()

        call = worker.begin(work())
        try:
            source.give_all(messages)
            return call.result()
        except BaseException:
            call.cancel()
            raise

    def send_each(
        self,
        messages: Iterable[_messages.Message],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[_messages.SendOutcome]:
        """Send messages as `send_many` does, and yield the outcome of each, in the same order. The source is read in
        the calling thread, between the outcomes. See `duemq.Producer.send_each` for details."""
        worker = self._worker()
        source = _Source(worker.loop)
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

        call = worker.begin(work())
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
            call.cancel()


class Admin(_Changing[_admin.Admin]):
    """Shows and changes messages that wait; see `duemq.Admin`, whose arguments and methods it has."""

    @_constructor(_admin.Admin)
    def __init__(self) -> None:
        """Make an admin, which `start` connects. See `duemq.Admin` for the arguments."""

    pending = _iterating(_admin.Admin.pending)
    recurring = _iterating(_admin.Admin.recurring)
    count = _waiting(_admin.Admin.count)
    due_curve = _waiting(_admin.Admin.due_curve)
    pause_recurring = _waiting(_admin.Admin.pause_recurring)
    resume_recurring = _waiting(_admin.Admin.resume_recurring)
    remove_recurring = _waiting(_admin.Admin.remove_recurring)


if TYPE_CHECKING:

    class ReceivedMessage(_messages.ReceivedMessage):
        """A message as a consumer gets it; see `duemq.ReceivedMessage`."""

        def __init__(self, message: _messages.ReceivedMessage) -> None: ...

        def ack(self) -> None:  # type: ignore[override]
            """Mark it as consumed, so that it is not delivered to the group again."""

        def retry(self, level: int = 0, *, delay: Span | None = None) -> None:  # type: ignore[override]
            """Have it delivered to the group again, after at least `delay` (seconds, a timedelta, or text such as
            "5m"), or after the delay of a level; by default, after a longer delay each time. Raises ArgumentError;
            DelayError if all levels are shorter than `delay`. See `duemq.ReceivedMessage.retry` for details."""

        def dead_letter(self) -> None:  # type: ignore[override]
            """Give up: move it to the dead-letter topic of the group, %DLQ% and its name, without further retries."""

else:

    class ReceivedMessage:
        """A message as a consumer gets it; see `duemq.ReceivedMessage`, all of whose attributes it has."""

        __slots__ = ("_home", "_message")

        def __init__(self, message):
            self._message = message
            self._home = _process.worker()

        def __getattr__(self, name):
            return getattr(self._message, name)

        def __repr__(self):
            return repr(self._message)

        def ack(self):
            """Mark it as consumed, so that it is not delivered to the group again."""
            return _at_home(self._home).run(self._message.ack())

        def retry(self, *args, **options):
            """Have it delivered to the group again, after a delay. See `duemq.ReceivedMessage.retry` for the arguments
            and errors."""
            return _at_home(self._home).run(self._message.retry(*args, **options))

        def dead_letter(self):
            """Give up: move it to the dead-letter topic of the group, without further retries."""
            return _at_home(self._home).run(self._message.dead_letter())


Handler = Callable[[ReceivedMessage], object]
Listener = Callable[[frozenset[_messages.MessageQueue]], object]


class Consumer(_Facade[_consumer.Consumer]):
    """Receives messages; see `duemq.Consumer`, whose arguments it has.

    `on_message` is an ordinary function, which is called in threads, for up to `concurrency` messages at once. Without
    a handler, call `receive` or loop over the consumer. A handler that takes longer than `handler_timeout` cannot be
    ended: its message is retried, and its thread is busy until it returns. Meanwhile there is a thread less: if all are
    busy, no message is handed out. `on_assigned` and `on_revoked` are ordinary functions, too.

    A handler or listener that calls `sys.exit` has failed like any other: only the main thread can end the program.

    Raises ArgumentError for invalid arguments.
    """

    def __init__(
        self,
        group: str,
        on_message: Handler | None = None,
        *,
        nameserver: str = "127.0.0.1:9876",
        model: _consumer.Model = "clustering",
        from_: _consumer.From = "last",
        max_reconsume_times: int = 16,
        ordered: bool = False,
        handler_timeout: float | None = _consumer.HANDLER_TIMEOUT,
        on_assigned: Listener | None = None,
        on_revoked: Listener | None = None,
        concurrency: int = 20,
        max_cached_messages: int = 1000,
        max_cached_bytes: int = 64 * 1024 * 1024,
        max_ahead: int = 2000,
        offset_file: Path | str | None = None,
        close_timeout: float = 30.0,
        codec: Codec = "auto",
        access_key: str | None = None,
        secret_key: str | None = None,
        tls: Tls = False,
        interceptors: Iterable[ConsumerInterceptor] = (),
        _intervals: Intervals | None = None,
        _clock: Clock = now_ms,
    ) -> None:
        self._threads: ThreadedHandler[ReceivedMessage] | None = None
        if on_message is not None:
            if not callable(on_message):
                raise ArgumentError(f"on_message={on_message!r} is no function")
            concurrency = checks.check_concurrency(concurrency)
            self._threads = ThreadedHandler(group, on_message, ReceivedMessage, concurrency)
        self._inner = _consumer.Consumer(
            group,
            self._threads,
            nameserver=nameserver,
            model=model,
            from_=from_,
            max_reconsume_times=max_reconsume_times,
            ordered=ordered,
            handler_timeout=handler_timeout,
            on_assigned=_in_thread("on_assigned", on_assigned),
            on_revoked=_in_thread("on_revoked", on_revoked),
            concurrency=concurrency,
            max_cached_messages=max_cached_messages,
            max_cached_bytes=max_cached_bytes,
            max_ahead=max_ahead,
            offset_file=offset_file,
            close_timeout=close_timeout,
            codec=codec,
            access_key=access_key,
            secret_key=secret_key,
            tls=tls,
            interceptors=interceptors,
            _intervals=_intervals,
            _clock=_clock,
            _ready=self._threads.ready if self._threads is not None else None,
        )

    def subscribe(self, topic: str, tags: str = "*") -> None:
        """Receive the messages of a topic that have one of `tags`, which are joined by ||; "*" is all messages. May be
        called before or after `start`; a second call for a topic replaces its tags. Raises ArgumentError."""
        self._run(self._inner.subscribe, topic, tags)

    def pause(self, *targets: Target) -> None:
        """Hand out no more messages of these queues or topics until `resume`; without arguments, of all topics with a
        subscription. Raises ArgumentError. See `duemq.Consumer.pause` for details."""
        self._run(self._inner.pause, *targets)

    def resume(self, *targets: Target) -> None:
        """Continue with paused queues or topics; without arguments, with all of them. Raises ArgumentError."""
        self._run(self._inner.resume, *targets)

    @property
    def assignment(self) -> frozenset[_messages.MessageQueue]:
        """The queues that this member reads now, without those of the group's retry topic."""
        return self._run(lambda: self._inner.assignment)

    seek = _waiting(_consumer.Consumer.seek)
    commit = _waiting(_consumer.Consumer.commit)
    caught_up = _waiting(_consumer.Consumer.caught_up)
    wait_closed = _waiting(_consumer.Consumer.wait_closed)

    def start(self) -> None:
        """Join the group and begin to receive. Raises ConnectError or RequestTimeoutError if no name server answers;
        `start` can then be called again. Raises ClosedError if the consumer is closed or was started before."""
        super().start()
        if self._threads is not None and self._home is not None:
            self._home.handling.add(self)

    def close(self) -> None:
        """Take no more messages, wait for running handlers, at most `close_timeout` seconds, store the offsets, and
        leave the group. Never raises. Does nothing in a process that was forked after `start`. See
        `duemq.Consumer.close` for calls by a handler."""
        threads = self._threads
        caller = (threads.caller if threads is not None else None) or _listening.get()
        try:
            self._close(lambda: self._inner._close(caller))
        finally:
            if threads is not None:
                threads.close()
                if self._home is not None:
                    self._home.handling.discard(self)

    def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """Return the next message, which then has to be settled with its `ack`, `retry` or `dead_letter`. Raises
        TimeoutError if none comes within `timeout` seconds, and what `duemq.Consumer.receive` raises."""

        async def receive() -> _messages.ReceivedMessage:
            async with timeouts.timeout(timeout):
                return await self._inner.receive()

        return ReceivedMessage(self._worker().run(receive()))

    def receive_many(self, most: int, timeout: float | None = None) -> list[ReceivedMessage]:
        """Return the next message, and up to `most` in all with those that are there. Otherwise as `receive`."""

        async def receive() -> list[_messages.ReceivedMessage]:
            async with timeouts.timeout(timeout):
                return await self._inner.receive_many(most)

        return [ReceivedMessage(each) for each in self._worker().run(receive())]

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


_listening: ContextVar[asyncio.Task[object] | None] = ContextVar("duemq_listening", default=None)
"""In a thread that calls a listener: the task that waits for it."""


def _in_thread(name: str, listener: Listener | None) -> _AsyncListener | None:
    if listener is None:
        return None
    if not callable(listener):
        raise ArgumentError(f"{name}={listener!r} is no function")

    async def call(queues: frozenset[_messages.MessageQueue]) -> None:
        before = _listening.set(asyncio.current_task())
        try:
            await asyncio.to_thread(returning, listener, queues)
        finally:
            _listening.reset(before)

    return call
