from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq import ArgumentError
from duemq._values.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("250ms", 250),
        ("5s", 5_000),
        ("2m", 120_000),
        ("1h30m", 5_400_000),
        ("1d", 86_400_000),
        ("1d2h3m4s5ms", 93_784_005),
        ("1.5h", 5_400_000),
        ("0.1s", 100),
        ("0s", 0),
        ("90m", 5_400_000),
        ("0.0001s", 1),  # rounded up: a delay is never shortened
        ("1.0000001s", 1_001),
    ],
)
def test_a_duration_is_read_to_the_millisecond(text: str, milliseconds: int) -> None:
    assert parse_duration(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "s",
        "-5s",
        "5 s",
        "5s ",
        "1m1h",
        "1s1s",
        "5x",
        "1e3s",
        ".5s",
        "5.s",
        "5S",
        "1h30",
        "\u0665s",
        "9" * 100 + "s",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=10**12))
def test_what_is_written_is_read_again(milliseconds: int) -> None:
    text = format_duration(milliseconds)
    assert parse_duration(text) == milliseconds
    assert re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?", text)


@given(st.text(max_size=20))
def test_any_text_gives_a_duration_or_an_argument_error(text: str) -> None:
    with suppress(ArgumentError):
        assert parse_duration(text) >= 0
