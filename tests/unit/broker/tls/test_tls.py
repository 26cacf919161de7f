"""TLS on the broker's port: the modes by all kinds of clients, certificates and their renewal, and that limits and
back-pressure hold as without TLS. The clients are Python's ssl, in memory."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.errors import ConfigError
from duemq.broker.net.connection import WRITE_HIGH_BYTES
from duemq.broker.net.tls import HANDSHAKE_BYTES
from duemq.broker.workers import Background
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.frame import join_frame
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import CountBudget, turns
from tests.support.tls import PASSWORD, Certificates, TlsPeer, write_certificates
from tests.support.wire import pull, request, send
from tests.unit.broker.settings.test_settings import told, update

MODES = ("disabled", "permissive", "enforcing")
VERIFIED = ("tls.server.need.client.auth=require", "tls.server.authClient=true")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return write_certificates(tmp_path / "certificates")


def verified(certificates: Certificates) -> list[str]:
    return [*VERIFIED, f"tls.server.trustCertPath={certificates.path('ca.pem')}"]


def connect(broker: UnboundBroker, context: ssl.SSLContext, port: int = 40000) -> TlsPeer:
    return TlsPeer(broker.running.net.accept(), context, ("127.0.0.1", port))


async def is_served(peer: TlsPeer) -> bool:
    """Whether the broker answers requests of a client with TLS; otherwise it has closed the connection."""
    if await peer.handshake() and not peer.transport.is_closing():
        answer = await peer.ask(send("T", b"x" * 50_000))
        return answer.code == 0
    await turns(20)
    assert peer.transport.is_closing()
    return False


# --- modes by clients


@pytest.mark.parametrize("mode", MODES)
async def test_clients_without_tls(tmp_path: Path, certificates: Certificates, mode: str, logged: Any) -> None:
    async with running(tmp_path / "store", f"tls.server.mode={mode}", *certificates.server_settings()) as broker:
        peer = broker.connect()
        if mode == "enforcing":
            peer.post(send("T"))
            assert peer.transport.is_closing()
            assert [line["event"] for line in logged if line["event"] == "tls_refused"] == ["tls_refused"]
            assert peer.responses == []
        else:
            assert (await peer.ask(send("T"))).code == 0


def no_tls_1_2(context: ssl.SSLContext) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")


def only_tls_1_2(context: ssl.SSLContext) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2


def as_it_is(context: ssl.SSLContext) -> None:
    pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("certificate", "change", "settings", "expected"),
    [
        (None, as_it_is, (), True),
        (None, only_tls_1_2, (), True),
        (None, no_tls_1_2, (), False),
        ("client", as_it_is, (), True),
        ("other", as_it_is, (), True),
        ("client", as_it_is, VERIFIED, True),
        ("client", only_tls_1_2, VERIFIED, True),
        (None, as_it_is, VERIFIED, False),
        ("other", as_it_is, VERIFIED, False),
        ("expired", as_it_is, VERIFIED, False),
        (None, as_it_is, ("tls.server.need.client.auth=optional", "tls.server.authClient=true"), True),
        ("other", as_it_is, ("tls.server.need.client.auth=optional", "tls.server.authClient=true"), False),
        # As Apache's test serverAcceptsUntrustedClientCert: without authClient any certificate will do.
        ("other", as_it_is, ("tls.server.need.client.auth=require",), True),
    ],
)
async def test_clients_with_tls(
    tmp_path: Path,
    certificates: Certificates,
    mode: str,
    certificate: str | None,
    change: Callable[[ssl.SSLContext], None],
    settings: tuple[str, ...],
    expected: bool,
) -> None:
    context = certificates.client_context(certificate)
    change(context)
    trust = f"tls.server.trustCertPath={certificates.path('ca.pem')}"
    own = [f"tls.server.mode={mode}", *certificates.server_settings(), trust, *settings]
    async with running(tmp_path / "store", *own) as broker:
        assert await is_served(connect(broker, context)) == (expected and mode != "disabled")
        if mode != "enforcing":
            assert (await broker.connect().ask(send("T"))).code == 0, "others are not affected"


@pytest.mark.parametrize("name", ["other", "expired"])
async def test_a_client_may_refuse_the_broker(tmp_path: Path, certificates: Certificates, name: str) -> None:
    async with running(tmp_path / "store", *certificates.server_settings(name)) as broker:
        peer = connect(broker, certificates.client_context())
        assert not await peer.handshake()
        assert isinstance(peer.error, ssl.SSLCertVerificationError)
        await turns(20)
        assert peer.transport.is_closing()


async def test_what_is_sent_is_encrypted(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        peer = connect(broker, certificates.client_context())
        assert await is_served(peer)
        answer = await peer.ask(pull("T"))
        assert b"x" * 100 in bytes(answer.body)
        assert b"x" * 100 not in peer.raw


async def test_without_a_certificate_one_is_made(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path / "store") as broker:
        first = connect(broker, certificates.client_context(trust=False))
        second = connect(broker, certificates.client_context(trust=False), 40001)
        for peer in (first, second):
            await peer.handshake()
        while not (first.is_ready and second.is_ready):
            await asyncio.sleep(0)
        assert await is_served(first)
        assert await is_served(second)
        assert first.tls.getpeercert(True) == second.tls.getpeercert(True)


async def test_outside_of_test_mode_there_is_no_tls_without_a_certificate(
    tmp_path: Path, certificates: Certificates, logged: Any
) -> None:
    async with running(tmp_path / "store", "tls.test.mode.enable=false") as broker:
        assert not await is_served(connect(broker, certificates.client_context(trust=False)))
        assert (await broker.connect().ask(send("T"))).code == 0
    assert "no tls.server.certPath" in next(line["reason"] for line in logged if line["event"] == "tls_no_certificate")


# --- starts that are refused, and what is told


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["tls.server.mode=enforcing", "tls.test.mode.enable=false"], "there is no tls.server.certPath"),
        (["tls.server.certPath={}/server.pem"], "tls.server.keyPath is missing"),
        (["tls.server.keyPath={}/server.key"], "tls.server.certPath is missing"),
        (["tls.server.certPath={}/nothing.pem", "tls.server.keyPath={}/server.key"], "No such file"),
        (["tls.server.certPath={}/server.pem", "tls.server.keyPath={}/client.key"], "not that of the certificate"),
        (["tls.server.certPath={}/server.key", "tls.server.keyPath={}/server.key"], "no certificate chain"),
        (
            ["tls.server.certPath={}/server.pem", "tls.server.keyPath={}/encrypted.key"],
            "cannot be read with",
        ),
        (
            [
                "tls.server.certPath={}/server.pem",
                "tls.server.keyPath={}/server.key",
                *VERIFIED,
                "tls.server.trustCertPath={}/server.key",
            ],
            "trustCertPath=.*no certificates",
        ),
        (["tls.config.file={}/nothing"], "nothing"),
        (
            [
                "namesrvAddr=127.0.0.1:1",
                "tls.enable=true",
                "tls.client.authServer=true",
                "tls.client.trustCertPath={}/nothing",
            ],
            "No such file",
        ),
    ],
)
async def test_a_start_with_wrong_files_is_refused(
    tmp_path: Path, certificates: Certificates, settings: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with running(tmp_path / "store", *(text.format(certificates.directory) for text in settings)):
            pass


async def test_the_file_counts_before_the_settings(tmp_path: Path, certificates: Certificates, logged: Any) -> None:
    file = tmp_path / "tls.properties"
    file.write_text(
        f"tls.server.certPath={certificates.path('server.pem')}\n"
        f"tls.server.keyPath : {certificates.path('encrypted.key')}\n"
        f"tls.server.keyPassword={PASSWORD}\n"
        "tls.server.mode=disabled\n"
        "tls.server.what=1\n"
    )
    settings = [f"tls.config.file={file}", *certificates.server_settings("other")]
    async with running(tmp_path / "store", *settings) as broker:
        peer = connect(broker, certificates.client_context())
        assert await is_served(peer)
        answer = await peer.ask(request(RequestCode.GET_BROKER_CONFIG))
        assert PASSWORD.encode() not in bytes(answer.body)
    warned = " ".join(line["reason"] for line in logged if line["event"] == "tls_doubtful")
    assert "tls.server.mode has no effect there" in warned
    assert "there is no property tls.server.what" in warned
    assert PASSWORD not in str(logged)


async def test_the_password_of_a_key_is_told_to_nobody(tmp_path: Path, certificates: Certificates) -> None:
    path = certificates.path
    settings = [f"tls.server.certPath={path('server.pem')}", f"tls.server.keyPath={path('encrypted.key')}"]
    file = tmp_path / "tls.properties"
    file.write_text(f"tls.server.keyPassword={PASSWORD}\n")
    settings += [f"tls.config.file={file}", f"tls.client.keyPassword={PASSWORD}"]
    async with running(tmp_path / "store", *settings) as broker:
        peer = broker.connect()
        assert PASSWORD not in str(await told(peer))
        for guess in (PASSWORD, ""):
            answer = await peer.ask(update(f"tls.server.keyPassword={guess}\n"))
            assert answer.code == 1
            assert "cannot change" in (answer.remark or "")
        assert PASSWORD not in repr(broker.config) + repr(broker.running.net.tls._state.options)


async def test_doubtful_settings_are_logged(tmp_path: Path, certificates: Certificates, logged: Any) -> None:
    settings = [*certificates.server_settings(), "tls.server.need.client.auth=require"]
    settings += ["tls.enable=true", "namesrvAddr=127.0.0.1:1"]
    async with running(tmp_path / "store", *settings):
        pass
    reasons = " ".join(line["reason"] for line in logged if line["event"] == "tls_doubtful")
    assert "anyone is let in" in reasons
    assert "name servers' certificates are not checked" in reasons


# --- renewal


async def look(broker: UnboundBroker) -> None:
    broker.running.net.tls.look()
    while broker.running.net.tls._is_looking:
        await asyncio.sleep(0)


def replace(certificates: Certificates, target: str, source: str) -> None:
    """Replace a file as deployment tools do."""
    temporary = f"{certificates.path(target)}.new"
    with open(certificates.path(source), "rb") as old, open(temporary, "wb") as new:
        new.write(old.read())
    os.replace(temporary, certificates.path(target))


async def test_a_new_certificate_counts_without_a_restart(
    tmp_path: Path, certificates: Certificates, logged: Any
) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        old = connect(broker, certificates.client_context())
        assert await is_served(old)
        replace(certificates, "server.pem", "client.pem")
        await look(broker)
        await look(broker)
        half = connect(broker, certificates.client_context(), 40001)
        assert await is_served(half), "the new certificate has no key yet, so the old ones stay"
        assert half.tls.getpeercert(True) == old.tls.getpeercert(True)
        assert [line["event"] for line in logged].count("tls_not_changed") == 1

        replace(certificates, "server.key", "client.key")
        await look(broker)
        new = connect(broker, certificates.client_context(), 40002)
        assert await is_served(new)
        assert new.tls.getpeercert(True) != old.tls.getpeercert(True)
        assert (await old.ask(send("T"))).code == 0, "connections go on with what they have"
        assert [line["event"] for line in logged].count("tls_changed") == 1


@pytest.mark.parametrize("name", ["server.pem", "server.key", "tls.properties"])
async def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, certificates: Certificates, logged: Any, name: str
) -> None:
    """Opening a FIFO waits until somebody writes."""
    path = Path(certificates.path(name))
    Path(certificates.path("tls.properties")).write_text("")
    settings = (*certificates.server_settings(), f"tls.config.file={certificates.path('tls.properties')}")
    async with running(tmp_path / "store", *settings) as broker:
        path.unlink()
        os.mkfifo(path)
        await look(broker)
        (line,) = (line for line in logged if line["event"] == "tls_not_changed")
        assert f"{path}: is not a regular file" in line["reason"]
        assert await is_served(connect(broker, certificates.client_context())), "the old ones stay"
    with pytest.raises(ConfigError, match="is not a regular file"):
        async with running(tmp_path / "store", *settings):
            pass


async def test_files_are_read_again_only_when_they_have_changed(
    tmp_path: Path, certificates: Certificates, logged: Any
) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        for _ in range(3):
            await look(broker)
    assert "tls_changed" not in [line["event"] for line in logged]


async def test_new_authorities_count_without_a_restart(tmp_path: Path, certificates: Certificates) -> None:
    settings = [*certificates.server_settings(), *verified(certificates)]
    os.link(certificates.path("ca.pem"), certificates.path("kept.pem"))
    async with running(tmp_path / "store", *settings) as broker:
        replace(certificates, "ca.pem", "other-ca.pem")
        await look(broker)
        context = certificates.client_context("other", trust=False)
        assert await is_served(connect(broker, context))


# --- handshakes


async def test_a_handshake_may_come_byte_by_byte(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        peer = connect(broker, certificates.client_context())
        whole = peer.connection.data_received
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer, "_deliver", lambda data: [whole(data[at : at + 1]) for at in range(len(data))] and None)
            assert await peer.handshake()
        assert (await peer.ask(send("T"))).code == 0


async def test_a_handshake_may_wait_for_its_turn(tmp_path: Path, certificates: Certificates) -> None:
    """Each step is a piece of work: with a budget of one piece a turn, clients wait for each other and all are
    served."""
    async with running(tmp_path / "store", *certificates.server_settings(), budget=CountBudget(1, 1)) as broker:
        peers = [connect(broker, certificates.client_context(), 40000 + n) for n in range(10)]
        for peer in peers:
            peer._step()
        for _ in range(200):
            await asyncio.sleep(0)
        assert all(peer.is_ready for peer in peers)
        assert [(await peer.ask(send("T"))).code for peer in peers] == [0] * 10


async def test_a_handshake_that_is_too_long_is_refused(tmp_path: Path, certificates: Certificates, logged: Any) -> None:
    """A handshake may be one message in many records, and is held until that is whole."""
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        peer = broker.connect()
        peer.transport.block()
        announced = b"\x01\x01\xff\xff"  # OpenSSL itself refuses a little more
        fed = 0
        while not peer.transport.is_closing():
            assert fed <= HANDSHAKE_BYTES
            part = announced + bytes(16_000) if not fed else bytes(16_000)
            peer.feed(b"\x16\x03\x01" + len(part).to_bytes(2) + part)
            fed += len(part)
        assert [line["reason"] for line in logged if line["event"] == "tls_refused"] == ["the handshake is too long"]


async def test_bytes_that_are_no_handshake_harm_nobody(tmp_path: Path, certificates: Certificates) -> None:
    """Changed, cut and random handshakes: the broker waits for more, or closes; a witness is served all the while."""
    chance = random.Random(17)
    settings = [*certificates.server_settings(), *verified(certificates)]
    async with running(tmp_path / "store", *settings) as broker:
        witness = broker.connect()
        assert (await witness.ask(send("T"))).code == 0
        for number in range(300):
            peer = connect(broker, certificates.client_context("client"), 40000 + number)
            kind = number % 4

            def deliver(data: bytes, peer: TlsPeer = peer, kind: int = kind) -> None:
                changed = bytearray(data)
                if kind == 0:
                    for _ in range(chance.randint(1, 4)):
                        changed[chance.randrange(1, len(changed))] = chance.randrange(256)
                elif kind == 1:
                    del changed[chance.randrange(1, len(changed)) :]
                elif kind == 2:
                    changed += chance.randbytes(chance.randint(1, 500))
                else:
                    changed = bytearray(b"\x16" + chance.randbytes(chance.randint(0, 600)))
                if not peer.transport.is_closing():
                    peer.connection.data_received(bytes(changed))

            peer._deliver = deliver  # type: ignore[method-assign]
            await peer.handshake()
            if not peer.transport.is_closing():
                peer.transport.abort()
        await turns(20)
        assert broker.router.connections == {witness.connection}
        assert (await witness.ask(send("T"))).code == 0
        assert await is_served(connect(broker, certificates.client_context("client")))


async def test_damaged_records_close_a_connection(tmp_path: Path, certificates: Certificates, logged: Any) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        peer = connect(broker, certificates.client_context())
        assert await peer.handshake()
        peer.tls.write(b"x" * 100)
        data = bytearray(peer._outgoing.read())
        data[-1] ^= 1
        peer.connection.data_received(bytes(data))
        assert peer.transport.is_closing()
        assert "tls_refused" in [line["event"] for line in logged]


# --- the ends of a stream


async def test_a_client_ends_its_stream(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        peer = connect(broker, certificates.client_context())
        assert await is_served(peer)
        peer.end()
        await turns(20)
        assert peer.transport.is_closing()
        assert broker.router.connections == set()


async def test_the_broker_ends_a_stream_as_tls_does(tmp_path: Path, certificates: Certificates) -> None:
    """So the client knows that nobody on the way has cut the rest off."""
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        peer = connect(broker, certificates.client_context())
        assert await is_served(peer)
        peer.connection.close()
        assert peer.is_ended


# --- limits and back-pressure, as without TLS


async def test_a_client_with_tls_that_does_not_read_is_not_read_from(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        consumer = connect(broker, certificates.client_context())
        assert await consumer.handshake()
        await broker.connect().ask_all([send("T", bytes(100_000)) for _ in range(3)])
        consumer.transport.block()
        pulls = [pull("T", 1, count=1) for _ in range(100)]
        consumer.post(*pulls)
        assert not consumer.transport.takes_data
        assert 100_000 < consumer.transport.most_held < WRITE_HIGH_BYTES + 250_000
        assert consumer.connection.buffered == consumer.transport.get_write_buffer_size()
        consumer.transport.unblock()
        await turns(20)
        assert [answer.opaque for answer in consumer.responses] == [command.opaque for command in pulls]
        assert consumer.transport.takes_data


async def test_a_held_pull_is_answered_with_tls(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        producer, consumer = broker.connect(), connect(broker, certificates.client_context())
        assert await consumer.handshake()
        assert (await producer.ask(send("T"))).code == 0
        waiting = asyncio.ensure_future(consumer.ask(pull("T", 1, suspend_ms=10_000)))
        await turns()
        assert not waiting.done()
        assert (await producer.ask(send("T", b"later"))).code == 0
        assert b"later" in bytes((await waiting).body)


async def test_who_holds_most_that_is_not_read_is_closed_with_tls(tmp_path: Path, certificates: Certificates) -> None:
    settings = ["maxUnreadResponseBytes=33554432", *certificates.server_settings()]
    async with running(tmp_path / "store", *settings) as broker:
        producer = broker.connect()
        await producer.ask_all([send("T", bytes(500_000)) for _ in range(4)])
        strangers = [connect(broker, certificates.client_context(), 40000 + n) for n in range(80)]
        for stranger in strangers:
            assert await stranger.handshake()
            stranger.transport.block()
            stranger.post(*(pull("T") for _ in range(3)))
        assert any(stranger.transport.is_aborted for stranger in strangers)
        assert broker.running.net.output.used <= broker.running.net.output.limit
        assert (await producer.ask(pull("T"))).code == 0


async def test_unfinished_frames_count_with_tls(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        peer = connect(broker, certificates.client_context())
        assert await peer.handshake()
        peer.feed(join_frame(0, b"{}", bytes(1000))[:700])
        assert broker.running.net.input.used == 700
        peer.transport.abort()
        await turns()
        assert broker.running.net.input.used == 0


async def test_reads_with_tls_are_short(tmp_path: Path, certificates: Certificates) -> None:
    """A read of the smallest records must not take long to decrypt."""
    async with running(tmp_path / "store", *certificates.server_settings()) as broker:
        plain, peer = broker.connect(), connect(broker, certificates.client_context())
        assert len(peer.connection.get_buffer(-1)) == 64 * 1024
        await plain.ask(send("T"))
        assert len(plain.connection.get_buffer(-1)) == 256 * 1024


async def test_a_stop_in_the_middle_of_a_handshake(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path / "store") as broker:
        broker.lanes.hold(Background.ACCESS)
        peer = connect(broker, certificates.client_context(trust=False))
        await peer.handshake()
        peer.transport.abort()
        await turns()
    assert isinstance(peer, Peer)
