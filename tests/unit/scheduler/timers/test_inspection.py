"""Reads of the timers' files by a start before it changes anything."""

import errno
from pathlib import Path

import numpy as np
import pytest

from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import UNIT
from duemq.scheduler.timers.inspection import inspect
from duemq.storage import files as files_module
from duemq.storage.files import OsFile, OsFiles

MIB = 1 << 20
FILE = 16 * MIB


class BadSector(OsFile):
    """A file with one unreadable byte."""

    __slots__ = ()
    at = 0

    def read(self, offset: int, size: int) -> bytes:
        if self.path.endswith("0" * 20) and offset <= self.at < offset + size:
            raise OSError(errno.EIO, "Input/output error", self.path)
        return super().read(offset, size)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> OsFiles:
    monkeypatch.setattr(files_module, "OsFile", BadSector)
    return OsFiles(8)


def log_of(root: Path, size: int) -> None:
    """Write one file of the timer log, with units up to about a position and zeros behind."""
    units = np.zeros(-(-size // UNIT.itemsize), UNIT)
    units["size"], units["magic"], units["previous"] = UNIT.itemsize, 1, -1
    (root / "timerlog").mkdir()
    with (root / "timerlog" / ("0" * 20)).open("wb") as file:
        file.write(units.tobytes())
        file.truncate(FILE)


@pytest.mark.parametrize("at", [0, 5 * MIB - 1, 5 * MIB, 7 * MIB - 1])
def test_all_that_a_start_may_read_is_read(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    # Units up to 7 MiB, of which the checkpoint knew 5.
    log_of(tmp_path, 7 * MIB)
    monkeypatch.setattr(BadSector, "at", at)
    with pytest.raises(OSError, match="Input/output"):
        inspect(files, str(tmp_path), 5 * MIB)


def test_zeros_before_the_noted_end_do_not_end_the_log(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_of(tmp_path, 0)
    monkeypatch.setattr(BadSector, "at", 9 * MIB)
    with pytest.raises(OSError, match="Input/output"):
        inspect(files, str(tmp_path), 9 * MIB + 1)


@pytest.mark.parametrize("size", [MIB, MIB + 52, MIB + (1 << 18)])
def test_whoever_reads_on_from_the_noted_end_reads_nothing_else(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    log_of(tmp_path, size)
    monkeypatch.setattr(BadSector, "at", -1)
    read: list[int] = []
    plain = BadSector.read

    def noting(self: BadSector, offset: int, count: int) -> bytes:
        read.append(offset + count)
        return plain(self, offset, count)

    monkeypatch.setattr(BadSector, "read", noting)
    inspect(files, str(tmp_path), MIB)
    inspected = max(read)
    assert inspected < 4 * MIB  # not all of the free space
    read.clear()
    timer_log = TimerLog(files, str(tmp_path / "timerlog"), FILE)
    timer_log.load()
    timer_log.recover(MIB // UNIT.itemsize * UNIT.itemsize)
    assert timer_log.end >= size
    assert max(read) <= inspected


def test_without_a_note_all_is_read(files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(tmp_path, 52)
    monkeypatch.setattr(BadSector, "at", FILE - 1)
    with pytest.raises(OSError, match="Input/output"):
        inspect(files, str(tmp_path), None)
