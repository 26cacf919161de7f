"""Until when certificates are valid: read as the package cryptography reads them, told, and warned of in time."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from duemq.broker.tls.validity import valid_until_ms
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import fastjson
from duemq.storage.clock import ManualClock
from tests.support.broker import UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.tls import Authority, Certificates, key_pem, write_certificates
from tests.support.wire import request

KEY = ec.generate_private_key(ec.SECP256R1())
DER = Encoding.DER
NOW_MS = int(time.time() * 1000)


def certificate(end: datetime.datetime) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x" * 60)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(KEY.public_key())
    builder = builder.serial_number(1).not_valid_before(datetime.datetime(1951, 1, 1)).not_valid_after(end)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.mark.parametrize("year", [1951, 1999, 2000, 2026, 2049, 2050, 9999])
def test_the_end_is_what_cryptography_reads(year: int) -> None:
    end = datetime.datetime(year, 12, 31, 23, 59, 58, tzinfo=datetime.UTC)
    pem = certificate(end)
    assert x509.load_pem_x509_certificate(pem).not_valid_after_utc == end
    assert valid_until_ms(pem.decode()) == end.timestamp() * 1000


def test_the_first_end_of_a_chain_counts() -> None:
    ends = [datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2040, 2030, 2050)]
    chain = b"a comment\n".join(map(certificate, ends)).decode()
    assert valid_until_ms(chain) == ends[1].timestamp() * 1000
    assert valid_until_ms("no certificate") is None


def test_a_certificate_that_is_damaged_is_an_error_and_nothing_else() -> None:
    der = x509.load_pem_x509_certificate(certificate(datetime.datetime(2040, 1, 1))).public_bytes(DER)
    for cut in range(len(der)):
        for data in (der[:cut], der[:cut] + bytes([der[cut] ^ 0xFF]) + der[cut + 1 :]):
            with suppress(ValueError):
                valid_until_ms(ssl.DER_cert_to_PEM_cert(data))


# --- a whole broker


def write(directory: Path, days: float, name: str) -> Certificates:
    """Write a certificate that is valid for some days, and its key."""
    certificates = write_certificates(directory)
    pem, key = Authority("an authority").sign("localhost", days=days)
    (directory / f"{name}.pem").write_bytes(pem)
    (directory / f"{name}.key").write_bytes(key_pem(key))
    return certificates


async def status(broker: UnboundBroker) -> dict[str, str]:
    """What brokerStatus says of certificates."""
    answer = await broker.connect().ask(request(RequestCode.GET_BROKER_RUNTIME_INFO))
    table: dict[str, str] = fastjson.loads(bytes(answer.body))["table"]
    return {name: value for name, value in table.items() if name.startswith("tls")}


def told(logged: list[dict[str, Any]]) -> list[tuple[str, str, str, int]]:
    return [
        (line["log_level"], line["event"], line["certificate"].rpartition("/")[2], line["days"])
        for line in logged
        if line["event"].startswith("tls_certificate_")
    ]


async def test_brokerstatus_tells_the_days_left_also_after_a_renewal(tmp_path: Path, logged: Any) -> None:
    certificates = write(tmp_path / "files", 100.5, "own")
    settings = certificates.server_settings("own")
    async with running(tmp_path / "store", *settings, clock=ManualClock(NOW_MS)) as broker:
        end = x509.load_pem_x509_certificate((tmp_path / "files" / "own.pem").read_bytes()).not_valid_after_utc
        assert await status(broker) == {
            "tlsCertificateValidUntil": str(int(end.timestamp() * 1000)),
            "tlsCertificateDaysLeft": "100",
        }
        write(tmp_path / "files", 13.5, "own")
        broker.running.net.tls.look()
        while broker.running.net.tls._is_looking:
            await asyncio.sleep(0)
        assert (await status(broker))["tlsCertificateDaysLeft"] == "13"
        assert told(logged) == [("warning", "tls_certificate_expires", "own.pem", 13)]


async def test_certificates_that_expire_soon_are_warned_of_once_a_day(
    tmp_path: Path, loop: SteppedLoop, logged: Any
) -> None:
    server = write(tmp_path / "files", 14.2, "own").server_settings("own")
    client = [
        line.replace("server", "client")
        for line in write(tmp_path / "files", 3.5, "for-names").server_settings("for-names")
    ]
    clock = ManualClock(NOW_MS)
    names = ("tls.enable=true", "namesrvAddr=127.0.0.1:1")  # where nobody listens
    async with running(tmp_path / "store", *server, *client, *names, clock=clock) as broker:
        assert told(logged) == [("warning", "tls_certificate_expires", "for-names.pem", 3)], "at the start"
        assert set(await status(broker)) == {
            "tlsCertificateValidUntil",
            "tlsCertificateDaysLeft",
            "tlsClientCertificateValidUntil",
            "tlsClientCertificateDaysLeft",
        }
        for _ in range(16 * 24):
            clock.advance(3_600_000)
            loop.advance(3600)
            await turns()
        assert [line for line in told(logged) if line[2] == "own.pem"] == [
            *(("warning", "tls_certificate_expires", "own.pem", left) for left in range(13, -1, -1)),
            *(("error", "tls_certificate_expired", "own.pem", left) for left in (-1, -2)),
        ]


async def test_without_a_certificate_nothing_is_told(tmp_path: Path, logged: Any) -> None:
    async with running(tmp_path) as broker:
        broker.running.net.tls.warn()
        assert await status(broker) == {}
    assert told(logged) == []
