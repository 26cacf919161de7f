"""What makes starts of Spark cheaper for the tests, which start it some ten times.

    python -m tests.spark.world.class_archive PATH

writes an archive of the classes that Spark loads: with it Java takes 10 s of processor time to the first row instead of
20. Java ignores an archive that is missing, of other classes, or of another installation of Java (-Xshare:auto, its
default).

And a directory of links, as SPARK_HOME, to all of pyspark except the ZIP file of its Python modules. Spark has its
Python processes look there first, where they find no compiled modules: each process compiled them anew, for a second.
The tests with the oldest Spark start it without."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.bench.spark import stores as spark_stores
from tests.peers.class_archives.options import to_use, to_write

PATH = Path(sys.prefix) / "spark.jsa"
HOME = Path(sys.prefix) / "spark-home"
OLDEST = Path(sys.prefix) / "oldest-spark"
"""The directory in which `make test` puts the oldest supported Spark. It starts twice: an archive would cost more than
it saves."""
_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Other collectors have threads that go on collecting beside the tasks, on the tasks' cores; and the second compiler
takes 25 s of a short query's 40 s of CPU."""
QUERY = "select topic, count(*) n from messages where queue_id >= 0 group by topic order by n desc"


def use() -> None:
    """Have all Spark processes started from here on use the archive, if there is one, and the links."""
    archive = to_use(PATH) if PATH.exists() else ()
    os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join([_OPTIONS, *archive]))
    _use_links()


def _use_links() -> None:
    if "SPARK_HOME" not in os.environ:
        spec = importlib.util.find_spec("pyspark")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        HOME.mkdir(exist_ok=True)
        for path in Path(spec.submodule_search_locations[0]).iterdir():
            if path.is_dir() and path.name != "python":
                with suppress(FileExistsError):  # another run of tests may make them, too
                    (HOME / path.name).symlink_to(path)
        os.environ["SPARK_HOME"] = str(HOME)


def oldest() -> dict[str, str]:
    """Return the environment of a Python process with the oldest supported Spark and this source tree."""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OLDEST), root]), "PYSPARK_PYTHON": sys.executable}
    environment.pop("SPARK_HOME", None)
    return environment | {"SPARK_SUBMIT_OPTS": _OPTIONS}


def of_a_user() -> dict[str, str]:
    """Return the environment without what a Spark session of this process has set, but with what `use` has set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    return kept | {name: os.environ[name] for name in ("SPARK_SUBMIT_OPTS", "SPARK_HOME")}


def make(path: Path) -> None:
    """Make the archive of the classes that a query loads. Raises CalledProcessError."""
    _use_links()
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        spark_stores.write(store, 0.01, segment=4 << 20)
        command = [str(Path(sys.prefix) / "bin" / "duemq"), "spark", "sql", str(store), QUERY, "--master", "local[1]"]
        added = {"SPARK_SUBMIT_OPTS": " ".join([_OPTIONS, *to_write(path)])}
        # Java writes the archive when it ends, somewhat later than the command: its end of this pipe closes then, too.
        with subprocess.Popen(command, env={**os.environ, **added}, stdout=subprocess.PIPE) as run:
            run.communicate(timeout=300)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
