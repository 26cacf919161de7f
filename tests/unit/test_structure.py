"""The code keeps the structure of ARCHITECTURE.md: imports point one way."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {"broker", "protocol", "scheduler", "spark_jobs", "storage"}
"""Folders of the source tree that are packages of duemq, see ARCHITECTURE.md."""
OURS = {*PARTS, "duemq", "tests"}
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


def modules(package: str) -> list[Path]:
    """The modules of a package; those of duemq itself without the packages that are linked into it."""
    folder = ROOT / package
    return sorted(
        path for path in folder.rglob("*.py") if not (package == "duemq" and path.relative_to(folder).parts[0] in PARTS)
    )


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of each import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def package_of(module: str) -> str:
    """The package of this project that contains a module, or else the module's library."""
    first, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return part if first == "duemq" and part in PARTS else first


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package: str) -> None:
    wrong = []
    for path in modules(package):
        for line, module in imports(path):
            top = package_of(module)
            may = ALLOWED[package] | {package} | ({"duemq"} if module == "duemq" and package == "spark_jobs" else set())
            if package == "duemq" and path == ROOT / "duemq" / "cli" / "__init__.py":
                may |= {"broker", "spark_jobs"}  # the command line may start them
            if package == "duemq" and path.name == "spark.py":
                may |= {"spark_jobs"}  # it passes on their names
            if module.split(".")[0] in PARTS or top in OURS - may or top in FORBIDDEN_LIBRARIES.get(package, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


def needed(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the imports that run with a module, in functions too, without those for type checkers only."""
    for node in statements:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from needed(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def test_no_module_imports_one_that_imports_it() -> None:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for name in ALLOWED for path in modules(name)}
    known = {name if name.startswith("duemq.") else f"duemq.{name}": path for name, path in paths.items()}
    known = {name.removesuffix(".__init__"): path for name, path in known.items()}
    left = {}
    for name, path in known.items():
        found = set(needed(ast.parse(path.read_text()).body))
        left[name] = {each if each in known else each.rpartition(".")[0] for each in found} & set(known) - {name}
    while free := {name for name, wanted in left.items() if not wanted}:
        left = {name: wanted - free for name, wanted in left.items() if name not in free}
    # The rest are the modules in a circle, and those that need one.
    while unneeded := set(left) - set().union(*left.values()):
        left = {name: wanted for name, wanted in left.items() if name not in unneeded}
    assert left == {}


def test_no_folder_is_a_heap() -> None:
    for package in ALLOWED:
        for folder in {path.parent for path in modules(package)}:
            assert len([path for path in modules(package) if path.parent == folder]) <= 16, folder


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_each_package_has_one_tree_of_errors(package: str) -> None:
    """Each package has one tree of errors, so that catching its base catches all; only errors that never leave their
    module may be outside of it."""
    of_nobody = []
    for path in modules(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if bases & BUILTIN_ERRORS and not bases - BUILTIN_ERRORS:
                    of_nobody.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert all(each.startswith(f"{package}/errors.py: ") for each in of_nobody)
    assert len(of_nobody) <= 1


def test_nothing_reads_the_environment_below_the_broker() -> None:
    for package in ("protocol", "storage", "scheduler"):
        for path in modules(package):
            assert "environ" not in path.read_text(), path


def test_every_setting_says_what_it_is_for() -> None:
    from duemq.broker.settings.config import FIELDS

    assert all(field.metadata["help"] for field in FIELDS.values())
