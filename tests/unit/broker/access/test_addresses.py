"""Patterns of addresses, against an oracle that writes out all addresses as text."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from duemq.broker.access.addresses import AddressPattern, parts_of


def matches(pattern: str, host: str) -> bool:
    return AddressPattern(pattern).matches(parts_of(host))


# --- RocketMQ's forms


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["127.0.0.1", "::1", "fe80::1"], []),
        ("*.*.*.*", ["127.0.0.1", "::1"], []),
        ("*:*:*:*:*:*:*:*", ["127.0.0.1", "::1"], []),
        ("", [], ["127.0.0.1", "::1"]),
        ("  ", [], ["127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1", "::ffff:127.0.0.1"], ["127.0.0.2", "::1"]),
        ("1.1.1.1,2.2.2.2", ["1.1.1.1", "2.2.2.2"], ["1.1.1.2"]),
        ("1.1.1.{1,22}", ["1.1.1.1", "1.1.1.22"], ["1.1.1.2", "1.1.1.122"]),
        ("10.1.2.*", ["10.1.2.0", "10.1.2.255"], ["10.1.3.0", "10.12.2.1"]),
        ("10.1.*.*", ["10.1.0.0", "10.1.255.255"], ["10.2.0.0"]),
        ("10.*.*.*", ["10.0.0.0", "10.255.255.255"], ["11.0.0.0"]),
        ("10.1.2.3-12", ["10.1.2.3", "10.1.2.12"], ["10.1.2.2", "10.1.2.13", "10.1.2.1"]),
        ("10.1.3-12.*", ["10.1.3.0", "10.1.12.255"], ["10.1.2.0", "10.1.13.0"]),
        ("10.3-12.*.*", ["10.3.0.0", "10.12.255.255"], ["10.2.0.0", "10.13.0.0"]),
        ("10.1.2.0-0", ["10.1.2.0"], ["10.1.2.1"]),
        ("192.168.1-9.5", ["192.168.1.5", "192.168.9.5"], ["192.168.1.6", "192.168.0.5"]),
        ("::1", ["::1", "0:0:0:0:0:0:0:1"], ["::2", "0.0.0.1"]),
        ("2001:DB8::7", ["2001:db8:0:0::7"], ["2001:db8::8"]),
        ("2001:db8::{7,a}", ["2001:db8::7", "2001:db8::A"], ["2001:db8::8"]),
        ("2001:db8::7,::1", ["2001:db8::7", "::1"], ["::2"]),
        ("5::7:6:1-200:*", ["5::7:6:1:0", "5::7:6:200:ffff"], ["5::7:6:0:1", "5::7:6:201:1", "5::8:6:1:1"]),
        ("5::7:6:1-200", ["5::7:6:1", "5::7:6:200"], ["5::7:6:201", "5::7:6:0"]),
        ("2001:db8:1:2:3:4:5:*", ["2001:db8:1:2:3:4:5:ffff"], ["2001:db8:1:2:3:4:6:0"]),
        ("2001:db8:*", ["2001:db8::1", "2001:db8:ffff:1:2:3:4:5"], ["2001:db9::1"]),
        ("1::*", ["1::", "1::ffff"], ["1:0:1::", "1::1:0"]),
    ],
)
def test_forms(pattern: str, inside: list[str], outside: list[str]) -> None:
    assert [host for host in inside if not matches(pattern, host)] == []
    assert [host for host in outside if matches(pattern, host)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "nonsense", "1.2.3", "1.2.3.4.5", "256.1.1.1", "1.1.1.256", "01.1.1.1", "1.1.1.-1", "1.1.1.1-", "1.1.1.9-3",
        "1.1.1.0-256", "10.1.*", "*.1.1.1", "1-2.1.1.1", "1.1.1.{1,300}", "1.1.1.{1", "1.1.1.1}", "1.1.{1}.{2}",
        "1.1.1{1}", "1.1.1.1, 2.2.2.2", "1.1.1.1,nonsense", "1.1.1.*,2.2.2.2", "1.1.1.1/24", "::g", "1:*:2", "1:*:*",
        "1-2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:8:*", "1::2::*", "1:2:3:4:5:6:7:8::*", "::1%eth0", "1:2:3:4:5:6:7:fffff-1",
        "1:2:3:4:5:6:7:9-3", "{1}", "-", "1.1.1.\u0661",
    ],
)  # fmt: skip
def test_what_is_no_pattern_is_refused_in_the_words_of_rocketmq(pattern: str) -> None:
    with pytest.raises(ValueError, match="Netaddress examine Exception netaddress is "):
        AddressPattern(pattern)


def test_what_is_no_address_matches_only_everything() -> None:
    assert parts_of("a.host.name") is None
    assert not matches("1.1.1.1", "a.host.name")
    assert matches("*", "a.host.name")
    assert parts_of("fe80::1%eth0") == parts_of("fe80::1")


# --- against the oracle

BYTE = st.integers(0, 255)
FEW = st.integers(0, 3)
GROUP = st.integers(0, 0xFFFF)


@st.composite
def a_part(draw: st.DrawFn, numbers: st.SearchStrategy[int], most: int, form: str) -> tuple[str, range]:
    """One part of a pattern, and the numbers that it stands for."""
    kind = draw(st.sampled_from(["number", "range", "all"]))
    if kind == "all":
        return "*", range(most + 1)
    low = draw(numbers)
    high = draw(st.integers(low, most)) if kind == "range" else low
    text = f"{low:{form}}-{high:{form}}" if kind == "range" else f"{low:{form}}"
    return text, range(low, high + 1)


@given(FEW, st.lists(a_part(BYTE | FEW, 255, "d"), min_size=3, max_size=3), st.tuples(FEW, BYTE, BYTE, BYTE), st.data())
def test_version_4(first: int, parts: list[tuple[str, range]], address: tuple[int, ...], data: st.DataObject) -> None:
    pattern = ".".join([str(first), *(text for text, _ in parts)])
    if data.draw(st.booleans()):  # an address that is likely to match
        drawn = (data.draw(st.sampled_from(numbers)) for _, numbers in parts)
        address = (first, *drawn)
    allowed = [{str(first)}, *({str(number) for number in numbers} for _, numbers in parts)]
    host = ".".join(map(str, address))
    oracle = all(part in some for part, some in zip(host.split("."), allowed, strict=True))
    assert matches(pattern, host) == oracle


@given(st.lists(GROUP | FEW, min_size=8, max_size=8), st.data())
def test_version_6(groups: list[int], data: st.DataObject) -> None:
    last = data.draw(a_part(GROUP | FEW, 0xFFFF, "x"))
    second = data.draw(a_part(GROUP | FEW, 0xFFFF, "x"))
    if last[0] != "*":
        second = (f"{groups[6]:x}", range(groups[6], groups[6] + 1))
    assume(second[0] != "*")
    head = [f"{group:x}" for group in groups[:6]]
    zeros = next((at for at in range(6) if groups[at] == 0), None)
    if zeros is not None and data.draw(st.booleans()):
        end = zeros
        while end < 6 and groups[end] == 0:
            end += 1
        text = ":".join(head[:zeros]) + "::" + ":".join([*head[end:], second[0], last[0]])
    else:
        text = ":".join([*head, second[0], last[0]])
    address = list(groups)
    for at, (_, numbers) in ((6, second), (7, last)):
        if data.draw(st.booleans()):
            address[at] = data.draw(st.integers(numbers[0], numbers[-1]))
        else:
            address[at] = data.draw(GROUP)
    if data.draw(st.booleans()):
        address[data.draw(st.integers(0, 5))] ^= data.draw(st.sampled_from([0, 1]))
    host = str(ipaddress.IPv6Address(":".join(f"{group:x}" for group in address)))
    exploded = [int(group, 16) for group in ipaddress.IPv6Address(host).exploded.split(":")]
    oracle = exploded[:6] == groups[:6] and exploded[6] in second[1] and exploded[7] in last[1]
    assume(parts_of(host) is not None and len(parts_of(host) or ()) == 8)
    if "*" in text or "-" in text:
        assert matches(text, host) == oracle


@given(st.text(max_size=30) | st.text("0123456789.*-{},:abcdef", max_size=40), st.ip_addresses())
def test_any_text_is_a_pattern_or_refused(text: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    try:
        pattern = AddressPattern(text)
    except ValueError:
        return
    assert pattern.matches(parts_of(str(address))) in (True, False)
