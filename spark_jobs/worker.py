"""What a process does that runs tasks for Spark."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from functools import cache
from typing import Any, Final

_PRINT_EXC: Final = traceback.print_exc


@cache
def settle() -> None:
    """To be called where a task begins; the first time counts. Spark's workers collect garbage after each task, all of
    it: with what we import that is 40 ms and more, of tasks of 200. What there is by then stays for good anyway."""
    # Spark's own note for its workers; a driver is somebody else's process.
    if "SPARK_REUSE_WORKER" in os.environ:
        gc.freeze()
        hush()


def hush() -> None:
    """Let pyspark's loop around the tasks not print that its socket was closed: Spark closes it where it has all rows
    that a limit lets through, and the traceback looks like a failure in the middle of a good result."""
    traceback.print_exc = _print_exc


def _print_exc(*args: Any, **options: Any) -> None:
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        _PRINT_EXC(*args, **options)
