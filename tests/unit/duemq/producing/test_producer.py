from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from duemq import (
    Admin,
    ArgumentError,
    BrokerError,
    ClosedError,
    ConnectError,
    ConnectionLostError,
    DelayError,
    IllegalOperationError,
    Message,
    MessageHandle,
    MessageQueue,
    NoRouteError,
    NotSupportedError,
    PeerError,
    Producer,
    RequestTimeoutError,
    Retries,
    SendManyError,
    SendStatus,
    UnavailableError,
)
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.frame import JSON, MSGPACK
from duemq.protocol.records.properties import java_hash
from duemq.protocol.requests import bodies, recall_handle
from duemq.protocol.requests.headers import OffsetResponse, RecallMessageResponse, SendMessageResponse
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import NOW_MS, FakeBroker, FakeConnection, Request, failure, sent, success

SEND = RequestCode.SEND_MESSAGE_V2
CONFIG = RequestCode.GET_BROKER_CONFIG
TOPIC_CONFIG = RequestCode.GET_TOPIC_CONFIG


def make_producer(broker: FakeBroker, **options: Any) -> Producer:
    return Producer(broker.address, _intervals=INTERVALS, _clock=lambda: NOW_MS, **options)


@pytest.fixture
async def producer(broker: FakeBroker) -> AsyncIterator[Producer]:
    async with make_producer(broker) as producer:
        yield producer


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeBroker, FakeBroker]]:
    """Two brokers, the first also being the name server, with one queue of the topic each."""
    async with FakeBroker("a", topics={"demo": 1}) as first, FakeBroker("b", topics={"demo": 1}) as second:
        first.brokers = [first, second]
        yield first, second


def sends(*brokers: FakeBroker) -> list[Request]:
    return [request for broker in brokers for request in broker.requests_of(SEND)]


async def test_a_message_is_sent_and_its_place_told(broker: FakeBroker, producer: Producer) -> None:
    result = await producer.send("demo", "hallo", tags="a", keys=["k1", "k2"], properties={"own": "v"})
    (request,) = sends(broker)
    header = request.send_header()
    assert (header.topic, header.producer_group, header.default_topic) == ("demo", "duemq", "TBW102")
    assert (header.default_topic_queue_nums, header.sys_flag, header.born_timestamp) == (4, 0, NOW_MS)
    assert request.body == b"hallo"
    assert request.properties() == {"TAGS": "a", "KEYS": "k1 k2", "own": "v", "UNIQ_KEY": result.message_id}
    assert result.status is SendStatus.SEND_OK
    assert result.queue == MessageQueue("demo", "broker-a", header.queue_id)
    assert result.offset_message_id == broker.queues["demo", header.queue_id][0].offset_message_id
    assert (result.queue_offset, result.due_time_ms, len(result.message_id)) == (0, None, 32)


async def test_queues_take_turns(broker: FakeBroker, producer: Producer) -> None:
    results = [await producer.send("demo", b"x") for _ in range(8)]
    assert sorted(result.queue.queue_id for result in results) == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_a_heartbeat_is_the_first_a_broker_hears(broker: FakeBroker, producer: Producer) -> None:
    await producer.send("demo", b"x")
    beat = broker.requests_of(RequestCode.HEART_BEAT)[0]
    assert broker.requests.index(beat) < broker.requests.index(sends(broker)[0])
    data = fastjson.loads(beat.body)
    assert data["producerDataSet"] == [{"groupName": "duemq"}]
    assert data["consumerDataSet"] == []


async def test_messages_go_to_duemq_in_messagepack_and_to_apache_in_json(broker: FakeBroker) -> None:
    async with FakeBroker(language="PYTHON") as own:
        for each, codec in ((broker, JSON), (own, MSGPACK)):
            async with make_producer(each) as producer:
                await producer.send("demo", b"x")
            assert [request.codec for request in sends(each)] == [codec]


async def test_a_large_body_is_compressed(broker: FakeBroker, producer: Producer) -> None:
    await producer.send("demo", b"x" * 4096)
    (request,) = sends(broker)
    assert request.send_header().sys_flag == 1
    assert bodies.decompress(request.body, 4096) == b"x" * 4096


async def test_compression_can_be_turned_off(broker: FakeBroker) -> None:
    async with make_producer(broker, compress_from_bytes=None) as producer:
        await producer.send("demo", b"x" * 4096)
    assert sends(broker)[0].send_header().sys_flag == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [(10, "FLUSH_DISK_TIMEOUT"), (11, "SLAVE_NOT_AVAILABLE"), (12, "FLUSH_SLAVE_TIMEOUT")],
)
async def test_stored_but_not_quite_safe_is_a_status(
    broker: FakeBroker, producer: Producer, code: int, status: str
) -> None:
    broker.on(SEND, sent("ID", 0, 0, code))
    assert (await producer.send("demo", b"x")).status == status


# --- when ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "properties", "due"),
    [
        ({"level": 2}, {"DELAY": "2"}, 5_000),
        ({"delay": 5}, {"DELAY": "2"}, 5_000),
        ({"delay": "1m"}, {"DELAY": "5"}, 60_000),
        ({"delay": timedelta(seconds=1)}, {"DELAY": "1"}, 1_000),
        ({"deliver_at": datetime(2020, 1, 1, tzinfo=UTC)}, {}, 1_577_836_800_000 - NOW_MS),
        ({"delay": 0}, {}, None),
    ],
)
async def test_delays_that_every_broker_has(
    broker: FakeBroker, producer: Producer, arguments: dict[str, Any], properties: dict[str, str], due: int | None
) -> None:
    result = await producer.send("demo", b"x", **arguments)
    expected = properties | ({} if due is None else {"DUE_MS": str(NOW_MS + due)})
    assert {name: text for name, text in sends(broker)[0].properties().items() if name != "UNIQ_KEY"} == expected
    assert result.due_time_ms == (None if due is None else NOW_MS + due)


@pytest.mark.parametrize("arguments", [{"delay": 7}, {"deliver_at": NOW_MS / 1000 + 5}, {"level": 7}])
async def test_what_an_old_broker_would_deliver_early_is_not_sent(
    broker: FakeBroker, producer: Producer, arguments: dict[str, Any]
) -> None:
    with pytest.raises(DelayError, match="1s 5s 10s 30s 1m 2m"):
        await producer.send("demo", b"x", **arguments)
    assert not sends(broker)


async def test_a_broker_with_timers_gets_the_delay_or_the_time() -> None:
    async with FakeBroker(version=479, config="timerWheelEnable=true\nmessageDelayLevel=1s 5s\n") as broker:
        async with make_producer(broker) as producer:
            by_delay = await producer.send("demo", b"x", delay="7s250ms")
            by_time = await producer.send("demo", b"x", deliver_at=NOW_MS / 1000 + 5)
            await producer.send_oneway("demo", b"x", delay="7s250ms")
            await broker.until_requests(SEND, 3)
        found = [request.properties() for request in sends(broker)]
        assert [7_000 < int(found[number]["TIMER_DELAY_MS"]) <= 7_250 for number in (0, 2)] == [True, True]
        assert found[1]["TIMER_DELIVER_MS"] == str(NOW_MS + 5_000)
        assert not any(name in found[number] for number in (0, 2) for name in ("TIMER_DELIVER_MS", "DUE_MS"))
        assert by_delay.due_time_ms == NOW_MS + int(found[0]["TIMER_DELAY_MS"])
        assert by_time.due_time_ms == NOW_MS + 5_000


async def test_a_duemq_broker_says_when_a_message_is_due_by_its_clock(broker: FakeBroker, producer: Producer) -> None:
    handle = recall_handle.encode("demo", "broker-a", NOW_MS + 9_000, "KEY", 5, NOW_MS + 9_999).decode()
    broker.on(SEND, success(SendMessageResponse("ID", 0, 0, recall_handle=handle)))
    assert (await producer.send("demo", b"x", delay=5)).due_time_ms == NOW_MS + 9_999


async def test_a_broker_is_asked_for_its_delays_once_per_connection(broker: FakeBroker, producer: Producer) -> None:
    await producer.send("demo", b"x")
    assert not broker.requests_of(CONFIG)
    for _ in range(2):
        await producer.send("demo", b"x", delay=5)
        await producer.send("demo", b"x", delay=5)
        broker.cut()
    assert len(broker.requests_of(CONFIG)) == 2


async def test_delays_that_change_while_the_broker_runs_are_noticed(broker: FakeBroker) -> None:
    """The producer notices delays that change while the broker runs: with the former level the message would be
    delivered too early."""
    async with Producer(broker.address, _intervals=replace(INTERVALS, delays=0.0), _clock=lambda: NOW_MS) as producer:
        await producer.send("demo", b"x", delay=5)
        broker.config = "messageDelayLevel=5s 1s\n"
        await producer.send("demo", b"x", delay=5)
        broker.on(CONFIG, failure(ResponseCode.NO_PERMISSION))
        with pytest.raises(BrokerError):
            await producer.send("demo", b"x", delay=5, timeout=5)
    assert [sent.properties()["DELAY"] for sent in sends(broker)] == ["2", "1"]


async def test_without_its_settings_a_broker_gets_levels_only(broker: FakeBroker, producer: Producer) -> None:
    broker.on(CONFIG, failure(ResponseCode.NO_PERMISSION))
    with pytest.raises(BrokerError, match="permission denied"):
        await producer.send("demo", b"x", delay=5, timeout=5)
    asked = len(broker.requests_of(CONFIG))
    for _ in range(2):
        result = await producer.send("demo", b"x", level=2)
        assert sends(broker)[0].properties()["DELAY"] == "2"
        assert result.due_time_ms is None
    assert len(broker.requests_of(CONFIG)) == asked + 1


# --- when, by a topic's own table -----------------------------------------------------------------------------------


@pytest.fixture
async def ours() -> AsyncIterator[FakeBroker]:
    """A duemq broker whose topic `own` has other levels than the broker's 1s 5s 10s 30s 1m 2m."""
    attributes = {"own": {"delay.levels": "1m 5s"}}
    async with FakeBroker(language="PYTHON", topics={"own": 1, "plain": 1}, attributes=attributes) as broker:
        yield broker


def levels_sent(broker: FakeBroker) -> list[str | None]:
    return [request.properties().get("DELAY") for request in sends(broker)]


async def test_the_level_is_of_the_topics_table(ours: FakeBroker) -> None:
    async with make_producer(ours) as producer:
        for topic in ("own", "plain", "new"):
            for delay in ("1m", "5s"):
                result = await producer.send(topic, b"x", delay=delay)
                assert result.due_time_ms == NOW_MS + (60_000 if delay == "1m" else 5_000)
        await producer.send_oneway("own", b"x", delay="1m")
        await ours.until_requests(SEND, 7)
        due = [(await producer.send(topic, b"x", level=1)).due_time_ms for topic in ("own", "plain")]
    assert levels_sent(ours) == ["1", "2", "5", "2", "5", "2", "1", "1", "1"]
    assert due == [NOW_MS + 60_000, NOW_MS + 1_000]


@pytest.mark.parametrize("arguments", [{"delay": "10s"}, {"delay": "7s"}, {"deliver_at": NOW_MS / 1000 + 60}])
async def test_what_the_topics_table_has_not_is_not_sent(ours: FakeBroker, arguments: dict[str, Any]) -> None:
    async with make_producer(ours) as producer:
        with pytest.raises(DelayError, match=r"1m 5s of the topic own; the broker's own .*: 1s 5s 10s 30s 1m 2m"):
            await producer.send("own", b"x", **arguments)
    assert not sends(ours)


async def test_each_topic_is_asked_for_once_per_connection(ours: FakeBroker) -> None:
    async with make_producer(ours) as producer:
        await producer.send("own", b"x")
        assert not ours.requests_of(TOPIC_CONFIG)
        for _ in range(2):
            for topic in ("own", "plain", "own", "plain"):
                await producer.send(topic, b"x", delay=5)
            ours.cut()
    asked = [request.ext["topic"] for request in ours.requests_of(TOPIC_CONFIG)]
    assert asked == ["own", "plain", "own", "plain"]
    assert len(ours.requests_of(CONFIG)) == 2


async def test_a_topic_that_is_not_there_yet_is_asked_for_again(ours: FakeBroker) -> None:
    """The producer asks again for a topic that does not exist yet, or the table that it gets when it is made would take
    effect late."""
    async with make_producer(ours) as producer:
        await producer.send("new", b"x", delay=5)
        ours.attributes["new"] = {"delay.levels": "5s"}
        for _ in range(2):
            await producer.send("new", b"x", delay=5)
    assert levels_sent(ours) == ["2", "1", "1"]
    assert len(ours.requests_of(TOPIC_CONFIG)) == 2


async def test_a_topics_table_that_changes_while_the_broker_runs_is_noticed(ours: FakeBroker) -> None:
    async with Producer(ours.address, _intervals=replace(INTERVALS, delays=0.0), _clock=lambda: NOW_MS) as producer:
        for text in ("1m 5s", "5s 1m", None, "1s 2s 5s"):
            ours.attributes["own"] = {} if text is None else {"delay.levels": text}
            await producer.send("own", b"x", delay=5)
        ours.on(TOPIC_CONFIG, failure(ResponseCode.NO_PERMISSION))
        with pytest.raises(BrokerError):
            await producer.send("own", b"x", delay=5)
    assert levels_sent(ours) == ["2", "1", "2", "3"]


async def test_a_duemq_that_knows_no_such_request_has_no_tables_of_topics(ours: FakeBroker) -> None:
    ours.on(TOPIC_CONFIG, failure(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 351 not supported"))
    async with make_producer(ours) as producer:
        for _ in range(2):
            await producer.send("own", b"x", delay=5)
    assert levels_sent(ours) == ["2", "2"]
    assert len(ours.requests_of(TOPIC_CONFIG)) == 1


@pytest.mark.parametrize("version", [407, 479])
async def test_rocketmq_pays_no_heed_to_the_attribute_of_a_store_that_was_ours(ours: FakeBroker, version: int) -> None:
    ours.language, ours.version = "JAVA", version
    async with make_producer(ours) as producer:
        await producer.send("own", b"x", delay=5)
        await producer.send("own", b"x", delay="1m")
    assert levels_sent(ours) == ["2", "5"]
    assert not ours.requests_of(TOPIC_CONFIG)


async def test_without_a_topics_table_only_a_level_is_sent(ours: FakeBroker) -> None:
    ours.on(TOPIC_CONFIG, failure(ResponseCode.NO_PERMISSION))
    async with make_producer(ours) as producer:
        with pytest.raises(BrokerError, match="permission denied"):
            await producer.send("own", b"x", delay=5)
        assert not sends(ours)
        assert (await producer.send("own", b"x", level=2)).due_time_ms is None
    assert levels_sent(ours) == ["2"]


async def test_a_time_of_delivery_needs_no_table_where_there_are_timers(ours: FakeBroker) -> None:
    ours.config += "timerWheelEnable=true\n"
    async with make_producer(ours) as producer:
        await producer.send("own", b"x", deliver_at=NOW_MS / 1000 + 5)
        assert not ours.requests_of(TOPIC_CONFIG)
        await producer.send("own", b"x", delay=10)
        await producer.send("own", b"x", delay=5)
    assert levels_sent(ours) == [None, None, None]
    assert 9_000 < int(sends(ours)[1].properties()["TIMER_DELAY_MS"]) <= 10_000


# --- where --------------------------------------------------------------------------------------------------------


async def test_a_sharding_key_that_is_no_text_is_refused(producer: Producer) -> None:
    with pytest.raises(ArgumentError, match="a sharding key must be a non-empty string, not 5"):
        await producer.send("demo", b"x", sharding_key=5)  # type: ignore[call-overload]


async def test_a_message_of_many_that_utf8_cannot_carry_keeps_none_of_the_others(producer: Producer) -> None:
    """It ended in a UnicodeEncodeError, without a word on the others."""
    odd: list[dict[str, Any]] = [
        {"properties": {"a": "\ud800"}},
        {"tags": "\ud800"},
        {"keys": "\ud800"},
        {"sharding_key": "\ud800"},
    ]
    messages = [Message("demo", b"x"), *(Message("demo", b"x", **each) for each in odd), Message("demo", b"x")]
    with pytest.raises(SendManyError, match="of 6 messages 2 are stored, 4 are not"):
        await producer.send_many(messages)


async def test_a_sharding_key_is_always_in_the_queue_that_java_would_choose(
    broker: FakeBroker, producer: Producer
) -> None:
    for key in ("order-17", "order-18", "polygenelubricants"):  # the last one hashes to Integer.MIN_VALUE
        for _ in range(2):
            await producer.send("demo", b"x", sharding_key=key)
            request = sends(broker)[-1]
            assert request.properties()["__SHARDINGKEY"] == key
            assert request.send_header().queue_id == abs(java_hash(key)) % 4


async def test_a_queue_can_be_chosen(broker: FakeBroker, producer: Producer) -> None:
    queue = MessageQueue("demo", "broker-a", 2)
    assert (await producer.send("demo", b"x", queue=queue)).queue == queue
    for wrong in ({"queue": queue._replace(topic="other")}, {"queue": queue, "sharding_key": "k"}):
        with pytest.raises(ArgumentError):
            await producer.send("demo", b"x", **wrong)
    with pytest.raises(NoRouteError, match="the broker nobody has no primary"):
        await producer.send("demo", b"x", queue=queue._replace(broker="nobody"))


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2, 14, 16, 17])
async def test_a_failure_that_may_pass_is_tried_again_with_the_same_id(
    broker: FakeBroker, producer: Producer, code: int
) -> None:
    broker.on(SEND, failure(code), failure(code), sent("ID", 0, 5))
    result = await producer.send("demo", b"x")
    assert result.queue_offset == 5
    assert [request.properties()["UNIQ_KEY"] for request in sends(broker)] == [result.message_id] * 3


async def test_after_all_tries_the_last_failure_is_raised(broker: FakeBroker, producer: Producer) -> None:
    broker.on(SEND, failure(16), failure(1, "disk broken"))
    with pytest.raises(BrokerError, match="disk broken"):
        await producer.send("demo", b"x")
    assert len(sends(broker)) == 3


async def test_a_broker_that_stored_nothing_is_tried_until_the_time_is_up(
    broker: FakeBroker, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    broker.on(SEND, *[failure(14, "shutting down")] * 3, *[failure(2)] * 3, sent("ID", 0, 7))
    results = await asyncio.gather(*(producer.send("demo", b"x") for _ in range(5)))
    assert [each.queue_offset for each in results] == [7] * 5
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "sends to 127.0.0.1",
        "sends to 127.0.0.1",
    ], "one line when it begins, one when it is over"
    broker.on(SEND, failure(14, "disk full"))
    slow = Producer(broker.address, retries=Retries(first_pause=60, longest_pause=60), _intervals=INTERVALS)
    async with slow:
        with pytest.raises(UnavailableError, match="disk full") as caught:
            await slow.send("demo", b"x", timeout=1)
    assert caught.value.__notes__ == ["the send was attempted 1 times within 1 s"]


async def test_a_restart_costs_latency_and_no_errors(broker: FakeBroker, producer: Producer) -> None:
    """Broker and name server are away, and the name server comes back without the topic first."""
    await producer.send("demo", b"x")
    port = broker.server.sockets[0].getsockname()[1]
    broker.server.close()
    broker.cut()
    sending = asyncio.gather(*(producer.send("demo", b"%d" % number) for number in range(50)))
    while not producer._sender._failing:
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    broker.server = await loop.create_server(lambda: FakeConnection(broker), "127.0.0.1", port)
    assert len(await sending) == 50


async def test_a_topic_that_was_found_may_be_unknown_for_a_while(broker: FakeBroker, producer: Producer) -> None:
    broker.auto_create = False
    broker.topics["demo"] = 4
    await producer.send("demo", b"x")
    del broker.topics["demo"]
    await producer._client.routes.refresh()
    sending = asyncio.create_task(producer.send("demo", b"y"))
    await broker.until(lambda: len(broker.requests_of(RequestCode.GET_ROUTEINFO_BY_TOPIC)) > 4)
    broker.topics["demo"] = 4
    await sending
    with pytest.raises(NoRouteError):
        await producer.send("misspelt", b"x")


async def test_first_sends_to_a_new_topic_share_one_question(broker: FakeBroker, producer: Producer) -> None:
    await asyncio.gather(*(producer.send("new", b"x", delay=5) for _ in range(200)))
    assert len(sends(broker)) == 200
    asked = [each.ext["topic"] for each in broker.requests_of(RequestCode.GET_ROUTEINFO_BY_TOPIC)]
    assert asked == ["new", "TBW102"]
    assert len(broker.requests_of(RequestCode.GET_BROKER_CONFIG)) == 1


async def test_a_timeout_is_more_than_nothing(broker: FakeBroker, producer: Producer) -> None:
    for timeout in (0, -1, float("nan"), 10**400):
        with pytest.raises(ArgumentError, match="more than 0"):
            await producer.send("demo", b"x", timeout=timeout)
        with pytest.raises(ArgumentError, match="more than 0"):
            make_producer(broker, timeout=timeout)


async def test_a_producer_belongs_to_its_event_loop(broker: FakeBroker, producer: Producer) -> None:
    for call in (producer.send("demo", b"x"), producer.close()):
        with pytest.raises(ArgumentError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, call)
    assert (await producer.send("demo", b"x")).status == SendStatus.SEND_OK


async def test_without_a_handle_there_is_nothing_to_recall(producer: Producer) -> None:
    with pytest.raises(ArgumentError, match="only a send to a broker with recalls"):
        await producer.recall("demo", None)  # type: ignore[arg-type]


async def test_a_message_that_is_refused_for_good_is_not_tried_again(broker: FakeBroker, producer: Producer) -> None:
    broker.on(SEND, failure(ResponseCode.MESSAGE_ILLEGAL, "too large"))
    with pytest.raises(BrokerError, match="too large"):
        await producer.send("demo", b"x")
    assert len(sends(broker)) == 1


async def test_the_next_try_goes_to_another_broker(pair: tuple[FakeBroker, FakeBroker]) -> None:
    first, second = pair
    first.on(SEND, failure(2))
    async with make_producer(first) as producer:
        results = [await producer.send("demo", b"x") for _ in range(4)]
    assert {result.queue.broker for result in results} == {"b"}
    assert len(sends(second)) == 4


async def test_a_broker_that_is_gone_is_passed_over(pair: tuple[FakeBroker, FakeBroker]) -> None:
    first, second = pair
    second.server.close()
    async with make_producer(first) as producer:
        for _ in range(4):
            assert (await producer.send("demo", b"x")).queue.broker == "a"


async def test_a_fixed_queue_is_tried_again_at_its_broker(pair: tuple[FakeBroker, FakeBroker]) -> None:
    first, second = pair
    first.on(SEND, failure(2), sent("ID", 0, 0))
    async with make_producer(first) as producer:
        await producer.send("demo", b"x", queue=MessageQueue("demo", "a", 0))
    assert (len(sends(first)), len(sends(second))) == (2, 0)


async def test_a_lost_connection_is_opened_anew(broker: FakeBroker, producer: Producer) -> None:
    def lose(request: Request) -> None:
        broker.cut()

    broker.on(SEND, lose, sent("ID", 0, 1))
    assert (await producer.send("demo", b"x")).queue_offset == 1


async def test_no_retries_at_all_can_be_asked_for(broker: FakeBroker) -> None:
    broker.on(SEND, lambda request: broker.cut())
    async with make_producer(broker, retries=0) as producer:
        with pytest.raises(ConnectionLostError):
            await producer.send("demo", b"x")
    assert len(sends(broker)) == 1


async def test_the_timeout_is_for_all_tries_together(broker: FakeBroker, producer: Producer) -> None:
    broker.on(SEND, None)
    with pytest.raises(RequestTimeoutError) as caught:
        await producer.send("demo", b"x", timeout=0.5)
    assert caught.value.address == broker.address
    assert len(sends(broker)) == 1


async def test_a_callers_own_timeout_is_not_taken_for_the_sends(broker: FakeBroker, producer: Producer) -> None:
    broker.on(SEND, None)
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.01):
            await producer.send("demo", b"x")
    assert not isinstance(caught.value, RequestTimeoutError)


async def test_an_answer_without_its_fields_is_the_brokers_fault(broker: FakeBroker, producer: Producer) -> None:
    broker.on(SEND, success())
    with pytest.raises(PeerError, match="msgId: is missing"):
        await producer.send("demo", b"x")


async def test_arguments_are_checked_before_anything_is_sent(broker: FakeBroker, producer: Producer) -> None:
    for arguments in ({"body": b""}, {"body": bytes(4 * 1024 * 1024 + 1)}, {"topic": "de mo"}, {"tags": "a||b"}):
        with pytest.raises(ArgumentError):
            await producer.send(**{"topic": "demo", "body": b"x", **arguments})  # type: ignore[call-overload]
    assert not broker.requests


async def test_what_no_frame_can_hold_is_refused(broker: FakeBroker) -> None:
    async with make_producer(broker, max_body_bytes=2**30, compress_from_bytes=None) as producer:
        with pytest.raises(ArgumentError, match="the largest has 16777216"):
            await producer.send("demo", bytes(2**24))
        await producer.send("demo", b"x")


# --- one-way and batch --------------------------------------------------------------------------------------------


async def test_a_one_way_message_has_no_answer(broker: FakeBroker, producer: Producer) -> None:
    message_id = await producer.send_oneway("demo", b"x", level=2, tags="a")
    (request,) = await broker.until_requests(SEND)
    assert request.command.is_oneway
    assert request.properties()["UNIQ_KEY"] == message_id
    assert request.properties()["DELAY"] == "2"


async def test_a_batch_is_one_request_and_a_result_for_each(broker: FakeBroker, producer: Producer) -> None:
    messages = [Message("demo", f"m{number}", tags="a", properties={"n": str(number)}) for number in range(3)]
    results = await producer.send_batch(messages, queue=MessageQueue("demo", "broker-a", 1))
    (request,) = broker.requests_of(RequestCode.SEND_BATCH_MESSAGE)
    assert request.send_header().batch is True
    stored = broker.queues["demo", 1]
    assert [(message.body, message.properties["n"]) for message in stored] == [(b"m0", "0"), (b"m1", "1"), (b"m2", "2")]
    assert [result.message_id for result in results] == [message.properties["UNIQ_KEY"] for message in stored]
    assert [result.offset_message_id for result in results] == [message.offset_message_id for message in stored]
    assert [result.queue_offset for result in results] == [0, 1, 2]


@pytest.mark.parametrize(
    "messages", [[], [Message("a", b"x"), Message("b", b"x")], [Message("a", bytes(3_000_000)) for _ in range(2)]]
)
async def test_a_batch_is_of_one_topic_and_not_too_large(producer: Producer, messages: list[Message]) -> None:
    with pytest.raises(ArgumentError):
        await producer.send_batch(messages)


# --- life ---------------------------------------------------------------------------------------------------------


async def test_a_producer_says_goodbye(broker: FakeBroker) -> None:
    async with make_producer(broker, group="mine") as producer:
        await producer.send("demo", b"x")
    (goodbye,) = broker.requests_of(RequestCode.UNREGISTER_CLIENT)
    assert goodbye.ext["producerGroup"] == "mine"
    assert goodbye.ext["clientID"] == fastjson.loads(broker.requests_of(RequestCode.HEART_BEAT)[0].body)["clientID"]
    await broker.until(lambda: not broker.connections)
    await producer.close()
    with pytest.raises(ClosedError):
        await producer.send("demo", b"x")


async def test_a_producer_has_to_be_started(broker: FakeBroker) -> None:
    with pytest.raises(ClosedError, match="start the producer first"):
        await make_producer(broker).send("demo", b"x")


async def test_without_a_name_server_the_start_fails() -> None:
    async with FakeBroker() as gone:
        pass
    with pytest.raises(ConnectError):
        await make_producer(gone).start()


async def test_closing_waits_for_what_is_under_way_and_takes_no_more(broker: FakeBroker) -> None:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def later(request: Request) -> Any:
        return await answer

    producer = make_producer(broker, max_in_flight=1)
    await producer.start()
    first = await producer.send("demo", b"x")
    broker.on(SEND, later)
    sending = [asyncio.create_task(producer.send("demo", b"x")) for _ in range(2)]
    await broker.until_requests(SEND, 2)
    closing = asyncio.create_task(producer.close())
    flushing = asyncio.create_task(producer.flush())
    await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await producer.send("demo", b"x")
    assert not closing.done()
    answer.set_result(sent(first.offset_message_id, 0, 1))
    broker.on(SEND, sent(first.offset_message_id, 0, 2))
    assert [result.queue_offset for result in await asyncio.gather(*sending)] == [1, 2], "also the one that waited"
    await closing
    await flushing


async def test_a_start_that_failed_can_be_tried_again() -> None:
    async with FakeBroker() as broker:
        port = broker.server.sockets[0].getsockname()[1]
        broker.server.close()
        producer = make_producer(broker)
        admin = Admin(broker.address, _intervals=INTERVALS)
        for client in (producer, admin):
            with pytest.raises(ConnectError):
                await client.start()
        loop = asyncio.get_running_loop()
        broker.server = await loop.create_server(lambda: FakeConnection(broker), "127.0.0.1", port)
        await asyncio.gather(producer.start(), producer.start(), admin.start(), admin.start())
        await producer.send("demo", b"x")
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "duemq heartbeats"]) == 2
        await producer.close()
        await admin.close()
        with pytest.raises(ClosedError):
            await admin.start()


async def test_closing_fails_what_is_still_under_way_after_its_timeout(broker: FakeBroker) -> None:
    broker.on(SEND, None)
    producer = make_producer(broker, retries=0)
    await producer.start()
    sending = asyncio.create_task(producer.send("demo", b"x"))
    await broker.until_requests(SEND)
    await producer.close(timeout=0)
    with pytest.raises(ConnectionLostError, match="closed by this client") as caught:
        await sending
    assert caught.value.maybe_stored


@pytest.mark.parametrize(
    "options",
    [
        {"group": "a b"},
        {"codec": "xml"},
        {"timeout": 0},
        {"connect_timeout": -1},
        {"retries": -1},
        {"max_in_flight": 0},
        {"max_in_flight_bytes": 0},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Producer("h:1", **options)


# --- messages that wait ----------------------------------------------------------------------------------------------

RECALL = RequestCode.RECALL_MESSAGE


def handle_for(topic: str = "demo", broker: str = "broker-a") -> str:
    return recall_handle.encode(topic, broker, NOW_MS, "KEY", 5, NOW_MS + 1).decode()


async def test_a_result_has_the_handle_that_the_broker_gave(broker: FakeBroker, producer: Producer) -> None:
    assert (await producer.send("demo", b"x")).handle is None
    given = handle_for()
    broker.on(SEND, success(SendMessageResponse("0" * 32, 0, 0, recall_handle=given)))
    timer = await producer.send("demo", b"x", delay=5)
    assert timer.handle == MessageHandle("demo", "broker-a", "KEY", "0" * 32, given)
    assert timer.recall_handle == given
    assert timer.due_time_ms == NOW_MS + 1, "as the broker says, in its handle"
    assert (await producer.send("demo", b"x")).handle is None, "it does not wait"
    broker.on(SEND, success(SendMessageResponse("0" * 32, 0, 0)))
    level = await producer.send("demo", b"x", level=2)
    assert level.handle == MessageHandle("demo", "broker-a", level.message_id, "0" * 32)
    assert level.recall_handle is None
    broker.on(SEND, success(SendMessageResponse("0" * 32, 0, 0, recall_handle="of another version")))
    assert (await producer.send("demo", b"x", level=2)).recall_handle is None


async def test_a_message_is_recalled_at_its_broker(pair: tuple[FakeBroker, FakeBroker]) -> None:
    first, second = pair
    second.on(RECALL, success(RecallMessageResponse("KEY")))
    async with make_producer(first, group="g") as producer:
        assert await producer.recall("demo", handle_for(broker="b")) == "KEY"
        with pytest.raises(NoRouteError):
            await producer.recall("demo", handle_for(broker="gone"))
    (asked,) = second.requests_of(RECALL)
    assert asked.ext == {"topic": "demo", "recallHandle": handle_for(broker="b"), "producerGroup": "g"}
    assert first.requests_of(RECALL) == []


async def test_what_cannot_be_recalled_says_why(broker: FakeBroker, producer: Producer) -> None:
    broker.on(RECALL, failure(ResponseCode.ILLEGAL_OPERATION, "recall failed, the message is already delivered"))
    with pytest.raises(IllegalOperationError, match="already delivered"):
        await producer.recall("demo", handle_for())
    assert len(broker.requests_of(RECALL)) == 1


@pytest.mark.parametrize(("topic", "handle"), [("demo", "x"), ("demo", ""), ("other", handle_for())])
async def test_what_is_no_handle_of_the_topic_is_not_sent(
    broker: FakeBroker, producer: Producer, topic: str, handle: str
) -> None:
    with pytest.raises(ArgumentError, match="recall handle"):
        await producer.recall(topic, handle)
    assert broker.requests_of(RECALL) == []


async def test_a_closed_producer_cancels_nothing(broker: FakeBroker) -> None:
    producer = make_producer(broker)
    for work in (producer.cancel("0" * 32), producer.recall("demo", handle_for())):
        with pytest.raises(ClosedError):
            await work


# --- replacing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "delay", [{}, {"delay": "5s"}, {"delay": "7s"}, {"level": 2}, {"deliver_at": NOW_MS / 1000 + 9}]
)
async def test_a_message_that_replaces_says_so_and_goes_where_its_key_goes(delay: dict[str, Any]) -> None:
    config = "timerWheelEnable=true\nmessageDelayLevel=1s 5s\n"
    async with FakeBroker(language="PYTHON", config=config, topics={"demo": 8}) as broker:
        async with make_producer(broker) as producer:
            for key in ("a", "b", ["a"], ("b",), iter(["a"])):
                await producer.send("demo", b"x", keys=key, replace=True, **delay)
            await producer.send_oneway("demo", b"x", keys="a", replace=True, **delay)
            await broker.until_requests(SEND, 6)
        found = [(request.properties(), request.send_header().queue_id) for request in sends(broker)]
    assert all(properties["TIMER_REPLACE"] == "true" for properties, _ in found)
    assert [properties["KEYS"] for properties, _ in found] == ["a", "b", "a", "b", "a", "a"]
    queues = [queue for _, queue in found]
    assert queues[0] == queues[2] == queues[4] == queues[5] != queues[1] == queues[3]


@pytest.mark.parametrize("keys", [(), "", ["a", "b"], "a b"])
async def test_a_message_that_replaces_has_one_key(broker: FakeBroker, producer: Producer, keys: Any) -> None:
    with pytest.raises(ArgumentError, match="exactly one in `keys`"):
        await producer.send("demo", b"x", keys=keys, delay="7s", replace=True)
    assert not sends(broker)


@pytest.mark.parametrize("delay", [{}, {"level": 2}, {"delay": "5s"}])
async def test_a_broker_that_would_deliver_both_is_not_sent_to(
    broker: FakeBroker, producer: Producer, delay: dict[str, Any]
) -> None:
    with pytest.raises(NotSupportedError, match="only a duemq broker replaces"):
        await producer.send("demo", b"x", keys="a", replace=True, **delay)
    assert not sends(broker)


# --- what was stored ------------------------------------------------------------------------------------------------


async def test_a_message_id_may_be_known_before_the_send(broker: FakeBroker, producer: Producer) -> None:
    message_id = producer.new_message_id()
    assert (await producer.send("demo", "x", message_id=message_id)).message_id == message_id
    results = await producer.send_batch([Message("demo", "y", message_id="MINE"), Message("demo", "z")])
    assert results[0].message_id == "MINE"
    assert len({message_id, *(each.message_id for each in results)}) == 3


async def test_a_send_may_be_tried_once_only(broker: FakeBroker, producer: Producer) -> None:
    broker.on(SEND, failure(ResponseCode.SYSTEM_BUSY, "busy"))
    with pytest.raises(BrokerError):
        await producer.send("demo", "x", retries=0)
    assert len(sends(broker)) == 1


async def test_a_batch_goes_by_its_sharding_key(broker: FakeBroker, producer: Producer) -> None:
    queue = await producer.choose_queue("demo", "key")
    results = await producer.send_batch([Message("demo", each, sharding_key="key") for each in "ab"])
    assert {each.queue for each in results} == {queue}
    with pytest.raises(ArgumentError, match="the same sharding key"):
        await producer.send_batch([Message("demo", each, sharding_key=each) for each in "ab"])
    results = await producer.send_batch([Message("demo", each, sharding_key=each) for each in "ab"], queue=queue)
    assert {each.queue for each in results} == {queue}


async def test_which_messages_are_stored(broker: FakeBroker, producer: Producer) -> None:
    for number in range(100):
        broker.append("demo", 1, b"x", f"UNIQ_KEY\x01id{number}\x02")
    queue = MessageQueue("demo", "broker-a", 1)
    assert await producer.end_offset(queue) == 100
    assert await producer.stored(["id3", "id50", "id99", "other"], queue, 40) == {"id50": 50, "id99": 99}
    assert await producer.stored(["id3"], queue, 0) == {"id3": 3}
    assert await producer.stored(["id3"], queue, 100) == {}


async def test_a_topic_that_its_broker_does_not_have_has_nothing_stored(broker: FakeBroker, producer: Producer) -> None:
    broker.on(RequestCode.GET_MAX_OFFSET, failure(ResponseCode.TOPIC_NOT_EXIST, "none"))
    queue = await producer.choose_queue("new")
    assert await producer.end_offset(queue) == 0
    assert await producer.stored(["id"], queue, 0) == {}


async def test_a_topic_that_only_the_name_server_does_not_know_may_have_it(
    broker: FakeBroker, producer: Producer
) -> None:
    """A name server forgets the topics of a broker that is away: that must not look as if nothing was stored."""
    queue = await producer.choose_queue("new")
    broker.on(RequestCode.GET_MAX_OFFSET, success(OffsetResponse(7)))
    with pytest.raises(NoRouteError):
        await producer.stored(["id"], queue, 0)
    broker.auto_create = False
    producer._client.routes._fallbacks.clear()
    with pytest.raises(NoRouteError):
        await producer.stored(["id"], queue, 0)


async def test_what_is_stored_is_asked_only_of_an_open_producer(broker: FakeBroker) -> None:
    producer = make_producer(broker)
    with pytest.raises(ClosedError):
        await producer.choose_queue("demo")
    with pytest.raises(ClosedError):
        producer.new_message_id()
