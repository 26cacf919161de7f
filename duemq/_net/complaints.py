"""Warnings about what goes wrong again and again: each said once, and once when it is over.

A broker that is gone is noticed by every queue's reader at each of its tries; the log wants one line of that.
"""

from __future__ import annotations

import logging


class Complaints:
    """Present failures, by the activity that each one holds up."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._reasons: dict[str, str] = {}

    def raise_(self, who: str, reason: str) -> None:
        """`who` cannot go on for a reason. Logged unless it is known of anybody."""
        if reason not in self._reasons.values():
            self._log.warning("%s: %s", who, reason)
        self._reasons[who] = reason

    def resolve(self, who: str) -> None:
        """`who` can go on. Logged if now everybody can."""
        if self._reasons.pop(who, None) is not None and not self._reasons:
            self._log.warning("%s: going on", who)

    def forget(self, who: str) -> None:
        """`who` is not there any more."""
        self._reasons.pop(who, None)
