from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq._values.checks import check_properties
from duemq.mqtt_bridge import translation
from duemq.mqtt_bridge.session.packets import NO_PROPERTIES, Properties, Publish, encode_publish

NOW = 1_800_000_000_000
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cn", "Cs"]), max_size=300)
"""Without control characters and non-characters."""
TOPICS = TEXT.filter(lambda text: bool(text) and not {"+", "#"} & set(text))
NAMES = TEXT | st.sampled_from(["KEYS", "DELAY", "MQTT_X", "a", "b", ""])


def publish(properties: Properties = NO_PROPERTIES, payload: bytes = b"x", retain: bool = False) -> Publish:
    return Publish("a/b", payload, 1, retain, False, 7, properties, len(payload))


@given(
    st.builds(
        Properties,
        is_text=st.booleans(),
        expiry=st.none() | st.integers(1, 4_000_000_000),
        content_type=st.none() | TEXT,
        response_topic=st.none() | TOPICS,
        correlation_data=st.none() | st.binary(max_size=50),
        user=st.lists(st.tuples(NAMES, TEXT), max_size=6).map(tuple),
    ),
    TEXT,
)
def test_what_goes_through_rocketmq_comes_out_as_it_was(properties: Properties, topic: str) -> None:
    fields = translation.to_properties(publish(properties), topic, "bridge", NOW)
    check_properties(fields)
    back = translation.to_mqtt(fields, NOW)
    assert translation.mqtt_topic(fields) == topic
    assert (back.is_text, back.expiry, back.content_type) == (
        properties.is_text, properties.expiry, properties.content_type,
    )  # fmt: skip
    assert (back.response_topic, back.correlation_data) == (properties.response_topic, properties.correlation_data)
    assert sorted(back.user) == sorted(properties.user)
    for name, _ in properties.user:
        assert [pair for pair in back.user if pair[0] == name] == [pair for pair in properties.user if pair[0] == name]


@given(st.binary(max_size=3))
def test_any_payload_is_a_body(payload: bytes) -> None:
    body = translation.to_body(payload)
    assert body
    assert translation.to_payload(body, translation.to_properties(publish(payload=payload), "t", "b", NOW)) == payload


def test_what_others_wrote_into_our_properties_does_no_harm() -> None:
    fields = {
        "MQTT_EXPIRES_AT": "soon",
        "MQTT_CORRELATION_DATA": "no hex",
        "MQTT_CONTENT_TYPE_JSON": "{",
        "MQTT_RESPONSE_TOPIC_JSON": "1",
        "MQTT_USER_PROPERTIES": '[1, ["a"], ["a", 1], ["a", "b"]]',
        "own": "value",
    }
    assert translation.to_mqtt(fields, NOW) == Properties(user=(("own", "value"), ("a", "b")))
    assert translation.to_mqtt({"MQTT_USER_PROPERTIES": "{"}, NOW).user == ()
    assert translation.mqtt_topic({}) is None


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        ({"a\nb": "c\u0085d"}, ("a%0Ab", "c%C2%85d")),
        ({"a": "\ufdd0\U0001ffff"}, ("a", "%EF%B7%90%F0%9F%BF%BF")),
        ({"MQTT_USER_PROPERTIES": '[["a", "\\u0000\\ud800"]]'}, ("a", "%00%ED%A0%80")),
        ({"MQTT_RESPONSE_TOPIC": "a/#"}, ("MQTT_RESPONSE_TOPIC", "a/#")),
    ],
)
def test_mqtt_brokers_need_not_close_the_connection(fields: dict[str, str], user: tuple[str, str]) -> None:
    """Mosquitto does on such characters and topics."""
    properties = translation.to_mqtt(fields, NOW)
    assert properties == Properties(user=(user,))
    encode_publish("t", b"", qos=0, retain=False, packet_id=0, properties=properties)


@pytest.mark.parametrize("name", ["MQTT_USER_PROPERTIES", "MQTT_CONTENT_TYPE_JSON", "MQTT_TOPIC_JSON"])
def test_json_that_is_nested_deeply_does_no_harm(name: str) -> None:
    fields = {name: "[" * 30_000}
    assert translation.to_mqtt(fields, NOW) == Properties()
    assert translation.mqtt_topic(fields) is None


def test_a_number_that_is_too_long_is_no_time() -> None:
    assert translation.expires_at_ms({"MQTT_EXPIRES_AT": "9" * 5000}) is None


def test_the_rest_of_an_expiry_is_told() -> None:
    fields = translation.to_properties(publish(Properties(expiry=10)), "t", "b", NOW)
    assert translation.to_mqtt(fields, NOW + 3500).expiry == 7
