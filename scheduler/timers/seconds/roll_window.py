"""The window of the slots: how far ahead messages may be put (`timerRollWindowSlot`), and which messages are put into a
nearer slot, from which they are rolled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.config import TimerConfig
from duemq.scheduler.timers.files.wheel import HOUR, SLOTS
from duemq.scheduler.timers.seconds.turns import SecondTurns
from duemq.storage.current import Current

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RollWindow:
    """The window, which moves with time. A message that is due beyond it gets a slot that is earlier by a multiple of
    the window, so that the slot can be computed from the deliver time."""

    def __init__(self, config: Current[TimerConfig], turns: SecondTurns) -> None:
        self._config = config
        self._turns = turns

    @property
    def size(self) -> int:
        """The farthest distance of a slot, in seconds."""
        return self._config.value.roll_window

    def end(self, now_ms: int) -> int:
        """Return the farthest second whose slot accepts messages. The window begins at the second of `now_ms` or at the
        current second, whichever is later. But it begins no more than half a turn of the wheel ahead of the current
        second, which may be far behind after a long stop."""
        current = self._turns.second
        return min(max(now_ms // PRECISION_MS, current), current + SLOTS // 2) + self.size

    def seconds_for(
        self, due_ms: NDArray[np.int64], now_ms: int, not_before: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return, for each message, the second into whose slot it is put, and whether it is due beyond the window, so
        that it is rolled when that second comes. The second is the one in which the message is due, but neither before
        the current one nor before `not_before`; for messages beyond the window it is an earlier one. `due_ms`: the
        deliver times, ms since the epoch."""
        current = self._turns.second
        seconds = np.maximum((due_ms - 1) // PRECISION_MS, current)
        if not_before is not None:
            seconds = np.maximum(seconds, not_before)
        is_far = seconds > self.end(now_ms)
        if is_far.any():
            nearer = self.slots_for(seconds, now_ms)
            seconds = np.where(is_far, np.minimum(nearer, current + SLOTS - HOUR), seconds)
        return seconds, is_far

    def slot_for(self, second: int, now_ms: int) -> int:
        """Return the second whose slot, at this time, accepts messages that are due in `second`."""
        excess, size = second - self.end(now_ms), self.size
        return second if excess <= 0 else second + -(-excess // size) * -size

    def slots_for(self, seconds: NDArray[np.int64], now_ms: int) -> NDArray[np.int64]:
        """Return the results of `slot_for` for the seconds in which many messages are due."""
        size = self.size
        excess = np.maximum(seconds - self.end(now_ms), 0)
        slots: NDArray[np.int64] = seconds - -(-excess // size) * size
        return slots
