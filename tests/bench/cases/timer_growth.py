"""Measures the cost of a message in the timer wheel as the number of pending messages grows: in this process, without
sockets.

    python -m tests.bench.cases.timer_growth        writes docs/timer-growth.svg (some minutes, 4 GB of disk)

There are two costs. An insert: from a message in the commitlog to its unit in the timer log and its place in the wheel,
for random times of a day, in batches of 256. A tick: a second of the clock with 100 messages, from loading its slot to
100 copies in their topic; a second without messages costs nothing, since it has no tick.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

from duemq.broker.produce.message import ByTimer
from duemq.scheduler.timers.config import TimerConfig
from duemq.scheduler.timers.service import NAME, Timers
from duemq.storage.budget import UNLIMITED
from duemq.storage.clock import ManualClock, look
from duemq.storage.current import Current
from duemq.storage.files import OsFiles
from duemq.storage.store import MessageStore, StoreConfig
from tests.support.messages import Sender, with_time
from tests.support.store import OwnedStore

PLOT = Path(__file__).parents[3] / "docs" / "timer-growth.svg"
TICK_MESSAGES = 100

_START_MS = 1_700_000_000_000
_HOUR_MS = 3_600_000
_BATCH = 256
_BODY = b"x" * 100


@dataclass(frozen=True)
class Sizes:
    """The numbers of messages to measure with."""

    pending: tuple[int, ...]
    inserts: int
    ticks: int


REAL = Sizes(pending=(10_000, 100_000, 1_000_000, 10_000_000), inserts=25_600, ticks=60)
TINY = Sizes(pending=(100, 1000), inserts=256, ticks=3)


@dataclass(frozen=True)
class Point:
    """The costs at one number of pending messages."""

    pending: int
    insert_us: float
    tick_us: float


class Growth:
    """A store whose clock stands still except for the measurements."""

    def __init__(self, directory: Path) -> None:
        self._clock = ManualClock(_START_MS)
        config = StoreConfig(str(directory))
        self._store = MessageStore(config, OsFiles(), ("127.0.0.1", 10911), lambda _, stored: stored)
        recovered = self._store.open()
        self._timers = Timers(self._store, Current(TimerConfig()), recovered, look(self._clock))
        self._sender = Sender(self._store, self._clock, timers=self._timers)
        self._owned = OwnedStore(self._store, self._clock, {NAME: self._timers})
        self._topic = self._store.ensure_queue("growth", 0)
        self._chance = random.Random(1)
        self.pending = 0

    def fill(self, pending: int) -> None:
        """Insert messages until `pending` are pending, for random times of a day that begins in an hour."""
        while self.pending < pending:
            self._insert_far(min(_BATCH, pending - self.pending))
            if self.pending % (_BATCH * 400) < _BATCH:
                for _ in self._owned.writing():
                    pass

    def insert_us(self, count: int) -> float:
        """Time per insert, us."""
        return sum(self._insert_far(_BATCH) for _ in range(count // _BATCH)) / count * 1e6

    def tick_us(self, count: int) -> float:
        """Time per second that delivers TICK_MESSAGES, us."""
        now_ms = self._clock.now_ms() // 1000 * 1000
        before = self._topic.next_offset
        dues = [now_ms + 1000 * second for second in range(20, 20 + count) for _ in range(TICK_MESSAGES)]
        self._insert([due + self._chance.randrange(1000) for due in dues])
        self._clock.advance(now_ms + 20_000 - self._clock.now_ms())
        self._run()
        spent = 0.0
        for _ in range(count + 1):
            self._clock.advance(1000)
            spent += self._run()
        if self._topic.next_offset - before != len(dues):
            raise RuntimeError(f"{self._topic.next_offset - before} of {len(dues)} messages were delivered")
        return spent / count * 1e6

    def close(self) -> None:
        """Close the files."""
        self._owned.stop()
        self._timers.close()

    def _insert_far(self, count: int) -> float:
        first = self._clock.now_ms() + _HOUR_MS
        self.pending += count
        return self._insert([first + self._chance.randrange(24 * _HOUR_MS) for _ in range(count)])

    def _insert(self, dues: Sequence[int]) -> float:
        """Append messages, and put them into the wheel; return the seconds taken by the latter."""
        for due in dues:
            text = with_time("UNIQ_KEY\x017F00000100002A9F0000000000000000", due)
            self._sender.stage(_BODY, ByTimer(due), text, "growth", 0)
        self._store.appender.commit()
        return self._run()

    def _run(self) -> float:
        """Do the work that is due now; return the seconds taken."""
        now = look(self._clock)
        start = time.perf_counter()
        while (due := self._timers.step(now, UNLIMITED)) is not None and due <= now.wall_ms:
            pass
        return time.perf_counter() - start


def measure(sizes: Sizes) -> list[Point]:
    """The costs at each number of pending messages."""
    points = []
    with tempfile.TemporaryDirectory(prefix="duemq-growth-") as directory:
        growth = Growth(Path(directory))
        for pending in sizes.pending:
            growth.fill(pending)
            point = Point(pending, growth.insert_us(sizes.inserts), growth.tick_us(sizes.ticks))
            points.append(point)
        growth.close()
    return points


_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 380, 80, 40, 30, 60
_LOWEST, _HIGHEST = -1, 4
"""Powers of ten at the ends of the axis of costs, us."""


def svg(points: Sequence[Point]) -> str:
    """Return a plot of both costs, on logarithmic axes."""
    first, last = log10(points[0].pending), log10(points[-1].pending)

    def x(pending: float) -> float:
        return _LEFT + (log10(pending) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(cost: float) -> float:
        share = (log10(cost) - _LOWEST) / (_HIGHEST - _LOWEST)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22">Timer wheel: microseconds, by messages pending</text>',
    ]
    for power in range(_LOWEST, _HIGHEST + 1):
        at = y(10.0**power)
        lines.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for point in points:
        at = x(point.pending)
        lines.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{point.pending:,}</text>')
    lines.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">messages pending</text>')
    series = (
        ("#1f6fb4", f"a second that delivers {TICK_MESSAGES} messages", [point.tick_us for point in points]),
        ("#c2571a", "an insert", [point.insert_us for point in points]),
    )
    for colour, title, costs in series:
        places = [(x(point.pending), y(cost)) for point, cost in zip(points, costs, strict=True)]
        path = " ".join(f"{'L' if number else 'M'}{a:.1f} {b:.1f}" for number, (a, b) in enumerate(places))
        lines.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (a, b), cost in zip(places, costs, strict=True):
            lines.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>')
            lines.append(f'<text x="{a:.1f}" y="{b - 10:.1f}" text-anchor="middle">{cost:.3g}</text>')
        a, b = places[0]
        lines.append(f'<text x="{a + 12:.1f}" y="{b + 20:.1f}" fill="{colour}">{title}</text>')
    return "\n".join([*lines, "</svg>", ""])


def plot(points: Sequence[Point]) -> None:
    """Write the plot into docs/."""
    PLOT.write_text(svg(points))


if __name__ == "__main__":
    measured = measure(REAL)
    for measured_point in measured:
        print(measured_point)
    plot(measured)
