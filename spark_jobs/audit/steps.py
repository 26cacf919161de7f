"""Steps of curves over time: round ones, chosen by the span of the data.

Counts by time are by second while the data spans half an hour at most, and by minute beyond that. So a test of one
minute has curves, and a year has no more rows than it has minutes. Counts made in parts (by range, by bucket) add up to
the same total however the data was divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SECOND: Final = 1000
_MINUTE: Final = 60 * _SECOND
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
STEPS_MS: Final = (
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 3, 6, 12)),
    *(n * _DAY for n in (1, 7, 28, 364)),
)
POINTS: Final = 720
"""Most points of a line; points closer than two pixels could not be told apart."""
BARS: Final = 240
"""Most bars of a chart: each is some pixels wide."""
_BY_SECOND: Final = 30
"""Largest span in minutes that is counted by seconds."""


def step_of(span_ms: int, points: int, multiple_of: int = STEPS_MS[0]) -> int:
    """Return the least step, in ms, that cuts a span of time into at most `points` points; the greatest step if none
    does. `multiple_of`: the step that the data already has, one of STEPS_MS."""
    steps = [step for step in STEPS_MS if step % multiple_of == 0]
    return next((step for step in steps if span_ms // step < points), steps[-1])


def is_by_minute(low: int, high: int) -> bool:
    """Return whether data from one second to another (both since the epoch) is counted by minutes."""
    return high // 60 - low // 60 > _BY_SECOND


def seconds_kept(seconds: NDArray[Any]) -> NDArray[Any]:
    """Return the seconds by which things are counted: the given ones, or the starts of their minutes."""
    if not len(seconds) or not is_by_minute(int(seconds.min()), int(seconds.max())):
        return seconds
    return np.asarray(seconds // 60 * 60)
