"""duemq.spark: its content, and the cost of importing it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import duemq.spark
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.source import reading


@pytest.mark.parametrize("name", duemq.spark.__all__)
def test_each_name_is_there_with_types_and_words(name: str) -> None:
    value: Any = getattr(duemq.spark, name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())


def test_all_names_are_told_once() -> None:
    assert sorted(duemq.spark.__all__) == sorted(duemq.spark._MODULE_OF)
    assert set(duemq.spark.__all__) <= set(dir(duemq.spark))
    with pytest.raises(AttributeError, match=r"module 'duemq\.spark' has no attribute 'nothing'"):
        _ = duemq.spark.nothing  # type: ignore[attr-defined]


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, duemq.spark; print([n for n in ('pyspark', 'numpy', 'pyarrow', 'pandas') if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


class Reader:
    """Records the calls of a session's reader."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self.loaded: object = None

    def format(self, name: str) -> Reader:
        assert name == "rocketmq"
        return self

    def option(self, name: str, value: str) -> Reader:
        self.options[name] = value
        return self

    def load(self, path: object) -> Reader:
        self.loaded = path
        return self


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Session:
        read, readStream = Reader(), Reader()  # noqa: N815, Spark's name

    monkeypatch.setattr("duemq.spark_jobs.source.source.register", lambda _: None)
    return Session()


def test_what_is_asked_becomes_options(session: Any) -> None:
    found: Any = reading.load(
        session,
        Path("/a"),
        "s3://b/c",
        table="messages",
        columns=("topic", "body"),
        topics=["orders"],
        since=datetime(2026, 11, 23, tzinfo=UTC),
        until=1795478400000,
        ending_offsets={"orders": {0: 23, 1: -1}},
        checkCrc=True,
    )
    assert found.loaded == ["/a", "s3://b/c"]
    assert found.options == {
        "table": "messages",
        "columns": "topic,body",
        "topics": "orders",
        "startingTimestamp": "1795392000000",
        "endingTimestamp": "1795478400000",
        "endingOffsets": '{"orders": {"0": 23, "1": -1}}',
        "checkCrc": "true",
    }
    found = reading.stream(session, "/a", starting_offsets="latest", max_offsets_per_trigger=5, fail_on_data_loss=False)
    assert found.loaded == "/a"
    assert found.options == {
        "table": "messages",
        "startingOffsets": "latest",
        "maxOffsetsPerTrigger": "5",
        "failOnDataLoss": "false",
    }
    with pytest.raises(JobError, match="no store is given"):
        reading.load(session)
