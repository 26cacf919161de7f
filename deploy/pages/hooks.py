"""Changes of the pages for `make docs`: the overview is README.md, links to README.md lead to it, and links to other
files beside the pages become text. The reference of the Python client reads the client alone."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[2]


@event_priority(100)
def on_config(config: Any, **_: Any) -> None:
    """Show mkdocstrings, which reads it later, a package without the broker's, the store's and the jobs' parts, called
    by mkdocs once. It reads all modules of a package, and the client is a third of duemq."""
    view = Path(tempfile.mkdtemp(prefix="duemq-pages-"))
    atexit.register(shutil.rmtree, view, ignore_errors=True)
    (view / "duemq").mkdir()
    for path in (ROOT / "duemq").iterdir():
        if not path.is_symlink():
            (view / "duemq" / path.name).symlink_to(path)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(view)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page, called by mkdocs for each."""
    if page.file.src_uri == "index.md":
        markdown = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"\[([^]]*)\]\(([^)#:]+)(#[^)]*)?\)", _linked, markdown)


def _linked(found: re.Match[str]) -> str:
    """Return a link to a page as it is, one to README.md as one to the overview, and one to another file of the project
    as text."""
    text, path = found[1], found[2]
    if path == "../README.md":
        return f"[{text}](index.md{found[3] or ''})"
    is_page = "/" not in path and (ROOT / "docs" / path).exists()
    return found[0] if is_page else f"{text} (`{path.removeprefix('../')}`)"
