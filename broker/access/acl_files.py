"""The files of accounts: conf/plain_acl.yml and all .yml and .yaml files below conf/acl/, as RocketMQ 4.9.3 and later
have them.

The files are authoritative. Every few seconds their sizes and modification times are looked at, and all files are read
again if one has changed. Either all accounts are replaced, or, if a file is wrong, all stay as they are. The codes 50,
51 and 53 change a file and then read all of them again. All of this happens in one thread, so no change is lost to
another.

If several files have an account, the entry in the first one counts: the files of conf/acl/ in the order of their names,
then conf/plain_acl.yml. Files and directories whose names begin with a dot are left out (Kubernetes keeps editions of
mounted files in such directories), and so is tools.yml, which has the keys of mqadmin.

Source: apache/rocketmq acl/plain/PlainPermissionManager.java, srvutil/AclFileWatchService.java at 4.9.7.

Keeps invariant 30 of ARCHITECTURE.md.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import structlog

from duemq.broker.access import acl_file
from duemq.broker.access.accounts import Accounts, PlainAccount
from duemq.broker.access.acl_file import AclFile, Table
from duemq.broker.errors import AclFileError, ChangeRefused
from duemq.broker.workers import Background, Workers
from duemq.protocol.requests.bodies import DataVersion
from duemq.storage.files import Files
from duemq.storage.regular_files import read_regular

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 5.0
"""The interval between looks at the files, as in RocketMQ."""
_DEFAULT: Final = "plain_acl.yml"
_DIRECTORY: Final = "acl"
_TOOLS: Final = "tools.yml"
_FOR_OTHERS: Final = stat.S_IRWXO
_NEW_MODE: Final = 0o600

Stamps = dict[str, tuple[int, int, int]]
"""By file: modification time in ns, size, inode."""


@dataclass(frozen=True)
class _State:
    """All files as they were read."""

    stamps: Stamps
    accounts: Accounts
    versions: dict[str, DataVersion]
    warnings: list[str]


class AclFiles:
    """The accounts and their files. Belongs to the event loop; files are read and written by a thread."""

    def __init__(self, directory: str, files: Files, workers: Workers) -> None:
        """Read the files now: a broker without accounts does not start. `directory`: RocketMQ's conf. Raises
        AclFileError."""
        self.directory = os.path.abspath(directory)
        self.default_file = os.path.join(self.directory, _DEFAULT)
        self._files = files
        self._workers = workers
        self._failed: Stamps | None = None
        """The files that could not be read: they are not read again until one has changed."""
        self._why = ""
        """Why the files could not be read or looked at, so that this is logged only once."""
        self._is_looking = False
        self._on_change: list[Callable[[], None]] = []
        try:
            stamps = self._stamps()
            if not stamps:
                raise AclFileError(
                    f"aclEnable=true, but there is neither {self.default_file} nor a file in "
                    f"{os.path.join(self.directory, _DIRECTORY)}: docs/security.md shows such a file"
                )
            self._use(self._read(stamps), "accounts_read")
        except OSError as error:
            raise AclFileError(f"{error.filename}: {error.strerror}") from None
        self._announced = self.accounts
        """The accounts that listeners were last told about."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop after each change of the accounts."""
        self._on_change.append(callback)

    def _notify_listeners(self) -> None:
        if self._announced is not self.accounts:
            self._announced = self.accounts
            for callback in self._on_change:
                callback()

    @property
    def versions(self) -> dict[str, DataVersion]:
        """The version of each file, by its path."""
        return self._state.versions

    # --- looking

    def look(self) -> None:
        """Look at the files, in a thread, and read them again if one has changed."""
        if self._is_looking:
            return
        self._is_looking = True
        self._workers.run(Background.ACCESS, self._look).add_done_callback(lambda work: self._looked(work.exception()))

    def _look(self) -> None:
        stamps = self._stamps()
        if stamps in (self._state.stamps, self._failed):
            return
        self._failed = stamps
        state = self._read(stamps)
        if self._stamps() == stamps:
            self._use(state, "accounts_changed")
        else:
            self._failed = None  # a file is being written; the next look tries again

    def _looked(self, error: BaseException | None) -> None:
        self._is_looking = False
        if error is None:
            self._notify_listeners()
            return
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if why != self._why:
            self._why = why
            log.error("accounts_not_changed", reason=why)

    def _use(self, state: _State, event: str) -> None:
        self._state, self._failed, self._why = state, None, ""
        self.accounts = state.accounts
        """The accounts as they are now: the event loop sees either the old ones or the new ones."""
        self._log_state(event, state)

    def _log_state(self, event: str, state: _State) -> None:
        log.info(event, accounts=len(state.accounts), files=list(state.versions))
        for warning in state.warnings:
            log.warning("accounts_doubtful", reason=warning)

    def _stamps(self) -> Stamps:
        """Return the stamps of all files as they are now. Raises OSError."""
        stamps = {}
        for path in self._paths():
            found = os.stat(path)
            stamps[path] = (found.st_mtime_ns, found.st_size, found.st_ino)
        return stamps

    def _paths(self) -> Iterator[str]:
        return paths(self.directory)

    def _read(self, stamps: Stamps) -> _State:
        """Read all files. Raises AclFileError, OSError."""
        accounts: dict[str, PlainAccount] = {}
        white_lists = []
        versions, warnings = {}, []
        for path, (modified_ns, _, _) in stamps.items():
            content = parsed(path)
            if os.stat(path).st_mode & _FOR_OTHERS:
                warnings.append(f"{path} has secrets, but every user of this machine may read or write it: chmod o= it")
            warnings += [f"{path}, line {line}: {text}" for line, text in content.warnings]
            white_lists += content.white_lists
            for account, line in zip(content.accounts, content.lines, strict=True):
                if accounts.setdefault(account.access_key, account) is not account:
                    key = account.access_key
                    warnings.append(f"{path}, line {line}: another file has the account {key} too, and that one counts")
            version = content.version
            versions[path] = version if version.timestamp else DataVersion(modified_ns // 1_000_000, version.counter)
        return _State(stamps, Accounts(accounts.values(), white_lists), versions, warnings)

    # --- changing

    async def update_account(self, access_key: str, fields: Table) -> None:
        """Create an account, or change those of its entries that are in `fields`. Raises ChangeRefused, AclFileError,
        OSError."""
        await self._change(partial(self._update_account, access_key, fields))

    async def delete_account(self, access_key: str) -> None:
        """Remove an account. Raises the same errors as `update_account`."""
        await self._change(partial(self._delete_account, access_key))

    async def set_white_list(self, patterns: list[str], path: str) -> None:
        """Replace the white list of a file. Raises the same errors as `update_account`."""
        await self._change(partial(self._set_white_list, patterns, path))

    async def tables(self) -> list[Table]:
        """Return the files as tables, with secrets. Raises AclFileError, OSError."""
        return await self._workers.run(Background.ACCESS, lambda: [parsed(path).table for path in self._state.versions])

    async def _change(self, change: Callable[[], None]) -> None:
        def run() -> None:
            change()
            self._use(self._read(self._stamps()), "accounts_changed")

        await self._workers.run(Background.ACCESS, run)
        self._notify_listeners()

    def _update_account(self, access_key: str, fields: Table) -> None:
        path = next((path for path in self._paths() if _position(parsed(path).table, access_key) >= 0), None)
        table = parsed(path).table if path is not None else self._default_table()
        accounts = table.get(acl_file.ACCOUNTS) or []
        at = _position(table, access_key)
        account = accounts.pop(at) if at >= 0 else {}
        table[acl_file.ACCOUNTS] = [*accounts, {**account, "accessKey": access_key, **fields}]
        self._write(path or self.default_file, table)

    def _delete_account(self, access_key: str) -> None:
        for path in self._paths():
            table = parsed(path).table
            at = _position(table, access_key)
            if at >= 0:
                del table[acl_file.ACCOUNTS][at]
                self._write(path, table)
                return
        raise ChangeRefused("no file has the account")

    def _set_white_list(self, patterns: list[str], path: str) -> None:
        path = path or self.default_file
        if path == self.default_file:
            table = self._default_table()
        elif path in self._paths():
            table = parsed(path).table
        else:
            raise ChangeRefused("it is not an accounts file")
        table[acl_file.WHITE_LIST] = patterns
        self._write(path, table)

    def _default_table(self) -> Table:
        return parsed(self.default_file).table if os.path.exists(self.default_file) else {}

    def _write(self, path: str, table: Table) -> None:
        """Write a changed file, unless its new text would be invalid. Raises AclFileError, OSError."""
        versions = table.get(acl_file.VERSION) or [{}]
        counter = int(versions[0].get("counter") or 0) + 1
        table.pop(acl_file.VERSION, None)
        table[acl_file.VERSION] = [{"counter": counter, "timestamp": time.time_ns() // 1_000_000}]
        text = acl_file.dump(table)
        acl_file.parse(text, "the changed file")
        target = os.path.realpath(path)
        mode = os.stat(target).st_mode & 0o777 if os.path.exists(target) else _NEW_MODE
        self._files.write_whole(target, text, mode=mode)


def paths(directory: str) -> Iterator[str]:
    """Yield the paths of all files of accounts in RocketMQ's conf. Raises OSError."""
    root = os.path.join(directory, _DIRECTORY)
    # A directory that cannot be read must not look like one without accounts.
    for folder, folders, names in os.walk(root, onerror=_fail) if os.path.lexists(root) else ():
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith((".yml", ".yaml")) and not name.startswith(".") and name != _TOOLS:
                yield os.path.join(folder, name)
    default = os.path.join(directory, _DEFAULT)
    if os.path.exists(default):
        yield default


def _fail(error: OSError) -> NoReturn:
    raise error


def parsed(path: str) -> AclFile:
    """Read a file. Raises AclFileError, OSError."""
    return acl_file.parse(read_regular(path, acl_file.MAX_BYTES + 1), path)


def _position(table: Table, access_key: str) -> int:
    """Return the index of an account in a file's list, -1 if the list does not have it."""
    accounts: list[dict[str, Any]] = table.get(acl_file.ACCOUNTS) or []
    return next((at for at, account in enumerate(accounts) if str(account.get("accessKey")) == access_key), -1)
