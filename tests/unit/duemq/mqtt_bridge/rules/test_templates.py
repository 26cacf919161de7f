from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import ArgumentError
from duemq.mqtt_bridge.rules.templates import Template

VALUES = {"key": "K", "2": "two", "property:a b": "p"}


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("", ""),
        ("plain", "plain"),
        ("{key}", "K"),
        ("a/{2}/b{key}{key}", "a/two/bKK"),
        ("{{key}} {property:a b}", "{key} p"),
        ("}}{{", "}{"),
    ],
)
def test_fields_are_replaced(text: str, rendered: str) -> None:
    assert Template(text, VALUES.__contains__, "{key}").render(VALUES.__getitem__) == rendered


@pytest.mark.parametrize("text", ["{", "}", "{}", "{other}", "{key", "key}", "{{key}", "{ke{y}}"])
def test_other_braces_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="the template"):
        Template(text, VALUES.__contains__, "{key}")


@given(st.text())
def test_a_text_with_doubled_braces_stands_for_itself(text: str) -> None:
    template = Template(text.replace("{", "{{").replace("}", "}}"), lambda _: False, "none")
    assert template.render(lambda name: name) == text
    assert template.is_constant
