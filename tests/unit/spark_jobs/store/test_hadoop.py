"""The settings of Hadoop that pyarrow needs are found at the place of its programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from duemq.spark_jobs.store.hadoop import complete


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory with opt/java and opt/hadoop, and with bin, which has links to their programs."""
    answers = {"java": "exit 1", "hadoop": "[ \"$*\" = 'classpath --glob' ] && echo /etc/hadoop:/opt/a.jar"}
    (tmp_path / "bin").mkdir()
    for name, answer in answers.items():
        program = tmp_path / "opt" / name / "bin" / name
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
        (tmp_path / "bin" / name).symlink_to(program)
    return tmp_path


def test_programs_on_the_path_tell_what_is_needed(machine: Path) -> None:
    environment = {"PATH": f"{machine}/bin"}
    complete(environment)
    assert environment == {
        "PATH": f"{machine}/bin",
        "JAVA_HOME": f"{machine}/opt/java",
        "HADOOP_HOME": f"{machine}/opt/hadoop",
        "CLASSPATH": "/etc/hadoop:/opt/a.jar",
        "LIBHDFS_OPTS": "-Xmx256m",
    }


def test_hadoop_of_the_environment_comes_first(machine: Path) -> None:
    (machine / "bin" / "hadoop").unlink()
    environment = {"PATH": f"{machine}/bin", "HADOOP_HOME": f"{machine}/opt/hadoop"}
    complete(environment)
    assert environment["CLASSPATH"] == "/etc/hadoop:/opt/a.jar"


def test_what_is_set_stays(machine: Path) -> None:
    given = {"PATH": f"{machine}/bin", "JAVA_HOME": "/j", "CLASSPATH": "/c.jar", "LIBHDFS_OPTS": "-Xmx1g"}
    environment = dict(given)
    complete(environment)
    assert environment == given


@pytest.mark.parametrize("answer", [None, "exit 1"])
def test_without_hadoop_nothing_is_made_up(machine: Path, answer: str | None) -> None:
    program = machine / "opt" / "hadoop" / "bin" / "hadoop"
    if answer is None:
        program.unlink()
    else:
        program.write_text(f"#!/bin/sh\n{answer}\n")
    environment = {"PATH": f"{machine}/bin"}
    complete(environment)
    assert set(environment) == {"PATH", "JAVA_HOME", "LIBHDFS_OPTS"}
