"""The admin: lists and changes the messages that wait at duemq brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from duemq._net.client import Client, typed_body
from duemq._net.connection import Codec
from duemq._net.keys import signer_of
from duemq._net.tls import Tls, context_of
from duemq._producing.changes import PendingChanges, of_all, raise_first, range_ms
from duemq._producing.changing import Changing
from duemq._values import checks
from duemq._values.intervals import CONNECT_TIMEOUT, Intervals, with_timeouts
from duemq._values.times import Span, Time, span_ms
from duemq.errors import AccessDeniedError, ArgumentError, ClosedError, NotSupportedError, PeerError
from duemq.pending import DueCurve, PendingMessage, Recurrence, RecurringMessage, RecurringResult
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests import bodies, headers
from duemq.protocol.requests.bodies import HeartbeatData

T = TypeVar("T")

ADMIN_GROUP: Final = "duemq-admin"
"""The producer group in an admin's recalls at RocketMQ's brokers."""
PAGE: Final = 1000
"""Messages per request: the most that a broker returns."""
MOST_STEPS: Final = 10_000
LEAST_STEP_MS: Final = 1000


class Admin(Changing):
    """Lists and changes the messages that wait for their timer or delay level, at all duemq brokers that the name
    servers know.

        async with Admin("127.0.0.1:9876") as admin:
            async for message in admin.pending("orders", key="4711"):
                print(message.due_time_ms, message.offset_message_id)
            await admin.cancel(topic="orders", key="4711")

    Arguments: `nameserver`, `codec`, `access_key`, `secret_key`, `tls` and `connect_timeout` are those of `Producer`.
    `timeout`: time limit of each request to a broker, in seconds. A broker with ten million waiting messages takes
    about a second to search them.

    Methods select by `topic`, by `key` (one of a message's keys, or its message id) and by time: due at `begin` or
    later, and before `end`, each a datetime with a time zone or seconds since the epoch. An argument that is None
    selects everything. Brokers that are down, so that the name servers do not know them, are left out. `cancel`,
    `reschedule` and `deliver_now` are those of `Producer`.

    Raises ArgumentError for invalid arguments, as the methods do. These also raise ClosedError, NotSupportedError if no
    broker is duemq's, BrokerError, ConnectError, ConnectionLostError, PeerError and RequestTimeoutError.
    """

    def __init__(
        self,
        nameserver: str = "127.0.0.1:9876",
        *,
        codec: Codec = "auto",
        timeout: float = 30.0,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls: Tls = False,
        connect_timeout: float = CONNECT_TIMEOUT,
        _intervals: Intervals | None = None,
    ) -> None:
        self._timeout = checks.check_timeout(timeout)
        self._client = Client(
            nameserver,
            codec=codec,
            heartbeat=_heartbeat,
            intervals=with_timeouts(
                _intervals, checks.check_timeout(connect_timeout, "connect_timeout"), self._timeout
            ),
            signer=signer_of(access_key, secret_key),
            tls=context_of(tls),
        )
        self._changes = PendingChanges(self._client, ADMIN_GROUP, self._timeout)
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect to a name server. Raises ConnectError if none answers; `start` can then be called again. Raises
        ClosedError if the admin is closed."""
        async with self._starting:
            if self._is_closed:
                raise ClosedError("the admin is closed")
            if not self._is_open:
                await self._client.start()
                if self._is_closed:
                    await self._client.close()
                    raise ClosedError("the admin was closed while it started")
                self._loop, self._is_open = asyncio.get_running_loop(), True

    async def close(self) -> None:
        """Close the connections. Never raises, except ArgumentError in an event loop other than that of `start`."""
        checks.check_loop(self._loop, "admin")
        self._is_open, self._is_closed = False, True
        await self._client.close()

    # --- listing

    async def pending(
        self,
        topic: str | None = None,
        *,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
    ) -> AsyncGenerator[PendingMessage, None]:
        """Yield the messages that wait, broker after broker, those with a timer before those with a level. A message
        that is sent, delivered or changed in the meantime may or may not be among them."""
        header = headers.ListPending(topic, key, *range_ms(topic, key, begin, end), PAGE)
        async for message, address in self._list(header):
            yield _pending(message, address)

    async def _list(self, header: headers.ListPending) -> AsyncGenerator[tuple[bodies.PendingEntry, str], None]:
        """Yield messages, each with the address of its broker. Raises PeerError if a broker's list does not advance,
        and NotSupportedError if no broker is duemq's."""
        are_supported = False
        addresses = await self._addresses()
        for address in addresses:
            header.cursor = None
            try:
                page = await self._page(address, header)
            except NotSupportedError:
                if address == addresses[-1] and not are_supported:
                    raise
                continue
            are_supported = True
            while True:
                for message in page.messages:
                    yield message, address
                if page.cursor is None:
                    break
                if page.cursor == header.cursor or not page.messages:
                    raise PeerError(address, "a list that does not advance")
                header.cursor = page.cursor
                page = await self._page(address, header)

    async def recurring(
        self, topic: str | None = None, *, name: str | None = None
    ) -> AsyncGenerator[RecurringMessage, None]:
        """Yield the recurring messages (`Producer.schedule`), each with its next delivery. Raises PeerError if a broker
        lists a message that does not recur, and the other errors of this class."""
        header = headers.ListPending(topic, name, *range_ms(topic, name, None, None), PAGE, recurring=True)
        async for message, address in self._list(header):
            if message.recurrence is None:
                raise PeerError(address, f"it listed {message.msg_id} as recurring, which it is not")
            yield RecurringMessage(**_fields(message, address), recurrence=_recurrence(message.recurrence))

    async def pause_recurring(self, topic: str, name: str) -> RecurringResult:
        """Pause a recurring message until it is resumed, for ten years at most. Deliveries until then are skipped."""
        return await self._change_recurring(topic, name, "pause")

    async def resume_recurring(self, topic: str, name: str) -> RecurringResult:
        """Resume a paused recurring message; it continues with its next delivery."""
        return await self._change_recurring(topic, name, "resume")

    async def remove_recurring(self, topic: str, name: str) -> RecurringResult:
        """Remove a recurring message; it is no longer delivered."""
        return await self._change_recurring(topic, name, "remove")

    async def _change_recurring(self, topic: str, name: str, action: str) -> RecurringResult:
        checks.check_topic(topic)
        header = headers.ChangeRecurring(topic, name, action)

        async def ask(address: str) -> RecurringResult:
            answer = await self._client.call(address, RequestCode.CHANGE_RECURRING, header, timeout=self._timeout)
            return RecurringResult(typed_body(answer, bodies.ChangedRecurring, address).result)

        results, errors = await self._of_all(ask)
        found = [each for each in results if each is not RecurringResult.NOT_FOUND]
        if not found:
            raise_first(errors)  # the message may be at a broker that did not answer
        return found[0] if found else RecurringResult.NOT_FOUND

    async def _page(self, address: str, header: headers.ListPending) -> bodies.PendingPage:
        answer = await self._client.call(address, RequestCode.LIST_PENDING, header, timeout=self._timeout)
        return typed_body(answer, bodies.PendingPage, address)

    async def count(
        self,
        topic: str | None = None,
        *,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
    ) -> int:
        """Return the number of messages that wait. Without a key, topics whose names have the same Java hash may be
        counted together."""
        header = headers.ListPending(topic, key, *range_ms(topic, key, begin, end), count_only=True)
        pages, errors = await self._of_all(lambda address: self._page(address, header))
        raise_first(errors)
        return sum(page.counted for page in pages)

    async def due_curve(
        self, topic: str | None = None, *, begin: Time | None = None, step: Span = "1m", steps: int = 60
    ) -> DueCurve:
        """Count the messages that are due in each of `steps` spans of length `step`, the first of which begins at
        `begin`, by default now. Overdue messages count as due now. The counts are as exact as that of `count`. Raises
        ArgumentError if `step` is below 1 s or `steps` is not from 1 to 10,000, and the other errors of this class."""
        step_ms = span_ms(step)
        if step_ms < LEAST_STEP_MS or not 1 <= steps <= MOST_STEPS:
            raise ArgumentError(f"a curve has 1 to {MOST_STEPS} steps of 1s or more, not {steps} of {step!r}")
        begin_ms, _ = range_ms(topic, None, begin, None)
        header = headers.QueryDueCurve(step_ms, steps, topic, begin_ms)

        async def ask(address: str) -> Sequence[int]:
            answer = await self._client.call(address, RequestCode.DUE_CURVE, header, timeout=self._timeout)
            found = typed_body(answer, bodies.DueCurveBody, address)
            if len(found.counts) != steps:
                raise PeerError(address, f"a curve of {len(found.counts)} steps instead of {steps}")
            return found.counts

        if header.begin_ms is None:
            header.begin_ms = await self._now(header)
        curves, errors = await self._of_all(ask)
        raise_first(errors)
        return DueCurve(header.begin_ms, step_ms, tuple(map(sum, zip(*curves, strict=True))))

    async def _now(self, header: headers.QueryDueCurve) -> int:
        """Return the time by the clock of the first duemq broker, ms since the epoch."""
        addresses = await self._addresses()
        for address in addresses:
            try:
                answer = await self._client.call(address, RequestCode.DUE_CURVE, header, timeout=self._timeout)
                return typed_body(answer, bodies.DueCurveBody, address).begin_ms
            except NotSupportedError:
                if address == addresses[-1]:
                    raise
        raise AssertionError("no brokers")

    # --- changing: see `Changing`

    def _pending_changes(self) -> PendingChanges:
        self._check_open()
        return self._changes

    async def check_account(self) -> None:
        """Connect to all brokers, which then check the keys of this client. Raises AccessDeniedError if one of them
        refuses the keys, and ConnectError, ConnectionLostError, ClosedError or RequestTimeoutError if none can be
        reached."""
        _, errors = await self._of_all(self._client.broker)
        raise_first([each for each in errors if isinstance(each, AccessDeniedError)])

    async def report_bridge(self, name: str, figures: Mapping[str, int]) -> None:
        """Report the figures of an MQTT bridge to all duemq brokers, for `brokerStatus`. `name`: 1 to 64 of letters,
        digits, %, _ and -. Raises NotSupportedError if no broker is duemq's, ConnectError, ConnectionLostError,
        ClosedError and RequestTimeoutError."""
        header, body = headers.ReportBridge(bridge=name), msgspec.json.encode(figures)

        async def tell(address: str) -> None:
            await self._client.call(address, RequestCode.REPORT_BRIDGE, header, body, timeout=self._timeout)

        raise_first((await self._of_all(tell))[1])

    # --- all brokers

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the admin is closed, or was not opened: async with ...")
        checks.check_loop(self._loop, "admin")

    async def _addresses(self) -> list[str]:
        self._check_open()
        return await self._client.all_brokers()

    async def _of_all(self, ask: Callable[[str], Awaitable[T]]) -> tuple[list[T], list[BaseException]]:
        return await of_all(ask, await self._addresses())


def _heartbeat(client_id: str) -> HeartbeatData:
    return HeartbeatData(client_id=client_id, producer_data_set=[], consumer_data_set=[])


def _pending(message: bodies.PendingEntry, address: str) -> PendingMessage:
    recurrence = _recurrence(message.recurrence) if message.recurrence is not None else None
    return PendingMessage(**_fields(message, address), recurrence=recurrence)


def _fields(message: bodies.PendingEntry, address: str) -> dict[str, Any]:
    """The fields that all waiting messages have, as arguments for their classes."""
    return {
        "message_id": message.unique_key or message.msg_id,
        "offset_message_id": message.msg_id,
        "broker_address": address,
        "topic": message.topic,
        "queue_id": message.queue_id,
        "due_time_ms": message.deliver_ms,
        "delay_level": message.delay_level or None,
        "keys": tuple((message.keys or "").split()),
        "tags": message.tags,
        "body_size": message.body_size,
        "born_time_ms": message.born_ms,
        "store_time_ms": message.store_ms,
    }


def _recurrence(found: bodies.PendingRecurrence) -> Recurrence:
    return Recurrence(
        every_ms=found.every_ms or None,
        cron=found.cron or None,
        zone=found.zone,
        start_ms=found.start_ms,
        end_ms=found.end_ms,
        count=found.count,
        is_paused=found.is_paused,
    )
