"""One second's messages: in the order of their deliver times whenever they came, and never all of them at once."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duemq.scheduler.timers.seconds import second as timer_second
from duemq.scheduler.timers.seconds.second import WAIT, Second

if TYPE_CHECKING:
    from duemq.scheduler.timers.seconds.second import Waits

SECOND = 1_700_000_000
BEGIN_MS = SECOND * 1000 + 1


def waits_of(messages: list[tuple[int, int]]) -> Waits:
    """Return messages from (ms within the second, number); the number stands for the positions of record and unit."""
    waits = np.zeros(len(messages), WAIT)
    waits["due"] = [BEGIN_MS + due for due, _ in messages]
    waits["physical"] = waits["position"] = [number for _, number in messages]
    return waits


def numbers(waits: Waits) -> list[int]:
    return [int(number) for number in waits["physical"]]


class Model:
    """The same as a list. A message's number gives its arrival, so that sorting by deliver time and number is the
    order."""

    def __init__(self) -> None:
        self.second = Second(SECOND)
        self.left: list[tuple[int, int]] = []
        self.known: set[tuple[int, int]] = set()
        self.newest = self.oldest = 0

    def add(self, dues: list[int]) -> None:
        messages = [(due, self.newest + at) for at, due in enumerate(dues)]
        self.newest += len(dues)
        self.second.add(waits_of(messages))
        self.known |= set(messages)
        self.left = sorted(self.left + messages)

    def load(self, parts: list[list[int]]) -> None:
        model = self

        class Loader:
            def step(self) -> bool:
                if not parts:
                    model.second.was_loaded()
                    return False
                dues = parts.pop(0)
                model.oldest -= len(dues)
                messages = [(due, model.oldest + at) for at, due in enumerate(dues)]
                model.second.add_older(waits_of(messages))
                model.known |= set(messages)
                model.left = sorted(model.left + messages)
                return True

        self.second.begin_loading(Loader())

    def take(self, now: int, limit: int, share: float, *, back: bool) -> None:
        """Deliver some of the due messages, or only look at them."""
        waits = self.second.due(BEGIN_MS + now, limit).copy()
        due = [number for ms, number in self.left if ms <= now]
        assert len(waits) <= limit
        assert bool(len(waits)) == bool(due)
        assert numbers(waits) == due[: len(waits)]
        count = round(len(waits) * share)
        if count:
            self.second.drop(count)
            if back:
                self.second.put_back(waits[:count])
            else:
                self.left = self.left[count:]

    def remove(self, at: int) -> None:
        message = self.left[at % len(self.left)] if self.left else (0, 7)
        assert numbers(self.second.remove(waits_of([message]))) == ([message[1]] if self.left else [])
        self.left = [each for each in self.left if each != message]

    def check(self) -> None:
        head = self.second.head_ms
        assert (None if head is None else head - BEGIN_MS) == (self.left[0][0] if self.left else None)
        assert self.second.is_done == (not self.left and self.second.loader is None)


DUES = st.lists(st.integers(0, 20), min_size=1, max_size=12)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), DUES),
    st.tuples(st.just("take"), st.integers(0, 20), st.integers(1, 12), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()),
    st.tuples(st.just("remove"), st.integers(0, 100)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(DUES, max_size=5),
    st.lists(st.tuples(st.integers(0, 6), DUES), max_size=2),
    st.lists(ACTIONS),
    st.sampled_from([1, 3, 64]),
)
def test_messages_have_their_order_whatever_came_when(
    monkeypatch: pytest.MonkeyPatch,
    loaded: list[list[int]],
    meanwhile: list[tuple[int, list[int]]],
    actions: list[tuple[object, ...]],
    taken: int,
) -> None:
    monkeypatch.setattr(timer_second, "_TAKEN", taken)
    monkeypatch.setattr(timer_second, "_RUN", 10)
    monkeypatch.setattr(timer_second, "_MIN_GIVEN", 2)
    model = Model()
    model.load(loaded)
    came = dict(meanwhile)
    steps = 0
    while model.second.load_next():
        model.add(came.get(steps, [3]))
        model.check()
        steps += 1
    for action in actions:
        match action:
            case ("add", list(dues)):
                model.add(dues)
            case ("take", int(now), int(limit), float(share), bool(back)):
                model.take(now, limit, share, back=back)
            case ("remove", int(at)):
                model.remove(at)
        model.check()
    assert numbers(model.second.remaining()) == [number for _, number in model.left]
    assert {each for each in model.known if model.second.has(waits_of([each]))} == set(model.left)
    within = sorted(model.second.positions_between(-5, 5).tolist())
    assert within == sorted(number for _, number in model.left if -5 <= number <= 5)
    while model.left:
        model.take(20, 5, 1.0, back=False)
    model.check()


def test_what_comes_is_not_sorted_in_among_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """New messages are not sorted in among all waiting ones: otherwise each send for a large second would cost as much
    as the whole second."""
    second = Second(SECOND)
    second.add(waits_of([(number % 997, number) for number in range(40_000)]))
    second.first(1)
    sorted_at_once = []
    original = timer_second.joined

    def joined(parts: list[Waits]) -> Waits:
        sorted_at_once.append(sum(map(len, parts)))
        return original(parts)

    monkeypatch.setattr(timer_second, "joined", joined)
    for number in range(500):
        second.add(waits_of([(number, 100_000 + number)]))
        second.drop(len(second.due(BEGIN_MS + 999, 50)))
    assert max(sorted_at_once) < 2000


@pytest.mark.parametrize("is_sorted", [True, False])
def test_taking_out_one_does_not_cost_what_all_cost(is_sorted: bool) -> None:
    """Taking out one message does not cost as much as looking at all or moving all, which would need 400,000 bytes of
    memory or more."""
    second, count = Second(SECOND), 50_000
    second.add(waits_of([(number // 100 if is_sorted else number % 997, number) for number in range(count)]))
    second.first(1)
    sums = []
    for number in range(0, count, 250):
        wait = waits_of([(number // 100 if is_sorted else number % 997, number)])
        tracemalloc.start()
        assert second.has(wait)
        assert numbers(second.remove(wait)) == [number]
        assert not second.has(wait)
        sums.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert sum(sums) < 200 * 20_000
    assert len(second) == count - 200


def test_a_loaded_second_is_sorted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_second, "_RUN", 100)
    sizes = []
    original = timer_second.joined

    def joined(parts: list[Waits]) -> Waits:
        sizes.append(sum(map(len, parts)))
        return original(parts)

    monkeypatch.setattr(timer_second, "joined", joined)
    model = Model()
    model.load([[5] * 60 for _ in range(20)])
    while model.second.load_next():
        pass
    assert max(sizes) <= 160
    sizes.clear()
    model.take(20, 50, 1.0, back=False)
    assert sizes == []
