"""The cases of Apache's TlsTest (remoting module, 4.9.7 and 5.3.3) against duemq: the same `tls.*` properties on both
sides, Apache's own remoting client on the one, and duemq on the other. There the server is RocketMQ's, in the process
of the test, and its outcome is what is expected here. For duemq only."""

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.environment import ClientPool
from tests.interop.support import eventually
from tests.peers.brokers.broker import HOST
from tests.peers.brokers.duemq import DuemqBroker
from tests.peers.clients import JavaClient
from tests.peers.errors import CallError
from tests.support.canary import CANARY
from tests.support.tls import Certificates, write_certificates

PASSWORD = f"{CANARY}-of-client"
CLOSED = {"RemotingConnectException", "RemotingSendRequestException", "RemotingTimeoutException"}
"""The library's errors for a connection that was closed: before the request was written; while it was; and, in 4.9.7,
if the library noticed the close before it noticed that the request had been written. All are raised at once."""
NO_CERTIFICATE = {"certPath": "", "keyPath": "", "keyPassword": ""}
UNTRUSTED = {"certPath": "other.pem", "keyPath": "other.key", "keyPassword": ""}

SERVERS = {
    "as a rule": {},
    "other certificate": {"certPath": "other.pem", "keyPath": "other.key"},
    "takes any client": {"authClient": "false"},
    "none": {"need.client.auth": "none"},
    "reloaded": {"need.client.auth": "none", "certPath": "own.pem", "keyPath": "own.key"},
    "optional": {"need.client.auth": "optional"},
    "permissive": {"mode": "permissive"},
    "disabled": {"mode": "disabled"},
}
"""What is different from the properties of `server_properties`, by a name."""


@dataclass(frozen=True)
class Case:
    """One test of Apache's, by its name. `server`: which of SERVERS. `client`: properties of the client other than
    those of `client_properties`, None: it does not use TLS. `is_refused`: the call fails."""

    name: str
    server: str
    client: dict[str, str] | None
    is_refused: bool = False


CASES = (
    Case("basicClientServerIntegrationTest", "as a rule", {}),
    Case("serverNotNeedClientAuth", "none", NO_CERTIFICATE),
    Case("serverWantClientAuth", "optional", {}),
    Case("serverWantClientAuth_ButClientNoCert", "optional", NO_CERTIFICATE),
    Case("serverAcceptsUnAuthClient", "permissive", None),
    Case("disabledServerRejectsSSLClient", "disabled", {}, is_refused=True),
    Case("disabledServerAcceptUnAuthClient", "disabled", None),
    Case("serverRejectsUntrustedClientCert", "as a rule", UNTRUSTED, is_refused=True),
    Case("serverAcceptsUntrustedClientCert", "takes any client", UNTRUSTED),
    Case("noClientAuthFailure", "as a rule", NO_CERTIFICATE, is_refused=True),
    Case("clientRejectsUntrustedServerCert", "other certificate", {}, is_refused=True),
    Case("clientAcceptsUntrustedServerCert", "other certificate", {"authServer": "false"}),
)
"""reloadSslContextForServer is a test of its own. testTlsConfigThroughFile has no connection: here all properties, of
both sides, come from files."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates; the client's key has a password and is encrypted as Netty can read it."""
    files = write_certificates(tmp_path_factory.mktemp("certificates"))
    command = ["openssl", "pkcs8", "-topk8", "-v1", "PBE-SHA1-3DES", "-passout", "env:PASSWORD", "-provider", "legacy"]
    command += ["-provider", "default", "-in", files.path("client.key"), "-out", files.path("client-encrypted.key")]
    subprocess.run(command, env=os.environ | {"PASSWORD": PASSWORD}, check=True)
    copy(files, "server", "own")
    return files


def copy(certificates: Certificates, source: str, target: str) -> None:
    """Put a certificate and its key in the place of others."""
    for suffix in (".key", ".pem"):
        Path(certificates.path(f"{target}{suffix}")).write_bytes(Path(certificates.path(source + suffix)).read_bytes())


def properties(certificates: Certificates, side: str, usual: dict[str, str], other: dict[str, str]) -> str:
    """The lines of a file with the properties of one side."""
    values = {
        name: certificates.path(text) if "Path" in name and text else text for name, text in (usual | other).items()
    }
    return "tls.test.mode.enable=false\n" + "".join(f"tls.{side}.{name}={text}\n" for name, text in values.items())


def server_properties(certificates: Certificates, other: dict[str, str]) -> str:
    """The server's, which by default wants a certificate that it trusts."""
    usual = {
        "need.client.auth": "require",
        "authClient": "true",
        "certPath": "server.pem",
        "keyPath": "server.key",
        "keyPassword": "",
        "trustCertPath": "ca.pem",
    }
    return properties(certificates, "server", usual, {name: text for name, text in other.items() if name != "mode"})


def client_properties(certificates: Certificates, other: dict[str, str]) -> str:
    """The client's, which by default has a certificate, and wants one that it trusts."""
    usual = {
        "authServer": "true",
        "certPath": "client.pem",
        "keyPath": "client-encrypted.key",
        "keyPassword": PASSWORD,
        "trustCertPath": "ca.pem",
    }
    return properties(certificates, "client", usual, other)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, DuemqBroker]]:
    """The brokers, by the names of SERVERS."""
    brokers = {}
    for name, other in SERVERS.items():
        directory = tmp_path_factory.mktemp("server")
        file = directory / "tls.properties"
        file.write_text(server_properties(certificates, other))
        settings = {"tls.server.mode": other.get("mode", "enforcing"), "tls.config.file": file}
        brokers[name] = DuemqBroker(directory, settings)
    await asyncio.gather(*(broker.start() for broker in brokers.values()))
    yield brokers
    await asyncio.gather(*(broker.kill() for broker in brokers.values()))


@pytest_asyncio.fixture(params=["4.9.7", "5.3.3"], loop_scope="session")
async def java(request: pytest.FixtureRequest, clients: ClientPool) -> JavaClient:
    return await clients.java(request.param)


def client_file(certificates: Certificates, directory: Path, other: dict[str, str] | None) -> Path | None:
    """The client's tls.config.file, None for one without TLS."""
    if other is None:
        return None
    file = directory / "client.properties"
    file.write_text(client_properties(certificates, other))
    return file


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(
    case: Case, java: JavaClient, servers: dict[str, DuemqBroker], certificates: Certificates, tmp_path: Path
) -> None:
    address = servers[case.server].address
    async with await java.remoting(client_file(certificates, tmp_path, case.client)) as remoting:
        if case.is_refused:
            with pytest.raises(CallError) as failed:  # ask() raises TimeoutError if the connection stays open
                await remoting.ask(address)
            assert failed.value.kind in CLOSED
        else:
            assert await remoting.ask(address) == 0


async def test_reload_ssl_context_for_server(
    clients: ClientPool, servers: dict[str, DuemqBroker], certificates: Certificates, tmp_path: Path
) -> None:
    """Connections go on after a reload, and new ones get the new certificate."""
    javas = [await clients.java(version) for version in ("4.9.7", "5.3.3")]
    server = servers["reloaded"]
    file = client_file(certificates, tmp_path, {"authServer": "false"})

    async def presented() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, (HOST, server.port))

    before, after = (Path(certificates.path(name)).read_text() for name in ("server.pem", "other.pem"))
    assert await presented() == before
    old = [await java.remoting(file) for java in javas]
    assert [await remoting.ask(server.address) for remoting in old] == [0, 0]
    copy(certificates, "other", "own")
    await eventually(presented, lambda shown: shown == after)
    new = [await java.remoting(file) for java in javas]
    assert [await remoting.ask(server.address) for remoting in [*old, *new]] == [0] * 4
    for remoting in [*old, *new]:
        await remoting.stop()
