"""The settings while the broker runs: their current values, and callbacks for when they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import structlog

from duemq.broker.settings.config import FIELDS, LIVE, BrokerConfig, Origin, as_text, change
from duemq.protocol.requests.bodies import DataVersion
from duemq.storage.current import Current

log = structlog.get_logger(__name__)

T = TypeVar("T")
Callback = Callable[[BrokerConfig], None]


class Change(NamedTuple):
    """A changed property. Values are in the form of properties text."""

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
        self._parts: list[Callable[[BrokerConfig], None]] = []

    @property
    def followed(self) -> frozenset[str]:
        """Properties that have a callback."""
        return frozenset(self._callbacks)

    def current(self, part: Callable[[BrokerConfig], T]) -> Current[T]:
        """Return the part of the settings that a component below the broker needs; its value follows each change."""
        current = Current(part(self.config))

        def follow(config: BrokerConfig) -> None:
            current.value = part(config)

        self._parts.append(follow)
        return current

    def on_change(self, names: str | Iterable[str], callback: Callback) -> None:
        """Call `callback` with the new settings, once per update that changed any of these live properties. It must not
        fail: invalid values are refused earlier. Raises ValueError if a property is not live."""
        for name in [names] if isinstance(names, str) else names:
            if name not in LIVE:
                raise ValueError(f"{name} is not a live property")
            self._callbacks.setdefault(name, []).append(callback)

    def update(self, values: Mapping[str, str]) -> tuple[list[Change], list[str]]:
        """Change properties, all or none. Return the changes, and the names of RocketMQ's properties that have no
        effect here. Raises ConfigError with one sentence that names the wrong property or value."""
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
            for follow in self._parts:
                follow(new)
            callbacks = (callback for name, _, _ in changes for callback in self._callbacks.get(name, ()))
            for callback in dict.fromkeys(callbacks):
                try:
                    callback(new)
                except Exception:  # the other callbacks must still run
                    log.exception("setting_not_followed", changes=[change.name for change in changes])
        return changes, ignored
