"""TLS with unmodified clients: Java's 4.9.7 and 5.3.3 with client certificates, openssl's, and duemq's own with its
command line; and registration at Apache's name server with TLS. For duemq only: the matrix of modes and certificates is
in tests/unit/broker/tls/test_tls.py."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from duemq import ConnectError, Consumer, NoRouteError, Producer
from tests.interop.support import eventually, numbered
from tests.peers import ports
from tests.peers.brokers.apache import ApacheNameServer
from tests.peers.brokers.broker import BROKER, HOST
from tests.peers.brokers.duemq import DuemqBroker
from tests.peers.clients import java_client, unique
from tests.peers.messages import Outgoing
from tests.support.canary import CANARY
from tests.support.tls import PASSWORD, Certificates, write_certificates

DUEMQ = str(Path(sys.executable).with_name("duemq"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return write_certificates(tmp_path_factory.mktemp("certificates"))


def java_options(certificates: Certificates, *options: str) -> tuple[str, ...]:
    """What RocketMQ's documentation tells users to start a JVM with."""
    return (
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        "-Dtls.client.authServer=true",
        f"-Dtls.client.trustCertPath={certificates.path('ca.pem')}",
        f"-Dtls.client.certPath={certificates.path('client.pem')}",
        f"-Dtls.client.keyPath={certificates.path('client.key')}",
        *options,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def enforcing(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DuemqBroker]:
    """A broker that wants TLS and a client's certificate. Its key has a password, in RocketMQ's tls.properties."""
    directory = tmp_path_factory.mktemp("enforcing")
    file = directory / "tls.properties"
    file.write_text(
        f"tls.test.mode.enable=false\n"
        f"tls.server.certPath={certificates.path('server.pem')}\n"
        f"tls.server.keyPath={certificates.path('encrypted.key')}\n"
        f"tls.server.keyPassword={PASSWORD}\n"
        f"tls.server.trustCertPath={certificates.path('ca.pem')}\n"
        "tls.server.need.client.auth=require\n"
        "tls.server.authClient=true\n"
    )
    properties = {"tls.server.mode": "enforcing", "tls.config.file": file, "messageDelayLevel": "1s 1s 1s"}
    broker = DuemqBroker(directory, properties)
    await broker.start()
    yield broker
    await broker.kill()


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
async def test_java_clients(version: str, enforcing: DuemqBroker, certificates: Certificates, tmp_path: Path) -> None:
    client = java_client(version, tmp_path, java_options(certificates))
    await client.start()
    try:
        topic = unique("tls")
        async with (
            await client.consumer(enforcing.nameserver, unique("group"), topic) as consumer,
            await client.producer(enforcing.nameserver) as producer,
        ):
            results = await producer.send(topic, numbered("now", 20))
            assert {result.status for result in results} == {"SEND_OK"}
            large = b"x" * 200_000  # many records of TLS
            await producer.send(topic, [Outgoing(large), Outgoing(b"later", level=1)])
            messages = await consumer.receive(22)
            assert large in {message.body for message in messages}
    finally:
        await client.stop()


async def openssl(broker: DuemqBroker, *options: str) -> str:
    """Return what openssl says about a connection."""
    child = await asyncio.create_subprocess_exec(
        "openssl",
        "s_client",
        "-connect",
        broker.address,
        *options,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(20):
        output, _ = await child.communicate()
    return output.decode(errors="replace")


async def test_openssl(enforcing: DuemqBroker, certificates: Certificates) -> None:
    trust = ("-CAfile", certificates.path("ca.pem"), "-verify_return_error")
    own = ("-cert", certificates.path("client.pem"), "-key", certificates.path("client.key"))
    for version, name in (("-tls1_2", "TLSv1.2"), ("-tls1_3", "TLSv1.3")):
        said = await openssl(enforcing, *trust, *own, version)
        assert "Verify return code: 0 (ok)" in said
        assert f"New, {name}" in said
        assert "Secure Renegotiation IS NOT" not in said or version == "-tls1_3"
    for version in ("-tls1", "-tls1_1"):
        said = await openssl(enforcing, *trust, *own, version, "-cipher", "ALL:@SECLEVEL=0")
        assert "Cipher is (NONE)" in said
    said = await openssl(enforcing, *trust, "-tls1_2")
    assert "alert handshake failure" in said, "without a certificate"


async def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run `duemq`; return its exit code and output."""
    child = await asyncio.create_subprocess_exec(
        DUEMQ,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | environment,
    )
    output, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, output.decode()


async def test_duemqs_own_client_and_commands(enforcing: DuemqBroker, certificates: Certificates) -> None:
    topic = unique("own")
    context = certificates.client_context("client")
    async with Producer(enforcing.nameserver, tls=context) as producer:
        for number in range(10):
            await producer.send(topic, b"%d" % number)
    options = ("--nameserver", enforcing.nameserver, "--tls-trust", certificates.path("ca.pem"))
    own = ("--tls-cert", certificates.path("client.pem"), "--tls-key", certificates.path("client.key"))
    code, output = await run("send", topic, "by command", *options, *own)
    assert code == 0, output
    consumer = Consumer(unique("group"), nameserver=enforcing.nameserver, from_="first", tls=context)
    consumer.subscribe(topic)
    bodies: set[bytes] = set()
    async with consumer:
        async with asyncio.timeout(30):
            while len(bodies) < 11:
                bodies.add((await consumer.receive()).body)
    assert b"by command" in bodies

    code, output = await run("send", topic, "x", *options)
    assert code == 1, "without a certificate of its own"
    assert "certificate required" in output
    code, output = await run("send", topic, "x", "--nameserver", enforcing.nameserver)
    assert code == 1, "without TLS"
    with pytest.raises(ConnectError, match="certificate was refused"):
        async with Producer(enforcing.nameserver, tls=True):
            pass


async def test_the_password_of_the_key_is_shown_nowhere(enforcing: DuemqBroker, certificates: Certificates) -> None:
    """It begins with the canary that the other secrets of the tests have."""
    assert PASSWORD.startswith(CANARY)
    options = ("--nameserver", enforcing.nameserver, "--tls-trust", certificates.path("ca.pem"))
    own = ("--tls-cert", certificates.path("server.pem"), "--tls-key", certificates.path("encrypted.key"))
    right = await run("pending", "count", *options, *own, DUEMQ_TLS_KEY_PASSWORD=PASSWORD)
    wrong = await run("pending", "count", *options, *own, DUEMQ_TLS_KEY_PASSWORD=f"{PASSWORD}-wrong")
    assert (right[0], wrong[0]) == (0, 2)
    process = Path(f"/proc/{enforcing.pid}")
    shown = [right[1], wrong[1], enforcing.stderr.read_text(), (process / "cmdline").read_text()]
    audit = enforcing.store / "audit"
    shown += [path.read_text() for path in audit.glob("*")]
    assert CANARY not in "".join(shown)


async def test_registration_at_apaches_name_server(certificates: Certificates, tmp_path: Path) -> None:
    server = java_options(
        certificates,
        "-Dtls.server.mode=enforcing",
        f"-Dtls.server.certPath={certificates.path('server.pem')}",
        f"-Dtls.server.keyPath={certificates.path('server.key')}",
        f"-Dtls.server.trustCertPath={certificates.path('ca.pem')}",
        "-Dtls.server.need.client.auth=require",
        "-Dtls.server.authClient=true",
    )
    nameserver = ApacheNameServer("4.9.7", tmp_path / "names", ports.free_port(), server)
    await nameserver.start()
    own = {
        "tls.enable": "true",
        "tls.client.authServer": "true",
        "tls.client.trustCertPath": certificates.path("ca.pem"),
        "tls.client.certPath": certificates.path("client.pem"),
        "tls.client.keyPath": certificates.path("client.key"),
        "tls.server.certPath": certificates.path("server.pem"),
        "tls.server.keyPath": certificates.path("server.key"),
    }
    broker = DuemqBroker(tmp_path / "broker", own, nameserver=nameserver.address)
    try:
        await broker.start()
        async with Producer(nameserver.address, tls=certificates.client_context("client")) as producer:

            async def attempt() -> str:
                with suppress(NoRouteError):  # it listens before it has registered
                    return (await producer.send(unique("outside"), b"x")).queue.broker
                return ""

            assert await eventually(attempt, timeout=60) == BROKER
    finally:
        await broker.kill()
        await nameserver.kill()
    assert HOST in nameserver.address
