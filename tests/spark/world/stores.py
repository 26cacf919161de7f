"""Stores written by real brokers, with the messages sent to them: `write` runs a broker, Apache's Java client sends a
mixed load (tests.spark.world.load), and the broker is stopped.

    kinds: apache-4.9.7 (no timers), apache-5.3.3, duemq (no transactions)
    ends:  stop, and kill: the files as a SIGKILL in the middle of deliveries leaves them. One run of a broker has both:
           in the middle it is held by SIGSTOP, which changes no file either, while they are copied.

    python -m tests.spark.world.stores DIRECTORY [KIND]     write stores to keep and inspect

Files are small (1 MiB for a commitlog file, 300 units for a consume queue's), so that a store has several of each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tests.interop.environment import make_broker
from tests.peers.brokers.broker import Broker
from tests.spark.world.load import LEVELS, ROLL_WINDOW_SECONDS, Load, Retried, Sent
from tests.spark.world.peers import Peers

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
    "timerFlushIntervalMs": "10000",  # RocketMQ's killed store has what a wheel looked like some seconds before
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


async def write(kind: Kind, directory: Path, peers: Peers) -> dict[End, WrittenStore]:
    """Write the stores of a kind, by their end, into a new directory; takes up to a minute; only for code in the loop
    of the peers. Raises PeerError; TimeoutError if a broker does not do its work; and ClockSetError if the clock was
    set, whatever else went wrong then."""
    wall, monotonic = time.time(), time.monotonic()
    try:
        return await _write(kind, directory, peers)
    finally:
        set_by = (time.time() - wall) - (time.monotonic() - monotonic)
        if abs(set_by) > _MOST_SLEWED_SECONDS:
            raise ClockSetError(f"the clock was set by {set_by:.3f} s while {directory} was written")


async def _write(kind: Kind, directory: Path, peers: Peers) -> dict[End, WrittenStore]:
    begun = _now_ms()
    broker = make_broker(kind, directory / "broker", PROPERTIES, store=directory / "store")
    try:
        java, _ = await asyncio.gather(peers.client_for(broker), broker.start())
        async with await java.producer(broker.nameserver) as producer:
            load = Load(broker, java, producer)

            def written(path: Path, end: End) -> WrittenStore:
                return WrittenStore(
                    path, kind, end, list(load.sent), list(load.retried), dict(load.progress), begun, _now_ms()
                )

            await load.run()
            await load.begin_burst()
            await _hold_and_copy(broker, directory / "killed")
            killed = written(directory / "killed", "kill")
            await load.finish()
        await broker.stop()
    finally:
        if broker.running:
            await broker.kill()
    return {"stop": written(broker.store, "stop"), "kill": killed}


async def _hold_and_copy(broker: Broker, target: Path) -> None:
    """Copy the files of a running broker as they are at one moment, which are those that a SIGKILL would leave."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            while not _is_stopped(broker.pid):
                await asyncio.sleep(0.01)
        target.mkdir()
        await asyncio.to_thread(copy_store, broker.store, target)
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """Return whether all threads of a process, which need not be a child of this one, have stopped."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Stores:
    """The stores of a test session, each kind written once: while other tests run if it was begun, else on first use.
    The brokers mostly wait."""

    def __init__(self, new_directory: Callable[[str], Path], peers: Peers) -> None:
        self._new_directory = new_directory
        self._peers = peers
        self._written: dict[Kind, Future[dict[End, WrittenStore]]] = {}

    def begin(self, kinds: Iterable[Kind]) -> None:
        """Begin to write the stores of some kinds, at the same time."""
        for kind in kinds:
            if kind not in self._written:
                self._written[kind] = self._peers.begin(write(kind, self._new_directory(kind), self._peers))

    def get(self, kind: Kind, end: End = "stop") -> WrittenStore:
        """Return a store; tests must not change it, see `WrittenStore.copy`."""
        for left in reversed(range(_TRIES)):
            self.begin([kind])
            try:
                return self._written[kind].result()[end]
            except ClockSetError as error:
                self.forget(kind)
                if not left:
                    raise
                warnings.warn(f"{error}: it is written again", stacklevel=2)
            except BaseException:
                self.forget(kind)
                raise
        raise AssertionError("unreachable")

    def forget(self, kind: Kind) -> None:
        """Make the next request for a store of this kind write new ones."""
        found = self._written.pop(kind, None)
        if found is not None:
            found.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.spark.world.stores", description="Write stores by real brokers."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    arguments = parser.parse_args()
    with Peers(arguments.directory / "clients") as peers:
        for kind in [arguments.kind] if arguments.kind else KINDS:
            for written in peers.run(write(kind, arguments.directory / kind, peers)).values():
                print(written.path, dict(written.counts))


if __name__ == "__main__":
    main()
