"""A run that reads only the part since the last one finds the same as one that reads everything, byte for byte."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duemq.spark_jobs.audit import kept
from duemq.spark_jobs.audit.kept import Folder, directory_of
from duemq.spark_jobs.store import ranges
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import Range, walks
from tests.support.copies import copy_tree
from tests.unit.spark_jobs.compact_world import Broker
from tests.unit.spark_jobs.growing_world import RANGE, SEGMENT, World, make_small, same


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make_small(monkeypatch)
    yield
    Broker.let_go_of_all()


@pytest.mark.parametrize(
    ("writer", "seed", "steps"),
    [
        # Together these have all kinds of events (`World.step`).
        ("duemq", 10, 7),
        ("apache", 0, 7),
        ("both", 2, 7),
        *(
            pytest.param(writer, seed, 14, marks=pytest.mark.soak)
            for writer in ("duemq", "apache", "both")
            for seed in range(8)
        ),
    ],
)
def test_it_finds_what_a_whole_run_finds(tmp_path: Path, seed: int, writer: str, steps: int) -> None:
    ours_from = 5 * RANGE if writer == "both" else 0
    world = World(tmp_path, seed, is_apache=writer == "apache", ours_from=ours_from)
    for number in range(steps):
        what = world.step()
        options = {"check_bodies": world.chance.random() < 0.2}
        expected = world.found(None, **options)
        same(world.found(world.state, **options), expected, (number, what))
        same(world.found(world.state, **options), expected, (number, what, "and once more"))


@pytest.mark.parametrize(
    ("kind", "is_ours_first", "counts"),
    [
        # Each pair of two of these at least once. All of them: soak.
        pytest.param(
            kind,
            is_ours_first,
            counts,
            id=f"{kind}-{'ours' if is_ours_first else 'theirs'} first-{counts}",
            marks=() if (number + is_ours_first + (kind == "timer")) % 2 else pytest.mark.soak,
        )
        for number, counts in enumerate([(1, 1), (1, 90), (90, 90), (90, 1)])
        for is_ours_first in (False, True)
        for kind in ("level", "timer")
    ],
)
def test_what_both_brokers_delivered_came_twice(
    tmp_path: Path, kind: str, counts: tuple[int, int], *, is_ours_first: bool
) -> None:
    """A message that both brokers delivered counts as delivered twice, wherever the second delivery lies: in the part
    of the same run or of a later one, in its last range or before. Another message of the same id, from another time,
    still waits."""
    world = World(tmp_path, 1, is_apache=False)
    world.pass_time(1)
    world.timer("x", 40_000_000, born_ms=8)
    world.schedule("x", 1) if kind == "level" else world.timer("x", 1500)
    deliver: list[Callable[[], None]] = [lambda: world.send_on("x"), lambda: world.pass_time(3000)]
    for step in reversed(deliver) if is_ours_first else deliver:
        step()
        for count in counts:
            for _ in range(count):
                world.send()
            world.publish()
            same(world.found(world.state), world.found(None), count)
    audit = json.loads(world.found(None).split(b"\n", 1)[0])["audit"]
    assert (audit["twice"], audit["unclaimed"]) == (1, 0)


# --- kept results that are wrong


def analysed_and_grown(root: Path) -> World:
    """A store of some files that was analysed, and has grown since."""
    world = World(root, 1, is_apache=False)
    grow(world, 160)
    world.found(world.state)
    grow(world, 40)
    assert len(list(world.copy.glob("commitlog/*"))) > 2
    assert world.told == []
    return world


class Shared:
    """Such a store, which takes longer to write than to put back."""

    def __init__(self, root: Path) -> None:
        (root / "world").mkdir()
        self._world = analysed_and_grown(root / "world")
        self.expected = self._world.found(None)
        self._copies = root / "kept"
        self._kept = self._world.keep(self._copies)
        self._is_changed = False

    def anew(self) -> World:
        """The store with the kept results of before it has grown, for a test that changes only these."""
        if self._is_changed:
            self._world.put_back(self._copies, self._kept)
            self._is_changed = False
        else:
            shutil.rmtree(self._world.state, ignore_errors=True)
            copy_tree(self._copies / self._world.state.name, self._world.state)
            self._world.told.clear()
        return self._world

    def anew_for_changes(self) -> World:
        """The same for a test that also changes the store."""
        self._world.put_back(self._copies, self._kept)
        self._is_changed = True
        return self._world


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        return Shared(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def world(shared: Shared) -> World:
    return shared.anew_for_changes()


def grow(world: World, count: int) -> None:
    """Add messages of all kinds, and deliveries, but nothing that concerns closed messages."""
    for number in range(count):
        world.chance.choice([world.send, world.schedule, world.timer])()
        if number % 10 == 9:
            world.pass_time()
    world.publish()


def kept_in(world: World) -> Path:
    return Path(directory_of(str(world.state), str(world.copy)))


def files_of(world: World, kind: str) -> list[Path]:
    return sorted(kept_in(world).glob(f"{kind}*"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, halve, os.unlink], ids=["flipped", "truncated", "missing"])
@pytest.mark.parametrize("kind", ["manifest", "open", "figures", "unique", "usage", "ahead"])
def test_what_is_not_as_it_was_written_does_not_count(shared: Shared, kind: str, harm: Callable[[Path], None]) -> None:
    world = shared.anew()
    paths = [path for path in files_of(world, kind) if path.stat().st_size]
    if not paths:
        pytest.skip("there is none")
    for path in paths:
        harm(path)
    same(world.found(world.state), shared.expected, kind)
    if (kind, harm) != ("manifest", os.unlink):  # without a manifest nothing is kept
        assert ["are not used" in line for line in world.told] == [True]
    world.told.clear()
    same(world.found(world.state), shared.expected, (kind, "and once more"))
    assert world.told == []


def test_a_pipe_among_what_was_kept_does_not_count(shared: Shared) -> None:
    """Opening it waited for a writer."""
    world = shared.anew()
    for path in [*files_of(world, "manifest"), *files_of(world, "figures")]:
        path.unlink()
        os.mkfifo(path)
    same(world.found(world.state), shared.expected, "pipe")
    assert ["is not a regular file" in line for line in world.told] == [True]
    world.told.clear()
    same(world.found(world.state), shared.expected, "and once more")
    assert world.told == []


@pytest.mark.parametrize("harm", [flip, halve, os.unlink], ids=["flipped", "truncated", "missing"])
def test_ranges_that_are_not_as_written_are_read(shared: Shared, harm: Callable[[Path], None]) -> None:
    world = shared.anew()
    harmed = files_of(world, "range")[:2]
    for path in [*harmed, *files_of(world, "open")]:
        harm(path)
    same(world.found(world.state), shared.expected, harm)
    assert sum("their range is read" in line for line in world.told) == len(harmed)


def test_another_version_of_the_code_reads_everything(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    world = shared.anew()
    monkeypatch.setattr(kept, "rules", lambda: "of a later version")
    same(world.found(world.state), shared.expected, "later")
    assert "another version" in world.told[0]
    world.told.clear()
    same(world.found(world.state), shared.expected, "and once more")
    assert world.told == []


def test_a_later_format_is_not_read(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    world = shared.anew()
    folder = Folder.open(str(kept_in(world)))
    manifest = folder.read()
    assert manifest is not None
    folder.write(msgspec.structs.replace(manifest, format=manifest.format + 1))
    folder.close()
    same(world.found(world.state), shared.expected, "later")
    assert "another version" in world.told[0]


def test_what_is_of_another_store_does_not_count(world: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", 2, is_apache=False)
    grow(other, 150)
    other.found(other.state)
    shutil.rmtree(kept_in(world))
    copy_tree(kept_in(other), kept_in(world))
    same(world.found(world.state), world.found(None), "of another")
    assert "have changed" in world.told[0]


def test_a_store_that_was_put_back_is_compared(world: World) -> None:
    """After a restore with other files of the same content, an analysis finds the same and keeps its results."""
    world.found(world.state)
    before = sorted(path.name for path in files_of(world, "range"))
    world.replace()
    same(world.found(world.state), world.found(None), "put back")
    assert world.told == []
    assert sorted(path.name for path in files_of(world, "range")) == before


def test_another_store_at_the_same_path_is_noticed(world: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", 2, is_apache=False)
    grow(other, 150)
    shutil.rmtree(world.copy)
    copy_tree(other.copy, world.copy)
    same(world.found(world.state), world.found(None), "another")
    assert "have changed" in world.told[0]


def change_middle(world: World, offset: int, size: int = 0) -> None:
    """Change the copy's commitlog at a physical offset: one bit, or `size` bytes to zeros. The file gets a new time."""
    base = max(int(path.name) for path in world.copy.glob("commitlog/*") if int(path.name) <= offset)
    path = world.copy / "commitlog" / f"{base:020d}"
    data = bytearray(path.read_bytes())
    if size:
        assert any(data[offset - base : offset - base + size])
        data[offset - base : offset - base + size] = bytes(size)
    else:
        data[offset - base] ^= 0x10
    path.write_bytes(data)
    os.utime(path, (1_700_000_000, 1_700_000_000))


def kept_in_last(world: World) -> list[Range]:
    """The kept ranges of the last file."""
    folder = Folder.open(str(kept_in(world)))
    manifest = folder.read()
    folder.close()
    assert manifest is not None
    last = max(int(path.name) for path in world.copy.glob("commitlog/*"))
    return [part.range for part in manifest.ranges if part.range.start >= last]


@pytest.mark.parametrize("size", [0, 900], ids=["flipped", "zeroed"])
@pytest.mark.parametrize("has_grown", [False, True], ids=["as it was", "grown"])
def test_what_changes_in_the_middle_of_the_last_file_is_noticed(world: World, size: int, *, has_grown: bool) -> None:
    world.found(world.state, anew=True)
    part = kept_in_last(world)[-1]
    middle = (part.start + part.end) // 2
    store = StoreFiles.open(str(world.copy))
    records = [record for found in walks(store, part, check_crc=False) for record in found.records.physical_offset]
    at = int(next(record for record in records if record >= middle))
    if has_grown:
        grow(world, 4)
    change_middle(world, at if not size else at + 1, size)
    same(world.found(world.state), world.found(None), "changed")
    assert ["have changed" in line for line in world.told] == [True]
    world.told.clear()
    same(world.found(world.state), world.found(None), "and once more")
    assert world.told == []


def test_what_changes_while_a_file_is_of_the_same_time_is_noticed(world: World) -> None:
    """A change within a file's timestamp is noticed: a file written just before it was looked at can change and keep
    its time."""
    path = max(world.copy.glob("commitlog/*"))
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))
    world.found(world.state, anew=True)
    part = kept_in_last(world)[0]
    change_middle(world, (part.start + part.end) // 2, 900)
    os.utime(path, ns=(now_ns, now_ns))
    same(world.found(world.state), world.found(None), "changed")
    assert ["have changed" in line for line in world.told] == [True]


def test_a_file_that_was_given_its_old_time_is_compared(world: World) -> None:
    """A file that got its old time back, as from a copy put back with its times, is compared."""
    path = max(world.copy.glob("commitlog/*"))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    world.found(world.state, anew=True)
    part = kept_in_last(world)[0]
    change_middle(world, (part.start + part.end) // 2, 900)
    same(world.found(world.state), world.found(None), "changed")
    assert ["have changed" in line for line in world.told] == [True]


@pytest.mark.parametrize("is_each", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "each"])
def test_ranges_are_cut_as_if_nothing_were_known(world: World, *, is_each: bool) -> None:
    """Ranges are cut as in a run without kept results, although a log that has lost its end behind a kept range would
    not be cut there."""
    world.found(world.state)
    folder = Folder.open(str(kept_in(world)))
    manifest = folder.read()
    folder.close()
    assert manifest is not None
    copy_tree(world.state, world.state.with_name("before"))
    last = max(int(path.name) for path in world.copy.glob("commitlog/*"))
    ends = [part.range.end for part in manifest.ranges if part.range.start >= last - SEGMENT]
    assert any(end > last for end in ends)
    # Each position at a third of the ends, in turn. All at each end: soak.
    for number, end in enumerate(ends):
        for at, more in enumerate((-1, 0, 1, 300, RANGE // 2)):
            if not is_each and (number + at) % 3:
                continue
            world.cut_at(end + more)
            world.publish()
            shutil.rmtree(world.state)
            copy_tree(world.state.with_name("before"), world.state)
            same(world.found(world.state), world.found(None), (end, more))


# --- results that cannot be kept


def test_where_nothing_can_be_kept_the_answer_is_given(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    world = shared.anew()
    before = {path.name: path.read_bytes() for path in kept_in(world).iterdir()}

    def full(*_: Any) -> kept.Ref:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(kept, "write_file", full)
        same(world.found(world.state), shared.expected, "full")
        assert ["No space left" in line for line in world.told] == [True]
        world.told.clear()
        same(world.found(world.state, anew=True), shared.expected, "full, anew")
        assert ["No space left" in line for line in world.told] == [True]
        world.told.clear()
        assert {path.name: path.read_bytes() for path in kept_in(world).iterdir()} == before
    same(world.found(world.state), shared.expected, "room again")
    assert world.told == []


def test_a_state_that_is_no_directory_is_told(shared: Shared, tmp_path: Path) -> None:
    world = shared.anew()
    (tmp_path / "file").write_text("somebody's")
    same(world.found(tmp_path / "file"), shared.expected, "no directory")
    assert ["nothing can be kept" in line for line in world.told] == [True]
    assert (tmp_path / "file").read_text() == "somebody's"


def test_of_two_runs_at_once_one_keeps_nothing(shared: Shared) -> None:
    world = shared.anew()
    folder = Folder.open(str(kept_in(world)))
    before = {path.name: path.read_bytes() for path in kept_in(world).iterdir()}
    same(world.found(world.state), shared.expected, "two")
    assert ["another run" in line for line in world.told] == [True]
    assert {path.name: path.read_bytes() for path in kept_in(world).iterdir()} == before
    folder.close()


class Killed(BaseException):
    """Ends the run as a signal does: no code handles it."""


class Changes:
    """The changes of a directory that a run makes: it is killed before the one of that number."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int | None = None) -> None:
        self.kinds: list[str] = []
        self._root = str(root)
        self._killed_at = killed_at
        for name in ("replace", "unlink"):
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        monkeypatch.setattr(kept, "write_file", self._counted("write", kept.write_file))

    def _counted(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if str(args[0]).startswith(self._root):
                if len(self.kinds) == self._killed_at:
                    raise Killed
                of = args[1] if name == "write" else Path(args[0]).name.partition("-")[0]
                self.kinds.append(f"{name} {of}")
            return change(*args, **options)

        return counted


@pytest.mark.parametrize("is_each", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "each"])
@pytest.mark.parametrize("is_first", [False, True], ids=["grown", "first"])
def test_a_run_that_is_killed_leaves_what_was_there(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, *, is_first: bool, is_each: bool
) -> None:
    """A run killed before any of its changes of the directory leaves the earlier state. Of changes of the same kind in
    a row, only the first and the last are taken, except in a soak test."""

    def begin() -> World:
        world = shared.anew()
        if is_first:
            shutil.rmtree(world.state)
        return world

    with monkeypatch.context() as patch:
        world = begin()
        kinds = Changes(world.state, patch).kinds
        world.found(world.state)
    assert len(kinds) > 5
    inner = {at for at in range(1, len(kinds) - 1) if kinds[at - 1] == kinds[at] == kinds[at + 1]}
    for number in range(len(kinds)):
        if number in inner and not is_each:
            continue
        begin()
        with monkeypatch.context() as patch:
            Changes(world.state, patch, number)
            with pytest.raises(Killed):
                world.found(world.state)
        same(world.found(world.state), shared.expected, number)
        assert world.told == []
        folder = Folder.open(str(kept_in(world)))
        manifest = folder.read()
        folder.close()
        assert manifest is not None
        assert {path.name for path in kept_in(world).iterdir()} == manifest.files() | {"manifest", ".lock"}


# --- reads


def test_what_was_read_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept ranges are not read again, except once when their file has grown; other ranges are read once."""
    world.found(world.state, anew=True)
    grow(world, 4)
    read = Counter[int]()
    plain, into = StoreFiles.read, StoreFiles.read_into

    def count(path: str, at: int, size: int) -> None:
        if path.startswith("commitlog/"):
            first = int(path.rpartition("/")[2]) + at
            read.update(range(first // 64, -(-(first + size) // 64)))

    def counted(self: StoreFiles, path: str, at: int, size: int) -> bytes:
        data = plain(self, path, at, size)
        count(path, at, len(data))
        return data

    def counted_into(self: StoreFiles, path: str, at: int, buffer: memoryview) -> int:
        got = into(self, path, at, buffer)
        count(path, at, got)
        return got

    monkeypatch.setattr(ranges, "_WINDOW", 512)
    expected = world.found(None)
    with monkeypatch.context() as patch:
        patch.setattr(StoreFiles, "read", counted)
        patch.setattr(StoreFiles, "read_into", counted_into)
        same(world.found(world.state), expected, "counted")
    last = max(int(path.name) for path in world.copy.glob("commitlog/*"))
    assert last >= 2 * SEGMENT
    # Single records are read here and there: of keys that are shown, and of units of queues.
    assert sum(count for block, count in read.items() if block * 64 < last) * 64 < last // 8
    assert sum(read.values()) * 64 < SEGMENT + 4 * RANGE


def test_no_kept_range_of_an_unchanged_store_is_compared(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store is unchanged no kept range is compared, not even in the last file."""
    world = shared.anew()
    world.found(world.state, anew=True)
    compared = []
    monkeypatch.setattr(kept, "_is_as_hashed", lambda _, read: compared.append(read))
    same(world.found(world.state), shared.expected, "as it was")
    assert kept_in_last(world)
    assert compared == []
    assert world.told == []
