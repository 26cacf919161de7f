"""The files of a nightly run in its directory.

report.html            the report, one self-contained page
analysis.json          all figures (`analysis.Analysis`)
parquet/<table>.parquet  the lists among them (`analysis.TABLES`)
audit.json, offenders.parquet  those of the audit, which writes them (`audit.finish`)
comparison.json        what is new and what grew worse since the run before, if there was one
history.jsonl          a line for each run: figures that change from run to run, for curves over several
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow.parquet as pq

from duemq.spark_jobs.analyse.analysis import Analysis, figures
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.report import render
from duemq.spark_jobs.store.local_files import is_same, local_path, real_path, reason, replace_file

if TYPE_CHECKING:
    from duemq.spark_jobs.analyse.comparison import Comparison

MAX_RUNS: Final = 400
"""Lines of history.jsonl that are kept for each store: more than a year of nights."""


class Lag(msgspec.Struct):
    """How far behind a consumer group is at a topic, all queues together."""

    consumer_group: str
    topic: str
    lag: int
    behind_ms: int


class Run(msgspec.Struct):
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


def run_of(analysis: Analysis) -> Run:
    """Return the figures of an analysis that go into the history."""
    summary = analysis.audit
    lags: dict[tuple[str, str], Lag] = {}
    for consumer in analysis.consumers:
        key = (consumer.consumer_group, consumer.topic)
        lag = lags.setdefault(key, Lag(*key, 0, 0))
        lag.lag += consumer.lag or 0
        lag.behind_ms = max(lag.behind_ms, consumer.behind_ms or 0)
    late = summary.lateness.percentiles_ms
    return Run(
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


def read_history(path: str) -> list[Run]:
    """Return the runs in a history.jsonl, in the order of its lines; none if there is no file. Invalid lines are left
    out."""
    runs = []
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            runs.append(msgspec.json.decode(line, type=Run))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return runs


def write(
    analysis: Analysis,
    out: str,
    *,
    comparison: Comparison | None = None,
    history: str | None = None,
    index: str | None = None,
) -> list[str]:
    """Write the files into a directory, which is made if missing; return the paths of those written here that are no
    tables. `history`: the path of history.jsonl, if it is not in the directory; `index`: the address of a page of all
    reports. Raises JobError."""
    out = local_path(out)
    try:
        os.makedirs(os.path.join(out, "parquet"), exist_ok=True)
        history = history or os.path.join(out, "history.jsonl")
        run = run_of(analysis)
        before = read_history(history)
        # The limit holds for each store: several may share a history.
        mine = [each for each in (*before, run) if is_same(each.store, run.store)][-MAX_RUNS:]
        runs = [*(each for each in before if not is_same(each.store, run.store)), *mine]
        texts = {
            os.path.join(out, "analysis.json"): msgspec.json.format(msgspec.json.encode(analysis), indent=1),
            os.path.join(out, "report.html"): render(analysis, mine, comparison, index=index).encode(),
        }
        compared = os.path.join(out, "comparison.json")
        if comparison is not None:
            texts[compared] = msgspec.json.format(msgspec.json.encode(comparison), indent=1)
        elif os.path.exists(compared):
            os.unlink(compared)
        texts[history] = b"".join(msgspec.json.encode(run) + b"\n" for run in runs)
        for path, text in texts.items():
            replace_file(path, text)
        for name, table in figures(analysis).items():
            pq.write_table(table, os.path.join(out, "parquet", f"{name}.parquet"), compression="zstd")
    except OSError as error:
        raise JobError(f"{out}: cannot be written: {reason(error)}") from None
    return list(texts)
