"""Bytes captured from Apache RocketMQ: duemq reads them as expected, and where an encoding is unique, duemq writes the
same bytes. See golden/README.md for how they were captured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.frames import codec, fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, JSON
from duemq.protocol.records import batch, properties, record
from duemq.protocol.records.message_id import unpack_host
from duemq.protocol.records.record import FLAG_BORN_IPV6, FLAG_STORE_IPV6, MAGIC_V1, MAGIC_V2
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import DataVersion, HeartbeatData, TopicConfig, TopicRoute
from duemq.protocol.requests.headers import (
    ConsumerSendMsgBack,
    PullMessage,
    PullMessageResponse,
    SendMessageResponse,
    SendMessageV2,
    UpdateConsumerOffset,
    decode_ext,
)
from duemq.protocol.requests.registration import decode_registration, encode_registration
from tests.support import wire

GOLDEN = Path(__file__).parents[1] / "golden"
STREAMS = sorted(path.name for path in GOLDEN.glob("*-*.re*.bin"))
CODECS = {"json": JSON, "binary": BINARY}


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def stream(name: str) -> list[Command]:
    return [command for _, command in wire.decode_all(golden(name))]


def only(commands: list[Command], code: int) -> list[Command]:
    return [command for command in commands if command.code == code]


# --- frames


@pytest.mark.parametrize("name", STREAMS)
def test_every_frame_of_a_stream_is_a_command_of_4_9_7(name: str) -> None:
    frames = list(wire.decode_all(golden(name)))
    assert len(frames) >= 3
    for frame_codec, command in frames:
        # Notices of the broker use the broker's own codec.
        assert frame_codec == CODECS[name.partition("-")[0]] or command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        assert (command.language, command.version) == ("JAVA", 407)
        assert command.is_response == (name.endswith("responses.bin") and not command.is_oneway)


@pytest.mark.parametrize("name", [name for name in STREAMS if "requests" in name])
def test_our_requests_are_byte_for_byte_theirs(name: str) -> None:
    """duemq's requests are byte for byte those of Java, with the fields in their order; except that Java leaves
    `extFields` out of a request without fields, where duemq writes it empty."""
    for frame_codec, command in wire.decode_all(golden(name)):
        ours = codec.encode(command, frame_codec)
        if frame_codec == JSON and not command.ext:
            assert b'"extFields":{},' in ours
            continue
        assert ours in golden(name)


@pytest.mark.parametrize("name", ["binary-producer.responses.bin", "binary-consumer.responses.bin"])
def test_our_binary_responses_are_byte_for_byte_theirs(name: str) -> None:
    data = golden(name)
    frames = list(wire.decode_all(data))
    assert b"".join(codec.encode(command, frame_codec) for frame_codec, command in frames) == data


@pytest.mark.parametrize("name", ["json", "binary"])
def test_sends_are_read(name: str) -> None:
    requests = stream(f"{name}-producer.requests.bin")
    plain, delayed, oneway = only(requests, RequestCode.SEND_MESSAGE_V2)
    header = decode_ext(SendMessageV2, plain.ext)
    assert (header.producer_group, header.topic, header.queue_id) == ("golden_producer", "GoldenTopic", 1)
    assert (header.default_topic, header.default_topic_queue_nums, header.batch) == ("TBW102", 4, False)
    wanted = properties.parse(header.properties or "")
    assert (wanted["color"], wanted["TAGS"], wanted["KEYS"]) == ("grün", "tagA", "key1 key2")
    assert bytes(plain.body) == b"golden body"
    assert properties.get(decode_ext(SendMessageV2, delayed.ext).properties or "", "DELAY") == "1"
    assert oneway.flag == FLAG_ONEWAY


@pytest.mark.parametrize("name", ["json", "binary"])
def test_batches_are_read_and_written(name: str) -> None:
    (request,) = only(stream(f"{name}-producer.requests.bin"), RequestCode.SEND_BATCH_MESSAGE)
    assert decode_ext(SendMessageV2, request.ext).batch is True
    parts = batch.decode(bytes(request.body))
    assert [(flag, body) for flag, body, _ in parts] == [(0, b"batch 0"), (1, b"batch 1"), (2, b"batch 2")]
    assert [properties.get(text, "TAGS") for _, _, text in parts] == ["tagC"] * 3
    assert batch.encode(parts) == bytes(request.body)


def test_send_responses_are_read() -> None:
    answers = [answer for answer in stream("json-producer.responses.bin") if "msgId" in answer.ext]
    headers = [decode_ext(SendMessageResponse, answer.ext) for answer in answers]
    assert [(header.queue_id, header.queue_offset) for header in headers] == [(1, 0), (1, 0), (1, 1)]
    assert headers[2].msg_id.count(",") == 2
    assert answers[0].ext["MSG_REGION"] == "DefaultRegion"


def test_what_a_consumer_asks_is_read() -> None:
    requests = stream("json-consumer.requests.bin")
    pulls = [decode_ext(PullMessage, request.ext) for request in only(requests, RequestCode.PULL_MESSAGE)]
    assert [(pull.subscription, pull.queue_offset) for pull in pulls] == [
        ("tagA || tagB", 0),
        ("nothing", 0),
        ("*", 99),
    ]
    (commit,) = only(requests, RequestCode.UPDATE_CONSUMER_OFFSET)
    assert commit.is_oneway
    assert decode_ext(UpdateConsumerOffset, commit.ext) == UpdateConsumerOffset("golden_consumer", "GoldenTopic", 1, 3)
    (back,) = only(requests, RequestCode.CONSUMER_SEND_MSG_BACK)
    header = decode_ext(ConsumerSendMsgBack, back.ext)
    assert (header.offset, header.delay_level, header.max_reconsume_times) == (0, 3, 16)
    heartbeat = bodies.decode(only(requests, RequestCode.HEART_BEAT)[0].body, HeartbeatData, strict=True)
    assert heartbeat.client_id == "192.0.2.2@golden_pull@STREAM"
    assert [consumer.group_name for consumer in heartbeat.consumer_data_set or ()] == ["golden_consumer"]


def test_pull_responses_are_read() -> None:
    answers = [answer for answer in stream("json-consumer.responses.bin") if "nextBeginOffset" in answer.ext]
    assert [(answer.code, answer.remark) for answer in answers] == [
        (ResponseCode.SUCCESS, "FOUND"),
        (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
        (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY"),
    ]
    assert {msgspec.structs.astuple(decode_ext(PullMessageResponse, answer.ext)) for answer in answers} == {
        (0, 6, 0, 6)
    }
    messages = record.decode_all(bytes(answers[0].body))
    found = [(message.queue_offset, message.body) for message in messages]
    assert found == [(0, b"golden body"), (4, b"one-way"), (5, b"delayed")]
    assert messages[2].get_property("REAL_TOPIC") == "GoldenTopic"


def test_the_brokers_notice_is_a_request_of_its_own() -> None:
    (notice,) = only(stream("json-consumer.responses.bin"), RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert (notice.flag, notice.ext) == (FLAG_ONEWAY, {"consumerGroup": "golden_consumer"})


@pytest.mark.parametrize("name", ["json", "binary"])
def test_routes_are_read(name: str) -> None:
    answers = stream(f"{name}-nameserver.responses.bin")
    assert {answer.flag for answer in answers} == {FLAG_RESPONSE}
    route = bodies.decode(next(answer.body for answer in answers if answer.code == 0), TopicRoute)
    (broker,) = route.broker_datas
    assert (broker.broker_addrs, broker.broker_name, broker.cluster) == (
        {0: "127.0.0.2:29911"},
        "broker-a",
        "DefaultCluster",
    )
    (queues,) = route.queue_datas
    assert queues.broker_name == "broker-a"
    if name == "json":
        assert answers[0].code == ResponseCode.TOPIC_NOT_EXIST
        assert (answers[0].remark or "").startswith("No topic route info in name server for the topic: GoldenTopic")


# --- records


def test_every_record_of_a_commitlog_is_read_and_our_bytes_are_theirs() -> None:
    data = golden("commitlog.bin")
    messages = record.decode_all(data)
    assert b"".join(record.encode(message) for message in messages) == data
    assert [message.physical_offset for message in messages] == [0, 238, 505, 732, 959, 1186, 1393, 1652, 1953]
    assert [message.topic for message in messages[:2]] == ["GoldenTopic", "SCHEDULE_TOPIC_XXXX"]
    assert {unpack_host(message.store_host) for message in messages[:7]} == {("127.0.0.2", 29911)}
    assert messages[0].offset_message_id == "7F000002000074D70000000000000000"
    assert messages[-1].properties["REAL_TOPIC"] == "%RETRY%golden_consumer"
    assert messages[-1].reconsume_times == 1


@pytest.mark.parametrize(
    ("name", "flags", "born", "store", "message_id"),
    [
        ("ipv4", 0, "10.1.2.3", "10.1.2.4", "0A01020400002A9F00000000000010E1"),
        ("born-ipv6", FLAG_BORN_IPV6, "2001:db8::1", "10.1.2.4", "0A01020400002A9F00000000000010E1"),
        ("store-ipv6", FLAG_STORE_IPV6, "10.1.2.3", "2001:db8::2",
         "20010DB800000000000000000000000200002A9F00000000000010E1"),
        ("ipv6", FLAG_BORN_IPV6 | FLAG_STORE_IPV6, "2001:db8::1", "2001:db8::2",
         "20010DB800000000000000000000000200002A9F00000000000010E1"),
    ],
)  # fmt: skip
def test_records_with_either_kind_of_host(name: str, flags: int, born: str, store: str, message_id: str) -> None:
    data = golden(f"record-{name}.bin")
    message = record.decode(data)
    assert (message.magic, message.size, message.sys_flag) == (MAGIC_V1, len(data), flags)
    assert unpack_host(message.born_host) == (born, 4567)
    assert unpack_host(message.store_host) == (store, 10911)
    assert message.offset_message_id == message_id
    assert (message.queue_id, message.flag, message.queue_offset, message.physical_offset) == (3, 7, 11, 4321)
    assert (message.born_timestamp, message.store_timestamp) == (1_700_000_000_001, 1_700_000_000_002)
    assert (message.reconsume_times, message.prepared_transaction_offset) == (2, 99)
    assert (message.body, message.topic, message.properties) == (b"six", "GoldenTopic", {"KEYS": "k1"})
    assert record.encode(message) == data


def test_version_2_of_5_3_3_is_read() -> None:
    message = record.decode(golden("record-v2.bin"), check_crc=False)
    assert message.magic == MAGIC_V2
    assert len(message.topic) == 200
    assert message.topic.startswith("abcdefghijklmnopqrstuvwxyzabc")
    assert (message.body, message.queue_id, message.flag, message.reconsume_times) == (b"version two", 3, 7, 2)
    assert message.get_property("KEYS") == "k1"
    assert unpack_host(message.born_host) == ("10.1.2.3", 4567)


# --- bodies


@pytest.mark.parametrize("kind", ["plain", "compressed"])
@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
def test_registrations_are_read(version: str, kind: str) -> None:
    body = golden(f"registration-{version}-{kind}.bin")
    edition, topics, _ = decode_registration(body, compressed=kind == "compressed")
    assert (edition.timestamp, edition.counter) == (1_700_000_000_000, 5)
    assert topics.pop("GoldenTopic").to_json() == TopicConfig("GoldenTopic", 4, 8, 6).to_json()
    assert list(topics) == (["Other"] if version == "5.3.3" else [])


def test_our_registration_is_byte_for_byte_theirs() -> None:
    table = {
        "dataVersion": DataVersion(1_700_000_000_000, 5).to_json(),
        "topicConfigTable": {"GoldenTopic": TopicConfig("GoldenTopic", 4, 8, 6).to_json()},
    }
    assert encode_registration(table) == golden("registration-4.9.7-plain.bin")


def test_object_keys_are_written_byte_for_byte_as_theirs() -> None:
    queue = bodies.BrokerQueue("b-a", 1, "T").to_json()
    entries = [(queue, {"brokerOffset": 10, "consumerOffset": 9, "lastTimestamp": 5})]
    ours = b'{"consumeTps":%b,"offsetTable":%b}' % (fastjson.dumps(1.5), fastjson.dump_object_keys(entries))
    assert ours == golden("consume-stats.json")
