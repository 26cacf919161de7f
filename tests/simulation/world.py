"""Brokers that run one after the other on a simulated machine: its clock, threads, disk and network, and a supervisor
that restarts a broker after it ends."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from duemq.broker.daemon import Broker
from duemq.broker.errors import ConfigError
from duemq.broker.net.connection import Connection
from duemq.broker.settings.config import BrokerConfig, load
from duemq.broker.workers import Background
from duemq.storage.durability.jobs import Lane
from duemq.storage.errors import StoreError
from tests.simulation.machine.disk import Disk
from tests.simulation.machine.loop import WORLD, Killed, Process, SimulatedLoop
from tests.simulation.machine.network import Link, Receiver
from tests.support.loop import CountBudget

T = TypeVar("T")

ROOT = "/store"
START_MS = 1_700_000_000_000
_CONCURRENT: dict[Lane | Background, int] = {Background.PULLS: 2, Background.READS: 2}


_Job = tuple[Callable[[], None], Callable[[Exception | None], None]]


class SimulatedClock:
    """Wall and monotonic time of a machine; the wall clock may be set."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.ahead_ms = 0
        self._boots = 1

    @property
    def boot_id(self) -> bytes:
        return b"boot %011d" % self._boots

    def boot(self) -> None:
        """Restart the machine. Its monotonic time may well go on where it was."""
        self._boots += 1

    def now_ms(self) -> int:
        return START_MS + self.ahead_ms + int(self._loop.time() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()


class SimulatedWorkers:
    """Implements broker.workers.Workers."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._waiting: dict[Lane | Background, deque[_Job]] = {}
        self._running: dict[Lane | Background, int] = {}
        self.is_stopped = False

    def start(
        self, lane: Lane | Background, work: Callable[[], object], done: Callable[[Exception | None], None]
    ) -> None:
        assert not self.is_stopped, f"{lane} is used after the end"
        self._waiting.setdefault(lane, deque()).append((lambda: (work(), None)[1], done))
        self._next(lane)

    def _next(self, lane: Lane | Background) -> None:
        waiting = self._waiting[lane]
        if not waiting or self._running.get(lane, 0) >= _CONCURRENT.get(lane, 1):
            return
        self._running[lane] = self._running.get(lane, 0) + 1
        work, done = waiting.popleft()

        def finished(error: Exception | None) -> None:
            self._running[lane] -= 1
            self._next(lane)
            done(error)

        self._loop.start_job(work, finished)

    def run(self, lane: Lane | Background, work: Callable[[], T]) -> asyncio.Future[T]:
        result: asyncio.Future[T] = self._loop.create_future()
        given: list[T] = []

        def done(error: Exception | None) -> None:
            if result.cancelled():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(given[0])

        self.start(lane, lambda: given.append(work()), done)
        return result

    def stop(self) -> None:
        self.is_stopped = True


class Pieces:
    """A budget of a fixed number of pieces of work, which are counted."""

    total = 0

    def __init__(self, count: int) -> None:
        self._left = count

    @property
    def is_spent(self) -> bool:
        Pieces.total += 1
        self._left -= 1
        return self._left <= 0


class SimulatedBroker(Broker):
    """A broker that listens in the simulated network only."""

    def _bind(self, opened: ExitStack) -> list[socket.socket]:
        return []

    def connection(self) -> Connection:
        return self.running.net.accept()


class World:
    """The machine. All randomness comes from `chance`."""

    def __init__(self, seed: str, settings: dict[str, str]) -> None:
        self.chance = random.Random(seed)
        self.loop = SimulatedLoop()
        self.clock = SimulatedClock(self.loop)
        self.disk = Disk(self.loop, self.chance)
        self.disk.on_kill = self.killed
        self.settings = settings
        self.config = self._config()
        self.broker: SimulatedBroker | None = None
        self.process: Process | None = None
        """The running process, if it takes connections."""
        self.starts = self.failed_starts = self.kills = self.poisons = 0
        self.links: dict[Link, None] = {}
        self.network_latency: Callable[[], float] = lambda: self.chance.choice((0.0001, 0.0005, 0.002))
        self.pieces: Callable[[], int] = lambda: self.chance.choice((1, 2, 5, 20))
        self._ended: asyncio.Future[str] | None = None
        self._ports = 40_000
        self._stop: asyncio.Future[None] | None = None
        """Resolved when the running process is to stop."""
        self._is_stop_wanted = False
        self.is_over = False
        self.events: deque[str] = deque(maxlen=400)
        self.wrong: list[str] = []
        """Things that must not happen to a process, as sentences."""
        self.restart_delay: Callable[[], float] = lambda: self.chance.choice((0.0, 0.05, 0.5, 3.0))
        self.on_start: list[Callable[[SimulatedBroker], None]] = []
        self.on_killed: list[Callable[[], None]] = []
        """Called right after a kill that was no power cut."""
        self.on_stopped: list[Callable[[], None]] = []
        """Called right after a clean stop."""
        self.start_reads: list[tuple[int, int]] = []
        """For each start: bytes read, and the bytes of the commitlog at that time."""

    # --- the broker's life

    def _config(self) -> BrokerConfig:
        usual = {
            "storePathRootDir": ROOT,
            "auditLogEnable": "false",  # its files are the machine's
            "brokerName": "broker-a",
            "mappedFileSizeCommitLog": "131072",
            "mappedFileSizeConsumeQueue": "2000",
            "mappedFileSizeTimerLog": "5200",
            "maxMessageSize": "16384",
        }
        return load(None, [f"{name}={value}" for name, value in {**usual, **self.settings}.items()], {}).config

    async def supervise(self) -> None:
        """Start a broker, and another each time one has ended, until the world is over. Runs in the world's own
        process."""
        while not self.is_over:
            process = Process(f"broker {self.starts + self.failed_starts + 1}")
            self._ended = self.loop.create_future()
            self.loop.call_for(process, 0.0, self._live, process, self._ended)
            how = await self._ended
            if how == "power cut":
                self.disk.cut_power()
                self.clock.boot()
            if not self.is_over:
                await asyncio.sleep(self.restart_delay())

    def _live(self, process: Process, ended: asyncio.Future[str]) -> None:
        self.loop.create_task(self._run(process, ended))

    async def _run(self, process: Process, ended: asyncio.Future[str]) -> None:
        broker = SimulatedBroker(
            self.config,
            clock=self.clock,
            files=self.disk,
            workers=SimulatedWorkers,  # type: ignore[arg-type]
            budget=lambda seconds: Pieces(self.pieces()),
            request_budget=CountBudget(4 * self.pieces(), self.pieces()),
        )
        before = self.disk.work.read_bytes
        try:
            await broker.start()
        except (StoreError, ConfigError, OSError) as error:
            self.failed_starts += 1
            self._end(process, ended, f"failed start: {error}")
            return
        except Exception:
            self.wrong.append(f"a start ended with {traceback.format_exc()}")
            self._end(process, ended, "failed start")
            return
        self.start_reads.append((self.disk.work.read_bytes - before, broker.running.core.store.log.end))
        self.starts += 1
        self.broker, self.process = broker, process
        self.disk.loop_must_not_wait = True
        for call in self.on_start:
            call(broker)
        self._stop = self.loop.create_future()
        if not self._is_stop_wanted:
            await asyncio.wait((broker.failed, self._stop), return_when=asyncio.FIRST_COMPLETED)
        self._is_stop_wanted = False
        self.broker = self.process = None
        self.disk.loop_must_not_wait = False
        self.poisons += broker.failed.done()
        if await broker.stop() is None:
            for tell in self.on_stopped:
                tell()
        self._end(process, ended, "stopped")

    def want_stop(self) -> None:
        """Ask the running process to stop, or the next one if none runs."""
        self._is_stop_wanted = True
        if self.process is not None and self._stop is not None:
            self.loop.call_for(self.process, 0.0, self._tell, self._stop)

    @staticmethod
    def _tell(stop: asyncio.Future[None]) -> None:
        if not stop.done():
            stop.set_result(None)

    def note(self, what: str) -> None:
        """Record an event for a trace."""
        self.events.append(f"{self.loop.time():10.3f}  {what}")

    def _end(self, process: Process, ended: asyncio.Future[str], how: str) -> None:
        self.note(f"{process}: {how}")

        def tell() -> None:
            if not ended.done():
                ended.set_result(how)

        self.loop.kill(process)
        for link in list(self.links):
            if link._process is process:
                link.process_ended()
                self.links.pop(link, None)
        self.loop.call_for(WORLD, 0.0, tell)

    def killed(self, process: Process, how: str = "killed") -> None:
        """End a process in the middle of its work."""
        self.kills += 1
        self.broker = self.process = None
        self.disk.loop_must_not_wait = False
        assert self._ended is not None
        self._end(process, self._ended, how)
        if how == "killed":
            for call in self.on_killed:
                call()

    def kill(self, how: str = "killed") -> None:
        """End the running process now, from outside: "killed" or "power cut"."""
        if self.process is not None:
            self.killed(self.process, how)

    @staticmethod
    def pieces_total() -> int:
        """Total pieces of work done by all steps."""
        return Pieces.total

    # --- clients

    def connect(self, client: Receiver) -> Link | None:
        """Connect to the running broker; None if there is none."""
        if self.broker is None or self.process is None:
            return None
        self._ports += 1
        before, self.loop.process = self.loop.process, self.process
        try:
            protocol = self.broker.connection()
        finally:
            self.loop.process = before
        link = Link(self.loop, self.chance, self.process, protocol, client, self._ports, self.network_latency)
        self.links[link] = None
        return link

    # --- running

    def run(self, work: Any) -> None:
        """Run a coroutine of the world to its end, also while brokers die."""
        with _as_simulated():
            task = self.loop.create_task(work)
            while not task.done():
                try:
                    self.loop.run_until_complete(task)
                except Killed:
                    continue
            task.result()


@contextmanager
def _as_simulated() -> Iterator[None]:
    """Keep a broker's start from changing garbage collection, so that the objects of the last broker can be
    collected."""
    thresholds = gc.get_threshold()
    with patch("gc.freeze"), patch("gc.collect"), patch("gc.set_threshold"):
        yield
    gc.set_threshold(*thresholds)
