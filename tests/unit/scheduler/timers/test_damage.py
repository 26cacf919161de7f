"""Goal: the start checks the timers' derived files, and makes damaged ones again: no message is lost or delivered
twice, and cancelled messages stay cancelled.

Method: a life with near and far messages, delivered, cancelled, put off and moved on, ends with a kill; then bytes of
the timer log's files or of the wheel are flipped, or a whole file is zeroed."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from structlog.testing import capture_logs

from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.wheel import FILE_SIZE
from duemq.scheduler.timers.policy.policies import TimerPolicy
from tests.soak import examples
from tests.unit.scheduler.timer_world import START_MS, TimerWorld

if TYPE_CHECKING:
    from duemq.scheduler.timers.files.unit import Units

Damage = Callable[[TimerWorld], None]

DEAR = examples(1 / 4)
"""For tests whose examples are whole lives."""


def lived(seed: int, *, is_stopped: bool = False) -> tuple[TimerWorld, set[bytes]]:
    """Return a world that was killed, or stopped, and the bodies of all messages to be delivered in it."""
    chance = random.Random(seed)
    world = TimerWorld(TimerConfig(log_segment_size=52 * 30, roll_window=20_000))
    world.timers.set_policy("orders", TimerPolicy(spread_ms=1500))
    places: dict[bytes, int] = {}
    gone: set[bytes] = set()
    for _ in range(chance.randint(2, 6)):
        for _ in range(chance.randint(1, 25)):
            body = f"b{len(places)}".encode()
            delay = chance.choice((50, 900, 3000, 9000, 4_000_000, 100_000_000))
            places[body] = world.send(world.now_ms + chance.randrange(delay), body)
        world.pass_time(chance.choice((0, 10, 700, 2500)))
        for body in chance.sample(sorted(places), min(3, len(places))):
            if world.cancel(places[body]) is Cancelled.CANCELLED:
                gone.add(body)
        if chance.random() < 0.7:
            world.checkpoint()
    if is_stopped:
        world.close()
    return world, set(places) - gone


def settled(world: TimerWorld, come: set[bytes]) -> None:
    """Open the store again, and check that each message is delivered once."""
    world.open()
    world.run()
    world.pass_time(100_100_000)
    assert Counter(world.bodies()) == Counter(come)
    assert world.timers.metrics() == {}
    world.checkpoint()
    with capture_logs() as logs:
        world.open()
    assert not warnings(logs), "what was made again is noted"


def warnings(logs: object) -> list[str]:
    assert isinstance(logs, list)
    return [line["reason"] for line in logs if line["event"] in ("timers_rebuilt", "timer_wheel_rebuilt")]


def used(world: TimerWorld) -> list[tuple[str, int]]:
    """The files of the timer log, and the number of bytes used in each."""
    end = world.timers._slots.log.end
    paths = sorted(path for path in world.files.names if path.startswith("/s/timerlog/"))
    return [(path, min(52 * 30, end - int(path.rpartition("/")[2]))) for path in paths]


def test_all_queues_made_again_say_nothing_of_the_timer_log() -> None:
    """Rebuilding all consume queues does not count as damage of the timer log, although the start then reads the whole
    commitlog, with withdrawals that the note knows too."""
    world = TimerWorld()
    places = [world.send(START_MS + 60_000 + number) for number in range(20)]
    world.run()
    for place in places[:10]:
        assert world.cancel(place) is Cancelled.CANCELLED
    world.run()
    world.checkpoint()
    assert world.cancel(places[10]) is Cancelled.CANCELLED
    for name in [name for name in world.files.names if "/consumequeue/" in name or name.endswith("queuecheck")]:
        world.files.remove(name)
    with capture_logs() as logs:
        world.open()
    assert not warnings(logs)
    world.pass_time(70_000)
    assert len(world.bodies()) == 9


@DEAR
@given(
    seed=st.integers(0, 30),
    is_stopped=st.booleans(),
    flips=st.lists(st.tuples(st.floats(0, 0.999999), st.integers(1, 255)), min_size=1, max_size=3),
)
def test_flipped_bytes_of_the_log_lose_nothing(seed: int, is_stopped: bool, flips: list[tuple[float, int]]) -> None:
    world, come = lived(seed, is_stopped=is_stopped)
    files = used(world)
    for where, bits in flips:
        path, size = files[int(where * len(files))]
        if size > 0:
            world.files.names[path].data[int(where * len(files) % 1 * size)] ^= bits
    settled(world, come)


@DEAR
@given(
    seed=st.integers(0, 30),
    is_stopped=st.booleans(),
    flips=st.lists(st.tuples(st.integers(0, 33_600_000), st.integers(1, 255)), min_size=1, max_size=3),
)
def test_flipped_bytes_of_the_wheel_lose_nothing(seed: int, is_stopped: bool, flips: list[tuple[int, int]]) -> None:
    world, come = lived(seed, is_stopped=is_stopped)
    data = world.files.names["/s/timerwheel"].data
    slots = np.flatnonzero(np.frombuffer(data[7:FILE_SIZE:32], np.uint8)).tolist()
    for where, bits in flips:
        # Mostly within the used part.
        at = slots[where % len(slots)] * 32 + where % 28 if slots and where % 4 else where
        data[at] ^= bits
    settled(world, come)


def zeros(path: str) -> Damage:
    def damage(world: TimerWorld) -> None:
        data = world.files.names[path].data
        data[:] = bytes(len(data))

    return damage


@pytest.mark.parametrize("path", ["/s/timerwheel", f"/s/timerlog/{0:020}", f"/s/timerlog/{52 * 30:020}"])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_files_of_zeros_are_made_again(path: str, *, is_stopped: bool) -> None:
    for seed in range(3):
        world, come = lived(seed, is_stopped=is_stopped)
        if path in world.files.names and world.files.names[path].data.rstrip(b"\0"):
            zeros(path)(world)
            settled(world, come)


def test_one_warning_says_which_file_and_why() -> None:
    world, _ = lived(3, is_stopped=True)
    path, _ = used(world)[0]
    world.files.names[path].data[44] ^= 1
    with capture_logs() as logs:
        world.open()
    (warning,) = warnings(logs)
    assert f"timerlog/{0:020}" in warning
    assert "checksum" in warning


def test_hours_of_the_wheel_that_are_damaged_are_told() -> None:
    world = TimerWorld(start_ms=START_MS - START_MS % 3_600_000)
    due = world.now_ms + 3 * 3_600_000
    world.send(due)
    world.run()
    world.checkpoint()
    world.send(world.now_ms + 90_000)
    world.run()
    world.checkpoint()
    world.files.names["/s/timerwheel"].data[(due // 1000 - 1) % 1_209_600 * 32 + 20] ^= 1
    with capture_logs() as logs:
        world.open()
    assert [line["hours"] for line in logs if line["event"] == "timer_wheel_rebuilt"] == [1]
    world.pass_time(3 * 3_600_000)
    assert len(world.bodies()) == 2


def test_a_kill_alone_makes_no_warning() -> None:
    """A kill alone causes no warning: hours of the wheel changed since the checkpoint, marks, and units behind it are
    not damage."""
    for seed in range(6):
        world, come = lived(seed)
        with capture_logs() as logs:
            world.open()
        noted = "timers" in world.recovered.notes
        assert not noted or not warnings(logs), seed
        settled(world, come)


def with_files_to_go() -> tuple[TimerWorld, list[str]]:
    """Return a world with one waiting message, and the files of its timer log that are no longer needed."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 4))
    for number in range(10):
        world.send(START_MS + number * 1000)
    world.send(START_MS + 90_000, b"late")
    world.pass_time(20_000)
    world.checkpoint()
    paths: list[str] = []
    while (found := world.timers.expire_next()) is not None:
        paths += found
    assert f"/s/timerlog/{0:020}" in paths
    return world, paths


def test_a_file_that_is_to_go_and_is_still_there_is_no_damage() -> None:
    """A start after a kill between a checkpoint and the removal of files that it no longer needs reports no damage, and
    removes them."""
    world, paths = with_files_to_go()
    world.pass_time(5000)
    world.send(START_MS + 91_000)
    world.pass_time(5000)
    world.checkpoint()
    with capture_logs() as logs:
        world.open()
    assert not warnings(logs)
    assert not set(paths) & set(world.files.names), "nobody needs them"
    world.pass_time(100_000)
    assert len(world.bodies()) == 12


def test_a_file_that_is_to_go_and_stays_harms_nothing() -> None:
    """A file that could not be removed does no harm: it has no checksum any more, so the start believes nothing in
    it."""
    world, _ = with_files_to_go()
    world.send(START_MS + 91_000)
    world.run()
    world.checkpoint()
    first = world.files.names[f"/s/timerlog/{0:020}"].data
    first[25] ^= 1  # makes the slot's second a later one
    world.files.fail("remove", errno.EACCES, "/s/timerlog")
    with capture_logs() as logs:
        world.open()
    assert not warnings(logs)
    world.pass_time(100_000)
    assert len(world.bodies()) == 12


def test_a_file_that_went_after_the_checkpoint_is_no_damage() -> None:
    """A file that was removed after the checkpoint, which still has its checksum, is not damage."""
    world, paths = with_files_to_go()
    for path in paths:
        world.files.remove(path)
    assert f"/s/timerlog/{0:020}" not in world.files.names
    with capture_logs() as logs:
        world.open()
    assert not warnings(logs)
    world.pass_time(100_000)
    assert len(world.bodies()) == 11


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_log_that_ends_early_is_made_again(*, is_gone: bool) -> None:
    """A timer log without its last file, or with zeros in it, is made again: no unit is behind the noted end."""
    world, come = lived(3)
    world.checkpoint()
    path, _ = used(world)[-1]
    if is_gone:
        world.files.remove(path)
    else:
        zeros(path)(world)
    with capture_logs() as logs:
        world.open()
    assert len(warnings(logs)) == 1
    settled(world, come)


def test_a_start_reads_the_timer_log_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads the timer log once; only the units behind the checkpoint (one here) and those of the current second
    may be read again."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 1000))
    for number in range(3500):
        world.send(START_MS + 90_000 + number)
    world.run()
    world.clock.advance(5000)
    world.send(world.now_ms)
    world.run()
    world.checkpoint()
    world.send(START_MS + 90_000)
    world.run()
    read: list[int] = []
    chunks = TimerLog._chunks

    def counted(log: TimerLog, position: int, end: int) -> Iterator[tuple[int, Units]]:
        for at, units in chunks(log, position, end):
            read.append(len(units))
            yield at, units

    monkeypatch.setattr(TimerLog, "_chunks", counted)
    world.open()
    assert sum(read) < 3502 + 600


@pytest.mark.parametrize("count", [1, 2, 3])
def test_first_files_of_the_timer_log_that_are_missing_are_made_again(count: int) -> None:
    """Missing first files of the timer log that were still needed are made again: messages in them still wait,
    whichever were delivered before the checkpoint."""
    world = TimerWorld(TimerConfig(log_segment_size=520))
    bodies = [b"%d" % number for number in range(60)]
    for number, body in enumerate(bodies):
        world.send(world.now_ms + 1000 + 1000 * (number * 7 % 60), body)
    world.pass_time(10_000)
    world.checkpoint()
    for name in world.files.list("/s/timerlog")[:count]:
        world.files.remove(f"/s/timerlog/{name}")
    world.open()
    world.pass_time(60_000)
    assert sorted(world.bodies()) == sorted(bodies)


@pytest.mark.parametrize("data", [b'{"timingCount":{"t\xc2":{"count":1,"timeStamp":0}}}', b"{", b"\xff\xfe", b"[]"])
def test_timermetrics_that_are_damaged_stop_nothing(data: bytes) -> None:
    world = TimerWorld()
    world.send(START_MS + 5000)
    world.close()
    world.files.write_whole("/s/config/timermetrics", data)
    world.open()
    world.pass_time(5000)
    assert world.bodies() == [b"m1"]
