"""How often, and after which pauses, a send is tried again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from duemq.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How a send that failed is tried again, within its time-out.

    After the first failure the send is tried at another broker at once, if the topic has one, and over a new connection
    where the old one was cut. From then on there is a pause before each try, doubled each time.
    """

    times: int = 2
    """How often it is tried again after failures at which it may have been stored: more tries, more messages that are
    stored twice. Failures at which it was certainly not stored are tried again until the time-out. 0: one try only,
    whatever happens."""
    first_pause: float = 0.1
    """Seconds."""
    longest_pause: float = 1.0
    """Seconds."""
    jitter: float = 0.5
    """By which part of itself a pause is shortened at random, 0 to 1: many senders must not come back all at once."""

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int) or self.times < 0:
            raise ArgumentError(f"retries={self.times!r}: give a number, 0 or more")
        if not 0 < self.first_pause <= self.longest_pause:
            raise ArgumentError(
                f"first_pause={self.first_pause!r}, longest_pause={self.longest_pause!r}: give seconds, more than 0, "
                "the first one being the shorter"
            )
        if not 0 <= self.jitter <= 1:
            raise ArgumentError(f"jitter={self.jitter!r}: give a number from 0 to 1")

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures in a row, counted from 1."""
        longest = min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 30))
        return longest * random.uniform(1 - self.jitter, 1)
