from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import ArgumentError
from duemq.mqtt_bridge.rules.filters import Filter, check_topic

LEVELS = ("a", "b", "", "$a")
TOPICS = ["/".join(levels) for count in range(1, 5) for levels in itertools.product(LEVELS, repeat=count)]
filters = st.lists(st.sampled_from((*LEVELS, "+")), max_size=3).flatmap(
    lambda levels: st.sampled_from(["/".join(levels)] * bool(levels) + ["/".join([*levels, "#"])])
)


def naive(pattern: list[str], topic: list[str]) -> bool:
    """MQTT's rules, level by level."""
    if pattern == ["#"]:
        return True
    if not pattern or not topic:
        return not pattern and not topic
    return pattern[0] in ("+", topic[0]) and naive(pattern[1:], topic[1:])


def matches(pattern: str, topic: str) -> bool:
    if topic.startswith("$") and pattern[:1] in ("+", "#"):
        return False
    return naive(pattern.split("/"), topic.split("/"))


@given(filters.filter(bool), st.sampled_from([topic for topic in TOPICS if topic]))
def test_a_filter_matches_as_mqtt_says(pattern: str, topic: str) -> None:
    assert Filter(pattern).matches(topic) == matches(pattern, topic)


@given(filters.filter(bool), filters.filter(bool))
def test_two_filters_overlap_if_a_topic_matches_both(one: str, other: str) -> None:
    expected = any(matches(one, topic) and matches(other, topic) for topic in TOPICS if topic)
    assert Filter(one).overlaps(Filter(other)) == expected
    assert Filter(other).overlaps(Filter(one)) == expected


@given(filters.filter(bool), filters.filter(bool))
def test_a_filter_covers_another_if_it_matches_all_of_its_topics(one: str, other: str) -> None:
    expected = all(matches(one, topic) for topic in TOPICS if topic and matches(other, topic))
    assert Filter(one).covers(Filter(other)) == expected


def test_a_level_may_have_any_other_character() -> None:
    assert Filter("a.b/+/c*").matches("a.b/x\ny/c*")
    assert not Filter("a.b").matches("axb")


@pytest.mark.parametrize(
    "text", ["", "a#", "#/a", "a/#/b", "a+", "a/+b", "$share/group/a", "a\x00", "a/\ud800", "a" * 65_536]
)
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        Filter(text)


@pytest.mark.parametrize("text", ["", "a/#", "+", "a\x00b", "\ud800", "ä" * 32_768])
def test_what_is_no_topic_name_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        check_topic(text)


@pytest.mark.parametrize("text", ["/", "a//b", " ", "$SYS/x", "a" * 65_535])
def test_every_other_text_is_a_topic_name(text: str) -> None:
    check_topic(text)


def test_filters_of_many_levels_are_compared() -> None:
    deep, deeper = Filter("/".join("a" * 3000)), Filter("/".join("a" * 3001))
    assert not deep.covers(deeper)
    assert Filter("+/" * 2999 + "#").covers(deeper)
    assert deep.covers(Filter("/".join("a" * 3000)))
