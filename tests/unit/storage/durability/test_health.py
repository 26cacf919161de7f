"""The verdict: its transitions, and the errors that it leads to."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.storage.durability.health import Health, Verdict
from duemq.storage.errors import StoreBroken, StoreClosed, StoreError, StoreFull

CHANGES: dict[str, Callable[[Health], None]] = {
    "opened": lambda health: health.opened(),
    "closed": lambda health: health.closed(),
    "fill": lambda health: health.fill("no room"),
    "has_room": lambda health: health.has_room(),
    "poison": lambda health: health.poison("a sync failed"),
}
CLOSED, HEALTHY, FULL, POISONED = Verdict.CLOSED, Verdict.HEALTHY, Verdict.FULL, Verdict.POISONED


def health_with(verdict: Verdict, calls: list[Verdict] | None = None) -> Health:
    found = Health(lambda: calls.append(found.verdict) if calls is not None else None)
    if verdict is not CLOSED:
        found.opened()
    if verdict is FULL:
        found.fill("at first")
    elif verdict is POISONED:
        found.poison("at first")
    return found


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        (CLOSED, "opened", HEALTHY),
        (CLOSED, "fill", CLOSED),
        (CLOSED, "has_room", CLOSED),
        (CLOSED, "poison", POISONED),
        (HEALTHY, "fill", FULL),
        (HEALTHY, "has_room", HEALTHY),
        (HEALTHY, "poison", POISONED),
        (HEALTHY, "closed", CLOSED),
        (FULL, "fill", FULL),
        (FULL, "has_room", HEALTHY),
        (FULL, "poison", POISONED),
        (FULL, "closed", CLOSED),
        (POISONED, "fill", POISONED),
        (POISONED, "has_room", POISONED),
        (POISONED, "poison", POISONED),
        (POISONED, "closed", CLOSED),
    ],
)
def test_one_verdict_leads_to_another(before: Verdict, change: str, after: Verdict) -> None:
    health = health_with(before)
    CHANGES[change](health)
    assert health.verdict is after


@given(st.lists(st.sampled_from(["fill", "has_room", "poison"])))
def test_only_closing_ends_a_poison_and_the_first_reason_stays(changes: list[str]) -> None:
    health = health_with(POISONED)
    for change in changes:
        CHANGES[change](health)
    assert (health.verdict, health.reason) == (POISONED, "at first")


@given(st.lists(st.sampled_from(sorted(CHANGES))))
def test_who_listens_is_called_after_each_change_and_only_then(changes: list[str]) -> None:
    calls: list[Verdict] = []
    health = health_with(CLOSED, calls)
    told = health.verdict, health.reason
    for change in changes:
        before = len(calls)
        CHANGES[change](health)
        is_changed = (health.verdict, health.reason) != told
        assert calls[before:] == [health.verdict] * is_changed
        told = health.verdict, health.reason


def test_a_store_that_is_full_for_another_reason_says_so() -> None:
    health = health_with(FULL)
    health.fill("the disk is 91% full")
    assert str(health.error()) == "the disk is 91% full"


@pytest.mark.parametrize(
    ("verdict", "kind", "reason"),
    [(CLOSED, StoreClosed, "not open"), (FULL, StoreFull, "at first"), (POISONED, StoreBroken, "at first")],
)
def test_the_error_says_why(verdict: Verdict, kind: type[StoreError], reason: str) -> None:
    error = health_with(verdict).error()
    assert type(error) is kind
    assert reason in str(error)


@pytest.mark.parametrize("verdict", [CLOSED, FULL, POISONED])
def test_each_refusal_is_an_error_of_its_own_that_keeps_nothing_alive(verdict: Verdict) -> None:
    """Each refusal is an exception of its own: one exception raised repeatedly would keep the traceback of each raise,
    and with it the messages to be stored."""
    health = health_with(verdict)
    body = bytearray(b"what was to be stored")

    def send(stored: bytearray) -> None:
        raise health.error()

    first, second = health.error(), health.error()
    assert first is not second
    for _ in range(10):
        with pytest.raises(StoreError):
            send(body)
    assert sys.getrefcount(body) == 2


@pytest.mark.parametrize("verdict", [CLOSED, HEALTHY, FULL, POISONED])
def test_what_makes_room_is_taken_where_there_is_none(verdict: Verdict) -> None:
    changes: list[Verdict] = []
    health = health_with(verdict, changes)
    changes.clear()
    with health.making_room():
        assert health.verdict is (HEALTHY if verdict is FULL else verdict)
    assert (health.verdict, changes) == (verdict, []), "nobody else is told"


@pytest.mark.parametrize("worse", [FULL, POISONED])
def test_what_goes_wrong_while_room_is_made_stays(worse: Verdict) -> None:
    health = health_with(FULL)
    with health.making_room():
        health.fill("no byte is left") if worse is FULL else health.poison("no byte is left")
    assert (health.verdict, health.reason) == (worse, "no byte is left")
