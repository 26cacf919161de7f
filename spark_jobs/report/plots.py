"""The series of the report's plots, in the form for the page's script (static/page.js).

A plot is {"x": times in ms, ascending, "step": ms that a point stands for, "unit": "ms" | "count" | "bytes" |
"bytes_total" | "rate", "series": [{"name", "y": [...]}], ...}; y has null where there is no value. "style" is "line",
"area" (from one point to the next, each series on top of the next ones) or "bar". "log": whether the scale is
logarithmic. "focus": where the plot ends at first, if not at its last point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from duemq.spark_jobs.audit.steps import BARS, step_of
from duemq.spark_jobs.report import formats

if TYPE_CHECKING:
    from duemq.spark_jobs.analyse.analysis import Ahead, Analysis, LatePoint, Traffic
    from duemq.spark_jobs.analyse.history import RunFigures

T = TypeVar("T")
Plot = dict[str, Any]

MAX_POINTS: Final = 1600
"""Most points of a curve; a little more than analyses have."""
MAX_GROUPS: Final = 6
"""Most curves of consumer groups."""
MIN_CELLS: Final = 10
"""Least number of minutes with messages for a heat map; fewer are a table."""
_LOG_FROM: Final = 50
"""The scale is logarithmic if the greatest value is more than this many times the median."""


def plots_of(analysis: Analysis, history: Sequence[RunFigures]) -> dict[str, Plot]:
    """Return the plots of a report that have something to show, by name."""
    found = {
        "lateness": _lateness(analysis.lateness, analysis.lateness_step_ms),
        **_throughput(analysis.traffic, analysis.traffic_step_ms),
        "ahead": _due_plot(analysis.ahead, analysis.ahead_step_ms),
        "forecast": _forecast(analysis),
        **_history(history),
    }
    return {name: plot for name, plot in found.items() if plot is not None}


def heat_of(analysis: Analysis) -> Plot | None:
    """Return the heat maps: "at", minutes of the day, "due", messages due in each, "p99" of their lateness in ms;
    "hours", the rows, in order, and "minutes", the first and the last column. None if a table is enough.

    The rows are the hours from the first with messages to the last one, around the clock: 23 and 0 are neighbours. For
    a single hour the columns begin and end with its first and last minute."""
    cells = analysis.heat
    if len(cells) < MIN_CELLS:
        return None
    hours = _arc(sorted({cell.hour for cell in cells}))
    minutes = [cell.minute for cell in cells] if len(hours) == 1 else [0, 59]
    return {
        "hours": hours,
        "minutes": [min(minutes), max(minutes)],
        "at": [cell.hour * 60 + cell.minute for cell in cells],
        "due": [cell.due for cell in cells],
        "p99": [cell.p99_ms for cell in cells],
    }


def _arc(hours: list[int]) -> list[int]:
    """Return the fewest consecutive hours, around the clock, that include all given ones."""
    gaps = [((hours[i] - hours[i - 1]) % 24 or 24, hours[i]) for i in range(len(hours))]
    widest, first = max(gaps, key=lambda gap: gap[0])
    return [(first + i) % 24 for i in range(24 - widest + 1)]


def as_json(value: Any) -> str:
    """Return JSON that is safe in a script element: it has no `<`, so that nothing in it ends the element or begins a
    comment."""
    text = msgspec.json.encode(value).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _drawable(rows: Iterable[T], time: Callable[[T], int]) -> list[T]:
    """Return the rows whose time is one that a calendar has. The others are only in the tables, since no axis could
    show both."""
    return [row for row in rows if 0 <= time(row) <= formats.MAX_TIME_MS]


def _coarser(step: int, count: int, span: int) -> int:
    """Return a step that leaves at most MAX_POINTS."""
    while count > MAX_POINTS and span // step > MAX_POINTS:
        step *= 2
    return step


def _is_log(values: list[int]) -> bool:
    usual = sorted(values)[len(values) // 2]
    return min(values) >= 0 and max(values) > _LOG_FROM * max(usual, 1)


def _lateness(points: list[LatePoint], step: int) -> Plot | None:
    points = _drawable(points, lambda point: point.start_ms)
    if not points:
        return None
    step = _coarser(step, len(points), points[-1].start_ms - points[0].start_ms)
    # Percentiles cannot be added: the worst of those that share a point is shown.
    worst: dict[int, list[int]] = {}
    for point in points:
        row = worst.setdefault(point.start_ms // step * step, [point.p50_ms, point.p99_ms, point.max_ms])
        row[:] = max(row[0], point.p50_ms), max(row[1], point.p99_ms), max(row[2], point.max_ms)
    rows = list(worst.values())
    series = [{"name": name, "y": [row[i] for row in rows]} for i, name in enumerate(("p50", "p99", "latest"))]
    is_log = min(min(row) for row in rows) >= 0 and (_is_log([y for row in rows for y in row]))
    return {"x": list(worst), "step": step, "unit": "ms", "style": "line", "log": is_log, "series": series}


def _throughput(traffic: list[Traffic], step: int) -> dict[str, Plot | None]:
    traffic = _drawable(traffic, lambda part: part.start_ms)
    if not traffic:
        return {}
    times = [part.start_ms for part in traffic]
    names = {"messages": "sent for now", "scheduled": "scheduled", "delivered": "delivered", "other": "other records"}
    columns = {name: [getattr(part, name) for part in traffic] for name in (*names, "bytes")}
    x, rows, step = _on_steps(times, step, list(columns.values()))
    filled = dict(zip(columns, rows, strict=True))
    series = [{"name": names[name], "y": filled[name]} for name in names if any(filled[name])]
    common = {"x": x, "step": step, "style": "line"}
    return {
        "throughput": {**common, "unit": "rate", "series": series},
        "bytes": {**common, "unit": "bytes", "series": [{"name": "stored", "y": filled["bytes"]}]},
    }


def _on_steps(times: list[int], step: int, columns: list[list[int]]) -> tuple[list[int], list[list[int]], int]:
    """Return sums by step, with a zero on either side of an empty stretch; and the step, ms, which is greater than the
    given one if there would be too many points."""
    step = _coarser(step, len(times), times[-1] - times[0])
    sums: dict[int, list[int]] = defaultdict(lambda: [0] * len(columns))
    for i, time in enumerate(times):
        row = sums[time // step * step]
        for k, column in enumerate(columns):
            row[k] += column[i]
    for time in list(sums):
        for beside in (time - step, time + step):
            if times[0] < beside < times[-1]:
                sums.setdefault(beside, [0] * len(columns))
    x = sorted(sums)
    return x, [[sums[time][k] for time in x] for k in range(len(columns))], step


def _due_plot(points: list[Ahead], step: int) -> Plot | None:
    points = _drawable(points, lambda point: point.start_ms)
    if not points:
        return None
    totals: dict[str, int] = defaultdict(int)
    for point in points:
        totals[point.topic] += point.count
    names = sorted(totals, key=lambda name: -totals[name])
    at = {name: i for i, name in enumerate(names)}
    times = sorted({point.start_ms for point in points})
    index = {time: i for i, time in enumerate(times)}
    columns = [[0] * len(times) for _ in names]
    for point in points:
        columns[at[point.topic]][index[point.start_ms]] += point.count
    x, columns, step = _on_steps(times, step, columns)
    series = [{"name": formats.name(name), "y": column} for name, column in zip(names, columns, strict=True)]
    focus = _focus(x, columns, step)
    return {"x": x, "step": step, "unit": "count", "style": "area", "series": series, "focus": focus}


def _focus(x: list[int], columns: list[list[int]], step: int) -> int | None:
    """Return the end of the plot, if leaving out the last 1 % of messages makes it much shorter, else None. Otherwise
    one message due in a month would squeeze all others into a single line."""
    sums = list(accumulate(map(sum, zip(*columns, strict=True))))
    end = next(time for time, total in zip(x, sums, strict=True) if total * 100 >= sums[-1] * 99) + step
    return end if (end - x[0]) * 4 < x[-1] + step - x[0] else None


def _forecast(analysis: Analysis) -> Plot | None:
    late = _drawable(analysis.forecast.late_seconds, lambda second: second.second_ms)
    if not late:
        return None
    step = step_of(late[-1].second_ms - late[0].second_ms, BARS)
    worst: dict[int, int] = {}
    for second in late:
        start = second.second_ms // step * step
        worst[start] = max(worst.get(start, 0), second.late_ms)
    series = [{"name": "last message late by", "y": list(worst.values())}]
    return {"x": list(worst), "step": step, "unit": "ms", "style": "bar", "series": series}


def _history(history: Sequence[RunFigures]) -> dict[str, Plot | None]:
    runs = sorted({run.made_ms: run for run in _drawable(history, lambda run: run.made_ms)}.items())
    if len(runs) < 2:
        return {}
    x = [made_ms for made_ms, _ in runs]
    step = max(1, (x[-1] - x[0]) // (len(x) - 1))
    lags: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [None] * len(runs))
    behind: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [None] * len(runs))
    for i, (_, run) in enumerate(runs):
        for lag in run.lags:
            lags[lag.consumer_group, lag.topic][i] = lag.lag
            behind[lag.consumer_group, lag.topic][i] = lag.behind_ms

    def plot(unit: str, series: dict[str, list[Any]], *, log: bool = False) -> Plot | None:
        shown = [{"name": name, "y": y} for name, y in series.items()]
        return {"x": x, "step": step, "unit": unit, "style": "line", "log": log, "series": shown} if shown else None

    def groups(rows: dict[tuple[str, str], list[Any]]) -> dict[str, list[Any]]:
        worst = sorted(rows, key=lambda key: -max((y for y in rows[key] if y is not None), default=0))[:MAX_GROUPS]
        return {f"{formats.name(group)} \u00b7 {formats.name(topic)}": rows[group, topic] for group, topic in worst}

    late = {name: [getattr(run, f"{name}_ms") for _, run in runs] for name in ("p50", "p99")}
    wrong = {name: [getattr(run, name) for _, run in runs] for name in ("lost", "twice")}
    overdue = [run.overdue for _, run in runs]
    return {
        "lag": plot("count", groups(lags)),
        "behind": plot("ms", groups(behind)),
        "runs_late": plot("ms", late, log=_is_log([*late["p50"], *late["p99"]])),
        "runs_wrong": plot("count", wrong) if any(any(y) for y in wrong.values()) else None,
        "runs_overdue": plot("count", {"overdue": overdue}) if any(overdue) else None,
        "runs_bytes": plot("bytes_total", {"records in the store": [run.bytes for _, run in runs]}),
    }
