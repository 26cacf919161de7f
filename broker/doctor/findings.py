"""The findings of the checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """The broker works, but not as safely or as well as it could."""
    ERROR = "error"
    """The broker does not start, or is open to everyone."""


@dataclass(frozen=True)
class Finding:
    """One finding. `about`: what was checked, in one or two words. `text`: the finding, in a sentence. `help`: what to
    do, empty if there is nothing to do."""

    level: Severity
    about: str
    text: str
    help: str = ""


def ok(about: str, text: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(Severity.OK, about, text)


def warning(about: str, text: str, help_: str) -> Finding:
    """Return a warning."""
    return Finding(Severity.WARNING, about, text, help_)


def error(about: str, text: str, help_: str) -> Finding:
    """Return an error."""
    return Finding(Severity.ERROR, about, text, help_)
