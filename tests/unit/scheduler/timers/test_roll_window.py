"""The roll window: messages that are due beyond it wait in nearer slots, for years if they must."""

from __future__ import annotations

import pytest

from duemq.scheduler.timers.config import Refusal, TimerConfig
from duemq.storage.durability.retention import RetentionConfig
from tests.soak import sampled
from tests.unit.scheduler.timer_world import ANY_HOUR, START_MS, TimerWorld

DAY_MS = 86_400_000


@pytest.mark.parametrize("window", [2, 40, 3600, 2 * 86_400])
def test_far_messages_wait_in_slots_within_the_window(window: int) -> None:
    world = TimerWorld(TimerConfig(log_segment_size=5200, roll_window=window))
    delay = window * 1000 * 5 + 1234
    world.send(START_MS + delay)
    world.pass_time(delay - 1)
    assert world.bodies() == []
    world.pass_time(1)
    assert world.lateness() == [0]


@pytest.mark.parametrize("days", sampled((200, 740), (200,)))
def test_years_with_three_days_of_retention(days: int) -> None:
    world = TimerWorld(
        TimerConfig(log_segment_size=52 * 40, max_delay=3 * 366 * 86_400),
        segment_size=10_000,
        retention=RetentionConfig(delete_when=ANY_HOUR),
    )
    dues = [START_MS + due * DAY_MS + due for due in (1, 30, 190, 365, 366, 700, 731)]
    for due in dues:
        world.send(due)
    most = 0
    for day in range(days):
        for hour in (0, 12):  # half a segment a day
            world.send(world.clock.now_ms() + hour * 3_600_000, bytes(2000), topic="traffic")
        world.pass_time(DAY_MS)
        world.checkpoint()
        for _ in range(2):
            world.owned.expire()
        names = world.files.list("/s/commitlog"), world.files.list("/s/timerlog")
        most = max(most, len(names[0]) + len(names[1]))
        if day % 50 == 0:
            world.files.operations.clear()
            world.open()
    queue = world.store.ensure_queue("orders", 3)
    assert queue.next_offset == sum(due < START_MS + days * DAY_MS for due in dues)
    assert most < 80
    assert world.timers.lost == 0


def test_a_message_of_a_level_is_kept_when_its_file_goes() -> None:
    world = TimerWorld(segment_size=20_000, levels="1s 200d", retention=RetentionConfig(delete_when=ANY_HOUR))
    due = world.clock.now_ms() + 200 * DAY_MS
    world.schedule(2, b"level")
    for _ in range(60):
        world.send(world.clock.now_ms() + 1000, bytes(500), topic="traffic")
        world.pass_time(DAY_MS)
    for _ in range(10):
        world.owned.expire()
    assert world.store.log.begin > 0
    world.run()
    assert world.bodies() == []
    world.pass_time(140 * DAY_MS)
    (message,) = world.delivered()
    assert message.body == b"level"
    assert message.store_timestamp == due
    assert message.get_property("DELAY") is None


def test_the_limit_of_a_second_counts_what_waits_for_its_slot_beyond_the_window() -> None:
    """The limit of a second counts messages that are not in the wheel yet in the slots that they will get beyond the
    window, not in those of their times."""
    config = TimerConfig(log_segment_size=5200, roll_window=7, congest_limit=3, stop_enqueue=True)
    world = TimerWorld(config)
    far = START_MS + 30_000
    for _ in range(3):
        world.send(far)
    assert world.timers.refusal(far, START_MS) is Refusal.CONGESTED
    same_slot, another = far - 7000, far - 1000
    assert world.timers.refusal(same_slot, START_MS) is Refusal.CONGESTED
    assert world.timers.refusal(another, START_MS) is None
