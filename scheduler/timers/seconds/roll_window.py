"""The window of the slots: how far ahead messages may be put (`timerRollWindowSlot`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.config import TimerConfig
from duemq.scheduler.timers.files.wheel import SLOTS
from duemq.scheduler.timers.seconds.turns import Turns
from duemq.storage.current import Current

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RollWindow:
    """The window as of a given time. A message due beyond it gets a slot that is a multiple of the window earlier, so
    that the slot can be computed from the deliver time."""

    def __init__(self, config: Current[TimerConfig], turns: Turns) -> None:
        self._config = config
        self._turns = turns

    @property
    def size(self) -> int:
        """The farthest distance of a slot, in seconds."""
        return self._config.value.roll_window

    def end(self, now_ms: int) -> int:
        """Return the farthest second whose slot takes messages. The window reaches ahead from the second of `now_ms` or
        from the current one, whichever is later, but from no more than half a turn of the wheel ahead of the current
        one, which may be far behind after a long stop."""
        current = self._turns.second
        return min(max(now_ms // PRECISION_MS, current), current + SLOTS // 2) + self._config.value.roll_window

    def slot_for(self, second: int, now_ms: int) -> int:
        """Return the second whose slot, as of now, takes messages due in `second`."""
        excess, size = second - self.end(now_ms), self.size
        return second if excess <= 0 else second + -(-excess // size) * -size

    def slots_for(self, seconds: NDArray[np.int64], now_ms: int) -> NDArray[np.int64]:
        """Return the results of `slot_for` for the due seconds of many messages."""
        size = self.size
        excess = np.maximum(seconds - self.end(now_ms), 0)
        slots: NDArray[np.int64] = seconds - -(-excess // size) * size
        return slots
