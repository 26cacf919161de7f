"""Records whose properties, queue or queue offset are wrong are found by their consume queues."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from duemq.protocol.records import record
from duemq.spark_jobs.audit.agreement import Agreement
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import walks
from tests.support.messages import HOST
from tests.unit.spark_jobs.compact_world import HOST_V6, Broker, new_broker

TEXT = "TAGS\x01{}\x02KEYS\x01k"


def filled(root: Path) -> Broker:
    broker = new_broker(root)
    for number in range(300):
        text = TEXT.format(f"t{number % 5}") if number % 3 else "KEYS\x01k"
        host = HOST_V6 if number % 7 else HOST
        broker.send(f"orders-{number % 2}", b"%03d" % number * 40, text, number % 4, host=host)
        if number % 10 == 0:
            broker.schedule(number % 3 + 1, b"later", f"key{number}", "orders-1")
            broker.timer(broker.clock.now_ms() + 5000, b"later", f"key{number}", "orders-1")
        broker.clock.advance(20)
        broker.run()
    return broker


def wrong(root: Path) -> dict[int, str]:
    """The reasons for disagreement, by physical offset."""
    store = StoreFiles.open(root)
    agreement, found = Agreement(store), dict[int, str]()
    for part in plan(store):
        for walk in walks(store, part, check_crc=False):
            physical_offsets = walk.records.physical_offset.tolist()
            found |= {physical_offsets[row]: why for row, why in agreement.wrong(walk.records).items()}
    return found


def test_of_a_store_that_is_right_nothing_is_told(tmp_path: Path) -> None:
    broker = filled(tmp_path)
    assert wrong(tmp_path) == {}, "while it runs"
    broker.close()
    assert wrong(tmp_path) == {}
    shutil.rmtree(tmp_path / "consumequeue" / "orders-0" / "2")
    assert wrong(tmp_path) == {}, "an expired queue"


def test_of_a_topic_that_was_deleted_and_made_again_nothing_is_told(tmp_path: Path) -> None:
    broker = filled(tmp_path)
    broker.owned.flush()
    shutil.rmtree(broker.store.forget_topic("orders-0") or "")
    broker.store.removed_topic("orders-0")
    for number in range(200):
        broker.send("orders-0", b"again%d" % number, TEXT.format("x"), 2)
    broker.close()
    assert wrong(tmp_path) == {}


def _topic(data: bytes, message: record.StoredMessage) -> int:
    return data.index(b"orders-", 88 + len(message.body)) + 7


FLIPS: dict[str, Callable[[bytes, record.StoredMessage], int]] = {
    "queue id": lambda data, message: 15,
    "queue offset": lambda data, message: 27,
    "a queue offset that is negative then": lambda data, message: 20,
    "topic": _topic,
    "tags": lambda data, message: data.rindex(b"TAGS\x01") + 6,
    "name of the tags": lambda data, message: data.rindex(b"TAGS\x01") + 1,
}


def test_a_zero_byte_in_a_topic_is_found(tmp_path: Path) -> None:
    """A zero byte in a topic is found, as no directory can have that name."""
    filled(tmp_path).close()
    path = min((tmp_path / "commitlog").iterdir())
    data = path.read_bytes()
    one = record.decode(data[: int.from_bytes(data[:4], "big")])
    at = _topic(data, one) - 3
    path.write_bytes(data[:at] + b"\0" + data[at + 1 :])
    assert list(wrong(tmp_path)) == [0]


@pytest.mark.parametrize("flip", FLIPS)
def test_a_flipped_byte_is_found(tmp_path: Path, flip: str) -> None:
    broker = filled(tmp_path)
    queue = broker.store.ensure_queue("orders-1", 3)
    physical_offsets = [unit[:2] for at in range(30, 60) if (unit := queue.unit(at)) is not None]
    records = [(at, bytes(broker.store.log.read(at, size) or b"")) for at, size in physical_offsets]
    physical, data = next((at, data) for at, data in records if b"TAGS" in data)
    message = record.decode(data)
    broker.close()
    base = physical // (64 << 10) * (64 << 10)
    with (tmp_path / "commitlog" / f"{base:020}").open("r+b") as file:
        file.seek(physical - base + FLIPS[flip](data, message))
        old = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([old ^ (0x80 if "negative" in flip else 1)]))
    found = wrong(tmp_path)
    assert list(found) == [physical]
    said = f"orders-1/3/{message.queue_offset}"
    assert said in found[physical] or "tags" in found[physical]


def test_many_that_no_queue_lists_cost_no_search_of_all_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    shutil.rmtree(tmp_path / "consumequeue" / "orders-1")
    monkeypatch.setattr("duemq.spark_jobs.audit.agreement._MAX_SEARCHED", 10)
    reads = []
    read = Agreement._unit

    def counted(self: Agreement, path: str, at: int) -> tuple[int, int]:
        reads.append(path)
        return read(self, path, at)

    monkeypatch.setattr(Agreement, "_unit", counted)
    assert wrong(tmp_path) == {}
    files = len(StoreFiles.open(tmp_path).queue_files())
    assert len(reads) < (10 + 2) * files * 10
