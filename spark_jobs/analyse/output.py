"""What a nightly run leaves in its directory.

report.html            the report, one page that needs nothing else
analysis.json          all figures (`analyse.Analysis`)
parquet/<table>.parquet  the lists among them (`analyse.TABLES`)
audit.json, offenders.parquet  of the audit, which writes them (`audit.finish`)
comparison.json        what is new and what grew worse since the run before, where there was one
history.jsonl          a line a run: what changes from run to run, for curves over more than one
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
"""Lines of history.jsonl that are kept of a store: more than a year of nights."""


class Lag(msgspec.Struct):
    """How far behind a consumer group is at a topic, all queues together."""

    consumer_group: str
    topic: str
    lag: int
    behind_ms: int


class Run(msgspec.Struct):
    """What one run found. Times in ms since the epoch."""

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
    """What of an analysis goes into the history."""
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
    """The runs in a history.jsonl, oldest first; none where there is no file. Lines that are none are left out."""
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
    """Write the files into a directory, made if need be; gives their paths. `history`: the path of history.jsonl, if it
    is not in the directory; `index`: the address of a page of all reports. Raises JobError."""
    out = local_path(out)
    try:
        os.makedirs(os.path.join(out, "parquet"), exist_ok=True)
        history = history or os.path.join(out, "history.jsonl")
        run = run_of(analysis)
        before = read_history(history)
        # Of each store as many: several may share a history.
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
