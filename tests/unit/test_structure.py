"""The code keeps the structure of ARCHITECTURE.md: imports point one way."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from functools import cache
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
_NO_NETWORK = {"asyncio", "concurrent", "select", "selectors", "socket", "socketserver", "ssl", "threading", "uvloop"}
FORBIDDEN_LIBRARIES = {
    "protocol": _NO_NETWORK,
    "storage": _NO_NETWORK,
    "scheduler": _NO_NETWORK,
    "spark_jobs": {"asyncio", "socketserver", "ssl", "uvloop"},
    "duemq": {"numpy", "pandas", "pyarrow", "pyspark", "structlog"},
}
MAY_IMPORT = {
    "duemq/cli/__init__.py": {"broker", "spark_jobs"},  # the command line may start them
    "duemq/cli/users.py": {"broker"},  # the settings of one, which a command writes
    "duemq/spark.py": {"spark_jobs"},  # it passes on their names
    "duemq/testing/broker.py": {"broker", "storage"},  # a broker in the test's process
}
COMPUTED = {"duemq/__init__.py", "duemq/spark.py", "duemq/cli/__init__.py", "duemq/_net/compression.py"}
"""Modules that import names, or libraries that may be missing, when they are first used."""
MAX_MODULES = 15
"""Most modules of a folder."""
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "now", "utcnow", "today"}

BUILTIN_ERRORS = {
    name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)
}


def modules(package: str) -> list[Path]:
    """The modules of a package; those of duemq itself without the packages that are linked into it."""
    folder = ROOT / package
    return sorted(
        path for path in folder.rglob("*.py") if not (package == "duemq" and path.relative_to(folder).parts[0] in PARTS)
    )


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of each import in a file."""
    for node in ast.walk(parsed(path)):
        yield from ((node.lineno, name) for name in imported(node))  # type: ignore[attr-defined]


def imported(node: ast.AST) -> Iterator[str]:
    """Yield what a node imports. A relative import is named by its dots, and a computed one as "computed"."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        name = node.args[0] if node.args else None
        yield name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "computed"


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
            may |= MAY_IMPORT.get(str(path.relative_to(ROOT)), set())
            is_forbidden = top in OURS - may or top in FORBIDDEN_LIBRARIES.get(package, set())
            if is_forbidden or module.split(".")[0] in PARTS or module.startswith("."):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
            if module == "computed" and str(path.relative_to(ROOT)) not in COMPUTED:
                wrong.append(f"{path.relative_to(ROOT)}:{line} computes the name of what it imports")
    assert wrong == []


def needed(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the imports that run with a module, in functions too, without those for type checkers only."""
    for node in nodes:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from needed(node.orelse)
            continue
        yield from imported(node)
        yield from needed(ast.iter_child_nodes(node))


def test_no_module_imports_one_that_imports_it() -> None:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for name in ALLOWED for path in modules(name)}
    known = {name if name.startswith("duemq.") else f"duemq.{name}": path for name, path in paths.items()}
    known = {name.removesuffix(".__init__"): path for name, path in known.items()}
    left = {}
    for name, path in known.items():
        found = set(needed(parsed(path).body))
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
            assert len([path for path in modules(package) if path.parent == folder]) <= MAX_MODULES, folder


def is_error(base: str, classes: dict[str, set[str]], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a base is an exception class: one of Python's, one that is called so, or one made of such."""
    if base in seen:
        return False
    last = base.rpartition(".")[2]
    is_named_so = base not in classes and last.endswith(("Error", "Exception"))
    return (
        last in BUILTIN_ERRORS
        or is_named_so
        or any(is_error(each, classes, seen | {base}) for each in classes.get(base, ()))
    )


def reaches(name: str, root: str, classes: dict[str, set[str]], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a class is `root` or made of it."""
    return name == root or (
        name not in seen and any(reaches(each, root, classes, seen | {name}) for each in classes.get(name, ()))
    )


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_each_package_has_one_tree_of_errors(package: str) -> None:
    """A caller that catches a package's base error catches all its errors. Only an error that never leaves its module,
    whose name begins with an underscore, may be outside the tree."""
    classes: dict[str, set[str]] = {}
    places: dict[str, str] = {}
    for each in ALLOWED[package] | {package}:
        for path in modules(each):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)
                    if each == package:
                        places[node.name] = str(path.relative_to(ROOT))
    errors = {name for name in places if any(is_error(base, classes) for base in classes[name])}
    own_trees = {
        name for name in errors if places[name] == f"{package}/errors.py" and not classes[name] & (errors | set(places))
    }
    assert len(own_trees) <= 1
    roots = own_trees | {root for root in ("ProtocolError", "StoreError") if package != "duemq"}
    stray = {
        f"{places[name]}: {name}"
        for name in errors
        if not name.startswith("_") and not any(reaches(name, root, classes) for root in roots)
    }
    assert stray == set()


def test_nothing_reads_the_environment_below_the_broker() -> None:
    for package in ("protocol", "storage", "scheduler"):
        for path in modules(package):
            assert "environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path


def test_nothing_reads_a_clock_below_the_broker() -> None:
    """Times are handed to storage and scheduler, so that a simulation decides them; storage/clock.py has the clocks."""
    read = []
    for package in ("protocol", "storage", "scheduler"):
        for path in modules(package):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Attribute) and node.attr in CLOCKS:
                    owner = ast.unparse(node.value)
                    if owner in ("time", "datetime", "datetime.datetime", "date"):
                        read.append(f"{path.relative_to(ROOT)}:{node.lineno} {owner}.{node.attr}")
                elif isinstance(node, ast.ImportFrom) and node.module == "time":
                    read.append(f"{path.relative_to(ROOT)}:{node.lineno} from time")
    assert [each for each in read if not each.startswith("storage/clock.py:")] == []


def test_each_invariant_is_cited_by_the_code_that_keeps_it() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Invariants")[2].partition("## Formats")[0]
    numbers_of_text = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    numbered = set(numbers_of_text)
    cited = set[int]()
    for package in ALLOWED:
        for path in modules(package):
            for numbers in re.findall(r"[Ii]nvariants? ([\d, and]+) of ARCHITECTURE", path.read_text()):
                cited |= {int(number) for number in re.findall(r"\d+", numbers)}
    assert cited == numbered
    assert sorted(numbers_of_text) == list(range(1, len(numbers_of_text) + 1))


def test_every_setting_says_what_it_is_for() -> None:
    from duemq.broker.settings.config import FIELDS

    assert all(field.metadata["help"] for field in FIELDS.values())
