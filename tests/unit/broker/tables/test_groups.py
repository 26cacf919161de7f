"""Consumer groups: whether they are made on first sight, and their permissions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duemq.broker.tables.groups import is_group_name
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import ConsumerSendMsgBack, Group
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.wire import pull, request, send


async def test_a_group_is_made_by_its_first_pull(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T"))
    assert "fresh" not in broker.groups.table
    assert (await peer.ask(pull("T", group="fresh"))).code == 0
    assert broker.groups.table["fresh"].retry_max_times == 16


async def test_without_auto_creation_a_group_has_to_be_made(tmp_path: Path) -> None:
    async with running(tmp_path, "autoCreateSubscriptionGroup=false") as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        back = request(RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBack(0, "fresh", 0))
        for command in (pull("T", group="fresh"), send("%RETRY%fresh"), back, request(352, Group("fresh"))):
            assert (await peer.ask(command)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        assert "fresh" not in broker.groups.table
        body = b'{"groupName":"fresh","retryMaxTimes":3}'
        assert (await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body))).code == 0
        assert (await peer.ask(pull("T", group="fresh"))).code == 0
        answer = await peer.ask(request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, Group("fresh")))
        assert json.loads(bytes(answer.body))["retryMaxTimes"] == 3


async def test_a_group_that_may_not_consume_gets_nothing(peer: Peer) -> None:
    await peer.ask(send("T"))
    body = b'{"groupName":"g","consumeEnable":false}'
    await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body))
    assert (await peer.ask(pull("T", group="g"))).code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize("name", ["", " ", "a b", "g@x", "x" * 256, "ü", "a\n"])
async def test_no_group_is_made_of_a_name_that_cannot_be(broker: UnboundBroker, peer: Peer, name: str) -> None:
    """No group is made for an invalid name: each would be kept for ever, and written to the disk."""
    assert not is_group_name(name)
    await peer.ask(send("T"))
    assert (await peer.ask(pull("T", group=name))).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert name not in broker.groups.table


async def test_groups_and_what_a_newer_rocketmq_says_of_them_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "config" / "subscriptionGroup.json"
    path.parent.mkdir()
    path.write_text(
        '{"dataVersion":{"counter":1,"timestamp":5},"forbiddenTable":{},'
        '"subscriptionGroupTable":{"g":{"groupName":"g","retryMaxTimes":2,"attributes":{}}}}'
    )
    async with running(tmp_path) as broker:
        await broker.connect().ask(pull("TBW102", group="h"))
    async with running(tmp_path) as broker:
        assert broker.groups.table["g"].retry_max_times == 2
        assert "h" in broker.groups.table
    table = json.loads(path.read_text())
    assert table["forbiddenTable"] == {}
    assert table["subscriptionGroupTable"]["g"]["attributes"] == {}


async def test_attributes_that_do_not_exist_are_refused(broker: UnboundBroker, peer: Peer) -> None:
    body = b'{"groupName":"g","attributes":{"+priority.factor":"50"}}'
    answer = await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body))
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "unsupported key: priority.factor")
    assert "g" not in broker.groups.table
