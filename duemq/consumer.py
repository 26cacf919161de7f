"""The push consumer: receives messages as a member of a consumer group.

How it works: a rebalance works out which queues are this member's (`_consuming.member`), each of which gets a reader
task (`_consuming.reader`); readers put messages into one bounded inbox (`_consuming.inbox`); a fixed number of worker
tasks takes them out and calls the handler, or the caller does that itself. What is finished is committed from time to
time (`_consuming.offsets`).

Messages are delivered at least once: after a crash, or when queues change hands, those that were finished but not
committed, or handled at that moment, are delivered again. A member whose process stopped for minutes, while others had
its queues, goes on where the group is by then.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, get_args

from duemq._consuming.inbox import Inbox
from duemq._consuming.member import Member, MemberConfig
from duemq._consuming.offsets import LocalOffsets
from duemq._consuming.reader import FIRST, LAST, Start
from duemq._consuming.subscription import ALL_TAGS
from duemq._net.connection import Codec
from duemq._net.keys import signer_of
from duemq._net.tls import Tls, context_of
from duemq._values import checks
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, Time, now_ms, time_ms
from duemq.errors import ArgumentError, ClosedError
from duemq.messages import MessageQueue, ReceivedMessage

Model = Literal["clustering", "broadcasting"]
From = Literal["first", "last"] | Time
Handler = Callable[[ReceivedMessage], Awaitable[object]]

MAX_CONCURRENCY: Final = 1000

log = logging.getLogger("duemq.consumer")


class PushConsumer:
    """Receives messages as a member of a consumer group.

    With a handler, which is called with each message; returning means consumed, raising means deliver it again later:

        async def on_message(message):
            print(message.body)

        consumer = PushConsumer("billing", on_message)
        consumer.subscribe("orders", "paid || refunded")
        async with consumer:
            await consumer.wait_closed()

    Without one, the caller takes the messages and says what became of each; until then it counts as unfinished:

        async with consumer:
            async for message in consumer:
                print(message.body)
                await message.ack()

    `group`: its members share the messages of its topics, and it remembers what it has consumed. All members have to
        subscribe to the same topics and tags.
    `on_message`: the handler. It is called for up to `concurrency` messages at once, in no certain order.
    `nameserver`: "host:port" of the name server, several joined by ;.
    `model`: "clustering", or "broadcasting": each member gets all messages. A broadcasting consumer has no retries, and
        its offsets are its own: in memory, or from run to run in `offset_file`.
    `from_`: where to begin with a queue of which the group has no offset yet: "last", behind the messages there are
        when `start` returns; "first", at the oldest; or at a time, a datetime with a time zone or seconds since the
        epoch. Queues that are newer than the group's first start are read from their beginning. RocketMQ 4.9's brokers
        have a new group read a young queue, which still has its first messages in memory, from its beginning, too,
        whatever this says.
    `max_reconsume_times`: after so many retries a message goes to the dead-letter topic, %DLQ% and the group's name.
    `max_cached_messages`, `max_cached_bytes`: so much may be read and unfinished; then reading waits.
    `max_ahead`: so many messages of a queue may be finished beyond one that is not; then reading of that queue waits
        for it. After a crash they would be delivered again.
    `close_timeout`: how long `close` waits for handlers, in seconds.
    `codec`: of the request headers; "auto" is MessagePack with a duemq broker and JSON with any other.
    `access_key`, `secret_key`: of the account that signs the requests, where brokers have access control.
    `tls`: True for TLS with certificates that the machine trusts, or an `ssl.SSLContext`, such as
        `ssl.create_default_context(cafile="ca.pem")`.

    Raises ArgumentError for arguments that make no sense.
    """

    def __init__(
        self,
        group: str,
        on_message: Handler | None = None,
        *,
        nameserver: str = "127.0.0.1:9876",
        model: Model = "clustering",
        from_: From = "last",
        max_reconsume_times: int = 16,
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
        _intervals: Intervals | None = None,
        _clock: Clock = now_ms,
        _monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_options(group, on_message, model, concurrency, offset_file)
        if max_ahead < 1:
            raise ArgumentError(f"max_ahead={max_ahead}: allowed are numbers from 1 on")
        self.group = group
        self._on_message = on_message
        self._concurrency = concurrency
        self._close_timeout = close_timeout
        self._inbox = Inbox(max_cached_messages, max_cached_bytes)
        config = MemberConfig(
            group=group,
            nameserver=nameserver,
            codec=codec,
            start=_read_start(from_),
            max_reconsume_times=max_reconsume_times,
            max_ahead=max_ahead,
            local_offsets=LocalOffsets(Path(offset_file) if offset_file else None) if model == "broadcasting" else None,
            intervals=_intervals or Intervals(),
            signer=signer_of(access_key, secret_key),
            tls=context_of(tls),
            clock=_clock,
            monotonic=_monotonic,
        )
        self._member = Member(config, self._inbox)
        self._workers: set[asyncio.Task[None]] = set()
        self._state: Literal["new", "running", "closing"] = "new"
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """The messages, until the consumer is closed."""
        while True:
            try:
                yield await self.receive()
            except ClosedError:
                return

    def subscribe(self, topic: str, tags: str = ALL_TAGS) -> None:
        """Receive the messages of a topic that have one of `tags`, which are joined by ||; "*" is all messages.

        May be called before the start or later; a second call for a topic replaces its tags. A topic that does not
        exist yet is waited for. Raises ArgumentError.
        """
        self._member.subscribe(topic, tags)

    async def start(self) -> None:
        """Join the group and begin to receive. Raises ConnectError or RequestTimeoutError if no name server answers."""
        if self._state != "new":
            raise ClosedError("a consumer is started only once")
        await self._member.start()
        self._state = "running"
        if self._on_message is not None:
            work = (self._work(self._on_message) for _ in range(self._concurrency))
            self._workers = {asyncio.create_task(each, name=f"duemq {self.group}") for each in work}

    async def close(self) -> None:
        """Take no more messages, wait for the handlers that run, store the offsets, and leave the group.

        Handlers that do not end within `close_timeout` are cancelled; their messages are delivered again. Does not
        raise; called a second time, it waits for the first to finish.
        """
        if self._state == "closing":
            await self._closed.wait()
            return
        started, self._state = self._state == "running", "closing"
        try:
            self._inbox.close()
            if started:
                await self._member.stop_reading()
                await self._end_workers()
                await self._member.leave()
        finally:
            self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until the consumer is closed."""
        await self._closed.wait()

    async def receive(self) -> ReceivedMessage:
        """The next message, which then has to be settled with its `ack` or `retry`.

        May be cancelled without losing a message. Raises ClosedError once the consumer is closed, and where it has a
        handler.
        """
        if self._on_message is not None:
            raise ClosedError("this consumer gives its messages to its handler")
        if self._state == "new":
            raise ClosedError("start the consumer first: async with ...")
        message = await self._inbox.get()
        if message is None:
            raise ClosedError("the consumer is closed")
        return message

    async def receive_many(self, most: int) -> list[ReceivedMessage]:
        """The next message, and up to `most` in all with what is there already. Otherwise as `receive`."""
        return [await self.receive(), *self._inbox.get_more(most - 1)]

    async def commit(self) -> dict[MessageQueue, int]:
        """Store the offsets of what is finished now, not only from time to time; for one who keeps notes of what the
        group would get again. Gives the offsets that are known to be stored, by queue: what lies before them is not
        delivered to the group again. An offset that cannot be stored now is stored later, which is logged.
        """
        await self._member.commit()
        return self._member.committed

    async def caught_up(self) -> None:
        """Wait until all is finished that was in this member's queues when it got them.

        While a subscribed topic does not exist, that is not so. Raises ClosedError if the consumer is closed before.
        """
        await self._member.caught_up()

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that this member reads now, the group's retry queues among them."""
        return self._member.queues

    async def _work(self, on_message: Handler) -> None:
        while (message := await self._inbox.get()) is not None:
            if await self._succeeds(on_message, message):
                await message.ack()
            else:
                await message.retry()

    async def _succeeds(self, on_message: Handler, message: ReceivedMessage) -> bool:
        try:
            result = on_message(message)
            if not inspect.isawaitable(result):
                raise TypeError(f"the handler {on_message!r} returned {result!r} in place of something to await")
            await result
        except asyncio.CancelledError:
            # Of this worker, by `close`; or only of something that the handler waited for.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            log.warning("the handler failed at %r: something that it waited for was cancelled", message)
            return False
        except Exception:
            # The handler's own affair, whatever it is: the message is tried again.
            log.warning("the handler failed at %r", message, exc_info=True)
            return False
        return True

    async def _end_workers(self) -> None:
        # A handler may have called close: it cannot be waited for.
        running = self._workers - {asyncio.current_task()}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=self._close_timeout)
        if late:
            log.warning(
                "%d handlers did not end within %g s; their messages will be delivered again",
                len(late),
                self._close_timeout,
            )
            for task in late:
                task.cancel()
            await asyncio.wait(late)


def _check_options(
    group: str, on_message: Handler | None, model: Model, concurrency: int, offset_file: Path | str | None
) -> None:
    checks.check_group(group)
    if on_message is not None and not _may_be_async(on_message):
        raise ArgumentError(f"the handler {on_message!r} is no async function: write `async def`")
    if model not in get_args(Model):
        raise ArgumentError(f"the model {model!r}; there are {', '.join(get_args(Model))}")
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ArgumentError(f"a concurrency of {concurrency}; allowed are 1 to {MAX_CONCURRENCY}")
    if offset_file is not None and model != "broadcasting":
        raise ArgumentError("only a broadcasting consumer keeps its offsets in a file; the broker has the others'")


def _may_be_async(handler: Handler) -> bool:
    """Whether a handler may return something to await: all but a `def` that does not say so in its annotation, which is
    most likely an `async def` that lacks its first word."""
    if not callable(handler):
        return False
    if not inspect.isroutine(handler) or inspect.iscoroutinefunction(handler) or handler.__name__ == "<lambda>":
        return True
    return getattr(handler, "__annotations__", {}).get("return") not in (None, "None")


def _read_start(from_: From) -> Start:
    if from_ in (FIRST, LAST):
        return FIRST if from_ == FIRST else LAST
    if isinstance(from_, str):
        raise ArgumentError(f"from_={from_!r}; write 'first', 'last' or give a time")
    return time_ms(from_)
