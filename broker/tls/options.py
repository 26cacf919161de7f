"""The settings of TLS, by RocketMQ's names.

In RocketMQ they are system properties of the JVM, and all but `tls.server.mode`, `tls.enable` and `tls.config.file` may
be in the file that `tls.config.file` names, by default /etc/rocketmq/tls.properties. That file overrides the system
properties. Here they are settings of the broker, which the file overrides in the same way.

Unlike in RocketMQ, a certificate that is set is used. RocketMQ ignores it unless tls.test.mode.enable=false is set too,
since its default, true, stands for a certificate made at each start.

Source: apache/rocketmq remoting/netty/TlsSystemConfig.java, TlsHelper.java at 4.9.7 and 5.3.3, which are alike.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Final

from duemq.broker.errors import ConfigError
from duemq.broker.net.tls import TlsMode
from duemq.broker.settings import broker_conf
from duemq.broker.settings.config import DEFAULT_TLS_FILE, FIELDS, BrokerConfig, parse_value
from duemq.storage.regular_files import open_regular

_OUTSIDE: Final = frozenset({"tls.server.mode", "tls.enable", "tls.config.file"})
"""Settings that have no effect in the file, as in RocketMQ."""
_IN_FILE: Final = frozenset(name for name in FIELDS if name.startswith("tls.")) - _OUTSIDE


@dataclass(frozen=True)
class Identity:
    """A certificate with its key, and the certificates that are trusted. Paths are empty if not set."""

    certificate: str
    key: str
    password: str = dataclasses.field(repr=False)
    trust: str
    verifies: bool
    """Whether the peer's certificate is checked."""

    @property
    def paths(self) -> list[str]:
        """The paths that are set."""
        return [path for path in (self.certificate, self.key, self.trust) if path]


@dataclass(frozen=True)
class TlsOptions:
    """All settings of TLS. `needs_client`: none, optional or require. `file`: the file that some of them come from,
    None if there is none. `warnings`: about settings whose effect may not be what their author expects."""

    mode: TlsMode
    is_test_mode: bool
    needs_client: str
    server: Identity
    client: Identity
    to_name_servers: bool
    """Whether registration with external name servers uses TLS."""
    file: str | None
    warnings: tuple[str, ...]


def read(config: BrokerConfig) -> TlsOptions:
    """Return the settings, with those of `tls.config.file`. Raises ConfigError."""
    file, warnings = config.tls_config_file or None, list[str]()
    if file == DEFAULT_TLS_FILE and not os.access(file, os.R_OK):
        file = None
    if file is not None:
        config, warnings = _with_file(config, file)
    options = TlsOptions(
        mode=TlsMode(config.tls_mode),
        is_test_mode=config.tls_test_mode,
        needs_client=config.tls_need_client_auth,
        server=Identity(
            config.tls_server_certificate,
            config.tls_server_key,
            config.tls_server_key_password,
            config.tls_server_trust,
            config.tls_auth_client,
        ),
        client=Identity(
            config.tls_client_certificate,
            config.tls_client_key,
            config.tls_client_key_password,
            config.tls_client_trust,
            config.tls_auth_server,
        ),
        to_name_servers=bool(config.nameserver_addresses)
        and (
            config.tls_enable == "true" or (config.tls_enable == "auto" and config.tls_mode == TlsMode.ENFORCING.value)
        ),
        file=file,
        warnings=(),
    )
    return dataclasses.replace(options, warnings=(*warnings, *_doubts(options)))


def _with_file(config: BrokerConfig, file: str) -> tuple[BrokerConfig, list[str]]:
    """Return the settings with those of a file, and warnings about its properties that have no effect. Raises
    ConfigError."""
    try:
        os.close(open_regular(file))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    values = broker_conf.read(file)
    known = {name: text for name, text in values.items() if name in _IN_FILE}
    warnings = [
        f"{file}: {name} has no effect there; set it for the broker itself"
        if name in _OUTSIDE
        else f"{file}: there is no property {name}"
        for name in sorted(set(values) - set(known))
    ]
    try:
        changes: dict[str, Any] = {FIELDS[name].name: parse_value(name, text) for name, text in known.items()}
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return dataclasses.replace(config, **changes), warnings


def _doubts(options: TlsOptions) -> list[str]:
    server, doubts = options.server, []
    if options.needs_client != "none" and not server.verifies:
        doubts.append(
            f"tls.server.need.client.auth={options.needs_client} without tls.server.authClient=true: certificates of "
            "clients are not checked, and anyone is let in"
        )
    if server.verifies and options.needs_client == "none":
        doubts.append(
            "tls.server.authClient=true without tls.server.need.client.auth=require: clients need no certificate"
        )
    if options.to_name_servers and not options.client.verifies:
        doubts.append(
            "tls.client.authServer is not true: the name servers' certificates are not checked, so anyone on the way "
            "may pose as them"
        )
    return doubts
