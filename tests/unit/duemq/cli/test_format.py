from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from duemq import MessageHandle, MessageQueue, SendResult, SendStatus
from duemq.cli import formatting
from tests.unit.duemq.values.test_message import received


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def result(due_time_ms: int | None = None) -> SendResult:
    return SendResult(SendStatus.SEND_OK, "ID", "OFFSET", MessageQueue("demo", "broker-a", 3), 7, due_time_ms)


def test_a_sent_message() -> None:
    assert formatting.result_as_text(result(), 0) == "sent OFFSET to demo@broker-a:3 offset 7"


def test_a_delay_is_told_as_it_was_asked_for() -> None:
    assert formatting.result_as_text(result(5_400_000), 10, 7_250).endswith("(in 7s250ms)")


@pytest.mark.parametrize(
    ("now_ms", "rest"),
    [(0, "in 1h30m"), (10, "in 1h30m"), (5_399_750, "in 250ms"), (5_400_000, "now"), (6_000_000, "now")],
)
def test_a_delayed_message_says_when_it_is_due(now_ms: int, rest: str) -> None:
    assert (
        formatting.result_as_text(result(5_400_000), now_ms)
        == f"sent OFFSET to demo@broker-a:3 schedule offset 7, due 1970-01-01 01:30:00.000 ({rest})"
    )


def test_a_result_for_programs() -> None:
    assert json.loads(formatting.result_as_json(result(5))) == {
        "message_id": "ID",
        "offset_message_id": "OFFSET",
        "status": "SEND_OK",
        "topic": "demo",
        "broker": "broker-a",
        "queue_id": 3,
        "queue_offset": 7,
        "due_time_ms": 5,
        "handle": None,
        "recall_handle": None,
    }
    recallable = MessageHandle("demo", "broker-a", "ID", "0" * 32, "djEgYSBiIDEgYw==")
    told = json.loads(formatting.result_as_json(replace(result(5), handle=recallable)))
    assert (told["handle"], told["recall_handle"]) == (str(recallable), "djEgYSBiIDEgYw==")


def test_a_message_on_one_line() -> None:
    assert formatting.message_as_text(received(b"hello")) == "1970-01-01 00:00:09.000  hello"
    message = received(b"hello", TAGS="a", KEYS="k1 k2", DUE_MS="8993")
    assert formatting.message_as_text(message) == "1970-01-01 00:00:09.000  +7ms  [a]  (k1 k2)  hello"
    assert "  -1ms  " in formatting.message_as_text(received(b"hello", DUE_MS="9001"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"two\nlines", r"two\nlines"),
        (b"\x1b[31mred", r"\x1b[31mred"),
        (b"\xff\xfe", r"\xff\xfe"),
        ("größer".encode(), "größer"),
    ],
)
def test_a_body_stays_on_its_line_and_leaves_the_terminal_alone(body: bytes, text: str) -> None:
    assert formatting.message_as_text(received(body)).endswith("  " + text)


def test_a_message_for_programs() -> None:
    fields = json.loads(formatting.message_as_json(received(b"hallo\n", TAGS="a", KEYS="k1 k2", UNIQ_KEY="ID")))
    assert fields == {
        "topic": "demo",
        "body": "hallo\n",
        "tags": "a",
        "keys": ["k1", "k2"],
        "properties": {"TAGS": "a", "KEYS": "k1 k2", "UNIQ_KEY": "ID"},
        "message_id": "ID",
        "offset_message_id": "0A00000200002A9F0000000000001000",
        "broker": "broker-a",
        "queue_id": 3,
        "queue_offset": 7,
        "born_time_ms": 1000,
        "store_time_ms": 2000,
        "receive_time_ms": 9000,
        "due_time_ms": None,
        "lateness_ms": None,
        "delay_level": None,
        "reconsume_times": 2,
    }


def test_a_body_that_is_no_text_is_base64() -> None:
    fields = json.loads(formatting.message_as_json(received(b"\xff\x00")))
    assert fields["body_base64"] == "/wA="
    assert "body" not in fields
