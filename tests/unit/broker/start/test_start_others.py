"""A start on a store whose directories are links, file systems of their own, or contain foreign files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.loop import SteppedLoop
from tests.unit.broker.start.test_start import Life

OTHERS = (
    "timerlog/notes.txt",
    "commitlog/lost+found/1",
    "timerlog/lost+found/1",
    "consumequeue/lost+found/1",
    "consumequeue/notes.txt",
    "consumequeue/T.bak/0/00000000000000000000",
    "consumequeue/T/notes.txt",
    "config/notes.txt",
)


@pytest.fixture
async def life(tmp_path: Path, loop: SteppedLoop) -> Life:
    life = Life(tmp_path / "store", loop)
    await life.write(cleanly=True)
    return life


def _warned(logged: list[Any]) -> list[str]:
    return [line["event"] for line in logged if line["log_level"] in ("warning", "error")]


async def test_what_is_not_the_stores_is_left_alone(life: Life, logged: list[Any]) -> None:
    for name in OTHERS:
        path = life.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    logged.clear()
    await life.each_once()
    assert [name for name in OTHERS if (life.root / name).read_text() != "mine"] == []
    assert _warned(logged) == ["others_in_timer_log"], "nothing is made anew"


@pytest.mark.parametrize("lost", ["all", "the wheel"])
async def test_a_timer_log_that_is_a_link_stays_one(life: Life, tmp_path: Path, lost: str, logged: list[Any]) -> None:
    place = life.root / "timerlog"
    place.rename(tmp_path / "disk")
    place.symlink_to(tmp_path / "disk")
    for file in place.iterdir() if lost == "all" else ():
        file.unlink()
    (life.root / "timerwheel").unlink()
    await life.each_once()
    assert place.is_symlink()
    assert "timers_rebuilt" in _warned(logged) or lost != "all"
    assert [file.name for file in place.iterdir()] == ["0" * 20]


async def test_a_timer_log_on_a_disk_of_its_own_that_was_lost(life: Life, logged: list[Any]) -> None:
    """A lost timer log on a disk of its own is made again in place: the directory that a file system is mounted at
    cannot be removed."""
    place = life.root / "timerlog"
    for file in place.iterdir():
        file.write_bytes(b"")
    (place / "lost+found").mkdir()
    real = os.rmdir

    def remove_directory(path: Any, **options: Any) -> None:
        if os.fspath(path) == str(place):
            raise OSError(errno.EBUSY, "Device or resource busy", str(place))
        real(path, **options)

    def remove_tree(path: Any) -> None:
        raise AssertionError(f"{path} and what somebody put there would go")

    with patch("os.rmdir", remove_directory), patch.object(shutil, "rmtree", remove_tree):
        await life.each_once()
    assert "timers_rebuilt" in _warned(logged)
    assert (place / "lost+found").is_dir()


async def test_a_timer_log_that_is_no_directory_is_replaced(life: Life) -> None:
    place = life.root / "timerlog"
    shutil.rmtree(place)
    place.write_text("no directory")
    await life.each_once()
    assert place.is_dir()


async def test_a_directory_where_a_file_of_the_timer_log_belongs(life: Life) -> None:
    (file,) = (life.root / "timerlog").iterdir()
    file.unlink()
    (file / "deeper").mkdir(parents=True)
    await life.each_once()
    assert file.is_file()
