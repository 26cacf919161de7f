"""The admin against two brokers in memory: the requests to each, and the results made from their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from duemq import (
    Admin,
    ArgumentError,
    BrokerError,
    ChangedMessage,
    ChangeResult,
    Changes,
    ClosedError,
    ConnectError,
    DueCurve,
    PeerError,
    PendingMessage,
    Recurrence,
    RecurringMessage,
    RequestTimeoutError,
)
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import NOW_MS, FakeBroker, Request, failure, success

LIST, CURVE, CHANGE = RequestCode.LIST_PENDING, RequestCode.DUE_CURVE, RequestCode.CHANGE_PENDING
CODES = [LIST, CURVE, CHANGE]
NOT_SUPPORTED = failure(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type not supported")
A, B, C = "7F00000100002A9F000000000000000A", "7F00000100002A9F000000000000000b", "0" * 36 + "2A9F000000000000000C"
Pair = tuple[FakeBroker, FakeBroker, Admin]


def make_admin(broker: FakeBroker, **options: Any) -> Admin:
    return Admin(broker.address, _intervals=INTERVALS, **options)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Two empty brokers, the first also being the name server; and an admin. The pair is in the order in which the
    admin asks, by address."""
    async with FakeBroker("a") as name_server, FakeBroker("b") as other:
        pair = sorted((name_server, other), key=lambda broker: broker.address)
        table = [BrokerData({0: broker.address}, broker.name, "c") for broker in pair]
        name_server.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": ["a", "b"]})))
        async with make_admin(name_server) as admin:
            yield pair[0], pair[1], admin


def described(message_id: str, **other: Any) -> dict[str, Any]:
    usual = {
        "msgId": message_id,
        "uniqueKey": None,
        "topic": "orders",
        "queueId": 3,
        "deliverMs": NOW_MS,
        "delayLevel": 0,
        "keys": None,
        "tags": None,
        "bodySize": 5,
        "bornMs": NOW_MS - 2,
        "storeMs": NOW_MS - 1,
    }
    return {**usual, **other}


def page(*ids: str, cursor: str | None = None, counted: int = 0) -> Any:
    body = {"messages": [described(each) for each in ids], "cursor": cursor, "counted": counted or len(ids)}
    return success(body=fastjson.dumps(body))


def changed(*messages: tuple[str, ...], **counts: int) -> Any:
    told = [dict(zip(("msgId", "result"), message, strict=True)) for message in messages]
    return success(body=fastjson.dumps({"counts": counts, "messages": told}))


async def ids(admin: Admin, **selection: Any) -> list[str]:
    return [message.offset_message_id async for message in admin.pending(**selection)]


# --- listing


async def test_messages_come_page_by_page_and_broker_by_broker(pair: Pair) -> None:
    first, second, admin = pair
    first.on(LIST, page("1", "2", cursor="x"), page("3", cursor="y"), page())
    second.on(LIST, page("4"))
    assert await ids(admin) == ["1", "2", "3", "4"]
    assert [request.ext for request in first.requests_of(LIST)] == [
        {"limit": "1000", "countOnly": "false", **cursor} for cursor in ({}, {"cursor": "x"}, {"cursor": "y"})
    ]
    assert ["cursor" in request.ext for request in second.requests_of(LIST)] == [False]


async def test_what_an_admin_sees_of_a_message(pair: Pair) -> None:
    first, second, admin = pair
    all_there_is = described("1", uniqueKey="U", delayLevel=4, keys="a b", tags="t")
    first.on(LIST, success(body=fastjson.dumps({"messages": [all_there_is], "cursor": None, "counted": 1})))
    second.on(LIST, page("2"))
    assert [message async for message in admin.pending()] == [
        PendingMessage(
            "U", "1", first.address, "orders", 3, NOW_MS, 4, ("a", "b"), "t", 5, NOW_MS - 2, NOW_MS - 1
        ),
        PendingMessage("2", "2", second.address, "orders", 3, NOW_MS, None, (), None, 5, NOW_MS - 2, NOW_MS - 1),
    ]  # fmt: skip


async def test_what_an_admin_sees_of_a_message_that_recurs(pair: Pair) -> None:
    first, second, admin = pair
    recurs = described("1", keys="beat", recurrence={"everyMs": 90_000, "count": 7})
    first.on(LIST, success(body=fastjson.dumps({"messages": [recurs], "cursor": None, "counted": 1})))
    second.on(LIST, page())
    (message,) = [message async for message in admin.recurring("orders")]
    assert message == RecurringMessage(
        "1", "1", first.address, "orders", 3, NOW_MS, None, ("beat",), None, 5, NOW_MS - 2, NOW_MS - 1,
        Recurrence(90_000, None, "", None, None, 7, False),
    )  # fmt: skip
    assert [each.ext["recurring"] for each in first.requests_of(LIST)] == ["true"]
    second.on(LIST, page("2"))
    with pytest.raises(PeerError, match="which it is not"):
        [message async for message in admin.recurring("orders")]


SELECTION: dict[str, Any] = {
    "topic": "orders",
    "key": "k",
    "begin": datetime.fromtimestamp(NOW_MS / 1000, UTC),
    "end": NOW_MS / 1000 + 5,
}
FIELDS = {"topic": "orders", "key": "k", "beginMs": str(NOW_MS), "endMs": str(NOW_MS + 5000)}


async def test_a_selection_goes_to_the_brokers(pair: Pair) -> None:
    first, second, admin = pair
    for broker in first, second:
        broker.on(LIST, page())
        broker.on(CHANGE, changed())
    await ids(admin, **SELECTION)
    await admin.count(**SELECTION)
    await admin.cancel(**SELECTION)
    await admin.deliver_now(**SELECTION)
    await admin.reschedule(**SELECTION, deliver_at=NOW_MS / 1000 + 9)
    await admin.reschedule(**SELECTION, delay="9s")
    for broker in first, second:
        assert [request.ext for request in broker.requests_of(LIST)] == [
            {**FIELDS, "limit": "1000", "countOnly": "false"},
            {**FIELDS, "limit": "100", "countOnly": "true"},
        ]
        assert [request.ext for request in broker.requests_of(CHANGE)] == [
            {**FIELDS, "action": "cancel"},
            {**FIELDS, "action": "deliver"},
            {**FIELDS, "action": "reschedule", "deliverMs": str(NOW_MS + 9000)},
            {**FIELDS, "action": "reschedule", "delayMs": "9000"},
        ]


@pytest.mark.parametrize("times", [{}, {"deliver_at": 5, "delay": 5}])
async def test_a_new_time_is_a_time_or_a_delay(pair: Pair, times: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="one of delay and deliver_at"):
        await pair[2].reschedule([A], **times)


async def test_counts_and_curves_are_those_of_all_brokers_together(pair: Pair) -> None:
    first, second, admin = pair
    first.on(LIST, page(counted=3))
    second.on(LIST, page(counted=4))
    assert await admin.count() == 7

    def curve(*counts: int) -> Any:
        return success(body=fastjson.dumps({"beginMs": NOW_MS, "stepMs": 1, "counts": counts}))

    first.on(CURVE, curve(1, 0, 2))
    second.on(CURVE, curve(0, 5, 1))
    assert await admin.due_curve(step="10s", steps=3) == DueCurve(NOW_MS, 10_000, (1, 5, 3))
    await admin.due_curve("orders", begin=5, step=1, steps=3)
    now = {"stepMs": "10000", "steps": "3"}
    both = [{**now, "beginMs": str(NOW_MS)}, {"stepMs": "1000", "steps": "3", "topic": "orders", "beginMs": "5000"}]
    assert [request.ext for request in first.requests_of(CURVE)] == [now, *both], "by its clock, not by this machine's"
    assert [request.ext for request in second.requests_of(CURVE)] == both
    second.on(CURVE, curve(1))
    with pytest.raises(PeerError, match="1 steps"):
        await admin.due_curve(step=1, steps=3)


# --- changing


async def test_messages_are_changed_wherever_they_are(pair: Pair) -> None:
    first, second, admin = pair
    nowhere = "NEVER_EXISTED"
    first.on(CHANGE, changed((B, nowhere), (A, "RESCHEDULED"), (C, nowhere)))
    second.on(CHANGE, changed((B, "ALREADY_DELIVERED"), (A, nowhere), (C, nowhere)))
    assert await admin.reschedule([B, A, C, A], deliver_at=5) == Changes(
        {ChangeResult.ALREADY_DELIVERED: 1, ChangeResult.RESCHEDULED: 1, ChangeResult.BROKER_UNKNOWN: 1},
        (
            ChangedMessage(B, ChangeResult.ALREADY_DELIVERED),
            ChangedMessage(A, ChangeResult.RESCHEDULED),
            ChangedMessage(C, ChangeResult.BROKER_UNKNOWN),
        ),
    )
    assert [request.ext for request in first.requests_of(CHANGE)] == [
        {"action": "reschedule", "deliverMs": "5000", "msgId": f"{B},{A},{C}"}
    ]
    assert await admin.cancel([]) == Changes({}, ())


async def test_many_ids_go_in_several_requests(pair: Pair) -> None:
    first, second, admin = pair
    many = [f"7F00000100002A9F{number:016X}" for number in range(2001)]

    def answer(request: Request) -> Any:
        return changed(*((each, "CANCELLED") for each in request.ext["msgId"].split(",")))

    for broker in first, second:
        broker.on(CHANGE, answer)
    assert (await admin.cancel(many)).counts == {ChangeResult.CANCELLED: 2001}
    assert [len(each.ext["msgId"].split(",")) for each in second.requests_of(CHANGE)] == [1000, 1000, 1]


async def test_what_became_of_a_selection_is_added_up(pair: Pair) -> None:
    first, second, admin = pair
    first.on(CHANGE, changed((A, "CANCELLED"), CANCELLED=1, ALREADY_DELIVERED=2))
    second.on(CHANGE, changed((B, "CANCELLED"), CANCELLED=1))
    assert await admin.cancel(topic="orders", key="k") == Changes(
        {ChangeResult.CANCELLED: 2, ChangeResult.ALREADY_DELIVERED: 2},
        (ChangedMessage(A, ChangeResult.CANCELLED), ChangedMessage(B, ChangeResult.CANCELLED)),
    )


# --- brokers of other kinds, and failures


@pytest.mark.parametrize("theirs", [0, 1])
async def test_apaches_brokers_have_none_of_it(pair: Pair, theirs: int) -> None:
    brokers, admin = pair[:2], pair[2]
    for code in CODES:
        brokers[theirs].on(code, NOT_SUPPORTED)
    ours = brokers[1 - theirs]
    ours.on(LIST, page("1"))
    ours.on(CURVE, success(body=b'{"beginMs":1,"stepMs":1,"counts":[1]}'))
    ours.on(CHANGE, changed((A, "CANCELLED"), CANCELLED=1))
    assert await ids(admin) == ["1"]
    assert await admin.count() == 1
    assert (await admin.due_curve(steps=1)).counts == (1,)
    assert (await admin.cancel(topic="t", key="k")).counts == {ChangeResult.CANCELLED: 1}
    assert (await admin.cancel([A, B])).counts == {ChangeResult.CANCELLED: 1, ChangeResult.BROKER_UNKNOWN: 1}


async def test_without_a_broker_of_ours_nothing_is_possible(pair: Pair) -> None:
    first, second, admin = pair
    for code in CODES:
        first.on(code, NOT_SUPPORTED)
        second.on(code, NOT_SUPPORTED)
    for work in (ids(admin), admin.count(), admin.due_curve(), admin.cancel([A]), admin.cancel(topic="t", key="k")):
        with pytest.raises(BrokerError, match="does not support"):
            await work


@pytest.mark.parametrize("broken", [0, 1])
async def test_a_broker_that_fails_is_not_passed_over(pair: Pair, broken: int) -> None:
    brokers, admin = pair[:2], pair[2]
    other = brokers[1 - broken]
    for code in CODES:
        brokers[broken].on(code, failure(ResponseCode.SYSTEM_BUSY, "searches wait already"))
    other.on(LIST, page("1"))
    other.on(CURVE, success(body=b'{"beginMs":1,"stepMs":1,"counts":[1]}'))
    other.on(CHANGE, changed((A, "CANCELLED"), CANCELLED=1))
    for work in (ids(admin), admin.count(), admin.due_curve(steps=1), admin.cancel(topic="t", key="k")):
        with pytest.raises(BrokerError, match="searches wait"):
            await work
    assert (await admin.cancel([A])).counts == {ChangeResult.CANCELLED: 1}
    with pytest.raises(BrokerError, match="searches wait"):
        await admin.cancel([A, B])


async def test_a_broker_that_does_not_answer(pair: Pair) -> None:
    first, second, _ = pair
    name_server = next(broker for broker in (first, second) if broker.name == "a")
    first.on(LIST, None)
    second.on(LIST, page())
    async with make_admin(name_server, timeout=0.5) as admin:
        with pytest.raises(RequestTimeoutError):
            await admin.count()


@pytest.mark.parametrize("cursor", ["x", "y"])
async def test_a_list_without_an_end_is_the_brokers_fault(pair: Pair, cursor: str) -> None:
    first, _, admin = pair
    first.on(LIST, page("1", cursor="x"), page(*["1"] if cursor == "x" else [], cursor=cursor))
    with pytest.raises(PeerError, match="does not advance"):
        await ids(admin)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"counts":{"X":1},"messages":[]}'])
async def test_an_answer_that_makes_no_sense_is_the_brokers_fault(pair: Pair, body: bytes) -> None:
    first, second, admin = pair
    for broker in first, second:
        for code in CODES:
            broker.on(code, success(body=body))
    works = [ids(admin), admin.count(), admin.due_curve()] if not body else []
    for work in [*works, admin.cancel([A]), admin.cancel(topic="t", key="k")]:
        with pytest.raises(PeerError):
            await work


# --- wrong calls


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "give message ids"),
        ({"topic": "t"}, "give message ids"),
        ({"key": "k"}, "give message ids"),
        ({"which": [A], "topic": "t"}, "not both"),
        ({"which": [A], "key": "k"}, "not both"),
        ({"which": [], "end": 5}, "not both"),
        ({"which": [A, "x"]}, "not an offset message id"),
        ({"topic": "de mo", "key": "k"}, "characters other than"),
        ({"topic": "t", "key": ""}, "a key"),
        ({"topic": "t", "begin": datetime(2030, 1, 1)}, "time zone"),
    ],
)
async def test_what_selects_nothing_sensible_is_not_sent(pair: Pair, arguments: dict[str, Any], complaint: str) -> None:
    first, _, admin = pair
    for work in (
        admin.cancel(**arguments),
        admin.deliver_now(**arguments),
        admin.reschedule(**arguments, deliver_at=5),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            await work
    assert first.requests_of(CHANGE) == []


@pytest.mark.parametrize("arguments", [{"step": 0.5}, {"steps": 0}, {"steps": 10_001}, {"step": "soon"}])
async def test_a_curve_has_steps(pair: Pair, arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        await pair[2].due_curve(**arguments)


async def test_an_admin_is_open_within_its_block_only(broker: FakeBroker) -> None:
    admin = make_admin(broker)
    for work in (ids(admin), admin.count(), admin.cancel([A])):
        with pytest.raises(ClosedError):
            await work
    async with admin:
        pass
    with pytest.raises(ClosedError):
        await admin.count()


async def test_the_heartbeat_that_comes_first_takes_no_longer_than_the_request_may() -> None:
    async with FakeBroker("a") as broker:
        table = [BrokerData({0: broker.address}, broker.name, "c")]
        broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": ["a"]})))
        broker.on(RequestCode.HEART_BEAT, None)
        async with make_admin(broker, timeout=0.05) as admin:
            with pytest.raises(RequestTimeoutError) as caught:
                await admin.count()
    assert (caught.value.request, caught.value.timeout) == ("HEART_BEAT", 0.05)


async def test_no_name_server() -> None:
    async with FakeBroker() as broker:
        gone = broker.address
    with pytest.raises(ConnectError):
        async with Admin(gone, _intervals=INTERVALS):
            pass


async def test_an_admin_belongs_to_its_event_loop(broker: FakeBroker) -> None:
    """In another one, its calls ended only at their time-out."""
    async with Admin(broker.address, _intervals=INTERVALS) as admin:
        for call in (admin.count, admin.close):
            with pytest.raises(ArgumentError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, call())
