"""Files of a store as lines of text. The oracle is the broker that wrote the store: the lines show its content."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duemq.broker.dump import __main__ as command
from duemq.broker.dump import source, tables
from duemq.broker.dump.kinds import lines
from duemq.protocol.dump import DamageLine
from duemq.protocol.records.record import StoredMessage, encode
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.timers.files import wheel
from duemq.storage.durability.checkpoint import Checkpoint, encode_theirs, save
from duemq.storage.files import OsFiles
from duemq.storage.queues import check, index_file
from duemq.storage.queues.consume_queue import hole
from tests.support.copies import copy_tree
from tests.support.extended import extend
from tests.unit.spark_jobs.compact_world import SEGMENT, START_MS, Broker, new_broker

FIRST = f"{0:020}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A store with several files of each kind, stopped cleanly. Tests do not change it."""
    broker = new_broker(tmp_path_factory.mktemp("dump") / "store")
    for number in range(60):
        broker.send("plain", b"plain %d" % number * 200, f"TAGS\x01red\x02KEYS\x01order {number}")
        broker.schedule(1 + number % 4, b"level %d" % number, f"l{number}")
        broker.timer(START_MS + 1000 + number * 997, b"timer %d" % number, f"t{number}")
    broker.pass_time(20_000)
    broker.cancel(broker.timer(START_MS + 500_000, b"cancelled"))
    broker.close()
    (broker.root / "config/topics.json").write_text(json.dumps({"topicConfigTable": {"a b": {"perm": 6}}}))
    yield broker
    Broker.let_go_of_all()


@pytest.fixture
def store(written: Broker, tmp_path: Path) -> Path:
    """A copy of the store, for damage."""
    return copy_tree(written.root, tmp_path / "store")


def rows(path: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the command's output for a file, without the first line. The exit code is 1 if a line reports damage."""
    code = command.main([str(path), *options])
    found = capsys.readouterr().out.splitlines()[1:]
    assert code == any(re.search(r"\b(damaged|misplaced)(:| at byte)", line) for line in found), found
    return found


def values(found: list[str], name: str) -> list[str]:
    """Return the values of a field in the lines that have it."""
    return [match[1] for line in found if (match := re.search(rf"(?:^| ){name}=(\S+)", line))]


def damage(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_the_commitlog_has_a_line_for_each_record(written: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((written.root / "commitlog").iterdir())
    assert len(files) > 2
    found = [line for path in files for line in rows(path, "--body", capsys=capsys)]
    records = [line for line in found if " topic=" in line]
    offsets = [int(value) for value in values(records, "offset")]
    sizes = [int(value) for value in values(records, "size")]
    starts = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    assert all(
        offset in (start, -(-start // SEGMENT) * SEGMENT) for offset, start in zip(offsets, starts, strict=False)
    )
    assert values(records, "topic").count("plain") == 60
    assert sum('keys="order 7"' in line and f'body="{"plain 7" * 200}"' in line for line in records) == 1
    others = [line.partition(" ")[2] for line in found if " topic=" not in line]
    assert [re.sub(r"\d+", "N", line) for line in others] == [
        *["end of the file: N bytes are free"] * (len(files) - 1),
        "zeros, N bytes",
    ]


def test_a_part_of_the_commitlog(written: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    path = written.root / "commitlog" / FIRST
    offsets = [int(value) for value in values(rows(path, capsys=capsys), "offset")]
    part = rows(path, "--from", str(offsets[4] + 1), "--to", str(offsets[8]), capsys=capsys)
    assert [int(value) for value in values(part, "offset")] == offsets[5:8]
    assert rows(path, "--from", str(offsets[5]), "--limit", "2", capsys=capsys) == part[:2]
    assert rows(path, "--limit", "0", capsys=capsys) == []


def test_a_damaged_commitlog(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "commitlog" / FIRST
    before = rows(path, capsys=capsys)
    at, size = (([int(value) for value in values(before, name)]) for name in ("offset", "size"))
    damage(path, at[2] + 90, b"\xff\xff")
    damage(path, at[5], bytes(size[5]))
    damage(path, at[7], b"\0\0\1\0")
    damage(path, at[9] + 28, (12345).to_bytes(8, "big"))
    found = rows(path, capsys=capsys)
    assert found[:2] == before[:2]
    assert re.fullmatch(
        rf"offset={at[2]} damaged: checksum .* of the body, which has .*; {size[2]} bytes are .*", found[2]
    )
    assert found[3:5] == before[3:5]
    assert found[5] == f"offset={at[5]} damaged: zeros, {size[5] + 2} bytes"  # two of the next record's size
    assert found[6] == before[6]
    assert re.fullmatch(rf"offset={at[7]} damaged: .*; {size[7]} bytes are passed over", found[7])
    assert found[8] == before[8]
    assert found[9] == f"misplaced: lies at {at[9]} {before[9].replace(f'offset={at[9]}', 'offset=12345')}"
    assert found[10:] == before[10:]


def test_a_commitlog_that_is_cut_off(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "commitlog" / FIRST
    before = rows(path, capsys=capsys)
    last = int(values(before, "offset")[4])
    os.truncate(path, last + 50)
    found = rows(path, capsys=capsys)
    assert found[:4] == before[:4]
    assert re.fullmatch(rf"offset={last} damaged: .* with 50 bytes left; 50 bytes are passed over", found[4])


def test_windows_end_anywhere(written: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output does not depend on the sizes of the windows that are read at once."""
    path = str(written.root / "commitlog" / FIRST)
    begin = list(lines(path, start=1))
    for size in (64, 100, 1000):
        monkeypatch.setattr(source, "WINDOW", size)
        assert list(lines(path, start=1)) == begin


def test_consume_queues(written: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    queues = written.root / "consumequeue"
    plain = rows(queues / "plain/0" / FIRST, capsys=capsys)
    assert values(plain, "queueOffset") == [str(number) for number in range(50)]
    assert values(plain, "tagsCode") == ["112785"] * 50
    more = rows(queues / "plain/0" / f"{1000:020}", "--from", "58", capsys=capsys)
    assert [line.partition(" ")[0] for line in more] == [f"queueOffset={number}" for number in (58, 59, 60)]
    assert more[-1] == "queueOffset=60 free, 40 units"
    levels = rows(queues / SCHEDULE_TOPIC / "3" / FIRST, "--limit", "1", capsys=capsys)
    assert values(levels, "due") == ["2023-11-14T23:13:20.000Z"]
    timers = rows(queues / TIMER_TOPIC / "0" / FIRST, "--limit", "1", capsys=capsys)
    assert values(timers, "due") == ["2023-11-14T22:13:21.000Z"]


def bytes_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of bytes that are read of a file to make its lines."""
    read, sizes = os.pread, list[int]()

    def counted(descriptor: int, size: int, at: int) -> bytes:
        data = read(descriptor, size, at)
        sizes.append(len(data))
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", counted)
        patch.setattr(source, "WINDOW", WINDOW)
        assert len(list(lines(str(path)))) > 2
    return sum(sizes)


WINDOW = 8192
UNIT = struct.pack(">qiq", 5, 200, 7)
RECORD = StoredMessage(
    queue_id=0,
    queue_offset=0,
    topic="t",
    body=b"x",
    born_timestamp=START_MS,
    born_host=bytes(8),
    store_timestamp=0,
    store_host=bytes(8),
)
SIZE = len(encode(RECORD))
RECORDS = b"".join(encode(msgspec.structs.replace(RECORD, physical_offset=at)) for at in range(0, SIZE * 1_000, SIZE))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("consumequeue/plain/0", UNIT * 5_000),
        ("consumequeue/plain/0", (UNIT + bytes(20)) * 2_500),
        ("consumequeue_ext/plain/0", (struct.pack(">hqqh", 20, 5, START_MS, 0) + bytes(20)) * 2_500),
        ("timerlog", (struct.pack(">iqiqiqiiq", 52, -1, 1, START_MS, 0, 5, 200, 7, START_MS) + bytes(52)) * 1_000),
        ("commitlog", RECORDS),
        ("commitlog", b"".join(RECORDS[at : at + SIZE] + bytes(SIZE) for at in range(0, len(RECORDS), 2 * SIZE))),
        ("commitlog", b"".join(RECORDS[at : at + 2 * SIZE - 1] + b"x" for at in range(0, len(RECORDS), 2 * SIZE))),
        ("commitlog", RECORDS[:SIZE] * 3 + (struct.pack(">i", 60_000) + RECORDS[4:8]) * 10_000),
    ],
    ids=["units", "units-and-zeros", "extension", "timers", "records", "zeros", "damaged", "magic-numbers"],
)  # fmt: skip
def test_no_byte_is_read_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes) -> None:
    path = tmp_path / name / FIRST
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert bytes_read(path, monkeypatch) < 4 * len(data) + 2 * WINDOW


def test_units_that_stand_for_no_record(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "consumequeue/plain/0" / FIRST
    before = rows(path, capsys=capsys)
    damage(path, 0, hole(0, 0))
    damage(path, 20, hole(77, 99))
    damage(path, 48, (1).to_bytes(4, "big"))
    damage(path, 68, (2).to_bytes(4, "big"))
    damage(path, 80, bytes(40))
    damage(path, 128, b"\xff" * 4)
    os.truncate(path, 999)
    found = rows(path, capsys=capsys)
    assert found[:2] == ["queueOffset=0 no message", "queueOffset=1 no message offset=77 following=99"]
    assert found[2].endswith(" withdrawn")
    assert found[3].endswith(" delivered")
    assert found[4] == "queueOffset=4 damaged: zeros, 2 units"
    assert found[5].startswith("queueOffset=6 damaged: offset=")
    assert found[6:-1] == before[7:49]
    assert found[-1] == "damaged: 19 bytes behind the last unit"
    moved = path.rename(path.with_name(f"{7:020}"))
    assert rows(moved, capsys=capsys)[0] == f"damaged: {moved.name} is not a multiple of 20 bytes"


def test_extensions_of_consume_queues(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extend(store)
    plain = rows(store / "consumequeue/plain/0" / FIRST, capsys=capsys)
    addresses = values(plain, "address")
    assert len(addresses) == 50
    path = store / "consumequeue_ext/plain/0" / FIRST
    found = rows(path, capsys=capsys)
    assert values(found, "address")[:50] == addresses
    assert values(found, "tagsCode") == ["112785"] * 60
    assert found[-1] == f"address={1200 - 2**63} offset=1200 free, {(48 << 20) - 1200} bytes"
    assert values(rows(path, "--from", "40", "--to", "80", capsys=capsys), "offset") == ["40", "60"]
    levels = rows(store / "consumequeue_ext" / SCHEDULE_TOPIC / "3" / FIRST, "--limit", "1", capsys=capsys)
    assert values(levels, "due") == ["2023-11-14T23:13:20.000Z"]
    damage(path, 20, struct.pack(">hqqh", 22, 5, START_MS, 2) + b"\xab\xcd\xff\xff")
    found = rows(path, capsys=capsys)
    assert values(found, "bitmap") == ["abcd"]
    assert found[2:] == [f"address={42 - 2**63} offset=42 end of the file: {(48 << 20) - 42} bytes are free"]
    damage(path, 0, struct.pack(">h", 7) + bytes(58) + struct.pack(">h", 20))
    found = rows(path, capsys=capsys)
    size = 48 << 20
    assert found[0] == f"address={-(2**63)} offset=0 damaged: size 7, and a bitmap of 0 bytes, with {size} bytes left"
    assert found[1].endswith(" damaged: zeros, 40 bytes")
    assert values(found[2:-1], "tagsCode") == ["112785"] * 57
    later = rows(path, "--from", "50", capsys=capsys)
    assert later == [
        found[1].replace("zeros, 40", "zeros, 10").replace("=20 ", "=50 ").replace(str(20 - 2**63), str(50 - 2**63)),
        *found[2:],
    ]
    assert rows(path, "--from", "61", capsys=capsys) == found[3:]
    os.truncate(path, 1190)
    assert rows(path, "--from", "1160", capsys=capsys)[1].endswith("offset=1180 damaged: 10 bytes behind the last unit")
    damage(path, 1180, b"\xff\xff\0\0")
    assert rows(path, "--from", "1180", capsys=capsys)[0].endswith(" end of the file: 10 bytes are free")
    assert rows(path, "--from", "1181", capsys=capsys) == []
    damage(path, 1160, struct.pack(">hqqh", 31, 5, START_MS, 11))
    assert rows(path, "--from", "1160", capsys=capsys)[0].endswith(
        " damaged: size 31, and a bitmap of 11 bytes, with 30 bytes left"
    )


def test_the_timer_log_and_the_wheel(written: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    first = rows(written.root / "timerlog" / FIRST, capsys=capsys)
    assert first[0].startswith("position=0 second=1700000000 slot=2023-11-14T22:13:20.000Z previous=-1 magic=")
    assert values(first, "due")[1] == "2023-11-14T22:13:21.997Z"
    slots = rows(written.root / "timerwheel", capsys=capsys)
    assert len(slots) > 40
    second = values(slots, "second")[10]
    (slot,) = rows(written.root / "timerwheel", "--from", second, "--to", str(int(second) + 1), capsys=capsys)
    assert slot == slots[10]
    last = values([slot], "last")[0]
    (unit,) = rows(written.root / "timerlog" / FIRST, "--from", last, "--limit", "1", capsys=capsys)
    assert values([unit], "second") == [second]
    every = [line for path in sorted((written.root / "timerlog").iterdir()) for line in rows(path, capsys=capsys)]
    assert sum("withdrawn" in line for line in every) == 1
    assert every[-1].partition(" ")[2].startswith("zeros, ")


def test_a_damaged_timer_log_and_wheel(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "timerlog" / FIRST
    before = rows(path, capsys=capsys)
    damage(path, 52, b"\0\0\0\x35")
    damage(path, 52 * 3 + 12, b"\x7f")
    damage(path, 52 * 5, bytes(104))
    found = rows(path, capsys=capsys)
    assert found[0] == before[0]
    assert found[1].startswith("position=52 damaged: unitSize=53 second=")
    assert found[2] == before[2]
    assert found[3].startswith("position=156 damaged: unitSize=52 second=")
    assert found[4:6] == [before[4], "position=260 damaged: zeros, 107 bytes"]
    assert found[6:] == before[7:]
    path = store / "timerwheel"
    slots = np.fromfile(path, wheel.SLOT)
    number = int(np.flatnonzero(slots["second"])[0])
    damage(path, number * wheel.SLOT.itemsize, (int(slots["second"][number]) + 1).to_bytes(8, "big"))
    os.truncate(path, wheel.FILE_SIZE - 10)
    found = rows(path, capsys=capsys)
    assert found[0].startswith(f"damaged: {wheel.FILE_SIZE - 10} bytes;")
    assert sum(line.startswith(f"misplaced: in slot {number} ") for line in found) == 1


def test_a_timer_log_that_is_cut_off(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "timerlog" / FIRST
    before = rows(path, capsys=capsys)
    for size in (103, 100, 56):
        os.truncate(path, size)
        damaged = f"position=52 damaged: {size - 52} bytes behind the last unit"
        assert rows(path, capsys=capsys) == [before[0], damaged]


def test_a_part_of_the_timer_log(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, later = store / "timerlog" / FIRST, store / "timerlog" / f"{52 * 1000:020}"
    os.truncate(first, 52 * 10)
    shutil.copy(first, later)
    for path in (first, later):
        before = rows(path, capsys=capsys)
        at = [int(value) for value in values(before, "position")]
        assert at[0] == int(path.name)
        assert rows(path, "--from", str(at[1]), "--to", str(at[3]), capsys=capsys) == before[1:3]
        assert rows(path, "--from", str(at[0] + 1), "--to", str(at[2] + 1), capsys=capsys) == before[1:3]
    damage(first, 52 * 2, bytes(4) + struct.pack(">qI", 0, 0xCBD43194))
    assert rows(first, capsys=capsys)[2:] == ["position=104 end of the file: 0 bytes are free"]
    os.truncate(first, 52 * 2 + 16)
    assert rows(first, capsys=capsys)[2:] == ["position=104 end of the file: 0 bytes are free"]


def test_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = np.array([(5, 100, START_MS), (9, 200, START_MS + 2500), (5, 300, START_MS + 3000)], index_file.ITEM)
    path = tmp_path / "index" / index_file.file_name(START_MS / 1000, 0)
    path.parent.mkdir()
    index_file.write(str(path), items)
    found = rows(path, capsys=capsys)
    assert found[0] == (
        "begin=2023-11-14T22:13:20.000Z end=2023-11-14T22:13:23.000Z beginOffset=100 endOffset=300 slots=2 items=3"
    )
    assert found[1:] == [
        "item=1 hash=5 offset=100 stored=2023-11-14T22:13:20.000Z previous=0",
        "item=2 hash=9 offset=200 stored=2023-11-14T22:13:22.000Z previous=0",
        "item=3 hash=5 offset=300 stored=2023-11-14T22:13:23.000Z previous=1",
    ]
    assert rows(path, "--from", "2", "--to", "3", capsys=capsys) == [found[0], found[2]]
    damage(path, 36, b"\x7f\xff\xff\xff")
    assert rows(path, "--limit", "2", capsys=capsys)[1] == (
        f"damaged: 2147483646 items in a file that has room for {index_file.MOST}"
    )


def test_the_checkpoint_and_the_notes(written: Broker, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(written.root / "checkpoint", capsys=capsys)
    assert values(found, "recoveryOffset") == [str(written.store.log.end)]
    assert any(line.startswith("note levels, ") for line in found)
    assert {"1", "4"} <= set(values(found, "level"))
    assert values(found, "logEnd") == [str(61 * 52)]
    data = (store / "checkpoint").read_bytes()
    for at, wrong in (
        (2050, "byte 2048 does not begin duemq's part"),
        (2100, "duemq's part, from byte 2048 on, has a wrong checksum"),
    ):
        damage(store / "checkpoint", at, b"x")
        told = rows(store / "checkpoint", capsys=capsys)
        assert told == [f"damaged: {wrong}", found[0].partition(" recovery")[0]]
        (store / "checkpoint").write_bytes(data)
    damage(store / "checkpoint", 2, b"x")
    assert rows(store / "checkpoint", capsys=capsys)[1] == (
        "what duemq adds is missing, or older than what RocketMQ has written"
    )
    check = rows(written.root / "queuecheck", capsys=capsys)
    assert check[0] == "queueFileSize=1000"
    assert any(re.match(rf"  topic=plain queue=0 file={FIRST} units=50 ", line) for line in check)
    damage(store / "queuecheck", 40, b"x")
    whole, damaged = rows(store / "queuecheck", capsys=capsys)[1:]
    assert whole == "block recoveryOffset=-1 size=0"
    assert damaged == "damaged: has a wrong checksum at byte 28"
    (timers,) = rows(written.root / "config/timercheck", capsys=capsys)
    assert values([timers], "queueOffset") == ["61"]
    os.truncate(store / "config/timercheck", 50)
    assert rows(store / "config/timercheck", capsys=capsys) == ["damaged: 50 bytes instead of 4096"]


@pytest.mark.parametrize("name", ["checkpoint", "config/timercheck"])
@pytest.mark.parametrize("size", [0, 23, 24, 55, 56, 2048, 4095, 4097, 100_000])
def test_files_of_a_wrong_size(store: Path, capsys: pytest.CaptureFixture[str], name: str, size: int) -> None:
    path = store / name
    whole = rows(path, capsys=capsys)
    path.write_bytes(path.read_bytes()[:size].ljust(size, b"\0"))
    damaged, *found = rows(path, capsys=capsys)
    assert damaged == f"damaged: {size} bytes instead of 4096"
    assert bool(found) == (size >= (24 if name == "checkpoint" else 56))
    assert found == whole or size < 4096
    path.write_bytes(os.urandom(100_000))
    assert rows(path, capsys=capsys)[0] == "damaged: 100000 bytes instead of 4096"


def test_a_checkpoint_as_apache_s_broker_makes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(encode_theirs(Checkpoint(START_MS, START_MS, 0)))
    assert rows(path, capsys=capsys)[1:] == ["what duemq adds is missing, or older than what RocketMQ has written"]
    save(OsFiles(), str(path), Checkpoint(START_MS, START_MS, 0, 5, {"big": bytes(5000)}))
    assert rows(path, capsys=capsys)[1].startswith("note big, 5000 bytes")


def test_empty_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*NAMES, *OTHERS, "audit.log"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        found = rows(path, capsys=capsys)
        assert found == ["empty"] or found[0].startswith("damaged: "), name
        assert len(found) < 3


def test_an_index_file_without_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "index"
    with path.open("wb") as file:
        file.truncate(index_file.FILE_SIZE)
    (head,) = rows(path, capsys=capsys)
    assert head.endswith(" slots=0 items=0")
    damage(path, 36, b"\xff\xff\xff\xff")
    assert rows(path, capsys=capsys)[1].startswith("damaged: -2 items in a file")


def test_json_tables(written: Broker, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(written.root / "config/topics.json", capsys=capsys) == ['table=topicConfigTable name="a b" perm=6']
    found = rows(written.root / "config/delayOffset.json", capsys=capsys)
    assert any(line.startswith("table=offsetTable 1=15") for line in found), found
    path = store / "config/consumerOffset.json"
    path.write_text('{"offsetTable":{"orders@all":{0:5,1:7}}}')
    assert rows(path, capsys=capsys) == ["table=offsetTable name=orders@all 0=5 1=7"]
    path.write_text('{"topicConfigTable":{}}')
    assert rows(path, capsys=capsys) == [
        "damaged: is another table: it has topicConfigTable and no offsetTable", "table=topicConfigTable {}",
    ]  # fmt: skip
    path.write_text('{"offsetTable":')
    damaged, text = rows(path, capsys=capsys)
    assert damaged.startswith("damaged: JSON that ends or breaks at ")
    assert text == r'"{\"offsetTable\":"'


def test_the_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"time": "2026-11-25T19:30:00.123Z", "action": "CLEAN", "code": 5, "topic": "a b", "fields": {"perm": 6}}
    line = json.dumps(entry, separators=(",", ":")) + "\n"
    shown = 'time=2026-11-25T19:30:00.123Z action=CLEAN code=5 topic="a b" fields={"perm": 6}'
    monkeypatch.setattr(source, "WINDOW", 100)
    for name in ("audit.log", "audit.log.12", "elsewhere"):
        (tmp_path / name).write_text(line * 3)
        assert command.main([str(tmp_path / name)]) == 0
        head, *found = capsys.readouterr().out.splitlines()
        assert head == f"{tmp_path / name}: audit log, {3 * len(line)} bytes"
        assert found == [shown] * 3
    monkeypatch.setattr(tables, "_MAX_ENTRY", len(line))
    path = tmp_path / "audit.log"
    path.write_text(f"{line}[1]\nx\n{'y' * 300}\n{line}{line[:-1]}")
    first, array, text, long, again, cut = rows(path, capsys=capsys)
    assert first == again
    size = len(line)
    assert array == f'damaged at byte {size}: this is no JSON object: "[1]"'
    assert text.startswith(f"damaged at byte {size + 4}: JSON that ")
    assert long.startswith(f"damaged at byte {size + 6}: a line of 300 bytes; entries are shown up to {size} bytes: ")
    assert cut.startswith(f"damaged at byte {2 * size + 307}: the last line has no end: ")


def test_a_file_that_was_moved_is_known_by_its_content(written: Broker, tmp_path: Path) -> None:
    kinds = {
        f"commitlog/{FIRST}": "commitlog",
        "timerwheel": "timer wheel",
        "queuecheck": "queuecheck",
        "config/topics.json": "table",
        "lock": "bytes",
    }
    for name, kind in kinds.items():
        path = tmp_path / "moved"
        shutil.copy(written.root / name, path)
        head, *found = lines(str(path))
        assert head == f"{path}: {kind}, {path.stat().st_size} bytes"
        if name.startswith("commitlog"):
            assert found == list(lines(str(written.root / name)))[1:]


def test_a_whole_store_and_what_cannot_be_read(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "commitlog" / f"{SEGMENT:020}").unlink()
    (store / "commitlog" / f"{SEGMENT:020}").symlink_to("nowhere")
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    assert command.main([str(store), "--limit", "1"]) == 1
    told = capsys.readouterr()
    assert told.err == f"{store}/commitlog/{SEGMENT:020}: No such file or directory\n"
    assert all(f"{path}: " in told.out for path in before)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()} == before


def test_the_exit_code_counts_damage_and_reads_no_text(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "name\x01damaged: misplaced: x damaged at byte 5"
    path = tmp_path / "commitlog" / FIRST
    path.parent.mkdir()
    path.write_bytes(encode(msgspec.structs.replace(RECORD, topic="damaged", properties_text=text)))
    assert command.main([str(path), "--body"]) == 0
    assert "damaged: misplaced" in capsys.readouterr().out
    assert command.main([str(store)]) == 0
    damage(store / "queuecheck", 40, b"x")
    assert command.main([str(store / "queuecheck")]) == 1
    assert command.main([str(store / "queuecheck"), "--limit", "1"]) == 0
    assert command.main([str(store)]) == 1
    with pytest.raises(SystemExit) as ended:
        command.main([str(store), "--limit", "-1"])
    assert ended.value.code == 2


def test_symbolic_links_are_followed(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for name in ("commitlog", "consumequeue/plain", "config"):
        (store / name).rename(disk / Path(name).name)
        (store / name).symlink_to(disk / Path(name).name)
    (disk / "commitlog" / "loop").symlink_to(store)
    (store / "again").symlink_to(disk / "config")
    (store / "index").mkdir(exist_ok=True)
    assert command.main([str(store), "--limit", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    for name in (f"commitlog/{FIRST}: commitlog", f"consumequeue/plain/0/{FIRST}: consume queue"):
        assert sum(line.startswith(f"{store}/{name}, ") for line in told) == 1
    assert f"{store}/commitlog/loop: the same directory as {store}" in told
    assert f"{store}/config: the same directory as {store}/again" in told
    assert f"{store}/index: no files" in told


def test_a_directory_that_cannot_be_listed(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    list_directory = os.listdir

    def refuse(path: str) -> list[str]:
        if path == f"{store}/commitlog":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return list_directory(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert command.main([str(store), "--limit", "1"]) == 1
    told = capsys.readouterr()
    assert told.err == f"{store}/commitlog: Permission denied\n"
    assert f"{store}/checkpoint: " in told.out


def test_a_name_beyond_all_offsets(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (f"commitlog/{FIRST}", f"timerlog/{FIRST}", f"consumequeue/plain/0/{FIRST}"):
        path = (store / name).rename((store / name).with_name("9" * 20))
        assert len(rows(path, "--limit", "3", capsys=capsys)) == 3


def test_whoever_has_seen_enough_is_not_told_of_it(written: Broker) -> None:
    run = subprocess.run(
        f"{sys.executable} -m duemq.broker.dump {written.root} --body | head -n 1",
        shell=True, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.startswith(f"{written.root}/")
    assert run.stderr == ""


def test_standard_output_may_be_closed_or_full(written: Broker) -> None:
    for to, why in (
        (">&-", "is closed: nothing can be shown"),
        ("> /dev/full", "cannot be written: No space left on device"),
    ):
        run = subprocess.run(
            f"{sys.executable} -m duemq.broker.dump {written.root} {to}",
            shell=True, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (run.returncode, run.stderr) == (1, f"standard output {why}\n")


def test_names_of_files_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / os.fsdecode(b"x\n\xff")
    (store / "empty").mkdir(parents=True)
    (store / "broken").symlink_to("nowhere")
    (store / "loop").symlink_to(".")
    (store / "topics.json").write_text("{}")
    assert command.main([str(store)]) == 1
    told = capsys.readouterr()
    shown = f"$'{tmp_path}/x\\n\\xff"
    assert told.err == f"{shown}/broken': No such file or directory\n"
    assert set(told.out.splitlines()) >= {
        f"{shown}/topics.json': table, 2 bytes",
        f"{shown}/empty': no files",
        f"{shown}/loop': the same directory as {shown}'",
    }
    assert all(line.isprintable() for line in told.out.splitlines())


NAMES = (
    f"commitlog/{FIRST}",
    f"consumequeue/plain/0/{FIRST}",
    f"consumequeue/{SCHEDULE_TOPIC}/0/{FIRST}",
    f"consumequeue_ext/plain/0/{FIRST}",
    f"timerlog/{FIRST}",
    "checkpoint",
    "queuecheck",
    "config/timercheck",
    "config/topics.json",
    "config/timermetrics",
)
EXTENSION = struct.pack(">hqqh", 22, 5, START_MS, 2) + b"ab" + struct.pack(">hqqh", 20, 5, START_MS, 0) + bytes(99)
OTHERS = ("timerwheel", "index/20231114221320000", "lock", "abort")


def reports_damage(path: Path, data: bytes) -> bool:
    """Whether the lines of a file with these bytes report damage. All lines are printable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    found = list(lines(str(path), with_bodies=True))
    assert all(line.isprintable() for line in found)
    return any(isinstance(line, DamageLine) for line in found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_lines(written: Broker, tmp_path: Path, data: st.DataObject) -> None:
    for name in NAMES:
        original = EXTENSION if "_ext/" in name else (written.root / name).read_bytes()[:4096]
        at = data.draw(st.integers(0, len(original)))
        some = data.draw(st.binary(max_size=30))
        reports_damage(tmp_path / name, original[:at] + some + original[at + len(some) :])


def begin_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 16)


def ends_of(name: str, path: Path) -> set[int]:
    """Return the positions at which a file may end, whole."""
    if name.startswith("timerlog"):
        return set(range(0, 4096, 52))
    if name.startswith("consumequeue/"):
        return set(range(0, 4096, 20))
    if name.startswith("consumequeue_ext/"):
        return {0, 22, 42}
    if name.startswith("commitlog"):
        return {0, *(int(offset) for offset in values(list(lines(str(path), limit=40))[1:], "offset"))}
    if name == "queuecheck":
        data = path.read_bytes()
        sizes = [16 + len(items) for _, items in check.blocks(data, 1000)]
        return {12, *(12 + sum(sizes[:count]) for count in range(len(sizes) + 1))}
    return set()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_that_is_cut_off_is_reported(written: Broker, tmp_path: Path, data: st.DataObject) -> None:
    for name in NAMES:
        original = EXTENSION[:42] if "_ext/" in name else begin_of(written.root / name)
        used = len(original.rstrip(b"\0")) if name.startswith(("queuecheck", "timerlog")) else len(original)
        size = data.draw(st.integers(1, min(4095, used - 1)), label=name)
        ends = ends_of(name, written.root / name)
        end = max((each for each in ends if each <= size), default=0)
        # Of a unit that begins with zeros, nothing may be left but these, as in a file's free part.
        may_be_free = not name.startswith(("commitlog", "consumequeue/"))
        is_free = may_be_free and bool(ends) and not any(original[end:size])
        assert reports_damage(tmp_path / name, original[:size]) == (size not in ends and not is_free), name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_reported(written: Broker, tmp_path: Path, data: st.DataObject) -> None:
    """Where the format has a checksum, or one value only."""
    log = (written.root / "commitlog" / FIRST).read_bytes()
    body = log.index(b"plain 0" * 200)
    checked = (written.root / "checkpoint").read_bytes().rstrip(b"\0")
    blocks = (written.root / "queuecheck").read_bytes().rstrip(b"\0")
    for name, places in {
        f"commitlog/{FIRST}": [*range(body, body + 1400)],
        f"timerlog/{FIRST}": [52 * unit + at for unit in range(60) for at in (0, 1, 2, 3, 12, 13, 14)],
        "checkpoint": [*range(2048, len(checked))],
        "queuecheck": [*range(8), *range(12, len(blocks))],
        f"consumequeue_ext/plain/0/{FIRST}": [0, 1, 18, 19, 22, 23, 40, 41],
    }.items():
        original = EXTENSION[:42] if "_ext/" in name else begin_of(written.root / name)
        at = data.draw(st.sampled_from(places), label=name)
        changed = original[at] ^ data.draw(st.integers(1, 255))
        assert not reports_damage(tmp_path / name, original) or name.startswith("commitlog")
        assert reports_damage(tmp_path / name, original[:at] + bytes((changed,)) + original[at + 1 :]), name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_bytes_are_lines(tmp_path: Path, data: bytes) -> None:
    for name in (*NAMES, *OTHERS):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        for line in lines(str(path), with_bodies=True):
            assert line.isprintable(), line


@pytest.mark.parametrize("name", ["checkpoint", "queuecheck", "topics.json"])
def test_a_huge_file_of_a_small_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(source.MAX_WHOLE + 1)
    assert command.main([str(tmp_path / name)]) == 1
    assert f"{source.MAX_WHOLE + 1} bytes; files of this kind are read up to" in capsys.readouterr().err


def test_a_missing_package_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("users", "acls"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "CURRENT").write_text("MANIFEST-000001\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.main([str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "damaged" not in told.out
    assert told.err.splitlines() == [
        f"{tmp_path}/{name}: a RocksDB database, for which the package rocksdict is missing: pip install 'duemq[auth]'"
        for name in ("acls", "users")
    ]


def test_what_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert command.main([str(tmp_path / "pipe")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'pipe'}: this is not a regular file; copy the bytes into one\n"
