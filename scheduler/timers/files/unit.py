"""A unit of the timer log, as `timers.files.log` draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Units = NDArray[Any]
    """Array of units, with the type UNIT."""

M = TypeVar("M", int, "NDArray[np.int32]")

UNIT: Final = np.dtype(
    [
        ("size", ">i4"),
        ("previous", ">i8"),
        ("magic", ">i4"),
        ("write_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("physical_offset", ">i8"),
        ("record_size", ">i4"),
        ("topic_hash", ">i4"),
        ("due_ms", ">i8"),
    ]
)
UNIT_SIZE: Final = 52
assert UNIT.itemsize == UNIT_SIZE
NORMAL: Final = 1
"""Magic bit of a unit whose record is the first record of its message."""
ROLL: Final = 2
DELETE: Final = 4
WITHDRAWN: Final = 8
NO_MESSAGE: Final = DELETE | WITHDRAWN
"""Magic bits: a unit with any of them stands for no waiting message."""
APPLIED: Final = -1
"""The deliver time of units that stand for no message. They are duemq's deleting units, which have already taken effect
and which RocketMQ recognizes by their magic number, and units that were appended only so that RocketMQ finds them at
the end of the log."""
DUE_BITS: Final = 43
MAX_DUE_MS: Final = (1 << DUE_BITS) - 1
ANY_MAGIC: Final = NORMAL | ROLL | DELETE | WITHDRAWN
_SLOT_MS: Final = 1000


def withdrawn(magic: M) -> M:
    """Return the magic numbers of units whose messages are withdrawn: RocketMQ takes such units for deleting units, and
    finds nothing to delete in their records."""
    return (magic & ~ROLL) | WITHDRAWN | DELETE


def seconds_of(units: Units) -> NDArray[np.int64]:
    """Return the seconds, since the epoch, in whose slots the units lie."""
    seconds: NDArray[np.int64] = (units["write_ms"].astype(np.int64) + units["delay_ms"]) // _SLOT_MS
    return seconds
