"""The property text: reading, removing and adding one property agree with reading all of them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.protocol.records import properties
from duemq.protocol.records.properties import (
    NAME_END,
    PROPERTY_END,
    get,
    java_hash,
    parse,
    tags_code,
    tags_code_of,
    with_property,
    without,
)

NAMES = st.sampled_from(["TAGS", "AGS", "XTAGS", "TAGSX", "WAIT", "DELAY", "A", ""])
"""Few names, so that one is the end or the beginning of another, or is repeated."""

PIECES = st.sampled_from(["\x01", "\x02", "TAGS", "TAG", "S", "WAIT", "a", "||", "é", "😀", "TAGS\x01", "\x02TAGS\x01"])
ANY_TEXT = st.lists(PIECES, max_size=12).map("".join)
"""Text of the characters that matter, well formed or not."""

VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=8)


@given(ANY_TEXT, NAMES)
@example("TAGS\x01a\x02TAGS\x01b", "TAGS")
@example("TAGS\x01a\x02TAGS\x01", "TAGS")
@example("A\x01xTAGS\x01b", "TAGS")
@example("XTAGS\x01a", "TAGS")
@example("TAGS\x01\x02", "TAGS")
def test_one_property_is_what_all_of_them_say(text: str, name: str) -> None:
    if name:
        assert get(text, name) == parse(text).get(name)


@given(ANY_TEXT)
@example("TAGS\x01a\x02TAGS\x01b")
@example("TAGS\x01a\x02TAGS\x01")
@example("XTAGS\x01a\x02TAGS\x01b\x02XTAGS\x01c")
def test_the_tags_code_is_that_of_the_property(text: str) -> None:
    """The tags code computed from the property text, as recovery does, is that of the TAGS property, as on arrival."""
    assert tags_code_of(text) == tags_code(get(text, "TAGS"))


@given(ANY_TEXT, NAMES.filter(bool))
def test_taking_a_property_out_leaves_the_others(text: str, name: str) -> None:
    rest = without(text, name)
    expected = parse(text)
    expected.pop(name, None)
    assert parse(rest) == expected
    assert get(rest, name) is None
    assert without(rest, name) == rest


@given(ANY_TEXT, st.lists(NAMES.filter(bool), max_size=4))
def test_taking_several_out_is_taking_out_each(text: str, names: list[str]) -> None:
    expected = text
    for name in names:
        expected = without(expected, name)
    assert parse(properties.without_all(text, names)) == parse(expected)


@given(ANY_TEXT, NAMES.filter(bool), VALUES)
def test_putting_a_property_in_replaces_the_older_one(text: str, name: str, value: str) -> None:
    result = with_property(text, name, value)
    assert parse(result) == {**parse(text), name: value}
    assert get(result, name) == value
    assert result.count(PROPERTY_END + name + NAME_END) + result.startswith(name + NAME_END) == 1


@given(st.dictionaries(VALUES, VALUES, max_size=5))
def test_properties_survive_as_text(wanted: dict[str, str]) -> None:
    text = properties.format_properties(wanted)
    assert parse(text) == wanted
    assert parse(text + PROPERTY_END) == wanted
    assert not text.endswith(PROPERTY_END)


def test_empty_values_are_no_properties() -> None:
    assert properties.format_properties({"A": "", "B": "b"}) == "B\x01b"
    assert parse("A\x01\x02B\x01b\x02C\x02\x01d\x02\x02") == {"B": "b"}


def test_a_value_may_hold_a_name_with_its_separator() -> None:
    assert parse("A\x01xTAGS\x01b") == {"A": "xTAGS\x01b"}
    assert get("A\x01TAGS\x01b", "A") == "TAGS\x01b"
    assert without("A\x01xTAGS\x01b", "TAGS") == "A\x01xTAGS\x01b"


# --- hashes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0), ("a", 97), ("tagA", 3552231), ("TagA", 2598919), ("grün", 3185949), ("日本語", 25921943),
        ("😀", 1772899), ("polygenelubricants", -(2**31)),
        ("the quick brown fox jumps over the lazy dog", -2082818701),
    ],
)  # fmt: skip
def test_the_hash_is_javas(text: str, value: int) -> None:
    """java_hash gives the values printed by String.hashCode."""
    assert java_hash(text) == value


@given(st.text(max_size=50), st.text(max_size=50))
def test_the_hash_is_the_polynomial_over_utf16_units(first: str, second: str) -> None:
    """The hash is the polynomial over UTF-16 units, also of lone surrogates, which Java's strings may hold."""
    units = len((second).encode("utf-16-be", "surrogatepass")) // 2
    joined = first + second
    if joined.encode("utf-16-be", "surrogatepass") == b"".join(
        part.encode("utf-16-be", "surrogatepass") for part in (first, second)
    ):
        expected = (java_hash(first) * 31**units + java_hash(second)) % 2**32
        assert java_hash(joined) % 2**32 == expected
    assert -(2**31) <= java_hash(joined) < 2**31


def test_messages_without_tags_have_code_0() -> None:
    assert tags_code(None) == tags_code("") == tags_code_of("") == tags_code_of("KEYS\x01k") == 0
    assert tags_code_of("KEYS\x01k\x02TAGS\x01tagA\x02") == 3552231


def test_long_tags_are_not_remembered() -> None:
    """Long tags are not cached, so that tags made up by clients cannot fill memory."""
    before = properties._known_code.cache_info().currsize
    long = "x" * 30_000
    assert tags_code(long) == tags_code_of(f"TAGS\x01{long}") == java_hash(long)
    assert properties._known_code.cache_info().currsize == before
