"""The last message of a key replaces the one before, over a kill and other events."""

from __future__ import annotations

import random

import pytest

from duemq.protocol.records import properties
from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.files.unit import WITHDRAWN
from duemq.scheduler.timers.index.keys import KEY_BITS, KeyIndex, key_hash, tag_of
from duemq.storage.errors import StoreFull
from tests.unit.scheduler.timer_world import START_MS, TimerWorld


@pytest.fixture
def world() -> TimerWorld:
    return TimerWorld(TimerConfig(log_segment_size=52 * 1000, roll_window=40))


def test_only_the_last_of_a_key_is_delivered_and_at_its_own_time(world: TimerWorld) -> None:
    assert [world.send_instead(START_MS + due, "a") for due in (5000, 9000, 2000, 7000)] == [0, 1, 1, 1]
    world.pass_time(20_000)
    assert world.bodies() == [b"m4"]
    assert world.lateness() == [0]
    assert world.timers.metrics() == {}


def test_other_keys_topics_and_messages_without_the_option_stay(world: TimerWorld) -> None:
    world.send(START_MS + 1000, text="KEYS\x01a\x02")
    world.send_instead(START_MS + 1000, "a")
    world.send_instead(START_MS + 1000, "b")
    world.send_instead(START_MS + 1000, "a", topic="others")
    assert world.send_instead(START_MS + 1000, "a") == 1
    world.pass_time(2000)
    assert world.bodies() == [b"m1", b"m3", b"m5"]
    assert world.bodies("others") == [b"m4"]


def test_keys_that_look_alike_in_the_timer_log_are_told_apart(world: TimerWorld) -> None:
    by_hash: dict[int, str] = {}
    for number in range(100_000):
        other = by_hash.setdefault(key_hash(str(number)), str(number))
        if other != str(number):
            break
    assert world.send_instead(START_MS + 1000, other) == 0
    assert world.send_instead(START_MS + 1000, str(number)) == 0
    assert world.send_instead(START_MS + 1000, other) == 1
    world.pass_time(2000)
    assert world.bodies() == [b"m2", b"m3"]


def test_what_is_delivered_already_is_not_replaced(world: TimerWorld) -> None:
    world.send_instead(START_MS + 1000, "a")
    world.pass_time(1500)
    assert world.send_instead(START_MS + 3000, "a") == 0
    world.pass_time(5000)
    assert world.bodies() == [b"m1", b"m2"]


@pytest.mark.parametrize("delay", [500, 3000, 70_000, 500_000])
@pytest.mark.parametrize("is_checkpoint", [False, True])
@pytest.mark.parametrize("is_stop", [False, True])
def test_a_replacement_outlives_a_restart(world: TimerWorld, delay: int, is_checkpoint: bool, is_stop: bool) -> None:
    world.send_instead(START_MS + delay, "a")
    world.pass_time(300)
    if is_checkpoint:
        world.checkpoint()
    world.send_instead(START_MS + delay + 100, "a")
    if is_stop:
        world.close()
    world.open()
    assert world.send_instead(START_MS + delay + 200, "a") == 1
    world.open()
    world.pass_time(delay + 1000)
    assert world.bodies() == [b"m3"]
    assert world.lateness() == [0]
    assert world.timers.metrics() == {}


def test_what_was_replaced_before_a_kill_is_counted_out_once(world: TimerWorld) -> None:
    """A message replaced before a kill is subtracted from the counts once, although two records name it: the new
    message's own, and the one that deletes for Apache's broker."""
    world.send_instead(START_MS + 9000, "a")
    world.send(START_MS + 9000)
    world.step()
    world.checkpoint()
    assert world.send_instead(START_MS + 9000, "a") == 1
    world.open()
    world.step()
    assert world.timers.metrics() == {"orders": 2}
    assert world.state().pending == 2


def test_where_the_log_was_lost_the_last_one_is_still_known(world: TimerWorld) -> None:
    for key in "abab":
        world.send_instead(START_MS + 60_000, key)
    world.run()
    world.checkpoint()
    world.files.remove_tree("/s/timerlog")
    world.open()
    assert world.send_instead(START_MS + 61_000, "a") == 1
    world.pass_time(70_000)
    assert world.bodies() == [b"m4", b"m5"]


def test_one_record_replaces_and_is_sent_so_that_half_a_batch_is_no_loss(world: TimerWorld) -> None:
    first = world.send_instead(START_MS + 5000, "a") or world.last_physical_offset
    world.send_instead(START_MS + 6000, "a")
    message = world.store.message_at(world.last_physical_offset)
    assert message is not None
    # The new message comes before the record for Apache's broker, and itself names the message that it replaces.
    assert message.prepared_transaction_offset == (first or -1)
    mark = world.store.message_at(world.store.appender.last_physical_offset)
    assert mark is not None
    assert mark.physical_offset > message.physical_offset
    assert mark.get_property(properties.TIMER_DEL_UNIQKEY) == "orders+K1"
    segment = next(name for name in world.files.names if name.startswith("/s/commitlog/"))
    world.files.open(segment).write(mark.physical_offset, bytes(1000))
    world.open()
    world.pass_time(10_000)
    assert world.bodies() == [b"m2"]


def test_a_store_that_takes_nothing_replaces_nothing(world: TimerWorld) -> None:
    world.send_instead(START_MS + 5000, "a")
    world.store.health.fill("full")
    with pytest.raises(StoreFull):
        world.send_instead(START_MS + 6000, "a")
    world.store.health.has_room()
    world.pass_time(10_000)
    assert world.bodies() == [b"m1"]


def test_what_replaces_can_be_cancelled_moved_and_replaced(world: TimerWorld) -> None:
    world.send_instead(START_MS + 5000, "a")
    first = world.last_physical_offset
    world.send_instead(START_MS + 5000, "a")
    assert world.cancel(first) is Cancelled.CANCELLED_BEFORE
    result, _ = world.reschedule(world.last_physical_offset, START_MS + 8000)
    assert result is Cancelled.CANCELLED
    assert world.send_instead(START_MS + 7000, "a") == 1
    assert world.cancel(world.last_physical_offset) is Cancelled.CANCELLED
    assert world.send_instead(START_MS + 7000, "a") == 0
    world.pass_time(10_000)
    assert world.bodies() == [b"m4"]


def test_apaches_broker_finds_the_record_that_deletes_in_the_queue(world: TimerWorld) -> None:
    world.send_instead(START_MS + 5000, "a")
    world.send_instead(START_MS + 5000, "a")
    queue = world.store.queue(TIMER_TOPIC, 0)
    assert queue is not None
    texts = []
    for offset in range(queue.next_offset):
        unit = queue.unit(offset)
        assert unit is not None
        message = world.store.message_at(*unit[:2])
        assert message is not None
        texts.append(message.get_property(properties.TIMER_DEL_UNIQKEY))
    assert texts == [None, None, "orders+K1"]


def test_a_second_try_of_a_client_is_not_deleted_with_its_first(world: TimerWorld) -> None:
    world.send_instead(START_MS + 5000, "a")
    world.sent -= 1  # the same UNIQ_KEY
    world.send_instead(START_MS + 5000, "a")
    marks = [
        unit
        for _, units in world.timers._slots.log.scan(0, world.timers._slots.log.end)
        for unit in units
        if unit["magic"] & WITHDRAWN
    ]
    assert len(marks) == 1
    queue = world.store.queue(TIMER_TOPIC, 0)
    assert queue is not None
    assert queue.next_offset == 2
    world.pass_time(6000)
    assert len(world.bodies()) == 1


def test_the_index_is_a_set_of_pairs() -> None:
    chance, index, model = random.Random(1), KeyIndex(), set[tuple[int, int]]()
    tags = [tag_of(chance.randrange(-(2**31), 2**31), chance.randrange(1, 1 << KEY_BITS)) for _ in range(400)]
    for step in range(20_000):
        pair = chance.choice(tags), chance.randrange(10)
        if chance.random() < (0.7 if step < 8000 else 0.3):
            index.add(*pair)
            model.add(pair)
        else:
            index.remove(*pair)
            model.discard(pair)
        if not step % 50:
            assert index.find(pair[0]) == sorted((place for tag, place in model if tag == pair[0]), reverse=True)
    assert len(index) == len(model)
    for tag, place in list(model):
        index.remove(tag, place)
    assert len(index) == 0
