"""Changes of waiting messages, by handle, id, key, topic and time, which `Producer` and `Admin` share.

A duemq broker carries out all of them: CHANGE_BY_HANDLE, and CHANGE_PENDING for what has no handle. RocketMQ's brokers
from 5.3 on cancel a message with a timer by its recall handle (RECALL_MESSAGE), and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from duemq._net.client import Client, typed_body, typed_header
from duemq._net.id_brokers import has_broker, is_of_none
from duemq._net.routes import PRIMARY
from duemq._values import checks
from duemq._values.times import Span, Time, span_ms, time_ms
from duemq.errors import ArgumentError, IllegalOperationError, NotSupportedError
from duemq.handles import MessageHandle, is_handle
from duemq.pending import ChangedMessage, ChangeResult, Changes
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.records.properties import NAME_END
from duemq.protocol.requests import bodies, headers, recall_handle

T = TypeVar("T")

Which = MessageHandle | str
"""Identifies a waiting message: its handle, the text of its handle, or the id that its broker gave it
(`SendResult.offset_message_id`)."""

MOST_IDS: Final = 1000
"""Maximum number of message ids that a broker accepts in one request."""
MOST_HANDLES: Final = 500
"""Maximum number of handles that are sent in one request."""
MOST_RECALLS: Final = 64
"""Maximum number of recalls in flight at one broker."""

_CANCEL: Final = "cancel"
_NOT_RECALLED: Final = {
    recall_handle.DELIVERED_REMARK: ChangeResult.ALREADY_DELIVERED,
    recall_handle.NO_LONGER_WAITS_REMARK: ChangeResult.NO_LONGER_WAITS,
    recall_handle.UNKNOWN_REMARK: ChangeResult.NEVER_EXISTED,
    # RocketMQ's broker: the time in the handle has passed. The broker cannot know whether the message was cancelled.
    "recall failed, timestamp invalid": ChangeResult.NO_LONGER_WAITS,
}
"""The remarks of brokers with the code 604, without the final ".", and the result that each means for the message."""


def range_ms(topic: str | None, key: str | None, begin: Time | None, end: Time | None) -> tuple[int | None, int | None]:
    """Return the times of a selection, ms since the epoch. Raises ArgumentError, also for an invalid topic or key."""
    if key is not None:
        checks.check_property_text(key, "a key")
    if topic is not None:
        checks.check_topic(topic)
    return (None if begin is None else time_ms(begin)), (None if end is None else time_ms(end))


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of some errors; do nothing if there is none."""
    if errors:
        raise errors[0]


async def of_all(ask: Callable[[str], Awaitable[T]], addresses: Iterable[str]) -> tuple[list[T], list[BaseException]]:
    """Return the answers of all duemq brokers, at least one, and the errors of other brokers, except that they do not
    support the request. Raises the first error if no broker answers."""
    found = await asyncio.gather(*map(ask, addresses), return_exceptions=True)
    answers = [each for each in found if not isinstance(each, BaseException)]
    errors = [each for each in found if isinstance(each, BaseException)]
    others = [each for each in errors if not isinstance(each, NotSupportedError)]
    if not answers:
        raise (others or errors)[0]
    return answers, others


class PendingChanges:
    """Changes messages that wait at the brokers. `client`: the client that sends the requests; `group`: the producer
    group in recalls."""

    def __init__(self, client: Client, group: str, timeout: float) -> None:
        self._client = client
        self._group = group
        self._timeout = timeout

    async def cancel(
        self,
        which: Which | Iterable[Which] | None,
        topic: str | None,
        key: str | None,
        begin: Time | None,
        end: Time | None,
        timeout: float | None,
    ) -> Changes:
        """Cancel waiting messages; return the result for each. See `Changing.cancel` for the arguments and errors."""
        return await self._change(headers.ChangePending(_CANCEL), which, topic, key, begin, end, timeout)

    async def reschedule(
        self,
        which: Which | Iterable[Which] | None,
        delay: Span | None,
        deliver_at: Time | None,
        topic: str | None,
        key: str | None,
        begin: Time | None,
        end: Time | None,
        timeout: float | None,
    ) -> Changes:
        """Give waiting messages another deliver time; return the result for each. Raises ArgumentError unless one of
        `delay` and `deliver_at` is given. See `Changing.reschedule` for the arguments and the other errors."""
        if (deliver_at is None) == (delay is None):
            raise ArgumentError("give one of delay and deliver_at")
        header = headers.ChangePending(
            "reschedule",
            None if deliver_at is None else time_ms(deliver_at),
            delay_ms=None if delay is None else span_ms(delay),
        )
        return await self._change(header, which, topic, key, begin, end, timeout)

    async def deliver_now(
        self,
        which: Which | Iterable[Which] | None,
        topic: str | None,
        key: str | None,
        begin: Time | None,
        end: Time | None,
        timeout: float | None,
    ) -> Changes:
        """Deliver waiting messages immediately; return the result for each. See `Changing.deliver_now` for the
        arguments and errors."""
        return await self._change(headers.ChangePending("deliver"), which, topic, key, begin, end, timeout)

    async def _change(
        self,
        header: headers.ChangePending,
        which: Which | Iterable[Which] | None,
        topic: str | None,
        key: str | None,
        begin: Time | None,
        end: Time | None,
        timeout: float | None,
    ) -> Changes:
        limit = self._timeout if timeout is None else checks.check_timeout(timeout)
        change = _Change(self._client, self._group, header, limit)
        begin_ms, end_ms = range_ms(topic, key, begin, end)
        is_selection = (key, begin, end) != (None, None, None)
        if which is None:
            if topic is None or not is_selection:
                raise ArgumentError(
                    "give message ids or handles (a message without a delay has no handle), or a topic and at least "
                    "one of key, begin and end"
                )
            header.topic, header.key, header.begin_ms, header.end_ms = topic, key, begin_ms, end_ms
            return await change.selected()
        if topic is not None or is_selection:
            raise ArgumentError("give message ids or handles, or a topic with key, begin and end, not both")
        return await change.named(_read(which))


def _read(which: Which | Iterable[Which]) -> list[MessageHandle | str]:
    """Return handles and ids, only one for each message. Raises ArgumentError."""
    given: Iterable[Which] = which if isinstance(which, Iterable) and not isinstance(which, str) else [which]
    found: dict[str, MessageHandle | str] = {}
    for named in given:
        each = MessageHandle.parse(named) if isinstance(named, str) and is_handle(named) else named
        message_id = each.offset_message_id if isinstance(each, MessageHandle) else each
        checks.check_offset_message_id(message_id)
        if not isinstance(each, MessageHandle) and not has_broker(message_id):
            raise ArgumentError(
                f"{message_id!r} is the id that a sender gave a message (its unique key), which does not say where the "
                f"message waits; give its handle, or its offset message id, which `duemq pending list --topic TOPIC "
                f"--key {message_id}` prints, or its topic and this id as the key"
            )
        # A handle is preferred to the id of the same message, since it has more information.
        if message_id not in found or isinstance(each, MessageHandle):
            found[message_id] = each
    return list(found.values())


class _Change:
    """One change that a caller requested. `header` has the action, and the selection if there is one."""

    def __init__(self, client: Client, group: str, header: headers.ChangePending, timeout: float) -> None:
        self._client = client
        self._group = group
        self._header = header
        self._timeout = timeout

    async def selected(self) -> Changes:
        """Change the messages of a selection, at all duemq brokers."""
        addresses = await self._client.all_brokers()
        try:
            found, errors = await of_all(lambda address: self._ask(address, self._header), addresses)
        except NotSupportedError as error:
            raise self._not_supported(error.address, "by id, key, topic or time") from None
        raise_first(errors)
        counts: Counter[str] = sum((Counter(each.counts) for each in found), Counter())
        told = tuple(_changed(message) for each in found for message in each.messages)
        return Changes({ChangeResult(name): count for name, count in counts.items()}, told)

    async def named(self, which: list[MessageHandle | str]) -> Changes:
        """Change the messages of handles, at the brokers in the handles, and of ids, at all brokers."""
        if not which:
            return Changes({}, ())
        brokers = await self._client.brokers_by_name()
        ids: list[str] = []
        at: dict[str, list[MessageHandle]] = {}
        for each in which:
            address = brokers.get(each.broker, {}).get(PRIMARY) if isinstance(each, MessageHandle) else None
            if isinstance(each, MessageHandle) and address is not None:
                at.setdefault(address, []).append(each)
            else:
                # The id of a handle whose broker is not known: the broker may have another name now.
                ids.append(each.offset_message_id if isinstance(each, MessageHandle) else each)
        addresses = sorted({address for members in brokers.values() for address in members.values()})
        work = [self._handles_at(address, handles) for address, handles in at.items()]
        if ids:
            work.append(self._ids(ids, addresses))
        found = await asyncio.gather(*work, return_exceptions=True)
        raise_first([each for each in found if isinstance(each, BaseException)])
        results = {
            name: result for each in found if not isinstance(each, BaseException) for name, result in each.items()
        }
        told = tuple(
            ChangedMessage(name, results[name])
            for name in (each.offset_message_id if isinstance(each, MessageHandle) else each for each in which)
        )
        return Changes(dict(Counter(message.result for message in told)), told)

    async def _ids(self, ids: list[str], addresses: list[str]) -> dict[str, ChangeResult]:
        try:
            lists, errors = await of_all(lambda address: self._ids_at(address, ids), addresses)
        except NotSupportedError as error:
            raise self._not_supported(error.address, "by id, key, topic or time") from None
        results = dict.fromkeys(ids, ChangeResult.NEVER_EXISTED)
        for each in lists:
            results |= {name: result for name, result in each.items() if result is not ChangeResult.NEVER_EXISTED}
        nowhere = [name for name, result in results.items() if result is ChangeResult.NEVER_EXISTED]
        if nowhere:
            # A broker that did not answer may have the messages that no other broker has.
            raise_first(errors)
        results |= {name: ChangeResult.BROKER_UNKNOWN for name in nowhere if is_of_none(name, addresses)}
        return results

    async def _ids_at(self, address: str, ids: list[str]) -> dict[str, ChangeResult]:
        results = dict[str, ChangeResult]()
        for first in range(0, len(ids), MOST_IDS):
            part = headers.ChangePending(
                self._header.action,
                self._header.deliver_ms,
                ",".join(ids[first : first + MOST_IDS]),
                delay_ms=self._header.delay_ms,
            )
            answer = await self._ask(address, part)
            results.update((message.msg_id, ChangeResult(message.result)) for message in answer.messages)
        return results

    async def _handles_at(self, address: str, handles: list[MessageHandle]) -> dict[str, ChangeResult]:
        try:
            return await self._by_handle(address, handles)
        except NotSupportedError:
            if self._header.action != _CANCEL:
                raise self._not_supported(address, "a waiting message") from None
            if any(handle.recall_handle is None for handle in handles):
                raise self._not_supported(
                    address,
                    "a message without a recall handle, which RocketMQ gives from 5.3 on for a timer, not for a level",
                ) from None
        turns = asyncio.Semaphore(MOST_RECALLS)
        results = await asyncio.gather(*(self._recall(address, each, turns) for each in handles))
        return dict(zip((handle.offset_message_id for handle in handles), results, strict=True))

    async def _by_handle(self, address: str, handles: list[MessageHandle]) -> dict[str, ChangeResult]:
        """Change messages by handle at a duemq broker. Raises NotSupportedError if it is another broker."""
        results = {handle.offset_message_id: ChangeResult.NEVER_EXISTED for handle in handles}
        of_topic: dict[str, list[MessageHandle]] = {}
        for handle in handles:
            of_topic.setdefault(handle.topic, []).append(handle)
        for topic, each in of_topic.items():
            for first in range(0, len(each), MOST_HANDLES):
                part = each[first : first + MOST_HANDLES]
                header = headers.ChangeByHandle(
                    self._header.action,
                    topic,
                    ",".join(handle.offset_message_id for handle in part),
                    NAME_END.join(handle.message_id for handle in part),
                    self._header.deliver_ms,
                    self._header.delay_ms,
                )
                answer = await self._client.call(address, RequestCode.CHANGE_BY_HANDLE, header, timeout=self._timeout)
                told = typed_body(answer, bodies.ChangedMessages, address)
                results.update((message.msg_id, ChangeResult(message.result)) for message in told.messages)
        return results

    async def _recall(self, address: str, handle: MessageHandle, turns: asyncio.Semaphore) -> ChangeResult:
        assert handle.recall_handle is not None
        header = headers.RecallMessage(handle.topic, handle.recall_handle, self._group)
        async with turns:
            try:
                answer = await self._client.call(
                    address, RequestCode.RECALL_MESSAGE, header, timeout=self._timeout, expected=STORED
                )
            except IllegalOperationError as error:
                result = _NOT_RECALLED.get(error.remark)
                if result is None:
                    raise
                return result
        typed_header(answer, headers.RecallMessageResponse, address)
        return ChangeResult.CANCELLED

    async def _ask(self, address: str, header: headers.ChangePending) -> bodies.ChangedMessages:
        answer = await self._client.call(address, RequestCode.CHANGE_PENDING, header, timeout=self._timeout)
        return typed_body(answer, bodies.ChangedMessages, address)

    def _not_supported(self, address: str, what: str) -> NotSupportedError:
        verb = {"deliver": "deliver now"}.get(self._header.action, self._header.action)
        return NotSupportedError(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            f"it is not a duemq broker, and cannot {verb} {what}",
            address,
        )


STORED: Final = (
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
)
"""The response codes that mean that a broker has carried out a recall, whether or not it is on the disk."""


def _changed(message: bodies.ChangedEntry) -> ChangedMessage:
    return ChangedMessage(message.msg_id, ChangeResult(message.result))
