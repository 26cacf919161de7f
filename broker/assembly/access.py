"""Access control and the audit log. The modules of access control, and YAML with them, are imported only if it is on: a
start without them takes a tenth less time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duemq.broker.access.accounts import topic_of_message
from duemq.broker.access.guard import Authority, Guard
from duemq.broker.assembly.core import Core
from duemq.broker.assembly.tables import Tables
from duemq.broker.audit.log import AuditLog
from duemq.broker.audit.recorder import Recorder
from duemq.broker.errors import ConfigError
from duemq.broker.housekeeping import Chore
from duemq.broker.net.router import Router
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.workers import Workers
from duemq.storage.files import Files

if TYPE_CHECKING:
    from duemq.broker.access.acl_files import AclFiles
    from duemq.broker.access.auth.opening import Auth
    from duemq.broker.access.auth.store import AuthStore


@dataclass(frozen=True)
class AuditTrail:
    """The audit log, and what decides which requests are recorded in it."""

    log: AuditLog
    recorder: Recorder


def read_accounts(settings: LiveSettings, files: Files, workers: Workers) -> AclFiles | None:
    """Read the accounts if aclEnable is on; otherwise return None. Raises ConfigError."""
    if not settings.config.acl:
        return None
    from duemq.broker.access.acl_files import AclFiles

    directory = _plain_directory(settings)
    if directory is None:
        raise ConfigError(
            "aclEnable=true: say where the accounts are. With rocketmqHome=DIRECTORY, they are in "
            "DIRECTORY/conf/plain_acl.yml"
        )
    return AclFiles(directory, files, workers)


def open_users(core: Core, open_store: Callable[[str], AuthStore] | None) -> Auth | None:
    """Open the users and policies of ACL 2.0 if authenticationEnabled is on; otherwise return None. `open_store` opens
    them in a directory; the default is RocksStore. Raises AuthStoreError, AclFileError."""
    if not core.config.authentication:
        return None
    from duemq.broker.access.auth.opening import open_auth
    from duemq.broker.access.auth.store import RocksStore

    return open_auth(core.config, _plain_directory(core.settings), core.workers, open_store or RocksStore)


def _plain_directory(settings: LiveSettings) -> str | None:
    """Return the directory of plain_acl.yml, None if no setting says where it is."""
    home, file = settings.config.rocketmq_home, settings.origin.file
    if home:
        return os.path.join(home, "conf")
    return os.path.dirname(os.path.abspath(file)) if file is not None else None


def make_audit(core: Core, tables: Tables, acl_files: AclFiles | None, auth: Auth | None) -> AuditTrail | None:
    """Return the audit log if auditLogEnable is on; otherwise return None. The topics and groups that clients create
    are recorded, too."""
    if not core.config.audit:
        return None

    def is_account(name: str) -> bool:
        return (acl_files is not None and name in acl_files.accounts.by_key) or (
            auth is not None and name in auth.users.by_name
        )

    log = AuditLog(core.settings, core.config.audit_path, core.workers)
    recorder = Recorder(log, core.real_clock, is_account)
    tables.topics.on_created(recorder.created)
    tables.groups.on_created(recorder.created)
    return AuditTrail(log, recorder)


def make_guard(core: Core, acl_files: AclFiles | None, auth: Auth | None) -> Guard | None:
    """Return the guard, which decides by the accounts if there are any, and otherwise by the users; None without access
    control."""
    authority: Authority | None = auth.authority if auth is not None else None
    if acl_files is not None:
        from duemq.broker.access.plain import PlainAuthority

        authority = PlainAuthority(acl_files)
    if authority is None:
        return None

    def topic_of_record(physical_offset: int) -> str | None:
        message = core.store.named_message_at(physical_offset)
        return topic_of_message(message) if message is not None else None

    return Guard(authority, topic_of_record, core.reads, core.limits, core.loop.time)


def register_access(
    core: Core, router: Router, acl_files: AclFiles | None, auth: Auth | None, on_change: Callable[[], None]
) -> list[Chore]:
    """Add the handlers of accounts and users to a router. `on_change`: called when accounts, users or policies have
    changed. Return the chores."""
    chores = []
    if acl_files is not None:
        from duemq.broker.access.acl_files import LOOK_SECONDS
        from duemq.broker.access.handlers import AclHandlers

        AclHandlers(acl_files, core.config.cluster_name, core.config.broker_name, core.address).register(router)
        chores.append(Chore("accounts", lambda: LOOK_SECONDS, acl_files.look))
        acl_files.on_change(on_change)
    if auth is not None:
        from duemq.broker.access.auth.handlers import AuthHandlers

        AuthHandlers(auth.users).register(router)
        router.add_clients(auth.authority)
        auth.users.on_change(on_change)
    return chores
