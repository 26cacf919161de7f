"""Interceptors see the messages of a producer or consumer on their way: for tracing, metrics, common properties.

    class Stamp(ProducerInterceptor):
        def before_send(self, sending):
            properties = {**sending.message.properties, "version": "7"}
            sending.message = replace(sending.message, properties=properties)

    producer = Producer(interceptors=[Stamp()])

An interceptor is a subclass of ProducerInterceptor or ConsumerInterceptor, or of both, that overrides the methods it
needs. They are called in the event loop, for each message, so they are ordinary functions and do not block; with
`duemq.sync`, too, where they run in the thread of its event loop, with the context variables of the caller's thread.
With several interceptors the `before` methods are called in the order given, and the `after` methods in the opposite
order.

What they raise loses no message. It is logged, once until the method succeeds, and the message goes on as it was before
that method. There are two exceptions. A DueMQError from `before_send` refuses the message, and the caller of the send
gets it. SystemExit and KeyboardInterrupt end the program, if the event loop runs in the main thread. One interceptor
may serve several producers and consumers; what it has to remember of a message it keeps in `notes`.
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
    """With its `message_id`. `before_send` may put another one here, made with `dataclasses.replace`."""
    group: str
    """The producer group."""
    client_id: str
    """The producer's id at the brokers."""
    batched: bool
    """Whether it is sent by `send_many`, `send_each` or `send_batch`, so that it may share a request with others."""
    result: SendResult | None = None
    """Of a message that is stored. None, with no error, after `send_oneway`."""
    error: BaseException | None = None
    """Why it is not, or, with `maybe_stored` of a DueMQError, why that is not known; CancelledError if the send was
    cancelled."""
    notes: dict[object, Any] = field(default_factory=dict)
    """For interceptors, by the interceptor itself."""


@dataclass(slots=True, eq=False)
class SendBatch:
    """Messages of one topic that go to a broker in one request; with a delay, or a large body, it is only one."""

    sendings: Sequence[Sending]
    error: BaseException | None = None
    """Why the request failed. After MessageRejectedError `send_many` sends its messages one by one."""
    notes: dict[object, Any] = field(default_factory=dict)
    """For interceptors, by the interceptor itself."""


@dataclass(slots=True, eq=False)
class Handling:
    """A message that a consumer's handler gets."""

    message: ReceivedMessage
    group: str
    """The consumer group."""
    client_id: str
    """The consumer's id at the brokers."""
    model: Literal["clustering", "broadcasting"]
    error: BaseException | None = None
    """What the handler raised; CancelledError if it was cancelled after `handler_timeout`, or when closing."""
    notes: dict[object, Any] = field(default_factory=dict)
    """For interceptors, by the interceptor itself."""


@dataclass(slots=True, eq=False)
class Receiving:
    """Messages that the caller of `receive`, `receive_many` or `async for` gets."""

    messages: Sequence[ReceivedMessage]
    """At least one; those of a `receive` may be of several topics."""
    group: str
    """The consumer group."""
    client_id: str
    """The consumer's id at the brokers."""
    model: Literal["clustering", "broadcasting"]
    seconds: float
    """How long the caller waited for them."""
    single: bool
    """Whether one message was asked for, and not several."""


class ProducerInterceptor:
    """Sees what a producer sends. The methods do nothing by themselves."""

    def before_send(self, sending: Sending) -> None:
        """Called for each message before it is checked and sent. May change `sending.message`; a DueMQError refuses it.
        What it adds has to leave room: the broker bounds properties (32 KiB) and body."""

    def after_send(self, sending: Sending) -> None:
        """Called when the outcome of a message is known, before the caller learns it; also for a message that was
        refused, perhaps before the turn of this interceptor's `before_send`."""

    def before_batch(self, batch: SendBatch) -> None:
        """Called before a request for messages that are `batched`, after their `before_send`."""

    def after_batch(self, batch: SendBatch) -> None:
        """Called when the request is over, before `after_send` of its messages."""


class ConsumerInterceptor:
    """Sees what a consumer receives. The methods do nothing by themselves."""

    def before_handling(self, handling: Handling) -> None:
        """Called before the handler, in the same task: context variables that it sets are the handler's."""

    def after_handling(self, handling: Handling) -> None:
        """Called when the handler has ended, before the message is settled, if the handler did not do that itself."""

    def after_receive(self, receiving: Receiving) -> None:
        """Called before messages are given to a caller, of a consumer without a handler."""
