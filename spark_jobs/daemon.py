"""The process that forks the Python workers of Spark's tasks. It is pyspark's daemon, changed so that workers find most
modules imported, print nothing when a reader goes away, and end when the daemon ends. The daemon ends with Spark's
Java, which ends with the driver; but if the daemon is killed, workers in the middle of a task would otherwise continue.

Spark starts this module by its setting spark.python.daemon.module; standard output is the module's channel to Spark.
Two kinds of process do not come from here. Spark forks the workers that plan the read of a data source from pyspark's
own daemon, whatever the setting is, and uses them again until they have been idle for a minute. And it starts the
reader of a stream as a process of its own.
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
    """Import what workers need, which saves 0.8 s of processor time in each of them. This is all that the source and
    the jobs import except pyarrow, which starts a thread: a process with threads must not fork."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's algebra would start threads, and nothing here uses it
    with suppress(ImportError):  # the worker that needs it says so
        import numpy  # noqa: F401
        import pyspark.sql.datasource
        import pyspark.worker  # noqa: F401

        import duemq.scheduler.levels.service
        import duemq.scheduler.waiting
        import duemq.storage.store  # noqa: F401


def end_with(parent: int) -> None:
    """Have this process, a child of the process with the id `parent`, killed when the parent ends. Does nothing except
    on Linux."""
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
