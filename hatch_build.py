"""A hook of the build: it stops where the symbolic links of the source tree have become something else.

git without `core.symlinks`, and programs that unpack archives without links, write a file with the path that a link
leads to. hatchling would pack such files, and an installation would succeed with a package that cannot be imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("broker", "protocol", "scheduler", "spark_jobs", "storage")
"""Folders of the source tree that `duemq/` has links to. In a source distribution they are in `duemq/`."""


class LinksHook(BuildHookInterface[Any]):
    """Checks the links before each build of a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Stop the build, with a sentence that says what to do, if a link does not lead to a package."""
        del build_data
        root = Path(self.root)
        links = [f"duemq/{name}" for name in PARTS]
        if version == "editable":
            links.append(".editable/duemq")
        for link in links:
            if (root / link / "__init__.py").is_file():
                continue
            if (root / link).exists():
                why = f"{root / link} is not a symbolic link to {Path(link).name}/, as it is in the repository"
                help_ = "run `git config core.symlinks true` and `git checkout -- .`, or install a release"
            elif link.startswith(".editable"):
                why = f"{root / link}, which only the repository has, is missing"
                help_ = "clone the repository, or install without --editable"
            else:
                why, help_ = f"{root / link} is missing", "run `git checkout -- .`, or unpack the release again"
            self.app.abort(f"duemq cannot be built: {why}; {help_}")
