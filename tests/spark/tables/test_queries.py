"""A query of a view does not change the answer of another, with the oldest and the newest supported Spark."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.bench.spark import stores as spark_stores
from tests.spark.world import spark_home
from tests.spark.world.commands import Commands

ROOT = Path(__file__).parents[3]
CODE = "from tests.spark.world.queries import main; main()"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("queries") / "store"
    spark_stores.write(path, 0.01, segment=4 << 20, sends=1000)
    return path


def ask_oldest(store: Path, scratch: Path, *args: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(store), str(scratch), *args],
        cwd=ROOT, env=spark_home.oldest(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def ask_newest(commands: Commands, store: Path, scratch: Path, *args: str) -> str:
    run = commands.run_code(CODE, store, scratch, *args, cwd=scratch)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_queries_with_the_newest_spark(commands: Commands, store: Path, tmp_path: Path) -> None:
    import pyspark

    answer = ask_newest(commands, store, tmp_path, "--seed", "1", "--steps", "5", "--pushdown")
    assert answer.strip() == f"5 queries with pyspark {pyspark.__version__} agree"


@pytest.mark.soak  # a minute; test_stream.py asks the oldest Spark in every run
def test_queries_with_the_oldest_spark(store: Path, tmp_path: Path) -> None:
    wanted = re.search(r'"pyspark>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    assert spark_home.OLDEST.exists(), "make test installs it"
    answer = ask_oldest(store, tmp_path, "--seed", "2", "--steps", "12")
    assert f" pyspark {wanted[1]}" in answer


@pytest.mark.soak
@pytest.mark.parametrize("is_oldest", [False, True])
@pytest.mark.parametrize("seed", range(3, 8))
def test_many_queries(commands: Commands, store: Path, tmp_path: Path, seed: int, *, is_oldest: bool) -> None:
    ask = ask_oldest if is_oldest else partial(ask_newest, commands)
    assert "60 queries" in ask(store, tmp_path, "--seed", str(seed), "--steps", "60", "--pushdown")
