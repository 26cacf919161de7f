from __future__ import annotations

from typing import Any

import pytest

from duemq import ArgumentError
from duemq._consuming.subscription import make_subscription
from duemq.protocol.frames import fastjson


def test_a_star_wants_everything() -> None:
    subscription = make_subscription("demo", "*", 5)
    assert subscription.text == "*"
    assert subscription.wants(None)
    assert subscription.wants("a")


def test_tags_are_compared_whole() -> None:
    # "Aa" and "BB" have the same Java hash, which is all that a broker compares.
    subscription = make_subscription("demo", " Aa||b ", 5)
    assert subscription.text == "Aa || b"
    assert [subscription.wants(tag) for tag in ("Aa", "b", "BB", None)] == [True, True, False, False]


def test_only_the_blanks_that_rocketmq_trims_are_trimmed() -> None:
    """Another blank is part of a tag: for a broker it changes the hash."""
    assert make_subscription("demo", " a\u3000 || \tb\x00", 5).tags == {"a\u3000", "b"}


@pytest.mark.parametrize("tags", ["", "||", "a || *", " ", None])
def test_what_names_no_tags_is_refused(tags: Any) -> None:
    with pytest.raises(ArgumentError):
        make_subscription("demo", tags, 5)


def test_a_heartbeat_carries_the_tags_and_their_hashes() -> None:
    data = fastjson.loads(fastjson.dumps(make_subscription("demo", "b || a", 5).to_data()))
    assert data == {
        "topic": "demo",
        "subString": "a || b",
        "subVersion": 5,
        "expressionType": "TAG",
        "classFilterMode": False,
        "tagsSet": ["a", "b"],
        "codeSet": [97, 98],
    }
