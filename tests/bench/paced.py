"""Sends at a steady rate, from a process of its own so that no other work delays it.

    python -m tests.bench.paced PORT TOPIC RATE SECONDS plain
    python -m tests.bench.paced PORT TOPIC RATE SECONDS DELAY_MS [SPREAD_MS]

With SPREAD_MS the messages have timers, for a random time from DELAY_MS to DELAY_MS + SPREAD_MS after their scheduled
send; otherwise they have level 1, whose delay is DELAY_MS. Every 5 ms one write holds the messages scheduled until
then; the schedule does not slow down when the broker does. Prints {"count": n, "failed": n, "seconds": until the last
answer, "behind_ms": the most that a write came too late}.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time

from tests.bench.blast import DelayedFrames, Frames, Pipeline, PlainFrames, TimedFrames
from tests.peers.brokers.broker import HOST

_TICK = 0.005
_PATIENCE = 60


def main() -> None:
    """Send, and print the result."""
    port, topic, rate, seconds, delay, *spread_ms = sys.argv[1:]
    delay_ms = int(delay) if delay != "plain" else None
    spread = int(spread_ms[0]) if spread_ms else None
    print(json.dumps(paced((HOST, int(port)), topic, int(rate), int(seconds), delay_ms, spread)))


def paced(
    address: tuple[str, int], topic: str, rate: int, seconds: int, delay_ms: int | None, spread_ms: int | None
) -> dict[str, float]:
    """Send messages 0 to rate * seconds - 1."""
    count = rate * seconds
    frames: Frames = PlainFrames(topic) if delay_ms is None else DelayedFrames(topic, delay_ms=delay_ms)
    if delay_ms is not None and spread_ms is not None:
        start_ms, chance = int(time.time() * 1000) + delay_ms, random.Random(1)
        due = [start_ms + number * 1000 // rate + chance.randrange(spread_ms) for number in range(count)]
        frames = TimedFrames(topic, due.__getitem__)
    pipeline = Pipeline(address)
    pipeline.socket.setblocking(False)
    number, behind = 0, 0.0
    start = time.perf_counter()
    tick = 0
    while number < count or pipeline.waiting:
        now = time.perf_counter() - start
        if now > seconds + _PATIENCE:
            raise TimeoutError(f"{pipeline.waiting} sends without an answer")
        if number < count and now >= tick * _TICK:
            behind = max(behind, now - tick * _TICK)
            tick = int(now / _TICK) + 1
            upto = min(count, int(rate * tick * _TICK))
            pipeline.add(frames.block(number, upto - number))
            number = upto
        writers = [pipeline.socket] if pipeline.pending else []
        pause = max(0.0, start + tick * _TICK - time.perf_counter()) if number < count else 1.0
        readable, writable, _ = select.select([pipeline.socket], writers, [], pause)
        if writable:
            pipeline.write()
        if readable:
            pipeline.read()
    return {
        "count": count,
        "failed": pipeline.sent - pipeline.good,
        "seconds": time.perf_counter() - start,
        "behind_ms": behind * 1000,
    }


if __name__ == "__main__":
    main()
