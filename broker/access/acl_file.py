"""plain_acl.yml: RocketMQ's file of accounts and white lists.

    globalWhiteRemoteAddresses:          patterns of addresses that need no account, see `addresses`
    - 10.10.103.*
    accounts:
    - accessKey: RocketMQ                more than 6 characters, like secretKey
      secretKey: 12345678
      whiteRemoteAddress: 192.168.0.*    from there the account needs no signature
      admin: false
      defaultTopicPerm: DENY             DENY, PUB, SUB, PUB|SUB
      defaultGroupPerm: SUB
      topicPerms:
      - topicA=PUB|SUB
      groupPerms:
      - groupB=DENY
      role: operate                      duemq's own: none, look or operate; by default look, and administer for admins
    dataVersion:                         written by RocketMQ's brokers and by duemq with each change
    - counter: 1
      timestamp: 1700000000000

It is read by PyYAML's safe loader, which creates nothing but texts, numbers, lists and tables. Aliases are refused,
since they can make a small file large. Errors name the line; they may repeat names, but never the value of a secret.

Source: apache/rocketmq acl/plain/PlainPermissionManager.java, acl/common/{Permission,AclConstants}.java at 4.9.7.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import yaml

from duemq.broker.access.accounts import PlainAccount
from duemq.broker.access.addresses import AddressPattern
from duemq.broker.access.permission import PlainAction, Role
from duemq.broker.errors import AclFileError
from duemq.protocol.requests.bodies import DataVersion
from duemq.protocol.requests.signature import SecretKey
from duemq.protocol.topics import RETRY_PREFIX

MAX_BYTES: Final = 16 * 1024 * 1024
"""Size of the largest file, in bytes: some 50,000 accounts."""
SHORTEST_KEY: Final = 7
"""Shortest access key and secret key, in characters."""
_MAX_TOLD: Final = 100

WHITE_LIST: Final = "globalWhiteRemoteAddresses"
ACCOUNTS: Final = "accounts"
VERSION: Final = "dataVersion"
_SECTIONS: Final = (WHITE_LIST, ACCOUNTS, VERSION)
_FIELDS: Final = (
    "accessKey",
    "secretKey",
    "whiteRemoteAddress",
    "admin",
    "defaultTopicPerm",
    "defaultGroupPerm",
    "topicPerms",
    "groupPerms",
    "role",
)
PERMISSIONS: Final = {
    "DENY": PlainAction.DENY,
    "PUB": PlainAction.PUB,
    "SUB": PlainAction.SUB,
    "PUB|SUB": PlainAction.ANY,
    "SUB|PUB": PlainAction.ANY,
}
_ROLES: Final = {"none": Role.NONE, "look": Role.LOOK, "operate": Role.OPERATE}
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader; where PyYAML has it, its version in C, which is ten times as fast."""
_TEXT: Final = "tag:yaml.org,2002:str"
_NUMBER: Final = "tag:yaml.org,2002:int"
_TRUTH: Final = "tag:yaml.org,2002:bool"
_NULL: Final = "tag:yaml.org,2002:null"
_TRUE: Final = ("true", "yes", "on")
_OTHER_BREAKS: Final = re.compile("[\x85\u2028\u2029]")
_PLAIN_NAME: Final = re.compile("[A-Za-z]{1,40}")

Table = dict[str, Any]
"""A file as tables, lists, texts and numbers: what is written back after a change."""


class Warned(NamedTuple):
    """Something in a file that has no effect, or not the effect that its author may expect."""

    line: int
    text: str


@dataclass(frozen=True)
class AclFile:
    """The content of a file. `lines`: the line of each account."""

    white_lists: list[AddressPattern]
    accounts: list[PlainAccount]
    lines: list[int]
    version: DataVersion
    table: Table
    warnings: list[Warned]


def parse(text: bytes, source: str) -> AclFile:
    """Read a file; errors refer to it as `source`. Raises AclFileError."""
    return _Reader(source).read(text)


def dump(table: Table) -> bytes:
    """Return a file's text, in the form that RocketMQ's brokers write."""
    form: dict[str, Any] = {"default_flow_style": False, "sort_keys": False, "width": 2**31 - 1}
    text: str = yaml.safe_dump(table, allow_unicode=True, **form)
    if _OTHER_BREAKS.search(text):  # the library would read these characters back as other line breaks
        text = yaml.safe_dump(table, **form)
    return text.encode()


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._seen: set[int] = set()
        self._warnings: list[Warned] = []

    def read(self, text: bytes) -> AclFile:
        if len(text) > MAX_BYTES:
            raise AclFileError(f"{self._source} has more than {MAX_BYTES} bytes, which is the maximum")
        loader = None
        try:
            loader = _Loader(text.decode())
            root = loader.get_single_node()
            if root is None or root.tag == _NULL:
                return AclFile(white_lists=[], accounts=[], lines=[], version=DataVersion(), table={}, warnings=[])
            return self._content(root)
        except UnicodeDecodeError as error:
            line = text.count(b"\n", 0, error.start) + 1
            raise AclFileError(f"{self._source}, line {line}: this is not UTF-8") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f", line {mark.line + 1}" if mark is not None else ""
            # The problem in the library's words, without the text of the line, which may have a secret in it.
            raise AclFileError(f"{self._source}{where}: {_problem(error)}") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise AclFileError(f"{self._source}: this is not YAML ({type(error).__name__})") from None
        finally:
            if loader is not None:
                loader.dispose()

    def _content(self, root: yaml.Node) -> AclFile:
        sections = dict(self._entries(root, "the file", _SECTIONS))
        white_lists = [self._pattern(node) for node in self._items(sections.get(WHITE_LIST), WHITE_LIST)]
        accounts, lines = [], []
        known: set[str] = set()
        for node in self._items(sections.get(ACCOUNTS), ACCOUNTS):
            account = self._account(node)
            if account.access_key in known:
                self._warn(node, f"the account {account.access_key} is listed twice, the first one counts")
                continue
            known.add(account.access_key)
            accounts.append(account)
            lines.append(node.start_mark.line + 1)
        versions = [self._version(node) for node in self._items(sections.get(VERSION), VERSION)]
        version = versions[0] if versions else DataVersion()
        self._seen.clear()
        return AclFile(
            white_lists=white_lists,
            accounts=accounts,
            lines=lines,
            version=version,
            table=self._plain(root),
            warnings=self._warnings,
        )

    # --- accounts

    def _account(self, node: yaml.Node) -> PlainAccount:
        fields = dict(self._entries(node, "an account", _FIELDS))
        access_key, secret_key = (self._text(fields.get(name), name) for name in ("accessKey", "secretKey"))
        if access_key is None or secret_key is None or min(len(access_key), len(secret_key)) < SHORTEST_KEY:
            self._refuse(node, f"accessKey and secretKey must have {SHORTEST_KEY} characters or more")
        is_admin = self._truth(fields.get("admin"), "admin")
        role_name = self._text(fields.get("role"), "role")
        if role_name is not None and role_name not in _ROLES:
            self._refuse(fields["role"], f"role must be one of {', '.join(_ROLES)}; admin: true makes an administrator")
        role = _ROLES[role_name] if role_name is not None else Role.LOOK
        permissions: dict[str, int] = {}
        for name, prefix in (("groupPerms", RETRY_PREFIX), ("topicPerms", "")):
            for item in self._items(fields.get(name), name):
                resource, action = self._resource(item, name)
                permissions[f"{prefix}{resource}"] = action
        white_list = fields.get("whiteRemoteAddress")
        return PlainAccount(
            access_key=access_key,
            key=SecretKey(secret_key),
            white_list=self._pattern(white_list) if white_list is not None else AddressPattern(""),
            is_admin=is_admin,
            role=Role.ADMINISTER if is_admin else role,
            default_topic=self._default(fields, "defaultTopicPerm"),
            default_group=self._default(fields, "defaultGroupPerm"),
            permissions=permissions or None,
        )

    def _default(self, fields: dict[str, yaml.Node], name: str) -> int:
        text = self._text(fields.get(name), name)
        return int(self._action(text, fields[name], name)) if text is not None else int(PlainAction.DENY)

    def _resource(self, node: yaml.Node, name: str) -> tuple[str, int]:
        parts = [part for part in (self._text(node, name) or "").split("=") if part]
        if len(parts) != 2:
            self._refuse(node, f"write an entry of {name} as NAME=PUB, NAME=SUB, NAME=PUB|SUB or NAME=DENY")
        return parts[0].strip(), int(self._action(parts[1], node, name))

    def _action(self, text: str, node: yaml.Node, name: str) -> PlainAction:
        action = PERMISSIONS.get(text.strip())
        if action is None:
            self._warn(node, f"{name} has a permission that is not one of {', '.join(PERMISSIONS)}, and counts as DENY")
        return action or PlainAction.DENY

    # --- values

    def _pattern(self, node: yaml.Node) -> AddressPattern:
        try:
            return AddressPattern(self._text(node, "a white list") or "")
        except ValueError:
            self._refuse(node, "this is not an address pattern")

    def _version(self, node: yaml.Node) -> DataVersion:
        numbers = {}
        for key, value in self._entries(node, VERSION, ("counter", "timestamp", "stateVersion")):
            if value.tag != _NUMBER or not value.value.isdecimal() or len(value.value) > 18:
                self._refuse(value, f"{key} must be a number")
            numbers[key] = int(value.value)
        return DataVersion(numbers.get("timestamp", 0), numbers.get("counter", 0), numbers.get("stateVersion", 0))

    def _truth(self, node: yaml.Node | None, name: str) -> bool:
        text = self._text(node, name)
        if node is None or text is None:
            return False
        if node.tag != _TRUTH and text.lower() not in ("true", "false"):
            self._refuse(node, f"{name} must be true or false")
        return text.lower() in _TRUE

    def _text(self, node: yaml.Node | None, name: str) -> str | None:
        """Return a value as text, None for null. A number counts as the text that is written, if Java would read it the
        same way."""
        if node is None or node.tag == _NULL:
            return None
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, f"{name} must be a text")
        if node.tag not in (_TEXT, _TRUTH) and not (node.tag == _NUMBER and str(_int(node.value)) == node.value):
            self._refuse(node, f"put the value of {name} into quotes: without them it is not read as text")
        return str(node.value)

    def _items(self, node: yaml.Node | None, name: str) -> list[yaml.Node]:
        if node is None or node.tag == _NULL:
            return []
        if not isinstance(node, yaml.SequenceNode):
            self._refuse(node, f"{name} must be a list, each entry a line that begins with -")
        self._once(node)
        items: list[yaml.Node] = node.value
        return items

    def _entries(self, node: yaml.Node, what: str, names: tuple[str, ...]) -> Iterator[tuple[str, yaml.Node]]:
        """Yield the entries of a table that have one of these names."""
        if not isinstance(node, yaml.MappingNode):
            self._refuse(node, f"{what} must be a table, with {names[0]} and so on")
        self._once(node)
        found = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, f"{what} has a name that is not text")
            if key.value in found:
                self._refuse(key, f"{_told(key.value)} occurs twice")
            found.add(key.value)
            if key.value in names:
                yield key.value, value
            else:
                self._warn(key, f"{what} has no {_told(key.value)}, only {', '.join(names)}")

    def _plain(self, node: yaml.Node) -> Any:
        """Return the value of a node as YAML reads it."""
        self._once(node)
        if isinstance(node, yaml.MappingNode):
            return {key.value: self._plain(value) for key, value in node.value}
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item) for item in node.value]
        if node.tag == _NULL:
            return None
        if node.tag == _TRUTH:
            return node.value.lower() in _TRUE
        return _int(node.value) if node.tag == _NUMBER and str(_int(node.value)) == node.value else node.value

    def _once(self, node: yaml.Node) -> None:
        """Refuse a node that occurs again, through an alias."""
        if id(node) in self._seen:
            self._refuse(node, "aliases (*name) are not supported, write it out")
        self._seen.add(id(node))

    def _warn(self, node: yaml.Node, text: str) -> None:
        self._warnings.append(Warned(node.start_mark.line + 1, text))

    def _refuse(self, node: yaml.Node, why: str) -> NoReturn:
        raise AclFileError(f"{self._source}, line {node.start_mark.line + 1}: {why}")


def _problem(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong with a file's form. Of the file, the library repeats at most a character, or the name of a
    tag or an alias."""
    return " ".join(part for part in (error.context, error.problem) if part)[:_MAX_TOLD] or "this is not YAML"


def _int(text: str) -> int | None:
    """Return a number that is written in the usual way, None for others (0x1f, 0o17, 1_000 and so on)."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= 18 else None


def _told(name: str) -> str:
    """Return a name for a message, or "such a name": if the blank behind a colon is missing, the value, which may be a
    secret, is part of the name."""
    return name if _PLAIN_NAME.fullmatch(name) else "such a name"
