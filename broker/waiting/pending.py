"""Waiting messages: LIST_PENDING (30003), DUE_CURVE (30004) and CHANGE_PENDING (30005) for operators and programs, and
CHANGE_BY_HANDLE (30010) for the senders of messages; all duemq's own.

A search may read the whole timer log. It is done in slices, with other work in between; only a few searches run at a
time, since each holds a piece of the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Final, NamedTuple, TypeVar

from duemq.broker.access.permission import OPERATE, SEND, PlainAction, Role, needs, topic_or_all
from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.net.slices import Slices
from duemq.broker.waiting.changes_by_id import MAX_IDS, OUTCOMES, ChangesById, failed_after, ids_in
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import TimerIllegal
from duemq.protocol.frames import fastjson
from duemq.protocol.records import properties, recurrence
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.requests.bodies import (
    ChangedEntry,
    ChangedMessages,
    ChangeOutcome,
    DueCurveBody,
    PendingEntry,
    PendingPage,
    PendingRecurrence,
)
from duemq.protocol.requests.headers import ChangeByHandle, ChangePending, ListPending, QueryDueCurve, Request, response
from duemq.scheduler.recurring.records import is_recurring
from duemq.scheduler.search import SearchPosition, Selection, WaitingMessage, WaitingMessages
from duemq.scheduler.timers.config import Cancelled, Refusal
from duemq.scheduler.timers.index.ids import given_id
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock
from duemq.storage.errors import StoreError
from duemq.storage.queues.pull import ColdRead

T = TypeVar("T")

MAX_PAGE: Final = 1000
MAX_PAGE_BYTES: Final = 1024 * 1024
"""A page ends before the properties of its messages exceed this."""
MAX_STEPS: Final = 10_000
MIN_STEP_MS: Final = 1000
MAX_SEARCHES: Final = 2
MAX_QUEUED: Final = 64
"""How many searches may wait for their turn; further searches are refused."""
_CHANGE_UNITS: Final = 256
"""How many messages of a selection are found at a time and then changed."""
_MAX_MS: Final = 2**53
"""The largest number of ms that is accepted as a time or a delay."""

_CANCEL: Final = "cancel"
_RESCHEDULE: Final = "reschedule"
ACTIONS: Final[dict[str, ChangeOutcome]] = {
    _CANCEL: "CANCELLED",
    _RESCHEDULE: "RESCHEDULED",
    "deliver": "DELIVERED_NOW",
}
"""The actions on messages, each with the outcome reported when it succeeds."""
_REFUSALS: Final = {
    Refusal.DISABLED: (ResponseCode.SYSTEM_ERROR, "timerWheelEnable is false"),
    Refusal.TOO_FAR: (ResponseCode.MESSAGE_ILLEGAL, "the time is further ahead than timerMaxDelaySec"),
    Refusal.STALLED: (ResponseCode.SERVICE_NOT_AVAILABLE, "service not available now: the timer log cannot be written"),
    Refusal.CONGESTED: (ResponseCode.SYSTEM_ERROR, "timerCongestNumEachSlot messages wait for that second"),
}


class _Found(NamedTuple):
    """A message to change: its id, and the physical offset of its record, None if that is still to be looked up.
    `owner`: the topic and the UNIQ_KEY that it has to have, None if they do not matter."""

    message_id: str
    physical_offset: int | None = None
    owner: tuple[str, str] | None = None


class PendingHandlers:
    """Lists, counts and changes waiting messages. `clock` is the messages' clock."""

    def __init__(
        self,
        *,
        timers: Timers,
        messages: WaitingMessages,
        changes: ChangesById,
        router: Router,
        clock: Clock,
        slices: Slices,
        reads: ColdReads,
    ) -> None:
        self._slices = slices
        self._reads = reads
        self._timers = timers
        self._messages = messages
        self._changes = changes
        self._router = router
        self._clock = clock
        self._turns = asyncio.Semaphore(MAX_SEARCHES)
        self._queued = 0

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(
            RequestCode.LIST_PENDING,
            ListPending,
            needs(topic_or_all(PlainAction.ANY), role=Role.LOOK),
            self.list_pending,
        )
        router.add(
            RequestCode.DUE_CURVE, QueryDueCurve, needs(topic_or_all(PlainAction.ANY), role=Role.LOOK), self.curve
        )
        router.add(RequestCode.CHANGE_PENDING, ChangePending, OPERATE, self.change)
        # As with a recall, a client that may send to the topic may also withdraw its messages, if it has the handles.
        router.add(RequestCode.CHANGE_BY_HANDLE, ChangeByHandle, SEND, self.change_by_handle)

    # --- in slices

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until one more search may begin. Raises Refused if too many wait."""
        if self._queued >= MAX_QUEUED:
            raise Refused(ResponseCode.SYSTEM_BUSY, f"{MAX_QUEUED} searches are already waiting, try again later")
        self._queued += 1
        try:
            await self._turns.acquire()
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._turns.release()

    async def _result(self, connection: Connection, steps: Iterator[T | ColdRead | None]) -> T:
        """Run a search, and return its one result."""
        async with self._turn():
            results = [
                found async for found in self._slices.of(steps, lambda: not connection.is_closed, is_patient=True)
            ]
        return results[0]

    # --- looking

    async def list_pending(self, connection: Connection, request: Request[ListPending]) -> Answer:
        """Return a page of the waiting messages, or count them."""
        header = request.header
        selection = _selection(header)
        if header.count_only:
            counted = await self._result(connection, self._messages.count(selection, request.now_ms))
            return response(ResponseCode.SUCCESS, body=fastjson.dumps(PendingPage([], None, counted)))
        if not 1 <= header.limit <= MAX_PAGE:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"limit={header.limit}: a page has 1 to {MAX_PAGE} messages")
        try:
            after = SearchPosition.parse(header.cursor) if header.cursor is not None else None
        except ValueError:
            raise Refused(ResponseCode.SYSTEM_ERROR, "unknown cursor: this broker did not issue it") from None
        async with self._turn():
            page = await self._page(
                connection, self._messages.select(selection, self._clock.now_ms(), after), header.limit
            )
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(page))

    async def _page(
        self, connection: Connection, steps: Iterator[WaitingMessage | ColdRead | None], limit: int
    ) -> PendingPage:
        messages: list[PendingEntry] = []
        last, size = None, 0
        async with aclosing(self._slices.of(steps, lambda: not connection.is_closed, is_patient=True)) as all_found:
            async for found in all_found:
                size += len(found.message.properties_text)
                if len(messages) == limit or (messages and size > MAX_PAGE_BYTES):
                    return PendingPage(messages, str(last), len(messages))
                messages.append(_described(found))
                last = found.search_position
        return PendingPage(messages, None, len(messages))

    async def curve(self, connection: Connection, request: Request[QueryDueCurve]) -> Answer:
        """Return the number of messages due in each step of time."""
        header = request.header
        begin_ms = header.begin_ms if header.begin_ms is not None else self._clock.now_ms() // 1000 * 1000
        if not MIN_STEP_MS <= header.step_ms <= _MAX_MS or not 1 <= header.steps <= MAX_STEPS:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"stepMs={header.step_ms}, steps={header.steps}: a curve has 1 to {MAX_STEPS} steps of "
                f"{MIN_STEP_MS} ms or more",
            )
        if abs(begin_ms) > _MAX_MS:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"beginMs={begin_ms} is not a time")
        steps = self._messages.curve(begin_ms, header.step_ms, header.steps, request.now_ms, header.topic or None)
        counts = await self._result(connection, steps)
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(DueCurveBody(begin_ms, header.step_ms, counts)))

    # --- changing

    async def change(self, connection: Connection, request: Request[ChangePending]) -> Answer:
        """Cancel messages, give them another time or deliver them now; return the outcome for each. The answer is sent
        once the changes are as durable as a send would be."""
        header = request.header

        async def work(done: ChangedMessages) -> None:
            if header.msg_id is not None:
                await self._change(self._named(header), header, done)
            else:
                async with self._turn():
                    await self._change_selected(_selection_to_change(header), header, done)

        return await self._changed(connection, request, work)

    async def change_by_handle(self, connection: Connection, request: Request[ChangeByHandle]) -> Answer:
        """Cancel messages of one topic, give them another time or deliver them now; the contents of their handles name
        them. Return the outcome for each, once the changes are as durable as a send would be."""
        header = request.header

        async def work(done: ChangedMessages) -> None:
            await self._change(_of_handles(header), header, done)

        return await self._changed(connection, request, work)

    async def _changed(
        self,
        connection: Connection,
        request: Request[ChangePending] | Request[ChangeByHandle],
        work: Callable[[ChangedMessages], Awaitable[None]],
    ) -> Answer:
        header = request.header
        self._changes.check_allowed("change")
        _check_action(header)
        if header.delay_ms is not None:
            header.deliver_ms, header.delay_ms = self._clock.now_ms() + header.delay_ms, None
        if header.deliver_ms is not None:
            await self._reads.run(self._check_time, header.deliver_ms)
        done = ChangedMessages({}, [])
        try:
            await work(done)
        except (Refused, StoreError, OSError) as error:
            answer = failed_after(error, sum(done.counts.values()))
        else:
            answer = response(ResponseCode.SUCCESS, body=fastjson.dumps(done))
        return self._router.answer_when_flushed(connection, request, answer)

    def _named(self, header: ChangePending) -> Iterator[_Found]:
        """Return the messages that a request names. Raises Refused, RemoteProtocolError."""
        ids = ids_in(header.msg_id or "", header.action)
        if _selection(header) != Selection():
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{header.action} failed: name messages or select them, not both")
        return map(_Found, ids)

    async def _change_selected(self, selection: Selection, header: ChangePending, done: ChangedMessages) -> None:
        """Change the messages of a selection: find some, change them, repeatedly. Raises Refused, StoreError,
        OSError."""
        part: list[_Found] = []
        async for found in self._slices.of(self._messages.select(selection, self._clock.now_ms()), is_patient=True):
            # The messages themselves are not kept: together they may be large.
            part.append(_Found(given_id(found.message), found.message.physical_offset))
            if len(part) == _CHANGE_UNITS:
                await self._change(part, header, done)
                part = []
        await self._change(part, header, done)

    async def _change(
        self, messages: Iterable[_Found], header: ChangePending | ChangeByHandle, done: ChangedMessages
    ) -> None:
        """Change messages, and note the outcome for each. Raises Refused, StoreError, OSError."""
        async for found in self._slices.of(messages):
            outcome = await self._change_one(found, header)
            done.counts[outcome] = done.counts.get(outcome, 0) + 1
            if len(done.messages) < MAX_IDS:
                done.messages.append(ChangedEntry(found.message_id, outcome))

    async def _change_one(self, found: _Found, header: ChangePending | ChangeByHandle) -> ChangeOutcome:
        physical_offset = found.physical_offset
        if physical_offset is None:
            physical_offset = await self._changes.physical_offset_of(found.message_id, found.owner)
        if physical_offset is None:
            return "NEVER_EXISTED"

        def change() -> Cancelled | None:
            if header.action == _CANCEL:
                return self._messages.cancel(physical_offset, self._clock.now_ms(), found.owner)
            if header.deliver_ms is not None:
                self._check_time(header.deliver_ms)
            return self._messages.reschedule(physical_offset, header.deliver_ms or 0, self._clock.now_ms(), found.owner)

        result = await self._changes.outcome(change)
        return OUTCOMES[result] if result is not Cancelled.CANCELLED else ACTIONS[header.action]

    def _check_time(self, deliver_ms: int) -> None:
        """Raise Refused if no message may now be scheduled for this time."""
        now_ms = self._clock.now_ms()
        refusal = self._timers.refusal(deliver_ms, now_ms) if deliver_ms > now_ms else None
        if refusal is not None:
            code, reason = _REFUSALS[refusal]
            raise Refused(code, f"reschedule failed, {reason}")


def _of_handles(header: ChangeByHandle) -> Iterator[_Found]:
    """Return the messages that a request names. Raises Refused, RemoteProtocolError."""
    ids, keys = ids_in(header.msg_id, header.action), header.uniq_key.split(properties.NAME_END)
    if len(keys) != len(ids):
        raise Refused(ResponseCode.SYSTEM_ERROR, f"{header.action} failed, {len(keys)} uniqKeys for {len(ids)} ids")
    return (_Found(message_id, None, (header.topic, key)) for message_id, key in zip(ids, keys, strict=True))


def _check_action(header: ChangePending | ChangeByHandle) -> None:
    if header.action not in ACTIONS:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"action={header.action[:40]} is not one of {', '.join(ACTIONS)}")
    given = [number for number in (header.deliver_ms, header.delay_ms) if number is not None]
    if len(given) != (1 if header.action == _RESCHEDULE else 0) or abs(sum(given)) > _MAX_MS:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"{header.action}, deliverMs={header.deliver_ms}, delayMs={header.delay_ms}: reschedule needs exactly one "
            "of them, other actions neither",
        )


def _selection(header: ListPending | ChangePending) -> Selection:
    """Return the messages that a request selects. An empty text counts as absent, as in the binary header."""
    recurring = isinstance(header, ListPending) and bool(header.recurring)
    return Selection(header.topic or None, header.key or None, header.begin_ms, header.end_ms, recurring)


def _selection_to_change(header: ChangePending) -> Selection:
    """Return the messages that a request for a change selects. It must have a topic and at least one more criterion.
    Raises Refused."""
    selection = _selection(header)
    if selection.topic is None or (selection.key, selection.begin_ms, selection.end_ms) == (None, None, None):
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"{header.action} failed: give msgId, or topic and at least one of key, beginMs, endMs",
        )
    return selection


def _described(found: WaitingMessage) -> PendingEntry:
    message = found.message
    values = properties.parse(message.properties_text)
    queue_id = values.get(properties.REAL_QID, "")
    return PendingEntry(
        msg_id=given_id(message),
        unique_key=values.get(properties.UNIQ_KEY),
        topic=found.topic,
        queue_id=int(queue_id) if queue_id.isascii() and queue_id.isdecimal() else 0,
        deliver_ms=found.due_ms,
        delay_level=found.delay_level,
        keys=values.get(properties.KEYS),
        tags=values.get(properties.TAGS),
        body_size=len(message.body),
        born_ms=message.born_timestamp,
        store_ms=message.store_timestamp,
        recurrence=_recurrence_of(message),
    )


def _recurrence_of(message: StoredMessage) -> PendingRecurrence | None:
    if not is_recurring(message):
        return None
    try:
        found = recurrence.read(message.properties_text)
    except TimerIllegal:
        return PendingRecurrence()
    return PendingRecurrence(
        every_ms=found.every_ms,
        cron=found.cron,
        zone=found.zone,
        start_ms=found.start_ms,
        end_ms=found.end_ms,
        count=found.left,
        is_paused=found.paused_ms is not None,
    )
