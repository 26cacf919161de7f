"""An unreadable file ends a job with one line that names the file and the remedy."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from duemq.spark_jobs import session
from duemq.spark_jobs.audit.audit import audit
from duemq.spark_jobs.errors import CannotRead, JobError
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.unit.spark_jobs.compact_world import START_MS, Broker, new_broker
from tests.unit.spark_jobs.growing_world import make_small
from tests.unit.spark_jobs.test_cli import COMMANDS, check_failed, run

SEGMENT = 8 << 10
FILES = (
    "commitlog/00000000000000008192",
    "consumequeue/orders/3/00000000000000000000",
    "timerlog/00000000000000000000",
    "timerwheel",
    "checkpoint",
    "config/topics.json",
    "config/delayOffset.json",
    "config/consumerOffset.json",
)
FOLDERS = ("commitlog", "consumequeue", "timerlog", "config")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def directory(path: Path) -> str:
    remove(path)
    path.mkdir()
    return "is a directory, and a file belongs there; move it away"


def file(path: Path) -> str:
    remove(path)
    path.write_bytes(b"of somebody")
    return "is a file, and a directory belongs there; move it away"


def nowhere(path: Path) -> str:
    remove(path)
    path.symlink_to("/nowhere/at/all")
    return "is a link to /nowhere/at/all, which does not exist; put that back, or remove the link"


def loop(path: Path) -> str:
    remove(path)
    path.symlink_to(path.name)
    return "is a link that leads back to itself"


def pipe(path: Path) -> str:
    remove(path)
    os.mkfifo(path)
    return "is not a regular file"


def device(path: Path) -> str:
    remove(path)
    path.symlink_to("/dev/zero")
    return "is not a regular file"


def no_json(path: Path) -> str:
    remove(path)
    path.write_text('{"broken')
    return "restore an intact copy, or move it away"


def no_table(path: Path) -> str:
    remove(path)
    path.write_text('{"offsetTable": [1], "topicConfigTable": 5}')
    return "is not a table; restore an intact copy, or move it away"


HARMS: list[tuple[str, Callable[[Path], str]]] = [
    *((name, harm) for name in FILES for harm in (directory, nowhere, loop)),
    *((name, harm) for name in (*FILES, "lock") for harm in (pipe, device)),
    ("lock", directory),
    *((name, harm) for name in FOLDERS for harm in (file, nowhere, loop)),
    *((name, harm) for name in FILES if name.endswith(".json") for harm in (no_json, no_table)),
]


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    Broker.let_go_of_all()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    broker = new_broker(tmp_path / "store", SEGMENT)
    for number in range(60):
        broker.send("orders", bytes(200), f"UNIQ_KEY\x01{number}", 3)
    broker.schedule(4, b"waits", "l")
    broker.timer(START_MS + 5000, b"waits", "t")
    broker.run()
    broker.close()
    (broker.root / "config/topics.json").write_text('{"topicConfigTable": {}}')
    for path in broker.root.glob("config/*.bak"):
        path.unlink()
    return broker.root


@pytest.mark.parametrize(("name", "harm"), HARMS, ids=[f"{name} {harm.__name__}" for name, harm in HARMS])
def test_what_is_not_what_belongs_there_is_told_before_spark_is_started(
    store: Path, name: str, harm: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "make_session", lambda *_, **__: pytest.fail("Spark was started"))
    why = harm(store / name)
    for command, rest in COMMANDS.items():
        check_failed(run(command, "store", *rest), f"duemq: store/{name}: ", why)
    check_failed(run("archive", "store", "table", "--append"), f"duemq: store/{name}: ", why)
    assert not Path("out").exists()


def test_a_backup_stands_for_a_table_that_is_broken(store: Path) -> None:
    table = store / "config/topics.json"
    table.rename(f"{table}.bak")
    table.write_text("broken")
    StoreFiles.open(str(store)).check_files()


def test_what_lies_beside_a_store_is_nobodys_business(store: Path) -> None:
    (store / "broken").symlink_to("/nowhere/at/all")
    (store / "consumequeue" / "notes.txt").write_text("of somebody")
    StoreFiles.open(str(store)).check_files()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_file_that_the_disk_does_not_give_is_told(store: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the disk cannot read is reported, at any position and by any reader."""
    make_small(monkeypatch)
    plain, into = os.pread, os.preadv
    hint = {errno.EIO: "the disk cannot read it", errno.EACCES: "this user may not read it"}[number]
    for name in FILES[:3]:
        bad = os.stat(store / name).st_ino

        def broken(fd: int, bad: int = bad) -> None:
            if os.fstat(fd).st_ino == bad:
                raise OSError(number, os.strerror(number))

        def pread(fd: int, *rest: Any, broken: Callable[[int], None] = broken) -> bytes:
            broken(fd)
            return plain(fd, *rest)

        def preadv(fd: int, *rest: Any, broken: Callable[[int], None] = broken) -> int:
            broken(fd)
            return into(fd, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", pread)
            patch.setattr(os, "preadv", preadv)
            with pytest.raises(JobError, match=f"{name}: {hint}"):
                audit(lambda: pytest.fail("Spark was wanted"), str(store), check_bodies=True)


def test_what_a_task_could_not_read_is_told_in_a_line() -> None:
    """The error of a task keeps its one line on the way to the driver and between processes."""
    error = CannotRead("store/commitlog/0: the disk cannot read it")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
