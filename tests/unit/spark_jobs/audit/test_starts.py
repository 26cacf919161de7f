"""The waiting messages that a broker finds when it starts on a store. For duemq the oracle is duemq itself, started on
the files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.levels import service
from duemq.scheduler.levels.delay_offsets import read_delay_offsets
from duemq.scheduler.search import Selection, WaitingMessage, WaitingMessages
from duemq.scheduler.timers.files import small_files
from duemq.spark_jobs.audit.events import RangeEvents
from duemq.spark_jobs.audit.figures import CASE, Figures
from duemq.spark_jobs.audit.matching import match
from duemq.spark_jobs.audit.starts import NEW, OLD, OURS, StartOutcome, starts
from duemq.spark_jobs.store.progress import read_progress
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.storage.config_file import ConfigFile
from duemq.storage.durability.recovery import Recovered
from duemq.storage.errors import StoreFileMissing, StoreFileSize
from duemq.storage.files import OsFiles
from duemq.storage.store import MessageStore, StoreConfig
from tests.support.copies import copy_tree
from tests.unit.broker.commands.test_repair import as_of_apache, remove
from tests.unit.spark_jobs.compact_world import QUEUE_UNITS, SEGMENT, START_MS, TABLE, Broker, new_broker

LEVEL = f"consumequeue/{SCHEDULE_TOPIC}/3"


@pytest.fixture(autouse=True)
def _files_are_let_go_of() -> Iterator[None]:
    yield
    Broker.let_go_of_all()


def starts_of(root: Path) -> dict[str, StartOutcome]:
    """The starts of a store, by broker."""
    store = StoreFiles.open(root)
    progress = read_progress(store, TABLE.text)
    damages = list[tuple[int, int, str]]()
    waits, done = [], []
    for part in plan(store):
        events = RangeEvents(store, part, progress)
        for found in events:
            waits.append(found.waits)
            done.append(found.done)
        assert events.read is not None
        damages += [(int(a), int(b), str(c)) for a, b, c in events.read.damages]
    cases = match(np.concatenate(waits), np.concatenate(done))
    figures = Figures.added([Figures.of(cases[::2], 1000, 0), Figures.of(cases[1::2], 1000, 0)])
    return {each.broker: each for each in starts(store, figures, damages)}


def open_as_a_broker_does(store: MessageStore) -> Recovered:
    """Open a store with the known progress of its queues, see `broker.assembly.storage`."""
    store.inspect()
    root = store.config.root
    saved = read_delay_offsets(ConfigFile(store.files, f"{root}/config/delayOffset.json"), is_needed=False)
    for level, offset in service.reached(store.checkpoint, saved).items():
        store.expect(SCHEDULE_TOPIC, level - 1, offset)
    store.expect(TIMER_TOPIC, 0, small_files.reached(store.checkpoint, store.files, str(root)))
    return store.recover()


def found_by_us(root: Path, broker: Broker) -> int:
    """Number of the waiting messages that duemq has after a start on the store."""
    target = root.parent / f"{root.name}-started"
    copy_tree(root, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MessageStore, "open", open_as_a_broker_does)
        after = Broker(target, broker.clock)
    if after.recovered.is_foreign:
        after.owned.checkpoint()
    after.timers.gather(broker.clock.now_ms())
    pending = WaitingMessages(after.store, after.timers, after.levels)
    found = [each for each in pending.select(Selection(), broker.clock.now_ms()) if isinstance(each, WaitingMessage)]
    return sum(each.message.body != b"soon" for each in found)  # the others were delivered


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker with 160 messages, of which 100 wait: 40 in level 4, 60 in the wheel."""
    broker = new_broker(tmp_path / "store")
    for number in range(40):
        broker.schedule(1, b"soon", f"a{number}")
        broker.schedule(4, b"late", f"b{number}")
        broker.timer(START_MS + 1500, b"soon", f"c{number}")
    for number in range(60):
        broker.timer(START_MS + 3_600_000 + number * 1000, b"late", f"d{number}")
    broker.pass_time(2000)
    broker.send("plain", b"the last record")
    return broker


def apache(broker: Broker) -> Path:
    """The stopped store, as one of RocketMQ's."""
    broker.close()
    as_of_apache(broker.root)
    return broker.root


def test_all_is_found_of_a_store_that_was_stopped(broker: Broker) -> None:
    broker.close()
    found = starts_of(broker.root)
    assert found[OURS] == StartOutcome(OURS, True, 100, 0, 0, [])
    assert found[NEW] == StartOutcome(NEW, False, 100, 0, 0, [])
    assert found[OLD].misses == 60
    assert found[OLD].reasons == ["4.9.7 has no timers: 60 messages wait in the timer wheel"]


def test_all_is_found_of_a_store_that_was_killed(broker: Broker) -> None:
    broker.owned.checkpoint()
    broker.schedule(4, b"behind the checkpoint", "e")
    broker.owned.store.abandon()
    found = starts_of(broker.root)
    assert (found[OURS].finds, found[NEW].finds) == (101, 101)


def test_one_of_ours_finds_all_of_its_own(broker: Broker) -> None:
    broker.close()
    for name in (f"consumequeue/{SCHEDULE_TOPIC}", "timerlog", "timerwheel", "config/delayOffset.json"):
        remove(broker.root / name)
    assert starts_of(broker.root)[OURS] == StartOutcome(OURS, True, 100, 0, 0, [])
    assert found_by_us(broker.root, broker) == 100


def test_nothing_is_missed_of_apaches(broker: Broker) -> None:
    root = apache(broker)
    found = starts_of(root)
    assert found[NEW] == StartOutcome(NEW, True, 100, 0, 0, [])
    assert found[OURS] == StartOutcome(OURS, False, 100, 0, 0, [])


def zeroed(path: Path, start: int = 0, end: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    end = len(data) if end is None else end
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


@pytest.mark.parametrize(("first", "last"), [(0, 50), (30, 40), (39, 50)])
def test_a_queue_of_a_level_that_lacks_units(broker: Broker, first: int, last: int) -> None:
    """In a level's queue that lacks units RocketMQ uses those before the first gap; duemq, taking over, those that
    exist and are in order."""
    root = apache(broker)
    zeroed(root / LEVEL / f"{0:020}", first * 20, last * 20)
    found = starts_of(root)
    lacks = "unit 39" if first == 39 else f"units {first} to 39"
    why = f"{LEVEL} lacks {lacks}, of messages that wait in level 4"
    assert found[NEW] == StartOutcome(NEW, True, 60 + first, 40 - first, 0, [why])
    assert found[OLD].reasons[0] == why
    assert found[OURS].finds == found_by_us(root, broker)


def test_a_queue_that_others_know_to_be_longer_is_made_again_by_us(broker: Broker) -> None:
    root = apache(broker)
    remove(root / f"consumequeue/{SCHEDULE_TOPIC}")
    found = starts_of(root)
    assert (found[NEW].misses, found[OURS].misses) == (40, 0)
    assert found_by_us(root, broker) == 100


def test_without_any_queue_all_are_made_again(broker: Broker) -> None:
    root = apache(broker)
    remove(root / "consumequeue")
    found = starts_of(root)
    assert (found[NEW].misses, found[OURS].misses) == (0, 0)
    assert found_by_us(root, broker) == 100


def test_after_a_kill_apaches_brokers_make_the_end_again(tmp_path: Path) -> None:
    """After a kill Apache's brokers make the end again, from the last file on whose first record is three seconds older
    than the checkpoint."""
    broker = new_broker(tmp_path / "store")
    for number in range(200):
        broker.schedule(4, b"x" * 1000, f"k{number}")
        broker.clock.advance(1000)
    broker.send("plain", b"the last record")
    begun = [
        struct.unpack_from(">q", path.read_bytes(), 56)[0] for path in sorted((broker.root / "commitlog").iterdir())
    ]
    assert len(begun) > 3
    root = apache(broker)
    remove(root / LEVEL)
    assert starts_of(root)[OLD].misses == 200, "stopped"
    (root / "abort").touch()
    (root / "checkpoint").write_bytes(struct.pack(">qq", begun[2] + 3000, begun[2] + 9000).ljust(4096, b"\0"))
    missed = starts_of(root)[OLD].misses
    assert missed == sum(at < 2 * SEGMENT for at in _physical_offsets(root))
    (root / "checkpoint").write_bytes(struct.pack(">qq", begun[2] + 2999, begun[2] + 9000).ljust(4096, b"\0"))
    assert starts_of(root)[OLD].misses == sum(at < SEGMENT for at in _physical_offsets(root))


def _physical_offsets(root: Path) -> list[int]:
    found = []
    for path in sorted((root / "commitlog").iterdir()):
        data, at = path.read_bytes(), 0
        while at + 8 < len(data) and struct.unpack_from(">iI", data, at)[1] == 0xDAA320A7:
            found.append(int(path.name) + at)
            at += struct.unpack_from(">i", data, at)[0]
    return found


@pytest.mark.parametrize(
    ("lost", "missed", "why"),
    [
        (("timerlog",), 60, "timerlog/ is missing, and with it 60 messages that wait"),
        (("timerlog", "timerwheel"), 60, "timerlog/ is missing, and with it 60 messages that wait"),
        (("timerwheel",), 0, None),
        ((f"consumequeue/{TIMER_TOPIC}",), 60, f"consumequeue/{TIMER_TOPIC}/0 is missing: 5.3.3 delivers nothing"),
        (("config/timercheck",), 0, "config/timercheck is missing: the timer topic is read from its start"),
        ((f"consumequeue/{TIMER_TOPIC}", "config/timercheck"), 60, f"consumequeue/{TIMER_TOPIC}/0 lacks units 40 to"),
    ],
)  # fmt: skip
def test_timers_of_apaches(broker: Broker, lost: tuple[str, ...], missed: int, why: str | None) -> None:
    root = apache(broker)
    for name in lost:
        remove(root / name)
    found = starts_of(root)
    assert found[NEW].misses == missed
    assert found[NEW].finds == 100 - missed
    assert any(reason.startswith(why) for reason in found[NEW].reasons) if why else found[NEW].reasons == []
    assert found[OURS].finds == found_by_us(root, broker)


@pytest.mark.parametrize(("first", "is_killed", "missed"), [(10, False, 10), (10, True, 10), (160, False, 90)])
def test_a_gap_in_a_long_queue(tmp_path: Path, first: int, missed: int, *, is_killed: bool) -> None:
    """In a queue with a gap RocketMQ uses the units before the gap in its last three files, and believes earlier files;
    a queue that knows later messages gets none of earlier ones, also after a kill."""
    broker = new_broker(tmp_path / "store")
    for number in range(5 * QUEUE_UNITS):
        broker.schedule(4, b"late", f"k{number}")
    broker.send("plain", b"the last record")
    root = apache(broker)
    number, at = divmod(first, QUEUE_UNITS)
    zeroed(root / LEVEL / f"{number * QUEUE_UNITS * 20:020}", at * 20, at * 20 + 200)
    if is_killed:
        (root / "abort").touch()
        (root / "checkpoint").write_bytes(bytes(4096))
    assert starts_of(root)[OLD].misses == missed


def test_a_lost_wheel_is_made_again_of_the_end_of_the_timer_log(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    for number in range(400):
        broker.timer(START_MS + 3_600_000 + number * 1000, b"late", f"d{number}")
    broker.run()
    broker.send("plain", b"the last record")
    root = apache(broker)
    assert starts_of(root)[NEW].misses == 0
    remove(root / "timerwheel")
    files = sorted(path.name for path in (root / "timerlog").iterdir())
    assert len(files) > 3
    # 100 units of 52 bytes do not fit into 5200 bytes together with the end of a file.
    assert starts_of(root)[NEW].misses == (len(files) - 2) * 99
    assert starts_of(root)[OURS].misses == 0


def test_levels_whose_progress_is_lost_come_again(broker: Broker) -> None:
    root = apache(broker)
    remove(root / "config/delayOffset.json")
    found = starts_of(root)
    why = "config/delayOffset.json is missing: 5.3.3 starts level 1 at 0 and delivers 40 again"
    assert found[NEW] == StartOutcome(NEW, True, 100, 0, 40, [why])


def test_what_lies_behind_a_damage_in_the_last_files_goes(broker: Broker) -> None:
    root = apache(broker)
    waiting = sorted(_physical_offsets(root))
    at = waiting[100]
    zeroed(root / "commitlog" / f"{0:020}", at, at + 60)
    found = starts_of(root)
    assert found[NEW].misses > 0
    assert f"the commitlog is damaged at {at}: a start cuts off what lies behind" in found[NEW].reasons[-1]


def test_nothing_is_said_of_a_store_that_is_open(broker: Broker) -> None:
    store = StoreFiles.open(broker.root)
    store.is_running = True
    assert starts(store, Figures.of(np.zeros(0, CASE), 1000, 0), []) == []


def test_duemq_does_not_start_without_a_file_that_its_checkpoint_goes_by(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    for number in range(400):
        broker.timer(broker.clock.now_ms() + 90_000_000 + number, b"x" * 500)
    broker.schedule(4, b"waits")
    broker.run()
    broker.close()
    root = tmp_path / "store"
    found = starts_of(root)[OURS]
    assert (found.misses, found.reasons) == (0, [])
    for path in sorted((root / "commitlog").iterdir()):
        is_gone = path.name != f"{0:020}"
        if is_gone:
            path.unlink()
    store = MessageStore(
        StoreConfig(str(root), commitlog_segment_size=SEGMENT, queue_segment_size=QUEUE_UNITS * 20),
        OsFiles(),
        ("127.0.0.1", 10911),
        TABLE.deliver_time,
    )
    with pytest.raises(StoreFileMissing) as caught:
        store.open()
    found = starts_of(root)[OURS]
    assert found.wrote_it
    assert (found.finds, found.misses > 0) == (0, True)
    (reason,) = found.reasons
    assert Path(caught.value.path).name in reason


def refused_by_us(root: Path) -> str:
    """The file that keeps duemq from starting; empty if it starts."""
    store = MessageStore(
        StoreConfig(str(root), commitlog_segment_size=SEGMENT, queue_segment_size=QUEUE_UNITS * 20),
        OsFiles(),
        ("127.0.0.1", 10911),
        TABLE.deliver_time,
    )
    try:
        store.inspect()
    except (StoreFileSize, StoreFileMissing) as error:
        return Path(error.path).name
    finally:
        store.abandon()
    return ""


@pytest.mark.parametrize("is_apaches", [False, True])
@pytest.mark.parametrize("kept", [0, 1000])
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_commitlog_file_of_another_size_keeps_all_from_starting(
    broker: Broker, *, number: int, kept: int, is_apaches: bool
) -> None:
    """A commitlog file of another size keeps all brokers from starting: for Apache's brokers by
    `MappedFileQueue.doLoad` of 4.9.7 and 5.3.3."""
    for _ in range(120):
        broker.send("plain", b"x" * 1000)
    if is_apaches:
        apache(broker)
    else:
        broker.close()
    path = sorted((broker.root / "commitlog").iterdir())[number]
    path.open("r+b").truncate(kept)
    found = starts_of(broker.root)
    why = f"commitlog/{path.name} has {kept} bytes, but others have {SEGMENT}: {{}} does not start. Put the whole file"
    is_last_empty = number == -1 and kept == 0
    for each in (OLD, NEW, OURS):
        is_refused = any(reason.startswith(why.format(each)) for reason in found[each].reasons)
        assert is_refused == (each == OLD or not is_last_empty)
        assert not is_refused or found[each].finds == 0
    if not is_last_empty:
        assert refused_by_us(broker.root) == path.name


@pytest.mark.parametrize("is_apaches", [False, True])
def test_a_missing_file_in_the_middle_keeps_us_from_starting(broker: Broker, *, is_apaches: bool) -> None:
    for _ in range(120):
        broker.send("plain", b"x" * 1000)
    if is_apaches:
        apache(broker)
    else:
        broker.close()
    (broker.root / "commitlog" / f"{SEGMENT:020d}").unlink()
    found = starts_of(broker.root)
    assert found[OURS].finds == 0
    assert found[OURS].reasons == [f"commitlog/{SEGMENT:020d} is missing: duemq does not start. Put the file back"]
    assert not any("does not start" in reason for reason in found[NEW].reasons)
    assert refused_by_us(broker.root)
