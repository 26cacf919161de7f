"""The Python of docs/consumers.md is run, in its order, against a broker in this process, and prints what it says."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

from duemq import Consumer, Producer
from duemq.testing import TestBroker

PAGE = Path(__file__).parents[3] / "docs" / "consumers.md"
TEXT = PAGE.read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^prints\n\n((?:    .*\n)+)", re.MULTILINE)


def program(snippet: str, duemq_broker: TestBroker) -> str:
    return snippet.replace("127.0.0.1:9876", duemq_broker.nameserver)


def test_the_program(duemq_broker: TestBroker) -> None:
    printed: list[Any] = []
    (snippet,) = (each for each in SNIPPETS if "asyncio.run(" in each)
    exec(program(snippet, duemq_broker), {"print": printed.append})
    assert printed == [b"hello"]


async def test_the_lines(duemq_broker: TestBroker) -> None:
    printed: list[str] = []
    names: dict[str, Any] = {
        "asyncio": asyncio,
        "Consumer": Consumer,
        "print": lambda *values: printed.append(" ".join(map(str, values))),
    }
    consumer = Consumer("billing", nameserver=duemq_broker.nameserver)
    consumer.subscribe("orders")
    async with Producer(duemq_broker.nameserver) as producer, consumer:
        names |= {"producer": producer, "consumer": consumer}
        for snippet in SNIPPETS:
            if "asyncio.run(" in snippet:
                continue
            printed.clear()
            code = compile(program(snippet, duemq_broker), str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            async with asyncio.timeout(30):
                running = eval(code, names)
                if inspect.iscoroutine(running):
                    await running
            shown = re.findall(r"^ *print\(.*\)  # (.*)$", snippet, re.MULTILINE)
            if "print(" in snippet and not shown:
                (lines,) = PRINTED.findall(TEXT)
                shown = [line.strip() for line in lines.splitlines()]
            assert sorted(printed) == sorted(shown), snippet
            if "in_order" in snippet:
                assert printed == shown


def test_there_are_some() -> None:
    assert len(SNIPPETS) >= 8
