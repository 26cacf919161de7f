"""Setup of a process that runs tasks for Spark."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from itertools import count
from typing import Any, Final

_PRINT_EXC: Final = traceback.print_exc
_TASKS: Final = count()
"""The tasks of this process so far."""
_FREEZING: Final = 2
"""Number of tasks, from the first one on, that begin by freezing what exists."""


def prepare_worker() -> None:
    """Prepare a worker process for a task. To be called at the beginning of each task. Spark's workers collect all
    garbage after each task, which takes 40 ms and more with the imported modules, for tasks of 200 ms. The modules live
    until the process ends anyway, so they are frozen: at the first task, and those that this one imports at the second.
    """
    # Spark sets this for its workers; a driver's process belongs to the user.
    if "SPARK_REUSE_WORKER" not in os.environ:
        return
    # Not at each task: with the modules, the functions of the task at hand are frozen, and then never collected.
    if next(_TASKS) < _FREEZING:
        gc.freeze()
        hush()


def hush() -> None:
    """Keep pyspark's loop around the tasks from printing that its socket was closed: Spark closes the socket once it
    has all rows that a limit asks for, and the traceback would make a good result look like a failure."""
    traceback.print_exc = _print_exc


def _print_exc(*args: Any, **options: Any) -> None:
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        _PRINT_EXC(*args, **options)
