"""The figures of a run that later runs need, to compare with it and to draw curves: one run's, night.json, and
history.jsonl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from duemq.spark_jobs.errors import cannot_read
from duemq.spark_jobs.store.local_files import real_path
from duemq.storage.regular_files import read_regular

if TYPE_CHECKING:
    from duemq.spark_jobs.analyse.analysis import Analysis

HISTORY: Final = "history.jsonl"
MAX_RUNS: Final = 400
"""Lines of history.jsonl that are kept for each store: more than a year of nights."""


class Lag(msgspec.Struct):
    """How far behind a consumer group is at a topic, all queues together."""

    consumer_group: str
    topic: str
    lag: int
    behind_ms: int


class RunFigures(msgspec.Struct):
    """The figures of one run. Times in ms since the epoch."""

    made_ms: int
    store: str
    bytes: int
    scheduled: int
    delivered: int
    pending: int
    overdue: int
    lost: int
    twice: int
    p50_ms: int
    p99_ms: int
    lags: list[Lag]


def run_of(analysis: Analysis) -> RunFigures:
    """Return the figures of an analysis that go into the history."""
    summary = analysis.audit
    lags: dict[tuple[str, str], Lag] = {}
    for consumer in analysis.consumers:
        key = (consumer.consumer_group, consumer.topic)
        lag = lags.setdefault(key, Lag(*key, 0, 0))
        lag.lag += consumer.lag or 0
        lag.behind_ms = max(lag.behind_ms, consumer.behind_ms or 0)
    late = summary.lateness.percentiles_ms
    return RunFigures(
        made_ms=analysis.made_ms,
        store=real_path(analysis.store),
        bytes=analysis.bytes,
        scheduled=summary.scheduled,
        delivered=summary.delivered,
        pending=summary.pending,
        overdue=summary.overdue,
        lost=summary.lost,
        twice=summary.twice,
        p50_ms=late.get("p50", 0),
        p99_ms=late.get("p99", 0),
        lags=list(lags.values()),
    )


def read_history(path: str) -> list[RunFigures]:
    """Return the runs in a history.jsonl, in the order of its lines; none if there is no file. Invalid lines are left
    out. Raises CannotRead."""
    runs = []
    try:
        lines = read_regular(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise cannot_read(path, error) from None
    for line in lines:
        try:
            runs.append(msgspec.json.decode(line, type=RunFigures))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return runs


class StoreNight(msgspec.Struct):
    """A store of a cluster's night, and the name of the directory of its own night, None if the store could not be
    read."""

    store: str
    name: str | None


class Night(msgspec.Struct, kw_only=True, omit_defaults=True):
    """night.json: the figures of a night on the page of all nights. Times in ms since the epoch."""

    duemq_night: int
    """The version of this format."""
    run: RunFigures
    mood: str
    headline: str
    destroyed: int
    unclaimed: int
    damaged: int
    max_ms: int
    """Lateness of the latest delivery."""
    compared_ms: int | None
    """The time of the run that it was compared with, ms since the epoch; None if there was none."""
    new: int | None
    """Number of offenders that the run before did not have; None without a run before."""
    worse: int | None
    """Number of figures that grew; None without a run before."""
    stores: list[StoreNight] = []
    """The stores of a cluster; empty for one store."""


class Listed(msgspec.Struct):
    """A night and the name of its directory."""

    name: str
    night: Night
