"""Runs the Python of a page for users, as the page has it, against a broker."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

from duemq.testing import TestBroker

DOCS = Path(__file__).parents[3] / "docs"
_SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def snippets(page: str) -> list[str]:
    """The Python snippets of a page, by its file name, in order."""
    return _SNIPPET.findall((DOCS / page).read_text(encoding="utf-8"))


async def run_lines(page: str, broker: TestBroker, names: dict[str, Any]) -> None:
    """Run all snippets of a page in their order as lines of one coroutine, which has `names`, and compare what each one
    prints with what its comments say."""
    printed: list[str] = []
    names = {"asyncio": asyncio, "print": lambda *values: printed.append(" ".join(map(str, values))), **names}
    for snippet in snippets(page):
        printed.clear()
        text = snippet.replace("127.0.0.1:9876", broker.nameserver)
        code = compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        async with asyncio.timeout(30):
            running = eval(code, names)
            if inspect.iscoroutine(running):
                await running
        assert printed == _SHOWN.findall(snippet), snippet
