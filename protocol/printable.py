"""Texts of others for terminals and logs."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text that stays on its line and leaves the terminal alone: what cannot be printed, but for tabs, is
    escaped."""
    return "".join(each if each.isprintable() or each == "\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
