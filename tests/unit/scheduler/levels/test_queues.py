"""Level queues on a store in memory, with a clock that the tests move."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from duemq.protocol.records import properties
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.delivery.batches import Batches
from duemq.scheduler.levels.delay_offsets import DelayOffsets, read_delay_offsets
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.budget import Pieces
from duemq.storage.config_file import ConfigFile
from duemq.storage.errors import StoreFormatError
from duemq.storage.log.copies import ORIGIN_ZERO
from tests.crash.simulated_files import SimulatedFiles
from tests.support.messages import HOST
from tests.unit.scheduler.world import World


def test_a_message_is_delivered_at_its_time_and_not_before() -> None:
    world = World()
    due = world.schedule(2)
    assert world.levels.next_due_ms == due == 1_005_000
    world.clock.advance(4_999)
    assert world.step() == due
    assert world.delivered() == []
    world.clock.advance(1)
    assert world.run() is None
    assert [message.store_timestamp for message in world.delivered()] == [due]


def test_what_is_delivered_is_the_message_as_it_was_sent() -> None:
    world = World()
    world.schedule(1, b"body")
    world.clock.advance(1000)
    world.run()
    (message,) = world.delivered()
    assert (message.topic, message.queue_id, message.queue_offset, message.body) == ("orders", 3, 0, b"body")
    assert (message.born_timestamp, message.born_host, message.flag, message.sys_flag) == (7, HOST, 8, 1)
    assert message.reconsume_times == 2
    assert message.properties_text == "TAGS\x01t\x02DELAY\x011\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
    assert message.prepared_transaction_offset == ORIGIN_ZERO, "names the record that scheduled it"
    unit = world.store.ensure_queue("orders", 3).unit(0)
    assert unit is not None
    assert unit[2] == properties.tags_code("t"), "consumers filter by tags again"


def test_an_empty_level_waits_for_a_message_and_is_woken_by_it() -> None:
    world = World()
    assert world.step() is None
    world.schedule(3)
    assert world.wakes == 1
    world.schedule(3)
    assert world.wakes == 1, "a second message cannot be due before the first of its level"
    world.schedule(1)
    assert world.wakes == 2


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3000)), max_size=40), st.integers(1, 1500))
def test_never_early_never_lost_in_order_within_a_level(sends: list[tuple[int, int]], step_ms: int) -> None:
    # Goal: the model is a list of (due, number). Method: time passes in steps, and the arrived messages are compared
    # after each.
    world = World()
    expected: list[tuple[int, bytes]] = []
    for number, (level, pause) in enumerate(sends):
        expected.append((world.schedule(level, b"%d %d" % (level, number)), b"%d %d" % (level, number)))
        world.clock.advance(pause)
        world.run()
    queue = world.store.ensure_queue("orders", 3)
    looked_at = -1
    while True:
        now = world.clock.now_ms()
        due_now = sorted(body for due, body in expected if due <= now)
        assert queue.next_offset == len(due_now)
        if looked_at == queue.next_offset:  # no new message: the others were compared before
            world.clock.advance(step_ms)
            world.run()
            continue
        looked_at = queue.next_offset
        arrived = [message.body for message in world.delivered()]
        assert sorted(arrived) == due_now
        for name in (b"1", b"2", b"3"):
            numbers = [int(body.split()[1]) for body in arrived if body.startswith(name)]
            assert numbers == sorted(numbers)
        if len(arrived) == len(expected):
            return
        world.clock.advance(step_ms)
        world.run()


def test_a_backlog_is_delivered_in_slices_and_no_level_starves() -> None:
    world = World()
    for number in range(1000):
        world.schedule(1, bytes(8000))
        if number < 3:
            world.schedule(2, b"few")
    world.clock.advance(60_000)
    for _ in range(4):
        assert world.step(Pieces(1)) == world.clock.now_ms()
        if b"few" in world.bodies():
            break
    assert len(world.bodies()) < 1003
    assert world.bodies().count(b"few") == 3, "the second level had its turn before the first was done"
    world.run()
    assert len(world.delivered()) == 1003


def test_progress_survives_a_restart_and_nothing_comes_twice() -> None:
    world = World()
    for level in (1, 1, 2):
        world.schedule(level)
    world.clock.advance(1000)
    world.run()
    world.save()
    world.stop()
    world.open()
    world.clock.advance(10_000)
    world.run()
    assert len(world.delivered()) == 3
    assert world.levels.to_json() == {"offsetTable": {"1": 2, "2": 1, "3": 0}}


def test_what_came_due_while_the_broker_was_down_is_delivered_at_start() -> None:
    world = World()
    world.schedule(2)
    world.stop()
    world.clock.advance(100_000)
    world.open()
    assert world.run() is None
    assert len(world.delivered()) == 1


def test_rocketmqs_progress_file_is_read_and_its_other_fields_are_kept() -> None:
    files = SimulatedFiles()
    files.make_directories("/s/config")
    files.write_whole("/s/config/delayOffset.json", b'{"dataVersion":{"counter":5},"offsetTable":{1:0,2:0}}')
    world = World(files)
    assert world.levels.to_json() == {
        "dataVersion": {"counter": 5},
        "offsetTable": {"1": 0, "2": 0, "3": 0},
    }


def test_progress_outside_a_queue_is_moved_into_it_and_said() -> None:
    world = World()
    for _ in range(3):
        world.schedule(1)
    world.stop()
    for wrong, right in ((-5, 0), (99, 3)):
        world.files.remove("/s/checkpoint")  # otherwise the checkpoint has the exact progress of the level
        world.files.write_whole("/s/config/delayOffset.json", b'{"offsetTable":{"1":%d}}' % wrong)
        with capture_logs() as logs:
            world.open()
        assert world.levels.levels[1].offset == right
        assert [line["corrected"] for line in logs if line["event"] == "level_offset_corrected"] == [right]
        world.stop()


def test_a_table_shortened_between_two_runs_counts_from_the_store_time() -> None:
    """duemq counts the delay of a shortened table from the store time. RocketMQ's correctDeliverTimestamp delivers such
    messages at once, before the old and the new time."""
    world = World()
    for body in (b"0", b"1", b"2"):
        world.schedule(3, body)
        world.clock.advance(100)
    world.stop()
    world.open(DelayLevels("1s 1s 2s"))
    due = world.schedule(3, b"new")
    world.run()
    assert world.delivered() == []
    world.clock.advance(2000 - 300)
    world.run()
    assert [message.body for message in world.delivered()] == [b"0"]
    world.clock.advance(due - world.clock.now_ms())
    world.run()
    assert [message.body for message in world.delivered()] == [b"0", b"1", b"2", b"new"]


@pytest.mark.parametrize("jump_ms", [10_000, -10_000])
def test_a_shortened_table_counts_the_time_that_passed_where_the_clock_is_set(jump_ms: int) -> None:
    world = World()
    world.schedule(3, b"old")
    world.stop()
    world.open(DelayLevels("1s 1s 20s"))
    world.clock.advance(5000)
    world.run()
    world.clock.set_wall(world.clock.now_ms() + jump_ms)
    world.run()
    world.clock.advance(14_999)
    world.run()
    assert world.bodies() == []
    world.clock.advance(1)
    world.run()
    assert world.bodies() == [b"old"]


def test_messages_of_levels_that_the_table_has_no_more_still_arrive() -> None:
    world = World()
    world.schedule(3)
    world.stop()
    world.open(DelayLevels("1s"))
    world.clock.advance(30_000)
    world.run()
    assert len(world.delivered()) == 1


def test_a_message_that_cannot_be_delivered_does_not_hold_up_its_level() -> None:
    world = World()
    for text in (
        "TAGS\x01no topic",
        "REAL_TOPIC\x01orders",
        "REAL_TOPIC\x01orders\x02REAL_QID\x01x",
        "REAL_TOPIC\x01orders\x02REAL_QID\x0199999999999",
        "REAL_TOPIC\x01../up\x02REAL_QID\x010",
        "REAL_TOPIC\x01RMQ_SYS_TRANS_HALF_TOPIC\x02REAL_QID\x010",
    ):
        world.put(1, b"x", text)
    world.schedule(1, b"good")
    world.clock.advance(1000)
    with capture_logs() as logs:
        world.run()
    assert [message.body for message in world.delivered()] == [b"good"]
    assert world.levels.levels[1].skipped == 6
    assert sum(line["messages"] for line in logs if line["event"] == "scheduled_messages_undeliverable") == 6


def test_a_missing_record_is_counted_and_passed() -> None:
    world = World()
    world.schedule(1, b"gone")
    world.schedule(1, b"there")
    first = world.store.ensure_queue(SCHEDULE_TOPIC, 0).unit(0)
    assert first is not None
    world.files.names[f"/s/commitlog/{0:020}"].data[first[0] + 4] ^= 0xFF
    world.clock.advance(1000)
    with capture_logs() as logs:
        world.run()
    assert [message.body for message in world.delivered()] == [b"there"]
    assert [line["event"] for line in logs] == ["scheduled_messages_missing"]
    assert world.levels.levels[1].skipped == 1


def test_a_store_that_takes_nothing_delays_but_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.schedule(1)
    world.clock.advance(1000)
    world.store.health.fill("full")
    with monkeypatch.context() as patch:
        patch.setattr(Batches, "_read_records", lambda *_, **__: pytest.fail("read what could not be written"))
        assert world.step() == world.clock.now_ms() + 100
    assert world.levels.levels[1].offset == 0, "4.9.3 went on with the next one"
    world.store.health.has_room()
    world.clock.advance(100)
    world.run()
    assert len(world.delivered()) == 1


# --- the progress file, for RocketMQ


def saved(world: World) -> int | None:
    """The offset of level 1 in the file."""
    table = world.file.read()
    return int(table["offsetTable"]["1"]) if table else None


def test_progress_is_saved_of_what_is_durable_and_never_ahead_of_that() -> None:
    world = World()
    world.schedule(1)
    world.schedule(1)
    world.pass_time(20_000)
    writing = world.owned.writing()
    next(writing)
    end = world.store.log.end
    world.schedule(1)
    world.pass_time(1000)
    assert world.levels.levels[1].offset == 3
    for _ in writing:
        pass
    assert saved(world) is None, "the commitlog may not be durable yet"
    assert world.owned.durability.released >= end
    world.owned.sync()
    assert saved(world) == 2, "of when the checkpoint began"


def test_progress_is_saved_now_and_then_and_at_the_end() -> None:
    world = World(delivery=DeliveryConfig(save_interval=10.0))
    offsets = []
    for _ in range(4):
        world.schedule(1)
        world.pass_time(4000)
        world.checkpoint()
        offsets.append(saved(world))
    assert offsets == [None, None, 3, 3]
    world.schedule(1)
    world.pass_time(1000)
    world.stop()
    assert saved(world) == 5


def test_progress_that_did_not_change_is_not_saved_again() -> None:
    world = World(delivery=DeliveryConfig(save_interval=0.0))
    world.schedule(1)
    world.pass_time(1000)
    world.checkpoint()
    node = world.files.names[world.file.path]
    world.checkpoint()
    assert world.files.names[world.file.path] is node


@pytest.mark.parametrize("interval", [0.0, 10.0])
def test_a_checkpoint_that_cannot_save_the_progress_is_none_and_the_next_one_does(interval: float) -> None:
    world = World(delivery=DeliveryConfig(save_interval=interval))
    world.schedule(1)
    world.pass_time(1000 + int(interval * 1000))
    world.files.fail("write", errno.ENOSPC, world.file.path)
    with pytest.raises(OSError, match="No space"):
        world.checkpoint()
    world.files.heal()
    world.pass_time(2000)
    world.checkpoint()
    assert saved(world) == 1


def test_what_is_damaged_stops_the_start_only_where_it_is_needed() -> None:
    file = ConfigFile(files := SimulatedFiles(), "/t.json")
    for text in (b"{broken", b'{"offsetTable":{"one":1}}', b'{"offsetTable":[1]}', b'{"offsetTable":{"1":"x"}}'):
        files.write_whole("/t.json", text)
        with pytest.raises(StoreFormatError, match=r"/t\.json"):
            read_delay_offsets(file, is_needed=True)
        with capture_logs() as logs:
            assert read_delay_offsets(file, is_needed=False) == DelayOffsets(file)
        assert [line["event"] for line in logs] == ["delay_offsets_passed_over"]
    files.write_whole("/t.json", b'{"offsetTable":null,"dataVersion":7}')
    assert read_delay_offsets(file, is_needed=True) == DelayOffsets(file, {}, {"dataVersion": 7})


@pytest.mark.parametrize("restart", ["none", "kill", "stop"])
def test_what_was_withdrawn_is_not_counted_as_waiting(restart: str) -> None:
    world = World()
    for number in range(10):
        world.schedule(2 if number % 2 else 3, b"%d" % number)
    for level, which in ((2, 0), (2, 4), (3, 2)):
        unit = world.levels.levels[level].queue.unit(which)
        assert unit is not None
        message = world.store.message_at(unit[0])
        assert message is not None
        world.levels.withdraw(message)
    # Only a mark tells of the withdrawal here; a cancel would also append a record.
    if restart != "none":
        world.checkpoint()
    if restart == "stop":
        world.stop()
    if restart != "none":
        world.open()
    assert [world.levels.levels[level].waiting for level in (2, 3)] == [3, 4]
    assert "pending=3 " in world.levels.describe(world.levels.levels[2], world.clock.now_ms())
    world.pass_time(5000)
    assert [world.levels.levels[level].waiting for level in (2, 3)] == [0, 4]
    world.pass_time(25_000)
    assert [world.levels.levels[level].waiting for level in (2, 3)] == [0, 0]
    world.schedule(2)
    assert world.levels.levels[2].waiting == 1
