"""requirements/broker.txt: it has what a broker needs, in versions that pyproject.toml allows, with hashes only."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("broker", "auth", "mqtt")


def test_the_locked_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
    text = (ROOT / "requirements" / "broker.txt").read_text()
    locked: dict[str, str] = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", text, re.MULTILINE))
    for line in wanted:
        requirement = Requirement(line)
        assert requirement.name in locked, line
        assert locked[requirement.name] in requirement.specifier, line


def test_each_locked_version_has_hashes_and_comes_from_nowhere_in_particular() -> None:
    text = (ROOT / "requirements" / "broker.txt").read_text()
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 10
    assert all("--hash=sha256:" in entry for entry in entries)
    assert not re.search(r"^--|://", text, re.MULTILINE)
