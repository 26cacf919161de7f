"""What the build makes of a source tree whose symbolic links became something else.

tests/process/install/test_install.py builds with the hook; here its check is called, in some milliseconds.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
INTERFACE = "hatchling.builders.hooks.plugin.interface"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, without hatchling, which only builds have."""
    interface = ModuleType(INTERFACE)
    interface.BuildHookInterface = list  # type: ignore[attr-defined]  # a class that takes one parameter
    monkeypatch.setitem(sys.modules, INTERFACE, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path, hook: ModuleType) -> Path:
    """A source tree with the packages and links of the repository."""
    root = tmp_path / "tree"
    for part in ("duemq", *hook.PARTS):
        (root / part).mkdir(parents=True)
        (root / part / "__init__.py").touch()
    for part in hook.PARTS:
        (root / "duemq" / part).symlink_to(f"../{part}")
    (root / ".editable").mkdir()
    (root / ".editable" / "duemq").symlink_to("../duemq")
    return root


@pytest.mark.parametrize("is_editable", [False, True])
def test_links_that_lead_to_their_packages_are_right(hook: ModuleType, tree: Path, is_editable: bool) -> None:
    assert hook.fault_of(tree, is_editable=is_editable) is None
    assert hook.fault_of(ROOT, is_editable=is_editable) is None


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_tree_whose_links_were_followed_is_refused(
    hook: ModuleType, tree: Path, tmp_path: Path, is_editable: bool
) -> None:
    """As by `cp -rL` and `rsync -L`: an editable install would import copies, which nobody edits."""
    shutil.copytree(tree, tmp_path / "followed")
    told = hook.fault_of(tmp_path / "followed", is_editable=is_editable)
    assert "duemq/broker is not broker/ but a copy, so edits of broker/ would have no effect" in told
    assert "cp -a" in told


@pytest.mark.parametrize("name", ["duemq/storage", ".editable/duemq"])
def test_one_link_that_was_followed_is_enough(hook: ModuleType, tree: Path, name: str) -> None:
    (tree / name).unlink()
    shutil.copytree(tree / Path(name).name, tree / name, symlinks=True)
    assert f"{name} is not {Path(name).name}/ but a copy" in hook.fault_of(tree, is_editable=True)


def test_a_link_to_the_package_of_another_tree_is_refused(hook: ModuleType, tree: Path) -> None:
    (tree / "duemq" / "broker").unlink()
    (tree / "duemq" / "broker").symlink_to(ROOT / "broker")
    assert "duemq/broker is not broker/ but a copy" in hook.fault_of(tree, is_editable=False)


def test_a_source_distribution_has_the_packages_themselves(hook: ModuleType, tree: Path) -> None:
    for part in hook.PARTS:
        (tree / "duemq" / part).unlink()
        (tree / part).rename(tree / "duemq" / part)
    shutil.rmtree(tree / ".editable")
    assert hook.fault_of(tree, is_editable=False) is None
    assert "only the repository has" in hook.fault_of(tree, is_editable=True)


def test_a_link_that_is_missing_or_text_is_refused(hook: ModuleType, tree: Path) -> None:
    link = tree / "duemq" / "broker"
    link.unlink()
    assert "is missing; run `git checkout -- .`" in hook.fault_of(tree, is_editable=True)
    link.write_text("../broker")
    assert "is not a symbolic link to broker/" in hook.fault_of(tree, is_editable=True)
