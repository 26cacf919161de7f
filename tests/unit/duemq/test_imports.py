"""The client needs only its few dependencies, and is imported only when it is used."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import duemq

ALLOWED = {"click", "msgpack", "msgspec", "zlib_ng", "duemq", "protocol", "spark_jobs"}
"""Of spark_jobs only the command line, which imports nothing else: the commands of `duemq spark`."""
THEIRS = {"typing_extensions", "cython_runtime"}
"""Imports of those libraries."""

PROBE = """
import importlib, pkgutil, sys
before = set(sys.modules)
import duemq
for module in pkgutil.iter_modules(duemq.__path__):
    if module.name in ("pytest_plugin", "otel"):  # pytest imports the one; users of the extra the other
        continue
    importlib.import_module("duemq." + module.name)
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(name for name in tops if name not in sys.stdlib_module_names and not name.startswith("_")))
"""


def test_importing_the_client_needs_nothing_of_the_broker() -> None:
    root = Path(duemq.__file__).parent.parent
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, cwd=root).stdout
    assert set(found.split()) <= ALLOWED | THEIRS


def test_all_that_is_public_is_there_and_documented() -> None:
    for name in duemq.__all__:
        assert getattr(duemq, name).__doc__
    assert set(duemq.__all__) <= set(dir(duemq))
    assert issubclass(duemq.errors.DueMQError, Exception)


def test_the_version_is_that_of_the_package() -> None:
    assert duemq.__version__ == importlib.metadata.version("duemq")


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Producers'"):
        duemq.Producers  # type: ignore[attr-defined]  # noqa: B018


def test_all_names_come_with_an_asterisk() -> None:
    program = "from duemq import *; print(Producer.__module__, DueMQError.__module__)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["duemq.producer", "duemq.errors"]


def test_the_broker_is_served_without_the_client() -> None:
    program = """
import sys
import duemq.cli
import duemq.broker.main
print(*[name for name in sys.modules if name.startswith("duemq")])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = {".".join(name.split(".")[:2]) for name in result.stdout.split()}
    served = {f"duemq.{part}" for part in ("broker", "protocol", "scheduler", "storage")}
    assert packages == {"duemq", "duemq.cli", *served}


def imported_by(program: str) -> set[str]:
    """The modules that a program imports, and those that a bare interpreter has."""
    program += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_package_alone_imports_nothing() -> None:
    found = imported_by("import duemq")
    assert {name for name in found if name.startswith("duemq")} == {"duemq"}
    assert not {"asyncio", "msgspec", "logging", "dataclasses"} & found


@pytest.mark.parametrize("module", ["errors", "sync", "testing"])
def test_modules_are_imported_at_their_first_use(module: str) -> None:
    found = imported_by(f"import duemq; assert {module!r} in dir(duemq); duemq.{module}.__doc__.strip()")
    assert f"duemq.{module}" in found
    assert not {"duemq.broker", "duemq.cli", "duemq.storage"} & found


def test_a_producer_imports_only_what_a_producer_needs() -> None:
    found = imported_by("import duemq; duemq.Producer, duemq.Message")
    assert not any(name.startswith("duemq._consuming.") for name in found)
    others = {
        "duemq." + name for name in ("consumer", "admin", "pending", "interceptors", "auth", "sync", "cli", "otel")
    }
    assert not others & found
    # What a producer without an account, or with fewer demands, has no use for.
    heavy = {"hashlib", "hmac", "secrets", "click", "uvloop", "numpy", "zoneinfo", "unittest", "importlib.metadata"}
    assert not heavy & found


def test_a_consumer_imports_only_what_a_consumer_needs() -> None:
    found = imported_by("import duemq; duemq.Consumer")
    assert (
        not {"duemq." + name for name in ("producer", "admin", "pending", "interceptors", "sync", "cli", "otel")}
        & found
    )
    assert not {"hashlib", "hmac", "secrets", "click", "uvloop"} & found


HIDE = """
import runpy
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "pyarrow", "pyspark", "rocksdict", "opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""
"""As after `pip install duemq` without any extra."""


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (
            "import duemq.otel",
            "ModuleNotFoundError: duemq.otel needs the package opentelemetry: pip install 'duemq[otel]'",
        ),
        (
            "from duemq.spark import audit",
            "ModuleNotFoundError: duemq.spark needs the package numpy: pip install 'duemq[spark]'",
        ),
        (
            "sys.argv = ['dump', '.']; runpy.run_module('duemq.broker.dump', run_name='__main__')",
            "python -m duemq.broker.dump needs the package numpy: pip install 'duemq[broker]'",
        ),
    ],
    ids=["otel", "spark", "dump"],
)
def test_what_a_missing_extra_is_called(program: str, line: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDE + program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (1, "", line)
    if line.startswith("python"):
        assert done.stderr.count("\n") == 1


def test_the_help_imports_no_command() -> None:
    program = """
import sys
from duemq.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
"""
    found = imported_by(program)
    assert {name for name in found if name.startswith("duemq")} == {"duemq", "duemq.cli", "duemq.cli.streams"}
    assert not {"asyncio", "msgspec"} & found
