"""How one changes one's mind, by `Producer` and `Admin` alike, against two brokers in memory of which each test says
what they know; and the handles by which that is done."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq import (
    Admin,
    ArgumentError,
    BrokerError,
    ChangedMessage,
    ChangeResult,
    Changes,
    ClosedError,
    IllegalOperationError,
    MessageHandle,
    NotSupportedError,
    Producer,
)
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies, recall_handle
from duemq.protocol.requests.bodies import BrokerData
from duemq.protocol.requests.headers import RecallMessageResponse
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, Request, failure, success

CHANGE, BY_HANDLE, RECALL = RequestCode.CHANGE_PENDING, RequestCode.CHANGE_BY_HANDLE, RequestCode.RECALL_MESSAGE
NOT_SUPPORTED = failure(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 30005 not supported")
X, Y, Z = (f"7F00000100002A9F000000000000000{digit}" for digit in "123")
Pair = tuple[FakeBroker, FakeBroker]
Changer = Producer | Admin


def timer(message_id: str, broker: str = "a", topic: str = "t") -> MessageHandle:
    """The handle of a message with a timer at a broker that recalls."""
    text = recall_handle.encode(topic, broker, 1_000, "KEY" + message_id[-1], 5, 2_000).decode()
    return MessageHandle.of_recall_handle(text, message_id)


def level(message_id: str, broker: str = "a") -> MessageHandle:
    return MessageHandle("t", broker, "KEY" + message_id[-1], message_id)


def let_change(broker: FakeBroker, **known: str) -> None:
    """Have a broker know some messages, by the last digit of their ids: `_1="CANCELLED"`."""

    def answer(request: Request) -> Any:
        ids = request.ext["msgId"].split(",")
        results = [{"msgId": each, "result": known.get(f"_{each[-1]}", "NEVER_EXISTED")} for each in ids]
        return success(body=fastjson.dumps({"counts": {}, "messages": results}))

    broker.on(CHANGE, answer)
    broker.on(BY_HANDLE, answer)


def asked(broker: FakeBroker) -> list[dict[str, str]]:
    """The changes that a broker was asked for, in order."""
    return [request.ext for request in broker.requests if request.code in (CHANGE, BY_HANDLE)]


def by_handle(action: str, message_id: str) -> dict[str, str]:
    return {"action": action, "topic": "t", "msgId": message_id, "uniqKey": "KEY" + message_id[-1]}


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Brokers a and b, the first also being the name server."""
    async with FakeBroker("a") as first, FakeBroker("b") as second:
        table = [BrokerData({0: broker.address}, broker.name, "c") for broker in (first, second)]
        first.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": ["a", "b"]})))
        yield first, second


@pytest.fixture(params=[Producer, Admin])
async def changer(pair: Pair, request: pytest.FixtureRequest) -> AsyncIterator[Changer]:
    async with request.param(pair[0].address, _intervals=INTERVALS) as changer:
        yield changer


@pytest.mark.parametrize("timeout", [0, -1, "3", pytest.param(10**400, id="10**400")])
async def test_a_change_takes_the_time_outs_of_a_send(changer: Changer, timeout: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^timeout=.*: give seconds, more than 0$"):
        await changer.cancel(topic="demo", key="k", timeout=timeout)


# --- at duemq brokers


async def test_a_handle_is_changed_at_its_broker_and_nowhere_else(pair: Pair, changer: Changer) -> None:
    first, second = pair
    let_change(second, _1="CANCELLED")
    assert await changer.cancel(timer(X, "b")) == Changes(
        {ChangeResult.CANCELLED: 1}, (ChangedMessage(X, ChangeResult.CANCELLED),)
    )
    assert (asked(first), asked(second)) == ([], [by_handle("cancel", X)])


async def test_handles_texts_and_ids_go_together_and_results_are_in_their_order(pair: Pair, changer: Changer) -> None:
    first, second = pair
    let_change(first, _1="RESCHEDULED", _3="ALREADY_DELIVERED")
    let_change(second, _2="RESCHEDULED")
    changes = await changer.reschedule([Z, str(timer(X)), level(Y, "b"), X], delay="2h")
    assert [(each.offset_message_id, each.result) for each in changes.messages] == [
        (Z, ChangeResult.ALREADY_DELIVERED),
        (X, ChangeResult.RESCHEDULED),
        (Y, ChangeResult.RESCHEDULED),
    ]
    assert changes.done == 2
    with pytest.raises(ValueError, match="3 messages, not one"):
        _ = changes.result
    by_id = {"action": "reschedule", "delayMs": "7200000", "msgId": Z}
    for broker, message_id in ((first, X), (second, Y)):
        of_handle = {**by_handle("reschedule", message_id), "delayMs": "7200000"}
        assert sorted(asked(broker), key=len) == [by_id, of_handle]


async def test_the_broker_of_a_handle_may_have_another_name_now(pair: Pair, changer: Changer) -> None:
    first, second = pair
    let_change(first)
    let_change(second, _1="DELIVERED_NOW")
    assert (await changer.deliver_now(timer(X, "renamed"))).result is ChangeResult.DELIVERED_NOW
    assert [request["action"] for request in asked(first)] == ["deliver"]
    gone = timer("7F00000100002A9F0000000000000042", "gone")
    assert (await changer.cancel(gone)).result is ChangeResult.BROKER_UNKNOWN


async def test_a_selection(pair: Pair, changer: Changer) -> None:
    for broker in pair:
        broker.on(CHANGE, success(body=fastjson.dumps({"counts": {"CANCELLED": 2}, "messages": []})))
    assert (await changer.cancel(topic="t", key="k", begin=5, end=7)).done == 4
    assert asked(pair[1]) == [{"action": "cancel", "topic": "t", "key": "k", "beginMs": "5000", "endMs": "7000"}]


async def test_many_handles_go_in_several_requests_by_their_topics(pair: Pair, changer: Changer) -> None:
    first, _ = pair
    let_change(first, _1="CANCELLED")
    many = [MessageHandle(f"t{number % 2}", "a", f"my, {number}", f"{number:031X}1") for number in range(1200)]
    assert (await changer.cancel(many)).counts == {ChangeResult.CANCELLED: 1200}
    sent = [
        (each["topic"], message_id, key)
        for each in asked(first)
        for message_id, key in zip(each["msgId"].split(","), each["uniqKey"].split("\x01"), strict=True)
    ]
    assert sorted(sent) == sorted((each.topic, each.offset_message_id, each.message_id) for each in many)
    assert [len(each["msgId"].split(",")) for each in asked(first)] == [500, 100, 500, 100]


# --- at RocketMQ's brokers


async def test_rocketmq_cancels_by_the_recall_handle(pair: Pair, changer: Changer) -> None:
    first, second = pair
    let_change(second, _2="ALREADY_CANCELLED")
    first.on(BY_HANDLE, NOT_SUPPORTED)
    first.on(RECALL, success(RecallMessageResponse("KEY1")))
    changes = await changer.cancel([timer(X), timer(Y, "b")])
    assert [each.result for each in changes.messages] == [ChangeResult.CANCELLED, ChangeResult.ALREADY_CANCELLED]
    (request,) = first.requests_of(RECALL)
    group = changer.group if isinstance(changer, Producer) else "duemq-admin"
    assert request.ext == {"topic": "t", "recallHandle": timer(X).recall_handle, "producerGroup": group}
    assert not second.requests_of(RECALL)


@pytest.mark.parametrize(
    ("remark", "result"),
    [
        ("recall failed, timestamp invalid", ChangeResult.NO_LONGER_WAITS),
        ("recall failed, the message is already delivered", ChangeResult.ALREADY_DELIVERED),
        ("recall failed, no such message", ChangeResult.NEVER_EXISTED),
        ("recall failed, topic not match", None),
    ],
)
async def test_what_a_broker_says_of_a_recall(
    pair: Pair, changer: Changer, remark: str, result: ChangeResult | None
) -> None:
    first, _ = pair
    first.on(BY_HANDLE, NOT_SUPPORTED)
    first.on(RECALL, failure(ResponseCode.ILLEGAL_OPERATION, remark))
    if result is None:
        with pytest.raises(IllegalOperationError):
            await changer.cancel(timer(X))
    else:
        assert (await changer.cancel(timer(X))).result is result


async def test_what_rocketmq_cannot_do_is_an_error_that_says_so(pair: Pair, changer: Changer) -> None:
    for broker in pair:
        broker.on(CHANGE, NOT_SUPPORTED)
        broker.on(BY_HANDLE, NOT_SUPPORTED)
        broker.on(RECALL, success(RecallMessageResponse("KEY")))
    for work, what in (
        (changer.cancel(level(X)), "cancel a message without a recall handle"),
        (changer.cancel([timer(X), level(Y)]), "cancel a message without a recall handle"),
        (changer.reschedule(timer(X), delay=5), "reschedule a waiting message"),
        (changer.deliver_now(timer(X)), "deliver now a waiting message"),
        (changer.cancel(X), "cancel by id"),
        (changer.cancel(topic="t", key="k"), "cancel by id, key, topic or time"),
    ):
        with pytest.raises(NotSupportedError, match=f"not a duemq broker, and cannot {what}"):
            await work
    assert not any(broker.requests_of(RECALL) for broker in pair)


# --- wrong calls


async def test_a_message_that_is_not_delayed_has_nothing_to_change(pair: Pair, changer: Changer) -> None:
    with pytest.raises(ArgumentError, match="without a delay has no handle"):
        await changer.cancel(None)
    for wrong in ("duemq1.x", "duemq1r.AAAA." + X, 5, [X, None]):
        with pytest.raises(ArgumentError):
            await changer.cancel(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="not both"):
        await changer.cancel(timer(X), topic="t")
    assert not any(asked(broker) for broker in pair)


@pytest.mark.parametrize(
    "port", ["0001869F", "FFFF2A9F", "00010000", "00000000"], ids=["above", "negative", "first above", "none"]
)
async def test_an_id_of_a_sender_is_none_of_a_broker(pair: Pair, changer: Changer, port: str) -> None:
    """It has as many digits, and whatever it has in the place of the port was taken for one."""
    for message_id in (f"7F000001{port}6B21DDE300010000", f"{'0' * 31}1{port}6B21DDE300010000"):
        works = (
            changer.cancel(message_id),
            changer.reschedule([X, message_id], delay="1h"),
            changer.deliver_now(message_id.lower()),
        )
        for work in works:
            with pytest.raises(
                ArgumentError, match=r"is the id that a sender gave .* --key .* its topic and this id as the key"
            ):
                await work
    assert not any(asked(broker) for broker in pair)


@pytest.mark.parametrize("kind", [Producer, Admin])
async def test_only_an_open_client_changes(pair: Pair, kind: type[Changer]) -> None:
    client = kind(pair[0].address, _intervals=INTERVALS)
    with pytest.raises(ClosedError):
        await client.cancel(X)


async def test_a_failure_at_one_broker_is_not_passed_over(pair: Pair, changer: Changer) -> None:
    first, second = pair
    first.on(BY_HANDLE, failure(ResponseCode.SYSTEM_BUSY, "searches wait already"))
    let_change(second, _2="CANCELLED")
    with pytest.raises(BrokerError, match="searches wait"):
        await changer.cancel([timer(X), timer(Y, "b")])


# --- handles

NAMES = st.text("abcXYZ019%_-|", min_size=1, max_size=20)
IDS = st.from_regex(r"[0-9A-F]{32}([0-9A-F]{24})?", fullmatch=True)


@given(NAMES, st.text(min_size=1).filter(lambda text: text.isprintable()), NAMES, IDS)
def test_a_handle_survives_a_database(topic: str, broker: str, message_id: str, offset_message_id: str) -> None:
    handle = MessageHandle(topic, broker, message_id, offset_message_id)
    assert MessageHandle.parse(json.loads(json.dumps(str(handle)))) == handle
    assert str(handle).replace(".", "").replace("-", "").replace("_", "").isalnum()
    assert pickle.loads(pickle.dumps(handle)) == handle


@given(NAMES, NAMES, NAMES, IDS, st.integers(0, 2**40))
def test_a_recall_handle_survives_as_the_broker_gave_it(
    topic: str, broker: str, key: str, offset_message_id: str, time_ms: int
) -> None:
    given_by_broker = recall_handle.encode(topic, broker, time_ms, key, 7, time_ms).decode()
    handle = MessageHandle.of_recall_handle(given_by_broker, offset_message_id)
    found = MessageHandle.parse(str(handle))
    assert (found, found.recall_handle) == (handle, given_by_broker)
    assert (found.topic, found.broker, found.message_id) == (topic, broker, key)


@pytest.mark.parametrize(
    "text", ["", "duemq1", X, "duemq1." + X, f"duemq1.YQ.{X}", f"duemq1.é.{X}", f"duemq2.YSBiIGM.{X}", f"duemq1._w.{X}"]
)
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a message handle"):
        MessageHandle.parse(text)
