"""Goal: with anything in place of a file of the store, a start either ends with one sentence and leaves the store byte
for byte as it was, or goes on and loses nothing. It never hangs, and never leaves a partial change.

Method: a broker writes a store with messages that wait in levels and timers, and is cut off. Each file that such a
store has, may have, or gets for a moment while another is replaced, is replaced in turn by each kind of wrong entry.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duemq.storage import files
from duemq.storage.errors import StoreError
from duemq.storage.files import OsFile, OsFiles
from tests.support.broker import UnboundBroker
from tests.support.copies import copy_tree, data_of
from tests.support.loop import SteppedLoop
from tests.unit.broker.start.test_start import FILE_SIZE, SENDS, Life

SETTINGS = [f"mappedFileSizeCommitLog={FILE_SIZE}", "maxMessageSize=16384"]
BODY_SIZE = 9000
NOWHERE = "nowhere"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the store that all tests copy; the first test writes it."""
    return tmp_path_factory.mktemp("written") / "store"


@pytest.fixture
async def life(tmp_path: Path, loop: SteppedLoop, written: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    """A life whose store is a copy of the written one."""
    monkeypatch.setattr(files, "_sync", lambda *_: None)  # without power cuts, syncs would only take most of the time
    if not written.exists():
        await Life(written, loop, SETTINGS, BODY_SIZE).write(cleanly=False)
    return Life(tmp_path / "store", loop, SETTINGS, BODY_SIZE)


def copy(written: Path, life: Life) -> None:
    shutil.rmtree(life.root, ignore_errors=True)
    copy_tree(written, life.root)


# --- wrong entries


def a_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def a_link_to_nothing(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(NOWHERE)


def a_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def shorter(path: Path) -> None:
    path.touch()
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Make every read of a file fail."""

    def failing_as(real: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if path_of(*arguments) == str(path):
                raise OSError(5, "Input/output error", str(path))
            return real(*arguments, **more)

        return call

    with ExitStack() as patches:
        patches.enter_context(patch.object(OsFiles, "read_whole", failing_as(OsFiles.read_whole, lambda _, of: of)))
        for name in ("read", "read_ranges", "read_apart", "read_cached"):
            read = failing_as(getattr(OsFile, name), lambda file, *_: file.path)
            patches.enter_context(patch.object(OsFile, name, read))
        yield


KINDS = [a_directory, a_link_to_nothing, a_pipe]
LENGTHS = [longer, shorter, empty]
TABLES = [
    f"config/{name}.json" for name in ("topics", "subscriptionGroup", "consumerOffset", "delayOffset", "kvConfig")
]
FILES = [
    "lock",
    "abort",
    "checkpoint",
    "queuecheck",
    "timerwheel",
    "config/timercheck",
    "config/timermetrics",
    *[f"{table}{suffix}" for table in TABLES for suffix in ("", ".bak")],
    "commitlog/first",
    "commitlog/middle",
    "commitlog/last",
    "consumequeue/T/0/last",
    "consumequeue/SCHEDULE_TOPIC_XXXX/0/last",
    "consumequeue/rmq_sys_wheel_timer/0/last",
    "timerlog/last",
]
MADE_FOR_A_MOMENT = [
    "abort.tmp",
    "checkpoint.tmp",
    "queuecheck.tmp",
    "timerwheel.new",
    "timerwheel.tmp",
    "config/timercheck.tmp",
    "config/timermetrics.tmp",
    *[f"{table}.tmp" for table in TABLES],
    "config/topics.json.bak.tmp",
]


def found(root: Path, name: str) -> Path:
    """Return a path; the last part may give its place among the files of its directory."""
    path = root / name
    places = {"first": 0, "middle": 0.5, "last": 1}
    if path.name not in places:
        return path
    files = sorted(path.parent.iterdir())
    return files[int(places[path.name] * (len(files) - 1))]


def tree(root: Path) -> dict[str, Any]:
    """Return everything in a directory; of files only what lies between their holes, because of the wheel's size."""
    entries = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        kind = stat.S_IFMT(mode)
        entries[str(path.relative_to(root))] = (
            kind,
            os.readlink(path) if stat.S_ISLNK(mode) else data_of(path) if stat.S_ISREG(mode) else None,
        )
    return entries


async def started(life: Life) -> UnboundBroker | Exception:
    """Return the broker, or the exception that ended its start."""
    try:
        async with asyncio.timeout(60):
            return await life.start()
    except (StoreError, OSError) as error:
        return error


async def ends_well(life: Life, path: Path, logged: list[Any]) -> bool:
    """Check that a start ends well; return whether it was refused."""
    before = tree(life.root)
    logged.clear()
    broker = await started(life)
    if isinstance(broker, Exception):
        assert str(path) in str(broker), "the sentence names the file"
        assert tree(life.root) == before, f"the start that ended with {broker} changed the store"
        return True
    for _ in range(20):
        await life.pass_time(0.5)
    for _ in range(200):
        if len(await life.bodies(broker)) >= 2 * SENDS:
            break
        await life.pass_time(0.1)  # rebuilding may take time
    counts = Counter(await life.bodies(broker))
    assert await broker.stop() is None
    assert counts == {life.body(number): 2 for number in range(SENDS)}
    told = Counter(line["event"] for line in logged if line["log_level"] != "info")
    assert set(told.values()) <= {1}, "one warning of a kind"
    assert "store_broken" not in told
    assert not os.path.lexists(path.with_name(NOWHERE)), "nothing is written through a link"
    return False


@pytest.mark.parametrize("name", FILES)
async def test_what_stands_in_a_files_place_stops_the_start_or_does_no_harm(
    life: Life, written: Path, name: str, logged: list[Any]
) -> None:
    for kind in KINDS:
        copy(written, life)
        path = found(life.root, name)
        kind(path)
        is_refused = await ends_well(life, path, logged)
        assert is_refused or name.startswith("timerlog/")


@pytest.mark.parametrize("name", FILES)
async def test_a_file_of_another_length_stops_the_start_or_does_no_harm(
    life: Life, written: Path, name: str, logged: list[Any]
) -> None:
    for kind in LENGTHS:
        copy(written, life)
        path = found(life.root, name)
        kind(path)
        await ends_well(life, path, logged)


@pytest.mark.parametrize("name", MADE_FOR_A_MOMENT)
async def test_what_stands_where_a_file_is_made_stops_the_start_or_is_replaced(
    life: Life, written: Path, name: str, logged: list[Any]
) -> None:
    for kind in (a_directory, a_link_to_nothing, a_pipe, longer):
        copy(written, life)
        path = life.root / name
        kind(path)
        await ends_well(life, path, logged)


@pytest.mark.parametrize("name", FILES)
async def test_a_file_that_cannot_be_read_stops_the_start_before_anything_is_changed(
    life: Life, written: Path, name: str
) -> None:
    copy(written, life)
    path = found(life.root, name)
    before = tree(life.root)
    with failing(path):
        broker = await started(life)
    if isinstance(broker, Exception):
        assert str(path) in str(broker)
        assert tree(life.root) == before
        return
    await life.cut_off(broker)
    is_needed = name not in {"lock", "abort", "commitlog/first", "commitlog/middle"} and not name.endswith(".bak")
    assert not (is_needed and path.exists())


async def test_a_start_that_fails_leaves_no_directory_that_was_not_there(life: Life) -> None:
    life.root = life.root / "of" / "nobody"
    with (
        patch.object(OsFiles, "open", side_effect=OSError(5, "Input/output error")),
        patch.object(OsFiles, "list", side_effect=OSError(5, "Input/output error")),
        pytest.raises(OSError, match="Input/output error"),
    ):
        await life.start()
    assert not life.root.parent.exists()
