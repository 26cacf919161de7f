"""Goal: after a clean stop RocketMQ's broker delivers each waiting message once, at its latest time, and none that was
cancelled.

Method: a life in which messages are sent, changed, parked, kept and moved on, with kills in it; then the files are read
as RocketMQ's broker (5.3.3) reads them, by their bytes: it follows the chains of the slots, takes units with 4 and
without 2 for marks that delete by key, puts records of units with 2 into the wheel anew, and enqueues the messages
behind timercheck's queue offset."""

from __future__ import annotations

import random
import struct
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from duemq.protocol.records import properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.policy.policies import TimerPolicy
from tests.unit.scheduler.timer_world import START_MS, TimerWorld

LOG_SIZE = 52 * 20_000
PAUSED = TimerPolicy(is_paused=True)
WINDOW = 60


@pytest.fixture
def world() -> TimerWorld:
    return TimerWorld(TimerConfig(log_segment_size=LOG_SIZE, roll_window=WINDOW), levels="1s 2h")


def rocketmq_delivers(world: TimerWorld) -> dict[bytes, list[int]]:
    """Return the seconds, by body, in which RocketMQ's broker would deliver a message from the closed store of a
    world."""
    check = struct.unpack(">7q", (world.files.read_whole("/s/config/timercheck") or b"")[:56])
    read_second, next_offset = check[0] // 1000, min(check[2], check[3])
    log = world.files.read_whole("/s/timerlog/" + "0" * 20) or b""  # no file if the wheel got no message
    world.open()  # for the records

    def record(physical: int, size: int) -> StoredMessage:
        message = world.store.message_at(physical, size)
        assert message is not None
        return message

    last, previous, units = dict[int, int](), dict[int, int](), dict[int, tuple[int, StoredMessage]]()
    for position in range(0, len(log) - 51, 52):
        size, before, magic, written, delay, physical, bytes_, _, _ = struct.unpack_from(">iqiqiqiiq", log, position)
        if size != 52 or magic | 0xF != 0xF:
            break
        last[(written + delay) // 1000], previous[position] = position, before
        units[position] = magic, record(physical, bytes_)
    wheel: dict[int, list[tuple[int, StoredMessage]]] = defaultdict(list)
    for second, position in last.items():
        at = position if second >= read_second else -1
        while at >= 0:
            wheel[second].append(units[at])
            at = previous[at]

    def enqueue(message: StoredMessage) -> None:
        magic = 5 if message.get_property(properties.TIMER_DEL_UNIQKEY) is not None else 1
        out_ms = message.get_property(properties.TIMER_OUT_MS)
        assert out_ms is not None
        wheel[max(int(out_ms) // 1000, read_second)].append((magic, message))

    queue = world.store.queue(TIMER_TOPIC, 0)
    assert queue is not None
    for offset in range(next_offset, queue.next_offset):
        unit = queue.unit(offset)
        assert unit is not None
        enqueue(record(*unit[:2]))
    result: dict[bytes, list[int]] = defaultdict(list)
    while wheel:
        second = min(wheel)
        slot = wheel.pop(second)
        deletes = {message.get_property(properties.TIMER_DEL_UNIQKEY) for magic, message in slot if magic & 6 == 4}
        for magic, message in slot:
            topic, key = (message.get_property(name) for name in (properties.REAL_TOPIC, properties.UNIQ_KEY))
            if magic & 6 == 4 or (key and f"{topic}+{key}" in deletes - {None}):
                continue
            if magic & 2:
                assert message.get_property(properties.TIMER_OUT_MS), "it would be delivered at once"
                enqueue(message)
            else:
                result[message.body].append(second)
    return result


def later(world: TimerWorld, ms: int) -> int:
    return world.now_ms + ms


def rescheduled(world: TimerWorld, place: int) -> None:
    assert world.reschedule(place, later(world, 9000))[0] is Cancelled.CANCELLED


def rescheduled_in_its_slot(world: TimerWorld, place: int) -> None:
    for ms in (5200, 5300):
        assert world.reschedule(place, START_MS + ms)[0] is Cancelled.CANCELLED


def rescheduled_there_and_back(world: TimerWorld, place: int) -> None:
    for ms in (20_000, 5200, 500_000, 5300):
        assert world.reschedule(place, START_MS + ms)[0] is Cancelled.CANCELLED


def delivered_now(world: TimerWorld, place: int) -> None:
    assert world.reschedule(place, 0)[0] is Cancelled.CANCELLED


def kept(world: TimerWorld, place: int) -> None:
    assert world.keep() > 0


def cancelled(world: TimerWorld, place: int) -> None:
    assert world.cancel(place) is Cancelled.CANCELLED


Deed = Callable[[TimerWorld, int], None]
DEEDS: list[Deed] = [
    rescheduled,
    rescheduled_in_its_slot,
    rescheduled_there_and_back,
    delivered_now,
    kept,
    cancelled,
]


@pytest.mark.parametrize("end", ["stop", "kill and stop"])
@pytest.mark.parametrize("due", [5100, 200_000, 500])
@pytest.mark.parametrize("deed", DEEDS)
def test_rocketmq_delivers_what_was_changed_once(world: TimerWorld, deed: Deed, due: int, end: str) -> None:
    """RocketMQ delivers a message that was changed, near or far or parked, once."""
    if due == 500:
        world.timers.set_policy("orders", PAUSED)
    place = world.send(START_MS + due)
    world.send(START_MS + 5200)
    world.pass_time(2000)
    world.checkpoint()
    deed(world, place)
    if end != "stop":
        world.checkpoint()
        world.open()
        if due == 500:
            world.timers.set_policy("orders", PAUSED)
    world.pass_time(10)
    came = world.bodies()
    world.close()
    came += [body for body, seconds in rocketmq_delivers(world).items() for _ in seconds]
    assert Counter(came) == Counter([b"m2"] if deed is cancelled else [b"m1", b"m2"])


def test_rocketmq_delivers_at_the_new_time(world: TimerWorld) -> None:
    place = world.send(START_MS + 5100)
    world.run()
    world.reschedule(place, START_MS + 9500)
    world.close()
    assert rocketmq_delivers(world) == {b"m1": [START_MS // 1000 + 9]}


def test_rocketmq_does_not_deliver_what_was_cancelled_without_a_unique_key(world: TimerWorld) -> None:
    world.put(f"TIMER_OUT_MS\x01{START_MS + 5000}\x02REAL_TOPIC\x01orders\x02REAL_QID\x013", b"mine")
    place = world.store.appender.last_physical_offset
    world.send(START_MS + 5500)
    world.run()
    assert world.cancel(place) is Cancelled.CANCELLED
    world.close()
    assert rocketmq_delivers(world).keys() == {b"m1"}


def test_rocketmq_delivers_what_was_moved_on_once(world: TimerWorld) -> None:
    """RocketMQ delivers a message once that moved to another slot while its old slot is the current one."""
    world.send(START_MS + 200_300)
    world.pass_time(20_500)
    assert world.timers._slots.turns.second == START_MS // 1000 + 20
    world.close()
    assert rocketmq_delivers(world) == {b"m1": [START_MS // 1000 + 200]}


def test_rocketmq_does_not_deliver_what_came_before_a_kill(world: TimerWorld) -> None:
    """RocketMQ does not repeat messages of several seconds since the checkpoint that were delivered before a kill;
    messages overdue at the stop are delivered once."""
    for ms in (500, 1500, 2500, 2900, 4500):
        world.send(START_MS + ms)
    world.run()
    world.checkpoint()
    world.pass_time(2600)
    world.open()
    world.clock.advance(300)
    world.close()
    assert rocketmq_delivers(world) == {b"m4": [START_MS // 1000 + 3], b"m5": [START_MS // 1000 + 4]}
    assert world.bodies() == [b"m1", b"m2", b"m3"]


def test_rocketmq_does_not_enqueue_what_was_withdrawn_before_a_kill(world: TimerWorld) -> None:
    world.checkpoint()
    place = world.send(START_MS + 5100)
    assert world.reschedule(place, START_MS + 9500)[0] is Cancelled.CANCELLED
    world.open()
    world.close()
    assert rocketmq_delivers(world) == {b"m1": [START_MS // 1000 + 9]}


@pytest.mark.parametrize("seed", range(40))
def test_rocketmq_delivers_what_waits_once(world: TimerWorld, seed: int) -> None:
    chance = random.Random(seed)
    places: dict[bytes, int] = {}
    gone: set[bytes] = set()

    def send() -> None:
        body, delay = f"b{len(places)}".encode(), chance.choice((50, 900, 5000, 30_000, 300_000))
        if chance.random() < 0.1:
            places[body] = world.schedule(2, body)
            world.reschedule(places[body], later(world, chance.randrange(delay)))
        else:
            places[body] = world.send(later(world, chance.randrange(delay)), body)

    def one() -> tuple[bytes, int]:
        return chance.choice(sorted(places.items()))

    def cancel() -> None:
        body, place = one()
        if world.cancel(place) is Cancelled.CANCELLED:
            gone.add(body)

    def pause() -> None:
        world.timers.set_policy("orders", chance.choice((PAUSED, None, TimerPolicy(rate=3))))

    def kill() -> None:
        world.open()

    deeds: list[tuple[int, Callable[[], object]]] = [
        (20, send),
        (10, lambda: world.reschedule(one()[1], later(world, chance.choice((0, 300, 2000, 40_000, 200_000))))),
        (4, cancel),
        (8, lambda: world.pass_time(chance.choice((0, 10, 700, 3000, 70_000)))),
        (3, pause),
        (1, world.keep),
        (2, kill),
        (3, world.checkpoint),
        (6, world.step),
    ]
    weights, acts = zip(*deeds, strict=True)
    send()
    for act in chance.choices(acts, weights, k=chance.randrange(60)):
        act()
    came = world.bodies()
    world.close()
    came += [body for body, seconds in rocketmq_delivers(world).items() for _ in seconds]
    assert Counter(came) == Counter(places.keys() - gone)
