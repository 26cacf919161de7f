"""What a type checker makes of a user's code: `assert_type` is checked by `make type`, strictly, and the code runs."""

from __future__ import annotations

from typing import assert_type

from duemq import (
    Admin,
    ChangeResult,
    Changes,
    Message,
    MessageHandle,
    PendingMessage,
    Producer,
    Retries,
    SendManyError,
    SendOutcome,
    SendResult,
    sync,
)
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, success


async def test_a_users_code(broker: FakeBroker) -> None:
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    told = {"counts": {"CANCELLED": 1}, "messages": [{"msgId": "0" * 32, "result": "CANCELLED"}]}
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.CHANGE_BY_HANDLE, success(body=fastjson.dumps(told)))
    broker.on(RequestCode.LIST_PENDING, success(body=fastjson.dumps({"messages": [], "cursor": None, "counted": 0})))
    async with (
        Producer(broker.address, retries=Retries(times=1), _intervals=INTERVALS) as producer,
        Admin(broker.address, _intervals=INTERVALS) as admin,
    ):
        result = assert_type(await producer.send("demo", b"x", level=2, keys=["k"]), SendResult)
        assert_type(await producer.send(Message("demo", "x")), SendResult)
        assert_type(await producer.send_oneway("demo", "x"), str)
        assert_type(await producer.send_many([Message("demo", "x")]), list[SendResult])
        async for outcome in producer.send_each(Message("demo", "x") for _ in range(1)):
            assert_type(outcome, SendOutcome)
        assert_type(result.handle, MessageHandle | None)
        assert result.handle is not None
        for changer in (producer, admin):
            changes = assert_type(await changer.cancel(result.handle), Changes)
            assert_type(changes.result, ChangeResult)
            assert_type(await changer.reschedule(str(result.handle), delay="1h"), Changes)
        async for waiting in admin.pending("demo"):
            assert_type(waiting, PendingMessage)


def of_the_facade(producer: sync.Producer, admin: sync.Admin, error: SendManyError) -> None:
    """Not run: the types of the methods that wait."""
    assert_type(producer.send("demo", b"x", delay=5), SendResult)
    assert_type(producer.send(Message("demo", b"x")), SendResult)
    assert_type(producer.send_many([]), list[SendResult])
    assert_type(producer.cancel("0" * 32), Changes)
    assert_type(admin.reschedule(topic="demo", key="k", delay=5), Changes)
    assert_type(error.stored, tuple[SendResult, ...])
    assert_type(error.refused, tuple[SendOutcome, ...])
