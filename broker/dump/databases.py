"""Lines of the databases of users and policies, config/users and config/acls, without passwords. A copy is opened, so
that nothing is written beside the files of a running broker."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator

from duemq.broker.access.auth.model import Acl, User, word
from duemq.broker.access.auth.store import ACLS, USERS, RocksStore
from duemq.broker.errors import AuthStoreError
from duemq.protocol.dump import DamageLine, fields
from duemq.protocol.dump_output import shown_path

_MARK = "CURRENT"


def is_database(directory: str) -> bool:
    """Whether a directory is a RocksDB database."""
    return os.path.isfile(os.path.join(directory, _MARK))


def lines(directory: str) -> Iterator[str]:
    """Yield the kind of a database and a line for each user, or for each entry of a policy. Raises OSError, also if the
    package rocksdict is missing, which reads the database."""
    name = os.path.basename(os.path.abspath(directory))
    if name not in (USERS, ACLS):
        yield f"{shown_path(directory)}: a RocksDB database, which is neither {USERS} nor {ACLS}"
        return
    yield f"{shown_path(directory)}: {'users' if name == USERS else 'policies'}"
    if importlib.util.find_spec("rocksdict") is None:
        raise OSError("a RocksDB database, for which the package rocksdict is missing: pip install 'duemq[auth]'")
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(directory, os.path.join(copy, name))
        try:
            store = RocksStore(copy)
            try:
                users, acls = store.load()
            finally:
                store.close()
        except AuthStoreError as error:
            yield DamageLine(
                f"damaged: {str(error).replace(copy, shown_path(os.path.dirname(os.path.abspath(directory))))}"
            )
            return
    for user in users:
        yield _user(user)
    for acl in acls:
        yield from _entries(acl)


def _user(user: User) -> str:
    return fields(user=user.username, type=word(user.user_type), status=word(user.user_status))


def _entries(acl: Acl) -> Iterator[str]:
    for policy in acl.policies:
        for entry in policy.entries:
            yield fields(
                user=acl.subject.username,
                policy=word(policy.policy_type),
                decision=word(entry.decision),
                resource=entry.resource.key,
                actions=",".join(word(action) for action in entry.actions),
                sources=",".join(entry.sources) or None,
            )
