"""Archives of the classes that Spark loads, for the tests: Spark starts some twenty times in them, and with one in 9 s
instead of 17 (two busy cores).

    python -m tests.spark.class_archive PATH [SPARK]      SPARK: a directory with another pyspark than the installed one

Java passes over an archive that is missing, or of other classes (-Xshare:auto, its default)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench import spark_stores

PATH = Path(sys.prefix) / "spark.jsa"
OLDEST = Path(sys.prefix) / "oldest-spark"
"""Where `make test` puts the oldest Spark that we allow..."""
OLDEST_PATH = Path(sys.prefix) / "oldest-spark.jsa"
"""...and the archive of its classes."""
_COLLECTOR = "-XX:+UseSerialGC"
"""With others threads go on collecting beside the tasks, whose cores they take."""
QUERY = "select topic, count(*) n from messages where queue_id >= 0 group by topic order by n desc"
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""Else Java says on its standard output that an archive is not of its classes, as it is not of an older Spark's."""


def use() -> None:
    """Have all Spark processes that are started from here on use the archive, if there is one."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", options(PATH))


def options(path: Path) -> str:
    """What Java is told, for a Spark with the classes of an archive."""
    return f"{_COLLECTOR} -XX:SharedArchiveFile={path} {_QUIET}" if path.exists() else _COLLECTOR


def oldest() -> dict[str, str]:
    """The environment of a Python process that has the oldest Spark that we allow, and this source tree."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OLDEST), root]), "PYSPARK_PYTHON": sys.executable}
    environment.pop("SPARK_HOME", None)
    return environment | {"SPARK_SUBMIT_OPTS": options(OLDEST_PATH)}


def make(path: Path, spark: Path | None = None) -> None:
    """Make the archive of what a query loads, with the installed Spark or that of a directory. Raises
    CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        spark_stores.write(store, 0.01, segment=4 << 20)
        command = [str(Path(sys.prefix) / "bin" / "duemq"), "spark", "sql", str(store), QUERY, "--master", "local[1]"]
        added = {"SPARK_SUBMIT_OPTS": f"{_COLLECTOR} -XX:ArchiveClassesAtExit={path} {_QUIET}"}
        added |= {"PYTHONPATH": str(spark)} if spark is not None else {}
        # Java writes it when it ends, somewhat later than the command: so does its end of this pipe.
        with subprocess.Popen(command, env={**os.environ, **added}, stdout=subprocess.PIPE) as run:
            run.communicate(timeout=300)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)


if __name__ == "__main__":
    make(*[Path(each).resolve() for each in sys.argv[1:]])
