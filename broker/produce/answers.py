"""Answers to sends. The answer to a JSON request is made from a prepared format that lacks only the numbers and the
recall handle."""

from __future__ import annotations

import struct
from typing import Final

from duemq.broker.net.router import Answer
from duemq.broker.produce.message import ByTimer, NewMessage
from duemq.broker.settings.config import BrokerConfig
from duemq.protocol.codes import FLAG_ONEWAY, LANGUAGE, VERSION, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON
from duemq.protocol.records import properties
from duemq.protocol.records.message_id import offset_message_id
from duemq.protocol.records.timer_properties import out_ms
from duemq.protocol.requests import recall_handle
from duemq.protocol.requests.headers import Request, SendMessage, SendMessageResponse, response

FRAME: Final = struct.Struct(">II").pack
"""Packs the sizes of a frame and of its JSON header."""
_UNIQ_KEY: Final = f"{properties.UNIQ_KEY}{properties.NAME_END}"
_UNIQ_KEY_SIZE: Final = len(_UNIQ_KEY)


class SendAnswers:
    """Makes the answers to sends."""

    def __init__(self, config: BrokerConfig, store_host: bytes) -> None:
        """`store_host`: in the form of records; part of the message ids. None of the settings used here changes while
        the broker runs."""
        self._store_host = store_host
        self._broker_name = config.broker_name
        self._extra_ext = {"MSG_REGION": config.region, "TRACE_ON": "true" if config.trace_on else "false"}
        self._gives_handles = " " not in config.broker_name
        """False if the broker's name contains a blank, since blanks separate the words of a handle."""
        self.plain = self._format(b"")
        """The format of an answer's JSON header, for physical offset, queue id, queue offset and opaque."""
        self._timer = self._format(b',"recallHandle":"%b"')

    def _format(self, more: bytes) -> bytes:
        region = fastjson.dumps(self._extra_ext["MSG_REGION"]).replace(b"%", b"%%")
        switch, host = self._extra_ext["TRACE_ON"].encode(), self._store_host.hex().upper().encode()
        return (
            b'{"code":0,"extFields":{"MSG_REGION":%b,"TRACE_ON":"%b","msgId":"%b%%016X","queueId":"%%d",'
            b'"queueOffset":"%%d"%b},"flag":1,"language":"%b","opaque":%%d,"serializeTypeCurrentRPC":"JSON",'
            b'"version":%d}' % (region, switch, host, more, LANGUAGE.encode(), VERSION)
        )

    def accepted(self, request: Request[SendMessage], queue_id: int, queue_offset: int, physical_offset: int) -> Answer:
        """Return the answer for a staged message; None if the sender wants none (one-way)."""
        if request.flag & FLAG_ONEWAY:
            return None
        if request.codec == JSON:
            head = self.plain % (physical_offset, queue_id, queue_offset, request.opaque)
            size = len(head)
            return FRAME(size + 4, size) + head
        return self.answer(offset_message_id(self._store_host, physical_offset), queue_id, queue_offset)

    def accepted_timer(
        self,
        request: Request[SendMessage],
        queue_id: int,
        queue_offset: int,
        physical_offset: int,
        *,
        deliver_ms: int,
        slot_ms: int,
    ) -> Answer:
        """Return the answer for a staged message that waits for its time. It has a recall handle if the message has a
        UNIQ_KEY. `slot_ms`: TIMER_OUT_MS."""
        if request.flag & FLAG_ONEWAY:
            return None
        header = request.header
        unique_key = _unique_key(header.properties or "")
        if not unique_key or not self._gives_handles:
            return self.accepted(request, queue_id, queue_offset, physical_offset)
        handle = recall_handle.encode(header.topic, self._broker_name, slot_ms, unique_key, physical_offset, deliver_ms)
        if request.codec == JSON:
            head = self._timer % (physical_offset, queue_id, queue_offset, handle, request.opaque)
            return FRAME(len(head) + 4, len(head)) + head
        message_id = offset_message_id(self._store_host, physical_offset)
        return self.answer(message_id, queue_id, queue_offset, handle.decode())

    def staged(
        self, request: Request[SendMessage], message: NewMessage, queue_offset: int, physical_offset: int
    ) -> Answer:
        """Return the answer for a staged message, as `accepted` or `accepted_timer` makes it."""
        queue_id, due = message.queue.queue_id, message.due
        if not isinstance(due, ByTimer):
            return self.accepted(request, queue_id, queue_offset, physical_offset)
        return self.accepted_timer(
            request,
            queue_id,
            queue_offset,
            physical_offset,
            deliver_ms=due.deliver_ms,
            slot_ms=out_ms(due.deliver_ms),
        )

    def answer(self, message_id: str, queue_id: int, queue_offset: int, handle: str | None = None) -> Command:
        """Return an answer as a command. `message_id`: several ids are separated by commas."""
        header = SendMessageResponse(message_id, queue_id, queue_offset, recall_handle=handle)
        answer = response(ResponseCode.SUCCESS, None, header)
        answer.ext.update(self._extra_ext)
        return answer


def _unique_key(text: str) -> str | None:
    """Return the UNIQ_KEY of a message; None if it has none, or one that a recall handle cannot contain."""
    at = text.find(_UNIQ_KEY)
    if at < 0:
        return None
    start = at + _UNIQ_KEY_SIZE
    end = text.find(properties.PROPERTY_END, start)
    unique_key = text[start:end] if end >= 0 else text[start:]
    if (at and text[at - 1] != properties.PROPERTY_END) or text.count(_UNIQ_KEY) != 1:
        unique_key = properties.get(text, properties.UNIQ_KEY) or ""
    return unique_key if " " not in unique_key else None
