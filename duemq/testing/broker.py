"""A broker with its name server that runs in a thread of a test's process, with a store that is removed afterwards."""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from duemq.errors import DueMQError
from duemq.testing.clock import TestClock

if TYPE_CHECKING:
    from duemq.broker.daemon import Broker

T = TypeVar("T")

_HOST: Final = "127.0.0.1"
_TRIES: Final = 20
"""Maximum number of starts: another start with other ports follows if another process has meanwhile taken a port that
was free."""
_SETTINGS: Final[Mapping[str, object]] = {
    "testClock": "true",
    "brokerName": "duemq-test",
    "brokerIP1": _HOST,
    "bindAddress": _HOST,
    # Small files: a test's store should cost as little as possible.
    "mappedFileSizeCommitLog": 64 << 20,
    "diskSpaceWarningLevelRatio": "1.0",
}


class TestBrokerError(DueMQError):
    """The broker of a test cannot start, or its store failed."""

    __test__ = False


class TestBroker:
    """A broker for a test: `with TestBroker() as broker:`, or `start` and `stop`. Any client on this machine may
    connect to it, also from other processes.

    `settings`: settings of the broker, by RocketMQ's names (see README.md, Settings). `store`: a directory for its
    files, which is kept; without it they are in a temporary directory, which is removed at the end.

    Needs the packages of a broker: pip install 'duemq[test]'. Its log goes where structlog sends it: to standard
    output, which pytest shows for a failing test, unless the tested program has configured structlog.
    """

    __test__ = False
    """Keeps pytest from taking this class, because of its name, for tests."""

    def __init__(self, settings: Mapping[str, object] | None = None, *, store: Path | str | None = None) -> None:
        self._settings = {**_SETTINGS, **(settings or {})}
        self._kept_store = store
        self._store: Path | None = None
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ports = (0, 0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def nameserver(self) -> str:
        """The address of the broker's name server, "host:port", to which clients connect."""
        return f"{_HOST}:{self._ports[1]}"

    @property
    def address(self) -> str:
        """The address of the broker itself, "host:port"."""
        return f"{_HOST}:{self._ports[0]}"

    @property
    def clock(self) -> BrokerClock:
        """The broker's clock."""
        return BrokerClock(self)

    def start(self) -> None:
        """Start the broker; it listens when this returns. Raises TestBrokerError, with the broker's reason."""
        if self._thread is not None:
            raise TestBrokerError("the broker is already started")
        try:
            import uvloop  # imported here, since a client does not need it

            from duemq.broker.errors import ConfigError
            from duemq.storage.errors import StoreError
        except ImportError as error:
            raise TestBrokerError(f"{error}; install a broker's packages: pip install 'duemq[test]'") from None
        self._store = Path(self._kept_store or tempfile.mkdtemp(prefix="duemq-test-"))
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="duemq test broker", daemon=True)
        self._thread.start()
        try:
            self.run(self._start())
        except (ConfigError, StoreError, OSError) as error:
            self._end()
            raise TestBrokerError(f"the broker does not start: {error}") from error
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """Stop the broker; its clients lose their connections. Raises TestBrokerError if its store failed while it
        ran."""
        if self._thread is None or self._broker is None:
            return
        try:
            failure = self.run(self._broker.stop())
        finally:
            self._end()
        if failure is not None:
            raise TestBrokerError(failure)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the broker's event loop, and return its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        from duemq.broker.daemon import Broker
        from duemq.broker.settings.config import load

        assert self._store is not None
        for number in range(_TRIES):
            self._ports = _free_ports()
            overrides = [
                f"storePathRootDir={self._store}",
                f"listenPort={self._ports[0]}",
                f"nameserverPort={self._ports[1]}",
                *(f"{name}={value}" for name, value in self._settings.items()),
            ]
            config, _, origin = load(None, overrides)
            broker = Broker(config, origin=origin)
            try:
                await broker.start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or number == _TRIES - 1:
                    raise
            else:
                self._broker = broker
                return

    def _end(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._broker = self._thread = self._loop = None
        if self._kept_store is None and self._store is not None:
            shutil.rmtree(self._store, ignore_errors=True)


class BrokerClock:
    """The clock of a `TestBroker`. It runs like the machine's, and can be advanced. Its methods are ordinary functions,
    so that they work in any test: not `await clock.advance("2h")` but `clock.advance("2h")`."""

    def __init__(self, broker: TestBroker) -> None:
        self._broker = broker

    def advance(self, by: str | timedelta | None = None, *, ms: int | None = None) -> datetime:
        """Advance the clock by text such as "2h" or "1h30m", by a timedelta, or by `ms` milliseconds; return the
        broker's new time. Messages that have become due are then being delivered. Raises what `TestClock.advance`
        raises."""
        return self._broker.run(TestClock(self._broker.nameserver).advance(by, ms=ms))

    def now(self) -> datetime:
        """Return the broker's time. Raises what `TestClock.now` raises."""
        return self._broker.run(TestClock(self._broker.nameserver).now())


def _free_ports() -> tuple[int, int]:
    """Return a free port for a broker, for which the port two below is also free, and one for a name server."""
    while True:
        with socket.socket() as first, socket.socket() as vip, socket.socket() as names:
            first.bind((_HOST, 0))
            port = first.getsockname()[1]
            try:
                vip.bind((_HOST, port - 2))
            except OSError:
                continue
            names.bind((_HOST, 0))
            return port, names.getsockname()[1]
