"""Checkpoint, config files, retention."""

from __future__ import annotations

import time
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.storage.clock import ManualClock
from duemq.storage.config_file import ConfigFile, encode_table
from duemq.storage.durability import checkpoint
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.durability.health import Verdict
from duemq.storage.durability.owner import EXPIRE_SECONDS
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.errors import StoreFormatError, StoreFull
from duemq.storage.store import MessageStore, StoreConfig
from tests.crash.simulated_files import SimulatedFiles
from tests.support.store import OwnedStore
from tests.unit.storage.conftest import LEVELS, append

HOUR_MS = 3_600_000
TIMES = st.integers(0, 2**62)


@given(TIMES, TIMES, TIMES, TIMES)
def test_a_checkpoint_comes_back(physic: int, logic: int, index: int, offset: int) -> None:
    files = SimulatedFiles()
    checkpoint.save(files, "/c", Checkpoint(physic, logic, index, offset))
    assert checkpoint.load(files, "/c") == Checkpoint(physic, logic, index, offset)
    assert len(files.read_whole("/c") or b"") == 4096


def test_our_part_counts_only_as_long_as_rocketmq_left_the_rest_alone() -> None:
    files = SimulatedFiles()
    checkpoint.save(files, "/c", Checkpoint(10, 20, 0, 77))
    data = bytearray(files.read_whole("/c") or b"")
    data[0:8] = (11).to_bytes(8, "big")
    files.write_whole("/c", bytes(data))
    assert checkpoint.load(files, "/c") == Checkpoint(11, 20, 0, None, is_foreign=True)


def test_what_rocketmq_5_keeps_in_the_file_stays() -> None:
    files = SimulatedFiles()
    files.write_whole("/c", bytes(24) + b"theirs, 16 bytes" + bytes(4056))
    checkpoint.save(files, "/c", Checkpoint(1, 2, 3, 4))
    assert (files.read_whole("/c") or b"")[24:40] == b"theirs, 16 bytes"


def test_a_damaged_checkpoint_is_no_checkpoint() -> None:
    files = SimulatedFiles()
    checkpoint.save(files, "/c", Checkpoint(10, 20, 0, 77))
    data = bytearray(files.read_whole("/c") or b"")
    data[2060] ^= 1
    files.write_whole("/c", bytes(data))
    assert checkpoint.load(files, "/c").recovery_offset is None


def test_a_checkpoint_that_starts_over_keeps_its_notes() -> None:
    files = SimulatedFiles()
    checkpoint.save(files, "/c", Checkpoint(10, 20, 5, 77, {"levels": b"note"}))
    changed = checkpoint.start_over(files, "/c", checkpoint.load(files, "/c"))
    notes = {"levels": b"note", checkpoint.REBUILDING: b""}
    assert checkpoint.load(files, "/c") == changed == Checkpoint(0, 0, 5, 77, notes)


def test_rocketmqs_checkpoint_that_starts_over_stays_rocketmqs() -> None:
    files = SimulatedFiles()
    files.write_whole("/c", (10).to_bytes(8, "big") + (20).to_bytes(8, "big") + (5).to_bytes(8, "big") + b"x" * 4072)
    changed = checkpoint.start_over(files, "/c", checkpoint.load(files, "/c"))
    assert checkpoint.load(files, "/c") == changed == Checkpoint(0, 0, 5, None, is_foreign=True)
    assert (files.read_whole("/c") or b"")[24:] == b"x" * 4072
    files.remove("/c")
    assert checkpoint.start_over(files, "/c", Checkpoint()) == Checkpoint()
    assert files.read_whole("/c") is None


def test_a_table_is_written_with_its_edition_before_beside_it() -> None:
    files = SimulatedFiles()
    table = ConfigFile(files, "/config/t.json")
    assert table.read() == {}
    table.write({"a": 1})
    table.write({"a": 2})
    assert table.read() == {"a": 2}
    assert ConfigFile(files, "/config/t.json.bak").read() == {"a": 1}


def test_rocketmqs_own_text_is_read() -> None:
    files = SimulatedFiles()
    files.write_whole("/t.json", b'{\n\t"offsetTable":{"gold@g":{0:38,1:38\n\t\t}\n\t}\n}')
    assert ConfigFile(files, "/t.json").read() == {"offsetTable": {"gold@g": {"0": 38, "1": 38}}}


@pytest.mark.parametrize("damaged", [None, b"", b"  \n", b"{broken", b"[1]"])
def test_the_backup_stands_in_for_a_damaged_table(damaged: bytes | None) -> None:
    files = SimulatedFiles()
    files.write_whole("/t.json.bak", b'{"a":1}')
    if damaged is not None:
        files.write_whole("/t.json", damaged)
    assert ConfigFile(files, "/t.json").read() == {"a": 1}


def test_one_flipped_bit_anywhere_is_found() -> None:
    """A flipped bit anywhere is noticed, and the previous edition read, or makes no difference."""
    files = SimulatedFiles()
    file = ConfigFile(files, "/t.json")
    before, table = {"offsetTable": {"T@g": {"0": 17}}}, {"offsetTable": {"T@g": {"0": 38, "1": 4}, "U@g": {}}}
    file.write(before)
    file.write(table)
    text = files.read_whole("/t.json") or b""
    backups = 0
    for at in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[at] ^= 1 << bit
            files.write_whole("/t.json", bytes(damaged))
            found = ConfigFile(files, "/t.json").read()
            backups += found == before
            assert found == before or found["offsetTable"] == table["offsetTable"], (at, bit)
    assert backups > 8 * (len(text) - 30), "only a flip in the name of the checksum may pass"


TABLES: dict[str, dict[str, Any]] = {
    "topics.json": {"topicConfigTable": {"T": {"topicName": "T"}}},
    "subscriptionGroup.json": {"subscriptionGroupTable": {"g": {"groupName": "g"}}},
    "consumerOffset.json": {"offsetTable": {"T@g": {"0": 38}}},
    "delayOffset.json": {"offsetTable": {"1": 3}},
    "kvConfig.json": {"configTable": {}},
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("other", TABLES)
def test_the_table_of_another_file_is_not_believed(name: str, other: str) -> None:
    files = SimulatedFiles()
    ConfigFile(files, f"/{other}").write(TABLES[other])
    text = files.read_whole(f"/{other}") or b""
    files.write_whole(f"/{name}", text)
    file = ConfigFile(files, f"/{name}")
    if name == other:
        assert file.read() == TABLES[name]
        return
    with pytest.raises(StoreFormatError, match=f"/{name}: .* is the table of another file"):
        file.read()
    files.write_whole(f"/{name}.bak", b'{"dataVersion": {}}')
    assert (file.read(), file.is_newest) == ({"dataVersion": {}}, False)


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_earlier_versions_and_of_apaches_broker_are_read_where_they_belong(name: str) -> None:
    files = SimulatedFiles()
    path = f"/{name}"
    for table in TABLES.values():
        is_alike = table.keys() == TABLES[name].keys()
        rest = encode_table(table, path).split(b"\n", 2)[2]
        for head in (b'"crc32": %d,\n' % zlib.crc32(rest), b""):
            files.write_whole(path, b"{\n " + head + rest)
            if is_alike:
                assert ConfigFile(files, path).read() == table
                continue
            with pytest.raises(StoreFormatError, match=f"{path}: is another table"):
                ConfigFile(files, path).read()


def test_a_table_that_cannot_be_read_stops_the_start() -> None:
    files = SimulatedFiles()
    files.write_whole("/t.json", b"{broken")
    with pytest.raises(StoreFormatError, match=r"/t\.json: JSON"):
        ConfigFile(files, "/t.json").read()


# --- retention


def aged_store(hours: int, used: float, **settings: object) -> tuple[OwnedStore, SimulatedFiles]:
    """A store with one file of messages per hour, all covered by a checkpoint; the next look at expiry is at 12
    o'clock."""
    noon = int(time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1)) * 1000)
    files = SimulatedFiles()
    config = StoreConfig("/s", commitlog_segment_size=4096, queue_segment_size=400)
    store = MessageStore(config, files, ("127.0.0.1", 10911), LEVELS.deliver_time)
    store.open()
    retention = RetentionConfig(**settings)  # type: ignore[arg-type]
    owned = OwnedStore(store, ManualClock(noon - int(EXPIRE_SECONDS * 1000)), retention=retention)
    for number in range(hours):
        append(store, "t", number % 2, bytes(3000), now_ms=noon - (hours - number) * HOUR_MS)
    owned.checkpoint()
    files.used = used
    return owned, files


def test_files_go_when_their_youngest_message_is_too_old_but_only_at_the_hour() -> None:
    owned, files = aged_store(10, 0.3, reserved_hours=4)
    owned.expire()
    assert (owned.store.log.begin, len(files.list("/s/commitlog"))) == (0, 10)
    owned, files = aged_store(10, 0.3, reserved_hours=4, delete_when="04;12")
    owned.expire()
    assert owned.store.log.begin == 4096 * 5, "the sixth file's first message is 5 hours old, the one after it 4"
    assert len(files.list("/s/commitlog")) == 5


def test_a_fuller_disk_makes_them_go_at_any_hour() -> None:
    owned, _ = aged_store(10, 0.76, reserved_hours=4)
    owned.expire()
    assert owned.store.log.begin == 4096 * 5
    assert owned.store.health.verdict is Verdict.HEALTHY


def test_a_still_fuller_disk_takes_younger_files_one_at_a_time() -> None:
    owned, _ = aged_store(10, 0.86, reserved_hours=72)
    owned.expire()
    assert owned.store.log.begin == 4096
    owned.expire()
    assert owned.store.log.begin == 8192
    owned, _ = aged_store(10, 0.86, reserved_hours=72, clean_forcibly=False)
    owned.expire()
    assert owned.store.log.begin == 0


def test_a_full_disk_refuses_messages_until_there_is_room() -> None:
    owned, files = aged_store(3, 0.91)
    owned.expire()
    with pytest.raises(StoreFull, match="91% full"):
        append(owned.store, "t", 0, b"x")
    files.used = 0.5
    owned.expire()
    append(owned.store, "t", 0, b"x")


def test_the_file_being_written_stays_whatever_happens() -> None:
    owned, _ = aged_store(3, 0.95, reserved_hours=0)
    for _ in range(10):
        owned.expire()
    log = owned.store.log
    assert 0 < log.begin <= log.end - 1
    assert owned.store.message_at(log.begin) is not None


def test_queues_forget_what_the_commitlog_forgot() -> None:
    owned, files = aged_store(60, 0.76, reserved_hours=4)
    for _ in range(10):
        owned.expire()
    queue = owned.store.ensure_queue("t", 0)
    unit = queue.unit(queue.min_offset)
    assert unit is not None
    assert unit[0] >= owned.store.log.begin
    assert files.list("/s/consumequeue/t/0")[0] == f"{400:020}"
