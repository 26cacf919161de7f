"""The settings of a session, without starting one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import duemq
from duemq.spark_jobs import session
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.session import DRIVER_MEMORY, make_session

ROOT = str(Path(duemq.__file__).parents[1])


class Builder:
    """Records the calls of Spark's builder."""

    def __init__(self, error: Exception | None = None) -> None:
        self.settings: dict[str, str] = {}
        self.url: str | None = None
        self._error = error

    def appName(self, _: str) -> Builder:  # noqa: N802, Spark's name
        return self

    def master(self, url: str) -> Builder:
        self.url = url
        return self

    def config(self, key: str, value: str) -> Builder:
        self.settings[key] = value
        return self

    def getOrCreate(self) -> Any:  # noqa: N802, Spark's name
        if self._error is not None:
            raise self._error
        return _Anything()


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        return self


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    made = Builder()
    monkeypatch.setattr(SparkSession, "builder", made)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "JAVA_HOME": os.environ.get("JAVA_HOME", "")})
    monkeypatch.setattr(session, "check_java", lambda: None)
    return made


def test_on_this_machine_by_default(builder: Builder) -> None:
    make_session("test")
    assert builder.url == "local[*]"
    assert builder.settings["spark.driver.memory"] == DRIVER_MEMORY
    assert builder.settings["spark.driver.bindAddress"] == "127.0.0.1"
    # Workers use this Python, and find this project's packages.
    assert os.environ["PYSPARK_PYTHON"] == os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == ROOT
    log4j = builder.settings["spark.driver.extraJavaOptions"].partition("file:")[2]
    assert Path(log4j).is_file()
    assert builder.settings["spark.python.unix.domain.socket.enabled"] == "true"
    make_session("test", for_jobs=True)
    assert builder.settings["spark.driver.extraJavaOptions"].endswith(f"{log4j} -XX:TieredStopAtLevel=1")


def test_memory_and_settings_are_the_users(builder: Builder) -> None:
    make_session("test", master="local[3]", memory="3g", settings={"spark.sql.session.timeZone": "CET"})
    assert builder.url == "local[3]"
    assert builder.settings["spark.driver.memory"] == "3g"
    assert builder.settings["spark.sql.session.timeZone"] == "CET"


def test_a_python_that_was_chosen_stays(builder: Builder) -> None:
    os.environ["PYSPARK_PYTHON"] = "/opt/python"
    make_session("test")
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"
    assert builder.url == "local[*]"


def test_on_a_cluster_nothing_is_said_of_this_machine(builder: Builder) -> None:
    make_session("test", master="spark://host:7077")
    assert builder.url == "spark://host:7077"
    assert not {"spark.driver.memory", "spark.driver.host"} & set(builder.settings)


def test_under_spark_submit_it_says_where(builder: Builder) -> None:
    os.environ.update(SPARK_ENV_LOADED="1", SPARK_HOME="/opt/spark")
    make_session("test")
    assert builder.url is None
    assert "spark.driver.memory" not in builder.settings
    assert "PYTHONPATH" not in os.environ


def test_that_spark_did_not_start_is_told_in_one_line(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkSession, "builder", Builder(RuntimeError("\nCannot bind to port\n  at x\n")))
    with pytest.raises(JobError, match=r"^Spark did not start: Cannot bind to port$"):
        make_session("test")
    call = "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext."
    why = "[INVALID_DRIVER_MEMORY] System memory 50331648 must be at least 471859200."
    java = RuntimeError(f"{call}\n: org.apache.spark.SparkIllegalArgumentException: {why}\n\tat a.b.C$.d(E.scala:1)\n")
    monkeypatch.setattr(SparkSession, "builder", Builder(java))
    with pytest.raises(JobError, match=rf"^Spark did not start: {re.escape(why)}$"):
        make_session("test")


@pytest.mark.parametrize("memory", ["50m", "449M", "0g", "460799k", "2048 bytes"])
def test_less_memory_than_spark_needs_is_told_before_it_starts(builder: Builder, memory: str) -> None:
    with pytest.raises(JobError, match=f"^a memory of {memory} is too small: Spark needs at least 450m$"):
        make_session("test", memory=memory.removesuffix(" bytes"))
    assert "spark.driver.memory" not in builder.settings


@pytest.mark.parametrize("memory", ["2x", "2gb", "1.5g", " 2g", "-2g", "g", "\u0662g"])
def test_a_memory_that_is_no_size_is_told(builder: Builder, memory: str) -> None:
    """A memory that is not a size is refused: Java would report it in lines of its own, and Spark only that Java has
    ended."""
    with pytest.raises(JobError, match="give a number and k, m, g or t, such as 1536m or 2g"):
        make_session("test", memory=memory)


@pytest.mark.parametrize("memory", ["450m", "460800k", "1T", "2G", "2147483648"])
def test_a_memory_that_is_enough(builder: Builder, memory: str) -> None:
    make_session("test", memory=memory)
    assert builder.settings["spark.driver.memory"] == memory
