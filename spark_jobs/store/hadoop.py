"""Connects pyarrow to hdfs://. Pyarrow loads Hadoop's C library, which starts Java in the process and needs to know
where all parts of Hadoop are. On a machine with Hadoop installed these can be found out, in the driver and in the
tasks.

Variables as https://arrow.apache.org/docs/python/filesystems.html#hadoop-distributed-file-system-hdfs names them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import MutableMapping

SCHEMES: Final = ("hdfs://", "viewfs://")
_MEMORY: Final = "-Xmx256m"
"""Heap limit of the Java in each process, which otherwise could take a quarter of the machine's memory."""
_NEEDS: Final = (
    "where Python runs, pyarrow needs Hadoop's client: JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR, the directory of "
    "libhdfs.so) and CLASSPATH=$(hadoop classpath --glob)"
)


def connect(uri: str) -> tuple[Any, str]:
    """Return pyarrow's file system for a URI of one of `SCHEMES`, and the path in it. Raises OSError."""
    from pyarrow import fs

    complete(os.environ)
    try:
        return fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except OSError as error:
        raise OSError(f"{str(error).splitlines()[0]}; {_NEEDS}") from None


def complete(environment: MutableMapping[str, str]) -> None:
    """Set the variables that are missing, as far as the programs `java` and `hadoop` on the PATH tell them."""
    environment.setdefault("LIBHDFS_OPTS", _MEMORY)
    path = environment.get("PATH")
    java = shutil.which("java", path=path)
    if java is not None:
        environment.setdefault("JAVA_HOME", os.path.dirname(os.path.dirname(os.path.realpath(java))))
    if "CLASSPATH" in environment:
        return
    home = environment.get("HADOOP_HOME")
    hadoop = os.path.join(home, "bin", "hadoop") if home else shutil.which("hadoop", path=path)
    if not hadoop:
        return
    try:
        told = subprocess.run(
            [hadoop, "classpath", "--glob"], capture_output=True, text=True, timeout=60, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return
    environment["CLASSPATH"] = told.stdout.strip()
    if "HADOOP_HOME" not in environment:
        environment["HADOOP_HOME"] = os.path.dirname(os.path.dirname(os.path.realpath(hadoop)))
