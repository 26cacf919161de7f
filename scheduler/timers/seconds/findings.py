"""The facts that a start found about the messages in the wheel, for as long as they matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.scheduler import waiting as decided
from duemq.scheduler.timers.files.small_files import NO_OFFSETS, StartFacts
from duemq.scheduler.timers.files.unit import DELETE
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.scheduler.timers.recovery import Start

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.seconds.second import Waits

    Mask = NDArray[np.bool_]

_NOTHING: Final = Start(0, 0, 0, 0, {})


class LeftUnits(NamedTuple):
    """The state of some units in a second's slot, as masks: what is left to do for them."""

    kept: Mask
    """Whether each unit is still to be done."""
    done: Mask
    """Whether each unit's message was found delivered."""
    uncounted: Mask
    """Whether each unit's message was found delivered but is still counted as waiting."""


class Findings:
    """The findings of a start: which messages are delivered, withdrawn or moved according to records. A message is
    forgotten when it no longer has a unit in a future slot. Owned by one thread."""

    def __init__(self) -> None:
        """Begin without findings; `load` sets them."""
        self.start = _NOTHING
        """The state with which the timers began, as far as it matters."""
        self.is_replayed = False
        """Whether all messages that were stored when the store opened are in the wheel."""
        self._met_offsets: list[NDArray[np.int64]] = []
        """Physical offsets in `start.found` that no longer matter."""

    def load(self, start: Start) -> None:
        """Set the state that recovery found."""
        self.start = start

    def was_replayed(self) -> None:
        """Note that all messages that were stored when the store opened are in the wheel."""
        self.is_replayed = True

    def is_left(self, waits: Waits, seconds: NDArray[np.int64]) -> Mask:
        """Whether each message is still to be delivered by its unit, which is in a slot that is not past. `seconds`:
        the seconds of the slots."""
        start = self.start
        return decided.left_of(
            waits["physical"],
            waits["position"],
            waits["magic"],
            waits["due"],
            seconds,
            noted=start.second,
            found=start.found,
        ).kept

    def left_of(self, number: int, waits: Waits, magic: NDArray[np.int32]) -> LeftUnits:
        """Return what is left to do of units in the slot of second `number`. `magic`: the units' magic numbers."""
        start = self.start
        left = decided.left_of(
            waits["physical"], waits["position"], magic, waits["due"], number, noted=start.second, found=start.found
        )
        uncounted = left.done
        if len(start.done):
            uncounted = left.done & (magic & DELETE == 0)
            if number == start.second:
                uncounted &= ~is_among(waits["physical"], start.found.counted)
        return LeftUnits(left.kept, left.done, uncounted)

    def turned_to(self, second: int) -> None:
        """Note that a second got its turn. Deliveries since the start need not be noted here: none was of a message in
        this slot or a later one. The deliveries that the start found are kept until no slot can have messages that they
        delivered."""
        if self.is_replayed and second >= self.start.recovered_to:
            self.start, self._met_offsets = _NOTHING, []

    def forget(self, done: Iterable[NDArray[np.int64]]) -> None:
        """Forget that messages were found delivered, since they have no unit in a future slot. `done`: their physical
        offsets."""
        self._met_offsets += [offsets for offsets in done if len(offsets)]
        if sum(map(len, self._met_offsets)) * 4 > len(self.start.done):
            self._drop_settled()

    def _drop_settled(self) -> None:
        if not self._met_offsets:
            return
        found = self.start.found
        met, self._met_offsets = np.concatenate(self._met_offsets), []
        left = [
            np.delete(offsets, np.searchsorted(offsets, met[is_among(met, offsets)]))
            for offsets in (found.done, found.counted)
        ]
        self.start = self.start._replace(found=found._replace(done=left[0], counted=left[1]))

    def facts(self, second: int, *, is_loaded: bool) -> StartFacts:
        """Return the facts that still matter, a part of the note (`timers.files.small_files`). `second`: the current
        one; `is_loaded`: whether all its messages are in memory."""
        self._drop_settled()
        found = self.start.found
        if is_loaded:
            found = found._replace(counted=found.done)
        elif second != self.start.second:
            found = found._replace(counted=NO_OFFSETS)
        if second != self.start.second:
            found = found._replace(moved=NO_OFFSETS, moved_by=NO_OFFSETS)
        if self.is_replayed:
            found = found._replace(withdrawn=NO_OFFSETS)
        return found
