"""A Spark session for the jobs: the same Python in all processes, Arrow, and memory that a laptop has."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.quiet import without_noise
from duemq.spark_jobs.spark_errors import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIN_JAVA: Final = 17
"""The oldest Java that Spark 4 runs on."""
DRIVER_MEMORY: Final = "1536m"
"""Memory of the driver; with two or four Python workers of some hundred MB each, everything fits into 4 GiB."""

_MIN_MEMORY: Final = 450 << 20
"""The least memory with which Spark starts."""
_MEMORY: Final = re.compile(r"(\d+)([kmgt]?)", re.IGNORECASE | re.ASCII)
"""A size as Java, which is started with it, accepts it; without a unit it is in bytes."""

_DEFAULTS: Final = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.worker.reuse": "true",
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.join.preferSortMergeJoin": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
}
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


def check_java() -> None:
    """Raise JobError if there is no Java that Spark runs on."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    hint = f"install Java {MIN_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
    if not java or not os.path.exists(java):
        where = f"JAVA_HOME is {home}, where there is no bin/java" if home else "there is no java on the PATH"
        raise JobError(f"Spark needs Java, and {where}: {hint}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"Spark needs Java, and {java} does not run ({error}): {hint}") from None
    found = _VERSION.search(answer.stderr + answer.stdout)
    if found is None or int(found[1]) < MIN_JAVA:
        version = found[1] if found else "unknown"
        raise JobError(f"Spark needs Java {MIN_JAVA} or newer, and {java} is version {version}: {hint}")


def check_memory(memory: str) -> None:
    """Raise JobError if the driver's memory is not a size, or is too small for Spark."""
    found = _MEMORY.fullmatch(memory)
    if found is None:
        raise JobError(f"a memory of {memory!r}: give a number and k, m, g or t, such as {DRIVER_MEMORY} or 2g")
    if int(found[1]) << 10 * " kmgt".index(found[2].lower() or " ") < _MIN_MEMORY:
        unit = "" if found[2] else " bytes"
        raise JobError(f"a memory of {memory}{unit} is too small: Spark needs at least {_MIN_MEMORY >> 20}m")


def make_session(
    name: str,
    *,
    master: str | None = None,
    memory: str | None = None,
    settings: Mapping[str, str] | None = None,
    for_jobs: bool = False,
) -> SparkSession:
    """Return a session with the data source `rocketmq` registered. `master`: by default local[*], or under spark-submit
    its setting. `memory`: that of the driver, and so of local tasks, in Spark's notation (2g). `for_jobs`: whether the
    session is for duemq's own jobs, whose Java only moves arrays. A local Java then uses only its fast compiler, which
    would slow down long queries. Raises JobError."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise JobError("the Spark jobs need more packages: pip install 'duemq[spark]'") from None
    if not os.environ.get("SPARK_HOME") or "SPARK_ENV_LOADED" not in os.environ:
        check_java()
    from duemq.spark_jobs.source.source import RocketmqSource

    # Workers must run this Python: another one may lack numpy or pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if "SPARK_ENV_LOADED" not in os.environ:
        # Tasks import duemq, and Spark's workers do not know where it is.
        root = str(Path(os.path.abspath(__file__)).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Spark does not start if the host name does not resolve, or resolves to an address that no interface has.
    is_local = (master is None and "SPARK_ENV_LOADED" not in os.environ) or (master or "").startswith("local")
    builder = SparkSession.builder.appName(name)
    if master is not None or "SPARK_ENV_LOADED" not in os.environ:
        builder = builder.master(master or "local[*]")
    for key, value in _DEFAULTS.items():
        builder = builder.config(key, value)
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        if memory:
            check_memory(memory)
        builder = builder.config("spark.driver.memory", memory or DRIVER_MEMORY)
        log4j = os.path.join(os.path.dirname(__file__), "log4j2.properties")
        options = f"-Dlog4j2.configurationFile=file:{log4j}" + (" -XX:TieredStopAtLevel=1" if for_jobs else "")
        options += " -Dduemq.tasks=error" if os.environ.get("DUEMQ_TRACEBACK") else ""
        builder = builder.config("spark.driver.extraJavaOptions", options)
        builder = builder.config("spark.python.daemon.module", "duemq.spark_jobs.daemon")
        # Through these sockets rows arrive from Python a fifth sooner than by TCP, and with less work.
        builder = builder.config("spark.python.unix.domain.socket.enabled", "true")
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    # This logger would print Java's whole stack for a query that cannot run; the exception says what is wrong.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    try:
        with without_noise() if is_local else nullcontext():
            session = builder.getOrCreate()
    except Exception as error:
        raise JobError(f"Spark did not start: {first_line(error)}") from error
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(RocketmqSource)
    return session
