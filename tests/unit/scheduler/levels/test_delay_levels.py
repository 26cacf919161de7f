from __future__ import annotations

import pytest

from duemq.scheduler.levels.table import DelayLevels, queue_id_of


def test_rocketmqs_default_table() -> None:
    levels = DelayLevels()
    assert levels.maximum == 18
    assert [levels.delay_ms(level) for level in (1, 2, 5, 17, 18)] == [1000, 5000, 60_000, 3_600_000, 7_200_000]
    assert queue_id_of(1) == 0


def test_all_units_and_odd_spaces() -> None:
    levels = DelayLevels("  3s 2m  1h 7d ")
    assert [levels.delay_ms(level) for level in range(1, 5)] == [3000, 120_000, 3_600_000, 604_800_000]
    assert levels.text == "3s 2m 1h 7d"


@pytest.mark.parametrize("text", ["", "   ", "1", "s", "1x", "1s 2", "-1s", "1.5s", "1s,2s", "9999999999s", "\u0661s"])
def test_a_wrong_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a delay|at least one"):
        DelayLevels(text)


def test_levels_beyond_the_table_count_as_the_highest_when_a_message_is_sent() -> None:
    levels = DelayLevels("1s 5s")
    assert (levels.cap(1), levels.cap(3), levels.cap(100)) == (1, 2, 2)
    assert levels.deliver_time(7, 10_000) == 15_000
    assert levels.delay_ms(7) == 1000, "RocketMQ's answer for a level of an older, longer table"
