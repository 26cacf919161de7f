"""OpenTelemetry for producers and consumers: spans, metrics, and trace context in messages.

    from duemq.otel import Telemetry

    telemetry = Telemetry()
    producer = Producer(interceptors=[telemetry])
    consumer = Consumer("billing", on_message, interceptors=[telemetry])

Needs `pip install 'duemq[otel]'`, which installs OpenTelemetry's API; the application chooses the SDK and the exporter.
Names follow the semantic conventions for messaging and for RocketMQ
(https://opentelemetry.io/docs/specs/semconv/messaging/), which are still in development.

| span | kind | when |
| --- | --- | --- |
| `send TOPIC` | producer | `send`, `send_oneway`, `schedule`: the message gets the span's context |
| `create TOPIC` | producer | each message of `send_many`, `send_each`, `send_batch`, which gets the span's context |
| `send TOPIC` | client | each request for such messages, with links to their spans |
| `process TOPIC` | consumer | a call of the handler, with a link to the message's context, by default also its parent |
| `receive TOPIC` | consumer | `receive`, `receive_many`, `async for`, with links to the messages' contexts |

A message that already has a context in its properties keeps it; the span `send TOPIC` then links to that context. The
context is in the message's properties under the names of the propagator, by default W3C's `traceparent`, `tracestate`
and `baggage`, as with OpenTelemetry's instrumentation of RocketMQ's Java clients. A message keeps its context over its
delay, retries and recurrences.

Metrics: `messaging.client.sent.messages` and `messaging.client.consumed.messages`, in messages, and
`messaging.client.operation.duration` and `messaging.process.duration`, in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NamedTuple

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    told = f"duemq.otel needs the package {error.name}: pip install 'duemq[otel]'"
    raise ModuleNotFoundError(told, name=error.name) from error

from duemq.errors import ArgumentError, ClosedError
from duemq.interceptors import ConsumerInterceptor, Handling, ProducerInterceptor, Receiving, SendBatch, Sending
from duemq.messages import SHARDING_KEY, Message, ReceivedMessage

if TYPE_CHECKING:
    from duemq import sync

Attributes = dict[str, AttributeValue]

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds of the histogram buckets of both durations, in seconds, from the conventions."""

_SYSTEM: Final = "messaging.system"
_OPERATION: Final = "messaging.operation.name"
_OPERATION_TYPE: Final = "messaging.operation.type"
_TOPIC: Final = "messaging.destination.name"
_QUEUE: Final = "messaging.destination.partition.id"
_CLIENT: Final = "messaging.client.id"
_COUNT: Final = "messaging.batch.message_count"
_MESSAGE_ID: Final = "messaging.message.id"
_GROUP: Final = "messaging.consumer.group.name"
_NAMESPACE: Final = "messaging.rocketmq.namespace"
_MODEL: Final = "messaging.rocketmq.consumption_model"
_TYPE: Final = "messaging.rocketmq.message.type"
_KEYS: Final = "messaging.rocketmq.message.keys"
_TAG: Final = "messaging.rocketmq.message.tag"
_LEVEL: Final = "messaging.rocketmq.message.delay_time_level"
_DELIVERY: Final = "messaging.rocketmq.message.delivery_timestamp"
_MESSAGE_GROUP: Final = "messaging.rocketmq.message.group"
_ERROR: Final = "error.type"

_NOT_SENT: Final = (ArgumentError, ClosedError)
"""Errors of messages that were not sent to a broker."""


class _Begun(NamedTuple):
    """A span that has begun and not ended."""

    span: Span
    since: float
    """When the span began, by the monotonic clock, in seconds."""
    token: Token[Context] | None = None
    """The token with which to detach the span, if it is the current one of its task."""


class Telemetry(ProducerInterceptor, ConsumerInterceptor):
    """Interceptors that record spans and metrics of producers and consumers, see `duemq.otel`.

    `tracer_provider`, `meter_provider`, `propagator`: used instead of OpenTelemetry's global ones.
    `parent`: whether a span `process TOPIC` belongs to the sender's trace. False: it begins in the trace in which the
        handler is called, usually a new one, and only a link leads to the sender's trace. This is for messages that
        wait for days, since many backends close a trace after minutes.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        propagator: TextMapPropagator | None = None,
        parent: bool = True,
    ) -> None:
        release = version("duemq")
        self._tracer = trace.get_tracer("duemq", release, tracer_provider, schema_url=SCHEMA_URL)
        meter = metrics.get_meter("duemq", release, meter_provider, schema_url=SCHEMA_URL)
        self._propagator = propagator
        self._parent = parent
        self._sent = meter.create_counter(
            "messaging.client.sent.messages",
            "{message}",
            "Number of messages producer attempted to send to the broker.",
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            "{message}",
            "Number of messages that were delivered to the application.",
        )
        self._operation = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of messaging operation initiated by a producer or consumer client.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )
        self._process = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of processing operation.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )

    # --- producers

    def before_send(self, sending: Sending) -> None:
        """Begin a span, and put its context into the message."""
        message = sending.message
        custom = self._links([(message.properties, {})])
        if sending.batched and custom:
            sending.notes[self] = custom[0]
            return
        name = "create" if sending.batched else "send"
        span = self._tracer.start_span(
            f"{name} {message.topic}",
            kind=SpanKind.CLIENT if custom else SpanKind.PRODUCER,
            attributes=_operation(name, name, message.topic) | {_CLIENT: sending.client_id} | _sent_attributes(message),
            links=custom,
        )
        # Noted before anything can fail, so that the span is always ended.
        sending.notes[self] = _Begun(span, time.monotonic())
        if not custom:
            carrier = dict(message.properties)
            self._propagate.inject(carrier, trace.set_span_in_context(span))
            sending.message = replace(message, properties=carrier)
        if sending.batched:
            span.end()
            sending.notes[self] = Link(span.get_span_context(), {_MESSAGE_ID: message.message_id or ""})

    def after_send(self, sending: Sending) -> None:
        """End the span of a message that was sent singly."""
        begun = sending.notes.get(self)
        if not isinstance(begun, _Begun) or sending.batched:
            return
        result, message = sending.result, sending.message
        if result is not None:
            begun.span.set_attribute(_QUEUE, _queue(result.queue.broker, result.queue.queue_id))
            if result.due_time_ms is not None and message.level is None:
                begun.span.set_attribute(_DELIVERY, result.due_time_ms)
        _end(begun, sending.error)
        self._count_sent(message.topic, 1, begun, sending.error)

    def before_batch(self, batch: SendBatch) -> None:
        """Begin the span of a request, with links to the spans of its messages."""
        first = batch.sendings[0]
        links = [each.notes[self] for each in batch.sendings if isinstance(each.notes.get(self), Link)]
        topic = first.message.topic
        span = self._tracer.start_span(
            f"send {topic}",
            kind=SpanKind.CLIENT,
            attributes=_operation("send", "send", topic) | {_CLIENT: first.client_id, _COUNT: len(batch.sendings)},
            links=links,
        )
        batch.notes[self] = _Begun(span, time.monotonic())

    def after_batch(self, batch: SendBatch) -> None:
        """End the span of a request."""
        begun = batch.notes.get(self)
        if isinstance(begun, _Begun):
            _end(begun, batch.error)
            self._count_sent(batch.sendings[0].message.topic, len(batch.sendings), begun, batch.error)

    def _count_sent(self, topic: str, count: int, begun: _Begun, error: BaseException | None) -> None:
        if isinstance(error, _NOT_SENT):
            return
        attributes = _metric("send", topic) | _error(error)
        self._sent.add(count, attributes)
        self._operation.record(time.monotonic() - begun.since, attributes | {_OPERATION_TYPE: "send"})

    # --- consumers

    def before_handling(self, handling: Handling) -> None:
        """Begin a span, which is the current span in the handler."""
        more: Attributes = {_GROUP: handling.group, _CLIENT: handling.client_id, _MODEL: handling.model}
        handling.notes[self] = self._begin_process(handling.message, more, SpanKind.CONSUMER)

    def after_handling(self, handling: Handling) -> None:
        """End the span of a handler."""
        begun = handling.notes.get(self)
        if isinstance(begun, _Begun):
            self._end_process(begun, handling.message.topic, handling.group, handling.error)
            attributes = _metric("process", handling.message.topic, handling.group) | _error(handling.error)
            self._consumed.add(1, attributes)

    def after_receive(self, receiving: Receiving) -> None:
        """Record the span of a receive that has ended."""
        messages = receiving.messages
        topics = {message.topic for message in messages}
        topic = topics.pop() if len(topics) == 1 else None
        attributes = _operation("receive", "receive", topic)
        attributes |= {_GROUP: receiving.group, _CLIENT: receiving.client_id, _MODEL: receiving.model}
        attributes |= _received_attributes(messages[0]) if receiving.single else {_COUNT: len(messages)}
        span = self._tracer.start_span(
            f"receive {topic}" if topic else "receive",
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=self._links([(each.properties, {_MESSAGE_ID: each.message_id}) for each in messages]),
            start_time=time.time_ns() - int(receiving.seconds * 1e9),
        )
        span.end()
        of_metric = _metric("receive", topic, receiving.group)
        self._consumed.add(len(messages), of_metric)
        self._operation.record(receiving.seconds, of_metric | {_OPERATION_TYPE: "receive"})

    @contextmanager
    def processing(
        self, message: ReceivedMessage | sync.ReceivedMessage, *, group: str | None = None
    ) -> Iterator[Span]:
        """Record a span `process TOPIC` for a message that the application received without a handler. It is the
        current span in the block. The message's context is its parent, or is only linked (see `parent`).

            async for message in consumer:
                with telemetry.processing(message, group="billing"):
                    ...
                    await message.ack()
        """
        more: Attributes = {} if group is None else {_GROUP: group}
        # INTERNAL, since the span of the receive already is of the kind CONSUMER.
        begun = self._begin_process(message, more, SpanKind.INTERNAL)
        failure: BaseException | None = None
        try:
            yield begun.span
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end_process(begun, message.topic, group, failure)

    def _begin_process(self, message: ReceivedMessage, more: Attributes, kind: SpanKind) -> _Begun:
        extracted = self._propagate.extract(message.properties)
        span = self._tracer.start_span(
            f"process {message.topic}",
            context=extracted if self._parent else None,
            kind=kind,
            attributes=_operation("process", "process", message.topic) | more | _received_attributes(message),
            links=self._links([(message.properties, {})]),
        )
        token = contexts.attach(trace.set_span_in_context(span, extracted))
        return _Begun(span, time.monotonic(), token)

    def _end_process(self, begun: _Begun, topic: str, group: str | None, error: BaseException | None) -> None:
        if begun.token is not None:
            contexts.detach(begun.token)
        _end(begun, error)
        self._process.record(time.monotonic() - begun.since, _metric("process", topic, group) | _error(error))

    # --- the context in messages

    @property
    def _propagate(self) -> TextMapPropagator:
        return self._propagator or propagate.get_global_textmap()

    def _links(self, messages: Iterable[tuple[Mapping[str, str], Attributes]]) -> list[Link]:
        """Return links to the contexts in messages. `messages`: the properties of each, and the attributes of its
        link."""
        links = []
        for properties, attributes in messages:
            found = trace.get_current_span(self._propagate.extract(properties, Context())).get_span_context()
            if found.is_valid:
                links.append(Link(found, attributes))
        return links


def _end(begun: _Begun, error: BaseException | None) -> None:
    if error is not None:
        begun.span.set_attributes(_error(error))
        begun.span.record_exception(error)
        begun.span.set_status(Status(StatusCode.ERROR, str(error)))
    begun.span.end()


def _operation(name: str, kind: str, topic: str | None) -> Attributes:
    attributes: Attributes = {_SYSTEM: "rocketmq", _OPERATION: name, _OPERATION_TYPE: kind, _NAMESPACE: ""}
    if topic is not None:
        # RocketMQ's clients put a namespace before the topic's name, with % between them.
        namespace, separator, _ = topic.partition("%")
        attributes |= {_TOPIC: topic, _NAMESPACE: namespace if separator else ""}
    return attributes


def _metric(operation: str, topic: str | None, group: str | None = None) -> Attributes:
    attributes: Attributes = {_SYSTEM: "rocketmq", _OPERATION: operation}
    if topic is not None:
        attributes[_TOPIC] = topic
    if group is not None:
        attributes[_GROUP] = group
    return attributes


def _error(error: BaseException | None) -> Attributes:
    if error is None:
        return {}
    kind = type(error)
    return {_ERROR: kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"}


def _sent_attributes(message: Message) -> Attributes:
    is_delayed = message.level is not None or message.delay is not None or message.deliver_at is not None
    keys = message.keys.split() if isinstance(message.keys, str) else message.keys
    attributes = _message_attributes(message.message_id, keys, message.tags, message.sharding_key, is_delayed)
    if message.level is not None:
        attributes[_LEVEL] = message.level
    return attributes


def _received_attributes(message: ReceivedMessage) -> Attributes:
    level, due = message.delay_level, message.due_time_ms
    sharding_key = message.properties.get(SHARDING_KEY)
    is_delayed = level is not None or due is not None
    attributes = _message_attributes(message.message_id, message.keys, message.tags, sharding_key, is_delayed)
    attributes[_QUEUE] = _queue(message.queue.broker, message.queue.queue_id)
    if level is not None:
        attributes[_LEVEL] = level
    elif due is not None:
        attributes[_DELIVERY] = due
    return attributes


def _message_attributes(
    message_id: str | None, keys: Iterable[str], tag: str | None, sharding_key: str | None, is_delayed: bool
) -> Attributes:
    kind = "delay" if is_delayed else "normal" if sharding_key is None else "fifo"
    attributes: Attributes = {_TYPE: kind}
    listed: Sequence[str] = tuple(keys)
    for name, value in ((_MESSAGE_ID, message_id), (_TAG, tag), (_MESSAGE_GROUP, sharding_key)):
        if value is not None:
            attributes[name] = value
    if listed:
        attributes[_KEYS] = listed
    return attributes


def _queue(broker: str, queue_id: int) -> str:
    """Return a queue's name within its topic."""
    return f"{broker}:{queue_id}"
