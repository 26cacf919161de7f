"""The handles by which waiting messages are recalled."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.requests import recall_handle
from duemq.protocol.requests.recall_handle import RecallHandle

WORDS = st.text(st.characters(blacklist_characters=" ", blacklist_categories=["Cs"]), min_size=1, max_size=40)
NUMBERS = st.integers(0, 2**53)


def handle_of(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@given(WORDS, WORDS, NUMBERS, WORDS, NUMBERS, NUMBERS)
def test_a_handle_is_read_as_it_was_written(
    topic: str, broker: str, out_ms: int, key: str, offset: int, deliver_ms: int
) -> None:
    handle = recall_handle.encode(topic, broker, out_ms, key, offset, deliver_ms)
    wanted = RecallHandle(topic, broker, out_ms + 1, key, (offset, deliver_ms))
    for text in (handle.decode(), handle.decode().rstrip("=")):
        assert recall_handle.decode(text) == wanted
    # As Java's clients read it.
    words = base64.urlsafe_b64decode(handle).decode().split(" ")
    assert words[:5] == ["v1", topic, broker, str(out_ms + 1), key]


@pytest.mark.parametrize(
    ("text", "handle"),
    [
        ("v1 T b 5 K", RecallHandle("T", "b", 5, "K")),
        ("v1 T b soon K", RecallHandle("T", "b", -1, "K")),
        ("v1 T b ٣ K", RecallHandle("T", "b", -1, "K")),
        ("v1 T b 5 K x-y more", RecallHandle("T", "b", 5, "K")),
        ("v1 T b 5 K 1-2 more", RecallHandle("T", "b", 5, "K", (1, 2))),
        ("v1 T b 5 K " + "9" * 20 + "-2", RecallHandle("T", "b", 5, "K")),
    ],
)
def test_a_handle_of_others_is_read(text: str, handle: RecallHandle) -> None:
    assert recall_handle.decode(handle_of(text)) == handle


@pytest.mark.parametrize(
    "text", ["", "x", "djE", "v1 T b 5 K", "ü", "=", "dj E=", handle_of("v1 T b 5"), handle_of("v2 a b c d")]
)
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="recall handle is invalid"):
        recall_handle.decode(text)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_handle_are_refused(data: bytes) -> None:
    try:
        recall_handle.decode(base64.urlsafe_b64encode(data).decode())
    except RemoteProtocolError:
        assert not data.startswith(b"v1 ") or data.count(b" ") < 4 or not _is_text(data)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
