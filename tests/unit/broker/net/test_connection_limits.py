"""Limits on connections and on their requests, and what brokerStatus says of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from duemq.broker.limits import PROPERTIES
from duemq.protocol.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, join_frame
from duemq.protocol.requests.headers import GetRouteInfo
from tests.support.access import ADMIN, USER, signed, write_accounts
from tests.support.auth import ON, MemoryStore
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.tls import TlsPeer, write_certificates
from tests.support.wire import request, send

UNKNOWN = 4711


async def figures(peer: Peer, account: tuple[str, str] | None = None) -> dict[str, str]:
    """Return brokerStatus."""
    answer = await peer.ask(signed(request(RequestCode.GET_BROKER_RUNTIME_INFO), account))
    table: dict[str, str] = fastjson.loads(bytes(answer.body))["table"]
    return table


def are_open(peers: Iterable[Peer]) -> list[bool]:
    return [not peer.transport.is_closing() for peer in peers]


# --- how many


async def test_connections_in_all_are_limited(tmp_path: Path, logged: Any) -> None:
    async with running(tmp_path, "maxConnections=3") as broker:
        peers = [broker.connect((f"10.0.0.{n}", 1)) for n in range(5)]
        assert are_open(peers) == [True] * 3 + [False] * 2
        assert (await peers[0].ask(send("T"))).code == 0
        await turns()
        peers[1].transport.abort()
        await turns()
        assert not broker.connect().transport.is_closing(), "one has left"
        told = [line["reason"] for line in logged if line["event"] == "connection_refused"]
        assert told == ["there are maxConnections=3 connections"] * 2
        table = await figures(peers[0])
        assert (table["limitReached_maxConnections"], table["connectionsRefused"]) == ("2", "2")
        assert table["connections"] == "3"


async def test_connections_of_an_address_are_limited(tmp_path: Path) -> None:
    async with running(tmp_path, "maxConnectionsPerAddress=2") as broker:
        greedy = [broker.connect(("10.0.0.1", n)) for n in range(1, 5)]
        others = [broker.connect((f"10.0.1.{n}", 1)) for n in range(3)]
        assert are_open(greedy) == [True, True, False, False]
        assert are_open(others) == [True] * 3
        await turns()
        greedy[0].transport.abort()
        await turns()
        assert not broker.connect(("10.0.0.1", 9)).transport.is_closing()
        assert (await figures(others[0]))["limitReached_maxConnectionsPerAddress"] == "2"
    assert broker.running.net.limits._by_host.total() <= 7


async def test_the_account_of_addresses_forgets_those_that_left(broker: UnboundBroker) -> None:
    peers = [broker.connect((f"10.0.0.{n}", 1)) for n in range(100)]
    for peer in peers:
        peer.transport.abort()
    await turns()
    limits = broker.running.net.limits
    assert (dict(limits._by_host), limits._count, limits.new, len(limits._of_connection)) == ({}, 0, 0, 0)


async def test_connections_without_a_request_are_limited(tmp_path: Path) -> None:
    async with running(tmp_path, "maxNewConnections=2") as broker:
        first, second, third = (broker.connect() for _ in range(3))
        assert are_open([first, second, third]) == [True, True, False]
        assert (await first.ask(send("T"))).code == 0
        assert not broker.connect().transport.is_closing(), "one is not new any more"
        assert broker.connect().transport.is_closing()
        assert (await figures(first))["limitReached_maxNewConnections"] == "2"


# --- how long without a request


async def test_a_connection_that_only_connects_is_closed(tmp_path: Path, loop: SteppedLoop, logged: Any) -> None:
    async with running(tmp_path, "maxNewConnectionSeconds=10") as broker:
        talks, silent, begins = (broker.connect(("10.0.0.1", n)) for n in range(1, 4))
        assert (await talks.ask(send("T"))).code == 0
        frame = join_frame(JSON, b"{}", bytes(100))
        for second in range(12):
            loop.advance(1)
            await turns()
            if not begins.transport.is_closing():
                begins.feed(frame[second : second + 1])  # it does not become whole
        assert are_open([talks, silent, begins]) == [True, False, False]
        assert (await figures(talks))["limitReached_maxNewConnectionSeconds"] == "2"
        (told,) = [line for line in logged if line["event"] == "connections_without_request_closed"]
        assert (told["peers"], told["count"]) == (["10.0.0.1:2", "10.0.0.1:3"], 2)


async def test_a_handshake_that_does_not_end_is_closed(tmp_path: Path, loop: SteppedLoop) -> None:
    certificates = write_certificates(tmp_path / "certificates")
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        stuck = TlsPeer(broker.running.net.accept(), certificates.client_context())
        stuck._deliver = lambda data: None  # type: ignore[method-assign]
        begun = broker.connect()
        begun.feed(b"\x16\x03\x01\x02\x00\x01")
        done = TlsPeer(broker.running.net.accept(), certificates.client_context())
        assert await done.handshake()
        assert (await done.ask(send("T"))).code == 0
        for _ in range(32):
            loop.advance(1)
            await turns()
        assert are_open([stuck, begun, done]) == [False, False, True]


async def test_with_access_control_only_an_account_makes_a_connection_old(tmp_path: Path, loop: SteppedLoop) -> None:
    write_accounts(tmp_path)
    async with running(tmp_path / "store", "aclEnable=true", f"rocketmqHome={tmp_path}") as broker:
        known, stranger, prober, router = (broker.connect(("10.0.0.1", n)) for n in range(1, 5))
        for _ in range(31):
            assert (await known.ask(signed(send("topicB"), USER))).code == 0
            if not stranger.transport.is_closing():
                assert (await stranger.ask(send("topicB"))).code == ResponseCode.SYSTEM_ERROR
                assert (await prober.ask(request(UNKNOWN))).code == ResponseCode.SYSTEM_ERROR
                prober.post(Command(code=0, opaque=1, flag=FLAG_RESPONSE))
            # Whoever may ask for routes without an account is a client of the name server.
            assert (await router.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo("topicB")))).code == 0
            loop.advance(1)
            await turns()
        assert are_open([known, stranger, prober, router]) == [True, False, False, True]
        assert (await figures(known, ADMIN))["limitReached_maxNewConnectionSeconds"] == "2"


async def test_without_access_control_a_request_that_nobody_knows_does_not_count(
    tmp_path: Path, loop: SteppedLoop
) -> None:
    async with running(tmp_path) as broker:
        prober = broker.connect()
        for _ in range(32):
            if not prober.transport.is_closing():
                assert (await prober.ask(request(UNKNOWN))).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            loop.advance(1)
            await turns()
        assert prober.transport.is_closing()


# --- how many requests


async def test_requests_of_a_connection_in_a_second_are_limited(tmp_path: Path, loop: SteppedLoop, logged: Any) -> None:
    async with running(tmp_path, "maxRequestsPerSecond=10") as broker:
        greedy, modest = broker.connect(), broker.connect()
        answers = await greedy.ask_all([send("T") for _ in range(25)])
        assert [answer.code for answer in answers] == [0] * 10 + [ResponseCode.SYSTEM_BUSY] * 15
        assert "maxRequestsPerSecond=10" in (answers[-1].remark or "")
        assert (await modest.ask(send("T"))).code == 0, "each connection has its own"
        loop.advance(0.5)
        answers = await greedy.ask_all([send("T") for _ in range(10)])
        assert [answer.code for answer in answers] == [0] * 5 + [ResponseCode.SYSTEM_BUSY] * 5
        loop.advance(60)
        answers = await greedy.ask_all([send("T") for _ in range(12)])
        assert [answer.code for answer in answers].count(0) == 10, "a pause is not saved up"
        assert (await figures(modest))["limitReached_maxRequestsPerSecond"] == "22"
        assert "request_refused" in [line["event"] for line in logged]


async def test_one_way_requests_beyond_the_limit_are_not_handled_and_not_answered(tmp_path: Path) -> None:
    async with running(tmp_path, "maxRequestsPerSecond=5") as broker:
        assert (await broker.connect().ask(send("T"))).code == 0
        peer = broker.connect()
        peer.post(*(send("T", oneway=True) for _ in range(9)))
        assert peer.responses == []
        assert broker.store.appender.appended == 1 + 5
        assert (await figures(broker.connect()))["limitReached_maxRequestsPerSecond"] == "4"


async def test_requests_that_wait_for_their_turn_count_once(tmp_path: Path) -> None:
    """A client that does not read is not handled further; what waits is counted when it is handled."""
    async with running(tmp_path, "maxRequestsPerSecond=100") as broker:
        peer = broker.connect()
        peer.transport.block()
        asked = [request(RequestCode.GET_BROKER_CONFIG) for _ in range(100)]
        peer.post(*asked)
        assert peer.transport.most_held > 256 * 1024
        peer.transport.unblock()
        for _ in range(20):
            await turns()
        assert [answer.code for answer in peer.responses] == [0] * 100


async def test_requests_of_an_account_in_a_second_are_limited_over_all_its_connections(
    tmp_path: Path, loop: SteppedLoop, logged: Any
) -> None:
    write_accounts(tmp_path)
    acl = ("aclEnable=true", f"rocketmqHome={tmp_path}")
    async with running(tmp_path / "store", *acl, "maxRequestsPerSecondPerAccount=10") as broker:
        greedy = [broker.connect((f"10.0.0.{n}", 1)) for n in (1, 2)]
        answers = await greedy[0].ask_all([signed(send("topicB"), USER) for _ in range(7)])
        answers += await greedy[1].ask_all([signed(send("topicB"), USER) for _ in range(5)])
        assert [answer.code for answer in answers] == [0] * 10 + [ResponseCode.SYSTEM_BUSY] * 2
        assert "maxRequestsPerSecondPerAccount=10" in (answers[-1].remark or "")
        assert broker.store.appender.appended == 10
        refused = await greedy[0].ask(signed(request(RequestCode.GET_BROKER_CONFIG), USER))
        assert refused.code == ResponseCode.SYSTEM_BUSY, "whatever it asks for"
        wrong = await greedy[0].ask(signed(send("topicB"), (USER[0], "wrong")))
        assert "signature" in (wrong.remark or ""), "others cannot use up what an account may ask for"
        assert (await greedy[0].ask(signed(send("T"), ADMIN))).code == 0, "another account, over the same connection"
        loop.advance(0.5)
        answers = await greedy[1].ask_all([signed(send("topicB"), USER) for _ in range(6)])
        assert [answer.code for answer in answers] == [0] * 5 + [ResponseCode.SYSTEM_BUSY]
        assert (await figures(greedy[0], ADMIN))["limitReached_maxRequestsPerSecondPerAccount"] == "4"
        told = {line["reason"] for line in logged if line["event"] == "request_refused"}
        assert told == {f"{USER[0]} has made maxRequestsPerSecondPerAccount=10 requests"}


async def test_requests_of_strangers_at_an_address_are_limited(tmp_path: Path, loop: SteppedLoop) -> None:
    """Strangers are connections over which no account has made a request. Their signatures are not looked at beyond
    the limit."""
    write_accounts(tmp_path)
    acl = ("aclEnable=true", f"rocketmqHome={tmp_path}")
    async with running(tmp_path / "store", *acl, "maxRequestsPerSecondPerAddress=3") as broker:
        known, *strangers = [broker.connect(("10.0.0.1", port)) for port in range(1, 4)]
        assert (await known.ask(signed(send("topicB"), USER))).code == 0
        loop.advance(1)
        wrong = (USER[0], "wrong")
        codes = [(await peer.ask(signed(send("topicB"), wrong))).code for peer in strangers * 3]
        assert codes == [ResponseCode.SYSTEM_ERROR] * 3 + [ResponseCode.SYSTEM_BUSY] * 3
        answer = await strangers[0].ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo("topicB")))
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "maxRequestsPerSecondPerAddress=3" in (answer.remark or "")
        answers = await known.ask_all([signed(send("topicB"), USER) for _ in range(9)])
        assert [answer.code for answer in answers] == [0] * 9, "who has an account is not kept out"
        elsewhere = broker.connect(("10.0.0.2", 1))
        assert (await elsewhere.ask(signed(send("topicB"), USER))).code == 0
        assert (await figures(elsewhere, ADMIN))["limitReached_maxRequestsPerSecondPerAddress"] == "4"
        loop.advance(0.4)
        assert (await strangers[0].ask(signed(send("topicB"), USER))).code == 0


async def test_a_request_that_needs_no_account_makes_nobody_known(tmp_path: Path) -> None:
    free = ("authenticationWhitelist=26", "authorizationWhitelist=26", "maxRequestsPerSecondPerAddress=3")
    async with running(tmp_path, *ON, *free, open_auth_store=lambda _: MemoryStore()) as broker:
        stranger = broker.connect(("10.0.0.1", 1))
        answers = await stranger.ask_all([request(RequestCode.GET_BROKER_CONFIG) for _ in range(3)])
        answers += await stranger.ask_all([request(RequestCode.GET_BROKER_CONFIG) for _ in range(2)])
        assert [answer.code for answer in answers] == [0] * 3 + [ResponseCode.SYSTEM_BUSY] * 2


async def test_who_needs_no_account_for_its_address_is_no_stranger(tmp_path: Path) -> None:
    write_accounts(tmp_path)
    acl = ("aclEnable=true", f"rocketmqHome={tmp_path}", "maxRequestsPerSecondPerAddress=3")
    async with running(tmp_path / "store", *acl) as broker:
        listed = broker.connect(("127.0.0.2", 1))
        answers = [await listed.ask(send("T")) for _ in range(6)]
        assert [answer.code for answer in answers] == [0] * 6


async def test_without_access_control_all_requests_of_an_address_are_limited(tmp_path: Path) -> None:
    async with running(tmp_path, "maxRequestsPerSecondPerAddress=10", "maxRequestsPerSecond=8") as broker:
        peers = [broker.connect(("10.0.0.1", port)) for port in range(1, 3)]
        answers = [await peer.ask_all([send("T") for _ in range(9)]) for peer in peers]
        assert [[answer.code for answer in some].count(0) for some in answers] == [8, 2]
        table = await figures(broker.connect(("10.0.0.2", 1)))
        assert table["limitReached_maxRequestsPerSecond"] == "1"
        assert table["limitReached_maxRequestsPerSecondPerAddress"] == "7"


async def test_the_limit_can_change_while_the_broker_runs(broker: UnboundBroker, peer: Peer) -> None:
    async def limit(text: str) -> None:
        answer = await peer.ask(request(RequestCode.UPDATE_BROKER_CONFIG, body=f"maxRequestsPerSecond={text}".encode()))
        assert answer.code == 0

    await limit("1")
    other = broker.connect()
    assert [answer.code for answer in await other.ask_all([send("T"), send("T")])] == [0, ResponseCode.SYSTEM_BUSY]
    await limit("0")
    assert [answer.code for answer in await other.ask_all([send("T") for _ in range(9)])] == [0] * 9


# --- what is counted


async def test_each_limit_is_counted(broker: UnboundBroker, peer: Peer) -> None:
    table = await figures(peer)
    assert {name.removeprefix("limitReached_") for name in table if name.startswith("limitReached_")} == set(PROPERTIES)
    answer = await peer.ask(request(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxTopics=0\nmaxBatchMessages=1"))
    assert answer.code != 0, "a limit of no topics is refused"
    assert (await peer.ask(request(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxTopics=1"))).code == 0
    assert (await peer.ask(send("new"))).code == ResponseCode.TOPIC_NOT_EXIST
    assert (await figures(peer))["limitReached_maxTopics"] == "1"


async def test_connections_with_tls_are_counted(tmp_path: Path) -> None:
    certificates = write_certificates(tmp_path / "certificates")
    async with running(tmp_path / "store", *certificates.server_settings(), "tls.server.mode=permissive") as broker:
        secured, plain = TlsPeer(broker.running.net.accept(), certificates.client_context()), broker.connect()
        assert await secured.handshake()
        table = await figures(plain)
        assert (table["connections"], table["connectionsWithTls"], table["connectionsTlsRefused"]) == ("2", "1", "0")
        wrong = broker.connect()
        wrong.transport.block()  # it could not read the alert
        wrong.feed(b"\x16\x03\x01\x00\x05hello")
        assert (await figures(secured))["connectionsTlsRefused"] == "1"
