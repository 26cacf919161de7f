"""Copies of stores equal their originals."""

from __future__ import annotations

from pathlib import Path

from tests.support.copies import copy_tree, data_of


def test_a_copy_has_all_bytes_and_the_holes(on_disk: Path) -> None:
    old = on_disk / "old"
    (old / "a").mkdir(parents=True)
    contents = {"empty": b"", "small": b"x" * 5000, "a/data": b"data" * 100_000}
    for name, data in contents.items():
        (old / name).write_bytes(data)
    for name, places in (("a/holes", (0, 1 << 20, (40 << 20) - 3)), ("hole", ())):
        with (old / name).open("wb") as file:
            for at in places:
                file.seek(at)
                file.write(b"abc")
            file.truncate(40 << 20)
    new = copy_tree(old, on_disk / "new")
    found = sorted(path.relative_to(old) for path in old.rglob("*"))
    assert sorted(path.relative_to(new) for path in new.rglob("*")) == found
    for path in found:
        if (old / path).is_file():
            assert (new / path).read_bytes() == (old / path).read_bytes(), path
            assert data_of(new / path) == data_of(old / path), path
            assert (new / path).stat().st_mtime_ns == (old / path).stat().st_mtime_ns
            assert (new / path).stat().st_blocks <= (old / path).stat().st_blocks + 64, path


def test_files_have_the_same_data_if_their_bytes_are_the_same(on_disk: Path) -> None:
    one, other = on_disk / "one", on_disk / "other"
    data = bytearray(40_000)
    data[9_000:9_003] = b"abc"
    one.write_bytes(data)
    with other.open("wb") as file:
        file.truncate(len(data))
        file.seek(9_000)
        file.write(b"abc")
    assert data_of(one) == data_of(other)
    for at in (0, 9_001, 39_999):
        changed = bytearray(data)
        changed[at] ^= 1
        one.write_bytes(changed)
        assert data_of(one) != data_of(other)
    for size in (0, 9_001, 39_999, 40_001):
        one.write_bytes(data.ljust(size, b"\0")[:size])
        assert data_of(one) != data_of(other)
