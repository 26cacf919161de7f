"""Copies of stores equal their originals."""

from __future__ import annotations

from pathlib import Path

from tests.support.copies import copy_tree


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
            assert (new / path).stat().st_mtime_ns == (old / path).stat().st_mtime_ns
            assert (new / path).stat().st_blocks <= (old / path).stat().st_blocks + 64, path
