"""The house stays as ARCHITECTURE.md draws it: imports point one way."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"broker", "duemq", "protocol", "scheduler", "spark_jobs", "storage", "tests"}
ALLOWED = {
    "protocol": set(),
    "storage": {"protocol"},
    "scheduler": {"protocol", "storage"},
    "broker": {"protocol", "storage", "scheduler"},
    "duemq": {"protocol"},
    "spark_jobs": {"protocol", "storage", "scheduler"},
}
FORBIDDEN_LIBRARIES = {
    "protocol": {"asyncio", "select", "socket", "socketserver", "ssl", "threading", "uvloop"},
    "storage": {"asyncio", "select", "socket", "socketserver", "ssl", "threading", "uvloop"},
    "scheduler": {"asyncio", "select", "socket", "socketserver", "ssl", "threading", "uvloop"},
    "spark_jobs": {"asyncio", "socketserver", "ssl", "uvloop"},
}


BUILTIN_ERRORS = {
    name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of each import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, module in imports(path):
            top = module.split(".")[0]
            may = ALLOWED[package] | {package}
            if package == "duemq" and path.name == "cli.py":
                may |= {"broker", "spark_jobs"}  # the command line may start them
            if package == "duemq" and path.name == "spark.py":
                may |= {"spark_jobs"}  # whose names it passes on
            if top in OURS - may or top in FORBIDDEN_LIBRARIES.get(package, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_each_package_has_one_tree_of_errors(package: str) -> None:
    """Whoever catches the package's base catches all; only what never leaves its module may be of its own."""
    of_nobody = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if bases & BUILTIN_ERRORS and not bases - BUILTIN_ERRORS:
                    of_nobody.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert all(each.startswith(f"{package}/errors.py: ") for each in of_nobody)
    assert len(of_nobody) <= 1


def test_nothing_reads_the_environment_below_the_broker() -> None:
    for package in ("protocol", "storage", "scheduler"):
        for path in (ROOT / package).rglob("*.py"):
            assert "environ" not in path.read_text(), path


def test_every_setting_says_what_it_is_for() -> None:
    from broker.config import FIELDS

    assert all(field.metadata["help"] for field in FIELDS.values())
