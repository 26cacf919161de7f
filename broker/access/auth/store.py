"""Where users and policies are kept: two RocksDB databases below the store's config directory, config/users and
config/acls. They have the form of RocketMQ 5.3, which can open them too.

Each has the column families that RocketMQ's have, `default`, `kvDataVersion` and `forbidden`, and uses the first.
`model` has the keys and values. Each write is synced. Tables are written in format 5 of RocksDB, which RocketMQ's
version reads. A lock of RocksDB keeps a second process out.

Both are read completely at the start; after that, their content is in memory. Damage stops the start: users and denials
must not be missing unnoticed. RocksDB itself would stop reading early at damage in a table file, and would drop the
rest of a damaged log. Here only an unfinished write at the end of the log is dropped, which a crash may leave.

Source: apache/rocketmq common/config/{ConfigRocksDBStorage,ConfigHelper}.java,
auth/*/provider/Local*MetadataProvider.java at 5.3.3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec
import structlog

from duemq.broker.access.auth.model import USER_PREFIX, Acl, User
from duemq.broker.errors import AuthStoreError
from duemq.storage import file_names

if TYPE_CHECKING:
    from rocksdict import AccessType, Options, Rdict, WriteOptions

USERS: Final = os.path.basename(file_names.USERS)
ACLS: Final = os.path.basename(file_names.ACLS)
_FAMILIES: Final = ("default", "kvDataVersion", "forbidden")
_TABLE_FORMAT: Final = 5
_MEMORY_BYTES: Final = 1024 * 1024
"""How many bytes of changes may be only in memory and in the log, before RocksDB writes them into a table file."""
_MODE: Final = 0o700
_DAMAGED: Final = "Corruption: "
_NO_SPACE: Final = "No space left on device"
_LOCKED: Final = "/LOCK: "

log = structlog.get_logger(__name__)

T = TypeVar("T")


class AuthStore(Protocol):
    """Keeps users and policies. Changes wait for the disk, and are durable when they return. Only one may be made at a
    time, in any thread. They raise AuthStoreError."""

    def load(self) -> tuple[list[User], list[Acl]]:
        """Return all users, and all policies, even of users that do not exist. Raises AuthStoreError."""

    def put_user(self, user: User) -> None:
        """Write a user."""

    def delete_user(self, username: str) -> None:
        """Remove a user, and before that its policies, so that a later user of the same name does not get them."""

    def put_acl(self, acl: Acl) -> None:
        """Write the policies of a user."""

    def delete_acl(self, username: str) -> None:
        """Remove the policies of a user."""

    def close(self) -> None:
        """Close the store."""


class RocksStore:
    """The databases in a directory, `config` of the store. Implements AuthStore."""

    def __init__(self, directory: str) -> None:
        """Open the databases, and create those that do not exist. Raises AuthStoreError."""
        self._users = _Database(os.path.join(directory, USERS))
        try:
            self._acls = _Database(os.path.join(directory, ACLS))
        except BaseException:
            self._users.close()
            raise

    def load(self) -> tuple[list[User], list[Acl]]:
        """Return all users, and all policies, even of users that do not exist. Raises AuthStoreError."""
        return (
            [_decoded(key, value, User, USERS) for key, value in self._users.items()],
            [_decoded(key, value, Acl, ACLS) for key, value in self._acls.items()],
        )

    def put_user(self, user: User) -> None:
        """Write a user, durably. Raises AuthStoreError."""
        self._users.put(user.username, user)

    def delete_user(self, username: str) -> None:
        """Remove a user, durably, and before that its policies, so that a later user of the same name does not get
        them. Raises AuthStoreError."""
        self.delete_acl(username)
        self._users.delete(username)

    def put_acl(self, acl: Acl) -> None:
        """Write the policies of a user, durably. Raises AuthStoreError."""
        self._acls.put(f"{USER_PREFIX}{acl.subject.username}", acl)

    def delete_acl(self, username: str) -> None:
        """Remove the policies of a user, durably. Raises AuthStoreError."""
        self._acls.delete(f"{USER_PREFIX}{username}")

    def close(self) -> None:
        """Close both databases."""
        self._users.close()
        self._acls.close()


class _Database:
    """One database. On a full disk it is opened for reading only, so that the broker starts, and opened again before
    the next change. It is also opened again after a change for which there was no space: RocksDB itself would continue
    to refuse changes for some seconds."""

    def __init__(self, path: str) -> None:
        """Raises AuthStoreError."""
        try:
            import rocksdict
        except ModuleNotFoundError:
            raise AuthStoreError(
                "authenticationEnabled=true: the users are in RocksDB, for which the package rocksdict is missing; "
                "install duemq[auth]"
            ) from None
        self._library = rocksdict
        self._path = path
        self._options = _options(rocksdict)
        self._synced: WriteOptions = rocksdict.WriteOptions()
        self._synced.sync = True
        self._opened: Rdict | None = None
        self._has_no_space = False
        """Whether the disk was full, so that the database has to be opened again before the next change."""
        self._open()

    def items(self) -> Iterator[tuple[object, object]]:
        """Yield all keys and values. Raises AuthStoreError, possibly only at the end, if a part cannot be read."""
        found = self._database().iter()
        found.seek_to_first()
        while found.valid():
            yield found.key(), found.value()
            found.next()
        _done(found.status, f"{self._path} cannot be read")

    def put(self, key: str, value: User | Acl) -> None:
        """Write a value, durably. Raises AuthStoreError."""
        self._change(lambda: self._database().put(key.encode(), msgspec.json.encode(value), write_opt=self._synced))

    def delete(self, key: str) -> None:
        """Remove a value, durably. Raises AuthStoreError."""
        self._change(lambda: self._database().delete(key.encode(), write_opt=self._synced))

    def close(self) -> None:
        """Close the database."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            try:
                opened.close()
            except Exception as error:  # it is closed anyway; changes that could not be written were refused
                log.warning("users_not_closed_cleanly", path=self._path, reason=str(error))

    def _change(self, work: Callable[[], None]) -> None:
        if self._has_no_space or self._opened is None:
            self.close()
            self._open()
        if self._has_no_space:
            raise AuthStoreError(f"{self._path} cannot be written: there is no space left")
        try:
            _done(work, f"{self._path} cannot be written")
        except AuthStoreError as error:
            self._has_no_space = _NO_SPACE in str(error)
            raise

    def _database(self) -> Rdict:
        assert self._opened is not None, "changes open it again"
        return self._opened

    def _open(self) -> None:
        self._has_no_space = False
        try:
            self._opened = self._rdict()
        except AuthStoreError as error:
            if _NO_SPACE not in str(error) or not os.path.exists(os.path.join(self._path, "CURRENT")):
                raise
            self._opened = self._rdict(self._library.AccessType.read_only())
            self._has_no_space = True

    def _rdict(self, access: AccessType | None = None) -> Rdict:
        def work() -> Rdict:
            os.makedirs(self._path, mode=_MODE, exist_ok=True)
            families = {name: self._options() for name in _FAMILIES}
            how = access if access is not None else self._library.AccessType.read_write()
            opened: Rdict = self._library.Rdict(self._path, self._options(), families, access_type=how)
            return opened

        return _done(work, f"{self._path} cannot be opened")


def _options(library: ModuleType) -> Callable[[], Options]:
    def make() -> Options:
        options: Options = library.Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_compression_type(library.DBCompressionType.none())
        options.set_wal_recovery_mode(library.DBRecoveryMode.tolerate_corrupted_tail_records())
        options.set_write_buffer_size(_MEMORY_BYTES)
        options.set_keep_log_file_num(1)
        tables = library.BlockBasedOptions()
        tables.set_format_version(_TABLE_FORMAT)
        options.set_block_based_table_factory(tables)
        return options

    return make


def _decoded(key: object, value: object, kind: type[T], database: str) -> T:
    """Return a decoded value. Raises AuthStoreError, which does not repeat the value."""
    assert isinstance(key, bytes)
    assert isinstance(value, bytes)
    name = key.decode(errors="replace")
    try:
        decoded = msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise AuthStoreError(
            f"{file_names.CONFIG}/{database}: the value of {name!r} is not one that RocketMQ 5.3 writes"
        ) from None
    owner = decoded.username if isinstance(decoded, User) else f"{USER_PREFIX}{decoded.subject.username}"  # type: ignore[attr-defined]
    if owner != name:
        raise AuthStoreError(f"{file_names.CONFIG}/{database}: the key {name!r} holds the value of a different key")
    return decoded


def _done(work: Callable[[], T], why: str) -> T:
    """Call the library. `why`: the beginning of the error's text. Raises AuthStoreError."""
    try:
        return work()
    except OSError as error:
        raise AuthStoreError(f"{why}: {error.strerror}") from None
    except Exception as error:  # the library's errors have no class of their own
        if _LOCKED in str(error):
            why = f"{why}: another broker is running on this store"
        if _DAMAGED in str(error):
            why = (
                f"{why}: it is damaged. Put a copy of the whole directory back. To start over without its users and "
                "policies, move it away: the next start creates the user of initAuthenticationUser"
            )
        raise AuthStoreError(f"{why} ({error})") from None
