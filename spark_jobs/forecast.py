"""The forecast: which seconds ahead will be late, and by how much, from what waits and how fast the broker delivers.

The broker is taken for a queue that delivers `rate` messages a second: what is due in a second and does not fit into it
waits for the next ones. With b messages left at the end of a second, the last of its own is b / rate seconds late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

MAX_LISTED: Final = 1000


class LateSecond(msgspec.Struct):
    """A second ahead whose last message will be late. Times in ms (since the epoch)."""

    second_ms: int
    due: int
    """Messages due in it."""
    late_ms: int
    """How late the last of them will be."""


class Episode(msgspec.Struct):
    """Late seconds in a row. Times in ms (since the epoch)."""

    start_ms: int
    end_ms: int
    """When the backlog is gone."""
    messages: int
    """Due in them."""
    worst_ms: int
    """How late the latest of them will be."""


class Forecast(msgspec.Struct):
    """What is ahead."""

    rate: float
    """Messages a second that the broker delivers; 0 where nothing tells."""
    measured_seconds: int
    """Seconds with a backlog that the rate was measured in."""
    messages: int
    late_messages: int
    late_seconds: list[LateSecond]
    """The worst, at most MAX_LISTED, in order of time."""
    episodes: list[Episode]
    """In order of time, the MAX_LISTED worst."""
    source: str = "given"
    """Where the rate is from: given; measured, in seconds in which the broker was behind; or fastest, the fastest
    second there was of a broker that was never behind, which may do many times as much."""


def forecast(seconds: Integers, due: Integers, rate: float, *, measured_seconds: int = 0) -> Forecast:
    """`seconds`: seconds since the epoch that have messages due, ascending, and `due`, how many. `rate`: messages a
    second."""
    total = int(due.sum())
    if not total or rate <= 0:
        return Forecast(rate, measured_seconds, total, 0, [], [])
    left = backlog(seconds, due, rate)
    late_ms = np.ceil(left / rate * 1000).astype(np.int64)
    late = np.flatnonzero(late_ms)
    worst = np.sort(late[np.argsort(late_ms[late], kind="stable")[-MAX_LISTED:]])
    return Forecast(
        rate,
        measured_seconds,
        total,
        int(np.minimum(due, np.ceil(left)).sum()),
        [LateSecond(int(seconds[i]) * 1000, int(due[i]), int(late_ms[i])) for i in worst],
        _episodes(seconds, due, late_ms, late),
    )


def backlog(seconds: Integers, due: Integers, rate: float) -> NDArray[np.float64]:
    """Messages left at the end of each second.

    What is left is what was due since the broker last had nothing to do, less what it did since; and that is the
    largest such difference over all points to begin at."""
    surplus = np.cumsum(due) - rate * (seconds + 1 - seconds[0])
    # Just before a second begins everything before may have been done: what could have been done by then is lost.
    idle = np.cumsum(due) - due - rate * (seconds - seconds[0])
    left: NDArray[np.float64] = np.maximum(surplus - np.minimum.accumulate(idle), 0.0)
    return left


def _episodes(seconds: Integers, due: Integers, late_ms: Integers, late: Integers) -> list[Episode]:
    if not len(late):
        return []
    ends_ms = (seconds + 1) * 1000 + late_ms
    # A late second belongs to the one before if that one's backlog is not gone when it begins.
    begins = np.concatenate([[True], ends_ms[late[:-1]] <= seconds[late[1:]] * 1000])
    first = np.flatnonzero(begins)
    last = np.concatenate([first[1:], [len(late)]]) - 1
    found = [
        Episode(
            int(seconds[late[a]]) * 1000,
            int(ends_ms[late[b]]),
            int(due[late[a] : late[b] + 1].sum()),
            int(late_ms[late[a : b + 1]].max()),
        )
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]
    found.sort(key=lambda episode: -episode.worst_ms)
    return sorted(found[:MAX_LISTED], key=lambda episode: episode.start_ms)


def measured_rate(seconds: Integers, delivered: Integers, late: Integers) -> tuple[float, int]:
    """Messages a second, and in how many seconds that was measured.

    `seconds`: seconds in which there were deliveries; of each how many, and how many of them were late by more than a
    second. Where nearly all are late the broker delivers as fast as it can: the median of those seconds counts, else
    the fastest second there was, which it can do at least."""
    if not len(seconds):
        return 0.0, 0
    # The first and the last second of a backlog are only partly busy: their neighbours have to be busy as well.
    busy = late * 10 >= delivered * 9
    whole = busy.copy()
    whole[1:] &= busy[:-1] & (np.diff(seconds) == 1)
    whole[:-1] &= busy[1:] & (np.diff(seconds) == 1)
    if len(whole):
        whole[0] = whole[-1] = False
    if whole.any():
        return float(np.median(delivered[whole])), int(whole.sum())
    return float(delivered.max()), 0
