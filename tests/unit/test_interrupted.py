"""The exit codes of commands that are interrupted, or whose reader has left: never a code that means a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from duemq.broker.repair import cli as repair_cli
from duemq.spark_jobs.cli import commands
from tests.unit.spark_jobs.compact_world import new_broker

WITHOUT_READER = [["spark", "audit", "--state", "state"], ["store", "repair", "--dry-run"]]


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def store(tmp_path: Path) -> Path:
    broker = new_broker(tmp_path / "store")
    broker.send("orders", b"body", "", 0)
    broker.close()
    return tmp_path / "store"


@pytest.mark.parametrize("arguments", WITHOUT_READER)
def test_a_reader_that_left_is_no_answer(store: Path, tmp_path: Path, arguments: list[str]) -> None:
    """A command whose reader has left exits with 2: exit code 1 would mean a lost message, or a store in need of
    repair."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from duemq.cli import main; main()", *arguments, str(store)]
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, check=False, text=True)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (2, "")


def test_an_interrupted_repair(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duemq.broker.repair.repair.repair", _interrupted)
    assert CliRunner().invoke(repair_cli.main, ["repair", str(store)]).exit_code == 130


def test_an_interrupted_job(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duemq.spark_jobs.audit.audit.audit", _interrupted)
    hook = f"cat > {tmp_path}/told.json"
    arguments = ["audit", str(store), "--state", str(tmp_path / "state"), "--hook", hook]
    ended = CliRunner().invoke(commands.main, arguments)
    assert (ended.exit_code, ended.output) == (130, "")
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["exit"], told["text"]) == (2, "duemq audit: was interrupted")
