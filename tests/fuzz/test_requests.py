"""Good frames with nonsense in them: every request code, with fields missing, absurd, huge and negative, and bodies of
all sorts. Each request that wants an answer gets one, in its codec; none causes an exception in the broker."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pytest
from msgspec.inspect import BoolType, IntType, StructType, UnionType, type_info

from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.errors import LocalProtocolError
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, CODECS, JSON, join_frame
from duemq.protocol.records import batch
from duemq.protocol.requests import headers
from duemq.protocol.requests.headers import Header
from tests.fuzz.client import RawClient
from tests.fuzz.live import LiveBroker
from tests.fuzz.witness import Witness
from tests.support.wire import request, send

pytestmark = pytest.mark.fuzz

CODES = [int(code) for code in RequestCode]
UNKNOWN_CODES = [0, -1, 13, 999, 32767, -32768]
HEADER_TYPES: list[type[Header]] = [
    value
    for value in vars(headers).values()
    if isinstance(value, type) and issubclass(value, Header) and value is not Header
]


def fields_of(header: type[Header]) -> dict[str, Any]:
    """Return the extension fields of a header and their types."""
    info = type_info(header)
    assert isinstance(info, StructType)
    return {field.encode_name: field.type for field in info.fields}


NAMES = {name: kind for header in HEADER_TYPES for name, kind in fields_of(header).items()}
"""Every extension field of every request."""

NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "5",
    "100",
    "65536",
    "65537",
    "2147483647",
    "-2147483648",
    "2147483648",
    "1.5",
    "",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "x",
    "1e9",
    "NaN",
    " 1",
    "9" * 4000,
]
TEXTS = [
    "",
    " ",
    "T",
    "TBW102",
    "%RETRY%g",
    "%DLQ%g",
    "SCHEDULE_TOPIC_XXXX",
    "g",
    "DefaultCluster",
    "broker-a",
    "c1",
    "*",
    "a || b",
    "x" * 127,
    "x" * 128,
    "x" * 5000,
    "../../etc",
    "ü" * 50,
    "\U0001f600",
    "a\x01b\x02c",
    "a\nb",
    "a@b",
    "null",
    "TAG",
    "SQL92",
    "SINGLE_TAG",
    "+a=b",
    "-a",
    "DELAY\x011",
    "DELAY\x01-5",
    "DELAY\x0199999999999",
    "TAGS\x01t\x02WAIT\x01true",
    "\x01\x02" * 100,
    "TRAN_MSG\x01true",
    "TIMER_DELIVER_MS\x011",
    "k\x01" + "v" * 33000,
    "k\x01\0",
]
MESSAGE_IDS = ["7F00000100002A9F0000000000000000", "F" * 32, "0" * 56, "zz"]

SLOW = {
    RequestCode.PULL_MESSAGE,
    RequestCode.LITE_PULL_MESSAGE,
    RequestCode.GET_CONSUMER_RUNNING_INFO,
    RequestCode.CONSUME_MESSAGE_DIRECTLY,
}
"""These may be answered much later: when a message arrives, or a consumer has answered."""


def value_for(kind: Any, rng: random.Random) -> str:
    kinds = kind.types if isinstance(kind, UnionType) else (kind,)
    if any(isinstance(one, IntType) for one in kinds):
        return rng.choice(NUMBERS) if rng.random() < 0.5 else str(rng.randrange(4))
    if any(isinstance(one, BoolType) for one in kinds):
        return rng.choice(["true", "false", "TRUE", "yes", ""])
    return rng.choice(TEXTS + MESSAGE_IDS)


def valid_ext(code: int, rng: random.Random) -> dict[str, str]:
    """Return values for fields that headers have; often all fields of the code's own header."""
    header = rng.choice(HEADER_TYPES) if rng.random() < 0.3 else OWN_HEADERS.get(code, rng.choice(HEADER_TYPES))
    ext = {name: value_for(kind, rng) for name, kind in fields_of(header).items() if rng.random() < 0.95}
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        name = rng.choice(list(NAMES))
        ext[name] = value_for(NAMES[name], rng)
    return ext


OWN_HEADERS: dict[int, type[Header]] = {
    10: headers.SendMessage,
    310: headers.SendMessageV2,
    320: headers.SendMessageV2,
    36: headers.ConsumerSendMsgBack,
    11: headers.PullMessage,
    361: headers.PullMessage,
    14: headers.QueryConsumerOffset,
    15: headers.UpdateConsumerOffset,
    30: headers.QueueOfTopic,
    31: headers.QueueOfTopic,
    32: headers.QueueOfTopic,
    29: headers.SearchOffset,
    33: headers.ViewMessage,
    35: headers.UnregisterClient,
    38: headers.ConsumerGroupName,
    17: headers.CreateTopic,
    105: headers.GetRouteInfo,
    207: headers.DeleteSubscriptionGroup,
    208: headers.GetConsumeStats,
    215: headers.TopicName,
    216: headers.TopicName,
    202: headers.TopicName,
    300: headers.TopicName,
    351: headers.TopicName,
    352: headers.Group,
    103: headers.RegisterBroker,
    104: headers.BrokerIdentity,
    322: headers.BrokerIdentity,
    100: headers.KVEntry,
    101: headers.KVKey,
    102: headers.KVKey,
    219: headers.KVNamespace,
    224: headers.ClusterName,
    307: headers.RelayToConsumer,
    309: headers.RelayToConsumer,
    203: headers.ConsumerGroupName,
    204: headers.ProducerGroupName,
}

SUBSCRIPTION = {"topic": "T", "subString": "a || b", "subVersion": 1, "expressionType": "TAG"}
BODIES: list[Any] = [
    {
        "clientID": "c1",
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [SUBSCRIPTION], "messageModel": "BROADCASTING"}],
    },
    {"consumerGroup": "g", "clientId": "c1", "mqSet": [{"brokerName": "b", "queueId": 1, "topic": "T"}]},
    {"groupName": "g", "retryQueueNums": 1, "retryMaxTimes": 3, "consumeEnable": True},
    {"subscriptionData": SUBSCRIPTION},
    {
        "topicConfigSerializeWrapper": {
            "dataVersion": {"counter": 1},
            "topicConfigTable": {"X": {"perm": 6, "readQueueNums": 1}},
        }
    },
    {"counter": 1, "timestamp": 2},
]
ODDITIES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    2**70,
    1.5,
    1e300,
    "",
    "x",
    "x" * 300,
    "g",
    [],
    {},
    [[]],
    {"a": {}},
    "ü",
]


def mutated(value: Any, rng: random.Random) -> Any:
    """Return the value with one odd part."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        return [mutated(item, rng) for item in value]
    return rng.choice(ODDITIES)


def body(rng: random.Random) -> bytes:
    kind = rng.randrange(8)
    if kind <= 2:
        return json.dumps(rng.choice(BODIES)).encode()
    if kind <= 4:
        return json.dumps(mutated(rng.choice(BODIES), rng)).encode()
    if kind == 5:
        parts = [(rng.randrange(9), rng.randbytes(20), rng.choice(TEXTS[:-2])) for _ in range(rng.randrange(4))]
        data = bytearray(batch.encode(parts))
        if data and rng.random() < 0.5:
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 6:
        return rng.choice(
            (
                b"",
                b"{",
                b"[" * 100_000,
                b"{0:" * 1000,
                b"{" * 40 + b'"a":1' + b"}:1" * 39 + b"}",
                b"\xff" * 9,
                b"[1," * 20_000,
                b"9" * 6000,
            )
        )
    return zlib.compress(rng.randbytes(rng.randrange(100))) if rng.random() < 0.5 else rng.randbytes(rng.randrange(500))


def nonsense(code: int, opaque: int, rng: random.Random) -> Command:
    return Command(
        code=code,
        opaque=opaque,
        flag=FLAG_ONEWAY if rng.random() < 0.15 else rng.choice((0, 0, 0, 4, -2 & ~FLAG_ONEWAY & ~FLAG_RESPONSE)),
        version=rng.choice((0, 61, 120, 317, 401, 407, 32767, -1)),
        language=rng.choice(("JAVA", "GO", "CPP", "OTHER")),
        remark=rng.choice((None, "", "x" * 100)),
        ext=valid_ext(code, rng) if rng.random() < 0.95 else {},
        body=body(rng),
    )


def prepare(broker: LiveBroker) -> None:
    """Make a topic with messages, so that some of the nonsense gets further."""
    with RawClient(broker.port) as client:
        for _ in range(3):
            assert client.ask(send("T", properties="TAGS\x01a")).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("frame_codec", CODECS)
@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_every_request_is_answered_whatever_it_says(
    broker: LiveBroker, witness: Witness, rng: random.Random, frame_codec: int, rounds: int
) -> None:
    """The broker answers each nonsensical request once, with its opaque and in its codec, unless it is one-way or may
    wait."""
    prepare(broker)
    opaque = 0
    for _ in range(rounds):
        wanted: set[int] = set()
        told: set[int] = set()
        with RawClient(rng.choice((broker.port, broker.nameserver_port))) as client:
            codes = CODES * 5 + UNKNOWN_CODES
            rng.shuffle(codes)
            for code in codes:
                opaque += 1
                command = nonsense(code, opaque, rng)
                try:
                    data = codec.encode(command, frame_codec)
                except LocalProtocolError:
                    continue
                assert client.send(data), f"the broker closed after {command}"
                if command.flag & FLAG_ONEWAY == 0 and code not in SLOW:
                    wanted.add(opaque)
            opaque += 1
            client.send(codec.encode(Command(code=999, opaque=opaque), frame_codec))
            wanted.add(opaque)
            while wanted - told:
                found = client.next()
                assert found is not None, "the broker closed"
                if found[1].is_response:
                    assert found[0] == frame_codec
                    assert found[1].opaque not in told, "answered twice"
                    told.add(found[1].opaque)
    assert witness.growth_bytes < 256 * 1024 * 1024


def test_json_headers_that_codecs_would_not_write_are_answered_or_refused(
    broker: LiveBroker, witness: Witness, rng: random.Random
) -> None:
    """The broker answers or refuses JSON headers that no codec writes: numbers and other values in place of texts,
    duplicate fields, in any order, with spaces between."""
    prepare(broker)
    values = [
        "1",
        "-1",
        "1.5",
        "true",
        "null",
        '""',
        '"x"',
        "[]",
        "{}",
        '"\\u0000"',
        "1e5",
        str(2**70),
        '"' + "y" * 2000 + '"',
    ]
    for _ in range(300):
        code = rng.choice(CODES)
        fields = [f'"{name}":{rng.choice(values)}' for name in valid_ext(code, rng)]
        fields += rng.sample(fields, min(len(fields), 2))
        members = [
            f'"code":{code}',
            '"extFields":{' + ",".join(fields) + "}",
            '"opaque":7',
            '"flag":0',
            '"version":407',
        ]
        members += rng.sample(
            ['"language":null', '"language":"JAVA"', '"language":5', '"remark":null', '"code":"x"', '"a":[{}]'], 2
        )
        rng.shuffle(members)
        header = ("{" + rng.choice((",", " ,\n")).join(members) + "}").encode()
        with RawClient(broker.port) as client:
            assert client.send(join_frame(JSON, header, body(rng)))
            if code not in SLOW:
                found = client.next()
                while found is not None and not found[1].is_response:
                    found = client.next()
                if found is None:
                    broker.wait_for(lambda _, port=client.local_port: bool(broker.about(port)))  # type: ignore[misc]
                else:
                    assert found[1].opaque == 7


def test_a_wrong_request_is_logged_once(broker: LiveBroker, witness: Witness) -> None:
    """The broker logs one line with the client and the code for each unknown code, missing field, or body that does not
    parse."""
    wrong = [
        request(999),
        request(RequestCode.GET_MAX_OFFSET),
        request(RequestCode.HEART_BEAT, body=b"{"),
        request(RequestCode.SEND_MESSAGE_V2),
        request(RequestCode.REGISTER_BROKER, headers.RegisterBroker("b", "a", "c", "h", 0), b"[]"),
    ]
    with RawClient(broker.port) as client:
        for command in wrong:
            assert client.ask(command).code in (ResponseCode.SYSTEM_ERROR, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        broker.wait_for(lambda _: len(broker.about(client.local_port)) >= len(wrong))
        lines = broker.about(client.local_port)
    assert [(line["event"], line["code"]) for line in lines] == [
        ("request_refused", int(command.code)) for command in wrong
    ]
    assert all(line["reason"] for line in lines)


def test_a_flood_of_wrong_requests_does_not_flood_the_log(broker: LiveBroker, witness: Witness) -> None:
    with RawClient(broker.port) as client:
        for _ in range(20):
            commands = [request(999) for _ in range(500)]
            assert client.send(b"".join(codec.encode(command, BINARY) for command in commands))
            for command in commands:
                assert client.response().opaque == command.opaque
        assert len(broker.about(client.local_port)) < 2000


def test_responses_that_nobody_asked_for_are_passed_over(
    broker: LiveBroker, witness: Witness, rng: random.Random
) -> None:
    with RawClient(broker.port) as client:
        for _ in range(500):
            command = nonsense(rng.choice(CODES), rng.randrange(-100, 100), rng)
            command.flag = FLAG_RESPONSE | rng.choice((0, FLAG_ONEWAY))
            assert client.send(codec.encode(command, rng.choice((JSON, BINARY))))
        last = request(999)
        assert client.ask(last).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
