"""config/delayOffset.json: the progress of the levels, for RocketMQ and its tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from duemq.storage.config_file import ConfigFile
from duemq.storage.errors import StoreFormatError

log = structlog.get_logger(__name__)

OFFSET_TABLE: Final = "offsetTable"


@dataclass(frozen=True)
class DelayOffsets:
    """The file delayOffset.json, and its contents at the start."""

    file: ConfigFile
    offsets: Mapping[int, int] = field(default_factory=dict)
    """By level: the queue offset of the next message to deliver."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """The fields that duemq does not know; they are kept when the file is written."""

    def table_of(self, offsets: Mapping[int, int]) -> dict[str, Any]:
        """Return the contents for the file, with these offsets by level."""
        return {**self.others, OFFSET_TABLE: {str(level): offset for level, offset in offsets.items()}}


def read_delay_offsets(file: ConfigFile, *, is_needed: bool) -> DelayOffsets:
    """Read delayOffset.json. `is_needed`: whether this raises StoreFormatError, which stops the start, if the file
    cannot be read. The file is not needed if the checkpoint has the progress of the levels: then the failure is logged,
    the result has no offsets, and the file is written again later. Raises OSError."""
    try:
        table = file.read()
        offsets = table.get(OFFSET_TABLE) or {}
        others = {name: value for name, value in table.items() if name != OFFSET_TABLE}
        try:
            return DelayOffsets(file, {int(level): int(offset) for level, offset in offsets.items()}, others)
        except (AttributeError, TypeError, ValueError):
            raise StoreFormatError(file.path, "offsetTable: levels and offsets must be numbers") from None
    except StoreFormatError as error:
        if is_needed:
            raise
        log.warning("delay_offsets_passed_over", reason=str(error))
        return DelayOffsets(file)
