"""A client for duemq, the broker for delayed messages, and for any broker that speaks RocketMQ's remoting protocol.

    async with Producer("127.0.0.1:9876") as producer:
        result = await producer.send("orders", b"remember", delay="1h30m")
        await producer.reschedule(result.handle, delay="2h")  # or cancel, or deliver_now

    async with Consumer("billing", nameserver="127.0.0.1:9876") as consumer:
        consumer.subscribe("orders")
        async for message in consumer:
            print(message.body, message.lateness_ms)
            await message.ack()

    async with Admin("127.0.0.1:9876") as admin:
        async for waiting in admin.pending("orders"):
            print(waiting.due_time_ms, waiting.offset_message_id)

`errors` draws the tree of exceptions; all are DueMQError.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    """The version of the installed package."""

    from duemq import errors as errors
    from duemq import sync as sync
    from duemq import testing as testing
    from duemq._values.retries import Retries
    from duemq.admin import Admin
    from duemq.consumer import Consumer
    from duemq.consumer import PushConsumer as PushConsumer
    from duemq.errors import (
        AccessDeniedError,
        ArgumentError,
        BodyError,
        BrokerError,
        BrokerFailureError,
        BusyError,
        ClosedError,
        ConnectError,
        ConnectionLostError,
        DelayError,
        DueMQError,
        GroupNotFoundError,
        IllegalOperationError,
        MessageRejectedError,
        NoPermissionError,
        NoRouteError,
        NotFoundError,
        NotSupportedError,
        PeerError,
        RequestTimeoutError,
        SubscriptionError,
        TopicNotFoundError,
        UnavailableError,
    )
    from duemq.handles import MessageHandle
    from duemq.interceptors import (
        ConsumerInterceptor,
        Handling,
        ProducerInterceptor,
        Receiving,
        SendBatch,
        Sending,
    )
    from duemq.messages import (
        Message,
        MessageQueue,
        ReceivedMessage,
        SendManyError,
        SendOutcome,
        SendResult,
        SendStatus,
    )
    from duemq.pending import (
        ChangedMessage,
        ChangeResult,
        Changes,
        DueCurve,
        PendingMessage,
        Recurrence,
        RecurringMessage,
        RecurringResult,
    )
    from duemq.producer import Producer

__all__ = [
    "AccessDeniedError",
    "Admin",
    "ArgumentError",
    "BodyError",
    "BrokerError",
    "BrokerFailureError",
    "BusyError",
    "ChangeResult",
    "ChangedMessage",
    "Changes",
    "ClosedError",
    "ConnectError",
    "ConnectionLostError",
    "Consumer",
    "ConsumerInterceptor",
    "DelayError",
    "DueCurve",
    "DueMQError",
    "GroupNotFoundError",
    "Handling",
    "IllegalOperationError",
    "Message",
    "MessageHandle",
    "MessageQueue",
    "MessageRejectedError",
    "NoPermissionError",
    "NoRouteError",
    "NotFoundError",
    "NotSupportedError",
    "PeerError",
    "PendingMessage",
    "Producer",
    "ProducerInterceptor",
    "ReceivedMessage",
    "Receiving",
    "Recurrence",
    "RecurringMessage",
    "RecurringResult",
    "RequestTimeoutError",
    "Retries",
    "SendBatch",
    "SendManyError",
    "SendOutcome",
    "SendResult",
    "SendStatus",
    "Sending",
    "SubscriptionError",
    "TopicNotFoundError",
    "UnavailableError",
    "__version__",
]

_MODULES = {
    "_values.retries": ("Retries",),
    "handles": ("MessageHandle",),
    "admin": ("Admin",),
    "consumer": ("Consumer", "PushConsumer"),
    "interceptors": (
        "ConsumerInterceptor",
        "Handling",
        "ProducerInterceptor",
        "Receiving",
        "SendBatch",
        "Sending",
    ),
    "messages": (
        "Message",
        "MessageQueue",
        "ReceivedMessage",
        "SendManyError",
        "SendOutcome",
        "SendResult",
        "SendStatus",
    ),
    "pending": (
        "ChangedMessage",
        "ChangeResult",
        "Changes",
        "DueCurve",
        "PendingMessage",
        "Recurrence",
        "RecurringMessage",
        "RecurringResult",
    ),
    "producer": ("Producer",),
    "errors": (
        "AccessDeniedError",
        "ArgumentError",
        "BodyError",
        "BrokerError",
        "BrokerFailureError",
        "BusyError",
        "ClosedError",
        "ConnectError",
        "ConnectionLostError",
        "DelayError",
        "DueMQError",
        "GroupNotFoundError",
        "IllegalOperationError",
        "MessageRejectedError",
        "NoPermissionError",
        "NoRouteError",
        "NotFoundError",
        "NotSupportedError",
        "PeerError",
        "RequestTimeoutError",
        "SubscriptionError",
        "TopicNotFoundError",
        "UnavailableError",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_WHOLE = ("errors", "sync", "testing")
"""Modules that are there after `import duemq` alone."""

if not TYPE_CHECKING:  # type checkers would take any name, a wrong one too, for one that this function knows

    def __getattr__(name: str) -> object:
        """Import a name of the package on first use: `duemq serve`, a command of this package, needs no client. Raises
        AttributeError if the package has no such name."""
        if name == "__version__":
            return import_module("importlib.metadata").version("duemq")
        if name in _WHOLE:
            return import_module(f"duemq.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"duemq.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_WHOLE})
