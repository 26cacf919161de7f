"""The code keeps the structure of ARCHITECTURE.md: imports point one way."""

from __future__ import annotations

import ast
import builtins
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from duemq.storage import file_names

ROOT = Path(__file__).parents[2]
PARTS = {"broker", "protocol", "scheduler", "spark_jobs", "storage"}
"""Folders of the source tree that are packages of duemq, see ARCHITECTURE.md. Releases have them in duemq/."""
OURS = {*PARTS, "duemq", "tests"}
ALLOWED = {
    "protocol": set(),
    "storage": {"protocol"},
    "scheduler": {"protocol", "storage"},
    "broker": {"protocol", "storage", "scheduler"},
    "duemq": {"protocol"},
    "spark_jobs": {"protocol", "storage", "scheduler"},
}
_NO_NETWORK = {
    *("_socket", "_ssl", "_thread", "asyncio", "concurrent", "ftplib", "http", "multiprocessing", "select"),
    *("selectors", "smtplib", "socket", "socketserver", "ssl", "subprocess", "threading", "urllib", "uvloop", "xmlrpc"),
}
FORBIDDEN_LIBRARIES = {
    "protocol": _NO_NETWORK,
    "storage": _NO_NETWORK,
    "scheduler": _NO_NETWORK,
    "spark_jobs": {"_socket", "_ssl", "_thread", "asyncio", "http", "multiprocessing", "socketserver", "ssl", "uvloop"},
    "duemq": {"click", "multiprocessing", "numpy", "pandas", "pyarrow", "pyspark", "structlog", "subprocess"},
}
HAS_COMMANDS = ("duemq/cli/", "duemq/mqtt_bridge/cli.py")
"""Modules of the client's package that may import click."""
MAY_IMPORT = {
    "duemq/cli/__init__.py": {"broker", "spark_jobs"},  # the command line may start them
    "duemq/cli/users.py": {"broker"},  # the settings of one, which a command writes
    "duemq/spark.py": {"spark_jobs"},  # it passes on their names
    "duemq/testing/broker.py": {"broker", "storage"},  # a broker in the test's process
}
COMPUTED = {"duemq/__init__.py", "duemq/spark.py", "duemq/cli/__init__.py", "duemq/_net/compression.py"}
"""Modules that import names, or libraries that may be missing, when they are first used."""
MAX_MODULES = 14
"""Most modules of a folder, without its __init__."""
MAX_POSITIONAL = {"broker": 5, "scheduler": 5, "protocol": 6, "storage": 10, "spark_jobs": 7, "duemq": 8}
"""Most parameters of a package's functions that may be given by position, without `self` and `cls`. The highest figure
is of `Appender.add`, which is called for each message."""
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "now", "utcnow", "today"}

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
LOADERS = ("exec", "eval", "compile", "__import__", "importlib", "pkgutil", "runpy", "sys.modules", "zipimport")
"""What imports modules by names that a test cannot read, or gets them without an import."""
NO_LOADERS = ("importlib.metadata", "importlib.resources", "importlib.util.find_spec", "pkgutil.get_data")
"""Names of the same modules that import nothing."""

WORDS = {"abort", "acls", "checkpoint", "commitlog", "config", "cut", "index", "lock", "users"}
"""Names of a store's files that are words for other things as well."""

BUILTIN_ERRORS = {
    name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)
}
UNNAMED_ERRORS = {"AssertionError", "NotImplementedError", "StopIteration", "StopAsyncIteration"}
"""Errors that no docstring has to name: bugs, methods of base classes, and ends of iterators."""


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Keep the syntax trees of all modules from the garbage collector, and not longer than these tests need them: it
    would look through millions of objects again and again."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


@cache
def modules(package: str) -> list[Path]:
    """The modules of a package; those of duemq itself without the packages that are linked into it."""
    folder = ROOT / package
    if not folder.is_dir():
        folder = ROOT / "duemq" / package
    found = sorted(
        path for path in folder.rglob("*.py") if not (package == "duemq" and path.relative_to(folder).parts[0] in PARTS)
    )
    assert found
    return found


def place(path: Path) -> str:
    """The path of a module below the root of the source tree."""
    relative = path.relative_to(ROOT)
    is_part = relative.parts[0] == "duemq" and relative.parts[1] in PARTS
    return str(relative.relative_to("duemq") if is_part else relative)


@cache
def text_of(path: Path) -> str:
    """Return the text of a module."""
    return path.read_text()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a module."""
    return list(ast.walk(ast.parse(text_of(path))))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return line and module of each import in a file."""
    return [(node.lineno, name) for node in nodes(path) for name in imported(node)]  # type: ignore[attr-defined]


def imported(node: ast.AST) -> Iterator[str]:
    """Yield what a node imports. A relative import is named by its dots, and a computed one as "computed"."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
        name = node.args[0] if node.args else None
        yield name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "computed"


def _last_name(node: ast.expr) -> str:
    """The name of a function without the module or object that has it."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _first_name(node: ast.AST) -> str:
    """What a chain of attributes begins with, if that is a name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@cache
def used(path: Path) -> list[tuple[int, str]]:
    """Line and full name of what a module uses of others, whatever it calls them: `import time as t; t.time()` uses
    `time.time`. Only the longest form of each name is returned, and of builtins those among LOADERS."""
    names = {name: name for name in LOADERS if hasattr(builtins, name)}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    inner = {id(node.value) for node in nodes(path) if isinstance(node, ast.Attribute)}
    found = []
    for node in nodes(path):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner and _first_name(node) in names:
            first, dot, rest = ast.unparse(node).partition(".")
            found.append((node.lineno, names[first] + dot + rest))
    return found


def is_of(name: str, modules: Iterable[str]) -> bool:
    """Whether a full name is one of some modules, functions or attributes, or belongs to one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


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
            may |= MAY_IMPORT.get(place(path), set())
            is_forbidden = top in OURS - may or top in FORBIDDEN_LIBRARIES.get(package, set())
            is_forbidden &= not (top == "click" and place(path).startswith(HAS_COMMANDS))
            is_forbidden &= not module.startswith("urllib.parse.")
            if is_forbidden or module.split(".")[0] in PARTS or module.startswith("."):
                wrong.append(f"{place(path)}:{line} imports {module}")
            if module == "computed" and place(path) not in COMPUTED:
                wrong.append(f"{place(path)}:{line} computes the name of what it imports")
    assert wrong == []


def test_nothing_is_imported_by_a_computed_name() -> None:
    computed = [
        f"{place(path)}:{line} {name}"
        for package in ALLOWED
        for path in modules(package)
        if place(path) not in COMPUTED
        for line, name in used(path)
        if is_of(name, LOADERS) and not is_of(name, NO_LOADERS)
    ]
    assert computed == []


def test_no_module_imports_one_that_imports_it() -> None:
    """An import counts wherever it is: in a function, and for type checkers only, too."""
    paths = {place(path).removesuffix(".py").replace("/", "."): path for name in ALLOWED for path in modules(name)}
    known = {name if name.startswith("duemq.") else f"duemq.{name}": path for name, path in paths.items()}
    known = {name.removesuffix(".__init__"): path for name, path in known.items()}
    left = {}
    for name, path in known.items():
        found = {module for _, module in imports(path)}
        left[name] = {each if each in known else each.rpartition(".")[0] for each in found} & set(known) - {name}
    while free := {name for name, wanted in left.items() if not wanted}:
        left = {name: wanted - free for name, wanted in left.items() if name not in free}
    # The rest are the modules in a circle, and those that need one.
    while unneeded := set(left) - set().union(*left.values()):
        left = {name: wanted for name, wanted in left.items() if name not in unneeded}
    assert left == {}


@pytest.mark.parametrize("package", [*ALLOWED, "tests"])
def test_no_folder_is_a_heap(package: str) -> None:
    in_folders = Counter(path.parent for path in modules(package) if path.name != "__init__.py")
    assert {str(folder): count for folder, count in in_folders.items() if count > MAX_MODULES} == {}


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a command of click."""
    decorators = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return any(_first_name(each) == "click" or _last_name(each) in ("command", "group") for each in decorators)


def positional(among: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the functions among some nodes, each with its line and the number of its positional parameters. The
    commands of click are left out: click gives them all parameters by name."""
    for node in among:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_command(node):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            yield f"{node.lineno} {node.name}", len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_no_call_needs_many_arguments_by_position(package: str) -> None:
    """Nobody can tell what the seventh argument of a call is: further parameters are keyword-only."""
    too_many = [
        f"{place(path)}:{where} takes {count}"
        for path in modules(package)
        for where, count in positional(nodes(path))
        if count > MAX_POSITIONAL[package]
    ]
    assert too_many == []


def test_many_positional_parameters_are_seen() -> None:
    code = """
class Handlers:
    def __init__(self, a, b, c, /, d, e, f, *, g): ...
    async def later(a, b, *c, d): ...
@click.command()
@click.option("--a")
def command(a, b, c, d, e, f): ...
"""
    assert list(positional(ast.walk(ast.parse(code)))) == [("3 __init__", 6), ("4 later", 2)]


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
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)
                    if each == package:
                        places[node.name] = place(path)
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


@cache
def bases() -> dict[str, set[str]]:
    """Return the names of the base classes of all classes, and of Python's errors."""
    found = {name: {base.__name__ for base in getattr(builtins, name).__bases__} for name in BUILTIN_ERRORS}
    found["BaseException"] = set()  # without the word "object", which docstrings have
    for package in ALLOWED:
        for path in modules(package):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(map(_last_name, node.bases))
    return found


def described(within: ast.AST, of_class: str = "") -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield the functions of a module or class that have docstrings, with these; a constructor has that of its class as
    well. Functions within functions and commands of click are left out: the docstring of a command is its help."""
    for node in ast.iter_child_nodes(within):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "") + (of_class if node.name == "__init__" else "")
            if text and not is_command(node):
                yield node, text
        elif isinstance(node, ast.ClassDef):
            yield from described(node, ast.get_docstring(node) or "")
        elif isinstance(node, ast.If | ast.Try):
            yield from described(node, of_class)


def raised(block: Iterable[ast.AST]) -> set[str]:
    """Return the classes of the errors that statements raise by name, unless they catch them again."""
    found = set[str]()
    for node in block:
        if isinstance(node, ast.Raise) and node.exc is not None:
            found.add(_last_name(node.exc.func if isinstance(node.exc, ast.Call) else node.exc))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = raised(getattr(node, "body", ()))
            found |= {name for name in inner if not is_caught(name, getattr(node, "handlers", ()))}
            for part in ("handlers", "orelse", "finalbody", "cases"):
                found |= raised(getattr(node, part, ()))
    return {name for name in found if name[:1].isupper()}


def is_caught(error: str, handlers: Iterable[ast.ExceptHandler]) -> bool:
    """Whether one of the handlers of a `try` catches an error and does not raise it again."""
    for handler in handlers:
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type] if handler.type else []
        if not caught or any(reaches(error, _last_name(each), bases()) for each in caught):
            return not any(isinstance(each, ast.Raise) and each.exc is None for each in handler.body)
    return False


def unnamed_errors(module: ast.AST) -> Iterator[str]:
    """Yield the errors that functions of a module raise themselves without a word in their docstrings, each with the
    function and its line. A base class of the error is enough."""
    for function, text in described(module):
        words = set(re.findall(r"\w+", text)) - {"BaseException", "Exception"}
        for error in sorted(raised(function.body) - UNNAMED_ERRORS):
            if not any(reaches(error, word, bases()) for word in words):
                yield f"{function.lineno} {function.name} raises {error}"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_docstrings_name_the_errors_that_their_functions_raise(package: str) -> None:
    """Except `Refused` in the broker, which any handler of requests may raise."""
    unnamed = [
        f"{place(path)}:{each}"
        for path in modules(package)
        for each in unnamed_errors(nodes(path)[0])
        if not (package == "broker" and reaches(each.rpartition(" ")[2], "Refused", bases()))
    ]
    assert unnamed == []


def test_an_error_without_a_word_in_the_docstring_is_seen() -> None:
    code = '''
class Store:
    """Raises StoreError."""
    def __init__(self):
        raise StoreFull
    def read(self):
        """Read. Raises OSError."""
        if not self.path:
            raise FileNotFoundError(self.path)
        for each in self:
            raise errors.StoreFull("no room")
    async def later(self):
        """Read the object later."""
        def now():
            raise ValueError
        try:
            raise KeyError(1)
        except (TypeError, LookupError):
            raise JobError("1") from None
        try:
            raise TypeError
        except TypeError:
            self.close()
            raise
        except Exception:
            pass
    def helper(self):
        raise ValueError
@main.command()
def command():
    """Do it."""
    raise UsageError
if not TYPE_CHECKING:
    def __getattr__(name):
        """Import a name."""
        raise AttributeError(name)
'''
    assert list(unnamed_errors(ast.parse(code))) == [
        "6 read raises StoreFull",
        "12 later raises JobError",
        "12 later raises TypeError",
        "34 __getattr__ raises AttributeError",
    ]


@pytest.mark.parametrize("package", ["protocol", "storage", "scheduler"])
def test_nothing_reads_the_environment_below_the_broker(package: str) -> None:
    for path in modules(package):
        assert [f"{line} {name}" for line, name in used(path) if is_of(name, ENVIRONMENT)] == [], path
        assert "environ" not in text_of(path), path
        assert "getenv" not in text_of(path), path


def test_nothing_reads_a_clock_below_the_broker() -> None:
    """Times are handed to storage and scheduler, so that a simulation decides them; storage/clock.py has the clocks."""
    read = [
        f"{place(path)}:{line} {name}"
        for package in ("protocol", "storage", "scheduler")
        for path in modules(package)
        if place(path) != "storage/clock.py"
        for line, name in used(path)
        if name == "os.times" or (is_of(name, ("time", "datetime")) and name.rpartition(".")[2] in CLOCKS)
    ]
    assert read == []


@cache
def names_of_functions() -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of types of functions, Callable among them, and those that only methods have."""
    types, methods, others = {"Callable"}, set[str](), set[str]()
    everything = [node for package in ALLOWED for path in modules(package) for node in nodes(path)]
    for node in everything:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if re.match(r"(\w+\.)?Callable\b", ast.unparse(node.value)):
                types.add(node.targets[0].id)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.AnnAssign):
                    others.add(ast.unparse(member.target))
                elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    is_property = any("property" in ast.unparse(each) for each in member.decorator_list)
                    (others if is_property else methods).add(member.name)
                    if member.name == "__call__":
                        types.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            others.add(node.attr)
    return frozenset(types), frozenset(methods - others)


def given_later(of: ast.ClassDef) -> Iterator[str]:
    """Yield the methods of a class that keep a function which they were given, and the lines."""
    types, _ = names_of_functions()
    for method in of.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or method.name in ("__init__", "__new__"):
            continue
        arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
        functions = {
            each.arg
            for each in arguments
            if each.annotation and types & set(re.findall(r"\w+", ast.unparse(each.annotation)))
        }
        for node in ast.walk(method):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                is_kept = any(isinstance(each, ast.Attribute) for each in targets)
                if is_kept and (node.value.id in functions or node.value.id.startswith("on_")):
                    yield f"{of.name}.{method.name}, line {node.lineno}"


def set_from_outside(node: ast.Assign) -> Iterator[str]:
    """Yield the attributes of other objects to which an assignment gives a function."""
    _, methods = names_of_functions()
    value = node.value
    is_function = isinstance(value, ast.Lambda) or (isinstance(value, ast.Attribute) and value.attr in methods)
    for target in node.targets:
        if not isinstance(target, ast.Attribute) or ast.unparse(target.value) in ("self", "cls"):
            continue
        if is_function or target.attr.lstrip("_").startswith("on_"):
            yield ast.unparse(target)


def test_no_object_is_given_its_callbacks_later() -> None:
    """A constructor receives what its object calls: neither a method keeps it, nor is it set from outside."""
    later = []
    for package in ALLOWED:
        for path in modules(package):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    later += [f"{place(path)}: {each}" for each in given_later(node)]
                elif isinstance(node, ast.Assign):
                    later += [f"{place(path)} {each}" for each in set_from_outside(node)]
    # paho's client, whose constructor takes no function that reads.
    assert later == ["duemq/mqtt_bridge/session/wire.py client.loop_read"]


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def notify(self, then: Step) -> None:\n        self._then = then",
        "class A:\n    def notify(self, then: Callable[[], None] | None) -> None:\n        self._then = then",
        "def f(self):\n    self.timers.arrived = self._work.wake",
        "def f(timers):\n    timers.arrived = lambda: None",
        "def f(timers, act):\n    timers.on_arrived = act",
    ],
)
def test_a_callback_that_is_given_later_is_seen(code: str) -> None:
    found = list[str]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef):
            found += given_later(node)
        elif isinstance(node, ast.Assign):
            found += set_from_outside(node)
    assert found


def test_each_invariant_is_cited_by_the_code_that_keeps_it() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Invariants")[2].partition("## Formats")[0]
    numbers_of_text = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    numbered = set(numbers_of_text)
    cited = set[int]()
    unclear = []
    for package in ALLOWED:
        for path in modules(package):
            text = text_of(path)
            for found in re.finditer(r"\b[Ii]nvariants?\s+(\d+(?:(?:, | and |, and )\d+)*)( of\s+ARCHITECTURE)?", text):
                numbers = {int(number) for number in re.findall(r"\d+", found[1])}
                cited |= numbers
                if found[2] is None or not numbers <= numbered:
                    unclear.append(f"{place(path)}: {found[0]}")
    assert unclear == []
    assert cited == numbered
    assert sorted(numbers_of_text) == list(range(1, len(numbers_of_text) + 1))


def test_the_name_of_a_class_means_one_class() -> None:
    """Classes whose names begin with an underscore do not count: only their own modules use them. duemq/sync.py does
    not count either: its classes are those of `duemq` without async, with the same names."""
    defined: dict[str, set[str]] = {}
    for package in ALLOWED:
        for path in modules(package):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef) and place(path) != "duemq/sync.py" and not node.name.startswith("_"):
                    defined.setdefault(node.name, set()).add(f"{place(path)}:{node.lineno}")
    assert {name: sorted(places) for name, places in defined.items() if len(places) > 1} == {}


def test_no_docstring_only_names_another() -> None:
    """A docstring is complete on its own: an editor shows it alone."""
    incomplete = []
    for package in ALLOWED:
        for path in modules(package):
            for node in nodes(path):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    text = node.value.value
                    if isinstance(text, str) and re.match(
                        r"(See|As|Like|Implements) (in )?(the module|asyncio|io|`[^`]+`|[A-Z]\w+)([.:,]|$)", text
                    ):
                        incomplete.append(f"{place(path)}:{node.lineno} {text}")
    assert incomplete == []


@cache
def names_of_files() -> set[str]:
    """Return the names that storage/file_names.py gives the files and directories of a store, with and without the
    directory they are in."""
    values = [value for name, value in vars(file_names).items() if name.isupper() and name != "BACKUP"]
    paths = {path for value in values for path in ([value] if isinstance(value, str) else value)}
    return paths | {path.rpartition("/")[2] for path in paths}


def named_files(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each literal of a module that names a file of a store: the text is a name that means
    nothing else (not in WORDS), begins with the name of a directory, or is joined to a path."""
    names = names_of_files()
    docstrings = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    joined = {
        id(argument)
        for node in nodes(path)
        if isinstance(node, ast.Call) and _last_name(node.func) in ("join", "joinpath", "Path")
        for argument in node.args
    }
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value.strip("/")
            is_name = text in names and (text not in WORDS or id(node) in joined)
            if is_name or any(node.value.lstrip("/").startswith(f"{name}/") for name in names):
                yield node.lineno, node.value


def test_the_names_of_a_stores_files_are_in_one_module() -> None:
    """Other modules of the product import them. Tests write them out: they are right by themselves."""
    written = [
        f"{place(path)}:{line} {text}"
        for package in PARTS
        for path in modules(package)
        if place(path) != "storage/file_names.py"
        for line, text in named_files(path)
    ]
    assert written == []


def test_every_setting_says_what_it_is_for() -> None:
    from duemq.broker.settings.config import FIELDS

    assert all(field.metadata["help"] for field in FIELDS.values())


def test_the_tests_that_pages_cite_are_there() -> None:
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    cited = {
        name
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
        for name in re.findall(r"`(?:[\w/]*/)?(test_\w+)(?:\.py)?`", page.read_text(encoding="utf-8"))
    }
    assert len(cited) > 20
    assert cited <= there
