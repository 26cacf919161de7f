"""The Spark jobs for notebooks and programs. They need pip install 'duemq[spark]', and Java 17 or newer.

    from duemq.spark import audit, load, make_session

    spark = make_session("notebook")
    pending = load(spark, "/data/*/store", table="pending", topics=["orders"])
    pending.groupBy("store").count().show()
    summary = audit(spark, "/data/a/store")
    print(summary.delivered, summary.lost, summary.lateness.percentiles_ms.get("p99"))

`register(spark)` registers the data source `rocketmq` in a session of your own, whose workers must run this Python
(PYSPARK_PYTHON). All of these functions raise `JobError` if they fail; its text is one line. Without the extra, the
import of a function raises ModuleNotFoundError, which says what to install.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duemq.spark_jobs.analyse.analyse import analyse, forecast_of
    from duemq.spark_jobs.analyse.analysis import Analysis
    from duemq.spark_jobs.analyse.cluster import analyse_cluster
    from duemq.spark_jobs.analyse.forecast import Forecast
    from duemq.spark_jobs.archive.append import AppendResult, append, open_table
    from duemq.spark_jobs.archive.archive import ArchiveResult, RestoreResult, archive, restore
    from duemq.spark_jobs.archive.parquet_table import committed_files
    from duemq.spark_jobs.audit.audit import Lateness, Offender, Summary, audit, verify
    from duemq.spark_jobs.compact.compact import CompactOptions, CompactResult, compact
    from duemq.spark_jobs.errors import JobError, NoStore
    from duemq.spark_jobs.session import make_session
    from duemq.spark_jobs.source.reading import load, stream
    from duemq.spark_jobs.source.source import register

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
    "analyse.analyse": ("analyse", "forecast_of"),
    "analyse.analysis": ("Analysis",),
    "archive.append": ("AppendResult", "append", "open_table"),
    "archive.archive": ("ArchiveResult", "RestoreResult", "archive", "restore"),
    "audit.audit": ("Lateness", "Offender", "Summary", "audit", "verify"),
    "analyse.cluster": ("analyse_cluster",),
    "compact.compact": ("CompactOptions", "CompactResult", "compact"),
    "errors": ("JobError", "NoStore"),
    "analyse.forecast": ("Forecast",),
    "source.reading": ("load", "stream"),
    "session": ("make_session",),
    "source.source": ("register",),
    "archive.parquet_table": ("committed_files",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # for type checkers, any name would exist in a module with this function, even a wrong one

    def __getattr__(name: str) -> object:
        """Import a name when it is first used, since the import of numpy, pyarrow and pyspark takes seconds. Raises
        AttributeError if there is no such name, and ModuleNotFoundError if one of these packages is missing."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(f"duemq.spark_jobs.{_MODULE_OF[name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "duemq":
                raise
            told = f"duemq.spark needs the package {error.name}: pip install 'duemq[spark]'"
            raise ModuleNotFoundError(told, name=error.name) from error
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
