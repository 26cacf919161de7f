"""The Python of docs/client.md is run, in its order, against a broker in this process, and prints what it says."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import pytest

from duemq import Admin, Producer
from duemq.testing import TestBroker

PAGE = Path(__file__).parents[3] / "docs" / "client.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def is_program(snippet: str) -> bool:
    """Whether a snippet runs by itself, without the page's `producer` and `admin`."""
    return "asyncio.run(" in snippet or "sync.Producer(" in snippet


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if is_program(each)])
def test_programs(snippet: str, duemq_broker: TestBroker) -> None:
    printed: list[str] = []
    names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    exec(snippet.replace("127.0.0.1:9876", duemq_broker.nameserver), names)
    assert printed == SHOWN.findall(snippet)


async def test_lines(duemq_broker: TestBroker) -> None:
    printed: list[str] = []
    snippets = [each for each in SNIPPETS if not is_program(each)]
    async with Producer(duemq_broker.nameserver) as producer, Admin(duemq_broker.nameserver) as admin:
        names = {
            "producer": producer,
            "admin": admin,
            "print": lambda *values: printed.append(" ".join(map(str, values))),
        }
        for snippet in snippets:
            printed.clear()
            code = compile(
                snippet.replace("127.0.0.1:9876", duemq_broker.nameserver),
                str(PAGE),
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            )
            async with asyncio.timeout(30):
                running = eval(code, names)
                if inspect.iscoroutine(running):
                    await running
            assert printed == SHOWN.findall(snippet), snippet


def test_there_are_some() -> None:
    assert len(SNIPPETS) >= 14
