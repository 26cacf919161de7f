"""The table of delay levels: RocketMQ's messageDelayLevel, such as "1s 5s 10s 30s 1m"; level 1 is the first."""

from __future__ import annotations

import re
from typing import Final

DEFAULT: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
UNKNOWN_LEVEL_DELAY_MS: Final = 1000
"""RocketMQ's delay, in ms, for a level that is not in the table, as an older store may have."""

_UNITS_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL: Final = re.compile(r"([0-9]{1,9})([smhd])")


class DelayLevels:
    """An immutable table of delay levels."""

    def __init__(self, text: str = DEFAULT) -> None:
        """Parse a table. Raises ValueError, which names the wrong part."""
        self.text = " ".join(text.split())
        self._delays_ms: list[int] = []
        for part in text.split():
            match = _LEVEL.fullmatch(part)
            if match is None:
                raise ValueError(f"{part!r} is not a delay: write a number and s, m, h or d")
            self._delays_ms.append(int(match[1]) * _UNITS_MS[match[2]])
        if not self._delays_ms:
            raise ValueError("a table of delay levels needs at least one level")

    @property
    def maximum(self) -> int:
        """The highest level."""
        return len(self._delays_ms)

    @property
    def delays_ms(self) -> list[int]:
        """The delays in ms, from level 1 on."""
        return list(self._delays_ms)

    def cap(self, level: int) -> int:
        """Return the level, or the highest level of the table if the given one is beyond that."""
        return min(level, len(self._delays_ms))

    def delay_ms(self, level: int) -> int:
        """Return the delay of a level, in ms; UNKNOWN_LEVEL_DELAY_MS if the table does not have the level."""
        if 1 <= level <= len(self._delays_ms):
            return self._delays_ms[level - 1]
        return UNKNOWN_LEVEL_DELAY_MS

    def level_of(self, delay_ms: int) -> int | None:
        """Return the first level with this delay, or None if there is none."""
        return self._delays_ms.index(delay_ms) + 1 if delay_ms in self._delays_ms else None

    def deliver_time(self, level: int, store_timestamp: int) -> int:
        """Return when a message of a level is due, from its store time; both are ms since the epoch. A level beyond the
        table counts as the highest level, as in a send."""
        return store_timestamp + self.delay_ms(self.cap(level))


def queue_id_of(level: int) -> int:
    """Return the id of the queue of the schedule topic in which a level's messages wait."""
    return level - 1
