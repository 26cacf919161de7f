"""The broker goes away in the middle of sending and consuming, and comes back on the same store.

No acknowledged message may be lost, and a group goes on at its offsets. Once with a clean stop and once with SIGKILL,
both at the same time.
"""

import asyncio

import pytest
import pytest_asyncio

from tests.interop.stores.restarts import ENOUGH, HOWS, Witness


@pytest_asyncio.fixture(loop_scope="session", params=HOWS)
async def witnesses(
    request: pytest.FixtureRequest, restarts: dict[str, asyncio.Task[dict[str, Witness]]]
) -> dict[str, Witness]:
    return await restarts[str(request.param)]


@pytest.fixture
def witness(witnesses: dict[str, Witness], client_name: str) -> Witness:
    found = witnesses[client_name]
    if found.failure is not None:
        raise found.failure
    return found


async def test_nothing_acknowledged_is_lost(witness: Witness) -> None:
    assert witness.steady is not None
    assert len(witness.acknowledged) >= 2 * ENOUGH
    assert set(witness.acknowledged) | set(witness.before) <= set(witness.steady.bodies)


async def test_group_goes_on_where_it_was_before_the_restart(witness: Witness) -> None:
    assert witness.paused is not None
    assert set(witness.acknowledged) <= set(witness.paused.bodies)
    assert set(witness.before) & set(witness.paused.bodies) == set()
