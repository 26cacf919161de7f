"""Warnings about repeated failures: each is logged once when it begins, and the end of all failures is logged once.

When a broker is down, the reader of every queue fails at each attempt; the log needs only one line about that.
"""

from __future__ import annotations

import logging


class Complaints:
    """The present failures, by the name of the activity that each one holds up."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._reasons: dict[str, str] = {}

    def raise_(self, who: str, reason: Exception | str) -> None:
        """Note that activity `who` is failing, and why. Logged unless an activity is failing for the same reason."""
        text = str(reason)
        if text not in self._reasons.values():
            self._log.warning("%s: %s", who, text)
        self._reasons[who] = text

    def resolve(self, who: str) -> None:
        """Note that activity `who` is no longer failing. Logged if it was the last that was."""
        if self._reasons.pop(who, None) is not None and not self._reasons:
            self._log.warning("%s: resolved", who)

    def forget(self, who: str) -> None:
        """Forget activity `who`, which has ended, without logging it."""
        self._reasons.pop(who, None)
