"""The settings while the broker runs: the current ones, and who has to know when they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import structlog

from duemq.broker.settings.config import FIELDS, LIVE, BrokerConfig, Origin, as_text, change
from duemq.protocol.requests.bodies import DataVersion

log = structlog.get_logger(__name__)

Callback = Callable[[BrokerConfig], None]


class Change(NamedTuple):
    """A property that changed. Values as properties text has them."""

    name: str
    old: str
    new: str


class LiveSettings:
    """The settings of a running broker. Belongs to the event loop."""

    def __init__(self, config: BrokerConfig, origin: Origin | None = None) -> None:
        self.config = config
        self.origin = origin or Origin()
        self.version = DataVersion(int(time.time() * 1000))
        self._callbacks: dict[str, list[Callback]] = {}

    @property
    def followed(self) -> frozenset[str]:
        """Properties that somebody wants to hear of."""
        return frozenset(self._callbacks)

    def on_change(self, names: str | Iterable[str], callback: Callback) -> None:
        """Call back with the new settings after an update that changed any of some live properties; once an update.
        The callback must not fail: a bad value is refused before. Raises ValueError where a property is not live."""
        for name in [names] if isinstance(names, str) else names:
            if name not in LIVE:
                raise ValueError(f"{name} is no live property")
            self._callbacks.setdefault(name, []).append(callback)

    def update(self, values: Mapping[str, str]) -> tuple[list[Change], list[str]]:
        """Change properties, all or none; gives what changed, and the names of RocketMQ's that have no effect here.
        Raises ConfigError in one sentence that names what is wrong."""
        old = self.config
        new, ignored = change(old, values)
        changes = [
            Change(name, as_text(before), as_text(after))
            for name, field in FIELDS.items()
            if (before := getattr(old, field.name)) != (after := getattr(new, field.name))
        ]
        if changes:
            self.config = new
            self.version.counter += 1
            self.version.timestamp = int(time.time() * 1000)
            callbacks = (callback for name, _, _ in changes for callback in self._callbacks.get(name, ()))
            for callback in dict.fromkeys(callbacks):
                try:
                    callback(new)
                except Exception:  # the others hear of it all the same
                    log.exception("setting_not_followed", changes=[change.name for change in changes])
        return changes, ignored
