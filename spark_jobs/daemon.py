"""The process that forks Spark's Python workers: pyspark's own, with workers that are quiet where a reader goes away.

Spark starts the module by its setting spark.python.daemon.module; standard output is its channel to it.
"""

from pyspark import daemon

from spark_jobs.worker import hush

if __name__ == "__main__":
    hush()
    daemon.manager()
