"""How many times, and after which pauses, a send is retried."""

from __future__ import annotations

import random
from dataclasses import dataclass

from duemq._values.checks import is_whole_number, shown, to_float
from duemq.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How a failed send is retried, within its time-out.

    After the first failure the send is retried immediately: at another broker, if the topic has one, and over a new
    connection if the old one was lost. Later attempts come after pauses, which double each time.
    """

    times: int = 2
    """How many times a send is retried after failures at which the message may have been stored: the more attempts, the
    more messages are stored twice. After failures at which it was certainly not stored, a send is retried until its
    time-out. 0: only one attempt, after any failure."""
    first_pause: float = 0.1
    """The first pause, in seconds."""
    longest_pause: float = 1.0
    """The longest pause, in seconds."""
    jitter: float = 0.5
    """The fraction, 0 to 1, by which a pause is shortened at most, at random, so that many senders do not all retry at
    the same time."""

    def __post_init__(self) -> None:
        if not is_whole_number(self.times) or self.times < 0:
            raise ArgumentError(f"retries={shown(self.times)}: give a number, 0 or more")
        first, longest, jitter = to_float(self.first_pause), to_float(self.longest_pause), to_float(self.jitter)
        if not 0 < first <= longest:
            raise ArgumentError(
                f"first_pause={shown(self.first_pause)}, longest_pause={shown(self.longest_pause)}: give seconds, more "
                "than 0, and first_pause not above longest_pause"
            )
        if not 0 <= jitter <= 1:
            raise ArgumentError(f"jitter={shown(self.jitter)}: give a number from 0 to 1")
        # The arithmetic of other libraries' numbers may differ from that of Python's; the dataclass is frozen.
        object.__setattr__(self, "times", int(self.times))
        object.__setattr__(self, "first_pause", first)
        object.__setattr__(self, "longest_pause", longest)
        object.__setattr__(self, "jitter", jitter)

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures in a row, counted from 1."""
        longest = min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 30))
        return longest * random.uniform(1 - self.jitter, 1)
