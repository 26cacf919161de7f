"""Makes texts of other parties safe for terminals and logs."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text that stays on its line and leaves the terminal alone: unprintable characters, except tabs, are
    escaped."""
    return "".join(each if each.isprintable() or each == "\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
