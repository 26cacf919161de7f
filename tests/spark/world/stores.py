"""Stores written by real brokers, with the messages sent to them: `write` runs a broker, Apache's Java client sends a
mixed load (tests.spark.world.load), and the broker is stopped, or killed.

    kinds: apache-4.9.7 (no timers), apache-5.3.3, duemq (no transactions)
    ends:  stop, kill (in the middle of deliveries)

    python -m tests.spark.world.stores DIRECTORY [KIND] [END]     write stores to keep and inspect

Files are small (1 MiB for a commitlog file, 300 units for a consume queue's), so that a store has several of each.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from tests.interop.environment import make_broker
from tests.peers.clients import java_client
from tests.spark.world.load import LEVELS, ROLL_WINDOW_SECONDS, Load, Retried, Sent

Kind = Literal["duemq", "apache-4.9.7", "apache-5.3.3"]
End = Literal["stop", "kill"]
KINDS: Final[tuple[Kind, ...]] = ("duemq", "apache-4.9.7", "apache-5.3.3")
SEGMENT: Final = 1 << 20
QUEUE_SEGMENT: Final = 300 * 20
PROPERTIES: Final[dict[str, object]] = {
    "mappedFileSizeCommitLog": SEGMENT,
    "mappedFileSizeConsumeQueue": QUEUE_SEGMENT,
    "maxMessageSize": SEGMENT // 4,
    "messageDelayLevel": LEVELS,
    "timerWheelEnable": "true",
    "timerRollWindowSlot": ROLL_WINDOW_SECONDS,
    "recallMessageEnable": "true",
    "flushConsumerOffsetInterval": "1000",
}
"""Settings of the brokers; one that goes on with such a store needs the first three."""
_MOST_SLEWED_SECONDS: Final = 0.1
"""A clock that is slowed down or sped up gains or loses less in a minute; one that is set jumps by more."""
_TRIES: Final = 3


@dataclass(frozen=True)
class WrittenStore:
    """A store that no broker writes any more, and its expected content."""

    path: Path
    kind: Kind
    end: End
    sent: list[Sent]
    """Messages that producers sent, in no order."""
    retried: list[Retried]
    """Messages that consumers sent back."""
    progress: dict[str, dict[int, int]]
    """Offsets of consumer groups by `topic@group` and queue, as expected in consumerOffset.json."""
    begun_ms: int
    ended_ms: int
    """Everything was stored between these two times, by the wall clock."""
    settings: dict[str, object] = field(default_factory=lambda: dict(PROPERTIES))

    def of(self, kind: str, outcome: str | None = None) -> list[Sent]:
        """Return the sent messages of a kind, optionally with an outcome."""
        return [sent for sent in self.sent if sent.kind == kind and outcome in (None, sent.outcome)]

    @property
    def counts(self) -> Counter[str]:
        """Number of messages of each `kind outcome`."""
        return Counter(f"{sent.kind} {sent.outcome}" for sent in self.sent)

    @property
    def scheduled(self) -> int:
        """Number of scheduled messages, retries included."""
        return len(self.of("level")) + len(self.of("timer")) + sum(retry.attempts for retry in self.retried)

    def copy(self, target: Path) -> Path:
        """Copy the files, holes as holes."""
        return copy_store(self.path, target)


def copy_store(store: Path, target: Path) -> Path:
    """Copy a store, with holes as holes: RocketMQ's index files alone are 420 MB of them."""
    subprocess.run(["cp", "-a", "--sparse=always", f"{store}/.", str(target)], check=True)
    return target


class ClockSetError(Exception):
    """The machine's clock was set while a store was written, so its times are unusable."""


def write(kind: Kind, directory: Path, end: End = "stop") -> WrittenStore:
    """Write a store into a new directory; takes up to a minute. Raises PeerError; TimeoutError if a broker does not do
    its work; and ClockSetError if the clock was set, whatever else went wrong then."""
    wall, monotonic = time.time(), time.monotonic()
    # In a thread, with a loop of its own: fixtures that use this run beside loops of other tests.
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(asyncio.run, _write(kind, directory, end))
        error = writing.exception()
    set_by = (time.time() - wall) - (time.monotonic() - monotonic)
    if abs(set_by) > _MOST_SLEWED_SECONDS:
        raise ClockSetError(f"the clock was set by {set_by:.3f} s while {directory} was written") from error
    return writing.result()


async def _write(kind: Kind, directory: Path, end: End) -> WrittenStore:
    begun = _now_ms()
    broker = make_broker(kind, directory / "broker", PROPERTIES, store=directory / "store")
    java = java_client("4.9.7" if kind == "apache-4.9.7" else "5.3.3", directory / "client")
    try:
        await asyncio.gather(broker.start(), java.start())
        async with await java.producer(broker.nameserver) as producer:
            found = await Load(broker, java, producer).run(cut_short=end == "kill")
        await (broker.stop() if end == "stop" else broker.kill())
    finally:
        if broker.running:
            await broker.kill()
        await java.stop()
    return WrittenStore(broker.store, kind, end, found.sent, found.retried, found.progress, begun, _now_ms())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def sampled(values: Iterable[object], always: Iterable[object]) -> list[Any]:
    """Parameters for a test: `always` in every run, the other values in the soak alone, since each costs half a minute
    of a broker's time."""
    chosen = list(always)
    marked = [(value, [] if value in chosen else [pytest.mark.soak]) for value in values]
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks) for value, marks in marked]


class Stores:
    """The stores of a test session, each written on first use."""

    def __init__(self, new_directory: Callable[[str], Path]) -> None:
        self._new_directory = new_directory
        self._written: dict[tuple[Kind, End], WrittenStore] = {}

    def get(self, kind: Kind, end: End = "stop") -> WrittenStore:
        """Return a store; tests must not change it, see `WrittenStore.copy`."""
        for left in reversed(range(_TRIES)):
            if (kind, end) in self._written:
                break
            try:
                self._written[kind, end] = write(kind, self._new_directory(f"{kind}-{end}"), end)
            except ClockSetError as error:
                if not left:
                    raise
                warnings.warn(f"{error}: it is written again", stacklevel=2)
        return self._written[kind, end]

    def forget(self, kind: Kind, end: End) -> None:
        """Make the next request for this store write a new one."""
        self._written.pop((kind, end), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.spark.world.stores", description="Write stores by real brokers."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("end", nargs="?", choices=("stop", "kill"), default="stop")
    arguments = parser.parse_args()
    for kind in [arguments.kind] if arguments.kind else KINDS:
        written = write(kind, arguments.directory / f"{kind}-{arguments.end}", arguments.end)
        print(written.path, dict(written.counts))


if __name__ == "__main__":
    main()
