"""Errors in Spark's processes are reported in one line, by the command line and to programs."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException

from duemq.spark_jobs import quiet, spark_errors
from duemq.spark_jobs.errors import JobError, NoStore
from duemq.spark_jobs.source.source import Options, RocketmqSource, StoreReader
from duemq.spark_jobs.spark_errors import advice
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.writers.tasks import Inline
from tests.unit.spark_jobs.compact_world import new_broker
from tests.unit.spark_jobs.source.test_queue_offsets import SCHEMA

TASK = "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n  File x, line 1\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{TASK}duemq.spark_jobs.errors.JobError: the file is gone\n SQLSTATE: 38000", "the file is gone"),
        (f"{TASK}duemq.spark_jobs.errors.NoStore: /x: is empty", "/x: is empty"),
        (f"{TASK}IsADirectoryError: [Errno 21] Is a directory: '/x/y'", "/x/y: Is a directory"),
        (f"{TASK}OSError: [Errno 5] Input/output error", None),
        (f"{TASK}MemoryError", spark_errors.OUT_OF_MEMORY),
        (f"{TASK}MemoryError: Unable to allocate 3 GiB", spark_errors.OUT_OF_MEMORY),
        (
            "An error occurred while calling o1.x.\n: org.apache.spark.SparkException: Job aborted due to stage "
            "failure: Task 0 in stage 7.0: Python worker exited unexpectedly (crashed)\n\tat a.b.C",
            spark_errors.OUT_OF_MEMORY,
        ),
        (": java.lang.OutOfMemoryError: Java heap space\n\tat a.b", "Spark's Java ran out of memory: give it more, "),
        (f"{TASK}KeyError: 'a mistake of ours'", None),
        ("no column x", None),
    ],
)
def test_what_one_can_do_something_about(text: str, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = advice(PySparkException(text))
    assert found is None if why is None else (found or "").startswith(why)
    assert advice(ValueError(text)) is None
    monkeypatch.delenv("DUEMQ_TRACEBACK", raising=False)
    with pytest.raises(JobError if why else PySparkException), spark_errors.in_one_line():
        raise PySparkException(text)
    monkeypatch.setenv("DUEMQ_TRACEBACK", "1")
    with pytest.raises(PySparkException), spark_errors.in_one_line():
        raise PySparkException(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("An error occurred while calling o1.x.\n: a.b.C$D: too\nmany\n\tat a.b", "too"),
        ("An error occurred while calling o1.x.\n: java.lang.NullPointerException\n\tat a.b", "java.lang.NullPointer"),
        ("An error occurred while calling o1.x. Trace:\npy4j.E: no", "An error occurred while calling o1.x. Trace:"),
        ("no column x: y\nbehind", "no column x: y"),
        ("", "PySparkException"),
    ],
)
def test_of_an_exception_of_java_what_it_says(text: str, why: str) -> None:
    assert spark_errors.first_line(PySparkException(text)).startswith(why)
    assert (spark_errors.summary(PySparkException(text)) or "").startswith(f"Spark: {why}")


def test_a_java_that_was_killed() -> None:
    def call(path: str) -> None:
        code = "try:\n    raise lost\nexcept Exception:\n    raise ConnectionRefusedError(111, 'Connection refused')"
        exec(compile(code, path, "exec"), {"lost": Py4JNetworkError("Answer from Java side is empty")})

    with pytest.raises(ConnectionRefusedError) as caught:
        call("/x/py4j/java_gateway.py")
    assert (advice(caught.value) or "").startswith("Spark's Java has ended")
    caught.value.__context__ = None  # at the next call
    assert (advice(caught.value) or "").startswith("Spark's Java has ended")
    with pytest.raises(ConnectionRefusedError) as caught:
        call("/x/other.py")
    caught.value.__context__ = None
    assert advice(caught.value) is None


def test_who_talked_to_java_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    quiet.let_java_end()
    try:
        logging.getLogger().error("Exception while sending command.", exc_info=True)
        logging.getLogger().error("something else")
    finally:
        logging.getLogger().removeFilter(quiet._is_news)
    assert caplog.messages == ["something else"]


def write(root: Path) -> None:
    """A store with several files."""
    broker = new_broker(root)
    for _ in range(100):
        broker.send("orders", b"x" * 2000)
    broker.close()


def spoil(root: Path) -> str:
    """Make a file of the commitlog unreadable to every process; return its path."""
    path = sorted((root / "commitlog").iterdir())[1]
    path.unlink()
    path.mkdir()
    return str(path)


def test_programs_get_a_short_exception(tmp_path: Path) -> None:
    """Programs get a short exception. Spark gives them the whole traceback that a task ended with."""
    write(tmp_path / "store")
    reader = StoreReader(Options({"path": str(tmp_path / "store")}), SCHEMA)
    parts = reader.partitions()
    path = spoil(tmp_path / "store")
    with pytest.raises(JobError) as caught:
        [list(reader.read(part)) for part in parts]
    assert str(caught.value) == f"{path}: is a directory, and a file belongs there; move it away, or put the file back"
    told_by_spark = "".join(traceback.format_exception(caught.value))
    assert told_by_spark.count("  File ") == 3, "here, and in the wrapper"
    assert caught.value.__context__ is None
    with pytest.raises(NoStore, match="there is no such directory") as none:
        RocketmqSource({"path": str(tmp_path / "none")}).reader(SCHEMA)
    assert "".join(traceback.format_exception(none.value)).count("  File ") == 2


def read_first(path: str) -> bytes:
    store = StoreFiles.open(path)
    return store.read(store.segments[1].path, 0, 10)


def test_tasks_name_the_file(tmp_path: Path) -> None:
    write(tmp_path / "store")
    path = spoil(tmp_path / "store")
    with pytest.raises(JobError, match=f"^{path}: is a directory, and a file belongs there"):
        Inline().run(read_first, [str(tmp_path / "store")])
