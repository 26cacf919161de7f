"""The pages: static/page.html and static/index.html, filled in."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jinja2

from duemq.spark_jobs.report import formats, plots
from duemq.spark_jobs.report.verdict import BAD, GOOD, WARN, since_of, verdict_of

if TYPE_CHECKING:
    from duemq.spark_jobs.analyse.analysis import Analysis, LatenessFigures
    from duemq.spark_jobs.analyse.comparison import Comparison
    from duemq.spark_jobs.analyse.history import Listed, RunFigures

T = TypeVar("T")
OPEN: Final = 10
"""Rows of a table that are visible at first."""
MOST: Final = 100
"""Rows of a table including folded ones; the Parquet files have all."""
GENERATOR: Final = "duemq spark analyse --nights"
"""The generator named in a page of nights, by which such a page is recognised."""
_SCRIPTS: Final = ("uPlot.iife.min.js", "page.js")


def render(
    analysis: Analysis, history: Sequence[RunFigures], comparison: Comparison | None = None, *, index: str | None = None
) -> str:
    """Return the report as HTML. `history`: the runs so far, including this one, oldest first; curves over the runs
    need at least two. `comparison`: with the run before. `index`: the address of a page of all reports."""
    new = comparison.new_offenders if comparison is not None else []
    are_new = {(one.what, one.store, one.physical_offset) for one in new}
    drawn = plots.plots_of(analysis, history)
    heat = plots.heat_of(analysis)
    return _template("page.html").render(
        c=comparison,
        index=index,
        since=since_of(comparison, analysis.audit.store) if comparison is not None else None,
        new=new,
        offenders=[
            one for one in analysis.audit.offenders if (one.what, one.store, one.physical_offset) not in are_new
        ],
        a=analysis,
        s=analysis.audit,
        members=_by_severity(analysis.stores, lambda one: one.mood, lambda one: one.store),
        verdict=verdict_of(analysis.audit, new),
        runs=sorted(history, key=lambda run: run.made_ms, reverse=True),
        plots=drawn,
        heat=heat,
        hours=_hours(analysis),
        groups=_groups(analysis),
        by_hour=sorted(analysis.late_by_hour, key=lambda late: late.name),
        scale=_scale([*analysis.late_by_topic, *analysis.late_by_level, *analysis.late_by_hour]),
        data=plots.as_json({"plots": drawn, "heat": heat}),
        # A second with one message adds nothing to the count of waiting messages.
        busiest=[second for second in analysis.busiest if second.count > 1],
    )


def render_index(nights: Sequence[Listed]) -> str:
    """Return the page of all nights as HTML. `nights`: the last one first."""
    late = [listed.night.run.p99_ms for listed in nights]
    return _template("index.html").render(
        nights=nights,
        stores=sorted({listed.night.run.store for listed in nights}),
        newest=_newest(nights),
        latest=max(late, default=0),
        generator=GENERATOR,
    )


def _newest(nights: Sequence[Listed]) -> list[Listed]:
    """Return the last night of each cluster, then of each store, the worst first."""
    found: dict[str, Listed] = {}
    for listed in nights:
        found.setdefault(listed.night.run.store, listed)
    newest = _by_severity(found.values(), lambda one: one.night.mood, lambda one: one.night.run.store)
    return sorted(newest, key=lambda listed: not listed.night.stores)


def _by_severity(found: Iterable[T], mood: Callable[[T], str | None], store: Callable[[T], str]) -> list[T]:
    """Return the items, the worst first: those that could not be read, which have no mood, before the bad ones; equal
    ones in the order of their stores."""
    moods = (None, BAD, WARN, GOOD)
    return sorted(found, key=lambda one: (moods.index(mood(one)), store(one)))


@cache
def _text(name: str) -> str:
    return resources.files("duemq.spark_jobs.report").joinpath("static", name).read_text("utf-8")


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    scripts = [_text(name) for name in _SCRIPTS]
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    environment.filters |= {
        "count": formats.count,
        "rate": formats.rate,
        "duration": formats.duration,
        "size": formats.size,
        "moment": formats.moment,
        "name": formats.name,
        "whole": formats.whole,
        "short": formats.short,
        "copied": formats.copied,
        "position": _position,
        "percent": _percent,
    }
    environment.globals |= {
        "open": OPEN,
        "most": MOST,
        "marks": {GOOD: "✓ good", WARN: "! look", BAD: "✗ bad"},
        "share": formats.share,
        "styles": [_text("uPlot.min.css"), _text("page.css")],
        "scripts": scripts,
        "script_hashes": " ".join(f"'sha256-{digest}'" for digest in hashes),
    }
    return environment.get_template(name)


def _hours(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the heat map as a table: for each hour the messages due, the fullest minute, and the minute with the worst
    p99."""
    hours: dict[int, dict[str, Any]] = defaultdict(lambda: {"due": 0, "fullest": None, "worst": None})
    for cell in analysis.heat:
        row = hours[cell.hour]
        row["due"] += cell.due
        if row["fullest"] is None or cell.due > row["fullest"].due:
            row["fullest"] = cell
        if row["worst"] is None or cell.p99_ms > row["worst"].p99_ms:
            row["worst"] = cell
    return [{"hour": hour, **hours[hour]} for hour in sorted(hours)]


def _groups(analysis: Analysis) -> list[dict[str, Any]]:
    """Return consumer groups at topics, all queues together, the largest lag first. A lag is None if no queue has
    one."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for one in analysis.consumers:
        key = (one.consumer_group, one.topic)
        row = groups.setdefault(key, {"group": key[0], "topic": key[1], "queues": 0, "lag": None, "behind_ms": None})
        row["queues"] += 1
        for name in ("lag", "behind_ms"):
            value = getattr(one, name)
            if value is not None:
                row[name] = (row[name] or 0) + value if name == "lag" else max(row[name] or 0, value)
    return sorted(groups.values(), key=lambda row: (-(row["lag"] or 0), row["group"], row["topic"]))


def _scale(late: list[LatenessFigures]) -> float:
    """Return the end of the scale of lateness in tables, ms."""
    return float(max((row.max_ms for row in late), default=0))


def _position(ms: float, end: float) -> str:
    """Return where a lateness is on a logarithmic scale from 1 ms on, as CSS."""
    if ms <= 1 or end <= 1:
        return "0%"
    return f"{min(math.log(ms) / math.log(end), 1) * 100:.2f}%"


def _percent(part: float, whole: float) -> str:
    """Return the length of a bar, as CSS."""
    return f"{part * 100 / whole:.2f}%" if whole else "0%"
