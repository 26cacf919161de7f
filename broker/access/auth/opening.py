"""Opens ACL 2.0 of one broker as its settings say: the users in the store, and those that the settings create."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import structlog

from duemq.broker.access.auth import migration
from duemq.broker.access.auth.authority import AuthAuthority
from duemq.broker.access.auth.model import User, UserType
from duemq.broker.access.auth.store import AuthStore
from duemq.broker.access.auth.users import Authorization, Users
from duemq.broker.settings.config import BrokerConfig, codes_of, credentials_of, free_codes
from duemq.broker.workers import Workers
from duemq.storage import file_names

log = structlog.get_logger(__name__)

_STATEFUL = "StatefulAuthenticationStrategy"


class Auth(NamedTuple):
    """The users, and the authority that authenticates requests by them."""

    users: Users
    authority: AuthAuthority


def open_auth(
    config: BrokerConfig,
    plain_directory: str | None,
    workers: Workers,
    open_store: Callable[[str], AuthStore],
) -> Auth:
    """Open the users of a broker, and create those that its settings ask for. `plain_directory`: the directory of
    plain_acl.yml, None if no setting says where it is. `open_store` opens the users and policies in a directory. Raises
    AuthStoreError, AclFileError."""
    store = open_store(os.path.join(config.store_root, file_names.CONFIG))
    try:
        return _opened(config, plain_directory, workers, store)
    except BaseException:
        store.close()
        raise


def _opened(config: BrokerConfig, plain_directory: str | None, workers: Workers, store: AuthStore) -> Auth:
    free = free_codes(config)
    no_authorization = codes_of("authorizationWhitelist", config.authorization_whitelist)
    users = Users(store, workers, Authorization(config.cluster_name, no_authorization, is_on=config.authorization))
    made = [
        User(password=secret, user_type=UserType.SUPER, username=name)
        for name, secret in filter(
            None,
            (
                credentials_of("initAuthenticationUser", config.init_user, ("username", "password")),
                credentials_of(
                    "innerClientAuthenticationCredentials", config.inner_credentials, ("accessKey", "secretKey")
                ),
            ),
        )
    ]
    added = users.add_at_start(made, ())
    if config.migrate_auth and plain_directory is not None:
        added += users.add_at_start(*migration.read(plain_directory))
    if added:
        log.info("users_made", users=added)
    if not users.supers:
        log.warning("no_super_user", help="set initAuthenticationUser to create one")
    if free:
        log.info("codes_without_user", codes=sorted(free))
    return Auth(users, AuthAuthority(users, free, is_stateful=config.authentication_strategy.endswith(_STATEFUL)))
