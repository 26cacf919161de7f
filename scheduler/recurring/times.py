"""The times at which a recurring message is delivered; see `protocol.records.recurrence`.

A cron expression is evaluated in its time zone, with the rules of Debian's cron for the change to and from daylight
saving time: a time that does not exist that day is moved behind the gap, a time that comes twice counts once, and
expressions that match every hour or more often continue hour by hour.

The libraries for that are imported on first use: most brokers have no such message, and a start then takes less time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from duemq.protocol.errors import TimerIllegal
from duemq.protocol.records import properties
from duemq.protocol.records.recurrence import RecurrenceRule

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_370_764_800_000
"""The beginning of the year 9999, ms since the epoch: datetime ends with that year."""
_FIELDS: Final = (5, 6)
_OF_THE_MACHINE: Final = ("localtime", "posixrules", "Factory")
"""Files beside those of the time zones whose contents depend on the machine, such as its own zone."""
_WITH_LEAP_SECONDS: Final = ("posix/", "right/")
"""Folders that only some machines have: copies of all zones, in `right` with leap seconds, which no clock counts."""


def next_ms(recurrence: RecurrenceRule, after_ms: int) -> int | None:
    """Return the first time after `after_ms` at which a message is to be delivered, regardless of whether it is paused;
    None if there is none. Times are ms since the epoch. Raises TimerIllegal if the cron expression or the time zone is
    invalid."""
    start_ms = recurrence.start_ms
    if start_ms is not None:
        after_ms = max(after_ms, start_ms - 1)
    if recurrence.cron:
        found = _next_of_cron(recurrence.cron, recurrence.zone, after_ms)
    else:
        every_ms, first_ms = recurrence.every_ms, after_ms + recurrence.every_ms if start_ms is None else start_ms
        found = first_ms + max(0, (after_ms - first_ms) // every_ms + 1) * every_ms
    if found is None or found > _LAST_MS or (recurrence.end_ms is not None and found > recurrence.end_ms):
        return None
    return found


def _next_of_cron(cron: str, zone: str, after_ms: int) -> int | None:
    from cronsim import CronSim, CronSimError

    # The fields are counted here, since the library also accepts other numbers of fields, with meanings of its own.
    if len(cron.split()) not in _FIELDS:
        raise TimerIllegal(f"the property {properties.TIMER_CRON}={cron[:40]} does not have five or six fields")
    if after_ms > _LAST_MS:
        return None
    moment = (_EPOCH + timedelta(milliseconds=after_ms)).astimezone(_zone(zone))
    try:
        found = next(CronSim(cron, moment), None)
    except CronSimError as error:
        raise TimerIllegal(
            f"the property {properties.TIMER_CRON}={cron[:40]} is not a cron expression: {error}"
        ) from None
    except OverflowError:
        return None
    return (found - _EPOCH) // timedelta(milliseconds=1) if found is not None else None


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    if name in _OF_THE_MACHINE or name.startswith(_WITH_LEAP_SECONDS):
        raise TimerIllegal(
            f"the property {properties.TIMER_ZONE}={name[:40]} means something else on each machine; give the zone's "
            "own name, such as Europe/Paris"
        )
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError
        raise TimerIllegal(
            f"the property {properties.TIMER_ZONE}={name[:40]} is not a time zone that this broker knows"
        ) from None
