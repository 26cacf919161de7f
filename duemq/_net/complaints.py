"""Warnings about failures that occur again and again: each is logged once, and once when it is over.

Every queue's reader notices a broker that is gone, at each of its tries; the log needs one line for that.
"""

from __future__ import annotations

import logging


class Complaints:
    """Present failures, by the name of the activity that each one holds up."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._reasons: dict[str, str] = {}

    def raise_(self, who: str, reason: str) -> None:
        """Note that activity `who` cannot go on, and why. Logged unless another activity has the same reason."""
        if reason not in self._reasons.values():
            self._log.warning("%s: %s", who, reason)
        self._reasons[who] = reason

    def resolve(self, who: str) -> None:
        """Note that activity `who` can go on. Logged if all activities can go on now."""
        if self._reasons.pop(who, None) is not None and not self._reasons:
            self._log.warning("%s: going on", who)

    def forget(self, who: str) -> None:
        """Forget activity `who`, which no longer exists."""
        self._reasons.pop(who, None)
