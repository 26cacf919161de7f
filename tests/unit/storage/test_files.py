from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from duemq.storage.errors import NotDurable, StoreFormatError, StoreLocked
from duemq.storage.files import OsFile, OsFiles, _sync


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    return on_disk


def test_a_new_file_is_sparse_and_has_its_size_from_the_start(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 1 << 30)
    assert file.size() == 1 << 30
    assert (tmp_path / "f").stat().st_blocks == 0
    assert file.read(12345, 4) == bytes(4)


def test_writing_and_reading_anywhere(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 10_000)
    file.write(4090, b"across a page")
    assert file.read(4090, 13) == b"across a page"
    assert file.read_apart([(4090, 13)]) == b"across a page"
    assert file.read_cached([(4090, 13)]) in (b"across a page", None)
    assert file.read(9_998, 10) == bytes(2)


def test_clear_zeroes_the_rest_and_keeps_holes(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 1 << 20)
    file.write(100, b"x" * 200)
    file.write(500_000, b"y" * 100)
    blocks = (tmp_path / "f").stat().st_blocks
    file.clear(200)
    assert file.read(0, 1 << 20) == bytes(100) + b"x" * 100 + bytes((1 << 20) - 200)
    assert (tmp_path / "f").stat().st_blocks <= blocks


def test_data_is_found_behind_holes(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 3 << 20)
    assert file.next_data(0) == 3 << 20
    file.write((2 << 20) + 5, b"x")
    assert 1 << 20 < file.next_data(0) <= (2 << 20) + 5
    assert file.next_data((2 << 20) + 5) == (2 << 20) + 5
    assert file.next_data((2 << 20) + (1 << 19)) == 3 << 20
    assert file.next_data(4 << 20) == 3 << 20, "behind the file"
    with patch("os.lseek", side_effect=OSError(errno.EINVAL, os.strerror(errno.EINVAL))):
        assert file.next_data(1 << 20) == 1 << 20, "where holes are not known"


def test_more_files_than_descriptors_are_opened_in_turn(tmp_path: Path) -> None:
    files = OsFiles(max_open=3)
    many = [files.create(str(tmp_path / str(number)), 100) for number in range(10)]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for number, file in enumerate(many):
            file.write(0, b"%d" % number)
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert [file.read(0, 1) for file in many] == [b"%d" % number for number in range(10)]


def test_a_small_file_is_replaced_as_a_whole_and_keeps_its_old_edition(tmp_path: Path) -> None:
    files, path = OsFiles(), str(tmp_path / "t.json")
    files.write_whole(path, b"one")
    files.link(path, f"{path}.bak")
    files.write_whole(path, b"two")
    assert files.read_whole(path) == b"two"
    assert files.read_whole(f"{path}.bak") == b"one"
    assert files.list(str(tmp_path)) == ["t.json", "t.json.bak"]


def test_what_is_not_there(tmp_path: Path) -> None:
    files = OsFiles()
    assert files.read_whole(str(tmp_path / "no")) is None
    assert files.list(str(tmp_path / "no")) == []
    assert not files.exists(str(tmp_path / "no"))
    files.remove(str(tmp_path / "no"))
    files.remove_tree(str(tmp_path / "no"))


def test_a_lock_is_seen_by_another_process(tmp_path: Path) -> None:
    # POSIX record locks do not exclude their own process, so a child process tries.
    lock = OsFiles().lock(str(tmp_path / "lock"))
    child = os.fork()
    if child == 0:
        try:
            OsFiles().lock(str(tmp_path / "lock"))
        except StoreLocked:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    lock.release()
    OsFiles().lock(str(tmp_path / "lock")).release()


def test_the_lock_tells_whether_rocketmq_had_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for before, is_last_owner_rocketmq in ((None, False), (b"lock", True), (b"lockq", True), (b"duemq", False)):
        if before is not None:
            path.write_bytes(before)
        lock = OsFiles().lock(str(path))
        assert lock.is_last_owner_rocketmq == is_last_owner_rocketmq
        lock.claim()
        assert not lock.is_last_owner_rocketmq
        lock.release()
        assert path.read_bytes() == b"duemq"


def test_a_lock_that_was_not_claimed_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    OsFiles().lock(str(path)).release()
    assert not path.exists()
    path.write_bytes(b"lock")
    OsFiles().lock(str(path)).release()
    assert path.read_bytes() == b"lock"


def test_the_names_of_new_directories_are_durable_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OsFiles()
    synced: list[str] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    (tmp_path / "there").mkdir()
    files.make_directories(str(tmp_path / "there/a/b"), durable=True)
    assert synced == [str(tmp_path / "there"), str(tmp_path / "there/a")]
    files.make_directories(str(tmp_path / "there/a/b"), durable=True)
    files.make_directories(str(tmp_path / "elsewhere"))
    assert len(synced) == 2


def test_a_sync_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sync raises NotDurable. A file that cannot be opened raises its own error, which says nothing about
    earlier writes."""

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    files, path = OsFiles(), str(tmp_path / "f")
    file = files.create(path, 100)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NotDurable) as caught:
        files.sync_directory(str(tmp_path))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    monkeypatch.setattr("duemq.storage.files._sync.__defaults__", (fail,))
    for sync in (file.sync, lambda: file.write_apart([(0, b"x")]), lambda: files.write_whole(f"{path}2", b"x")):
        with pytest.raises(NotDurable) as caught:
            sync()
        assert caught.value.errno == errno.ENOSPC
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        file.sync()


def test_a_sync_of_which_nobody_knows_what_it_did_is_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that ends with any other exception counts as failed, since the next one would succeed even if data was
    lost."""

    def fail(fd: int) -> None:
        raise MemoryError

    file = OsFiles().create(str(tmp_path / "f"), 10)
    monkeypatch.setattr("duemq.storage.files._sync", partial(_sync, sync=fail))
    with pytest.raises(NotDurable, match="MemoryError"):
        file.sync()


def test_a_tree_goes_as_a_whole_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, root = OsFiles(), tmp_path / "tree"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/f").write_bytes(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: fail_busy())
        with pytest.raises(OSError, match="busy"):
            files.remove_tree(str(root))
    assert root.exists()
    files.remove_tree(str(root))
    assert not root.exists()


def fail_busy() -> None:
    raise OSError(errno.EBUSY, "Device or resource busy")


def test_files_that_are_not_in_use_give_their_descriptors_to_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle files give up their descriptors to one in use, as clients may have taken all others."""
    files = OsFiles()
    idle = [files.create(str(tmp_path / str(number)), 10) for number in range(3)]
    for file in idle:
        file.read(0, 1)
    real, free = os.open, [0]

    def opened(path: str, *arguments: int, **options: int) -> int:
        if not free[0]:
            raise OSError(errno.EMFILE, "Too many open files", path)
        free[0] -= 1
        return real(path, *arguments, **options)

    def closed(file: OsFile) -> None:
        files._open.pop(file, None)
        free[0] += 1

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(files, "closed", closed)
        files.create(str(tmp_path / "new"), 10)
        assert free == [2]
        files.open(str(tmp_path / "new")).read(0, 1)
        free[0] = 0
        with pytest.raises(OSError, match="Too many"):
            OsFiles().open(str(tmp_path / "new")).read(0, 1)
    assert [file.read(0, 1) for file in idle] == [b"\0"] * 3


def test_used_ratio_is_a_ratio(tmp_path: Path) -> None:
    assert 0 < OsFiles().used_ratio(str(tmp_path)) < 1


def test_a_file_that_vanished_is_an_error_not_a_crash(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 100)
    (tmp_path / "f").unlink()
    with pytest.raises(FileNotFoundError):
        file.read(0, 1)


def test_ranges_are_read_together_and_joined(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 1 << 20)
    content = bytes(number % 251 for number in range(1 << 18))
    file.write(0, content)
    many = [(number * 100, number % 50 + 1) for number in range(2000)]
    far = [(0, 10), (200_000, 10), (200_020, 5), (250_000, 7)]
    for ranges in (many, far, [(5, 1)]):
        joined = b"".join(content[offset : offset + size] for offset, size in ranges)
        assert file.read_ranges(ranges) == file.read_cached(ranges) == file.read_apart(ranges) == joined


def test_what_is_not_in_the_page_cache_is_not_waited_for(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 1 << 20)
    file.write(0, b"x" * (1 << 20))
    file.sync()
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    files = OsFiles()
    before = files.blocks_read()
    found = file.read_cached([(500_000, 100)])
    assert found in (None, b"x" * 100), "some file systems cannot drop their cache"
    asked = files.blocks_read()
    assert file.read_apart([(500_000, 100)]) == b"x" * 100
    read = files.blocks_read()
    assert found is not None or before < read >= asked
    assert file.read_cached([(500_000, 100)]) == file.read_ranges([(500_000, 100)]) == b"x" * 100
    assert files.blocks_read() == read


@pytest.mark.parametrize("kind", ["a file", "a link", "a broken link"])
def test_what_is_no_directory_is_removed_as_it_is(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "tree", tmp_path / "other"
    if kind == "a file":
        path.write_bytes(b"")
    else:
        path.symlink_to(other)
    if kind == "a link":
        other.mkdir()
    OsFiles().remove_tree(str(path))
    assert not path.is_symlink()
    assert not path.exists()
    assert other.exists() == (kind == "a link")


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(b"old")
    with (
        patch("duemq.storage.files._sync", side_effect=OSError(28, "No space left on device")),
        pytest.raises(OSError, match=f"No space left on device: '{path}'"),
    ):
        OsFiles().write_whole(str(path), b"new")
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], b"old")


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_a_file_that_is_replaced_is_not_written_through_what_an_earlier_process_left(tmp_path: Path, kind: str) -> None:
    path, temporary, other = tmp_path / "table", tmp_path / "table.tmp", tmp_path / "other"
    other.write_bytes(b"of somebody else")
    if kind == "link":
        temporary.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(temporary)
    else:
        temporary.write_bytes(b"left, and longer than what comes")
    OsFiles().write_whole(str(path), b"new")
    assert (path.read_bytes(), other.read_bytes(), temporary.exists()) == (b"new", b"of somebody else", False)


def test_what_is_no_file_is_told_at_once(tmp_path: Path) -> None:
    """A path that is not a file is refused at once, also a pipe, on which an open would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("pipe", "directory", "link"):
        path = str(tmp_path / name)
        with pytest.raises(StoreFormatError, match=f"is a {name}"):
            OsFiles().require_file(path)
        with pytest.raises(StoreFormatError):
            OsFiles().open(path).size()
        if name != "link":
            with pytest.raises(StoreFormatError):
                OsFiles().read_whole(path)
    OsFiles().require_file(str(tmp_path / "nothing"))


# --- reads that the system cuts short


def _bad_page(monkeypatch: pytest.MonkeyPatch, begin: int) -> None:
    """Make reads behave as Linux does at an unreadable page: return the bytes before it, then an error."""
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if offset + size <= begin or offset >= begin + 4096:
            return real(fd, size, offset)
        if offset >= begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, begin - offset, offset)

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)


READS = {
    "read": lambda file, at, size: file.read(at, size),
    "read_ranges": lambda file, at, size: file.read_ranges([(0, 10), (at, size)]),
    "read_apart": lambda file, at, size: file.read_apart([(0, 10), (at, size)]),
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("at", [8192, 8190, 4000, 8192 + 4000])
def test_a_page_that_cannot_be_read_is_an_error_also_behind_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, at: int
) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 100_000)
    _bad_page(monkeypatch, 8192)
    with pytest.raises(OSError, match="Input/output error") as raised:
        READS[how](file, at, 5000)
    assert raised.value.filename == file.path
    assert READS[how](file, 20_000, 5000).strip(b"\0") == b""


@pytest.mark.parametrize("how", READS)
def test_what_is_read_in_parts_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 5000)
    data = os.urandom(5000)
    file.write(0, data)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real(fd, (size + 1) // 2, offset))
    expected = data[1000:4000] if how == "read" else data[:10] + data[1000:4000]
    assert READS[how](file, 1000, 3000) == expected


def test_ranges_beyond_a_file_that_was_cut_off_are_zeros(tmp_path: Path) -> None:
    file = OsFiles().create(str(tmp_path / "f"), 5000)
    file.write(0, b"x" * 5000)
    os.truncate(file.path, 1000)
    for read in (file.read_ranges, file.read_apart):
        assert read([(990, 20), (3000, 10)]) == b"x" * 10 + bytes(20)
    assert file.read(990, 20) == b"x" * 10
