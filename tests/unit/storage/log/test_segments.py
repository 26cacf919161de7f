from __future__ import annotations

from pathlib import Path

import pytest

from duemq.storage.errors import StoreFileMissing, StoreFormatError
from duemq.storage.files import OsFiles
from duemq.storage.log.segments import Segments


def segments(directory: Path, size: int = 100) -> Segments:
    return Segments(OsFiles(), str(directory), size)


def test_files_follow_one_another_and_are_one_array(tmp_path: Path) -> None:
    array = segments(tmp_path / "s")
    for offset in (0, 100, 200):
        array.ensure(offset)
    array.write(90, b"0123456789" * 3)
    assert array.read(85, 40) == bytes(5) + b"0123456789" * 3 + bytes(5)
    assert array.read(290, 100) == bytes(10)
    assert array.read(300, 1) == b""
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [f"{base:020}" for base in (0, 100, 200)]


def test_an_array_may_begin_anywhere(tmp_path: Path) -> None:
    array = segments(tmp_path)
    array.ensure(730)
    assert (array.begin, array.end) == (700, 800)
    again = segments(tmp_path)
    again.load()
    assert (again.begin, again.end) == (700, 800)


@pytest.mark.parametrize(
    ("name", "size", "error"),
    [("x", 100, "not named"), ("00000000000000000050", 100, "not named"), (f"{0:020}", 99, "99 bytes")],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, name: str, size: int, error: str) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(StoreFormatError, match=error) as caught:
        segments(tmp_path).load()
    assert caught.value.path == str(tmp_path / name)


def test_a_gap_is_told(tmp_path: Path) -> None:
    for base in (0, 200):
        (tmp_path / f"{base:020}").write_bytes(bytes(100))
    with pytest.raises(StoreFileMissing, match=f"{100:020}"):
        segments(tmp_path).load()


def test_an_empty_last_file_is_what_a_crash_of_rocketmq_leaves(tmp_path: Path) -> None:
    (tmp_path / f"{0:020}").write_bytes(bytes(100))
    (tmp_path / f"{100:020}").write_bytes(b"")
    array = segments(tmp_path)
    array.load()
    assert (array.begin, array.end, len(array)) == (0, 100, 1)
    assert len(list(tmp_path.iterdir())) == 2, "looking changes nothing"
    array.ensure(100)
    assert (array.end, array.read(190, 10)) == (200, bytes(10))


def test_an_empty_last_file_goes_with_what_is_cleared(tmp_path: Path) -> None:
    (tmp_path / f"{0:020}").write_bytes(b"x" * 100)
    (tmp_path / f"{100:020}").write_bytes(b"")
    array = segments(tmp_path)
    array.load()
    array.clear_from(50)
    assert [path.name for path in tmp_path.iterdir()] == [f"{0:020}"]


def test_clear_from_zeroes_and_removes_what_follows_but_keeps_the_first_file(tmp_path: Path) -> None:
    array = segments(tmp_path)
    for offset in (100, 200, 300):
        array.ensure(offset)
        array.write(offset, b"x" * 100)
    array.clear_from(250)
    assert (array.begin, array.end) == (100, 300)
    assert array.read(200, 100) == b"x" * 50 + bytes(50)
    array.clear_from(100)
    assert (array.begin, array.end) == (100, 200)
    assert array.read(100, 100) == bytes(100)


def test_drop_before_forgets_whole_files_only(tmp_path: Path) -> None:
    array = segments(tmp_path)
    for offset in (0, 100, 200):
        array.ensure(offset)
    assert array.drop_before(199) == [str(tmp_path / f"{0:020}")]
    assert (array.begin, array.end) == (100, 300)
    assert array.file_at(50) is None
    assert array.drop_before(10_000) == [str(tmp_path / f"{100:020}")]
    assert (array.begin, array.end) == (200, 300), "the last one tells where the sequence goes on"


def test_names_made_are_unsynced_until_noted_and_after_loading(tmp_path: Path) -> None:
    array = segments(tmp_path)
    array.ensure(0)
    assert array.names_made == 1
    assert array.has_unsynced_names
    again = segments(tmp_path)
    again.load()
    assert again.has_unsynced_names
