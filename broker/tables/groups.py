"""The settings of consumer groups: config/subscriptionGroup.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import structlog

from duemq.broker.errors import LimitReached
from duemq.broker.limits import Limits
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.persister import Persister, SavedTable
from duemq.broker.tables.table import Fields, check_queues, section, typed
from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests.bodies import DataVersion, SubscriptionGroupConfig
from duemq.protocol.topics import NAME
from duemq.storage.clock import Clock
from duemq.storage.config_file import ConfigFile

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
_FIELDS: Final = {field.encode_name for field in msgspec.structs.fields(SubscriptionGroupConfig)}


class Groups:
    """The settings of all consumer groups of one broker."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        file: ConfigFile,
        clock: Clock,
        persister: Persister,
        limits: Limits,
    ) -> None:
        self._on_created: list[Callable[[str, str], None]] = []
        self._limits = limits
        self._file = file
        self._clock = clock
        self._settings = settings
        self._saved = SavedTable(persister, file, lambda: (self.to_json(), lambda _: None))
        self._extra: dict[str, Any] = {}
        self._unknown: dict[str, dict[str, Any]] = {}
        self.table: dict[str, SubscriptionGroupConfig] = {}
        self._json: dict[str, msgspec.Raw] = {}
        """Each group in the JSON form of subscriptionGroup.json."""
        self.version = DataVersion()

    def on_created(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback` with "group" and the name of each group that is created because a client used it."""
        self._on_created.append(callback)

    def load(self) -> None:
        """Read the table; changes nothing on the disk. Raises StoreFormatError, OSError."""
        data = self._file.read()
        self.version = typed(self._file, data.pop("dataVersion", None) or {}, DataVersion, "dataVersion")
        for name, fields in section(self._file, data, "subscriptionGroupTable", Fields).items():
            unknown = {key: value for key, value in fields.items() if key not in _FIELDS}
            if unknown:
                self._unknown[name] = unknown
            group = typed(self._file, {**fields, "groupName": name}, SubscriptionGroupConfig, f"group {name}")
            check_queues(self._file, f"group {name}", retryQueueNums=group.retry_queue_nums)
            self._set(group)
        self._extra = data

    def begin(self) -> None:
        """Add RocketMQ's own groups that are missing. Raises OSError."""
        is_same = self._file.is_newest
        for name in _OWN:
            if name not in self.table:
                self._set(SubscriptionGroupConfig(name))
                is_same = False
        if is_same:
            self._saved.loaded()
        else:
            self._saved.save_now()

    def get(self, name: str) -> SubscriptionGroupConfig | None:
        """Return a group. An unknown group is created if settings and name allow it; otherwise None. Raises Refused if
        there are too many groups to create another."""
        group = self.table.get(name)
        if group is None and self._settings.config.auto_create_group and is_group_name(name):
            self._check_room(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)
            group = self.put(SubscriptionGroupConfig(name))
            for callback in self._on_created:
                callback("group", name)
            self._saved.save()
        return group

    def retry_queues(self, name: str) -> int | None:
        """Return the number of queues of the retry topic of a group that exists or that `get` would create; None for
        other groups. The name must be valid. Changes nothing."""
        group = self.table.get(name)
        if group is None and self._settings.config.auto_create_group:
            group = SubscriptionGroupConfig(name)
        return group.retry_queue_nums if group is not None else None

    def check_all(self, names: Iterable[str]) -> None:
        """Raise Refused if `get` would raise it for one of these groups. The names must be valid. Changes nothing."""
        if self._settings.config.auto_create_group:
            self._check_room(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, len({name for name in names if name not in self.table})
            )

    def put(self, group: SubscriptionGroupConfig) -> SubscriptionGroupConfig:
        """Add or change a group; durable only after `save`. Raises Refused if there are too many."""
        if group.group_name not in self.table:
            self._check_room(ResponseCode.SYSTEM_ERROR)
            log.info("group_created", group=group.group_name)
        self._set(group)
        self._next_version()
        return group

    def remove(self, name: str) -> bool:
        """Remove a group; durable only after `save`. Return whether it existed."""
        if self.table.pop(name, None) is None:
            return False
        self._unknown.pop(name, None)
        del self._json[name]
        log.info("group_deleted", group=name)
        self._next_version()
        return True

    async def save(self) -> None:
        """Make the table durable. Raises OSError."""
        await self._saved.saved()

    def to_json(self) -> dict[str, Any]:
        """Return the table in the form of subscriptionGroup.json and GET_ALL_SUBSCRIPTIONGROUP_CONFIG; groups are
        already JSON."""
        return {
            **self._extra,
            "dataVersion": self.version.to_json(),
            "subscriptionGroupTable": dict(self._json),
        }

    def _set(self, group: SubscriptionGroupConfig) -> None:
        name = group.group_name
        self.table[name] = group
        fields = {**self._unknown.get(name, {}), **msgspec.to_builtins(group)}
        self._json[name] = msgspec.Raw(fastjson.dumps(fields))

    def _check_room(self, code: int, more: int = 1) -> None:
        """Raise Refused if `more` further groups would exceed maxSubscriptionGroups."""
        limit = self._limits.groups
        if more and len(self.table) + more > limit:
            raise LimitReached(
                "maxSubscriptionGroups",
                code,
                f"there are {len(self.table)} consumer groups, and maxSubscriptionGroups={limit}: delete some "
                "(mqadmin deleteSubGroup), or raise that setting",
            )

    def _next_version(self) -> None:
        self.version.timestamp = self._clock.now_ms()
        self.version.counter += 1


def is_group_name(name: str) -> bool:
    """Return whether a group may have this name."""
    return len(name) <= MAX_GROUP_LENGTH and NAME.fullmatch(name) is not None
