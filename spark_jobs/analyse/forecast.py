"""The forecast: which seconds ahead will be late, and by how much, from the waiting messages and the rate of delivery.

The broker is modelled as a queue that delivers `rate` messages a second: if more are due in a second, the rest waits
for the next seconds. With b messages left at the end of a second, the last message due in it is b / rate seconds late.

Brokers do not help each other: each of several is a queue of its own, and a second is late if it is late at any of
them.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

MAX_LISTED: Final = 1000
_NONE: Final = np.empty(0, np.int64)


class LateSecond(msgspec.Struct):
    """A second ahead whose last message will be late. Times in ms since the epoch, except `late_ms`."""

    second_ms: int
    due: int
    """Messages due in it; for several brokers, only at the brokers at which it will be late."""
    late_ms: int
    """Lateness of its last message, ms."""


class Episode(msgspec.Struct):
    """Consecutive late seconds; for several brokers, seconds that are late at any of them. Times in ms since the epoch,
    except `worst_ms`."""

    start_ms: int
    end_ms: int
    """When the backlog is gone."""
    messages: int
    """Messages due in these seconds."""
    worst_ms: int
    """Lateness of the latest message, ms."""


class Forecast(msgspec.Struct):
    """The forecast for one broker or several."""

    rate: float
    """Messages per second that the broker delivers, or the sum for several; 0 if unknown."""
    measured_seconds: int
    """Number of seconds with a backlog in which the rate was measured."""
    messages: int
    late_messages: int
    late_seconds: list[LateSecond]
    """The worst, at most MAX_LISTED, in order of time."""
    episodes: list[Episode]
    """The MAX_LISTED worst, in order of time."""
    source: str = "given"
    """The source of the rate: given; measured, in seconds in which the broker was behind; or fastest, the fastest
    second of a broker that was never behind, which may be able to deliver many times as much."""


class Load(NamedTuple):
    """The waiting messages of a broker, and its rate of delivery."""

    seconds: Integers
    """Seconds since the epoch that have messages due, ascending."""
    due: Integers
    """Number of messages due in each of `seconds`."""
    rate: float
    """Messages per second."""
    measured_seconds: int = 0
    source: str = "given"
    """The source of the rate: given, measured or fastest; see `Forecast.source`."""


def forecast(loads: Sequence[Load]) -> Forecast:
    """Return the forecast for some brokers, each of which delivers its own waiting messages. The source is `fastest` if
    theirs differ."""
    found = [_late(load) for load in loads]
    seconds, which = np.unique(np.concatenate([_NONE, *(one.seconds for one in found)]), return_inverse=True)
    due, late_ms = np.zeros(len(seconds), np.int64), np.zeros(len(seconds), np.int64)
    np.add.at(due, which, np.concatenate([_NONE, *(one.due for one in found)]))
    np.maximum.at(late_ms, which, np.concatenate([_NONE, *(one.late_ms for one in found)]))
    worst = np.sort(np.argsort(late_ms, kind="stable")[-MAX_LISTED:])
    episodes = _joined(list(chain.from_iterable(one.episodes for one in found)))
    episodes.sort(key=lambda episode: -episode.worst_ms)
    sources = {load.source for load in loads if load.rate > 0} or {load.source for load in loads}
    return Forecast(
        float(sum(load.rate for load in loads)),
        sum(load.measured_seconds for load in loads),
        sum(int(load.due.sum()) for load in loads),
        sum(one.messages for one in found),
        [LateSecond(int(seconds[i]) * 1000, int(due[i]), int(late_ms[i])) for i in worst],
        sorted(episodes[:MAX_LISTED], key=lambda episode: episode.start_ms),
        sources.pop() if len(sources) == 1 else "fastest",
    )


class _LateSeconds(NamedTuple):
    """The late seconds of a broker."""

    seconds: Integers
    due: Integers
    late_ms: Integers
    messages: int
    episodes: list[Episode]


def _late(load: Load) -> _LateSeconds:
    seconds, due, rate = load.seconds, load.due, load.rate
    if rate <= 0 or not due.any():
        return _LateSeconds(_NONE, _NONE, _NONE, 0, [])
    left = backlog(seconds, due, rate)
    late_ms = np.ceil(left / rate * 1000).astype(np.int64)
    late = np.flatnonzero(late_ms)
    messages = int(np.minimum(due, np.ceil(left)).sum())
    return _LateSeconds(seconds[late], due[late], late_ms[late], messages, _episodes(seconds, due, late_ms, late))


def backlog(seconds: Integers, due: Integers, rate: float) -> NDArray[np.float64]:
    """Return the number of messages left at the end of each second: those due since the broker was last idle, minus
    those delivered since. This is the largest such difference over all points from which one can begin to count."""
    surplus = np.cumsum(due) - rate * (seconds + 1 - seconds[0])
    # Just before a second begins, all earlier messages may be delivered: unused capacity until then is lost.
    idle = np.cumsum(due) - due - rate * (seconds - seconds[0])
    left: NDArray[np.float64] = np.maximum(surplus - np.minimum.accumulate(idle), 0.0)
    return left


def _episodes(seconds: Integers, due: Integers, late_ms: Integers, late: Integers) -> list[Episode]:
    if not len(late):
        return []
    ends_ms = (seconds + 1) * 1000 + late_ms
    # A late second belongs to the episode of the one before if that one's backlog is not gone when it begins.
    begins = np.concatenate([[True], ends_ms[late[:-1]] <= seconds[late[1:]] * 1000])
    first = np.flatnonzero(begins)
    last = np.concatenate([first[1:], [len(late)]]) - 1
    return [
        Episode(
            int(seconds[late[a]]) * 1000,
            int(ends_ms[late[b]]),
            int(due[late[a] : late[b] + 1].sum()),
            int(late_ms[late[a : b + 1]].max()),
        )
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]


def _joined(episodes: list[Episode]) -> list[Episode]:
    """Return episodes in order of time, overlapping ones joined."""
    found: list[Episode] = []
    for one in sorted(episodes, key=lambda episode: episode.start_ms):
        if found and one.start_ms < found[-1].end_ms:
            last = found[-1]
            found[-1] = Episode(
                last.start_ms,
                max(last.end_ms, one.end_ms),
                last.messages + one.messages,
                max(last.worst_ms, one.worst_ms),
            )
        else:
            found.append(one)
    return found


def measured_rate(seconds: Integers, delivered: Integers, late: Integers) -> tuple[float, int]:
    """Return messages per second, and the number of seconds in which that was measured.

    `seconds`: those with deliveries; `delivered`, `late`: for each second the number of deliveries, and the number of
    those that were more than a second late. In seconds in which nearly all are late, the broker delivers as fast as it
    can: the result is the median of such seconds. If there are none, it is the fastest second, a lower bound."""
    if not len(seconds):
        return 0.0, 0
    # The first and the last second of a backlog are only partly busy: a second counts if its neighbours are busy too.
    busy = late * 10 >= delivered * 9
    whole = busy.copy()
    whole[1:] &= busy[:-1] & (np.diff(seconds) == 1)
    whole[:-1] &= busy[1:] & (np.diff(seconds) == 1)
    if len(whole):
        whole[0] = whole[-1] = False
    if whole.any():
        return float(np.median(delivered[whole])), int(whole.sum())
    return float(delivered.max()), 0
