"""REPORT_BRIDGE: the figures of MQTT bridges in brokerStatus."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duemq.broker.admin.bridges import MAX_BRIDGES, MAX_FIGURES
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, JSON
from duemq.protocol.requests.headers import ReportBridge
from tests.support.broker import Peer, UnboundBroker
from tests.support.wire import request


def report(name: str, figures: Any) -> Command:
    body = figures if isinstance(figures, bytes) else json.dumps(figures).encode()
    return request(RequestCode.REPORT_BRIDGE, ReportBridge(name), body)


async def shown(peer: Peer) -> dict[str, str]:
    """Return the figures of bridges in the status."""
    answer = await peer.ask(request(RequestCode.GET_BROKER_RUNTIME_INFO))
    table = json.loads(bytes(answer.body))["table"]
    return {name: value for name, value in table.items() if name.startswith("mqttBridge.")}


@pytest.mark.parametrize("codec", [JSON, BINARY])
async def test_the_newest_figures_of_each_bridge_are_shown(broker: UnboundBroker, peer: Peer, codec: int) -> None:
    other = broker.connect()
    assert await shown(peer) == {}
    for number in (1, 2):
        answer = await peer.ask(report("site-1", {"received": number, "lateMs": -5}), codec)
        assert answer.code == ResponseCode.SUCCESS
    await other.ask(report("site-2", {"received": 7}), codec)
    assert await shown(peer) == {
        "mqttBridge.site-1.received": "2",
        "mqttBridge.site-1.lateMs": "-5",
        "mqttBridge.site-2.received": "7",
    }


async def test_the_figures_of_a_lost_connection_are_dropped(broker: UnboundBroker, peer: Peer) -> None:
    other = broker.connect()
    await other.ask(report("b", {"received": 1}))
    other.connection.connection_lost(None)
    assert await shown(peer) == {}


@pytest.mark.parametrize(
    ("name", "figures", "why"),
    [
        ("", {}, "the bridge's name"),
        ("a b", {}, "the bridge's name"),
        ("a" * 65, {}, "the bridge's name"),
        ("a\n", {}, "the bridge's name"),
        ("b", b"", "not a JSON object"),
        ("b", b"\xff", "not a JSON object"),
        ("b", [1], "not a JSON object"),
        ("b", {"a": "1"}, "not a JSON object"),
        ("b", {"a": 1.5}, "not a JSON object"),
        ("b", {"a.b": 1}, "figures are accepted"),
        ("b", {f"f{number}": 1 for number in range(MAX_FIGURES + 1)}, "figures are accepted"),
        ("b", {"a": 2**63}, "more than 64 bits"),
        ("b", {"a": -(2**63) - 1}, "more than 64 bits"),
    ],
)
async def test_what_is_no_report_is_refused(peer: Peer, name: str, figures: Any, why: str) -> None:
    answer = await peer.ask(report(name, figures))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert why in (answer.remark or "")
    assert await shown(peer) == {}


async def test_a_limited_number_of_bridges_report(broker: UnboundBroker) -> None:
    peers = [broker.connect() for _ in range(MAX_BRIDGES)]
    for number, peer in enumerate(peers):
        assert (await peer.ask(report(f"b{number}", {"a": number}))).code == ResponseCode.SUCCESS
    late = broker.connect()
    assert (await late.ask(report("late", {"a": 1}))).code == ResponseCode.SYSTEM_BUSY
    assert (await peers[0].ask(report("b0", {"a": 9}))).code == ResponseCode.SUCCESS
    peers[1].connection.connection_lost(None)
    assert (await late.ask(report("late", {"a": 1}))).code == ResponseCode.SUCCESS
