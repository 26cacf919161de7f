"""UPDATE_BROKER_CONFIG (25) and GET_BROKER_CONFIG (26)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from duemq.broker.access.guard import Guard
from duemq.broker.access.permission import ACCOUNT, ADMINISTER, LOOK
from duemq.broker.errors import ConfigError, Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.settings import broker_conf
from duemq.broker.settings.config import FIELDS, HIDDEN, SECRET, as_text
from duemq.broker.settings.live_settings import Change, LiveSettings
from duemq.broker.workers import Background, Workers
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.headers import NoFields, Request, response

log = structlog.get_logger(__name__)

_FOR_PRODUCERS: Final = ("maxMessageSize", "messageDelayLevel", "timerMaxDelaySec", "timerWheelEnable")
"""The settings that a producer has to know: which delays the broker has, and how large a message may be."""


_FIXED: Final = {"filterServerNums": "0", "slaveReadEnable": "false", "useTLS": "false"}
"""Properties of RocketMQ that this broker does not have, with the values that describe how it behaves. RocketMQ's tools
(mqadmin exportConfigs of 4.9.7) read these properties and fail without them."""


class SettingsHandlers:
    """Returns and changes the settings."""

    def __init__(
        self,
        settings: LiveSettings,
        workers: Workers,
        levels_noted: Callable[[], Awaitable[bool]],
        guard: Guard | None = None,
    ) -> None:
        """`levels_noted` waits until a crash can no longer undo a change of the table of levels; it returns whether
        that happened in time. `guard` says who may see all settings; None without access control."""
        self._guard = guard
        self._settings = settings
        self._workers = workers
        self._levels_noted = levels_noted

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.GET_BROKER_CONFIG, NoFields, ACCOUNT, self.get)
        router.add(RequestCode.UPDATE_BROKER_CONFIG, NoFields, ADMINISTER, self.update)

    def get(self, connection: Connection, request: Request[NoFields]) -> Answer:
        """Return the settings as properties text; an account without the role look gets only those that producers
        need."""
        settings = self._settings
        sees_all = self._guard is None or self._guard.has_role(connection, LOOK, request)
        values = {name: getattr(settings.config, field.name) for name, field in FIELDS.items()}
        lines = [
            f"{name}={as_text(value) if name not in SECRET or not value else HIDDEN}\n"
            for name, value in sorted(values.items())
            if sees_all or name in _FOR_PRODUCERS
        ]
        if sees_all:
            lines += [f"{name}={value}\n" for name, value in _FIXED.items()]
        answer = response(ResponseCode.SUCCESS, body="".join(lines).encode())
        answer.ext["version"] = fastjson.dumps(settings.version.to_json()).decode()
        return answer

    async def update(self, connection: Connection, request: Request[NoFields]) -> Answer:
        """Change settings, all or none. When this is answered they are in effect and in the configuration file, if
        there is one, and the checkpoint has the table of levels. If the file or the checkpoint could not be written,
        the answer says so; the settings are still in effect, until the next start or crash."""
        bodies.check_size(request.body, "settings")
        try:
            values = broker_conf.parse(bytes(request.body).decode(), "the request")
            changes, ignored = self._settings.update(values)
        except (ConfigError, UnicodeDecodeError) as error:
            reason = str(error) if isinstance(error, ConfigError) else "the request's properties are not UTF-8"
            log.warning("settings_refused", peer=connection.peer, reason=reason)
            raise Refused(ResponseCode.SYSTEM_ERROR, reason) from None
        if ignored:
            log.warning("properties_ignored", properties=ignored, peer=connection.peer)
        why_not_kept, is_noted = "", True
        if any(change.name == "messageDelayLevel" for change in changes):
            # The checkpoint is written first. If only the file had the new table, then after a kill all waiting
            # messages would go by it.
            is_noted = await self._levels_noted()
        if changes:
            why_not_kept = await self._save(changes)
            origin = self._settings.origin
            of_all = why_not_kept if origin.file is not None else "there is no configuration file"
            for name, old, new in changes:
                why = "the environment or a flag sets it" if name in origin.pinned else of_all
                log.info(
                    "setting_changed",
                    property=name,
                    old=old,
                    new=new,
                    peer=connection.peer,
                    kept_in=origin.file if not why else None,
                    until_restart_because=why or None,
                )
        if not is_noted:
            raise Refused(
                ResponseCode.FLUSH_DISK_TIMEOUT,
                "messageDelayLevel is changed, but the disk did not confirm that in time: after a crash now, messages "
                "that already wait might go by the new table",
            )
        if why_not_kept:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                "the settings are changed, but only until the next start: the configuration file could not be "
                f"written ({why_not_kept})",
            )
        return response(ResponseCode.SUCCESS)

    async def _save(self, changes: list[Change]) -> str:
        """Write changes to the configuration file, if there is one; return why that failed, or an empty string."""
        file = self._settings.origin.file
        if file is None:
            return ""
        values = {change.name: change.new for change in changes}
        try:
            await self._workers.run(Background.TABLES, lambda: broker_conf.save(file, values))
        except (ConfigError, OSError) as error:
            log.error("settings_not_saved", file=file, reason=str(error))
            return str(error)
        return ""
