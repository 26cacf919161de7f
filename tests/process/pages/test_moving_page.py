"""The Python of docs/moving.md is run against a broker in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator

from duemq import Admin, Producer
from duemq.testing import TestBroker
from tests.support.pages.snippets import run_lines, snippets

PAGE = "moving.md"


class Redis:
    """The two calls of redis-py that the page makes, for a sorted set of three jobs."""

    def __init__(self) -> None:
        self.sets = {"jobs": {b"%d" % number: time.time() + 3600 * number for number in (1, 2, 3)}}

    def zscan_iter(self, name: str) -> Iterator[tuple[bytes, float]]:
        yield from self.sets.get(name, {}).items()

    def delete(self, name: str) -> None:
        del self.sets[name]


async def test_the_page(duemq_broker: TestBroker) -> None:
    assert len(snippets(PAGE)) == 3
    redis = Redis()
    async with Producer(duemq_broker.nameserver) as producer, Admin(duemq_broker.nameserver) as admin:
        await run_lines(PAGE, duemq_broker, {"producer": producer, "admin": admin, "redis": redis})
    assert redis.sets == {}
