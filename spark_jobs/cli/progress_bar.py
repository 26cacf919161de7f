"""A progress bar on stderr: of Spark's tasks, or of bytes. Shown only on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INTERVAL_S: Final = 0.25


def _console() -> Console:
    return Console(stderr=True)


@contextmanager
def spark_tasks(session: SparkSession, what: str) -> Iterator[None]:
    """While the block runs, show how many tasks of the active stages are done."""
    console = _console()
    if not console.is_terminal:
        yield
        return
    tracker: Any = session.sparkContext.statusTracker()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    done = threading.Event()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=None)

        def watch() -> None:
            finished = 0
            known: dict[int, int] = {}
            while not done.wait(_INTERVAL_S):
                total = finished = 0
                for stage in tracker.getActiveStageIds():
                    info = tracker.getStageInfo(stage)
                    if info is not None:
                        known[stage] = info.numTasks
                        total += info.numTasks
                        finished += info.numCompletedTasks
                progress.update(bar, total=total or None, completed=finished)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextmanager
def bytes_done(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, total bytes), which shows them while the block runs."""
    console = _console()
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
