from __future__ import annotations

import importlib
import zlib
from typing import Any

import pytest

from duemq import BodyError, MessageQueue, ReceivedMessage
from duemq._net import compression
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.records.properties import format_properties
from duemq.protocol.records.record import StoredMessage

QUEUE = MessageQueue("demo", "broker-a", 3)


class Settled:
    dropped = False

    def ack(self, message: ReceivedMessage) -> None:
        raise AssertionError

    async def retry(self, message: ReceivedMessage, level: int, delay_ms: int | None) -> None:
        raise AssertionError

    async def dead_letter(self, message: ReceivedMessage) -> None:
        raise AssertionError


def received(body: bytes = b"x", sys_flag: int = 0, topic: str = "demo", **properties: Any) -> ReceivedMessage:
    stored = StoredMessage(
        size=200,
        queue_id=3,
        queue_offset=7,
        physical_offset=4096,
        sys_flag=sys_flag,
        born_timestamp=1000,
        born_host=pack_host("10.0.0.1", 555),
        store_timestamp=2000,
        store_host=pack_host("10.0.0.2", 10911),
        reconsume_times=2,
        body=body,
        topic=topic,
        properties_text=format_properties(properties),
    )
    return ReceivedMessage(stored, QUEUE, 9000, Settled())


def test_a_message_shows_what_was_stored() -> None:
    message = received(TAGS="a", KEYS="k1 k2", UNIQ_KEY="ID", own="v")
    assert (message.topic, message.body, message.tags, message.keys) == ("demo", b"x", "a", ("k1", "k2"))
    assert (message.message_id, message.offset_message_id) == ("ID", "0A00000200002A9F0000000000001000")
    assert (message.queue, message.queue_offset, message.physical_offset) == (QUEUE, 7, 4096)
    assert (message.born_time_ms, message.born_host, message.store_time_ms) == (1000, "10.0.0.1:555", 2000)
    assert (message.receive_time_ms, message.reconsume_times, message.stored_size) == (9000, 2, 200)
    assert message.properties["own"] == "v"
    assert repr(message) == "<ReceivedMessage ID demo@broker-a:3 offset 7>"


def test_a_message_without_an_id_of_its_sender_has_the_brokers() -> None:
    assert received().message_id == received().offset_message_id


def test_a_retry_shows_the_topic_it_was_sent_to() -> None:
    assert received(topic="%RETRY%g", RETRY_TOPIC="demo").topic == "demo"


def test_a_dead_letter_stays_in_its_topic() -> None:
    assert received(topic="%DLQ%g", RETRY_TOPIC="demo").topic == "%DLQ%g"


@pytest.mark.parametrize(
    ("properties", "due", "level"),
    [
        ({}, None, None),
        ({"DELAY": "3"}, None, 3),
        ({"DELAY": "3", "DUE_MS": "8990"}, 8990, 3),
        ({"TIMER_DELIVER_MS": "8000", "TIMER_OUT_MS": "7000"}, 8000, None),
        ({"TIMER_DELAY_MS": "5", "TIMER_OUT_MS": "7000"}, 7000, None),
        ({"TIMER_DELIVER_MS": "soon"}, None, None),
        ({"DELAY": "0"}, None, None),
    ],
)
def test_lateness_is_told_where_the_due_time_is_known(
    properties: dict[str, Any], due: int | None, level: int | None
) -> None:
    message = received(**properties)
    assert message.due_time_ms == due
    assert message.lateness_ms == (None if due is None else 9000 - due)
    assert message.delay_level == level


@pytest.mark.parametrize("kind", [0, 3 << 8])
def test_a_zlib_body_is_unpacked(kind: int) -> None:
    assert received(zlib.compress(b"hello"), 1 | kind).body == b"hello"


def test_an_uncompressed_body_is_left_alone() -> None:
    assert received(zlib.compress(b"hello"), 3 << 8).body == zlib.compress(b"hello")


@pytest.mark.parametrize("body", [b"", b"nonsense", zlib.compress(b"hello")[:-2]])
def test_a_broken_body_is_told_when_it_is_read(body: bytes) -> None:
    with pytest.raises(BodyError):
        _ = received(body, 1).body


def test_a_body_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(BodyError, match="more than 1000 bytes"):
        _ = received(zlib.compress(bytes(1001)), 1).body


@pytest.mark.parametrize(("kind", "package"), [(1, "lz4"), (2, "zstandard")])
def test_a_format_without_its_package_names_the_package(
    kind: int, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(compression, "import_module", missing)
    with pytest.raises(BodyError, match=f"install the package {package}"):
        _ = received(b"x", 1 | kind << 8).body


@pytest.mark.parametrize(("kind", "package"), [(1, "lz4.frame"), (2, "zstandard")])
def test_lz4_and_zstandard_are_unpacked_where_their_packages_are(
    kind: int, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    packed = importlib.import_module(package).compress(b"hello" * 100)
    assert received(packed, 1 | kind << 8).body == b"hello" * 100
    with pytest.raises(BodyError):
        _ = received(b"nonsense", 1 | kind << 8).body
    monkeypatch.setattr(compression, "MAX_UNPACKED_BYTES", 499)
    with pytest.raises(BodyError, match="more than 499 bytes"):
        _ = received(packed, 1 | kind << 8).body


def test_queues_sort_as_rocketmq_sorts_them() -> None:
    queues = [
        MessageQueue("t", "b", 10),
        MessageQueue("t", "b", 9),
        MessageQueue("t", "a", 11),
        MessageQueue("s", "z", 0),
    ]
    assert [str(queue) for queue in sorted(queues)] == ["s@z:0", "t@a:11", "t@b:9", "t@b:10"]
