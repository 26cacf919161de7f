"""Property texts of many records, compared with the codec of `protocol.records.properties`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records import properties
from duemq.spark_jobs.columns.texts import Texts

NAMES = st.sampled_from(("A", "AB", "KEYS", "TAGS", "UNIQ_KEY", "UNIQ_KEYS", "TIMER_OUT_MS", "TIMER_OUT_MX", "é"))
VALUES = st.text("ab1\u00e9\u6f22 =", max_size=12)
PARTS = st.one_of(
    st.tuples(NAMES, VALUES).map("\x01".join),
    st.sampled_from(("", "KEYS", "\x01", "\x01x", "KEYS\x01", "A\x01b\x01c")),
)
ENDS = st.sampled_from(("", "\x02"))
TEXT = st.builds(lambda parts, end: "\x02".join(parts) + end, st.lists(PARTS, max_size=6), ENDS)
LOOKED_FOR = ("A", "AB", "KEYS", "TAGS", "UNIQ_KEY", "UNIQ_KEYS", "TIMER_OUT_MS", "é", "B")


def texts_of(values: list[str], between: bytes = b"\x02junk\x01") -> Texts:
    """Texts in a buffer with other bytes between them."""
    data, at, size = b"", [], []
    for value in values:
        data += between
        at.append(len(data))
        size.append(len(value.encode()))
        data += value.encode()
    array = np.frombuffer(data + bytes(128), np.uint8)
    return Texts(array, np.array(at, np.int64), np.array(size, np.int64))


def expected(value: str, name: str) -> str | None:
    return properties.parse(value).get(name)


@given(st.lists(TEXT, min_size=1, max_size=12))
def test_a_property_is_found_in_each_text(values: list[str]) -> None:
    texts = texts_of(values)
    for name in LOOKED_FOR:
        assert texts.strings(name).to_pylist() == [expected(value, name) for value in values], name
    assert [dict(row) for row in texts.maps().to_pylist()] == [properties.parse(value) for value in values]
    assert all(len(row) == len(dict(row)) for row in texts.maps().to_pylist()), "no name twice"


@given(st.lists(TEXT, min_size=1, max_size=12), st.data(), st.booleans())
def test_some_texts_are_as_they_were_among_all(values: list[str], data: st.DataObject, is_mask: bool) -> None:
    """A selection of texts has the same properties as among all texts, whether a property was looked up before or not,
    also in a selection of a selection."""
    texts = texts_of(values)
    if data.draw(st.booleans()):
        texts.strings("KEYS")
    if is_mask:
        mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
        which, chosen = np.array(mask, np.bool_), [value for value, wanted in zip(values, mask, strict=True) if wanted]
    else:
        picked = data.draw(st.lists(st.integers(0, len(values) - 1), unique=True, max_size=len(values)))
        which, chosen = np.array(picked, np.int64), [values[i] for i in picked]
    some = texts.take(which)
    for name in ("KEYS", "AB", "TIMER_OUT_MS"):
        assert some.strings(name).to_pylist() == [expected(value, name) for value in chosen], name
    assert [dict(row) for row in some.maps().to_pylist()] == [properties.parse(value) for value in chosen]
    if chosen:
        last = some.take(np.array([len(chosen) - 1]))
        assert last.strings("KEYS").to_pylist() == [expected(chosen[-1], "KEYS")]
        assert [dict(row) for row in last.maps().to_pylist()] == [properties.parse(chosen[-1])]


@given(st.lists(TEXT, min_size=2, max_size=40))
def test_it_does_not_matter_how_texts_are_laid_out(values: list[str]) -> None:
    """The layout of texts does not matter: texts of about one length lie in rows, others one after the other, and the
    longest alone decides."""
    uneven = [*values, "Z\x01" + "z" * 3000]
    even = texts_of(values)
    for name in LOOKED_FOR:
        assert texts_of(uneven).strings(name).to_pylist()[:-1] == even.strings(name).to_pylist()


@pytest.mark.parametrize("last", ["A\x01b", "A\x01b\x02"])
def test_a_text_at_the_very_end_of_the_bytes(last: str) -> None:
    data = np.frombuffer(b"A\x01a" + last.encode(), np.uint8)
    at, size = np.array([0, 3]), np.array([3, len(last)])
    assert Texts(data, at, size).strings("A").to_pylist() == ["a", "b"]


def test_of_no_texts_nothing_is_found() -> None:
    texts = texts_of([])
    assert texts.strings("KEYS").to_pylist() == []
    assert texts.maps().to_pylist() == []
    assert texts_of([""]).ints("KEYS")[1].tolist() == [False]


@given(st.lists(st.one_of(st.integers(-(10**18) + 1, 10**18 - 1).map(str), st.text("0123456789-x ", max_size=20))))
def test_numbers_are_read_and_what_is_none_is_absent(values: list[str]) -> None:
    found, present = texts_of([f"N\x01{value}\x02M\x015" for value in values]).ints("N")

    def number(value: str) -> int | None:
        digits = value.removeprefix("-")
        return int(value) if digits.isdecimal() and len(digits) <= 18 else None

    assert [n if there else None for n, there in zip(found.tolist(), present.tolist(), strict=True)] == [
        number(value) for value in values
    ]
