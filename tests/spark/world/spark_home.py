"""Where the tests start Spark from, and with which options for Java; they start it some five times.

SPARK_HOME is a directory of links to all of pyspark except the ZIP file of its Python modules. Spark has its Python
processes look there first, where they find no compiled modules: each process compiled them anew, for a second."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

OLDEST = Path(sys.prefix) / "oldest-spark"
"""The directory in which `make test` puts the oldest supported Spark."""
_OPTIONS = (
    "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 "
    "-XX:+UnlockDiagnosticVMOptions -XX:+UnlockExperimentalVMOptions -XX:+IgnoreUnrecognizedVMOptions "
    "-XX:-BytecodeVerificationRemote "
    "-XX:SymbolTableSize=262144 -XX:ReservedCodeCacheSize=200m -XX:-UseCodeCacheFlushing"
)
"""Other collectors have threads that go on collecting beside the tasks, on the tasks' cores; the second compiler takes
25 s of a short query's 40 s of CPU; and a start spends 3 s of 15 on proving that Spark's classes are well-formed. The
names of Spark's classes fill the usual table of symbols many times over, and with one compiler Java has so little room
for compiled code that it keeps throwing some away."""


def use() -> None:
    """Have all Spark processes started from here on use these options and the links."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", _OPTIONS)
    if "SPARK_HOME" not in os.environ:
        spec = importlib.util.find_spec("pyspark")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        os.environ["SPARK_HOME"] = _links(Path(spec.submodule_search_locations[0]), "spark-home")


def oldest() -> dict[str, str]:
    """Return the environment of a Python process with the oldest supported Spark and this source tree."""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OLDEST), root]), "PYSPARK_PYTHON": sys.executable}
    return environment | {"SPARK_HOME": _links(OLDEST / "pyspark", "oldest-spark-home"), "SPARK_SUBMIT_OPTS": _OPTIONS}


def of_a_user() -> dict[str, str]:
    """Return the environment without what a Spark session of this process has set, but with what `use` has set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    return kept | {name: os.environ[name] for name in ("SPARK_SUBMIT_OPTS", "SPARK_HOME")}


def _links(pyspark: Path, name: str) -> str:
    """Make the directory of links in the environment of this Python, under a name; return its path."""
    home = Path(sys.prefix) / name
    home.mkdir(exist_ok=True)
    for path in pyspark.iterdir():
        if path.is_dir() and path.name != "python":
            with suppress(FileExistsError):  # another run of tests may make them, too
                (home / path.name).symlink_to(path)
    return str(home)
