"""Log lines about what clients do wrong, and about messages that the store refuses. A client can cause any number of
them, so their number is limited."""

from __future__ import annotations

from collections import Counter
from typing import Final

import structlog

from duemq.storage.clock import Clock

log = structlog.get_logger(__name__)

_APPENDS_SECONDS: Final = 60.0
"""The interval between lines about refused appends."""
_MAX_A_SECOND: Final = 50
"""Maximum number of lines of one event in a second."""
_MAX_ENDS_A_SECOND: Final = 1000
"""The limit for lines about connections that ended, which is higher: a connection costs the client more than its line
costs the broker."""
_ENDS: Final = {
    "connection_refused": "Refused",
    "connection_broken": "Broken",
    "connection_dropped": "Dropped",
    "tls_refused": "TlsRefused",
}
"""The log events of connections that ended early, each with the name under which `LimitedLog.ended` counts them."""


class LimitedLog:
    """The log of what the clients of one broker do wrong. Also counts the connections that ended early."""

    def __init__(self, clock: Clock) -> None:
        """`clock`: the messages' clock, of which only the monotonic time is read."""
        self._clock = clock
        self.ended: Counter[str] = Counter()
        """How many connections ended early, by the names in `_ENDS`."""
        self.ended.update(dict.fromkeys(_ENDS.values(), 0))
        self._second = 0
        self._logged: Counter[str] = Counter()
        """Lines logged in this second, by event."""
        self._not_logged: Counter[str] = Counter()
        """Lines left out in this second, by event."""
        self._refused_sends = 0
        """Refused sends that have not been logged yet."""
        self._appends_again_at = 0.0

    def about_client(self, event: str, peer: str, reason: str, **fields: object) -> None:
        """Log one line about a client's error, unless the event has had too many lines in this second."""
        if event in _ENDS:
            self.ended[_ENDS[event]] += 1
        second = int(self._clock.monotonic())
        if second != self._second:
            for flood, not_logged in self._not_logged.items():
                log.warning(f"{flood}_often", not_logged=not_logged)
            self._second = second
            self._logged.clear()
            self._not_logged.clear()
        most = _MAX_ENDS_A_SECOND if event in _ENDS else _MAX_A_SECOND
        if self._logged[event] < most:
            self._logged[event] += 1
            log.warning(event, peer=peer, **fields, reason=reason)
        else:
            self._not_logged[event] += 1

    def about_appends(self, reason: str, sends: int) -> None:
        """Log sends that the store refused, for example because the disk is full: immediately the first time, then at
        most one line a minute."""
        self._refused_sends += sends
        now = self._clock.monotonic()
        if now >= self._appends_again_at:
            log.error("append_failed", reason=reason, messages=self._refused_sends)
            self._appends_again_at = now + _APPENDS_SECONDS
            self._refused_sends = 0
