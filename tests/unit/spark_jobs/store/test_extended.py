"""Jobs on stores with consumequeue_ext do as on the same stores without; also where parts of it are lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from duemq.protocol.topics import TIMER_TOPIC
from duemq.spark_jobs.archive.archive import archive, restore
from duemq.spark_jobs.audit.agreement import Agreement
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import walks
from tests.support.copies import copy_tree
from tests.support.extended import extend, extensions
from tests.unit.broker.commands.test_repair import as_of_apache
from tests.unit.spark_jobs.compact.test_compact import HOUR_MS, busy, run, tree
from tests.unit.spark_jobs.compact_world import Broker, as_apache, new_broker
from tests.unit.spark_jobs.store.test_waiting import broker_says, jobs_say


def removed(path: Path) -> None:
    path.unlink()


def flipped(path: Path) -> None:
    """Change a byte in the tags codes of the first ten units, each time another one."""
    with path.open("r+b") as file:
        data = bytearray(file.read(200))
        for number in range(len(data) // 20):
            data[20 * number + 2 + number % 8] ^= 1 + number
        file.seek(0)
        file.write(data)


DAMAGE = [lambda path: None, removed, flipped]
IDS = ["whole", "removed", "flipped"]


def extended(broker: Broker, name: str, damage: Callable[[Path], None]) -> Path:
    """A copy of a stopped store, as RocketMQ leaves it with the extension on."""
    root = copy_tree(broker.root, broker.root.parent / name)
    assert extend(root)
    as_apache(root)
    (root / "queuecheck").unlink()
    for path in extensions(root):
        damage(path)
    return root


@pytest.mark.parametrize("damage", DAMAGE, ids=IDS)
def test_a_broker_and_the_jobs_find_the_messages_that_wait(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    root = extended(broker, "extended", damage)
    said = jobs_say(root)
    after = Broker(root, broker.clock)
    assert said == broker_says(after)
    assert len(said) == 60
    after.pass_time(HOUR_MS - 2000)
    assert len(after.bodies()) == 240
    after.pass_time(HOUR_MS)
    assert len(after.bodies()) == 300
    after.close()


@pytest.mark.parametrize("damage", DAMAGE, ids=IDS)
def test_timers_that_are_not_in_the_wheel_yet(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    broker = new_broker(tmp_path / "old")
    broker.timer(broker.clock.now_ms() + 5000, b"in the wheel")
    broker.run()
    broker.owned.checkpoint()
    for number in range(3):
        broker.timer(broker.clock.now_ms() + 5000, b"not yet %d" % number)
    broker.store.ensure_queue(TIMER_TOPIC, 0).write_tail()
    root = copy_tree(broker.root, tmp_path / "extended")
    extend(root)
    as_apache(root)
    (root / "queuecheck").unlink()
    for path in extensions(root):
        damage(path)
    after = Broker(root, broker.clock)
    after.pass_time(4999)
    assert after.bodies() == []
    after.pass_time(1)
    assert sorted(after.bodies()) == [b"in the wheel", *(b"not yet %d" % number for number in range(3))]
    after.close()


@pytest.mark.parametrize("damage", DAMAGE, ids=IDS)
def test_compaction_writes_queues_without_extensions(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    result = run(extended(broker, "extended", damage), tmp_path / "new")
    assert result.removed == {"delivered": 240}
    assert not (tmp_path / "new/consumequeue_ext").exists()
    store = StoreFiles.open(str(tmp_path / "new"))
    codes = np.concatenate([store.stored_units(file)["tags_code"] for file in store.queue_files()]).astype(np.int64)
    assert damage in DAMAGE[1:] or (codes >= 0).all()
    after = Broker(tmp_path / "new", broker.clock)
    after.pass_time(HOUR_MS - 2000)
    assert len(after.bodies()) == 240
    after.pass_time(HOUR_MS)
    assert len(after.bodies()) == 300
    after.close()


def test_a_compaction_makes_up_no_delay(tmp_path: Path) -> None:
    """RocketMQ's records have no deliver times: where the extension is lost, only the broker's table tells them."""
    broker = new_broker(tmp_path / "old")
    for number in range(3):
        broker.schedule(4, b"level 4, %d" % number)
        broker.send("plain", b"x", "TAGS\x01t\x02")
    broker.close()
    root = copy_tree(broker.root, tmp_path / "apache")
    as_of_apache(root)
    assert extend(root)
    shutil.rmtree(root / "consumequeue_ext")
    run(root, tmp_path / "new")
    after = Broker(tmp_path / "new", broker.clock)
    after.pass_time(HOUR_MS - 1)
    assert after.bodies() == []
    after.pass_time(1)
    assert len(after.bodies()) == 3
    after.close()


def test_an_archive_has_the_extensions(tmp_path: Path) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    root = extended(broker, "extended", DAMAGE[0])
    archive(str(root), str(tmp_path / "archive"), workers=1)
    restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    assert tree(root, but="index") == tree(tmp_path / "back", but="index")


def test_the_table_of_consume_queues_and_the_audit_see_tags_codes(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(200):
        broker.send("plain", b"x", f"TAGS\x01t{number % 5}\x02")
        broker.schedule(1 + number % 2, b"y")
    broker.timer(broker.clock.now_ms() + 5000, b"z")
    broker.close()
    plain = StoreFiles.open(str(broker.root))
    root = extended(broker, "extended", DAMAGE[0])
    store = StoreFiles.open(str(root))
    for a, b in zip(plain.queue_files(), store.queue_files(), strict=True):
        assert (a.topic, a.queue_id, a.first_unit) == (b.topic, b.queue_id, b.first_unit)
        assert plain.units(a).tobytes() == store.units(b).tobytes()
        assert (
            plain.units_at(a.topic, a.queue_id, 3, 40).tobytes() == store.units_at(a.topic, a.queue_id, 3, 40).tobytes()
        )
    agreement = Agreement(store)
    for part in plan(store):
        for walk in walks(store, part, check_crc=False):
            assert agreement.wrong(walk.records) == {}
    shutil.rmtree(root / "consumequeue_ext")
    for a, b in zip(plain.queue_files(), store.queue_files(), strict=True):
        assert plain.units(a).tobytes() == store.units(b).tobytes()
