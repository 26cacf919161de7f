"""The configuration file: reading it, and the parts that a changed setting leaves untouched."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.broker.errors import ConfigError
from duemq.broker.settings import broker_conf

FILE = """# the broker of the tests
brokerName=a

! how long messages stay
fileReservedTime = 48
  deleteWhen=04
"""


def test_only_the_lines_that_change_are_touched() -> None:
    text = broker_conf.changed(FILE, {"fileReservedTime": "72", "deleteWhen": "05;06"}, "x")
    assert text == FILE.replace("= 48", "= 72").replace("=04", "=05;06")
    assert broker_conf.parse(text, "x") == {"brokerName": "a", "fileReservedTime": "72", "deleteWhen": "05;06"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "x=1\n"),
        ("y=2", "y=2\nx=1\n"),
        ("y=2\n", "y=2\nx=1\n"),
        ("#x=0\n", "#x=0\nx=1\n"),
        ("x=0", "x=1"),
        ("x=\r\ny=2\r\n", "x=1\r\ny=2\r\n"),
        ("x=0\nx=0\n", "x=0\nx=1\n"),
        ("xx=0\n", "xx=0\nx=1\n"),
        ("y=\\\n", "y=\nx=1\n"),
        ("y=2\\", "y=2\nx=1\n"),
        ("y=2\\\\", "y=2\\\\\nx=1\n"),
        ("y=2\\\\\\\r\n", "y=2\\\\\nx=1\n"),
        ("y=2\\\n  \\\n", "y=2\\\n  \nx=1\n"),
        ("# y\\\n", "# y\\\nx=1\n"),
        ("y=2\n\\\n", "y=2\n\nx=1\n"),
    ],
)
def test_a_property_gets_its_place(before: str, after: str) -> None:
    assert broker_conf.changed(before, {"x": "1"}, "a text") == after
    assert broker_conf.parse(after, "a text")["x"] == "1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x: 0\n", "x: 1\n"),
        ("x\t0\n", "x\t1\n"),
        ("x : 0", "x : 1"),
        ("x =\\\n   0\ny=2\n", "x =1\ny=2\n"),
        ("\\u0078=0\n", "\\u0078=1\n"),
    ],
)
def test_whatever_separates_a_name_from_its_value_stays(before: str, after: str) -> None:
    assert broker_conf.changed(before, {"x": "1"}, "a text") == after


_BLANKS = st.sampled_from(["", " ", "\t", " \t"])
_VALUES = st.text("ab1 =:#!\\\tä😀", max_size=8)
_NAMES = st.sampled_from(["x", "y", "brokerName"])


@st.composite
def entries(draw: st.DrawFn) -> str:
    value = draw(_VALUES).replace("\\", "\\\\").strip()
    if draw(st.booleans()):
        value = value.replace("a", "\\u0061").replace("b", "\\\n  b")
    separator = draw(st.sampled_from(["=", ":", " ", " = ", ":\t"]))
    if separator == " ":
        value = "v" + value  # one that begins with = or : would belong to another separator
    comment = draw(st.sampled_from(["", "# x=7\n", "!\n", "\n"]))
    return comment + draw(_BLANKS) + draw(_NAMES) + separator + value + "\n"


@given(
    st.lists(entries(), max_size=4).map("".join),
    st.sampled_from(["", "y=\\\n", "y=2\\", "y=\\\\\\\r\n", "y=\\\n \t\\\n", "\\\n", "#\\\n"]),
    st.dictionaries(_NAMES, _VALUES.map(str.strip), min_size=1),
)
def test_a_value_that_was_written_is_read_and_all_others_stay(text: str, end: str, changes: dict[str, str]) -> None:
    text += end
    before = broker_conf.parse(text, "a text")
    assert broker_conf.parse(broker_conf.changed(text, changes, "a text"), "a text") == before | changes


def read_or_refused(text: str) -> dict[str, str] | str:
    try:
        return broker_conf.parse(text, "a text")
    except ConfigError as error:
        return str(error)


@given(st.text("ab=:#! \t\f\v\r\n\x85\xa0\u2028ä", max_size=20))
def test_a_text_without_a_backslash_is_read_as_the_library_reads_it(text: str) -> None:
    read_by_the_library = text + "\n\\\n"  # the backslash continues an empty line
    assert read_or_refused(text) == read_or_refused(read_by_the_library)


def test_a_character_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^the request, line 2: .*\\u12"):
        broker_conf.parse("x=1\ny=\\u12\n", "the request")


def test_half_a_character_is_refused() -> None:
    assert broker_conf.parse("x=\\ud83d\\ude00", "a text") == {"x": "😀"}
    with pytest.raises(ConfigError, match=r"^a text, line 2: 'y=.*' has one half of a character"):
        broker_conf.parse("x=1\ny=a\\ud83d\n", "a text")


@pytest.mark.parametrize("text", ["=5", ":", " = 5"])
def test_an_entry_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^a text, line 1: .* is not NAME=VALUE$"):
        broker_conf.parse(text, "a text")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"# Gr\xf6\xdfe\nx=\xe4\n", "ä"),
        ("# Größe\nx=ä\n".encode(), "ä"),
        ("x=ä\n# Größe\n".encode("utf-8-sig"), "ä"),
    ],
    ids=["ISO 8859-1", "UTF-8", "byte order mark"],
)
def test_a_file_keeps_its_encoding(tmp_path: Path, data: bytes, value: str) -> None:
    file = tmp_path / "broker.conf"
    file.write_bytes(data)
    assert broker_conf.read(str(file)) == {"x": value}
    broker_conf.save(str(file), {"x": "é"})
    assert file.read_bytes() == data.replace(b"\xc3\xa4" if b"\xc3\xa4" in data else b"\xe4", b"\\u00e9")
    assert broker_conf.read(str(file)) == {"x": "é"}


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text(FILE)
    file.chmod(0o640)
    inode = file.stat().st_ino
    broker_conf.save(str(file), {"brokerName": "b"})
    assert file.read_text() == FILE.replace("=a", "=b")
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.stat().st_ino != inode
    assert os.listdir(tmp_path) == ["broker.conf"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.conf").write_text("x=0\n")
    link = tmp_path / "broker.conf"
    link.symlink_to("real.conf")
    broker_conf.save(str(link), {"x": "1"})
    assert link.is_symlink()
    assert (tmp_path / "real.conf").read_text() == "x=1\n"


def test_a_file_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        broker_conf.save(str(tmp_path / "broker.conf"), {"x": "1"})
    assert os.listdir(tmp_path) == []


def test_a_line_without_a_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^the request, line 2: 'y' is not NAME=VALUE$"):
        broker_conf.parse("x=1\ny\n", "the request")


def test_what_cannot_be_made_durable_leaves_the_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("x=0\n")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        broker_conf.save(str(file), {"x": "1"})
    assert [path.name for path in tmp_path.iterdir()] == ["broker.conf"]
    assert file.read_text() == "x=0\n"
