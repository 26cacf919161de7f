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
from typing import TYPE_CHECKING

import msgspec
import pyarrow.parquet as pq

from duemq.spark_jobs.analyse.analysis import Analysis, figures
from duemq.spark_jobs.analyse.history import HISTORY, MAX_RUNS, RunFigures, read_history, run_of
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.report import render
from duemq.spark_jobs.store.local_files import is_same, local_path, reason
from duemq.storage.files import OsFiles

if TYPE_CHECKING:
    from duemq.spark_jobs.analyse.comparison import Comparison


def write(
    analysis: Analysis,
    out: str,
    *,
    comparison: Comparison | None = None,
    history: str | None = None,
    index: str | None = None,
) -> list[str]:
    """Write the files into a directory, which is made if missing; return the paths of the files written here that are
    not tables. `history`: the path of history.jsonl, if it is not in the directory; the caller then adds the run to it
    with `note`, once the run is whole. `index`: the address of a page of all reports. Raises JobError."""
    out = local_path(out)
    try:
        os.makedirs(os.path.join(out, "parquet"), exist_ok=True)
        run = run_of(analysis)
        mine, _ = _with(run, history or os.path.join(out, HISTORY))
        texts = {
            os.path.join(out, "analysis.json"): msgspec.json.format(msgspec.json.encode(analysis), indent=1),
            os.path.join(out, "report.html"): render(analysis, mine, comparison, index=index).encode(),
        }
        compared = os.path.join(out, "comparison.json")
        if comparison is not None:
            texts[compared] = msgspec.json.format(msgspec.json.encode(comparison), indent=1)
        elif os.path.exists(compared):
            os.unlink(compared)
        for path, text in texts.items():
            OsFiles().write_whole(path, text)
        for name, table in figures(analysis).items():
            pq.write_table(table, os.path.join(out, "parquet", f"{name}.parquet"), compression="zstd")
        if history is None:
            history = os.path.join(out, HISTORY)
            note(run, history)
            return [*texts, history]
    except OSError as error:
        raise JobError(f"{out}: cannot be written: {reason(error)}") from None
    return list(texts)


def note(run: RunFigures, history: str) -> None:
    """Add a run to the file history.jsonl. Raises OSError."""
    mine, others = _with(run, history)
    OsFiles().write_whole(history, b"".join(msgspec.json.encode(each) + b"\n" for each in (*others, *mine)))


def _with(run: RunFigures, history: str) -> tuple[list[RunFigures], list[RunFigures]]:
    """Return the runs that history.jsonl is to have: those of the given run's store, the given run last; and those of
    other stores."""
    before = read_history(history)
    # The limit holds for each store: several may share a history.
    mine = [each for each in (*before, run) if is_same(each.store, run.store)][-MAX_RUNS:]
    return mine, [each for each in before if not is_same(each.store, run.store)]
