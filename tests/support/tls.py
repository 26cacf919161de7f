"""Certificates of all kinds for tests, and a client with TLS of a broker in the test's process.

The certificates are made with `cryptography` and the client is Python's ssl, so nothing here is the code under test.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from duemq.broker.net.connection import Connection
from tests.support.broker import Peer
from tests.support.canary import CANARY

HOST = "broker.test"
ADDRESS = "127.0.0.1"
"""The names in the broker's certificate."""
PASSWORD = f"{CANARY}-of-key"
"""The password of `encrypted.key`. It must not be found anywhere."""
_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)


class Authority:
    """An authority that signs certificates."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = _pem(_build(self._name, self._name, self._key, self._key, is_authority=True))

    def sign(self, name: str, *, days: float = 100) -> tuple[bytes, ec.EllipticCurvePrivateKey]:
        """Return a certificate for a host, in PEM, valid for so many days from now on, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return _pem(_build(subject, self._name, key, self._key, host=name, days=days)), key


def _build(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    *,
    host: str = "",
    is_authority: bool = False,
    days: float = 100,
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOW - 10 * _DAY)
        .not_valid_after(_NOW + days * _DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if host:
        names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address(ADDRESS))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(by, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey, password: str = "") -> bytes:
    """Return a key in PEM."""
    kind: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        kind = serialization.BestAvailableEncryption(password.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kind)


@dataclass(frozen=True)
class Certificates:
    """Files: ca.pem, and for each of server, client, other (by an authority that nobody trusts) and expired a
    certificate, NAME.pem, and its key, NAME.key. encrypted.key is that of server, with PASSWORD."""

    directory: Path

    def path(self, name: str) -> str:
        """The path of a file."""
        return str(self.directory / name)

    def server_settings(self, name: str = "server") -> list[str]:
        """Settings for a broker with one of the certificates."""
        return [f"tls.server.certPath={self.path(name)}.pem", f"tls.server.keyPath={self.path(name)}.key"]

    def client_context(self, name: str | None = None, *, trust: bool = True) -> ssl.SSLContext:
        """What a client uses that trusts ca.pem, or does not check; `name`: its certificate, if it has one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if trust:
            context.load_verify_locations(self.path("ca.pem"))
        else:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if name is not None:
            context.load_cert_chain(self.path(f"{name}.pem"), self.path(f"{name}.key"))
        return context


@cache
def _files() -> dict[str, bytes]:
    ours, others = Authority("our authority"), Authority("another authority")
    files = {"ca.pem": ours.pem, "other-ca.pem": others.pem}
    for name, authority in (("server", ours), ("client", ours), ("other", others), ("expired", ours)):
        certificate, key = authority.sign(HOST, days=-1 if name == "expired" else 100)
        files[f"{name}.pem"], files[f"{name}.key"] = certificate, key_pem(key)
        if name == "server":
            files["encrypted.key"] = key_pem(key, PASSWORD)
    return files


def write_certificates(directory: Path) -> Certificates:
    """Write the files of `Certificates` into a directory, always the same ones in a process."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in _files().items():
        (directory / name).write_bytes(data)
    return Certificates(directory)


class TlsPeer(Peer):
    """A client with TLS. What it has to send is sent in the next turn of the loop, as by a socket."""

    def __init__(
        self, connection: Connection, context: ssl.SSLContext, address: tuple[str, int] = ("127.0.0.1", 40000)
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=HOST)
        self.is_ready = False
        self.is_ended = False
        """Whether the broker has ended the stream, as TLS does."""
        self.error: ssl.SSLError | None = None
        self.raw = bytearray()
        """All that the broker has sent, encrypted."""
        super().__init__(connection, address)

    async def handshake(self) -> bool:
        """Take the handshake as far as it goes; return whether it succeeded here."""
        self._step()
        for _ in range(30):
            await asyncio.sleep(0)
        return self.is_ready and self.error is None

    def feed(self, data: bytes) -> None:
        assert self.transport.takes_data, "the broker does not read from this peer"
        self.tls.write(data)
        self.connection.data_received(self._outgoing.read())

    def end(self) -> None:
        """End the stream, as TLS does."""
        with suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self._send()

    def received(self, data: bytes) -> None:
        self.raw += data
        self._incoming.write(data)
        self._step()

    def _step(self) -> None:
        try:
            if not self.is_ready:
                self.tls.do_handshake()
                self.is_ready = True
            while data := self.tls.read(65536):
                super().received(data)
            self.is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.error = error
        self._send()

    def _send(self) -> None:
        if self._outgoing.pending:
            asyncio.get_running_loop().call_soon(self._deliver, self._outgoing.read())

    def _deliver(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.connection.data_received(data)
