"""JSON bodies: they read Java's JSON, they write the JSON that Java needs, and anything else is a BodyFormatError."""

from __future__ import annotations

import contextlib
import json
import zlib
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import (
    BrokerData,
    BrokerQueue,
    DataVersion,
    HeartbeatData,
    LockBatch,
    QueueData,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicRoute,
)

BODY_TYPES: list[type[msgspec.Struct]] = sorted(
    {v for v in vars(bodies).values() if isinstance(v, type) and issubclass(v, msgspec.Struct)},
    key=lambda body_type: body_type.__name__,
)
TEXTS = ["", "0", "-1", "1.5", "true", "null", "T", "%RETRY%g", "\x00", "é\u2028\U0001f600", "9" * 40]
NUMBERS = [*(sign * 2**bits + by for bits in (7, 15, 31, 63, 69) for sign in (-1, 1) for by in (-1, 0, 1)), 0.5, 1e308]
PLAIN = [None, True, False, float("nan"), float("inf"), *TEXTS, *NUMBERS]
TRIES = 8
"""Values for each example of hypothesis: most of an example's time is hypothesis's own."""


def test_a_heartbeat_of_java_is_read() -> None:
    body = (
        b'{"clientID":"10.0.0.1@1#2","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":'
        b'"CONSUME_PASSIVELY","groupName":"cg","messageModel":"CLUSTERING","subscriptionDataSet":[{"classFilterMode":'
        b'false,"codeSet":[97,98],"expressionType":"TAG","subString":"a || b","subVersion":1,"tagsSet":["a","b"],'
        b'"topic":"T"}],"unitMode":false}],"heartbeatFingerprint":0,"producerDataSet":[{"groupName":"pg"}],'
        b'"withoutSub":false}'
    )
    data = bodies.decode(body, HeartbeatData, strict=True)
    assert data.client_id == "10.0.0.1@1#2"
    assert [producer.group_name for producer in data.producer_data_set or ()] == ["pg"]
    (consumer,) = data.consumer_data_set or []
    assert (consumer.group_name, consumer.message_model) == ("cg", "CLUSTERING")
    (subscription,) = consumer.subscription_data_set or []
    assert (subscription.topic, subscription.sub_string, subscription.sub_version) == ("T", "a || b", 1)


def test_a_heartbeat_of_cpp_names_constants_by_their_place() -> None:
    body = (
        b'{"clientID":"127.0.0.1@c","consumerDataSet":[{"consumeFromWhere":%d,"consumeType":1,"groupName":"g",'
        b'"messageModel":0,"subscriptionDataSet":[{"expressionType":"TAG","subString":"*","subVersion":"1","topic":"T"'
        b'}]}],"producerDataSet":[]}'
    )
    (consumer,) = bodies.decode(body % 4, HeartbeatData, strict=True).consumer_data_set or []
    assert (consumer.consume_type, consumer.message_model) == ("CONSUME_PASSIVELY", "BROADCASTING")
    assert consumer.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    for wrong in (-1, 6):
        with pytest.raises(BodyFormatError, match=f"consumeFromWhere={wrong}: the constants are 0 to 5"):
            bodies.decode(body % wrong, HeartbeatData, strict=True)


def test_what_java_leaves_out_or_nulls_has_a_default() -> None:
    data = bodies.decode(
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":null}]}', HeartbeatData
    )
    (consumer,) = data.consumer_data_set or []
    assert consumer.subscription_data_set is None
    assert data.producer_data_set is None


def any_value(chance: Random, names: list[str], depth: int = 3) -> Any:
    """Return any JSON value; some of its objects have these names."""
    kind = chance.randrange(6) if depth else 0
    if kind < 3:
        return chance.choice(PLAIN) if kind else chance.randrange(-(2**35), 2**35) >> chance.randrange(35)
    values = [any_value(chance, names, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 3:
        return values
    return {chance.choice(names if kind == 4 else TEXTS): value for value in values}


@pytest.mark.parametrize("body_type", BODY_TYPES)
@given(seed=st.integers(0, 2**64 - 1))
def test_any_json_value_is_a_body_or_a_body_error(body_type: type[msgspec.Struct], seed: int) -> None:
    """Any JSON value in any field is a body or a BodyFormatError; an accepted body can be written again."""
    chance = Random(seed)
    names = [field.encode_name for field in msgspec.structs.fields(body_type)]
    for _ in range(TRIES):
        value = {name: any_value(chance, names) for name in names if chance.randrange(2)}
        body = json.dumps(value if chance.randrange(4) else any_value(chance, names)).encode()
        for strict in (True, False):
            with contextlib.suppress(BodyFormatError):
                fastjson.dumps(bodies.decode(body, body_type, strict=strict))


@pytest.mark.parametrize("body_type", BODY_TYPES)
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"\xff", b"{", b"[" * 200_000, b'{"clientID":' * 5000, b"{0:" * 5000]
)
def test_what_is_no_json_object_is_a_body_error(body_type: type[msgspec.Struct], body: bytes) -> None:
    for strict in (True, False):
        with pytest.raises(BodyFormatError):
            bodies.decode(body, body_type, strict=strict)


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**63, 10**30])
def test_numbers_wider_than_javas_are_a_body_error(number: int) -> None:
    queue = {"brokerName": "b", "queueId": number, "topic": "T"}
    lock = {"consumerGroup": "g", "clientId": "c", "mqSet": [queue]}
    with pytest.raises(BodyFormatError, match="queueId"):
        bodies.decode(json.dumps(lock).encode(), LockBatch)
    with pytest.raises(BodyFormatError, match="retryQueueNums"):
        bodies.decode(json.dumps({"groupName": "g", "retryQueueNums": number}).encode(), SubscriptionGroupConfig)


def test_requests_are_strict_json_only() -> None:
    """Requests are strict JSON only: loose JSON is read token by token, and a client must not keep the broker busy with
    it."""
    body = b'{"clientID":"c","other":{0:1}}'
    assert bodies.decode(body, HeartbeatData).client_id == "c"
    with pytest.raises(BodyFormatError):
        bodies.decode(body, HeartbeatData, strict=True)


def test_object_keys_are_read() -> None:
    class Stats(msgspec.Struct, rename="camel"):
        offset_table: dict[str, int]

    body = b'{"offsetTable":{{"brokerName":"b","queueId":1,"topic":"T"}:7}}'
    ((key, offset),) = bodies.decode(body, Stats).offset_table.items()
    assert (bodies.decode(key.encode(), BrokerQueue), offset) == (BrokerQueue("b", 1, "T"), 7)


# --- routes

BROKER = BrokerData({0: "1.2.3.4:10911", 1: "1.2.3.5:10911"}, "b-a", "C")
ROUTE = TopicRoute([BROKER], [QueueData("b-a", 6, 4, 4)])


def test_a_route_for_older_clients_has_broker_ids_without_quotes() -> None:
    """A route for older clients has broker ids without quotes, exactly as 4.9.7 writes it: older Go clients search for
    that text."""
    assert ROUTE.to_json(strict=False) == (
        b'{"brokerDatas":[{"brokerAddrs":{0:"1.2.3.4:10911",1:"1.2.3.5:10911"},"brokerName":"b-a","cluster":"C"}],'
        b'"filterServerTable":{},"queueDatas":[{"brokerName":"b-a","perm":6,"readQueueNums":4,"writeQueueNums":4,'
        b'"topicSysFlag":0}]}'
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("order", [None, "b-a:4;b-b:4"])
def test_both_forms_of_a_route_are_read(strict: bool, order: str | None) -> None:
    route = TopicRoute([BROKER], ROUTE.queue_datas, order)
    text = route.to_json(strict=strict)
    assert bodies.decode(text, TopicRoute) == route
    if strict:
        assert json.loads(text)["brokerDatas"][0]["brokerAddrs"] == {"0": "1.2.3.4:10911", "1": "1.2.3.5:10911"}
    assert (b"orderTopicConf" in text) == (order is not None)


def test_the_brokers_of_a_cluster_are_told_as_4_9_7_does() -> None:
    assert bodies.cluster_info([BROKER], {"C": ["b-a"]}) == (
        b'{"brokerAddrTable":{"b-a":{"brokerAddrs":{0:"1.2.3.4:10911",1:"1.2.3.5:10911"},"brokerName":"b-a",'
        b'"cluster":"C"}},"clusterAddrTable":{"C":["b-a"]}}'
    )


def test_tables_are_written_as_4_9_7_writes_them() -> None:
    topic = TopicConfig("T", 4, 8, 6)
    wanted: dict[str, Any] = {
        "order": False, "perm": 6, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG", "topicName": "T",
        "topicSysFlag": 0, "writeQueueNums": 8,
    }  # fmt: skip
    assert topic.to_json() == wanted
    assert bodies.decode(fastjson.dumps(wanted), TopicConfig) == topic
    topic.attributes = {"message.type": "DELAY"}
    assert topic.to_json() == {**wanted, "attributes": {"message.type": "DELAY"}}
    assert DataVersion(5, 6).to_json() == {"counter": 6, "timestamp": 5}
    assert DataVersion(5, 6, 7).to_json() == {"counter": 6, "timestamp": 5, "stateVersion": 7}
    assert BrokerQueue("b", 1, "T").to_json() == {"brokerName": "b", "queueId": 1, "topic": "T"}


# --- compression


@given(st.binary(max_size=2000))
def test_a_compressed_body_is_unpacked(body: bytes) -> None:
    assert bodies.decompress(zlib.compress(body), 2000) == body


@pytest.mark.parametrize("torn", [zlib.compress(b"x" * 100)[:-1], b"", b"\x78", b"no zlib"])
def test_a_torn_compressed_body_is_a_body_error(torn: bytes) -> None:
    with pytest.raises(BodyFormatError):
        bodies.decompress(torn, 1000)


def test_no_more_is_unpacked_than_allowed() -> None:
    bomb = zlib.compress(bytes(10_000_000))
    assert len(bomb) < 20_000
    with pytest.raises(BodyFormatError, match="1000"):
        bodies.decompress(bomb, 1000)
    assert len(bodies.decompress(bomb, 10_000_000)) == 10_000_000
