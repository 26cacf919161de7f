"""Cancels waiting messages: RECALL_MESSAGE (370) by a handle; CANCEL_MESSAGE (30002), duemq's own, by offset message
ids."""

from __future__ import annotations

from typing import Final

from duemq.broker.access.permission import OPERATE, SEND
from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.net.slices import Slices
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.topics import Topics
from duemq.broker.waiting.changes_by_id import OUTCOMES, ChangesById, failed_after, ids_in
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import recall_handle
from duemq.protocol.requests.bodies import CancelledMessage
from duemq.protocol.requests.headers import (
    CancelMessage,
    RecallMessage,
    RecallMessageResponse,
    Request,
    response,
)
from duemq.protocol.requests.recall_handle import RecallHandle
from duemq.scheduler.timers.config import Cancelled
from duemq.scheduler.timers.service import Timers
from duemq.storage.errors import StoreError
from duemq.storage.store import MessageStore

_NOT_RECALLED: Final = {
    Cancelled.DELIVERED: recall_handle.DELIVERED_REMARK,
    Cancelled.NO_LONGER_WAITS: recall_handle.NO_LONGER_WAITS_REMARK,
    Cancelled.UNKNOWN: recall_handle.UNKNOWN_REMARK,
}


class RecallHandlers:
    """Cancels waiting messages by their handles and ids."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        store: MessageStore,
        topics: Topics,
        timers: Timers,
        router: Router,
        slices: Slices,
        changes: ChangesById,
    ) -> None:
        self._settings = settings
        self._store = store
        self._topics = topics
        self._timers = timers
        self._router = router
        self._slices = slices
        self._changes = changes

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.RECALL_MESSAGE, RecallMessage, SEND, self.recall)
        router.add(RequestCode.CANCEL_MESSAGE, CancelMessage, OPERATE, self.cancel)

    async def recall(self, connection: Connection, request: Request[RecallMessage]) -> Answer:
        """Cancel the message that a handle names. The answer is sent once the result is as durable as a send would be;
        this includes an earlier delivery, which may still be only in memory."""
        header = request.header
        self._changes.check_allowed("recall")
        if self._topics.get(header.topic) is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{header.topic}] not exist")
        try:
            handle = recall_handle.decode(header.recall_handle)
        except RemoteProtocolError as error:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, str(error)) from None
        if handle.topic != header.topic:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, topic not match")
        if handle.broker_name != self._settings.config.broker_name:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, broker service not available")
        if handle.stored is not None:
            result = await self._recall_offset(handle, handle.stored[0])
        else:
            result = await self._recall_key(connection, handle, request.now_ms)
        if result in _NOT_RECALLED and not self._settings.config.recall_always_succeeds:
            answer = response(ResponseCode.ILLEGAL_OPERATION, _NOT_RECALLED[result])
        else:
            answer = response(ResponseCode.SUCCESS, None, RecallMessageResponse(handle.unique_key))
            answer.ext["MSG_REGION"] = self._settings.config.region
        return self._router.answer_when_flushed(connection, request, answer)

    async def _recall_offset(self, handle: RecallHandle, physical_offset: int) -> Cancelled:
        """Cancel by a handle from duemq, which contains the record's physical offset. A message with another topic or
        UNIQ_KEY is unknown: the handle is from another store, which this broker had earlier, or made up."""
        if physical_offset >= self._store.log.end:
            return Cancelled.UNKNOWN
        return await self._changes.cancel(physical_offset, (handle.topic, handle.unique_key))

    async def _recall_key(self, connection: Connection, handle: RecallHandle, now_ms: int) -> Cancelled:
        """Cancel by a handle from Apache's broker: the message is searched for in its slot. Raises Refused."""
        latest = now_ms + self._timers.config.max_delay * 1000
        physical_offset = None
        if 0 < handle.slot_ms < latest:
            steps = self._timers.changes.find(handle.topic, handle.unique_key, handle.slot_ms)
            searching = self._slices.of(steps, lambda: not connection.is_closed, is_patient=True)
            found = [each async for each in searching]
            physical_offset = found[0] if found else None
        if physical_offset is not None:
            return await self._changes.cancel(physical_offset, (handle.topic, handle.unique_key))
        if not now_ms < handle.slot_ms < latest:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid")
        return Cancelled.UNKNOWN

    async def cancel(self, connection: Connection, request: Request[CancelMessage]) -> Answer:
        """Cancel messages by their offset message ids; return the outcome for each."""
        self._changes.check_allowed("cancel")
        ids = ids_in(request.header.msg_id, "cancel")
        told: list[CancelledMessage] = []
        try:
            async for message_id in self._slices.of(ids):
                physical_offset = await self._changes.physical_offset_of(message_id)
                result = (
                    await self._changes.cancel(physical_offset) if physical_offset is not None else Cancelled.UNKNOWN
                )
                told.append(CancelledMessage(message_id, OUTCOMES[result]))
        except (Refused, StoreError, OSError) as error:
            answer = failed_after(error, len(told))
        else:
            answer = response(ResponseCode.SUCCESS, body=fastjson.dumps(told))
        return self._router.answer_when_flushed(connection, request, answer)
