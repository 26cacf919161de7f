"""The Spark jobs for notebooks and programs: pip install 'duemq[spark]', and Java 17 or newer.

    from duemq.spark import audit, load, make_session

    spark = make_session("notebook")
    pending = load(spark, "/data/*/store", table="pending", topics=["orders"])
    pending.groupBy("store").count().show()
    summary = audit(spark, "/data/a/store")
    print(summary.delivered, summary.lost, summary.lateness.percentiles_ms.get("p99"))

`register(spark)` makes the data source `rocketmq` known to a session of your own, whose workers have to be this Python
(PYSPARK_PYTHON). `JobError` is what all of these raise where something cannot be done; its text is one line.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_jobs.analyse import analyse, forecast_of
    from spark_jobs.analysis import Analysis
    from spark_jobs.append import AppendResult, append, open_table
    from spark_jobs.archive import ArchiveResult, RestoreResult, archive, restore
    from spark_jobs.audit import Lateness, Offender, Summary, audit, verify
    from spark_jobs.cluster import analyse_cluster
    from spark_jobs.compact import CompactOptions, CompactResult, compact
    from spark_jobs.errors import JobError, NoStore
    from spark_jobs.forecast import Forecast
    from spark_jobs.reading import load, stream
    from spark_jobs.session import make_session
    from spark_jobs.source import register
    from spark_jobs.writers.parquet_table import committed_files

__all__ = [
    "Analysis",
    "AppendResult",
    "ArchiveResult",
    "CompactOptions",
    "CompactResult",
    "Forecast",
    "JobError",
    "Lateness",
    "NoStore",
    "Offender",
    "RestoreResult",
    "Summary",
    "analyse",
    "analyse_cluster",
    "append",
    "archive",
    "audit",
    "committed_files",
    "compact",
    "forecast_of",
    "load",
    "make_session",
    "open_table",
    "register",
    "restore",
    "stream",
    "verify",
]

_MODULES = {
    "analyse": ("analyse", "forecast_of"),
    "analysis": ("Analysis",),
    "append": ("AppendResult", "append", "open_table"),
    "archive": ("ArchiveResult", "RestoreResult", "archive", "restore"),
    "audit": ("Lateness", "Offender", "Summary", "audit", "verify"),
    "cluster": ("analyse_cluster",),
    "compact": ("CompactOptions", "CompactResult", "compact"),
    "errors": ("JobError", "NoStore"),
    "forecast": ("Forecast",),
    "reading": ("load", "stream"),
    "session": ("make_session",),
    "source": ("register",),
    "writers.parquet_table": ("committed_files",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: numpy, pyarrow and pyspark take seconds."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"spark_jobs.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
