"""TLS of the client and of the command line: what is refused before a connection, and what a failed handshake says."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from duemq import Admin, ArgumentError, ConnectError, Consumer, Producer, cli
from duemq._net.connection import ClientConnection, connect
from duemq.cli.tls_options import KEY_PASSWORD, _value
from duemq.testing import TestClock as Clock
from tests.support.tls import PASSWORD, Certificates, write_certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return write_certificates(tmp_path / "certificates")


@pytest.mark.parametrize("make", [Producer, Admin, Clock, lambda **options: Consumer("group", **options)])
def test_what_is_no_tls_is_refused(make: Any) -> None:
    with pytest.raises(ArgumentError, match=r"give True, or an ssl\.SSLContext"):
        make(tls="ca.pem")
    for tls in (True, False, ssl.create_default_context()):
        make(tls=tls)


async def attempt(context: ssl.SSLContext | None, server: ssl.SSLContext | None) -> str:
    """Connect to a server that closes each connection at its first bytes, and return why the client gives up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server)
    port = listening.sockets[0].getsockname()[1]
    try:
        made: ClientConnection = await connect(
            f"127.0.0.1:{port}", codec="json", on_request=lambda command: None, timeout=5, tls=context
        )
    except ConnectError as error:
        return str(error)
    else:
        made.close()
        await made.wait_closed()
        return ""
    finally:
        listening.close()
        await listening.wait_closed()


def server_context(certificates: Certificates, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path(f"{name}.pem"), certificates.path(f"{name}.key"))
    return context


async def test_a_failed_handshake_says_why(certificates: Certificates) -> None:
    ours = certificates.client_context()
    assert await attempt(ours, server_context(certificates, "server")) == ""
    assert "its certificate was refused: unable to get local issuer" in await attempt(
        ours, server_context(certificates, "other")
    )
    assert "its certificate was refused: certificate has expired" in await attempt(
        ours, server_context(certificates, "expired")
    )
    assert "does it have TLS?" in await attempt(ours, None)


# --- options of the commands


def test_each_option_means_tls(certificates: Certificates) -> None:
    path = certificates.directory
    assert _value(False, False, None, None, None) is False
    trusting = _value(True, False, None, None, None)
    assert isinstance(trusting, ssl.SSLContext)
    assert (trusting.verify_mode, trusting.check_hostname) == (ssl.CERT_REQUIRED, True)
    own = _value(False, False, path / "ca.pem", path / "client.pem", path / "client.key")
    assert isinstance(own, ssl.SSLContext)
    assert (own.verify_mode, len(own.get_ca_certs())) == (ssl.CERT_REQUIRED, 1)
    unverified = _value(False, True, None, None, None)
    assert isinstance(unverified, ssl.SSLContext)
    assert unverified.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--tls-cert", "{}/client.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-trust", "{}/nothing"], "No such file"),
        (["--tls-trust", "{}/client.key"], "not certificates in PEM"),
        (["--tls-cert", "{}/client.pem", "--tls-key", "{}/server.key"], "not the key that belongs to them"),
        (
            ["--tls-cert", "{}/server.pem", "--tls-key", "{}/encrypted.key"],
            f"if the key has a password, set ${KEY_PASSWORD}",
        ),
    ],
)
def test_wrong_files_are_wrong_usage(certificates: Certificates, options: list[str], error: str) -> None:
    arguments = [option.format(certificates.directory) for option in options]
    result = CliRunner().invoke(cli.main, ["pending", "count", *arguments])
    assert result.exit_code == 2
    assert error in result.output


def test_the_password_of_a_key_comes_from_the_environment(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = certificates.directory
    monkeypatch.setenv(KEY_PASSWORD, PASSWORD)
    assert _value(False, False, None, path / "server.pem", path / "encrypted.key")
