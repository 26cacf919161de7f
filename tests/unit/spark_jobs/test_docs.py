"""docs/spark-jobs.md names every command, every option of each, and every column of each table."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from duemq.spark_jobs.analyse.analysis import TABLES
from duemq.spark_jobs.cli.commands import main
from duemq.spark_jobs.source.tables import COLUMNS

TEXT = (Path(__file__).parents[3] / "docs" / "spark-jobs.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`]+)`", TEXT))))


@pytest.mark.parametrize("table", COLUMNS)
def test_columns(table: str) -> None:
    assert f"**{table}**" in TEXT
    assert [name for name in COLUMNS[table] if name not in NAMES] == []


@pytest.mark.parametrize("name", main.commands)
def test_commands(name: str) -> None:
    assert re.search(rf"duemq spark {name}\b", TEXT)
    options = [
        option
        for parameter in main.commands[name].params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    ]
    assert [option for option in options if option not in TEXT] == []


def test_what_analyse_writes() -> None:
    assert [name for name in TABLES if name not in NAMES] == []


def test_links() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings
    root = Path(__file__).parents[3]
    for path in re.findall(r"`((?:deploy|spark_jobs)/[\w./-]+)", TEXT):
        assert (root / path).exists() or (root / "duemq" / path).exists(), path
