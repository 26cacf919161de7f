"""Messages that wait: RECALL_MESSAGE (370), GET_TIMER_CHECK_POINT (60), GET_TIMER_METRICS (61), and CANCEL_MESSAGE
(30002), duemq's own."""

from __future__ import annotations

from typing import Final

from broker.config import BrokerConfig
from broker.connection import Connection
from broker.errors import Refused
from broker.router import Answer, Router
from broker.topics import Topics
from protocol import fastjson, properties, recall_handle
from protocol.bodies import CancelledMessage, CancelOutcome
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import RemoteProtocolError
from protocol.headers import CancelMessage, NoFields, RecallMessage, RecallMessageResponse, Request, response
from protocol.message_id import offset_message_id, parse_offset_message_id
from protocol.recall_handle import RecallHandle
from scheduler.timer_config import Cancelled
from scheduler.timer_files import metrics_json
from scheduler.timers import Timers
from storage.store import MessageStore

MAX_CANCELLED: Final = 1000
"""Most message ids in one request."""

_OUTCOMES: Final[dict[Cancelled, CancelOutcome]] = {
    Cancelled.CANCELLED: "CANCELLED",
    Cancelled.DELIVERED: "ALREADY_DELIVERED",
    Cancelled.CANCELLED_BEFORE: "ALREADY_CANCELLED",
    Cancelled.UNKNOWN: "NEVER_EXISTED",
}


class TimerHandlers:
    """Cancels messages that wait, and tells of the timers."""

    def __init__(
        self, config: BrokerConfig, store: MessageStore, topics: Topics, timers: Timers, router: Router
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._timers = timers
        self._router = router

    def reconfigure(self, config: BrokerConfig) -> None:
        """Take over a setting that changed: recallMessageEnable."""
        self._config = config

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.RECALL_MESSAGE, RecallMessage, self.recall)
        router.add(RequestCode.CANCEL_MESSAGE, CancelMessage, self.cancel)
        router.add(RequestCode.GET_TIMER_CHECK_POINT, NoFields, self.checkpoint)
        router.add(RequestCode.GET_TIMER_METRICS, NoFields, self.metrics)

    # --- cancelling

    def recall(self, connection: Connection, request: Request[RecallMessage]) -> Answer:
        """Cancel the message that a handle names. It is answered when that is as durable as a send would be."""
        header = request.header
        self.check_allowed("recall")
        if self._topics.get(header.topic) is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{header.topic}] not exist")
        try:
            handle = recall_handle.decode(header.recall_handle)
        except RemoteProtocolError as error:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, str(error)) from None
        if handle.topic != header.topic:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, topic not match")
        if handle.broker_name != self._config.broker_name:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, broker service not available")
        now_ms = request.now_ms
        if handle.place is not None:
            result = self._recall_place(handle, handle.place, now_ms)
        else:
            result = self._recall_key(handle, now_ms)
        if result is Cancelled.DELIVERED:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, the message is already delivered")
        if result is Cancelled.UNKNOWN:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, no such message")
        answer = response(ResponseCode.SUCCESS, None, RecallMessageResponse(handle.unique_key))
        answer.ext["MSG_REGION"] = self._config.region
        return self._router.answer_when_flushed(connection, request, answer)

    def _recall_place(self, handle: RecallHandle, place: tuple[int, int], now_ms: int) -> Cancelled:
        """Cancel by a handle of ours, which says where the message lies."""
        physical_offset, _ = place
        if physical_offset >= self._store.log.end:
            return Cancelled.UNKNOWN
        message = self._store.message_at(physical_offset)
        if message is not None and (
            message.get_property(properties.REAL_TOPIC) != handle.topic
            or message.get_property(properties.UNIQ_KEY) != handle.unique_key
        ):
            # The handle is of another store, which this broker had before.
            return Cancelled.UNKNOWN
        return self._timers.changes.cancel(physical_offset, now_ms)

    def _recall_key(self, handle: RecallHandle, now_ms: int) -> Cancelled:
        """Cancel by a handle of Apache's broker: the message is looked for in its slot. Raises Refused."""
        latest = now_ms + self._timers.config.max_delay * 1000
        physical_offset = None
        if 0 < handle.slot_ms < latest:
            physical_offset = self._timers.changes.find(handle.topic, handle.unique_key, handle.slot_ms)
        if physical_offset is not None:
            return self._timers.changes.cancel(physical_offset, now_ms)
        if not now_ms < handle.slot_ms < latest:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid")
        return Cancelled.UNKNOWN

    def cancel(self, connection: Connection, request: Request[CancelMessage]) -> Answer:
        """Cancel messages by the ids that this broker gave them, and tell what became of each."""
        self.check_allowed("cancel")
        ids = request.header.msg_id.split(",")
        if len(ids) > MAX_CANCELLED:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"cancel failed, {len(ids)} message ids are over {MAX_CANCELLED}")
        places = [self.place_of(message_id) for message_id in ids]
        results = [
            _OUTCOMES[self._timers.changes.cancel(place, request.now_ms) if place is not None else Cancelled.UNKNOWN]
            for place in places
        ]
        told = [CancelledMessage(message_id, result) for message_id, result in zip(ids, results, strict=True)]
        answer = response(ResponseCode.SUCCESS, body=fastjson.dumps(told))
        return self._router.answer_when_flushed(connection, request, answer)

    def place_of(self, message_id: str) -> int | None:
        """The physical offset in an id, None where it is of another broker or store. Raises RemoteProtocolError."""
        _, _, physical_offset = parse_offset_message_id(message_id)
        if physical_offset >= self._store.log.end:
            return None
        message = self._store.message_at(physical_offset)
        # A store that moved has messages whose ids name its old address: each record knows its own.
        known = (
            message.offset_message_id
            if message is not None
            else offset_message_id(self._store.appender.store_host, physical_offset)
        )
        return physical_offset if message_id.upper() == known else None

    def check_allowed(self, what: str) -> None:
        """Raises Refused where messages that wait are not to be touched."""
        if not self._config.recall_enabled:
            raise Refused(
                ResponseCode.NO_PERMISSION, f"{what} failed, operation is forbidden: recallMessageEnable is false"
            )

    # --- telling

    def checkpoint(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Give how far the timers are, as RocketMQ's replicas read it."""
        return response(ResponseCode.SUCCESS, body=self._timers.checkpoint_body())

    def metrics(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Give how many messages of each topic wait."""
        return response(ResponseCode.SUCCESS, body=metrics_json(self._timers.metrics(), request.now_ms, 0))
