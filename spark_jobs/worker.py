"""What a process does that runs tasks for Spark."""

from __future__ import annotations

import gc
import os
from functools import cache


@cache
def settle() -> None:
    """To be called where a task begins; the first time counts. Spark's workers collect garbage after each task, all of
    it: with what we import that is 40 ms and more, of tasks of 200. What there is by then stays for good anyway."""
    # Spark's own note for its workers; a driver is somebody else's process.
    if "SPARK_REUSE_WORKER" in os.environ:
        gc.freeze()
