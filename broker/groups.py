"""Consumer groups as an administrator sees them: config/subscriptionGroup.json."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import msgspec
import structlog

from broker.persister import Persister, SavedTable
from broker.tables import Fields, section, typed
from protocol.bodies import DataVersion, SubscriptionGroupConfig
from storage.clock import Clock
from storage.config_file import ConfigFile

log = structlog.get_logger(__name__)

_OWN: Final = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_PULL",
)
MAX_GROUP_LENGTH: Final = 255
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_FIELDS: Final = {field.encode_name for field in msgspec.structs.fields(SubscriptionGroupConfig)}


class Groups:
    """All consumer groups."""

    def __init__(self, file: ConfigFile, clock: Clock, persister: Persister, *, auto_create: bool) -> None:
        self._file = file
        self._clock = clock
        self.auto_create = auto_create
        """Whether a group that is not known is made."""
        self._saved = SavedTable(persister, file, self.to_json)
        self._extra: dict[str, Any] = {}
        self._unknown: dict[str, dict[str, Any]] = {}
        self.table: dict[str, SubscriptionGroupConfig] = {}
        self.version = DataVersion()

    def load(self) -> None:
        """Read the table; nothing is changed. Raises StoreFormatError, OSError."""
        data = self._file.read()
        self.version = typed(self._file, data.pop("dataVersion", None) or {}, DataVersion, "dataVersion")
        for name, fields in section(self._file, data, "subscriptionGroupTable", Fields).items():
            self.table[name] = typed(
                self._file, {**fields, "groupName": name}, SubscriptionGroupConfig, f"group {name}"
            )
            self._unknown[name] = {key: value for key, value in fields.items() if key not in _FIELDS}
        self._extra = data

    def begin(self) -> None:
        """Add RocketMQ's own groups that are missing. Raises OSError."""
        for name in _OWN:
            self.table.setdefault(name, SubscriptionGroupConfig(name))
        self._saved.save_now()

    def get(self, name: str) -> SubscriptionGroupConfig | None:
        """A group; one that is not known yet is made, where that and its name are allowed."""
        group = self.table.get(name)
        if group is None and self.auto_create and is_group_name(name):
            group = self.put(SubscriptionGroupConfig(name))
            self._saved.save()
        return group

    def put(self, group: SubscriptionGroupConfig) -> SubscriptionGroupConfig:
        """Add or change a group. Not durable before `save`."""
        if group.group_name not in self.table:
            log.info("group_created", group=group.group_name)
        self.table[group.group_name] = group
        self._next_version()
        return group

    def remove(self, name: str) -> bool:
        """Remove a group. Not durable before `save`."""
        if self.table.pop(name, None) is None:
            return False
        self._unknown.pop(name, None)
        log.info("group_deleted", group=name)
        self._next_version()
        return True

    async def save(self) -> None:
        """Make the table durable. Raises OSError."""
        await asyncio.shield(self._saved.save())

    def to_json(self) -> dict[str, Any]:
        """The table as subscriptionGroup.json and GET_ALL_SUBSCRIPTIONGROUP_CONFIG have it."""
        return {
            **self._extra,
            "dataVersion": self.version.to_json(),
            "subscriptionGroupTable": {
                name: {**self._unknown.get(name, {}), **msgspec.to_builtins(group)}
                for name, group in self.table.items()
            },
        }

    def _next_version(self) -> None:
        self.version.timestamp = self._clock.now_ms()
        self.version.counter += 1


def is_group_name(name: str) -> bool:
    """Whether a group may have this name."""
    return len(name) <= MAX_GROUP_LENGTH and _NAME.fullmatch(name) is not None
