"""Timers compared with the plainest model: a list of sent messages and their deliver times.

Any sequence of sends, cancels, passing time, checkpoints, clean stops, kill -9 and lost files; at the end every message
that was sent and not cancelled has been delivered once, never early, and to the millisecond if nothing delayed it.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.storage.budget import Pieces
from tests.unit.scheduler.timer_world import TimerWorld

NEAR = st.integers(-2_000, 15_000)
FAR = st.integers(0, 200_000)
DELAYS = st.one_of(NEAR, FAR, st.sampled_from([0, 1, 999, 1000, 1001, 30_000]))


class TimerMachine(RuleBasedStateMachine):
    """The operations of users, and accidents."""

    window = 40

    @initialize()
    def start(self) -> None:
        self.world = TimerWorld(TimerConfig(log_segment_size=5200, roll_window=self.window))
        self.due: dict[bytes, int] = {}
        self.places: dict[bytes, int] = {}
        self.cancelled: set[bytes] = set()
        self.newest: dict[str, bytes] = {}
        self.was_down: set[bytes] = set()
        self.was_log_lost = self.was_killed = False

    def waiting(self) -> set[bytes]:
        return set(self.due) - self.cancelled - set(self.world.bodies())

    @rule(delays=st.lists(DELAYS, min_size=1, max_size=12), steps=st.booleans())
    def send(self, delays: list[int], steps: bool) -> None:
        for delay in delays:
            body = f"b{len(self.due)}".encode()
            due = self.world.clock.now_ms() + delay
            self.due[body] = due
            self.places[body] = self.world.send(due, body)
            if delay <= 0:
                self.was_down.add(body)
        if steps:
            self.world.run()

    @rule(delay=DELAYS, key=st.sampled_from("abc"))
    def replace(self, delay: int, key: str) -> None:
        before = self.newest.get(key)
        was_waiting = before is not None and before in self.waiting()
        body = f"b{len(self.due)}".encode()
        due = self.world.clock.now_ms() + max(delay, 0)
        replaced = self.world.send_instead(due, key, body)
        self.due[body] = due
        self.places[body] = self.world.last_physical_offset
        self.newest[key] = body
        if delay <= 0:
            self.was_down.add(body)
        if before is not None and was_waiting and before in set(self.world.bodies()):
            was_waiting = False  # its time came while the timers counted
        assert replaced == was_waiting
        if before is not None and was_waiting:
            self.cancelled.add(before)

    @rule()
    def count(self) -> None:
        self.world.timers.count()

    @rule(ms=st.one_of(st.integers(0, 3000), st.integers(0, 100_000)))
    def pass_time(self, ms: int) -> None:
        self.world.pass_time(ms)
        assert self.world.state().pending == len(self.waiting())

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule(steps=st.integers(0, 3))
    def some_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step(Pieces(1))

    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        if not self.due:
            return
        body = sorted(self.due)[which % len(self.due)]
        answer = self.world.cancel(self.places[body])
        self._holds(body, answer)
        if answer is Cancelled.CANCELLED:
            self.cancelled.add(body)

    @rule(which=st.integers(0, 1000), delay=DELAYS)
    def reschedule(self, which: int, delay: int) -> None:
        """Reschedule by the id that the sender got, also after earlier reschedules."""
        if not self.due:
            return
        body = sorted(self.due)[which % len(self.due)]
        answer, _ = self.world.reschedule(self.places[body], self.world.now_ms + delay)
        self._holds(body, answer)
        if answer is Cancelled.CANCELLED:
            self.due[body] = self.world.now_ms + max(delay, 0)
            if delay <= 0:
                self.was_down.add(body)

    @rule()
    def keep(self) -> None:
        """Keep all waiting messages, as if their files were about to go."""
        self.world.keep()

    def _holds(self, body: bytes, answer: Cancelled) -> None:
        """Check that an answer about a message is true, and as precise as can be known."""
        if body in self.cancelled:
            assert answer is Cancelled.CANCELLED_BEFORE or (self.was_log_lost and answer is Cancelled.NO_LONGER_WAITS)
        elif body in self.world.bodies():
            assert answer is Cancelled.DELIVERED or (self.was_killed and answer is Cancelled.NO_LONGER_WAITS)
        else:
            assert answer is Cancelled.CANCELLED

    @rule(
        down_ms=st.one_of(st.just(0), st.integers(0, 60_000)),
        lost=st.sampled_from(["", "", "", "wheel", "log", "check"]),
    )
    def kill(self, down_ms: int, lost: str) -> None:
        self.was_killed = True
        self._restart(down_ms, lost)

    @rule(down_ms=st.one_of(st.just(0), st.integers(0, 60_000)), lost=st.sampled_from(["", "", "wheel"]))
    def stop(self, down_ms: int, lost: str) -> None:
        self.world.close()
        self._restart(down_ms, lost)

    def _restart(self, down_ms: int, lost: str) -> None:
        self.was_down |= self.waiting()
        files = self.world.files
        if lost == "wheel":
            files.remove("/s/timerwheel")
        elif lost == "log":
            files.remove_tree("/s/timerlog")
            self.was_log_lost = True
        elif lost == "check":
            files.remove("/s/config/timercheck")
        self.world.clock.advance(down_ms)
        self.world.open()

    @invariant()
    def delivered_once_and_never_early(self) -> None:
        if not hasattr(self, "world"):
            return
        counts = Counter(self.world.bodies())
        assert [body for body, count in counts.items() if count > 1] == []
        assert self.cancelled & set(counts) == set()
        for message in self.world.delivered():
            late = message.store_timestamp - self.due[message.body]
            assert late >= 0, message.body
            if message.body not in self.was_down:
                assert late == 0, message.body

    @invariant()
    def the_curve_is_right(self) -> None:
        if not hasattr(self, "world"):
            return
        now = self.world.clock.now_ms()
        begin = now // 1000 * 1000
        waiting = Counter((max(self.due[body], now) - begin) // 1000 for body in self.waiting())
        assert self.world.curve(begin, 1000, 300) == [waiting[second] for second in range(300)]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.pass_time(max(1000, max([0, *self.due.values()]) - self.world.clock.now_ms() + 1000))
        self.delivered_once_and_never_early()
        assert set(self.world.bodies()) == set(self.due) - self.cancelled
        assert self.world.timers.metrics() == {}
        assert self.world.state().pending == 0


TimerMachine.TestCase.settings = settings(stateful_step_count=25, phases=[Phase.explicit, Phase.generate])
TestTimers = TimerMachine.TestCase
