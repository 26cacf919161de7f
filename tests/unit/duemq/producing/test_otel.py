"""OpenTelemetry: spans and metrics by the semantic conventions, and the context in the messages.

Names and units are compared with those of OpenTelemetry's own package of the conventions."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv._incubating.metrics import messaging_metrics as metric_names
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import SpanKind, StatusCode

from duemq import ArgumentError, Consumer, Message, Producer, RequestTimeoutError, SendManyError, sync
from duemq import otel as module
from duemq.otel import Telemetry
from duemq.protocol.codes import RequestCode
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import NOW_MS, FakeBroker

SEND = RequestCode.SEND_MESSAGE_V2
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorded:
    """What a telemetry gave to an exporter."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.reader = InMemoryMetricReader()
        meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(tracer_provider=provider, meter_provider=meters, **options)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    def points(self, name: str) -> list[tuple[Any, dict[str, Any]]]:
        """The count and the attributes of each series of a metric."""
        data: Any = self.reader.get_metrics_data()
        metrics = [
            each for resource in data.resource_metrics for scope in resource.scope_metrics for each in scope.metrics
        ]
        return [
            (point.count if hasattr(point, "count") else point.value, dict(point.attributes))
            for metric in metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def make_producer(broker: FakeBroker, recorded: Recorded, **options: Any) -> Producer:
    return Producer(broker.address, interceptors=[recorded.telemetry], _intervals=INTERVALS, **options)


def make_consumer(broker: FakeBroker, recorded: Recorded, on_message: Any = None, **options: Any) -> Consumer:
    consumer = Consumer(
        "billing",
        on_message,
        nameserver=broker.address,
        from_="first",
        interceptors=[recorded.telemetry],
        _intervals=INTERVALS,
        _clock=lambda: NOW_MS,
        **options,
    )
    consumer.subscribe("demo")
    return consumer


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def context_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


def linked(span: ReadableSpan) -> list[str]:
    return [f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01" for link in span.links]


# --- names


def test_names_are_those_of_the_conventions() -> None:
    theirs = {value for value in vars(names).values() if isinstance(value, str)} | {"error.type"}
    ours = {
        value for value in vars(module).values() if isinstance(value, str) and re.match(r"messaging\.|error\.", value)
    }
    assert len(ours) > 15
    assert ours <= theirs
    assert names.MessagingSystemValues.ROCKETMQ.value == "rocketmq"
    assert any(each.value == module.SCHEMA_URL for each in Schemas)


async def test_metrics_have_the_names_and_units_of_the_conventions(broker: FakeBroker, recorded: Recorded) -> None:
    async with make_producer(broker, recorded) as producer, make_consumer(broker, recorded) as consumer:
        await producer.send("demo", b"one")
        with recorded.telemetry.processing(await consumer.receive()):
            pass
    theirs = InMemoryMetricReader()
    meter = MeterProvider([theirs], shutdown_on_exit=False).get_meter("theirs")
    metric_names.create_messaging_client_sent_messages(meter).add(1)
    metric_names.create_messaging_client_consumed_messages(meter).add(1)
    metric_names.create_messaging_client_operation_duration(meter).record(1)
    metric_names.create_messaging_process_duration(meter).record(1)

    def described(reader: InMemoryMetricReader) -> set[tuple[str, str, str]]:
        data: Any = reader.get_metrics_data()
        metrics = [each for scope in data.resource_metrics[0].scope_metrics for each in scope.metrics]
        return {(each.name, each.unit, each.description.rstrip(".")) for each in metrics}

    assert described(recorded.reader) == described(theirs)


# --- producers


async def test_a_send_is_a_span_of_the_kind_producer_whose_context_goes_along(
    broker: FakeBroker, recorded: Recorded
) -> None:
    async with make_producer(broker, recorded) as producer:
        with recorded.tracer.start_as_current_span("caller") as caller:
            baggage_token = context.attach(baggage.set_baggage("user", "7"))
            result = await producer.send("demo", b"one", keys=["a", "b"], tags="t", properties={"p": "1"})
            context.detach(baggage_token)
    span = recorded.span("send demo")
    assert span.kind == SpanKind.PRODUCER
    assert span.parent == caller.get_span_context()
    assert attributes(span) == {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "demo",
        "messaging.destination.partition.id": f"broker-a:{result.queue.queue_id}",
        "messaging.client.id": producer._client.client_id,
        "messaging.message.id": result.message_id,
        "messaging.rocketmq.namespace": "",
        "messaging.rocketmq.message.type": "normal",
        "messaging.rocketmq.message.tag": "t",
        "messaging.rocketmq.message.keys": ("a", "b"),
    }
    properties = broker.requests_of(SEND)[0].properties()
    assert properties["traceparent"].rpartition("-")[0] == context_of(span).rpartition("-")[0]
    assert (properties["baggage"], properties["p"]) == ("user=7", "1")
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "duemq"


async def test_delays_are_told_as_level_or_time(broker: FakeBroker, recorded: Recorded) -> None:
    async with make_producer(broker, recorded) as producer:
        await producer.send("demo", b"one", level=3)
        result = await producer.send("demo", b"two", delay="10s")
        await producer.send("demo", b"three", sharding_key="order 7")
    by_level, by_delay, ordered = map(attributes, recorded.spans("send demo"))
    assert by_level["messaging.rocketmq.message.delay_time_level"] == 3
    assert "messaging.rocketmq.message.delivery_timestamp" not in by_level
    assert by_delay["messaging.rocketmq.message.delivery_timestamp"] == result.due_time_ms
    assert "messaging.rocketmq.message.delay_time_level" not in by_delay
    types = [each["messaging.rocketmq.message.type"] for each in (by_level, by_delay, ordered)]
    assert types == ["delay", "delay", "fifo"]
    assert ordered["messaging.rocketmq.message.group"] == "order 7"


async def test_a_failed_send_says_what_failed(broker: FakeBroker, recorded: Recorded) -> None:
    broker.on(SEND, None)
    async with make_producer(broker, recorded, timeout=0.5, retries=0) as producer:
        with pytest.raises(RequestTimeoutError):
            await producer.send("demo", b"one")
        with pytest.raises(ArgumentError):
            await producer.send("demo", b"")
    late, empty = recorded.spans("send demo")
    assert (late.status.status_code, empty.status.status_code) == (StatusCode.ERROR, StatusCode.ERROR)
    assert attributes(late)["error.type"] == "duemq.errors.RequestTimeoutError"
    assert [event.name for event in late.events] == ["exception"]
    ((count, of_metric),) = recorded.points("messaging.client.sent.messages")
    assert (count, of_metric["error.type"]) == (1, "duemq.errors.RequestTimeoutError")  # the empty one was not sent


async def test_messages_of_a_batch_have_spans_and_the_request_links_to_them(
    broker: FakeBroker, recorded: Recorded
) -> None:
    async with make_producer(broker, recorded) as producer:
        with recorded.tracer.start_as_current_span("caller") as caller:
            results = await producer.send_many([Message("demo", b"0"), Message("demo", b"1"), Message("demo", b"2")])
    created = recorded.spans("create demo")
    assert {span.kind for span in created} == {SpanKind.PRODUCER}
    assert [attributes(span)["messaging.message.id"] for span in created] == [each.message_id for each in results]
    request = recorded.span("send demo")
    assert request.kind == SpanKind.CLIENT
    assert linked(request) == [context_of(span) for span in created]
    assert attributes(request)["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes(request)
    assert [span.parent for span in [*created, request]] == [caller.get_span_context()] * 4
    assert recorded.points("messaging.client.sent.messages") == [
        (3, {"messaging.system": "rocketmq", "messaging.operation.name": "send", "messaging.destination.name": "demo"})
    ]
    ((count, of_metric),) = recorded.points("messaging.client.operation.duration")
    assert (count, of_metric["messaging.operation.type"]) == (1, "send")


async def test_a_message_keeps_the_context_that_its_sender_gave_it(broker: FakeBroker, recorded: Recorded) -> None:
    message = Message("demo", b"one", properties={"traceparent": TRACEPARENT})
    async with make_producer(broker, recorded) as producer:
        await producer.send(message)
        await producer.send_many([message, message])
    alone, batch = recorded.spans("send demo")
    assert (alone.kind, linked(alone)) == (SpanKind.CLIENT, [TRACEPARENT])
    assert (batch.kind, linked(batch)) == (SpanKind.CLIENT, [TRACEPARENT] * 2)
    assert recorded.spans("create demo") == []
    assert broker.requests_of(SEND)[0].properties()["traceparent"] == TRACEPARENT


async def test_a_refused_message_of_a_batch_leaves_no_span_open(broker: FakeBroker, recorded: Recorded) -> None:
    async with make_producer(broker, recorded) as producer:
        with pytest.raises(SendManyError):
            await producer.send_many([Message("demo", b"")])
    assert [span.name for span in recorded.exporter.get_finished_spans()] == ["create demo"]


# --- consumers


@pytest.mark.parametrize("parent", [True, False])
async def test_a_handler_runs_in_a_span_that_leads_to_the_senders(broker: FakeBroker, parent: bool) -> None:
    recorded = Recorded(parent=parent)
    within: list[Any] = []

    async def on_message(_: Any) -> None:
        within.append((trace.get_current_span().get_span_context(), baggage.get_baggage("user")))

    async with make_producer(broker, recorded) as producer:
        token = context.attach(baggage.set_baggage("user", "7"))
        await producer.send("demo", b"one", keys="k", tags="t", level=1)
        context.detach(token)
    async with make_consumer(broker, recorded, on_message) as consumer:
        await consumer.caught_up()
    sent, process = recorded.span("send demo"), recorded.span("process demo")
    assert process.kind == SpanKind.CONSUMER
    assert parent_of(process) == (context_of(sent) if parent else None)
    assert linked(process) == [context_of(sent)]
    assert within == [(process.context, "7")]
    told = attributes(process)
    assert told["messaging.operation.name"] == told["messaging.operation.type"] == "process"
    assert told["messaging.consumer.group.name"] == "billing"
    assert told["messaging.rocketmq.consumption_model"] == "clustering"
    assert told["messaging.message.id"] == attributes(sent)["messaging.message.id"]
    assert told["messaging.rocketmq.message.keys"] == ("k",)
    assert told["messaging.rocketmq.message.tag"] == "t"
    assert told["messaging.rocketmq.message.delay_time_level"] == 1
    of_metric = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "process",
        "messaging.destination.name": "demo",
        "messaging.consumer.group.name": "billing",
    }
    assert recorded.points("messaging.client.consumed.messages") == [(1, of_metric)]
    assert recorded.points("messaging.process.duration") == [(1, of_metric)]


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"00-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-01"


async def test_a_handler_that_fails_has_a_failed_span(broker: FakeBroker, recorded: Recorded) -> None:
    await broker.store("demo", b"a")

    async def on_message(_: Any) -> None:
        raise RuntimeError("no")

    async with make_consumer(broker, recorded, on_message):
        await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK)
    span = recorded.span("process demo")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no")
    assert attributes(span)["error.type"] == "RuntimeError"
    assert span.parent is None
    assert span.links == ()
    assert recorded.points("messaging.process.duration")[0][1]["error.type"] == "RuntimeError"
    # The worker's task has no span any more.
    assert not trace.get_current_span().get_span_context().is_valid


def fail_in(span: trace.Span, error: Exception) -> None:
    assert trace.get_current_span() is span
    raise error


async def test_received_messages_are_linked_and_may_be_processed_in_a_span(
    broker: FakeBroker, recorded: Recorded
) -> None:
    async with make_producer(broker, recorded) as producer:
        queue = await producer.choose_queue("demo")
        for body in (b"0", b"1", b"2"):
            await producer.send("demo", body, queue=queue)
    async with make_consumer(broker, recorded) as consumer:
        first = await consumer.receive()
        await consumer.receive_many(5)
        error = RuntimeError("no")
        with pytest.raises(RuntimeError), recorded.telemetry.processing(first, group="billing") as span:
            fail_in(span, error)
    sent = recorded.spans("send demo")
    single, several = recorded.spans("receive demo")
    assert single.kind == several.kind == SpanKind.CONSUMER
    assert linked(single) == [context_of(sent[0])]
    assert linked(several) == [context_of(span) for span in sent[1:]]
    assert attributes(single)["messaging.message.id"] == first.message_id
    assert "messaging.batch.message_count" not in attributes(single)
    assert attributes(several)["messaging.batch.message_count"] == 2
    process = recorded.span("process demo")
    assert (process.kind, parent_of(process)) == (SpanKind.INTERNAL, context_of(sent[0]))
    assert process.status.status_code == StatusCode.ERROR
    consumed = recorded.points("messaging.client.consumed.messages")
    counts = {of_metric["messaging.operation.name"]: count for count, of_metric in consumed}
    assert counts == {"receive": 3}


async def test_without_async_the_trace_goes_on_as_well(broker: FakeBroker, recorded: Recorded) -> None:
    found: list[Any] = []

    def script() -> None:
        with (
            recorded.tracer.start_as_current_span("caller"),
            sync.Producer(broker.address, interceptors=[recorded.telemetry], _intervals=INTERVALS) as producer,
        ):
            producer.send("demo", b"one")
        options: dict[str, Any] = {"from_": "first", "_intervals": INTERVALS, "_clock": lambda: NOW_MS}

        def on_message(_: Any) -> None:
            found.append(trace.get_current_span().get_span_context())

        consumer = sync.Consumer(
            "g", on_message, nameserver=broker.address, interceptors=[recorded.telemetry], **options
        )
        consumer.subscribe("demo")
        with consumer:
            consumer.caught_up()

    await asyncio.to_thread(script)
    caller, sent, process = (recorded.span(name) for name in ("caller", "send demo", "process demo"))
    assert sent.parent == caller.context
    assert parent_of(process) == context_of(sent)
    assert found == [process.context]
