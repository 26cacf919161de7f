"""Interceptors see each message of a producer or consumer, for tracing, metrics or common properties.

    class Stamp(ProducerInterceptor):
        def before_send(self, sending):
            properties = {**sending.message.properties, "version": "7"}
            sending.message = replace(sending.message, properties=properties)

    producer = Producer(interceptors=[Stamp()])

An interceptor is a subclass of ProducerInterceptor or ConsumerInterceptor, or of both, that overrides the methods it
needs. The methods are called in the event loop, for each message, so they are ordinary functions that must not block.
With `duemq.sync` they run in the thread of its event loop, with the context variables of the caller's thread. With
several interceptors the `before` methods are called in the given order, and the `after` methods in the opposite order.

No message is lost if a method raises. The exception is logged, once until the method succeeds again, and the message is
processed as it was before the call. There are two special cases. A DueMQError from `before_send` refuses the message,
and the caller of the send gets the error. SystemExit and KeyboardInterrupt end the program, if the event loop runs in
the main thread. One interceptor may serve several producers and consumers; it keeps its state of a message in `notes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from duemq.messages import Message, ReceivedMessage, SendResult


@dataclass(slots=True, eq=False)
class Sending:
    """A message that is being sent."""

    message: Message
    """The message, with its `message_id`. `before_send` may replace it by one made with `dataclasses.replace`."""
    group: str
    """The producer group."""
    client_id: str
    """The producer's client id at the brokers."""
    batched: bool
    """Whether it is sent by `send_many`, `send_each` or `send_batch`; it may then share a request."""
    result: SendResult | None = None
    """The result, if the message is stored. After `send_oneway` both this and `error` are None."""
    error: BaseException | None = None
    """Why the message is not stored or, for a DueMQError with `maybe_stored`, why that is unknown; CancelledError if
    the send was cancelled."""
    notes: dict[object, Any] = field(default_factory=dict)
    """State that interceptors keep; each uses itself as its key."""


@dataclass(slots=True, eq=False)
class SendBatch:
    """Messages of one topic that are sent in one request. A message with a delay or a large body is sent alone."""

    sendings: Sequence[Sending]
    error: BaseException | None = None
    """Why the request failed. After MessageRejectedError `send_many` sends its messages one by one."""
    notes: dict[object, Any] = field(default_factory=dict)
    """State that interceptors keep; each uses itself as its key."""


@dataclass(slots=True, eq=False)
class Handling:
    """A message that is passed to a consumer's handler."""

    message: ReceivedMessage
    group: str
    """The consumer group."""
    client_id: str
    """The consumer's client id at the brokers."""
    model: Literal["clustering", "broadcasting"]
    error: BaseException | None = None
    """The exception of the handler; CancelledError if it was cancelled after `handler_timeout` or by `close`."""
    notes: dict[object, Any] = field(default_factory=dict)
    """State that interceptors keep; each uses itself as its key."""


@dataclass(slots=True, eq=False)
class Receiving:
    """Messages that `receive`, `receive_many` or `async for` returns to the application."""

    messages: Sequence[ReceivedMessage]
    """One message or more, possibly of several topics."""
    group: str
    """The consumer group."""
    client_id: str
    """The consumer's client id at the brokers."""
    model: Literal["clustering", "broadcasting"]
    seconds: float
    """How long the application waited for them."""
    single: bool
    """Whether the call was for one message, rather than for several."""


class ProducerInterceptor:
    """Sees the messages that a producer sends. The methods of this class do nothing."""

    def before_send(self, sending: Sending) -> None:
        """Called for each message before it is checked and sent. It may replace `sending.message`, within the broker's
        limits for properties (32 KiB) and body; if it raises a DueMQError, the message is refused."""

    def after_send(self, sending: Sending) -> None:
        """Called when the outcome of a message is known, before the caller of the send gets it; also for a message that
        was refused, possibly before this interceptor's `before_send` was called."""

    def before_batch(self, batch: SendBatch) -> None:
        """Called before a request with `batched` messages, after their `before_send`."""

    def after_batch(self, batch: SendBatch) -> None:
        """Called after the request, before `after_send` of its messages."""


class ConsumerInterceptor:
    """Sees the messages that a consumer receives. The methods of this class do nothing."""

    def before_handling(self, handling: Handling) -> None:
        """Called before the handler, in the same task: the handler sees the context variables that it sets."""

    def after_handling(self, handling: Handling) -> None:
        """Called when the handler has ended, before the message is settled, unless the handler settled it."""

    def after_receive(self, receiving: Receiving) -> None:
        """Called before a consumer without a handler returns messages to the application."""
