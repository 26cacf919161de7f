from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.mqtt_bridge.rules.delays import read_delay
from duemq.mqtt_bridge.rules.model import Delay, DelayRefused

NOW_MS = 1_764_000_000_000
DAY_MS = 86_400_000
PREFIXES = ("$delayed", "delayed")
Properties = tuple[tuple[str, str], ...]


def read(topic: str, *properties: tuple[str, str], longest_ms: int = 3_650 * DAY_MS) -> Delay | None:
    return read_delay(topic, properties, PREFIXES, NOW_MS, longest_ms, "duemq/bridge/b")


@pytest.mark.parametrize(
    ("topic", "delay"),
    [
        ("$delayed/15/x/y", Delay("x/y", delay_ms=15_000)),  # the examples of EMQX's documentation
        ("$delayed/60/a/b", Delay("a/b", delay_ms=60_000)),
        ("$delayed/3600/$SYS/topic", Delay("$SYS/topic", delay_ms=3_600_000)),
        ("$delayed/4294966/a", Delay("a", delay_ms=4_294_966_000)),
        ("$delayed/1764000060/a", Delay("a", deliver_at_ms=NOW_MS + 60_000)),
        ("$delayed/42949669/a", Delay("a", delay_ms=42_949_669_000)),
        ("$delayed/42949670/a", Delay("a", deliver_at_ms=42_949_670_000)),
        ("$delayed/0/a", Delay("a", delay_ms=0)),
        ("delayed/1500ms/a//b/", Delay("a//b/", delay_ms=1_500)),
        ("delayed/1h30m//a", Delay("/a", delay_ms=5_400_000)),
        ("delayed/@1764000060/a", Delay("a", deliver_at_ms=NOW_MS + 60_000)),
        ("delayed/@1764000060123/a", Delay("a", deliver_at_ms=NOW_MS + 60_123)),
        ("delayed/@2025-11-24T17:00:00Z/a", Delay("a", deliver_at_ms=1_764_003_600_000)),
        ("delayed/@2025-11-24T18:00:00.0001+01:00/a", Delay("a", deliver_at_ms=1_764_003_600_001)),
        ("delayed/@12/a", Delay("a", deliver_at_ms=12_000)),
        ("delayed/10;key=front%2Fdoor;replace/a", Delay("a", delay_ms=10_000, key="a#front/door", replace=True)),
        ("delayed/recall;key=door/a", Delay("a", key="a#door", recall=True)),
        ("delayed/10;key=a b/x y", Delay("x y", delay_ms=10_000, key="x%20y#a%20b")),
        ("delayed/10/duemq/bridge/b2", Delay("duemq/bridge/b2", delay_ms=10_000)),
        ("delay/10/a", None),
        ("x/delayed/10/a", None),
    ],
)
def test_a_topic_asks_for_a_delay(topic: str, delay: Delay | None) -> None:
    assert read(topic) == delay


@pytest.mark.parametrize(
    ("topic", "properties", "delay"),
    [
        ("a", (("delay", "10"),), Delay("a", delay_ms=10_000)),
        ("a", (("delay", "2d"), ("key", "k")), Delay("a", delay_ms=2 * DAY_MS, key="a#k")),
        ("a", (("deliver-at", "1764000060123"),), Delay("a", deliver_at_ms=NOW_MS + 60_123)),
        (
            "a",
            (("delay", "1s"), ("key", "k"), ("replace", "true")),
            Delay("a", delay_ms=1_000, key="a#k", replace=True),
        ),
        ("a", (("recall", "1"), ("key", "k")), Delay("a", key="a#k", recall=True)),
        ("delayed/5/a", (("key", "k"), ("replace", "yes")), Delay("a", delay_ms=5_000, key="a#k", replace=True)),
        ("a", (("key", "k"),), None),
        ("a", (("other", "1"), ("other", "2")), None),
    ],
)
def test_user_properties_ask_for_a_delay(topic: str, properties: Properties, delay: Delay | None) -> None:
    assert read(topic, *properties) == delay


@pytest.mark.parametrize(
    ("topic", "properties", "why"),
    [
        ("$delayed", (), "no topic"),
        ("$delayed/", (), "no topic"),
        ("$delayed/10", (), "no topic"),
        ("$delayed/10/", (), "no topic"),
        ("$delayed/x/a", (), "not a delay"),
        ("$delayed//a", (), "not a delay"),
        ("$delayed/-1/a", (), "not a delay"),
        ("$delayed/1.5/a", (), "not a delay"),
        ("$delayed/1e3/a", (), "not a delay"),
        ("$delayed/\u0661/a", (), "not a delay"),
        ("$delayed/99999999999999999/a", (), "not a delay"),
        ("$delayed/5/$delayed/5/a", (), "delays a delayed"),
        ("$delayed/5/delayed", (), "delays a delayed"),
        ("delayed/@tomorrow/a", (), "not a time"),
        ("delayed/@2027-01-01T00:00:00/a", (), "no time zone"),
        ("delayed/@/a", (), "not a time"),
        ("delayed/3651d/a", (), "too long"),
        ("delayed/@2060-01-01T00:00:00Z/a", (), "too long"),
        ("delayed/5;key=/a", (), "not an option"),
        ("delayed/5;key=a;key=b/a", (), "not an option"),
        ("delayed/5;replace=1;key=k/a", (), "not an option"),
        ("delayed/5;soon/a", (), "not an option"),
        ("delayed/5;replace/a", (), "needs a key"),
        ("delayed/recall/a", (), "needs a key"),
        ("delayed/recall;key=k;replace/a", (), "combined with a delay"),
        ("a", (("delay", "soon"),), "not a delay"),
        ("a", (("delay", "1"), ("delay", "2")), "given twice"),
        ("a", (("delay", "1"), ("deliver-at", "5")), "not both"),
        ("a", (("replace", "true"), ("key", "k")), "when is the message"),
        ("a", (("delay", "1"), ("replace", "maybe"), ("key", "k")), "write true or false"),
        ("a", (("recall", "true"),), "needs a key"),
        ("a", (("recall", "true"), ("key", "k"), ("delay", "1")), "combined with a delay"),
        ("delayed/5/a", (("delay", "5"),), "give it once"),
        ("delayed/5/a", (("deliver-at", "5"),), "give it once"),
        ("delayed/5;key=k/a", (("key", "k"),), "give it once"),
        ("delayed/5/duemq/bridge/b", (), "the bridge's own reports"),
        ("delayed/5/duemq/bridge/b/refused", (), "the bridge's own reports"),
        ("duemq/bridge/b", (("delay", "5"),), "the bridge's own reports"),
    ],
)
def test_a_wrong_delay_is_refused_with_the_reason(topic: str, properties: Properties, why: str) -> None:
    with pytest.raises(DelayRefused, match=why):
        read(topic, *properties)


@given(
    st.text(max_size=20), st.lists(st.tuples(st.sampled_from(("delay", "deliver-at", "key", "x")), st.text(max_size=8)))
)
def test_any_text_is_a_delay_or_refused(segment: str, properties: list[tuple[str, str]]) -> None:
    with suppress(DelayRefused):
        delay = read(f"delayed/{segment}/a", *properties)
        assert delay is not None
        assert delay.plain_topic
        assert delay.recall or (delay.delay_ms is None) != (delay.deliver_at_ms is None)


@given(st.integers(0, 3_650 * DAY_MS))
def test_no_delay_is_shorter_than_what_was_asked(delay_ms: int) -> None:
    delay = read(f"delayed/{delay_ms}ms/a")
    assert delay is not None
    assert delay.delay_ms == delay_ms
