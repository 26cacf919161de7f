"""Processes for tests of kills and of runs at the same time. They are forked from one that has imported pyarrow and the
libraries of tables: an import in each would take a second, which is most of what such a test costs.

A process runs a function of a test's module with texts as arguments. The process it is forked from has opened
nothing, and its threads are those of jemalloc and of numpy's algebra, which make them anew in a forked process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier

_LIBRARIES = (
    "deltalake",
    "pyarrow.dataset",
    "pyiceberg.catalog.sql",
    "duemq.spark_jobs.archive.append",
    "duemq.spark_jobs.archive.delta_table",
    "duemq.spark_jobs.archive.iceberg_table",
    "duemq.spark_jobs.compact.compact",
    "pytest",
    "hypothesis.strategies",
    "structlog.testing",
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(_LIBRARIES))


def barrier(parties: int) -> Barrier:
    """A barrier to give to that many processes, which begin at the same time."""
    return _CONTEXT.Barrier(parties)


def start(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a function of a module in a process of its own."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def exit_code(function: Callable[..., None], *arguments: object) -> int | None:
    """Run a function of a module in a process of its own; return its exit code, or the signal as a negative number."""
    process = start(function, *arguments)
    process.join()
    return process.exitcode
