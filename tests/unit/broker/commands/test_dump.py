"""Files of a store as lines of text. The oracle is the broker that wrote the store: the lines show its content."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duemq.broker.dump import __main__ as command
from duemq.broker.dump import source
from duemq.broker.dump.kinds import lines
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.timers.files import wheel
from duemq.storage.queues import index_file
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
    """Return the command's output for a file, without the first line."""
    assert command.main([str(path), *options]) == 0
    return capsys.readouterr().out.splitlines()[1:]


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
    assert found[5] == f"offset={at[5]} zeros, {size[5] + 2} bytes" or found[5].startswith(f"offset={at[5]} zeros")
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
    assert found[0] == f"address={-(2**63)} offset=0 damaged: size 7, and a bitmap of 0 bytes"
    assert found[1].endswith(" damaged: zeros, 40 bytes")
    assert values(found[2:-1], "tagsCode") == ["112785"] * 57


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
    assert found[4:6] == [before[4], "position=260 zeros, 107 bytes"]
    assert found[6:] == before[7:]
    path = store / "timerwheel"
    slots = np.fromfile(path, wheel.SLOT)
    number = int(np.flatnonzero(slots["second"])[0])
    damage(path, number * wheel.SLOT.itemsize, (int(slots["second"][number]) + 1).to_bytes(8, "big"))
    os.truncate(path, wheel.FILE_SIZE - 10)
    found = rows(path, capsys=capsys)
    assert found[0].startswith(f"damaged: {wheel.FILE_SIZE - 10} bytes;")
    assert sum(line.startswith(f"misplaced: in slot {number} ") for line in found) == 1


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
    damage(store / "checkpoint", 2050, b"x")
    assert rows(store / "checkpoint", capsys=capsys)[1].startswith("what duemq adds is missing, damaged, or ")
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
    assert rows(store / "config/timercheck", capsys=capsys) == ["damaged: 50 bytes are too few"]


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


def test_whoever_has_seen_enough_is_not_told_of_it(written: Broker) -> None:
    run = subprocess.run(
        f"{sys.executable} -m duemq.broker.dump {written.root} --body | head -n 1",
        shell=True, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.startswith(f"{written.root}/")
    assert run.stderr == ""


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_lines(written: Broker, tmp_path: Path, data: st.DataObject) -> None:
    for name in NAMES:
        original = EXTENSION if "_ext/" in name else (written.root / name).read_bytes()[:4096]
        at = data.draw(st.integers(0, len(original)))
        some = data.draw(st.binary(max_size=30))
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(original[:at] + some + original[at + len(some) :])
        for line in lines(str(path), with_bodies=True):
            assert line.isprintable(), line


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_what_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert command.main([str(tmp_path / "pipe")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'pipe'}: this is not a regular file; copy the bytes into one\n"
