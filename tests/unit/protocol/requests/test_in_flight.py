"""Requests waiting for their response: found by opaque, once; expired by the given time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.requests.in_flight import InFlightRequests


def test_a_response_finds_its_request_once() -> None:
    requests = InFlightRequests[str]()
    first, second = requests.add("first", 10), requests.add("second", 10)
    assert first != second
    assert len(requests) == 2
    assert requests.take(second) == "second"
    assert requests.take(second) is None
    assert requests.take(12345) is None
    assert requests.take(first) == "first"
    assert len(requests) == 0


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(0, 20))
def test_who_waits_beyond_its_deadline_expires_in_order(deadlines: list[int], now: int) -> None:
    requests = InFlightRequests[int]()
    opaques = [requests.add(number, deadline) for number, deadline in enumerate(deadlines)]
    assert requests.expire(now) == [number for number, deadline in enumerate(deadlines) if deadline <= now]
    assert requests.expire(now) == []
    left = [number for number, deadline in enumerate(deadlines) if deadline > now]
    assert [requests.take(opaques[number]) for number in left] == left


def test_everybody_is_told_when_the_connection_is_lost() -> None:
    requests = InFlightRequests[str]()
    opaque = requests.add("a", 1)
    requests.add("b", 2)
    assert requests.clear() == ["a", "b"]
    assert requests.take(opaque) is None
    assert len(requests) == 0


def test_opaques_stay_positive_32_bit_numbers() -> None:
    requests = InFlightRequests[str]()
    requests._next = 2**31 - 2
    assert [requests.new_opaque() for _ in range(3)] == [2**31 - 1, 0, 1]
