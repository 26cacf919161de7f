"""The pages for users (`make docs`) are built without a warning, and the reference has everything that users import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

import duemq
from duemq.errors import DueMQError

ROOT = Path(__file__).parents[3]


def test_the_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    page = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    documented = {name.rpartition(".")[2] for name in re.findall(r'id="(duemq\.[\w.]+)"', page)}
    names = {name for name in duemq.__all__ if not name.startswith("__")}
    assert names - documented == set()
    producer = {name for name in vars(duemq.Producer) if not name.startswith("_")}
    assert producer - documented == set()
    errors = {each.__name__ for each in DueMQError.__subclasses__() if each.__module__ == DueMQError.__module__}
    assert errors - documented == set()


def test_links_lead_somewhere_in_the_repository() -> None:
    """The build of the pages checks the links between them; in the repository, README.md is the overview."""
    dead = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", _without_code(page)):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert dead == []


def _without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", _without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_each_page_is_in_the_contents() -> None:
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    contents = re.findall(r"[\w-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(contents) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
