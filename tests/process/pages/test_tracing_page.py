"""The Python of docs/tracing.md is run against a broker in this process; and the trace's context outlives a delay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from duemq import Consumer, Producer
from duemq.otel import Telemetry
from duemq.testing import TestBroker
from tests.support.pages.snippets import run_lines, snippets

PAGE = "tracing.md"


async def test_the_page(duemq_broker: TestBroker) -> None:
    assert len(snippets(PAGE)) == 3
    await run_lines(PAGE, duemq_broker, {})


@pytest.mark.parametrize("delay", [{"level": 5}, {"delay": "1h30m"}])
async def test_the_context_goes_through_a_delay(duemq_broker: TestBroker, duemq_clock: Any, delay: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracer_provider=provider, meter_provider=MeterProvider(shutdown_on_exit=False))
    handled = asyncio.Event()

    async def on_message(_: Any) -> None:
        handled.set()

    options: dict[str, Any] = {"nameserver": duemq_broker.nameserver, "interceptors": [telemetry]}
    consumer = Consumer("readers", on_message, **options)
    consumer.subscribe("reminders")
    async with Producer(**options) as producer, consumer:
        result = await producer.send("reminders", b"call back", **delay)
        assert not handled.is_set()
        duemq_clock.advance("2h")
        async with asyncio.timeout(10):
            await handled.wait()
    sent, processed = exporter.get_finished_spans()
    assert sent.context is not None
    assert processed.parent is not None
    assert (processed.parent.trace_id, processed.parent.span_id) == (sent.context.trace_id, sent.context.span_id)
    assert [link.context.span_id for link in processed.links] == [sent.context.span_id]
    level, delivery = "messaging.rocketmq.message.delay_time_level", "messaging.rocketmq.message.delivery_timestamp"
    for span in (sent, processed):
        told = dict(span.attributes or {})
        assert told["messaging.rocketmq.message.type"] == "delay"
        assert (told.get(level), told.get(delivery)) == (
            delay.get("level"),
            None if "level" in delay else result.due_time_ms,
        )
