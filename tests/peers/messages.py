"""Messages in the form that the client programs exchange, the same for all libraries."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.peers.errors import CallError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send. With `sharding` the library's selector for ordered messages picks the queue."""

    body: bytes
    tags: str | None = None
    keys: str | None = None
    level: int | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    sharding: str | None = None
    timer: Mapping[str, int] = field(default_factory=dict)
    """`deliver_ms`, `delay_ms` or `delay_sec` by the library's own method (Can.TIMER_METHODS)."""

    def to_json(self) -> Json:
        """Return the form of PROTOCOL.md, without unset fields."""
        json: Json = {"body": base64.b64encode(self.body).decode()}
        for name in ("tags", "keys", "level", "sharding"):
            value = getattr(self, name)
            if value is not None:
                json[name] = value
        if self.properties:
            json["properties"] = dict(self.properties)
        if self.timer:
            json["timer"] = dict(self.timer)
        return json


@dataclass(frozen=True, slots=True)
class Sent:
    """A library's result of one send; a batch has one result for all its messages."""

    status: str | None
    error: CallError | None
    msg_id: str | None
    offset_msg_id: str | None
    queue_id: int | None
    queue_offset: int | None
    recall_handle: str | None

    @classmethod
    def from_json(cls, json: Json) -> "Sent":
        """Read the form of PROTOCOL.md."""
        return cls(
            status=json.get("status"),
            error=failure("send", json["error"]) if "error" in json else None,
            msg_id=json.get("msg_id"),
            offset_msg_id=json.get("offset_msg_id"),
            queue_id=json.get("queue_id"),
            queue_offset=json.get("queue_offset"),
            recall_handle=json.get("recall_handle"),
        )

    @property
    def stored(self) -> bool:
        """Whether the broker has acknowledged the message."""
        return self.status == "SEND_OK"


@dataclass(frozen=True, slots=True)
class Received:
    """One message as a consumer received it."""

    topic: str
    queue_id: int
    queue_offset: int
    body: bytes
    tags: str | None
    keys: str | None
    properties: Mapping[str, str]
    reconsume_times: int
    msg_id: str
    offset_msg_id: str | None
    born_time: int
    store_time: int
    receive_time: int
    commitlog_offset: int

    @classmethod
    def from_json(cls, json: Json) -> "Received":
        """Read the form of PROTOCOL.md."""
        return cls(
            topic=json["topic"],
            queue_id=json["queue_id"],
            queue_offset=json["queue_offset"],
            body=base64.b64decode(json["body"] or ""),
            tags=json.get("tags"),
            keys=json.get("keys"),
            properties=json["properties"],
            reconsume_times=json["reconsume_times"],
            msg_id=json["msg_id"],
            offset_msg_id=json.get("offset_msg_id"),
            born_time=json["born_time"],
            store_time=json["store_time"],
            receive_time=json["receive_time"],
            commitlog_offset=json["commitlog_offset"],
        )


@dataclass(frozen=True, slots=True)
class Pulled:
    """The outcome of one pull."""

    status: str
    next_offset: int
    min_offset: int
    max_offset: int
    messages: list[Received]


def failure(op: str, json: Json) -> CallError:
    """Make the exception for an error that a program reported."""
    return CallError(op, json["type"], json["message"], json.get("code"))
