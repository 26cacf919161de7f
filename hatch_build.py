"""A hook of the build: it stops where the symbolic links of the source tree have become something else.

git without `core.symlinks`, and programs that unpack archives without links, write a file with the path that a link
leads to. hatchling would pack such files, and an installation would succeed with a package that cannot be imported.
Programs that follow links (`cp -rL`, `rsync -L`) make copies of what they lead to. An editable install would import the
copies, and edits of the folders themselves would have no effect.
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
        """Stop the build, with a sentence that says what to do, if a link does not lead to its package."""
        del build_data
        why = fault_of(Path(self.root), is_editable=version == "editable")
        if why is not None:
            self.app.abort(f"duemq cannot be built: {why}")


def fault_of(root: Path, *, is_editable: bool) -> str | None:
    """Return what is wrong with the links of a source tree, and what to do; None if nothing is."""
    targets = {f"duemq/{name}": name for name in PARTS}
    if is_editable:
        targets[".editable/duemq"] = "duemq"
    for name, target in targets.items():
        link = root / name
        if (link / "__init__.py").is_file():
            # A source distribution has the packages themselves, and nothing beside duemq/ that they could differ from.
            if not (root / target).exists() or link.samefile(root / target):
                continue
            why = f"{link} is not {target}/ but a copy, so edits of {target}/ would have no effect"
            return f"{why}; clone the repository, or copy it with its symbolic links (cp -a, rsync -a without -L)"
        if link.exists():
            why = f"{link} is not a symbolic link to {target}/, as it is in the repository"
            return f"{why}; run `git config core.symlinks true` and `git checkout -- .`, or install a release"
        if name.startswith(".editable"):
            why = f"{link}, which only the repository has, is missing"
            return f"{why}; clone the repository, or install without --editable"
        return f"{link} is missing; run `git checkout -- .`, or unpack the release again"
    return None
