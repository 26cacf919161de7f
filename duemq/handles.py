"""The handle of a waiting message: a short text that an application keeps in order to cancel or reschedule it later.

    str(handle)     duemq1.<words>.<offset message id>
                    duemq1r.<recall handle>.<offset message id>

`words` is base64url, without padding, of "<topic> <message id> <broker name>". A broker that supports recalls returns a
recall handle, which contains the same words (`protocol.requests.recall_handle`); it is kept as the broker returned it,
without its padding. The text consists of letters, digits, '.', '-' and '_', about 120 to 250 characters.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import Final, Self

from duemq.errors import ArgumentError
from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.requests import recall_handle as recall_handles

_TEXT: Final = re.compile(r"duemq1(r?)\.([A-Za-z0-9_-]+)\.([0-9A-Fa-f]{32}(?:[0-9A-Fa-f]{24})?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class MessageHandle:
    """Identifies one waiting message, for `cancel`, `reschedule` and `deliver_now` of `Producer` and `Admin`.

    A delayed send returns it as `SendResult.handle`. It remains valid for the message's whole life, even after the
    message was rescheduled. `str(handle)` is a text to keep in a database, and `MessageHandle.parse(text)` reads it;
    the methods accept the text as well.
    """

    topic: str
    broker: str
    """Name of the broker where the message waits."""
    message_id: str
    """The client's id, as in `SendResult.message_id`."""
    offset_message_id: str
    """The broker's id, as in `SendResult.offset_message_id`."""
    recall_handle: str | None = None
    """RocketMQ's own handle, if the broker returned one: RocketMQ's from 5.3 on do so for messages with a timer."""

    def __str__(self) -> str:
        if self.recall_handle is not None:
            return f"duemq1r.{self.recall_handle.rstrip('=')}.{self.offset_message_id}"
        words = f"{self.topic} {self.message_id} {self.broker}".encode()
        return f"duemq1.{urlsafe_b64encode(words).decode().rstrip('=')}.{self.offset_message_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a handle. Raises ArgumentError for any other text."""
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is not None:
            kind, encoded, offset_message_id = found.groups()
            encoded += "=" * (-len(encoded) % 4)
            try:
                if kind:
                    return cls.of_recall_handle(encoded, offset_message_id)
                topic, message_id, broker = urlsafe_b64decode(encoded).decode().split(" ", 2)
                return cls(topic, broker, message_id, offset_message_id)
            except (ValueError, RemoteProtocolError):
                pass
        raise ArgumentError(f"{text!r} is not a message handle; str(result.handle) of a delayed send is one")

    @classmethod
    def of_recall_handle(cls, recall_handle: str, offset_message_id: str) -> Self:
        """Make a handle from a broker's recall handle. Raises RemoteProtocolError if `recall_handle` is not valid."""
        found = recall_handles.decode(recall_handle)
        return cls(found.topic, found.broker_name, found.unique_key, offset_message_id, recall_handle)


def is_handle(text: str) -> bool:
    """Return whether a text looks like a handle, rather than an id."""
    return text.startswith("duemq1")
