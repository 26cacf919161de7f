"""Requests waiting for their response: found by opaque, once; expired by the given time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.requests.pending import PendingRequests


def test_a_response_finds_its_request_once() -> None:
    pending = PendingRequests[str]()
    first, second = pending.add("first", 10), pending.add("second", 10)
    assert first != second
    assert len(pending) == 2
    assert pending.take(second) == "second"
    assert pending.take(second) is None
    assert pending.take(12345) is None
    assert pending.take(first) == "first"
    assert len(pending) == 0


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(0, 20))
def test_who_waits_beyond_its_deadline_expires_in_order(deadlines: list[int], now: int) -> None:
    pending = PendingRequests[int]()
    opaques = [pending.add(number, deadline) for number, deadline in enumerate(deadlines)]
    assert pending.expire(now) == [number for number, deadline in enumerate(deadlines) if deadline <= now]
    assert pending.expire(now) == []
    left = [number for number, deadline in enumerate(deadlines) if deadline > now]
    assert [pending.take(opaques[number]) for number in left] == left


def test_everybody_is_told_when_the_connection_is_lost() -> None:
    pending = PendingRequests[str]()
    opaque = pending.add("a", 1)
    pending.add("b", 2)
    assert pending.clear() == ["a", "b"]
    assert pending.take(opaque) is None
    assert len(pending) == 0


def test_opaques_stay_positive_32_bit_numbers() -> None:
    pending = PendingRequests[str]()
    pending._next = 2**31 - 2
    assert [pending.new_opaque() for _ in range(3)] == [2**31 - 1, 0, 1]
