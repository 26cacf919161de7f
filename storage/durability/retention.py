"""Retention: decides which files may be deleted, and when the disk is too full to accept more messages. The caller
deletes the files in a thread, since that may take long (a file has 1 GiB).

RocketMQ's rules: a commitlog file is deleted when its newest record is older than fileReservedTime hours, but only in
the hours named by deleteWhen, or when the disk is fuller than diskMaxUsedSpaceRatio. Beyond 85% the oldest files are
deleted even if they are newer (cleanFileForciblyEnable). From 90% on messages are refused until there is room again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from duemq.storage.current import Current
from duemq.storage.files import Files
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.scan import read_record

_HOUR_MS: Final = 3_600_000
_FILES_AT_ONCE: Final = 10


@dataclass(frozen=True)
class RetentionConfig:
    """Limits of retention. Ratios are those of the used space to all space of the commitlog's file system, 0 to 1."""

    reserved_hours: int = 72
    """Age in hours below which messages are kept while there is room."""
    delete_when: str = "04"
    """Hours of the day, local time, two digits each, separated by semicolons."""
    max_used_ratio: float = 0.75
    """Used ratio beyond which expired files may be deleted at any hour."""
    clean_forcibly: bool = True
    """Whether files that have not expired may be deleted when the disk is full."""
    forcible_ratio: float = 0.85
    """Used ratio beyond which the oldest files may be deleted, expired or not."""
    refuse_ratio: float = 0.90
    """Used ratio from which on messages are refused."""


class Retention:
    """Decides which files may be deleted. The age of a file is judged by the store time of the next file's first
    record, not by the file's times, so copying a store does not make its files younger."""

    def __init__(self, config: Current[RetentionConfig], files: Files, log: Commitlog) -> None:
        self._config = config
        self._files = files
        self._log = log
        self.used_ratio = 0.0
        """Used ratio of the disk at the last call of `look`."""

    @property
    def config(self) -> RetentionConfig:
        """The settings in force."""
        return self._config.value

    def look(self) -> bool:
        """Look at the disk; return whether there is room for messages. Raises OSError."""
        self.used_ratio = self._files.used_ratio(self._log.directory)
        return self.used_ratio < self._config.value.refuse_ratio

    def deletable_before(self, now_ms: int, *, at_any_hour: bool = False) -> int:
        """Return the physical offset before which commitlog files may be deleted now; the log's begin if none may.
        `now_ms`: ms since the epoch. `at_any_hour`: regardless of the hours of deleteWhen. May wait for the disk."""
        config = self._config.value
        full = self.used_ratio > config.max_used_ratio
        is_hour = at_any_hour or full
        if not is_hour and time.strftime("%H", time.localtime(now_ms / 1000)) not in config.delete_when.split(";"):
            return self._log.begin
        force = config.clean_forcibly and self.used_ratio > config.forcible_ratio
        limit_ms = now_ms - config.reserved_hours * _HOUR_MS
        bases = [base for base in self._log.segment_bases() if base <= self._log.end]
        end = self._log.begin
        for base in bases[1 : _FILES_AT_ONCE + 1]:
            if not force and not self._starts_before(base, limit_ms):
                break
            end = base
            if force:
                break
        return end

    def _starts_before(self, base: int, limit_ms: int) -> bool:
        """Whether the first record of a file, and so every record of the file before it, is older than a time."""
        first = read_record(self._log, base, check_crc=False)
        return first is not None and first.store_timestamp < limit_ms
