"""`duemq store repair`: the derived files of a store, made anew from its commitlog.

The oracle is the broker that wrote the store, while it still ran: the messages waiting then have to wait in the
repaired store, and those delivered must not be delivered again. RocketMQ's records name no origin: a store as its
broker leaves it is one of duemq's with that field set to 0 in all records."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from duemq.broker.errors import RepairError
from duemq.broker.repair import index as module_index
from duemq.broker.repair import repair as module
from duemq.broker.repair.cli import main
from duemq.broker.repair.repair import Report, repair
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.levels import runs, service
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.search import Selection, WaitingMessage, WaitingMessages
from duemq.scheduler.timers.config import Cancelled
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.storage.clock import ManualClock, look
from duemq.storage.durability import checkpoint
from duemq.storage.durability.jobs import Lane
from duemq.storage.errors import StoreFormatError
from duemq.storage.files import OsFiles
from tests.soak import examples
from tests.support.copies import copy_tree, data_of
from tests.support.extended import extend
from tests.unit.spark_jobs import compact_world
from tests.unit.spark_jobs.compact_world import QUEUE_UNITS, SEGMENT, START_MS, TABLE, Broker, new_broker

SETTINGS = {
    "messageDelayLevel": TABLE.text,
    "mappedFileSizeConsumeQueue": str(QUEUE_UNITS * 20),
    "mappedFileSizeTimerLog": "5200",
}
SIZES = {name: value for name, value in SETTINGS.items() if name.startswith("mappedFile")}
PREPARED_AT = 76
DERIVED = (
    "consumequeue",
    f"consumequeue/{SCHEDULE_TOPIC}",
    f"consumequeue/{TIMER_TOPIC}",
    "consumequeue/orders",
    "timerlog",
    "timerwheel",
    "checkpoint",
    "queuecheck",
    "config/delayOffset.json",
    "config/timercheck",
    "config/timermetrics",
)


@pytest.fixture(autouse=True)
def _files_are_let_go_of() -> Iterator[None]:
    yield
    Broker.let_go_of_all()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore logging: the command turns it off, and other tests look at logs."""
    yield
    structlog.reset_defaults()


def waiting(broker: Broker) -> Counter[bytes]:
    """The bodies of the messages that wait in a broker."""
    pending = WaitingMessages(broker.store, broker.timers, broker.levels)
    found = [each for each in pending.select(Selection(), broker.clock.now_ms()) if isinstance(each, WaitingMessage)]
    return Counter(each.message.body for each in found)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def content(root: Path) -> dict[str, tuple[int, dict[int, bytes]]]:
    """All files of a directory, without their holes."""
    return {str(path.relative_to(root)): data_of(path) for path in sorted(root.rglob("*")) if path.is_file()}


def commitlog(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "commitlog").iterdir())}


def change_records(root: Path, change: Callable[[bytearray, int], None]) -> None:
    """Change each record of a commitlog: `change` gets a file's bytes, and the offset of the record in them."""
    for path in sorted((root / "commitlog").iterdir()):
        data, at = bytearray(path.read_bytes()), 0
        while at + 8 < len(data):
            size, magic = struct.unpack_from(">iI", data, at)
            if magic != 0xDAA320A7:
                break
            change(data, at)
            at += size
        path.write_bytes(data)


def as_of_apache(root: Path) -> None:
    """Make the store look like one of RocketMQ's broker: no record names another, and no file is duemq's own."""

    def of_theirs(data: bytearray, at: int) -> None:
        data[at + PREPARED_AT : at + PREPARED_AT + 8] = bytes(8)

    change_records(root, of_theirs)
    (root / "lock").write_bytes(b"lock")
    for name in ("checkpoint", "queuecheck"):
        remove(root / name)


def repaired(root: Path, clock: ManualClock, to: Path | None = None) -> Report:
    """Repair a store, and check that its commitlog is unchanged."""
    before = commitlog(root)
    report = repair(str(root), now=look(clock), settings=SETTINGS, to=str(to) if to else None)
    assert commitlog(root) == before
    assert not (root / "repair.partial").exists()
    return report


def copied(broker: Broker | Stopped, name: str) -> Path:
    target = broker.root.parent / name
    copy_tree(broker.root, target)
    remove(target / "abort")
    return target


def filled(root: Path, count: int = 60) -> Broker:
    """A broker with some delivered messages and some waiting ones, of `count` of each kind."""
    broker = new_broker(root)
    for number in range(count):
        broker.send("plain", b"plain %d" % number, f"UNIQ_KEY\x01p{number}", number % 2)
        broker.schedule(1 + number % 4, b"level %d" % number, f"l{number}")
        broker.timer(START_MS + 1000 + number * (59_820 // count), b"timer %d" % number, f"t{number}")
    broker.pass_time(20_000)
    names = {name: {"topicName": name, "readQueueNums": 4, "writeQueueNums": 4} for name in ("orders", "plain")}
    (root / "config/topics.json").write_text(json.dumps({"topicConfigTable": names}))
    return broker


class Stopped(NamedTuple):
    """A store as `filled` leaves it, whose broker has stopped."""

    root: Path
    clock: ManualClock
    wanted: Counter[bytes]
    """The bodies of the messages that wait."""
    delivered: list[bytes]


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    broker = filled(tmp_path_factory.mktemp("stopped") / "store")
    wanted, delivered = waiting(broker), broker.bodies()
    broker.close()
    return Stopped(broker.root, broker.clock, wanted, delivered)


@pytest.fixture
def stopped(tmp_path: Path, stopped_once: Stopped) -> Stopped:
    """A copy for the test, with a clock of its own."""
    root = copy_tree(stopped_once.root, tmp_path / "old")
    return stopped_once._replace(root=root, clock=ManualClock(stopped_once.clock.now_ms()))


def delivers_the_rest(root: Path, clock: ManualClock, wanted: Counter[bytes], delivered: list[bytes]) -> None:
    """Check that a broker on the store has the wanted messages waiting, and delivers each of them once."""
    after = Broker(root, clock)
    assert waiting(after) == wanted
    assert Counter(after.bodies()) == Counter(delivered)
    after.pass_time(3_700_000)
    assert Counter(after.bodies()) == Counter(delivered) + wanted
    after.close()


@pytest.mark.parametrize("is_apache", [False, True])
@pytest.mark.parametrize("lost", DERIVED)
def test_whatever_is_lost_is_made_again(stopped: Stopped, lost: str, *, is_apache: bool) -> None:
    wanted, delivered = stopped.wanted, stopped.delivered
    assert len(wanted) > 50
    assert len(delivered) > 30
    root = copied(stopped, "damaged")
    if is_apache:
        as_of_apache(root)
    remove(root / lost)
    topics = (root / "config/topics.json").read_bytes()
    report = repaired(root, stopped.clock)
    assert (root / "config/topics.json").read_bytes() == topics
    assert (root / "lock").read_bytes() == (b"lock" if is_apache and not report.repaired else b"duemq")
    delivers_the_rest(root, stopped.clock, wanted, delivered)


@pytest.mark.parametrize("is_apache", [False, True])
def test_nothing_but_the_commitlog_is_needed(tmp_path: Path, *, is_apache: bool) -> None:
    broker = filled(tmp_path / "old")
    wanted, delivered = waiting(broker), broker.bodies()
    root = tmp_path / "damaged"
    copy_tree(broker.root / "commitlog", root / "commitlog")
    if is_apache:
        as_of_apache(root)
    report = repaired(root, broker.clock)
    assert report.repaired
    assert report.levels == {4: 15, 3: 15}
    assert report.timers == sum(body.startswith(b"timer") for body in wanted)
    assert sum(report.levels.values()) + report.timers == wanted.total()
    assert report.topics_added == ["orders", "plain"]
    assert set(json.loads((root / "config/topics.json").read_bytes())["topicConfigTable"]) == {"orders", "plain"}
    delivers_the_rest(root, broker.clock, wanted, delivered)


def test_a_sound_store_is_left_alone(stopped: Stopped) -> None:
    before = content(stopped.root)
    report = repair(str(stopped.root), now=look(stopped.clock), settings=SETTINGS)
    assert report.differences == []
    assert not report.repaired
    assert content(stopped.root) == before


@pytest.mark.parametrize("change", ["cancel", "reschedule", "deliver"])
@pytest.mark.parametrize("number", [0, 3, 9])
def test_a_sound_store_in_which_a_message_of_a_level_was_changed(tmp_path: Path, change: str, number: int) -> None:
    """A sound store needs no repair after a message of a level was changed: the level's offset is behind the changed
    message, as behind delivered ones."""
    broker = new_broker(tmp_path / "old")
    scheduled = [broker.schedule(2, b"%d" % at) for at in range(10)]
    broker.run()
    changes, now_ms = broker.timers.changes, broker.clock.now_ms()
    if change == "cancel":
        assert changes.cancel(scheduled[number], now_ms) is Cancelled.CANCELLED
    else:
        later_ms = now_ms + (60_000 if change == "reschedule" else 0)
        assert changes.reschedule(scheduled[number], later_ms, now_ms) is Cancelled.CANCELLED
    broker.pass_time(7000)
    assert len(broker.bodies()) == 10 - (change != "deliver")
    broker.close()
    report = repair(str(broker.root), now=look(broker.clock), settings=SETTINGS, dry_run=True)
    assert [each.path for each in report.differences] == ["config/topics.json"], "which this store never had"


@pytest.mark.parametrize(
    ("lost", "path", "why"),
    [
        (f"consumequeue/{SCHEDULE_TOPIC}", f"consumequeue/{SCHEDULE_TOPIC}/3", "lacks units 0 to 14"),
        ("timerlog", "timerlog", "is missing, and with it 40 of 40 messages that wait"),
        ("timerwheel", "timerwheel", "is missing; 40 messages wait in it"),
        ("checkpoint", "checkpoint", "does not say how far the timers are"),
    ],
)
def test_a_dry_run_says_what_is_wrong_and_writes_nothing(stopped: Stopped, lost: str, path: str, why: str) -> None:
    remove(stopped.root / lost)
    before = {name: os.stat(stopped.root / name).st_mtime_ns for name in content(stopped.root)}
    files = content(stopped.root)
    report = repair(str(stopped.root), now=look(stopped.clock), settings=SETTINGS, dry_run=True)
    assert (path, why) in report.differences
    assert not report.repaired
    assert content(stopped.root) == files
    assert {name: os.stat(stopped.root / name).st_mtime_ns for name in files} == before


FILES = (
    "commitlog/00000000000000065536",
    "consumequeue/orders/3/00000000000000000000",
    "timerlog/00000000000000000000",
    "index/20260101000000000",
    "timerwheel",
    "checkpoint",
    "queuecheck",
    "abort",
    "lock",
    "config/topics.json",
    "config/delayOffset.json",
    "config/delayOffset.json.bak",
    "config/timercheck",
    "config/timermetrics",
)
FOLDERS = (
    "consumequeue",
    "consumequeue/orders",
    "consumequeue/orders/3",
    "timerlog",
    "index",
    "config",
    "repair.partial",
)


def directory(path: Path) -> str:
    (path / "of").mkdir(parents=True)
    (path / "of" / "somebody").write_bytes(b"else")
    return "is a directory, but must be a file; move it away"


def file(path: Path) -> str:
    path.write_bytes(b"of somebody else")
    return "is a file, but must be a directory; move it away"


def nowhere(path: Path) -> str:
    path.symlink_to("/nowhere/at/all")
    return "is a link to /nowhere/at/all, which does not exist; remove it"


def loop(path: Path) -> str:
    path.symlink_to(path.name)
    return "is a link that leads back to itself; remove it"


MISPLACED = (
    *((name, put) for name in FILES for put in (directory, nowhere, loop)),
    *((name, put) for name in FOLDERS for put in (file, nowhere, loop)),
)
OPTIONS = {"in place": [], "with index": ["--index"], "beside": ["--to", "new"]}


@pytest.mark.parametrize(
    ("name", "put", "options"),
    [
        # Each name with each kind of thing, and both of these with each of the options. All three together: soak.
        pytest.param(
            name,
            put,
            options,
            id=f"{name}-{put.__name__}-{way}",
            marks=() if (number // 3 + number) % 3 == at else pytest.mark.soak,
        )
        for number, (name, put) in enumerate(MISPLACED)
        for at, (way, options) in enumerate(OPTIONS.items())
    ],
)
def test_what_is_not_what_belongs_there_is_named_and_stays(
    sound_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    put: Callable[[Path], str],
    options: list[str],
) -> None:
    """A wrong kind of file in a place that a repair would replace is named and kept: it may hold somebody's data."""
    monkeypatch.chdir(tmp_path)
    copy_tree(sound_store, tmp_path / "store")
    remove(tmp_path / "store" / name)
    why = put(tmp_path / "store" / name)
    before = everything(tmp_path)
    settings = [text for name, value in SETTINGS.items() for text in ("--set", f"{name}={value}")]
    dry = [option for option in options if option not in ("--to", "new")]
    for arguments in ([*dry, "--dry-run"], options):
        result = CliRunner().invoke(main, ["repair", "store", *settings, *arguments])
        assert result.exit_code == 2, result.output
        assert result.output == f"duemq: {tmp_path / 'store' / name} {why}\n"
    assert everything(tmp_path) == before


@pytest.fixture(scope="module")
def sound_store(tmp_path_factory: pytest.TempPathFactory, stopped_once: Stopped) -> Path:
    root = copy_tree(stopped_once.root, tmp_path_factory.mktemp("sound") / "store")
    for name in ("index", "consumequeue/orders/3"):
        (root / name).mkdir(exist_ok=True)
    return root


def everything(root: Path) -> dict[str, tuple[int, dict[int, bytes]] | str | None]:
    """All files, without their holes, directories and links of a directory."""
    found: dict[str, tuple[int, dict[int, bytes]] | str | None] = {}
    for path in sorted(root.rglob("*")):
        is_link = path.is_symlink()
        found[str(path)] = str(path.readlink()) if is_link else data_of(path) if path.is_file() else None
    return found


def test_consume_queues_of_another_file_size_than_is_set_are_made_anew(stopped: Stopped) -> None:
    """Consume queues with another file size than the setting are made anew. A repair without that setting leaves them
    so, and no broker with another size would start."""
    wanted = stopped.wanted
    remove(stopped.root / "consumequeue")
    other = {**SETTINGS, "mappedFileSizeConsumeQueue": str(QUEUE_UNITS * 60)}
    assert repair(str(stopped.root), now=look(stopped.clock), settings=other).repaired
    report = repair(str(stopped.root), now=look(stopped.clock), settings=SETTINGS)
    why = f"has files of {QUEUE_UNITS * 60} bytes instead of {QUEUE_UNITS * 20}"
    assert {difference.why for difference in report.differences} == {why}
    assert report.repaired
    after = Broker(stopped.root, stopped.clock)
    assert waiting(after) == wanted


def test_an_older_copy_of_the_commitlogs_last_file_is_gone_on_with(tmp_path: Path) -> None:
    """A store with an older copy of the commitlog's last file, which a start refuses naming the repair, can be used
    again after it."""
    broker = new_broker(tmp_path / "old")
    for number in range(5):
        broker.schedule(4, b"old %d" % number, f"k{number}")
    broker.close()
    before = commitlog(broker.root)
    broker = Broker(broker.root, broker.clock)
    for number in range(5, 9):
        broker.schedule(4, b"new %d" % number, f"k{number}")
    broker.close()
    for name, data in before.items():
        (broker.root / "commitlog" / name).write_bytes(data)
    with pytest.raises(StoreFormatError, match=f"older copy.*`duemq store repair {broker.root}`"):
        Broker(broker.root, broker.clock)
    assert repair(str(broker.root), now=look(broker.clock), settings=SETTINGS).repaired
    after = Broker(broker.root, broker.clock)
    assert sum(waiting(after).values()) == 5


@pytest.mark.parametrize("lost", ["config/delayOffset.json", "config/timercheck"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_of_a_store_of_ours_also_what_only_apaches_brokers_go_by_is_made_anew(
    stopped: Stopped, lost: str, *, is_cut: bool
) -> None:
    """In a store of duemq's a repair also makes the files anew that only Apache's brokers use: without them those would
    deliver again."""
    before = (stopped.root / lost).read_bytes()
    if is_cut:
        (stopped.root / lost).write_bytes(before[:20])
    else:
        remove(stopped.root / lost)
    remove(stopped.root / f"{lost}.bak")
    dry = repair(str(stopped.root), now=look(stopped.clock), settings=SETTINGS, dry_run=True)
    assert [difference.path for difference in dry.differences] == [lost]
    assert repaired(stopped.root, stopped.clock).repaired
    made = (stopped.root / lost).read_bytes()
    if lost.endswith("timercheck"):  # the log's positions are others: delivered messages are not in it any more
        made, before = made[:8] + made[16:24], before[:8] + before[16:24]
    assert made == before
    assert repaired(stopped.root, stopped.clock).differences == []


@pytest.mark.parametrize("size", [7, 13, 260])
@pytest.mark.parametrize("name", [f"consumequeue/{SCHEDULE_TOPIC}/0", "timerlog"])
def test_a_file_that_was_cut_off_does_not_say_how_large_files_are(stopped: Stopped, name: str, size: int) -> None:
    """A truncated file does not determine the file size: the next start wants all files in the size of its settings."""
    wanted = stopped.wanted
    first = min((stopped.root / name).iterdir())
    os.truncate(first, size)
    assert repair(str(stopped.root), now=look(stopped.clock), settings={"messageDelayLevel": TABLE.text}).repaired
    reopened = Broker(stopped.root, stopped.clock)
    assert waiting(reopened) == wanted
    reopened.close()


@pytest.mark.parametrize("has_abort", [False, True])
@pytest.mark.parametrize("is_apache", [False, True])
def test_a_store_whose_broker_was_killed_is_made_as_after_a_stop(
    tmp_path: Path, *, is_apache: bool, has_abort: bool
) -> None:
    """A store whose broker was killed is repaired to the state after a stop: the last deliveries are not in the files
    that Apache's brokers use."""
    broker = filled(tmp_path / "old")
    broker.owned.checkpoint()
    for number in range(10):
        broker.schedule(1, b"last %d" % number)
        broker.timer(broker.clock.now_ms() + 1500, b"last timer %d" % number, f"last{number}")
    broker.clock.advance(1600)
    broker.run()
    wanted = waiting(broker)
    root = tmp_path / "killed"
    copy_tree(broker.root, root)
    if is_apache:
        as_of_apache(root)
    elif not has_abort:
        remove(root / "abort")
    dry = repair(str(root), now=look(broker.clock), settings=SETTINGS, dry_run=True)
    assert "abort" in [difference.path for difference in dry.differences]
    assert repaired(root, broker.clock).repaired
    assert repaired(root, broker.clock).differences == []
    assert not (root / "abort").exists()
    offsets = json.loads((root / "config/delayOffset.json").read_bytes())["offsetTable"]
    assert {int(level): offset for level, offset in offsets.items()} == {
        number: level.offset for number, level in broker.levels.levels.items()
    }
    reopened = Broker(root, broker.clock)
    assert waiting(reopened) == wanted
    reopened.close()


def test_a_dry_run_of_apaches_store_names_the_levels(stopped: Stopped) -> None:
    root = copied(stopped, "damaged")
    as_of_apache(root)
    remove(root / "config/delayOffset.json")
    remove(root / "config/timercheck")
    report = repair(str(root), now=look(stopped.clock), settings=SETTINGS, dry_run=True)
    assert report.written_by == "RocketMQ 5.x"
    assert dict(report.differences) == {
        "config/delayOffset.json": "is missing: level 1 at 0 instead of 15, level 2 at 0 instead of 15",
        "config/timercheck": "is missing or cut off",
    }


def test_beside_the_store(tmp_path: Path, stopped: Stopped) -> None:
    wanted, delivered = stopped.wanted, stopped.delivered
    remove(stopped.root / "consumequeue")
    (stopped.root / "config/consumerOffset.json").write_text('{"offsetTable":{"orders@g":{0:7}}}')
    (stopped.root / "index").mkdir()
    (stopped.root / "index/20231114221320000").write_bytes(b"an index")
    before = content(stopped.root)
    report = repaired(stopped.root, stopped.clock, tmp_path / "new")
    assert report.target == str(tmp_path / "new")
    assert content(stopped.root) == before
    made = content(tmp_path / "new")
    assert commitlog(tmp_path / "new") == commitlog(stopped.root)
    for name in ("config/consumerOffset.json", "index/20231114221320000"):
        assert made[name] == before[name]
    assert not (tmp_path / "new.partial").exists()
    delivers_the_rest(tmp_path / "new", stopped.clock, wanted, delivered)


@pytest.mark.parametrize("few", [65_536, 2])
def test_what_was_delivered_behind_others_is_marked_for_rocketmq(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """Messages delivered out of order are marked for RocketMQ, whose broker knows one offset per level. duemq knows
    them by the checkpoint, and marks only those of a large backlog."""
    monkeypatch.setattr(service, "_SETTLE_UNITS", few)
    broker = new_broker(tmp_path / "old")
    for number in range(10):
        broker.schedule(3, b"%d" % number, f"k{number}")
        broker.schedule(1, b"%d" % number, f"l{number}", "others")
    broker.pass_time(1500)
    broker.close()
    root = copied(broker, "damaged")
    after = Broker(root, broker.clock)
    # RocketMQ's broker leaves this when it was told to begin in the middle.
    for number in (4, 5, 7):
        message = after.messages(SCHEDULE_TOPIC, 2)[number]
        after.send("orders", message.body, message.properties_text, 3)
    after.close()
    as_of_apache(root)
    _born_as_scheduled(root)
    remove(root / "config/delayOffset.json")
    repaired(root, broker.clock)
    units = (root / f"consumequeue/{SCHEDULE_TOPIC}/2/{0:020}").read_bytes()
    sizes = [struct.unpack_from(">i", units, 20 * number + 8)[0] for number in range(10)]
    assert [number for number, size in enumerate(sizes) if size == 2] == [4, 5, 7]
    assert '"3":0' in (root / "config/delayOffset.json").read_text().replace(" ", "")
    known = checkpoint.load(OsFiles(), str(root / "checkpoint")).notes[service.NAME]
    note = runs.decode(known)
    assert note is not None
    assert len(note.delivered) == (3 if few == 2 else 13)
    last = Broker(root, broker.clock)
    assert waiting(last) == Counter(b"%d" % number for number in (0, 1, 2, 3, 6, 8, 9))


def _born_as_scheduled(root: Path) -> None:
    """Give all records the producer's time that `Broker.schedule` uses."""

    def as_scheduled(data: bytearray, at: int) -> None:
        struct.pack_into(">q", data, at + 40, 7)
        struct.pack_into(">i", data, at + 72, 0)

    change_records(root, as_scheduled)


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_repaired_store_is_one_that_was_stopped(tmp_path: Path, stopped: Stopped, *, is_beside: bool) -> None:
    root = copied(stopped, "killed")
    as_of_apache(root)
    before = commitlog(root)
    (root / "abort").touch()
    for name in ("delayOffset.json", "delayOffset.json.bak"):
        (root / "config" / name).write_text('{"offsetTable":{1:3}}')
    if is_beside:
        (root / "commitlog").rename(tmp_path / "disk")
        (root / "commitlog").symlink_to(tmp_path / "disk")
    target = tmp_path / "new" if is_beside else root
    repair(str(root), now=look(stopped.clock), settings=SETTINGS, to=str(target) if is_beside else None)
    assert not (target / "abort").exists()
    assert not (target / "config/delayOffset.json.bak").exists()
    assert not (target / "commitlog").is_symlink()
    assert commitlog(target) == before
    assert (root / "abort").exists() == is_beside


# --- random histories


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, frozenset[str], bool, bool]:
    """Seed and length of the load, the lost files, whether the broker is killed, and whether the store is duemq's or
    Apache's."""
    return (
        draw(st.integers(0, 2**16)),
        draw(st.integers(1, 120)),
        draw(st.frozensets(st.sampled_from(DERIVED), max_size=5)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@examples(1 / 2)
@given(histories())
def test_any_history(
    tmp_path_factory: pytest.TempPathFactory, history: tuple[int, int, frozenset[str], bool, bool]
) -> None:
    seed, length, lost, is_killed, is_apache = history
    chance = random.Random(seed)
    directory = tmp_path_factory.mktemp("history")
    broker = new_broker(directory / "old")
    timers, levels = list[int](), list[int]()
    for number in range(length):
        now, body, key = broker.clock.now_ms(), b"%d" % number, f"k{number}"
        match chance.choice(("plain", "level", "level", "timer", "timer", "time", "cancel", "checkpoint", "again")):
            case "plain":
                broker.send("plain", body * 50, f"UNIQ_KEY\x01{key}")
            case "level":
                levels.append(broker.schedule(chance.randint(1, 4), body, key))
            case "timer":
                timers.append(broker.timer(now + chance.randint(1, 60_000), body, key))
            case "time":
                broker.pass_time(chance.choice((1, 300, 1000, 7000)))
            case "cancel":
                left = waiting_at(broker) & set(timers)
                if left:
                    broker.cancel(chance.choice(sorted(left)))
            case "checkpoint":
                broker.owned.checkpoint()
            case "again" if not is_apache:
                # As cancels of the levels' messages do, which RocketMQ does not have.
                left = waiting_at(broker) & set(levels)
                if left:
                    broker.cancel(chance.choice(sorted(left)))
    broker.run()
    wanted, delivered = waiting(broker), broker.bodies()
    if not is_killed:
        broker.close()
    root = directory / "damaged"
    copy_tree(broker.root, root)
    if is_apache:
        as_of_apache(root)
    for name in sorted(lost):
        remove(root / name)
    if not any((root / "commitlog").iterdir()):
        return
    report = repaired(root, broker.clock)
    if report.repaired:
        again = repair(str(root), now=look(broker.clock), settings=SETTINGS, dry_run=True)
        assert again.differences == []
        delivers_the_rest(root, broker.clock, wanted, delivered)
    shutil.rmtree(directory)


def waiting_at(broker: Broker) -> set[int]:
    """The physical offsets of the messages that wait in a broker."""
    pending = WaitingMessages(broker.store, broker.timers, broker.levels)
    found = pending.select(Selection(), broker.clock.now_ms())
    return {each.message.physical_offset for each in found if isinstance(each, WaitingMessage)}


# --- damage in the commitlog


def zeroed(root: Path, at: int, size: int) -> None:
    path = root / "commitlog" / f"{at // SEGMENT * SEGMENT:020}"
    data = bytearray(path.read_bytes())
    data[at % SEGMENT : at % SEGMENT + size] = bytes(size)
    path.write_bytes(data)


def test_a_damaged_stretch_of_an_old_file_is_passed_over(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    offsets = [broker.schedule(4, b"%d" % number * 300, f"k{number}") for number in range(400)]
    assert broker.store.log.end > 5 * SEGMENT
    broker.close()
    zeroed(broker.root, offsets[10], offsets[13] - offsets[10])
    remove(broker.root / "consumequeue")
    report = repaired(broker.root, broker.clock)
    assert [(each.start, each.end) for each in report.damages] == [(offsets[10], offsets[13])]
    assert report.commitlog_end == broker.store.log.end
    after = Broker(broker.root, broker.clock)
    assert sum(waiting(after).values()) == 397


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("damage", ["a flipped byte in a body", "zeros"])
def test_what_our_start_serves_behind_a_damage_a_repair_keeps(tmp_path: Path, damage: str, *, is_stopped: bool) -> None:
    """A repair keeps the records behind a damage that a start of duemq would serve: it reads from its checkpoint on,
    wherever that is in the last files."""
    broker = new_broker(tmp_path / "old")
    offsets = [broker.schedule(4, b"%03d" % number * 100, f"k{number}") for number in range(30)]
    broker.owned.checkpoint()
    if is_stopped:
        broker.close()
    if damage == "zeros":
        zeroed(broker.root, offsets[20], 100)
    else:
        path = broker.root / "commitlog" / f"{0:020}"
        data = bytearray(path.read_bytes())
        data[offsets[20] + 90] ^= 1
        path.write_bytes(data)
    broker.store.abandon()
    copy_tree(broker.root, tmp_path / "plain")
    plain = Broker(tmp_path / "plain", broker.clock)
    wanted, waits = waiting(plain), plain.levels.levels[4].waiting
    assert sum(wanted.values()) == 29
    plain.close()
    remove(broker.root / "consumequeue" / SCHEDULE_TOPIC)
    for _ in range(2):
        report = repair(str(broker.root), now=look(broker.clock), settings=SETTINGS)
        assert [each.start for each in report.damages] == [offsets[20]]
        assert report.behind == 0
        after = Broker(broker.root, broker.clock)
        assert waiting(after) == wanted
        assert after.levels.levels[4].waiting == (waits if damage != "zeros" else 29)
        after.close()


def test_a_damage_in_the_last_files_is_where_a_start_will_cut(tmp_path: Path) -> None:
    """A repair ends the commitlog at a damage in the last files, where a start would cut it: Apache's, or duemq's
    without a checkpoint."""
    broker = new_broker(tmp_path / "old")
    offsets = [broker.schedule(4, b"%d" % number * 300, f"k{number}") for number in range(30)]
    broker.close()
    remove(broker.root / "checkpoint")
    zeroed(broker.root, offsets[20], 100)
    before = commitlog(broker.root)
    report = repair(str(broker.root), now=look(broker.clock), settings=SETTINGS)
    assert (report.commitlog_end, report.behind, report.records) == (offsets[20], 9, 20)
    assert commitlog(broker.root) == before
    after = Broker(broker.root, broker.clock)
    assert sum(waiting(after).values()) == 20


# --- errors and interruptions


def test_a_store_that_a_broker_has_open_is_refused(tmp_path: Path) -> None:
    broker = filled(tmp_path / "old")
    pid = os.fork()
    if not pid:  # a lock of this process would not be seen by itself
        try:
            repair(str(broker.root), now=look(broker.clock), settings=SETTINGS)
        except RepairError as error:
            os._exit(0 if "a broker has this store open" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("make", [lambda root: None, lambda root: (root / "commitlog").mkdir()])
def test_what_is_no_store_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    with pytest.raises(RepairError, match="commitlog"):
        repair(str(tmp_path), now=look(ManualClock(START_MS)))
    assert not (tmp_path / "lock").exists()


class _Killed(BaseException):
    """Ends the work as a kill would: no cleanup code runs."""


@pytest.mark.parametrize("is_apache", [False, True])
def test_killed_at_any_rename_a_further_run_repairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_apache: bool
) -> None:
    broker = filled(tmp_path / "old", 16)
    wanted, delivered = waiting(broker), broker.bodies()
    broker.close()
    rename, put_back = os.rename, module._put_back
    # Only the existing queues give the delays of RocketMQ's levels.
    level = f"consumequeue/{SCHEDULE_TOPIC}/2/{0:020}"
    units = (broker.root / level).read_bytes()
    sizes = {name: value for name, value in SETTINGS.items() if name != "messageDelayLevel"}
    for limit in range(100):
        root = copied(broker, f"killed-{limit}")
        if is_apache:
            as_of_apache(root)
        remove(root / f"consumequeue/{SCHEDULE_TOPIC}/0")
        remove(root / "timerlog")
        count = 0

        def killing(source: str, target: str, limit: int = limit) -> None:
            nonlocal count
            if count == limit:
                raise _Killed
            count += "repair.partial" in str(source) + str(target)
            rename(source, target)

        calls: list[int] = []

        def first_only(root: str, partial: str, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == 1:
                put_back(root, partial)

        monkeypatch.setattr(os, "rename", killing)
        monkeypatch.setattr(module, "_put_back", first_only)
        try:
            repair(str(root), now=look(broker.clock), settings=sizes)
            is_over = True
        except _Killed:
            is_over = False
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(module, "_put_back", put_back)
        if (root / "repair.partial" / "old").exists():
            with pytest.raises(StoreFormatError, match="run `duemq store repair` again"):
                Broker(root, broker.clock)
        repair(str(root), now=look(broker.clock), settings=sizes)
        assert not (root / "repair.partial").exists()
        assert (root / level).read_bytes() == units
        delivers_the_rest(root, ManualClock(broker.clock.now_ms()), wanted, delivered)
        shutil.rmtree(root)
        if is_over:
            assert limit > 8
            return
    raise AssertionError("it never ended")


# --- the extent of a store


def test_queues_whose_messages_expired_go_on(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(70):
        broker.send("gone", b"x", f"UNIQ_KEY\x01g{number}")
    while broker.store.log.end < 3 * SEGMENT:
        broker.send("plain", b"x" * 1000)
    broker.close()
    (broker.root / "commitlog" / f"{0:020}").unlink()
    remove(broker.root / "consumequeue/plain")
    root = copied(broker, "apache")
    as_of_apache(root)
    for store in (broker.root, root):
        repaired(store, broker.clock)
        after = Broker(store, broker.clock)
        assert after.store.ensure_queue("gone", 0).next_offset == 70, "no queue offset is given twice"
        after.close()


@pytest.mark.parametrize("left", [(), ("consumequeue/plain",), ("consumequeue/plain/0",)])
def test_deleted_topics_stay_deleted(stopped: Stopped, left: tuple[str, ...]) -> None:
    """Deleted topics stay deleted: Apache's deleteTopic leaves the topic's directory, without queues."""
    root = copied(stopped, "apache")
    as_of_apache(root)
    (root / "config/topics.json").write_text('{"topicConfigTable":{"orders":{"topicName":"orders"}}}')
    remove(root / "consumequeue/plain")
    for directory in left:
        (root / directory).mkdir(parents=True)
    remove(root / "config/delayOffset.json")
    report = repaired(root, stopped.clock)
    assert report.topics_left_out == ["plain"]
    assert report.topics_added == []
    assert not any(path.is_file() for path in (root / "consumequeue/plain").rglob("*"))


def test_a_topic_that_we_removed_stays_so_whatever_becomes_of_topics_json(tmp_path: Path) -> None:
    broker = filled(tmp_path / "old")
    broker.owned.durability.remove_topic("plain", lambda error: None)
    broker.owned.workers.run(Lane.FILES)
    broker.send("plain", b"of a new topic of that name", queue_id=1)
    broker.close()
    remove(broker.root / "config/topics.json")
    remove(broker.root / "timerlog")
    report = repaired(broker.root, broker.clock)
    assert report.topics_added == ["orders", "plain"]
    after = Broker(broker.root, broker.clock)
    assert after.bodies("plain", 0) == []
    assert after.bodies("plain", 1) == [b"of a new topic of that name"]


def test_topics_of_an_earlier_edition_of_topics_json_are_not_taken_for_deleted(stopped: Stopped) -> None:
    remove(stopped.root / "consumequeue")
    (stopped.root / "config/topics.json").write_bytes(b"torn")
    (stopped.root / "config/topics.json.bak").write_text('{"topicConfigTable":{"orders":{"topicName":"orders"}}}')
    report = repaired(stopped.root, stopped.clock)
    assert (report.topics_added, report.topics_left_out) == (["plain"], [])
    assert "plain" in json.loads((stopped.root / "config/topics.json").read_bytes())["topicConfigTable"]


def test_topics_that_were_lost_are_added(stopped: Stopped) -> None:
    kept = {"perm": 4, "topicName": "orders", "readQueueNums": 9, "writeQueueNums": 9, "new in 6.0": 1}
    table = {"topicConfigTable": {"orders": kept}, "dataVersion": {"counter": 3}}
    (stopped.root / "config/topics.json").write_text(json.dumps(table))
    report = repaired(stopped.root, stopped.clock)
    assert report.topics_added == ["plain"]
    made = json.loads((stopped.root / "config/topics.json").read_bytes())
    assert made["topicConfigTable"]["orders"] == kept
    assert made["topicConfigTable"]["plain"]["readQueueNums"] == 2


def test_the_delays_of_levels_are_those_of_the_queues_that_are_left(stopped: Stopped) -> None:
    root = copied(stopped, "apache")
    as_of_apache(root)
    before = (root / f"consumequeue/{SCHEDULE_TOPIC}/2/{0:020}").read_bytes()
    remove(root / "consumequeue/plain")
    report = repair(str(root), now=look(stopped.clock), settings=SIZES)
    assert report.repaired
    assert not report.delays_assumed
    assert (root / f"consumequeue/{SCHEDULE_TOPIC}/2/{0:020}").read_bytes() == before


@pytest.mark.parametrize("settings", [{}, {"messageDelayLevel": "1s 2s 3s 4s"}])
def test_messages_of_rocketmqs_keep_the_times_of_their_queues_whatever_table_the_repair_is_told(
    tmp_path: Path, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table may have changed since they were sent: each then keeps the delay of its time. Units that are damaged or
    lost get the delay of those around them, and those behind the last one, that of the table."""
    broker = new_broker(tmp_path / "store")
    for table in (TABLE.text, "1s 4s 10s 20s"):
        broker.levels.set_table(DelayLevels(table), broker.clock.now_ms())
        for number in range(5):
            broker.schedule(4, b"%d, by %s" % (number, table.encode()))
            broker.clock.set_wall(broker.clock.now_ms() + 1000)
    broker.run()
    broker.close()
    root = copied(broker, "apache")
    as_of_apache(root)
    path = root / f"consumequeue/{SCHEDULE_TOPIC}/3/{0:020}"
    before = path.read_bytes()
    damaged = bytearray(before)
    damaged[1 * 20 + 19] ^= 1  # a time that is no whole number of seconds after the store time
    damaged[7 * 20 + 12] ^= 64  # in years
    damaged[3 * 20 : 4 * 20] = bytes(20)
    path.write_bytes(damaged)
    report = repair(str(root), now=look(broker.clock), settings={**SIZES, **settings})
    assert report.repaired
    assert path.read_bytes() == before
    path.write_bytes(before[: 8 * 20] + bytes(len(before) - 8 * 20))
    repair(str(root), now=look(broker.clock), settings={**SIZES, **settings})
    codes = [struct.unpack_from(">q", path.read_bytes(), at * 20 + 12)[0] for at in range(10)]
    wanted = [struct.unpack_from(">q", before, at * 20 + 12)[0] for at in range(10)]
    assert codes[:8] == wanted[:8]
    by_table = 16_000 if settings else 0
    assert codes[8:] == [code - by_table for code in wanted[8:]]


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("is_beside", [False, True])
def test_a_delay_that_nothing_tells_is_not_assumed(
    tmp_path: Path, stopped: Stopped, is_ours: bool, is_beside: bool
) -> None:
    """A guess would deliver the waiting messages of that level early or late: in a store of RocketMQ's, and in one of
    duemq's with RocketMQ's records."""
    root = copied(stopped, "apache")
    as_of_apache(root)
    if is_ours:
        (root / "lock").write_bytes(b"duemq")
    remove(root / f"consumequeue/{SCHEDULE_TOPIC}/3")
    now, to = look(stopped.clock), str(tmp_path / "to") if is_beside else None
    before = content(root)
    report = repair(str(root), now=now, settings=SIZES, dry_run=True)
    assert report.delays_assumed == [4]
    with pytest.raises(
        RepairError, match=f"{report.levels[4]} messages wait .* \\(level 4\\): give .* messageDelayLevel"
    ):
        repair(str(root), now=now, settings=SIZES, to=to)
    assert content(root) == before
    assert to is None or not os.path.exists(to)
    made = repair(str(root), now=now, settings={**SIZES, "messageDelayLevel": "1s 5s 10s 30s"}, to=to)
    unit = (Path(made.target) / f"consumequeue/{SCHEDULE_TOPIC}/3/{0:020}").read_bytes()[:20]
    assert struct.unpack(">qiq", unit)[2] == START_MS + 30_000


# --- the index


def times(broker: Broker) -> Counter[tuple[bytes, int]]:
    """The bodies of the messages that wait in a broker, with their deliver times."""
    pending = WaitingMessages(broker.store, broker.timers, broker.levels)
    found = [each for each in pending.select(Selection(), broker.clock.now_ms()) if isinstance(each, WaitingMessage)]
    return Counter((each.message.body, each.due_ms) for each in found)


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("settings", [{}, {"messageDelayLevel": "1s 2s"}, SETTINGS])
def test_what_waits_keeps_its_time_whatever_table_the_repair_is_told(
    tmp_path: Path, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool
) -> None:
    """Waiting messages keep their times whatever table the repair is given. The table may also have changed while the
    broker ran, and the clock may have been set: the records do not show that, but the checkpoint does."""
    broker = new_broker(tmp_path / "store")
    for number in range(4):
        broker.schedule(number + 1, b"by the first table, level %d" % (number + 1))
    broker.send("orders", b"now")
    table = DelayLevels("1s 4s 10s 20s")
    broker.levels.set_table(table, broker.clock.now_ms())
    for number in range(4):
        broker.schedule(number + 1, b"by the second table, level %d" % (number + 1))
    broker.clock.set_wall(broker.clock.now_ms() - 3_600_000)
    broker.run()
    broker.owned.checkpoint()
    wanted = times(broker)
    assert len(wanted) == 8
    if is_stopped:
        broker.close()
    remove(broker.root / "consumequeue" / SCHEDULE_TOPIC)
    remove(broker.root / "abort")
    broker.store.abandon()
    for again in range(2):
        repair(str(broker.root), now=look(broker.clock), settings={**settings, **SIZES})
        monkeypatch.setattr(compact_world, "TABLE", table)
        reopened = Broker(broker.root, broker.clock)
        assert times(reopened) == wanted
        reopened.close()
        if not again:
            remove(broker.root / "consumequeue" / SCHEDULE_TOPIC)


@pytest.mark.parametrize("settings", [{}, {"messageDelayLevel": "1s 2s"}])
def test_without_a_checkpoint_messages_keep_the_promise_that_their_records_have(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    broker = new_broker(tmp_path / "store")
    for number in range(4):
        broker.schedule(number + 1, b"level %d" % (number + 1))
    wanted = times(broker)
    broker.close()
    remove(broker.root / "checkpoint")
    repair(str(broker.root), now=look(broker.clock), settings={**settings, **SIZES})
    reopened = Broker(broker.root, broker.clock)
    assert times(reopened) == wanted
    reopened.close()


def found_by_key(root: Path, key: str) -> list[int]:
    """Return the physical offsets that RocketMQ's lookup of a key finds, newest first."""
    value = 0
    for unit in struct.unpack(f">{len(key.encode('utf-16-be')) // 2}H", key.encode("utf-16-be")):
        value = (31 * value + unit) & 0xFFFFFFFF
    value = abs(value - (1 << 32) if value >> 31 else value)
    found = []
    for path in sorted((root / "index").iterdir(), reverse=True):
        with path.open("rb") as file:
            file.seek(40 + value % 5_000_000 * 4)
            (item,) = struct.unpack(">i", file.read(4))
            while item:
                file.seek(40 + 20_000_000 + item * 20)
                of, physical, _, item = struct.unpack(">iqii", file.read(20))
                if of == value:
                    found.append(physical)
    return found


@pytest.mark.parametrize("most", [module_index.MOST, 10])
def test_the_index_is_made_anew_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(module_index, "MOST", most)
    monkeypatch.setattr(module_index, "_BATCH", 7)
    broker = new_broker(tmp_path / "old")
    offsets: dict[str, list[int]] = {}
    for number in range(40):
        keys = f"order-{number % 3} ключ-{number}"
        name = "plain" if number % 3 else "others"
        at = broker.send(name, b"x", f"KEYS\x01{keys}\x02UNIQ_KEY\x01u{number}")
        for key in (*keys.split(), f"u{number}"):
            offsets.setdefault(f"{name}#{key}", []).insert(0, at)
    broker.send("plain", b"without a key")
    broker.close()
    as_of_apache(broker.root)
    dry = repair(str(broker.root), now=look(broker.clock), settings=SETTINGS, dry_run=True)
    assert dry.lacks_index
    report = repair(str(broker.root), now=look(broker.clock), settings=SETTINGS, with_index=True)
    assert report.repaired
    assert report.index_files == -(-120 // most) == len(list((broker.root / "index").iterdir()))
    assert {key: found_by_key(broker.root, key) for key in offsets} == offsets
    assert found_by_key(broker.root, "plain#none") == []
    stamp = struct.unpack_from(">q", (broker.root / "checkpoint").read_bytes(), 16)[0]
    assert stamp == START_MS, "RocketMQ removes files that end behind that"


def test_an_index_that_is_there_stays(stopped: Stopped) -> None:
    root = copied(stopped, "apache")
    as_of_apache(root)
    (root / "index").mkdir()
    (root / "index/20231114221320000").write_bytes(b"an index")
    (root / "checkpoint").write_bytes(struct.pack(">qqq", 1, 2, 3).ljust(4096, b"\0"))
    remove(root / f"consumequeue/{SCHEDULE_TOPIC}")
    report = repaired(root, stopped.clock)
    assert report.repaired
    assert not report.lacks_index
    assert [path.read_bytes() for path in (root / "index").iterdir()] == [b"an index"]
    assert struct.unpack_from(">q", (root / "checkpoint").read_bytes(), 16)[0] == 3


# --- the command


def test_the_command(tmp_path: Path, stopped: Stopped) -> None:
    remove(stopped.root / f"consumequeue/{SCHEDULE_TOPIC}/3")
    conf = tmp_path / "broker.conf"
    conf.write_text(f"messageDelayLevel={TABLE.text}\nmappedFileSizeConsumeQueue={QUEUE_UNITS * 20}\naclEnable=true\n")
    arguments = ["repair", str(stopped.root), "--config", str(conf), "--set", "mappedFileSizeTimerLog=5200"]
    dry = CliRunner().invoke(main, [*arguments, "--dry-run"])
    assert dry.exit_code == 1, dry.output
    assert f"consumequeue/{SCHEDULE_TOPIC}/3 lacks units 0 to 14" in dry.output
    assert "run this without --dry-run" in dry.output
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert f"repaired: {stopped.root}" in done.output
    again = CliRunner().invoke(main, [*arguments, "--dry-run"])
    assert again.exit_code == 0, again.output
    assert "nothing to repair" in again.output


def test_the_command_tells_errors_in_one_line(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["repair", str(tmp_path / "none")])
    assert found.exit_code == 2
    assert found.output == f"duemq: {tmp_path}/none has no commitlog/, so it is not a duemq or RocketMQ store\n"


@pytest.mark.parametrize("is_beside", [False, True])
def test_an_audit_says_that_we_had_a_repaired_store_last(tmp_path: Path, stopped: Stopped, *, is_beside: bool) -> None:
    root = copied(stopped, "damaged")
    as_of_apache(root)
    remove(root / "timerlog")
    assert StoreFiles.open(root).written_by == "rocketmq"
    to = tmp_path / "new" if is_beside else None
    assert repaired(root, stopped.clock, to).repaired
    assert StoreFiles.open(to or root).written_by == "duemq"
    assert StoreFiles.open(root).written_by == ("rocketmq" if is_beside else "duemq")


def test_a_sound_store_with_extensions_is_left_alone(stopped: Stopped) -> None:
    as_of_apache(stopped.root)
    extend(stopped.root)
    report = repair(str(stopped.root), now=look(stopped.clock), settings=SETTINGS)
    assert report.differences == []
    assert not report.repaired


@pytest.mark.parametrize("damage", ["removed", "flipped"])
def test_a_repair_needs_no_extension_and_leaves_none(stopped: Stopped, damage: str) -> None:
    wanted, delivered = stopped.wanted, stopped.delivered
    root = copied(stopped, "damaged")
    as_of_apache(root)
    extend(root)
    path = root / f"consumequeue_ext/{SCHEDULE_TOPIC}/3/{0:020}"
    if damage == "removed":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[25] ^= 1
        path.write_bytes(data)
    report = repaired(root, stopped.clock)
    lacks = "units 0 to 14" if damage == "removed" else "unit 1"
    fault = (f"consumequeue_ext/{SCHEDULE_TOPIC}/3", f"has other tags codes, or none, for {lacks}")
    assert report.differences == [fault]
    assert report.repaired
    assert not (root / "consumequeue_ext").exists()
    delivers_the_rest(root, stopped.clock, wanted, delivered)


def test_delays_are_found_in_an_extension(stopped: Stopped) -> None:
    as_of_apache(stopped.root)
    extend(stopped.root)
    report = repair(str(stopped.root), now=look(stopped.clock), settings=SIZES)
    assert report.differences == []
