"""The part of an archive besides records: holes of files stay holes, and any tar reads it."""

from __future__ import annotations

import io
import os
import socket
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.archive import state
from duemq.spark_jobs.errors import JobError
from tests.soak import examples

BLOCK = 65_536


def write_with_holes(path: Path, size: int, parts: dict[int, bytes]) -> None:
    with path.open("wb") as file:
        for offset, data in parts.items():
            file.seek(offset)
            file.write(data)
        file.truncate(size)


def packed(root: Path) -> bytes:
    stream = io.BytesIO()
    state.write(stream, str(root), state.members(str(root), sorted(os.listdir(root))).names)
    return stream.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files of all kinds: without data, with holes at the beginning, between and at the end, and without holes."""
    root = tmp_path / "root"
    (root / "timerlog").mkdir(parents=True)
    (root / "empty").mkdir()
    write_with_holes(root / "timerwheel", 38_707_200, {})
    write_with_holes(root / "timerlog/00000000000000000000", 100 << 20, {0: b"a" * 100, 50 << 20: b"b" * 100_000})
    write_with_holes(root / "timerlog/00000000000104857600", 1 << 20, {(1 << 20) - 5: b"last."})
    write_with_holes(root / "timerlog/00000000000105906176", 30 << 20, {at * 2 * BLOCK: b"x" for at in range(200)})
    (root / "checkpoint").write_bytes(bytes(range(256)) * 16)
    (root / "lock").touch()
    (root / "names-\u00fc").write_text("text")
    os.utime(root / "checkpoint", (1_700_000_000, 1_700_000_000))
    return root


def tar_of(members: list[tuple[str, bytes, str]]) -> bytes:
    """Return a tar with members without contents: name, kind, and what a link leads to."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, target in members:
            info = tarfile.TarInfo(name.replace("\0", "0"))
            info.type, info.linkname = kind, target
            info.pax_headers = {"path": name} if "\0" in name else {}
            tar.addfile(info)
    return stream.getvalue()


def contents(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }


@pytest.fixture(params=[False, True], ids=["this Python", "Python 3.11.2"])
def any_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tarfile's filters, if this Python has them, and without, as Debian 12 has it."""
    if request.param:
        monkeypatch.setattr(state, "_HAS_FILTERS", False)


@pytest.mark.usefixtures("any_python")
def test_files_come_back_and_their_holes_do(root: Path, tmp_path: Path) -> None:
    data = packed(root)
    back = tmp_path / "back"
    back.mkdir()
    state.read(io.BytesIO(data), str(back))

    assert contents(back) == contents(root)
    assert (back / "checkpoint").stat().st_mtime == 1_700_000_000
    assert len(data) < 2 << 20, "zeros are not written down"
    assert sum(path.stat().st_blocks * 512 for path in back.rglob("*")) < 2 << 20


@pytest.mark.usefixtures("any_python")
@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [
        ("commitlog/00000000000000000000", tarfile.REGTYPE, ""),
        ("./commitlog", tarfile.DIRTYPE, ""),
        ("commitlog", tarfile.SYMTYPE, "config"),
        ("config/file", tarfile.LNKTYPE, "commitlog/00000000000000000000"),
        ("config/file", tarfile.LNKTYPE, ".//commitlog/00000000000000000000"),
    ],
)
def test_what_others_write_is_not_overwritten(tmp_path: Path, name: str, kind: bytes, target: str) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog/00000000000000000000").write_bytes(b"records")
    members = [("config", tarfile.DIRTYPE, ""), (name, kind, target), (name, tarfile.REGTYPE, "")]
    with pytest.raises(tarfile.TarError, match="has nothing of commitlog"):
        state.read(io.BytesIO(tar_of(members)), str(tmp_path), but={"commitlog"})
    assert (tmp_path / "commitlog/00000000000000000000").read_bytes() == b"records"


def test_gnu_tar_reads_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "state.tar").write_bytes(packed(root))
    back = tmp_path / "back"
    back.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "state.tar", "-C", back], check=True)

    assert contents(back) == contents(root)


def test_an_archive_of_before_is_read(root: Path, tmp_path: Path) -> None:
    """An archive of an earlier version, whose holes were zeros, is read."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(root / "timerlog", "timerlog")
    state.read(io.BytesIO(stream.getvalue()), str(tmp_path / "back"))

    assert contents(tmp_path / "back") == {
        name: data for name, data in contents(root).items() if name.startswith("timerlog")
    }


def test_a_tar_that_was_cut_off_is_told(root: Path, tmp_path: Path) -> None:
    data = packed(root)
    with pytest.raises((tarfile.TarError, OSError)):
        state.read(io.BytesIO(data[: len(data) // 2]), str(tmp_path / "back"))


@examples(1 / 3)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2 * BLOCK)), max_size=12),
    st.integers(0, 42 * BLOCK),
)
def test_any_holes(tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], size: int) -> None:
    tmp_path = tmp_path_factory.mktemp("holes")
    root, back = tmp_path / "root", tmp_path / "back"
    root.mkdir()
    back.mkdir()
    write_with_holes(root / "file", size, {block * BLOCK: bytes([block + 1]) * length for block, length in places})
    state.read(io.BytesIO(packed(root)), str(back))

    assert contents(back) == contents(root)


@pytest.mark.usefixtures("any_python")
def test_links_and_permissions_come_back(tmp_path: Path) -> None:
    root, back = tmp_path / "root", tmp_path / "back"
    (root / "config").mkdir(parents=True)
    back.mkdir()
    (root / "config/plain_acl.yml").write_text("secret")
    (root / "config/plain_acl.yml").chmod(0o600)
    (root / "config/topics.json").write_text("{}")
    (root / "config/topics.json").chmod(0o4666)
    (root / "config/topics.json.bak").hardlink_to(root / "config/topics.json")
    (root / "config/link").symlink_to("../config/topics.json")
    state.read(io.BytesIO(packed(root)), str(back))

    assert contents(back) == contents(root)
    modes = {name: (back / "config" / name).stat().st_mode & 0o7777 for name in ("plain_acl.yml", "topics.json")}
    assert modes == {"plain_acl.yml": 0o600, "topics.json": 0o644}
    assert os.readlink(back / "config/link") == "../config/topics.json"


@pytest.mark.usefixtures("any_python")
@pytest.mark.parametrize(
    "members",
    [
        [("../out", tarfile.REGTYPE, "")],
        [("a/../../out", tarfile.REGTYPE, "")],
        [("link", tarfile.SYMTYPE, "../out")],
        [("link", tarfile.SYMTYPE, "/etc/passwd")],
        [("link", tarfile.LNKTYPE, "../out")],
        [("link", tarfile.SYMTYPE, "."), ("link/../../out", tarfile.REGTYPE, "")],
        [("link", tarfile.SYMTYPE, "a"), ("link", tarfile.REGTYPE, "")],
        [("a", tarfile.DIRTYPE, ""), ("link", tarfile.SYMTYPE, "a"), ("link/b", tarfile.REGTYPE, "")],
        # A hard link to a symbolic link is that link in another directory: it leads elsewhere.
        [("a", tarfile.DIRTYPE, ""), ("a/link", tarfile.SYMTYPE, "../out"), ("hard", tarfile.LNKTYPE, "a/link")],
        [("a", tarfile.DIRTYPE, ""), ("a/link", tarfile.SYMTYPE, ".."), ("hard", tarfile.LNKTYPE, "a/link")],
        [("link", tarfile.SYMTYPE, "a"), ("hard", tarfile.LNKTYPE, "link/b")],
        [("device", tarfile.CHRTYPE, "")],
        [("fifo", tarfile.FIFOTYPE, "")],
    ],
    ids=lambda members: " ".join(name for name, _, _ in members),
)
def test_nothing_is_written_outside(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    (tmp_path / "back").mkdir()
    with pytest.raises(tarfile.TarError):
        state.read(io.BytesIO(tar_of(members)), str(tmp_path / "back"))
    assert [path.name for path in tmp_path.iterdir()] == ["back"]
    for path in (tmp_path / "back").rglob("*"):
        assert path.resolve().is_relative_to(tmp_path / "back"), path


@pytest.mark.usefixtures("any_python")
def test_a_link_over_one_that_comes_later_stays_inside(tmp_path: Path) -> None:
    """A link that goes up behind another one is restored without that: it would lead outside once the other is there,
    which it is not when it is checked."""
    (tmp_path / "back").mkdir()
    members = [("a", tarfile.DIRTYPE, ""), ("a/one", tarfile.SYMTYPE, "two/../../b"), ("a/two", tarfile.SYMTYPE, "..")]
    state.read(io.BytesIO(tar_of(members)), str(tmp_path / "back"))
    assert (tmp_path / "back/a/one").resolve() == tmp_path / "back/b"


@pytest.mark.usefixtures("any_python")
def test_no_path_is_too_long_to_be_checked(tmp_path: Path) -> None:
    """A member whose path passes over links to a place deeper than PATH_MAX is refused: `os.path.realpath` stops to
    resolve such a path without saying so (CVE-2025-4517)."""
    deep, members, at = "d" * 247, list[tuple[str, bytes, str]](), ""
    for letter in "abcdefghijklmnop":
        members.append((f"{at}{deep}", tarfile.DIRTYPE, ""))
        members.append((f"{at}{letter}", tarfile.SYMTYPE, deep))
        at += f"{letter}/"
    members.append((f"{at}{'l' * 254}", tarfile.SYMTYPE, "../" * 16))
    members.append(("escape", tarfile.SYMTYPE, f"{at}{'l' * 254}/../outside"))
    members.append(("escape/out", tarfile.REGTYPE, ""))
    (tmp_path / "back").mkdir()
    (tmp_path / "outside").mkdir()
    with pytest.raises(tarfile.TarError):
        state.read(io.BytesIO(tar_of(members)), str(tmp_path / "back"))
    assert list((tmp_path / "outside").iterdir()) == []
    for name in (f"{'d' * 100}/" * 50 + "file", f"{'d' * 300}"):
        with pytest.raises((tarfile.TarError, OSError)):
            state.read(io.BytesIO(tar_of([(name, tarfile.REGTYPE, "")])), str(tmp_path / "back"))


@pytest.mark.usefixtures("any_python")
@pytest.mark.parametrize("members", [[("a\0b", tarfile.REGTYPE, "")], [("link", tarfile.LNKTYPE, "missing")]], ids=str)
def test_a_damaged_member_is_told(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    (tmp_path / "back").mkdir()
    with pytest.raises((tarfile.TarError, OSError)):
        state.read(io.BytesIO(tar_of(members)), str(tmp_path / "back"))


def test_what_has_no_contents_is_left_out_and_named(tmp_path: Path) -> None:
    """FIFOs, sockets and devices are left out, and nothing opens them: that of a FIFO would wait for a writer."""
    root, back = tmp_path / "root", tmp_path / "back"
    (root / "config").mkdir(parents=True)
    (root / "config/topics.json").write_text("{}")
    os.mkfifo(root / "config/fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
    names = ["config", "socket"]
    if os.geteuid() == 0:
        os.mknod(root / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        names.append("device")
    found = state.members(str(root), sorted(names))
    assert found.names == ["config", "config/topics.json"]
    assert sorted(found.left_out) == sorted(["config/fifo", *names[1:]])
    stream = io.BytesIO()
    state.write(stream, str(root), found.names)
    state.read(io.BytesIO(stream.getvalue()), str(back))
    assert contents(back) == {"config": None, "config/topics.json": b"{}"}


def test_a_file_that_became_a_fifo_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    status = os.lstat(tmp_path / "file")
    (tmp_path / "file").unlink()
    os.mkfifo(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda path: status)
        with pytest.raises(OSError, match="is not a regular file"):
            state.write(io.BytesIO(), str(tmp_path), ["file"])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("config/link", "{root}/config/topics.json"),
        ("config/link", "/etc/passwd"),
        ("config/link", "/missing"),
        ("config/link", "../../outside"),
        ("config/link", "../../root/config/topics.json"),
        ("config/link", "back/../../outside"),
        ("link", "../outside"),
    ],
)
def test_a_link_that_could_not_be_restored_is_refused(tmp_path: Path, name: str, target: str) -> None:
    root = tmp_path / "root"
    (root / "config").mkdir(parents=True)
    (root / "config/topics.json").write_text("{}")
    (root / "config/back").symlink_to("..")
    target = target.format(root=root)
    (root / name).symlink_to(target)
    with pytest.raises(JobError) as caught:
        state.members(str(root), sorted(os.listdir(root)))
    assert str(caught.value).startswith(f"{root}/{name}: is a link to {target}: ")
    assert "put what it leads to in its place" in str(caught.value)


@pytest.mark.usefixtures("any_python")
def test_permissions_are_those_of_the_filter_data(tmp_path: Path) -> None:
    """Files are executable only where their owner may execute them, and directories are as new ones are."""
    stream = io.BytesIO()
    kinds = (
        ("only-group", tarfile.REGTYPE, 0o010),
        ("all", tarfile.REGTYPE, 0o777),
        ("folder", tarfile.DIRTYPE, 0o500),
    )
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, mode in kinds:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.mtime = kind, mode, 1_700_000_000
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("folder/file"))
    (tmp_path / "back").mkdir()
    state.read(io.BytesIO(stream.getvalue()), str(tmp_path / "back"))
    modes = {name: (tmp_path / "back" / name).stat().st_mode & 0o7777 for name, _, _ in kinds}
    new = (tmp_path / "back").stat().st_mode & 0o777
    assert modes == {"only-group": 0o600, "all": 0o755, "folder": new}
    assert (tmp_path / "back/folder").stat().st_mtime == 1_700_000_000
