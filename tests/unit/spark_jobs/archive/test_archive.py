"""Archiving a store as Parquet, and restoring it byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.record import MAGIC_V2
from duemq.spark_jobs.archive.archive import ArchiveResult, RestoreResult, archive, read_manifest, restore
from duemq.spark_jobs.cli.output import print_archived
from duemq.spark_jobs.errors import JobError
from tests.soak import examples
from tests.unit.spark_jobs.compact.test_compact import busy, query, tree
from tests.unit.spark_jobs.compact_world import HOST_V6, ODD_MS, SEGMENT, Broker, new_broker, with_odd_times


def there_and_back(root: Path, directory: Path) -> tuple[ArchiveResult, RestoreResult]:
    archived = archive(str(root), str(directory / "archive"), workers=1, range_size=4 << 20)
    return archived, restore(str(directory / "archive"), str(directory / "back"), workers=1)


def test_a_store_comes_back_as_it_was(tmp_path: Path) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    archived, restored = there_and_back(tmp_path / "old", tmp_path)
    assert archived.records == restored.records == 120 + 240 + 300
    assert tree(tmp_path / "old") == tree(tmp_path / "back", but="index")
    after = Broker(tmp_path / "back", broker.clock)
    assert after.recovered.records == 0
    after.pass_time(7_200_000)
    assert len(after.bodies()) == 300
    (index,) = (tmp_path / "back/index").iterdir()
    assert len(query(index, "plain#b3")) == 17
    after.close()


def odd(root: Path) -> Broker:
    """A store with records of all kinds."""
    broker = new_broker(root)
    broker.send("%RETRY%group", b"", "")
    broker.send("plain", b"", "TAGS\x01a\x02", 3)
    broker.send("plain", "schlüssel 漢字".encode(), "KEYS\x01ключ\x02città\x01Forlì 🐢\x02")
    broker.send("plain", bytes(range(256)) * 60, "A\x01b\x02A\x01c\x02\x02nothing\x02=\x01 ", host=HOST_V6)
    broker.send("plain", b"x" * 3000, host=HOST_V6)
    for i in range(40):
        broker.send("many", b"m" * (i * 97 % 4000), f"N\x01{i}\x02", i % 3, prepared=i)
    return broker


def test_records_of_all_makes_come_back(tmp_path: Path) -> None:
    broker = odd(tmp_path / "old")
    broker.close()
    there_and_back(tmp_path / "old", tmp_path)
    assert tree(tmp_path / "old") == tree(tmp_path / "back", but="index")


def test_times_that_are_none_come_back(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(30):
        broker.send("plain", b"%d" % number)
    broker.close()
    with_odd_times(tmp_path / "old")
    there_and_back(tmp_path / "old", tmp_path)
    assert tree(tmp_path / "old", but="index") == tree(tmp_path / "back", but="index")
    table = ds.dataset(tmp_path / "archive/messages", partitioning="hive").to_table().sort_by("physical_offset")
    rows = table.to_pylist()
    assert len(rows) == 30
    for name, some in (("born", rows[:9]), ("store", rows[9:18])):
        assert [row[f"{name}_ms"] for row in some] == [None if 0 <= -ms <= 1 else ms for ms in ODD_MS]
        assert [row[f"{name}_time"] is None for row in some] == [row[f"{name}_ms"] is not None for row in some]
    assert [row["day"] for row in rows[9:18]] == [None, None, "1969-12-31", "1970-01-01", *[None] * 5]
    table.to_pandas()


def test_an_archive_of_before_has_its_times(tmp_path: Path) -> None:
    """An archive from before the columns for times beyond timestamps is restored with its times."""
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    for path in (tmp_path / "archive/messages").rglob("*.parquet"):
        pq.write_table(pq.ParquetFile(path).read().drop_columns(["born_ms", "store_ms"]), path)
    restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    assert tree(tmp_path / "old") == tree(tmp_path / "back", but="index")


def test_records_of_version_2_come_back(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    offset = broker.send("T", b"body", "A\x01b")
    broker.close()
    path = tmp_path / "old/commitlog" / f"{0:020}"
    data = bytearray(path.read_bytes())
    # As 5.x writes it for a topic of more than 127 bytes.
    size = int.from_bytes(data[offset : offset + 4], "big")
    topic = b"%RETRY%" + b"g" * 150
    record = data[offset : offset + size]
    new = record[: 88 + 4] + len(topic).to_bytes(2, "big") + topic + record[88 + 4 + 1 + 1 :]
    new[0:4], new[4:8] = len(new).to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big")
    data[offset : offset + len(new)] = new
    path.write_bytes(data)
    there_and_back(tmp_path / "old", tmp_path)
    assert (tmp_path / "back/commitlog" / path.name).read_bytes() == data


@examples(1 / 4)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=5000), st.booleans()), max_size=60))
def test_any_messages_come_back(
    tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[int, bytes, bool]]
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    broker = new_broker(tmp_path / "old")
    broker.send("first", b"")
    for number, (topic, body, is_v6) in enumerate(messages):
        text = f"KEYS\x01{number}\x02" if number % 2 else ""
        broker.send(f"t{topic}", body, text, host=HOST_V6 if is_v6 else b"\x7f\0\0\x01\0\0\x04\xd2")
        broker.clock.advance(40_000_000 * topic)
    broker.close()
    archived, _ = there_and_back(tmp_path / "old", tmp_path)
    assert archived.records == len(messages) + 1
    assert tree(tmp_path / "old") == tree(tmp_path / "back", but="index")


def test_rows_are_what_was_sent(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    broker.send("first", b"", "")
    broker.clock.advance(86_400_000)
    text = "KEYS\x01k1 k2\x02TAGS\x01red\x02UNIQ_KEY\x01U\x02n\x017"
    offset = broker.send("orders", b"body", text, 2, host=HOST_V6, prepared=99)
    now_ms = broker.clock.now_ms()
    broker.close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    table = ds.dataset(tmp_path / "archive/messages", partitioning="hive").to_table(
        filter=(pc.field("day") == "2023-11-15") & (pc.field("topic") == "orders")
    )
    assert table.schema.field("store_time").type == pa.timestamp("ms", "UTC")
    assert table.schema.field("properties").type == pa.map_(pa.string(), pa.string())
    (row,) = table.to_pylist()
    size = 88 + 12 + 4 + 1 + 6 + 2 + len(text)
    assert {**row, "store_time": row["store_time"].timestamp(), "born_time": row["born_time"].timestamp()} == {
        "topic": "orders",
        "queue_id": 2,
        "queue_offset": 0,
        "physical_offset": offset,
        "size": size,
        "store_time": now_ms / 1000,
        "born_time": now_ms / 1000,
        "store_host": b"\x7f\0\0\x01" + (10911).to_bytes(4, "big"),
        "born_host": HOST_V6,
        "keys": "k1 k2",
        "tags": "red",
        "unique_key": "U",
        "properties": [("KEYS", "k1 k2"), ("TAGS", "red"), ("UNIQ_KEY", "U"), ("n", "7")],
        "body": b"body",
        "flag": 3,
        "sys_flag": 16,
        "reconsume_times": 0,
        "prepared_offset": 99,
        "body_crc": row["body_crc"],
        "magic": 0xDAA320A7,
        "properties_text": text.encode(),
        "store_ms": None,
        "born_ms": None,
        "day": "2023-11-15",
    }
    manifest = read_manifest(str(tmp_path / "archive"))
    assert manifest.topics["orders"] == {
        "records": 1,
        "size": size,
        "first_store_ms": now_ms,
        "last_store_ms": now_ms,
    }
    assert (manifest.records, manifest.is_restorable, manifest.written_by) == (2, True, "duemq")
    path = next((tmp_path / "archive/messages/day=2023-11-15/topic=orders").iterdir())
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_topics_with_signs_are_directories(tmp_path: Path) -> None:
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    (day,) = (tmp_path / "archive/messages").iterdir()
    assert sorted(path.name for path in day.iterdir()) == ["topic=%25RETRY%25group", "topic=many", "topic=plain"]
    table = ds.dataset(tmp_path / "archive/messages", partitioning="hive").to_table(columns=["topic"])
    assert set(table["topic"].to_pylist()) == {"%RETRY%group", "many", "plain"}


LONG = ["%" * 127, "漢" * 40 + "a", "漢" * 40 + "b", "x" * 127, "a%" * 62, "ab%" * 42]


def test_topics_that_are_too_long_for_directories_come_back(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for topic in LONG:
        broker.send(topic, topic.encode())
    broker.close()
    there_and_back(tmp_path / "old", tmp_path)
    assert tree(tmp_path / "old") == tree(tmp_path / "back", but="index")
    (day,) = (tmp_path / "archive/messages").iterdir()
    found = {
        pq.ParquetFile(next(folder.iterdir())).read(["topic"])["topic"][0].as_py(): folder.name
        for folder in day.iterdir()
    }
    assert sorted(found) == sorted(LONG)
    for topic, name in found.items():
        assert len(name) <= 255
        text = unquote(name.removeprefix("topic="), errors="strict")
        assert text == topic or topic.startswith(text[: text.rindex("~")])
    assert found["x" * 127] == "topic=" + "x" * 127
    long = "topic=" + "%25" * 77
    assert found["%" * 127] == f"{long}~{hashlib.sha256(b'%' * 127).hexdigest()[:16]}"


def test_damaged_stretches_come_back_too(tmp_path: Path) -> None:
    broker = odd(tmp_path / "old")
    broker.close()
    path = tmp_path / "old/commitlog" / f"{0:020}"
    data = bytearray(path.read_bytes())
    data[300:340] = b"\xee" * 40
    path.write_bytes(data)
    archived, _ = there_and_back(tmp_path / "old", tmp_path)
    assert archived.damaged >= 1
    (*_, row) = pq.read_table(tmp_path / "archive/damaged.parquet").to_pylist()
    assert row["reason"]
    assert (tmp_path / "back/commitlog" / path.name).read_bytes() == data


def test_files_that_are_missing_are_counted(tmp_path: Path) -> None:
    root = new_broker(tmp_path / "old")
    while root.store.log.end < 3 * SEGMENT:
        root.send("plain", b"x" * 1000)
    root.close()
    whole = archive(str(tmp_path / "old"), str(tmp_path / "whole"), workers=1)
    (tmp_path / "old/commitlog" / f"{SEGMENT:020}").unlink()
    found = archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    assert (whole.damaged, whole.missing, found.damaged, found.missing) == (0, 0, 0, 1)
    assert found.records < whole.records


def test_what_a_crash_left_has_records_and_is_not_restored(tmp_path: Path) -> None:
    broker = odd(tmp_path / "old")
    count = 45
    broker.close()
    (tmp_path / "old/abort").write_text("1")
    archived = archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    assert (archived.why_not_restorable, archived.records) == ("its broker was not stopped in order", count)
    with pytest.raises(JobError, match="not the store's other files"):
        restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    assert not (tmp_path / "back").exists()


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    odd(tmp_path / "old").close()

    def refusal() -> str:
        with pytest.raises(JobError) as caught:
            restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "back").exists()
        assert not (tmp_path / "back.partial").exists()
        return str(caught.value)

    assert "has no manifest.json" in refusal()
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive/manifest.json").write_text("{}")
    assert "manifest.json" in refusal()
    (tmp_path / "archive/manifest.json").unlink()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    manifest = json.loads((tmp_path / "archive/manifest.json").read_text())
    name, rows = next(iter(manifest["parts"][0][5].items()))
    manifest["parts"][0][5][name] = rows + 1
    manifest["parts"][0][2] += 1
    manifest["records"] += 1
    (tmp_path / "archive/manifest.json").write_text(json.dumps(manifest))
    assert f"the manifest says {rows + 1}" in refusal()
    manifest["parts"][0][5][name] = rows
    manifest["parts"][0][2] -= 1
    manifest["records"] -= 1
    (tmp_path / "archive/manifest.json").write_text(json.dumps(manifest))
    path = tmp_path / "archive/messages" / name
    content = path.read_bytes()
    path.write_bytes(content[:100])
    assert "cannot be restored" in refusal()
    path.unlink()
    assert os.path.basename(name) in refusal()
    path.write_bytes(content)
    restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1, with_index=False)
    assert tree(tmp_path / "old") == tree(tmp_path / "back")


@pytest.mark.parametrize("name", ["manifest.json", "state.tar.zst", "damaged.parquet", "messages", "consume_queue"])
def test_a_file_of_an_archive_that_is_not_a_regular_one_is_refused(tmp_path: Path, name: str) -> None:
    """A FIFO hung the run."""
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    path = tmp_path / "archive" / name
    path = next(path.rglob("*.parquet")) if path.is_dir() else path
    path.unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        make(path)
        with pytest.raises(JobError) as caught:
            restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
        why = "a directory, and a file belongs there" if make is os.mkdir else "not a regular file but a FIFO, a socket"
        assert str(caught.value).startswith(f"{path}: is {why}")
        assert sorted(os.listdir(tmp_path)) == ["archive", "old"]
        path.rmdir() if make is os.mkdir else path.unlink()


@pytest.mark.parametrize("name", ["commitlog", "consumequeue", "index", "abort", ".scratch"])
def test_the_tar_of_an_archive_has_no_records_and_no_queues(tmp_path: Path, name: str) -> None:
    """A member overwrote a file of the new commitlog."""
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    with (
        pa.CompressedOutputStream(str(tmp_path / "archive/state.tar.zst"), "zstd") as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        tar.addfile(tarfile.TarInfo(f"{name}/00000000000000000000" if name != "abort" else name))
    with pytest.raises(JobError, match=f"has nothing of {name}"):
        restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    assert sorted(os.listdir(tmp_path)) == ["archive", "old"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"segment_size": 0}, "Expected `int` >= 1 - at `$.segment_size`"),
        ({"segment_size": 1 << 62}, "Expected `int` <= 2147483648 - at `$.segment_size`"),
        ({"segment_size": SEGMENT + 1}, f"its segments are not the offsets of files of {SEGMENT + 1} bytes"),
        ({"segments": [-5]}, "Expected `int` >= 0 - at `$.segments"),
        ({"segments": []}, "does not fit its segments"),
        ({"segments": [0, 1]}, f"its segments are not the offsets of files of {SEGMENT} bytes"),
        ({"segments": [0, 0]}, f"its segments are not the offsets of files of {SEGMENT} bytes"),
        ({"records": 5}, "its parts have other records than it says in all"),
        ({"size": -1}, "Expected `int` >= 0 - at `$.size`"),
        ({"size": 5}, "its parts have other records than it says in all"),
        ({"parts": []}, "its parts have other records than it says in all"),
        ({"queue_files": [["consumequeue/T/0/x"]]}, "which the manifest does not have there"),
    ],
)
def test_a_manifest_that_states_other_contents_is_refused(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    path = tmp_path / "archive/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(JobError, match=re.escape(why)):
        restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    assert sorted(os.listdir(tmp_path)) == ["archive", "old"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({0: 1 << 20, 1: 2 << 20}, "does not fit its segments"),
        ({1: 100, 4: -1}, "there are other records than those from 0 to 100"),
        ({0: 100}, "there are other records than those from 100 to"),
        ({0: -1}, "Expected `int` >= 0"),
        ({4: 1 << 40}, f"has a marker at {1 << 40}"),
        ({5: {}}, "has other records than its files"),
    ],
)
def test_a_part_that_states_other_contents_is_refused(tmp_path: Path, change: dict[int, object], why: str) -> None:
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    path = tmp_path / "archive/manifest.json"
    manifest = json.loads(path.read_text())
    part = manifest["parts"][0]
    for at, value in change.items():
        part[at] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(JobError, match=re.escape(why)):
        restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    assert sorted(os.listdir(tmp_path)) == ["archive", "old"]


@pytest.mark.parametrize(
    ("name", "column"), [("messages", "body"), ("consume_queue", "file_size"), ("damaged.parquet", "bytes")]
)
def test_a_file_without_a_column_is_refused(tmp_path: Path, name: str, column: str) -> None:
    """The run ended with a traceback."""
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    path = tmp_path / "archive" / name
    path = next(path.rglob("*.parquet")) if path.is_dir() else path
    pq.write_table(pq.ParquetFile(path).read().drop_columns([column]), path)
    name = str(path.relative_to(tmp_path / "archive"))
    with pytest.raises(JobError, match=re.escape(f"archive: {name} has no column {column}; use an intact archive")):
        restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)


def test_an_archive_of_a_new_store_comes_back(tmp_path: Path) -> None:
    new_broker(tmp_path / "old").close()
    archived, restored = there_and_back(tmp_path / "old", tmp_path)
    assert archived.records == restored.records == 0


def test_a_damaged_stretch_that_fits_no_file_is_refused(tmp_path: Path) -> None:
    """It would have made a file of the commitlog larger than the others."""
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    rows = {"physical_offset": [SEGMENT - 5], "reason": ["bad"], "bytes": [b"x" * 10]}
    pq.write_table(pa.table(rows), tmp_path / "archive/damaged.parquet")
    with pytest.raises(JobError, match=rf"damaged.parquet: what it has from {SEGMENT - 5} on fits no file"):
        restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)


def test_several_processes_do_as_one_does(tmp_path: Path) -> None:
    busy(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=2)
    seen: list[tuple[int, int]] = []
    restore(
        str(tmp_path / "archive"),
        str(tmp_path / "back"),
        workers=2,
        progress=lambda done, all_: seen.append((done, all_)),
    )
    assert tree(tmp_path / "old") == tree(tmp_path / "back", but="index")
    assert seen[-1][0] == seen[-1][1]


def test_an_archive_does_not_need_the_store(tmp_path: Path) -> None:
    odd(tmp_path / "old").close()
    archive(str(tmp_path / "old"), str(tmp_path / "archive"), workers=1)
    before = tree(tmp_path / "old")
    subprocess.run(["rm", "-r", str(tmp_path / "old")], check=True)
    (tmp_path / "archive").rename(tmp_path / "elsewhere")
    restore(str(tmp_path / "elsewhere"), str(tmp_path / "old"), workers=1, with_index=False)
    assert tree(tmp_path / "old") == before


def test_a_store_is_archived_without_what_has_no_contents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO is named and left out, and its archive is restored; a link that could not be restored is refused before
    anything is written."""
    odd(tmp_path / "old").close()
    (tmp_path / "old/config/link").symlink_to("delayOffset.json")
    (tmp_path / "old/config/nowhere").symlink_to("../missing")
    before = tree(tmp_path / "old", but="index")
    os.mkfifo(tmp_path / "old/config/fi\nfo")
    archived, _ = there_and_back(tmp_path / "old", tmp_path)
    assert archived.left_out == ["config/fi\nfo"]
    assert tree(tmp_path / "back", but="index") == before
    assert os.readlink(tmp_path / "back/config/nowhere") == "../missing"
    print_archived(archived)
    assert capsys.readouterr().out.splitlines()[1:] == [
        r"config/fi\nfo is a FIFO, a socket or a device, and is not in the archive"
    ]
    (tmp_path / "old/config/outside").symlink_to(tmp_path)
    with pytest.raises(JobError, match=rf"old/config/outside: is a link to {tmp_path}: only a relative link"):
        archive(str(tmp_path / "old"), str(tmp_path / "again"), workers=1)
    assert not list(tmp_path.glob("again*"))
