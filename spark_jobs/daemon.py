"""The process that forks the Python workers of Spark's tasks: pyspark's own, with workers that find most modules
imported, that print nothing when a reader goes away, and that end with it. It ends with Spark's Java, which ends with
the driver; but if it is killed, workers in the middle of a task would otherwise run on.

Spark starts the module by its setting spark.python.daemon.module; standard output is the module's channel to it. Those
that plan the read of a data source Spark forks from pyspark's own daemons whatever the setting, and uses them again
until they have been idle for a minute; the reader of a stream is a process that Spark starts by itself.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

from pyspark import daemon

from duemq.spark_jobs.worker import hush

_PR_SET_PDEATHSIG = 1


def import_first() -> None:
    """Import what workers need, so that they need not do so, each anew: 0.8 s of processor time of every worker. This
    is all that the source and the jobs import, but pyarrow, which starts a thread: a process with threads must not
    fork."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's algebra would start threads, and nothing here uses it
    with suppress(ImportError):  # the worker that needs it says so
        import numpy  # noqa: F401
        import pyspark.sql.datasource
        import pyspark.worker  # noqa: F401

        import duemq.scheduler.levels.service
        import duemq.scheduler.waiting
        import duemq.storage.store  # noqa: F401


def end_with(parent: int) -> None:
    """Have this process, a child of `parent`, killed when the parent ends. Does nothing elsewhere than on Linux."""
    if not sys.platform.startswith("linux") or os.getppid() != parent:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended by now


if __name__ == "__main__":
    import_first()
    hush()
    mine = os.getpid()
    os.register_at_fork(after_in_child=lambda: end_with(mine))
    daemon.manager()
