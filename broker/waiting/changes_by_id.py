"""Changes of waiting messages that are named by an id: where the message is, and the outcome of the change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.error_answers import outcome_of
from duemq.broker.net.slices import Slices
from duemq.broker.settings.live_settings import LiveSettings
from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.records.message_id import offset_message_id, parse_offset_message_id
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.requests.bodies import CancelOutcome
from duemq.protocol.requests.headers import response
from duemq.scheduler.timers.changes import owner_of
from duemq.scheduler.timers.config import Cancelled
from duemq.scheduler.timers.index.ids import given_id
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock
from duemq.storage.queues.pull import ColdRead, patiently
from duemq.storage.store import MessageStore

MAX_IDS: Final = 1000
"""Maximum number of message ids in one request, and in the answer about a selection."""
OUTCOMES: Final[dict[Cancelled, CancelOutcome]] = {
    Cancelled.CANCELLED: "CANCELLED",
    Cancelled.DELIVERED: "ALREADY_DELIVERED",
    Cancelled.CANCELLED_BEFORE: "ALREADY_CANCELLED",
    Cancelled.NO_LONGER_WAITS: "NO_LONGER_WAITS",
    Cancelled.UNKNOWN: "NEVER_EXISTED",
}


class ChangesById:
    """Finds waiting messages by their ids and changes them. The handlers of recalls, of `pending` and of recurring
    messages use it."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        store: MessageStore,
        timers: Timers,
        clock: Clock,
        slices: Slices,
        reads: ColdReads,
    ) -> None:
        """`clock`: the messages' clock."""
        self._settings = settings
        self._store = store
        self._timers = timers
        self._clock = clock
        self._slices = slices
        self._reads = reads
        self._learning = asyncio.Lock()

    def check_allowed(self, what: str) -> None:
        """Raise Refused if waiting messages must not be changed (recallMessageEnable). `what`: the request, for the
        error's text."""
        if not self._settings.config.recall_enabled:
            raise Refused(
                ResponseCode.NO_PERMISSION, f"{what} failed, operation is forbidden: recallMessageEnable is false"
            )

    async def physical_offset_of(self, message_id: str, owner: tuple[str, str] | None = None) -> int | None:
        """Return the physical offset in an id, None if the id is from another broker or store. `owner`: topic and
        UNIQ_KEY of the message, if they are known: None is returned if the record is another message's. Raises
        RemoteProtocolError."""
        _, _, physical_offset = parse_offset_message_id(message_id)
        if physical_offset >= self._store.log.end:
            return None
        message = await self._record_of(physical_offset)
        if message is not None and owner is not None and owner != owner_of(message):
            return None
        # After a store has moved, ids of older messages contain its old address, which each record also holds.
        known = (
            given_id(message)
            if message is not None and message.physical_offset != physical_offset
            else message.offset_message_id
            if message is not None
            else offset_message_id(self._store.appender.store_host, physical_offset)
        )
        return physical_offset if message_id.upper() == known else None

    async def _record_of(self, physical_offset: int) -> StoredMessage | None:
        """Return the record at a physical offset or, if that is gone, the message's newest record; None if there is
        neither. Raises OSError."""
        changes = self._timers.changes
        if physical_offset < self._store.log.begin and not changes.ids.is_complete:
            await self._learn_ids()
        return await self._reads.run(changes.record_of, physical_offset)

    async def cancel(self, physical_offset: int, owner: tuple[str, str] | None = None) -> Cancelled:
        """Cancel a message that waits with a timer or a level. `physical_offset`: of its record, or of the record that
        its id names. `owner`: the topic and UNIQ_KEY that the message must have; otherwise the outcome is UNKNOWN.
        Raises StoreError, OSError."""
        return await self.outcome(lambda: self._timers.changes.cancel(physical_offset, self._clock.now_ms(), owner))

    async def outcome(self, change: Callable[[], Cancelled | None]) -> Cancelled:
        """Return the outcome of a change of `TimerChanges`, repeated once the ids are known if it needs them."""
        while (result := await self._reads.run(change)) is None:
            await self._learn_ids()
        return result

    async def _learn_ids(self) -> None:
        """Have the timers learn which records stand for waiting messages that were appended again."""
        ids = self._timers.changes.ids
        async with self._learning:

            def steps() -> Iterator[ColdRead | None]:
                while not ids.is_complete:
                    yield from patiently(lambda: ids.look(self._clock.now_ms()))
                    yield None

            async for _ in self._slices.of(steps(), is_patient=True):
                pass


def ids_in(text: str, action: str) -> list[str]:
    """Return the ids in a request, which commas separate. `action`: for the errors' texts. Raises Refused,
    RemoteProtocolError."""
    ids = text.split(",")
    if len(ids) > MAX_IDS:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"{action} failed, {len(ids)} ids are more than {MAX_IDS}")
    for message_id in ids:
        parse_offset_message_id(message_id)
    return ids


def failed_after(error: Exception, changed: int) -> Command:
    """Return the answer to a request that changed some messages, and then could not change another."""
    code, remark = outcome_of(error)
    return response(code, f"{remark} (after {changed} messages)")
