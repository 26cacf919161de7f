"""The certificates and keys of a running broker, as OpenSSL's contexts.

The files are looked at every few seconds, by size, modification time and inode, and read again when one has changed.
Either all new files count, from the next handshake on, or, if one is wrong, the old contexts stay and the log says why.
So a certificate is renewed without a restart, and while the new certificate is in place but its key is not, the old
pair stays. Existing connections keep the certificate that they began with.

Without a certificate, in test mode, which is RocketMQ's default, one is made when the first client uses TLS, and lasts
until the broker stops. It protects against eavesdroppers only: clients cannot tell it from another broker's.
"""

from __future__ import annotations

import datetime
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from duemq.broker.errors import ConfigError
from duemq.broker.net.tls import TlsMode
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.tls import options as tls_options
from duemq.broker.tls.options import Identity, TlsOptions
from duemq.broker.tls.validity import valid_until_ms
from duemq.broker.workers import Background, Workers
from duemq.storage.clock import Clock
from duemq.storage.regular_files import open_regular, read_regular

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 5.0
"""The interval between looks at the files; RocketMQ's broker looks every 500 ms."""
WARN_DAYS: Final = 14
"""From this many days before a certificate expires, the log warns of it each day."""
WARN_SECONDS: Final = 3600.0
"""The interval between checks of the days that are left: less than a day, so that no day is missed."""
_DAY_MS: Final = 86_400_000
_CHAIN_BYTES: Final = 1024 * 1024
"""More than any chain of certificates in PEM has."""
_TEST_DAYS: Final = 365
_KEY_BYTES: Final = 64 * 1024
"""More than any key in PEM has."""
_VERIFY: Final = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}

Stamps = dict[str, tuple[int, int, int] | None]
"""By file: modification time in ns, size, inode; None if it does not exist."""
MakeCertificate = Callable[[str], tuple[bytes, bytes]]
"""Makes a certificate and its key, in PEM, for a host. May take long, and raise ImportError."""


class Expiry(NamedTuple):
    """The end of the validity of a certificate. `setting`: tls.server or tls.client. `path`: its file. `until_ms`: the
    end of the one in its chain that expires first, in ms since the epoch."""

    setting: str
    path: str
    until_ms: int

    def days_left(self, now_ms: int) -> int:
        """Return the whole days from a time until the end, less than 0 after it."""
        return (self.until_ms - now_ms) // _DAY_MS


@dataclass(frozen=True)
class _State:
    """All files as they were read."""

    options: TlsOptions
    stamps: Stamps
    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    expiries: tuple[Expiry, ...]


class TlsContexts:
    """The contexts, and the files they are made from. Implements `net.tls.TlsServer`. Belongs to the event loop; files
    are read by a thread, except at the start."""

    def __init__(
        self,
        config: BrokerConfig,
        workers: Workers,
        clock: Clock,
        make_certificate: MakeCertificate | None = None,
    ) -> None:
        """Read the files. `clock`: the machine's. Raises ConfigError."""
        self._config = config
        self._workers = workers
        self._clock = clock
        self._warned: dict[str, tuple[Expiry, int]] = {}
        """By setting: the certificate that was warned of last, and the days it had left then."""
        self._make_certificate = make_certificate or _make_certificate
        self._made: ssl.SSLContext | None = None
        """The context with a certificate of test mode."""
        self._waiting: list[Callable[[], None]] = []
        """Called when the certificate of test mode is made, or could not be made."""
        self._failed: Stamps | None = None
        """The files that could not be read: they are not read again until one has changed."""
        self._why = ""
        self._is_looking = False
        self.changes = 0
        """How often the files were read again since the start."""
        self._state = self._read()

    # --- see `net.tls.TlsServer`

    @property
    def mode(self) -> TlsMode:
        """Whether clients may, must or must not use TLS; it does not change."""
        return self._state.options.mode

    @property
    def context(self) -> ssl.SSLContext | None:
        """The context of the next handshake, None if there is none yet."""
        return self._state.server or self._made

    def prepare(self, then: Callable[[], None]) -> None:
        """Make the certificate of test mode, and call `then` when that is done or has failed."""
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        if not self._state.options.is_test_mode:
            self._prepared(ConfigError("there is no tls.server.certPath, and tls.test.mode.enable=false"))
            return
        host = self._config.advertised_host
        self._workers.run(Background.ACCESS, lambda: self._make(host)).add_done_callback(
            lambda work: self._prepared(work.exception())
        )

    # ---

    @property
    def client(self) -> ssl.SSLContext | None:
        """The context for registration with name servers; None if that does not use TLS."""
        return self._state.client

    @property
    def expiries(self) -> tuple[Expiry, ...]:
        """The ends of the validity of the certificates that come from files."""
        return self._state.expiries

    def warn(self) -> None:
        """Log which certificates expire soon, once for each day that is left; to be called several times a day."""
        for expiry in self._state.expiries:
            days = expiry.days_left(self._clock.now_ms())
            if days >= WARN_DAYS or self._warned.get(expiry.setting) == (expiry, days):
                continue
            self._warned[expiry.setting] = (expiry, days)
            has_expired = days < 0
            log.log(
                logging.ERROR if has_expired else logging.WARNING,
                "tls_certificate_expired" if has_expired else "tls_certificate_expires",
                certificate=expiry.path,
                days=days,
                help="replace the files: the broker reads new ones while it runs",
            )

    def look(self) -> None:
        """Look at the files, in a thread, and read them again if one has changed."""
        if self._is_looking or not self._state.stamps:
            return
        self._is_looking = True
        self._workers.run(Background.ACCESS, self._look).add_done_callback(lambda work: self._looked(work.exception()))

    def _look(self) -> None:
        stamps = _stamps(self._state.stamps)
        if stamps in (self._state.stamps, self._failed):
            return
        self._failed = stamps
        state = self._read()
        if _stamps(stamps) != stamps:
            self._failed = None  # a file is being written; the next look tries again
            return
        self._state, self._failed, self._why = state, None, ""
        self.changes += 1
        self._tell("tls_changed")
        self.warn()

    def _looked(self, error: BaseException | None) -> None:
        self._is_looking = False
        if error is not None and str(error) != self._why:
            self._why = str(error)
            log.error("tls_not_changed", reason=self._why)

    def tell(self) -> None:
        """Log at the start which certificate and file are used, and what is doubtful about the settings."""
        if self._state.server is not None or self._state.options.file is not None or self._state.options.warnings:
            self._tell("tls")
            self.warn()

    def _tell(self, event: str) -> None:
        options = self._state.options
        log.info(event, mode=options.mode.value, certificate=options.server.certificate or None, file=options.file)
        for warning in options.warnings:
            log.warning("tls_doubtful", reason=warning)

    def _read(self) -> _State:
        """Read all files. Raises ConfigError."""
        options = tls_options.read(self._config)
        if options.mode is TlsMode.ENFORCING and not options.is_test_mode and not options.server.certificate:
            raise ConfigError(
                "tls.server.mode=enforcing and tls.test.mode.enable=false, but there is no tls.server.certPath: "
                "`duemq tls self-signed` makes a certificate"
            )
        server = None
        if options.mode is not TlsMode.DISABLED and (options.server.certificate or options.server.key):
            server = server_context(options)
        client = client_context(options.client) if options.to_name_servers else None
        paths = [*(options.server.paths if server else ()), *(options.client.paths if client else ())]
        if options.file is not None:
            paths.append(options.file)
        used = (("tls.server", server, options.server), ("tls.client", client, options.client))
        expiries = (_expiry(setting, identity) for setting, context, identity in used if context is not None)
        return _State(options, _stamps(paths), server, client, tuple(filter(None, expiries)))

    def _make(self, host: str) -> None:
        certificate, key = self._make_certificate(host)
        context = _new_server_context()
        # OpenSSL reads keys from files only; this one is on no disk.
        descriptor = os.memfd_create("duemq-tls")
        try:
            os.write(descriptor, certificate + key)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        self._made = context

    def _prepared(self, error: BaseException | None) -> None:
        if error is None:
            log.warning(
                "tls_test_certificate",
                help="clients cannot check it, so they cannot tell this broker from another: give the broker a "
                "certificate (duemq tls self-signed)",
            )
        elif isinstance(error, ImportError):
            log.error("tls_no_certificate", reason="the package cryptography is missing; set tls.server.certPath")
        else:
            log.error("tls_no_certificate", reason=str(error))
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()


def server_context(options: TlsOptions) -> ssl.SSLContext:
    """Return the context for clients' connections. Raises ConfigError."""
    context = _new_server_context()
    identity = options.server
    _load(context, identity, "tls.server")
    if identity.verifies:
        context.verify_mode = _VERIFY[options.needs_client]
        if context.verify_mode != ssl.CERT_NONE:
            _trust(context, identity, "tls.server")
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """Return the context for connections to name servers. Like RocketMQ's clients it does not compare the server's
    name: brokers are configured with addresses, which certificates rarely have. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED if identity.verifies else ssl.CERT_NONE
    if identity.certificate or identity.key:
        _load(context, identity, "tls.client")
    if identity.verifies:
        _trust(context, identity, "tls.client")
    return context


def _new_server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def _load(context: ssl.SSLContext, identity: Identity, prefix: str) -> None:
    for name, path in (("certPath", identity.certificate), ("keyPath", identity.key)):
        if not path:
            raise ConfigError(f"{prefix}.{name} is missing: a certificate and its key go together")
        _check_readable(f"{prefix}.{name}", path)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(identity.certificate, identity.key, lambda: identity.password)
    except ssl.SSLError as error:
        pair = f"{prefix}.certPath={identity.certificate} and {prefix}.keyPath={identity.key}"
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{pair}: the key is not that of the certificate") from None
        if _is_encrypted(identity.key):  # OpenSSL's reason depends on the cipher
            raise ConfigError(f"{pair}: the key cannot be read with {prefix}.keyPassword") from None
        raise ConfigError(f"{pair}: no certificate chain and key in PEM ({_words(error)})") from None
    except OSError as error:
        raise ConfigError(f"{prefix}.certPath={identity.certificate}: {error.strerror or error}") from None


def _trust(context: ssl.SSLContext, identity: Identity, prefix: str) -> None:
    if not identity.trust:
        context.load_default_certs()
        return
    _check_readable(f"{prefix}.trustCertPath", identity.trust)
    try:
        context.load_verify_locations(identity.trust)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{prefix}.trustCertPath={identity.trust}: no certificates in PEM ({_words(error)})"
        ) from None
    # A certificate in this file is trusted even if it is not an authority's: a self-signed one, for example.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN


def _expiry(setting: str, identity: Identity) -> Expiry | None:
    """Return the end of the validity of a certificate that OpenSSL has accepted; None if there is none, or if its dates
    cannot be read."""
    if not identity.certificate:
        return None
    try:
        until_ms = valid_until_ms(read_regular(identity.certificate, _CHAIN_BYTES).decode("latin-1"))
    except (ValueError, OSError) as error:
        log.warning("tls_doubtful", reason=f"{setting}.certPath={identity.certificate}: its dates are unknown: {error}")
        return None
    return Expiry(setting, identity.certificate, until_ms) if until_ms is not None else None


def _is_encrypted(path: str) -> bool:
    return b"ENCRYPTED" in read_regular(path, _KEY_BYTES)


def _check_readable(name: str, path: str) -> None:
    try:
        os.close(open_regular(path))
    except OSError as error:
        raise ConfigError(f"{name}={path}: {error.strerror}") from None


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


def _stamps(paths: Stamps | list[str]) -> Stamps:
    stamps: Stamps = {}
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            stamps[path] = None
        else:
            stamps[path] = (found.st_mtime_ns, found.st_size, found.st_ino)
    return stamps


def _make_certificate(host: str) -> tuple[bytes, bytes]:
    # Imported only when a client uses TLS and there is no certificate: the library takes 10 MB.
    from duemq.broker.tls import self_signed

    return self_signed.make([host, "localhost"], _TEST_DAYS, datetime.datetime.now(datetime.UTC))
