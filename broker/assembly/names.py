"""Registration with other name servers. The embedded one is among the tables."""

from __future__ import annotations

from duemq.broker.assembly.core import Core
from duemq.broker.names.registration import Connect, Registrar
from duemq.broker.settings.config import credentials_of, parse_addresses
from duemq.broker.tables.topics import Topics
from duemq.protocol.requests.headers import BrokerIdentity
from duemq.protocol.requests.signature import Signer


def make_registrar(core: Core, topics: Topics, connect: Connect) -> Registrar | None:
    """Return what keeps the broker registered with the name servers of namesrvAddr, and registers it again when topics
    change; None without that setting."""
    config = core.config
    if not config.nameserver_addresses:
        return None
    keys = credentials_of("innerClientAuthenticationCredentials", config.inner_credentials, ("accessKey", "secretKey"))
    registrar = Registrar(
        BrokerIdentity(config.broker_name, core.address, config.cluster_name, config.broker_id),
        parse_addresses(config.nameserver_addresses),
        topics,
        period=config.register_period_ms / 1000,
        connect=connect,
        signer=Signer(*keys) if keys is not None else None,
    )
    topics.on_change(registrar.register_now)
    return registrar
