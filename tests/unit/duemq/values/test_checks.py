from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duemq import ArgumentError
from duemq._producing.outgoing import compressed, prepare
from duemq._values import checks
from duemq.protocol.records.properties import parse
from duemq.protocol.requests import bodies


@pytest.mark.parametrize("name", ["demo", "%RETRY%g", "a|b", "A-b_1", "x" * 127])
def test_rocketmq_names_are_topics(name: str) -> None:
    checks.check_topic(name)


@pytest.mark.parametrize("name", ["", "de mo", "ä", "a.b", "x" * 128, "a/b", "topic\n", None])
def test_other_names_are_not(name: Any) -> None:
    with pytest.raises(ArgumentError):
        checks.check_topic(name)


def test_nothing_is_sent_to_the_schedule_itself() -> None:
    with pytest.raises(ArgumentError, match="belongs to the broker"):
        checks.check_topic_to_send("SCHEDULE_TOPIC_XXXX")


def test_the_group_of_a_retry_topic_leaves_room_for_its_prefix() -> None:
    checks.check_retried_group("g" * 120)
    checks.check_topic("%RETRY%" + "g" * 120)
    with pytest.raises(ArgumentError, match="the group has 121 characters; the limit is 120"):
        checks.check_retried_group("g" * 121)


@pytest.mark.parametrize("text", ["TAGS\x01\ud800", "n\x01\udfff"])
def test_properties_that_utf8_cannot_carry_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="half of a surrogate pair"):
        checks.check_property_size(text)


def test_a_group_may_be_longer_than_a_topic() -> None:
    checks.check_group("g" * 255)
    with pytest.raises(ArgumentError):
        checks.check_group("g" * 256)


def prepared(**arguments: Any) -> Any:
    defaults: dict[str, Any] = {"topic": "demo", "body": b"x", "tags": None, "keys": (), "user_properties": None}
    return prepare(**{**defaults, "message_id": "ID", "max_body_bytes": 100, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"body": b""},
        {"body": "ü" * 51},
        {"body": 5},
        {"body": "\ud800"},
        {"tags": ""},
        {"tags": "a||b"},
        {"tags": " a"},
        {"tags": "*"},
        {"tags": "a\x01"},
        {"keys": ["two words"]},
        {"keys": [""]},
        {"keys": "a\x02b"},
        {"user_properties": {"DELAY": "3"}},
        {"user_properties": {"TIMER_DELIVER_MS": "3"}},
        {"user_properties": {"UNIQ_KEY": "3"}},
        {"user_properties": {"n": ""}},
        {"user_properties": {"": "v"}},
        {"user_properties": {"n": "v\x01"}},
        {"user_properties": {"n": 5}},
        {"sharding_key": ""},
    ],
)
def test_what_a_broker_would_refuse_or_misread_is_refused_here(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        prepared(**arguments)


def test_a_message_gets_its_system_properties() -> None:
    message = prepared(tags="a", keys=["k1", "k2"], user_properties={"n": "v"}, sharding_key="s")
    assert parse(message.property_text({"DELAY": "3"})) == {
        "n": "v",
        "TAGS": "a",
        "KEYS": "k1 k2",
        "__SHARDINGKEY": "s",
        "UNIQ_KEY": "ID",
        "DELAY": "3",
    }


def test_keys_may_be_one_text() -> None:
    assert prepared(keys="k1").properties["KEYS"] == "k1"
    assert "KEYS" not in prepared(keys="").properties


def test_too_many_properties_are_refused() -> None:
    with pytest.raises(ArgumentError, match="the limit is 32767"):
        prepared(user_properties={"n": "v" * 32767}).property_text({})


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_a_body_is_copied_whatever_it_is(make: Callable[[bytes], Any]) -> None:
    assert prepared(body=make(b"abc")).body == b"abc"


async def test_a_large_body_is_compressed_if_that_makes_it_smaller() -> None:
    for size in (4096, 200_000):
        message = await compressed(prepared(body=b"x" * size, max_body_bytes=size), 4096)
        assert message.sys_flag == 1
        assert bodies.decompress(message.body, size) == b"x" * size
    small = prepared(body=b"x" * 4095, max_body_bytes=5000)
    assert await compressed(small, 4096) is small
    assert await compressed(small, None) is small
    noise = prepared(body=bytes(range(100)))
    assert await compressed(noise, 50) is noise
