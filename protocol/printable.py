"""Makes texts from other parties safe for terminals and logs."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with its unprintable characters escaped, except tabs, so that it stays on one line and does not
    control the terminal."""
    return "".join(each if each.isprintable() or each == "\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
