"""The admin: looks at the messages that wait at duemq brokers, and changes them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from duemq._net.client import Client, typed_body
from duemq._net.connection import Codec
from duemq._net.id_brokers import is_of_none
from duemq._net.keys import signer_of
from duemq._net.tls import Tls, context_of
from duemq._values import checks
from duemq._values.intervals import Intervals
from duemq._values.times import Span, Time, span_ms, time_ms
from duemq.errors import ArgumentError, ClosedError, NotSupportedError, PeerError
from duemq.messages import ChangedMessage, ChangeResult, Changes, DueCurve, PendingMessage
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests import bodies, headers
from duemq.protocol.requests.bodies import HeartbeatData

T = TypeVar("T")

PAGE: Final = 1000
"""Messages asked for at once; the most that a broker gives."""
MOST_IDS: Final = 1000
"""Most message ids that a broker takes in one request."""
MOST_STEPS: Final = 10_000
LEAST_STEP_MS: Final = 1000


class Admin:
    """Looks at the messages that wait for their time or delay level, and changes them; at all duemq brokers that the
    name servers know.

        async with Admin("127.0.0.1:9876") as admin:
            async for message in admin.pending("orders", key="4711"):
                print(message.due_time_ms, message.offset_message_id)
            await admin.cancel(topic="orders", key="4711")

    Arguments: `nameserver`, `codec`, `access_key`, `secret_key` and `tls` as of `Producer`; `timeout`: for each request
    to a broker, in seconds. A broker with ten million waiting messages takes about a second to look through them.

    Methods select by `topic`, `key` (one of a message's keys, or its message id) and time: due from `begin` on and
    before `end`, each a datetime with a time zone or seconds since the epoch. What is None selects by nothing. Brokers
    that the name servers do not know now, since they are down, are not asked.

    They raise ArgumentError, ClosedError, NotSupportedError where no broker is a duemq, BrokerError, ConnectError,
    ConnectionLostError and RequestTimeoutError.
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
        _intervals: Intervals | None = None,
    ) -> None:
        self._timeout = timeout
        self._client = Client(
            nameserver,
            codec=codec,
            heartbeat=_heartbeat,
            intervals=_intervals,
            signer=signer_of(access_key, secret_key),
            tls=context_of(tls),
        )
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._client.start()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        await self._client.close()

    # --- looking

    async def pending(
        self,
        topic: str | None = None,
        *,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
    ) -> AsyncGenerator[PendingMessage, None]:
        """The messages that wait, broker after broker; those with a timer before those with a level. What is sent,
        delivered or changed meanwhile may be among them or not."""
        header = headers.ListPending(topic, key, *_range_ms(topic, key, begin, end), PAGE)
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
                    yield _pending(message, address)
                if page.cursor is None:
                    break
                if page.cursor == header.cursor or not page.messages:
                    raise PeerError(address, "a list that does not go on")
                header.cursor = page.cursor
                page = await self._page(address, header)

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
        """How many messages wait. Without a key, topics whose names have the same hash (Java's) may count as one."""
        header = headers.ListPending(topic, key, *_range_ms(topic, key, begin, end), count_only=True)
        pages, errors = await self._of_all(lambda address: self._page(address, header))
        _raise_first(errors)
        return sum(page.counted for page in pages)

    async def due_curve(
        self, topic: str | None = None, *, begin: Time | None = None, step: Span = "1m", steps: int = 60
    ) -> DueCurve:
        """How many messages are due in each of `steps` spans of `step` from `begin`, or now, on. What is overdue counts
        as due now. Counted as `count` does."""
        step_ms = span_ms(step)
        if step_ms < LEAST_STEP_MS or not 1 <= steps <= MOST_STEPS:
            raise ArgumentError(f"a curve has 1 to {MOST_STEPS} steps of 1s or more, not {steps} of {step!r}")
        begin_ms, _ = _range_ms(topic, None, begin, None)
        header = headers.DueCurve(step_ms, steps, topic, begin_ms)

        async def ask(address: str) -> Sequence[int]:
            answer = await self._client.call(address, RequestCode.DUE_CURVE, header, timeout=self._timeout)
            found = typed_body(answer, bodies.DueCounts, address)
            if len(found.counts) != steps:
                raise PeerError(address, f"a curve of {len(found.counts)} steps instead of {steps}")
            return found.counts

        if header.begin_ms is None:
            header.begin_ms = await self._now(header)
        curves, errors = await self._of_all(ask)
        _raise_first(errors)
        return DueCurve(header.begin_ms, step_ms, tuple(map(sum, zip(*curves, strict=True))))

    async def _now(self, header: headers.DueCurve) -> int:
        """The time by the clock of the first broker that has one, ms since the epoch."""
        addresses = await self._addresses()
        for address in addresses:
            try:
                answer = await self._client.call(address, RequestCode.DUE_CURVE, header, timeout=self._timeout)
                return typed_body(answer, bodies.DueCounts, address).begin_ms
            except NotSupportedError:
                if address == addresses[-1]:
                    raise
        raise AssertionError("no brokers")

    # --- changing

    async def cancel(
        self,
        offset_message_ids: Iterable[str] | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
    ) -> Changes:
        """Cancel messages that wait: those with the ids that their broker gave them
        (`SendResult.offset_message_id`), or those of a topic with a key or for a time. Where a selection fails at one
        broker, it may have been carried out at others. A broker goes on with a change that was not answered in time:
        `count` tells how many of a selection still wait."""
        return await self._change(headers.ChangePending("cancel"), offset_message_ids, topic, key, begin, end)

    async def reschedule(
        self,
        offset_message_ids: Iterable[str] | None = None,
        *,
        deliver_at: Time | None = None,
        delay: Span | None = None,
        topic: str | None = None,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
    ) -> Changes:
        """Give messages that wait another time, with one of `deliver_at` and `delay`; their ids stay. A time that
        has passed means at once; a delay counts from when the broker is asked, by its clock. Which messages: as of
        `cancel`."""
        if (deliver_at is None) == (delay is None):
            raise ArgumentError("give one of deliver_at and delay")
        header = headers.ChangePending(
            "reschedule",
            None if deliver_at is None else time_ms(deliver_at),
            delay_ms=None if delay is None else span_ms(delay),
        )
        return await self._change(header, offset_message_ids, topic, key, begin, end)

    async def deliver_now(
        self,
        offset_message_ids: Iterable[str] | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
    ) -> Changes:
        """Deliver messages that wait at once. Which messages: as of `cancel`."""
        return await self._change(headers.ChangePending("deliver"), offset_message_ids, topic, key, begin, end)

    async def _change(
        self,
        header: headers.ChangePending,
        offset_message_ids: Iterable[str] | None,
        topic: str | None,
        key: str | None,
        begin: Time | None,
        end: Time | None,
    ) -> Changes:
        header.topic, header.key = topic, key
        header.begin_ms, header.end_ms = _range_ms(topic, key, begin, end)
        is_selection = (key, begin, end) != (None, None, None)
        if offset_message_ids is None:
            if topic is None or not is_selection:
                raise ArgumentError("give message ids, or a topic and at least one of key, begin and end")
            found, errors = await self._of_all(lambda address: self._change_at(address, header))
            _raise_first(errors)
            counts: Counter[str] = sum((Counter(each.counts) for each in found), Counter())
            told = tuple(_changed(message) for each in found for message in each.messages)
            return Changes({ChangeResult(name): count for name, count in counts.items()}, told)
        if topic is not None or is_selection:
            raise ArgumentError("give message ids, or a topic and what else is to be right, not both")
        ids = list(dict.fromkeys(offset_message_ids))
        for each in ids:
            checks.check_offset_message_id(each)
        if not ids:
            return Changes({}, ())
        lists, errors = await self._of_all(lambda address: self._change_ids_at(address, header, ids))
        results = {each: ChangedMessage(each, ChangeResult.NEVER_EXISTED) for each in ids}
        for message in (message for each in lists for message in each if message.result != "NEVER_EXISTED"):
            results[message.msg_id] = _changed(message)
        nowhere = [each for each, message in results.items() if message.result is ChangeResult.NEVER_EXISTED]
        if nowhere:
            # One that cannot be asked may have those that nobody else has.
            _raise_first(errors)
            addresses = await self._addresses()
            for each in nowhere:
                if is_of_none(each, addresses):
                    results[each] = ChangedMessage(each, ChangeResult.BROKER_UNKNOWN)
        told = tuple(results.values())
        return Changes(dict(Counter(message.result for message in told)), told)

    async def _change_at(self, address: str, header: headers.ChangePending) -> bodies.ChangedMessages:
        answer = await self._client.call(address, RequestCode.CHANGE_PENDING, header, timeout=self._timeout)
        return typed_body(answer, bodies.ChangedMessages, address)

    async def _change_ids_at(
        self, address: str, header: headers.ChangePending, ids: list[str]
    ) -> list[bodies.ChangedMessage]:
        told = []
        for first in range(0, len(ids), MOST_IDS):
            part = headers.ChangePending(
                header.action, header.deliver_ms, ",".join(ids[first : first + MOST_IDS]), delay_ms=header.delay_ms
            )
            answer = await self._change_at(address, part)
            told += answer.messages
        return told

    async def report_bridge(self, name: str, figures: Mapping[str, int]) -> None:
        """Tell all duemq brokers the figures of an MQTT bridge, for `brokerStatus`. `name`: 1 to 64 letters, digits and
        % _ -. Raises NotSupportedError where no broker is a duemq; ConnectError, ConnectionLostError, ClosedError and
        RequestTimeoutError."""
        header, body = headers.ReportBridge(bridge=name), msgspec.json.encode(figures)

        async def tell(address: str) -> None:
            await self._client.call(address, RequestCode.REPORT_BRIDGE, header, body, timeout=self._timeout)

        _raise_first((await self._of_all(tell))[1])

    # --- all brokers

    async def _addresses(self) -> list[str]:
        if not self._is_open:
            raise ClosedError("the admin is closed, or was not opened: async with ...")
        return await self._client.all_brokers()

    async def _of_all(self, ask: Callable[[str], Awaitable[T]]) -> tuple[list[T], list[BaseException]]:
        """The answers of all duemq brokers, of which there is at least one, and what went wrong with others."""
        found = await asyncio.gather(*map(ask, await self._addresses()), return_exceptions=True)
        answers = [each for each in found if not isinstance(each, BaseException)]
        errors = [each for each in found if isinstance(each, BaseException)]
        others = [each for each in errors if not isinstance(each, NotSupportedError)]
        if not answers:
            raise (others or errors)[0]
        return answers, others


def _raise_first(errors: list[BaseException]) -> None:
    if errors:
        raise errors[0]


def _heartbeat(client_id: str) -> HeartbeatData:
    return HeartbeatData(client_id=client_id, producer_data_set=[], consumer_data_set=[])


def _range_ms(
    topic: str | None, key: str | None, begin: Time | None, end: Time | None
) -> tuple[int | None, int | None]:
    """The times of a selection. Raises ArgumentError, also for what is no topic or no key."""
    if key is not None:
        checks.check_property_text(key, "a key")
    if topic is not None:
        checks.check_topic(topic)
    return (None if begin is None else time_ms(begin)), (None if end is None else time_ms(end))


def _changed(message: bodies.ChangedMessage) -> ChangedMessage:
    return ChangedMessage(message.msg_id, ChangeResult(message.result))


def _pending(message: bodies.PendingMessage, address: str) -> PendingMessage:
    return PendingMessage(
        message_id=message.unique_key or message.msg_id,
        offset_message_id=message.msg_id,
        broker_address=address,
        topic=message.topic,
        queue_id=message.queue_id,
        due_time_ms=message.deliver_ms,
        delay_level=message.delay_level or None,
        keys=tuple((message.keys or "").split()),
        tags=message.tags,
        body_size=message.body_size,
        born_time_ms=message.born_ms,
        store_time_ms=message.store_ms,
    )
