"""Goal: a start finds any damage done to the consume queues' files since the last one, and all messages are at their
queue offsets.

Method: a store with several files per queue, also of the delay levels, is damaged anywhere between two lives. The
expected message of each queue offset is kept apart, from the answers to the producers.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping, MutableMapping
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from duemq.protocol.records.properties import TIMER_DEL_UNIQKEY
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.recovery import Recovered
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.errors import StoreFormatError
from duemq.storage.log.copies import ORIGIN_ZERO
from duemq.storage.queues.consume_queue import UNIT_SIZE, WITHDRAWN_SIZE
from duemq.storage.store import MessageStore, StoreConfig
from tests.crash.simulated_files import Folder, Node, SimulatedFiles, Sync, SyncDirectory, Write
from tests.soak import examples, sampled
from tests.support.store import OwnedStore
from tests.support.store_problems import problems
from tests.unit.storage.conftest import HOST, LEVELS, NOW_MS, append, make_store

SEGMENT: Final = 8192
QUEUES: Final = "/s/consumequeue"
CHECK: Final = "/s/queuecheck"
LEVEL: Final = (SCHEDULE_TOPIC, 2)
UNITS_A_FILE: Final = 20
ALWAYS_GOES: Final = RetentionConfig(reserved_hours=-1, delete_when=";".join(f"{hour:02}" for hour in range(24)))
"""Every file that is no longer needed expires."""

Told = dict[tuple[str, int, int], bytes]
"""The answers to producers: topic, queue and queue offset of each body."""


class World:
    """A store in memory, and its expected content."""

    def __init__(self) -> None:
        self.files = SimulatedFiles()
        self.told: Told = {}
        self.withdrawn: set[int] = set()
        """Queue offsets of withdrawn messages of the level."""
        self.store = make_store("/s", self.files, segment_size=SEGMENT)
        self.recovered = self.store.open()
        self.owned = OwnedStore(self.store)

    def send(self, topic: str, queue_id: int, count: int = 1) -> None:
        for _ in range(count):
            body = b"%s %d %d" % (topic.encode(), queue_id, len(self.told)) * 5
            offset = self.store.ensure_queue(topic, queue_id).next_offset
            append(self.store, topic, queue_id, body)
            self.told[topic, queue_id, offset] = body

    def withdraw(self, offset: int) -> None:
        """Withdraw a message of the level as a cancel does: by a record, then a mark."""
        store = self.store
        queue = store.ensure_queue(*LEVEL)
        unit = queue.unit(offset)
        assert unit is not None
        store.appender.begin(NOW_MS)
        text = f"{TIMER_DEL_UNIQKEY}\x01x\x02".encode()
        timer_queue = store.ensure_queue(TIMER_TOPIC, 0)
        self.told[TIMER_TOPIC, 0, timer_queue.next_offset] = b""
        store.appender.add(timer_queue, b"", text, 0, 1, HOST, prepared_transaction_offset=unit[0] or ORIGIN_ZERO)
        store.appender.commit()
        store.mark(queue, offset, WITHDRAWN_SIZE)
        self.withdrawn.add(offset)

    def checkpoint(self) -> None:
        self.owned.checkpoint()

    def stop(self) -> None:
        self.owned.stop()

    def reopen(self) -> list[MutableMapping[str, Any]]:
        """Open the store anew; return the warnings."""
        self.files.after_kill()
        self.store = make_store("/s", self.files, segment_size=SEGMENT)
        with capture_logs() as lines:
            self.recovered = self.store.open()
        self.owned = OwnedStore(self.store)
        for physical in self.recovered.origins.withdrawn:  # as the levels do
            message = self.store.message_at(physical)
            assert message is not None
            self.store.mark(self.store.ensure_queue(*LEVEL), message.queue_offset, WITHDRAWN_SIZE)
        return [line for line in lines if line["log_level"] == "warning"]

    def look(self) -> None:
        """Check that every message is at its offset, and that new ones get the next offsets."""
        store = self.store
        assert list(problems(store)) == []
        for (topic, queue_id, offset), body in self.told.items():
            queue = store.queue(topic, queue_id)
            unit = queue.unit(offset) if queue is not None else None
            assert unit is not None, (topic, queue_id, offset)
            message = store.message_at(unit[0])
            assert message is not None
            assert (message.topic, message.queue_id, message.queue_offset) == (topic, queue_id, offset)
            assert message.body == body
            if (topic, queue_id) == LEVEL:
                assert (unit[1] == WITHDRAWN_SIZE) == (offset in self.withdrawn), offset
        for queue in store.all_queues():
            assert queue.next_offset == 1 + max(
                offset for topic, queue_id, offset in self.told if (topic, queue_id) == (queue.topic, queue.queue_id)
            )

    def copy(self) -> World:
        other = World.__new__(World)
        other.told, other.withdrawn = dict(self.told), set(self.withdrawn)
        other.files = copied(self.files)
        return other


def copied(files: SimulatedFiles) -> SimulatedFiles:
    nodes = {path: Node(0) for path in files.names}
    for path, node in files.names.items():
        nodes[path].data[:] = node.data
    return SimulatedFiles(nodes, [], {path: Folder() for path in files.folders})


def filled() -> World:
    world = World()
    chance = random.Random(7)
    for number in range(130):
        world.send("a", number % 2)
        world.send("b", 0, chance.randrange(2))
        world.send(*LEVEL, chance.randrange(3))
        if number == 60:
            for offset in (0, 3, 21, 22, 40):
                world.withdraw(offset)
            world.checkpoint()
        if number == 100:
            world.checkpoint()
            for offset in (1, 45, 60):
                world.withdraw(offset)
            world.checkpoint()
    return world


@cache
def whole(how: str) -> World:
    """A closed store: after a clean stop, or killed with records behind the checkpoint."""
    world = filled()
    if how == "stopped":
        world.stop()
    else:
        world.checkpoint()
        world.send("a", 0, 3)
        world.send("c", 0, 30)
        world.send(*LEVEL, 2)
        world.withdraw(50)
    world.files.after_kill()
    return world


def noted(world: World) -> dict[str, int]:
    """The queue files with the number of bytes in units before the checkpoint, by their records."""
    other = world.copy()
    other.reopen()
    offset = other.store.checkpoint.recovery_offset
    assert offset is not None
    found = {}
    for queue in other.store.all_queues():
        count = sum((queue.unit(at) or (0,))[0] < offset for at in range(queue.next_offset))
        for base in range(0, count, UNITS_A_FILE):
            path = f"{QUEUES}/{queue.topic}/{queue.queue_id}/{base * UNIT_SIZE:020}"
            found[path] = min(UNITS_A_FILE, count - base) * UNIT_SIZE
    return found


NOTED: Final[Callable[[str], Mapping[str, int]]] = cache(lambda how: noted(whole(how)))


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_store_that_is_whole_opens_without_a_word(how: str) -> None:
    world = whole(how).copy()
    assert world.reopen() == []
    world.look()
    assert world.recovered.records == (0 if how == "stopped" else 36)


@examples(1 / 2)
@given(
    st.sampled_from(["stopped", "killed"]), st.sampled_from(["flip", "cut", "zero", "remove", "directory"]), st.data()
)
def test_whatever_a_file_has_become_all_messages_are_where_they_were(
    how: str, damage: str, data: st.DataObject
) -> None:
    world = whole(how).copy()
    files = world.files
    path = data.draw(st.sampled_from(sorted(path for path in files.names if path.startswith(QUEUES))))
    node, known = files.names[path], NOTED(how).get(path, 0)
    before = bytes(node.data)
    match damage:
        case "flip":
            at = data.draw(st.integers(0, len(before) - 1))
            node.data[at] ^= data.draw(st.integers(1, 255))
            # A size that becomes 1 looks like a withdrawn message, which cannot be detected.
            size_at = at // UNIT_SIZE * UNIT_SIZE + 8
            assume(int.from_bytes(node.data[size_at : size_at + 4], "big") != WITHDRAWN_SIZE)
        case "cut":
            del node.data[data.draw(st.integers(0, len(before) - 1)) :]
        case "zero":
            node.data[:] = bytes(len(before))
        case "remove":
            files.remove(path)
        case _:
            files.remove_tree(os.path.dirname(path))
    is_seen = bytes(node.data[:known]) != before[:known] or (path not in files.names and known > 0)
    is_seen |= len(node.data) not in (0, len(before))
    warnings = world.reopen()
    expected = {1} if is_seen else {0, 1} if len(node.data) != len(before) else {0}
    assert len(warnings) in expected, warnings
    if warnings:
        assert warnings[0]["event"] == "consume_queues_made_again"
        assert path in warnings[0]["reason"] or damage == "directory"
    world.look()
    world.send("a", 0, 25)
    world.send(*LEVEL, 3)
    world.look()
    world.stop()
    assert world.reopen() == []
    world.look()


@examples(1 / 2)
@given(st.data())
def test_a_crash_at_any_moment_while_queues_are_made_again_is_no_harm(data: st.DataObject) -> None:
    """A kill or a power cut at any moment while queues are made again does no harm: the new files may be there or not,
    and the note is of the old ones."""
    world = whole("killed").copy()
    paths = sorted(NOTED("killed"))
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4)):
        world.files.remove(path)
    world.files.remember()
    begun = len(world.files.operations)
    world.reopen()
    world.checkpoint()
    when = data.draw(st.integers(begun, len(world.files.operations)))
    style = data.draw(st.sampled_from(["nothing", "some", "everything"]))
    world.files = world.files.after_crash(when, random.Random(when), style)
    assert len(world.reopen()) <= 1
    world.look()


@pytest.mark.parametrize("seed", sampled(range(5), range(2)))
def test_a_crash_between_files_and_note_leaves_no_doubt(seed: int) -> None:
    """After a kill at any moment of a life the note agrees with the files, so that no start makes anything again."""
    world = World()
    chance = random.Random(seed)
    for _ in range(12):
        world.send("a", 0, chance.randrange(12))
        world.send(*LEVEL, chance.randrange(12))
        if chance.random() < 0.5:
            free = [at for topic, _, at in world.told if topic == SCHEDULE_TOPIC and at not in world.withdrawn]
            if free:
                world.withdraw(chance.choice(free))
        if chance.random() < 0.3:
            world.owned.flush()
            assert world.reopen() == []
        if chance.random() < 0.6:
            world.checkpoint()
    for when in range(0, len(world.files.operations), 3):
        for style in ("nothing", "some", "everything"):
            image = world.files.after_crash(when, chance, style)
            store = make_store("/s", image, segment_size=SEGMENT)
            with capture_logs() as lines:
                store.open()
            assert [line for line in lines if line["log_level"] == "warning"] == [], (when, style)
            assert list(problems(store)) == [], (when, style)


# --- the note itself


@examples(1 / 2)
@given(st.sampled_from(["flip", "cut", "zero", "remove"]), st.data())
def test_a_note_that_is_damaged_is_told_once_and_made_anew(damage: str, data: st.DataObject) -> None:
    world = whole("killed").copy()
    node = world.files.names[CHECK]
    used = len(bytes(node.data).rstrip(b"\0"))
    match damage:
        case "flip":
            node.data[data.draw(st.integers(0, used - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del node.data[data.draw(st.integers(0, used - 8)) :]
        case "zero":
            node.data[:] = bytes(len(node.data))
        case _:
            world.files.remove(CHECK)
    assert [line["event"] for line in world.reopen()] == ["queuecheck_passed_over"]
    world.look()
    world.checkpoint()
    assert world.reopen() == []
    world.look()


def test_what_is_left_of_a_damaged_note_still_finds_what_is_lost() -> None:
    world = whole("killed").copy()
    node = world.files.names[CHECK]
    node.data[len(bytes(node.data).rstrip(b"\0")) - 1] ^= 0xFF
    world.files.remove(f"{QUEUES}/a/0/{0:020}")
    warnings = [line["event"] for line in world.reopen()]
    assert warnings == ["queuecheck_passed_over", "consume_queues_made_again"]
    world.look()


def test_a_store_of_an_earlier_version_opens_without_a_word_and_has_a_note_then() -> None:
    world = whole("stopped").copy()
    other = make_store("/s", world.files, segment_size=SEGMENT)
    other.inspect()
    other.forget_note("queues")
    other.abandon()
    world.files.remove(CHECK)
    assert world.reopen() == []
    world.look()
    world.send("a", 0)
    world.checkpoint()
    world.files.remove(f"{QUEUES}/a/0/{0:020}")
    assert len(world.reopen()) == 1
    world.look()


def test_a_checkpoint_writes_what_has_changed_and_no_more() -> None:
    world = World()
    for number in range(200):
        world.send(f"topic-{number}", 0)
    world.checkpoint()
    for _ in range(50):
        before = len(world.files.operations)
        world.send("topic-7", 0)
        world.checkpoint()
        written = [
            operation.data
            for operation in world.files.operations[before:]
            if isinstance(operation, Write) and operation.node is world.files.names[CHECK]
        ]
        assert sum(map(len, written)) < 100
    size = len(world.files.names[CHECK].data)
    for _ in range(2 * size // 40):
        world.send("topic-7", 0)
        world.checkpoint()
    assert len(world.files.names[CHECK].data) < 2 * size, "a new one is begun when it is full"
    assert world.reopen() == []


def test_after_a_start_only_what_is_not_known_to_be_durable_is_synced() -> None:
    """A stop after a start syncs only the files not known to be durable: a store of many topics stops as fast as one of
    few."""
    world = World()
    for number in range(200):
        world.send(f"topic-{number}", 0)
    world.checkpoint()
    world.send("topic-7", 0)
    assert world.reopen() == []
    before = len(world.files.operations)
    world.stop()
    nodes = {path: node for path, node in world.files.names.items() if path.startswith(QUEUES)}
    synced = {operation.node for operation in world.files.operations[before:] if isinstance(operation, Sync)}
    assert [path for path, node in nodes.items() if node in synced] == [f"{QUEUES}/topic-7/0/{0:020}"]


def test_of_a_full_store_only_the_missing_part_is_read() -> None:
    world = whole("stopped").copy()
    path = max(path for path in NOTED("stopped") if path.startswith(f"{QUEUES}/a/0/"))
    world.files.remove(path)
    (warning,) = world.reopen()
    assert warning["bytes_read"] < world.store.log.end / 2
    world.look()


def test_a_note_that_somebody_removes_from_under_a_running_broker_is_written_anew() -> None:
    world = filled()
    world.checkpoint()
    world.files.remove(CHECK)
    world.send("a", 0)
    world.checkpoint()
    assert world.owned.poison is None
    assert world.reopen() == []
    world.look()


def unreadable(world: World, topic: str, reads: int) -> None:
    """Make a checkpoint for which the units of a topic cannot be read after `reads` opens of its files (each file is
    synced before)."""
    real, left = world.files.node_at, [reads]

    def node_at(path: str) -> Node:
        if path.startswith(f"{QUEUES}/{topic}/"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "Input/output error", path)
        return real(path)

    for _ in world.owned.writing():
        pass
    world.files.node_at = node_at  # type: ignore[method-assign]
    with capture_logs() as lines:
        world.owned.sync()
    assert [line["event"] for line in lines] == ["queue_not_noted"]
    world.files.node_at = real  # type: ignore[method-assign]


def test_units_that_cannot_be_read_when_they_are_noted_poison_nothing() -> None:
    world = World()
    world.send("a", 0, 30)
    unreadable(world, "a", 2)
    image = world.copy()
    (warning,) = image.reopen()
    assert warning["queues"] == 1
    image.look()
    world.checkpoint()
    world.files.remove(f"{QUEUES}/a/0/{0:020}")
    assert len(world.reopen()) == 1
    world.look()


@pytest.mark.parametrize("what", ["file", "directory", "topic's directory", "zeros"])
def test_a_queue_that_is_lost_before_it_could_be_noted_is_made_again(what: str) -> None:
    world = World()
    world.send("b", 0, 5)
    world.send("a", 0, 30)
    unreadable(world, "a", 2)
    directory = f"{QUEUES}/a/0"
    if what == "zeros":
        node = world.files.names[f"{directory}/{0:020}"]
        node.data[:] = bytes(len(node.data))
    elif what == "file":
        world.files.remove(f"{directory}/{0:020}")
    else:
        world.files.remove_tree(directory if what == "directory" else f"{QUEUES}/a")
    (warning,) = world.reopen()
    assert "could not be read" in warning["reason"]
    world.look()
    world.checkpoint()
    assert world.reopen() == []
    world.look()


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_a_queue_of_which_nothing_could_be_noted_is_not_taken_for_a_removed_one(checkpoints: int) -> None:
    world = filled()
    world.checkpoint()
    removed(world, "a")
    world.send("a", 0, 30)
    world.send("b", 0)
    unreadable(world, "a", 2)
    image = world.copy()
    told = []
    for _ in range(checkpoints):  # of a start, which begins the note anew
        told += image.reopen()
        image.send("b", 0)
        image.owned.checkpoint()
    told += image.reopen()
    assert [line["queues"] for line in told] == [1], "that one is made again, once"
    image.look()


def test_after_a_start_that_is_not_needed_nothing_is_read_however_much_a_removed_topic_has_left() -> None:
    world = World()
    world.send("b", 0)
    world.send("a", 0, 200)
    world.checkpoint()
    removed(world, "a")
    world.checkpoint()
    assert world.reopen() == []
    assert world.recovered.records == 0
    world.look()


# --- topics that were removed


def removed(world: World, topic: str) -> None:
    results: list[Exception | None] = []
    world.owned.durability.remove_topic(topic, results.append)
    world.owned.settle()
    assert results == [None]
    for key in [key for key in world.told if key[0] == topic]:
        del world.told[key]


def after_kill(world: World) -> Recovered:
    assert world.reopen() == []
    world.look()
    return world.recovered


def test_a_removed_topic_does_not_come_back_and_makes_nothing_be_made_again() -> None:
    world = filled()
    world.checkpoint()
    world.send("a", 0, 5)
    removed(world, "a")
    assert not after_kill(world).rebuilt
    assert "a" not in world.store.queues
    world.send("a", 0, 2)
    assert not after_kill(world).rebuilt
    world.checkpoint()
    after_kill(world)
    world.files.remove_tree(QUEUES)
    assert len(world.reopen()) == 1
    world.look()


def test_what_is_left_of_a_removed_topics_files_goes_at_the_next_start() -> None:
    world = filled()
    world.checkpoint()
    world.files.fail("remove", errno.EACCES, f"{QUEUES}/a/1")
    results: list[Exception | None] = []
    world.owned.durability.remove_topic("a", results.append)
    world.owned.workers.run_one()
    assert isinstance(results[0], OSError)
    for key in [key for key in world.told if key[0] == "a"]:
        del world.told[key]
    after_kill(world)
    assert not world.files.exists(f"{QUEUES}/a")


@pytest.mark.parametrize("is_noted", [True, False])
def test_all_queues_of_a_removed_topic_go_where_one_has_messages_again(*, is_noted: bool) -> None:
    """All queues of a removed topic go, also if one of them has messages again, as after a power cut that undid the
    removal of the directories."""
    world = filled()
    world.checkpoint()
    former = {path: bytes(node.data) for path, node in world.files.names.items() if path.startswith(f"{QUEUES}/a/")}
    assert len({os.path.dirname(path) for path in former}) > 1
    removed(world, "a")
    world.send("a", 0, 2)
    if is_noted:
        world.checkpoint()
    for path, data in former.items():
        if not world.files.exists(path):
            world.files.make_directories(os.path.dirname(path))
            world.files.create(path, len(data)).write(0, data)
    after_kill(world)
    world.send("a", 1, 2)
    after_kill(world)


def test_records_that_come_after_the_log_was_cut_are_not_of_a_topic_removed_before() -> None:
    """New records do not count as those of a topic removed before, although they lie before the position of the
    removal, after a power cut took the end of the log."""
    world = filled()
    world.checkpoint()
    world.owned.flush()
    end = world.store.log.end
    world.send("a", 0, 8)
    removed(world, "a")
    for path in world.files.names:
        if path.startswith("/s/commitlog"):
            at = min(max(0, end - int(os.path.basename(path))), SEGMENT)
            world.files.names[path].data[at:] = bytes(SEGMENT - at)
    assert world.reopen() == []
    assert world.store.log.end == end
    world.send("a", 0, 3)
    after_kill(world)


def expired(world: World, count: int) -> None:
    """Remove the first files of the commitlog, as retention does."""
    for name in world.files.list("/s/commitlog")[:count]:
        world.files.remove(f"/s/commitlog/{name}")
    begin = int(world.files.list("/s/commitlog")[0])
    assert begin > 0


def test_offsets_go_on_where_all_records_of_a_lost_queue_are_gone() -> None:
    world = World()
    world.send("quiet", 0, UNITS_A_FILE)
    world.send("quiet", 1, 7)
    world.send("a", 0, 200)
    world.checkpoint()
    world.stop()
    expired(world, 2)
    world.files.remove_tree(f"{QUEUES}/quiet")
    assert len(world.reopen()) == 1
    for queue_id, count in ((0, UNITS_A_FILE), (1, 7)):
        queue = world.store.ensure_queue("quiet", queue_id)
        assert (queue.min_offset, queue.next_offset) == (count, count)
    world.stop()
    assert world.reopen() == []
    assert world.store.ensure_queue("quiet", 0).next_offset == UNITS_A_FILE


def test_names_that_are_no_offsets_stop_the_start_before_anything_is_changed() -> None:
    world = whole("stopped").copy()
    world.files.remove(f"{QUEUES}/a/0/{0:020}")
    world.files.write_whole(f"{QUEUES}/a/0/mine", b"")
    before = {path: bytes(node.data) for path, node in world.files.names.items()}
    with pytest.raises(StoreFormatError, match=f"{QUEUES}/a/0/mine"):
        make_store("/s", world.files, segment_size=SEGMENT).open()
    assert {path: bytes(node.data) for path, node in world.files.names.items()} == before


def test_a_changed_file_size_of_consume_queues_stops_the_start() -> None:
    world = whole("stopped").copy()
    with pytest.raises(StoreFormatError, match="400 bytes, but the configured file size is 4000"):
        make_store("/s", world.files, segment_size=SEGMENT, queue_size=4000).open()


# --- marks


def test_a_mark_set_while_a_checkpoint_is_made_waits_for_the_next_one() -> None:
    """A mark set while a checkpoint is made waits for the next one: its record is not durable yet, and the power may be
    cut once the checkpoint is there."""
    world = filled()
    world.checkpoint()
    world.send(*LEVEL, 5)
    owned = world.owned
    owned.urgent.wants_checkpoint = True
    while not owned.workers.held(Lane.FLUSH):
        owned.step()
    owned.workers.run_one(Lane.FLUSH)
    world.withdraw(5)
    while not owned.workers.held(Lane.FILES):
        owned.step()
    owned.workers.run_one(Lane.FILES)
    image = world.files.after_crash(len(world.files.operations), random.Random(0), "nothing")
    store = make_store("/s", image, segment_size=SEGMENT)
    store.open()
    assert list(problems(store)) == []
    world.checkpoint()
    world.withdrawn.add(5)
    image = world.files.after_crash(len(world.files.operations), random.Random(0), "nothing")
    world.files = image
    assert world.reopen() == []
    world.look()


# --- queues whose messages all expire


@examples(1 / 2)
@given(
    st.integers(1, 3 * UNITS_A_FILE + 1),
    st.lists(st.sampled_from(["expire", "stop", "kill", "lose", "send"]), min_size=1, max_size=8),
)
def test_queue_offsets_go_on_wherever_everything_of_a_queue_expires(count: int, events: list[str]) -> None:
    """The offsets of a queue continue after all its messages expired, also at the exact boundary of a file, over
    restarts, and if its files are lost afterwards."""
    files = SimulatedFiles()
    store = make_store("/s", files, segment_size=SEGMENT)
    store.open()
    owned = OwnedStore(store, retention=ALWAYS_GOES)
    append(store, "quiet", 0, *[b"%d" % number for number in range(count)])
    owned.checkpoint()
    expected = count
    for event in ["expire", *events]:
        match event:
            case "expire":
                append(store, "busy", 0, *[b"x" * 1000] * 40)
                owned.checkpoint()
                owned.expire()
            case "send":
                append(store, "quiet", 0, b"more")
                expected += 1
            case _:
                if event == "stop":
                    owned.stop()
                else:
                    owned.checkpoint()
                if event == "lose":
                    files.remove_tree(f"{QUEUES}/quiet")
                files.after_kill()
                store = make_store("/s", files, segment_size=SEGMENT)
                store.open()
                owned = OwnedStore(store, retention=ALWAYS_GOES)
        queue = store.queue("quiet", 0)
        assert queue is not None
        assert queue.next_offset == expected
        assert list(problems(store)) == []
    assert store.log.begin > 0


def test_a_commitlog_outside_the_root_is_durable_with_all_its_directories() -> None:
    files = SimulatedFiles()
    config = StoreConfig("/s", "/elsewhere/very/deep", SEGMENT, 400, 4000)
    store = MessageStore(config, files, ("127.0.0.1", 10911), LEVELS.deliver_time)
    store.open()
    owned = OwnedStore(store)
    append(store, "a", 0, *[b"x" * 1000] * 20)
    assert owned.flush()
    synced = {operation.folder for operation in files.operations if isinstance(operation, SyncDirectory)}
    for directory in ("/", "/elsewhere", "/elsewhere/very", "/elsewhere/very/deep"):
        assert files.folders[directory] in synced, directory
    image = files.after_crash(len(files.operations), random.Random(0), "nothing")
    again = MessageStore(config, image, ("127.0.0.1", 10911), LEVELS.deliver_time)
    assert again.open().records == 20


def test_a_queues_file_that_is_empty_is_made_again() -> None:
    world = World()
    world.send("a", 0, 45)
    world.checkpoint()
    names = sorted(name for name in world.files.names if name.startswith("/s/consumequeue/a/0/"))
    assert len(names) == 3
    del world.files.names[names[1]].data[:]
    assert [line["reason"] for line in world.reopen()] == [f"{names[1]} has 0 bytes instead of 400"]
    world.look()
