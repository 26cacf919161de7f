"""The MQTT bridge that a broker runs (`mqttBridge`). It is a process of its own, since its work would hold up the
broker's event loop, and since a fault in the bridge must not end the broker."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

log = structlog.get_logger(__name__)

STOP_SECONDS: Final = 10.0
"""Maximum time for a bridge to finish its messages and end, before it is killed."""
FIRST_PAUSE_SECONDS: Final = 1.0
MAX_PAUSE_SECONDS: Final = 30.0
"""First and longest pause before a bridge that ended is started again. The pause doubles with each start."""
STEADY_SECONDS: Final = 60.0
"""A bridge that ran for this long starts again after the first pause."""

Sleep = Callable[[float], Awaitable[None]]


def command_of(config_file: str, log_format: str) -> list[str]:
    """Return the command of a bridge. The bridge ends when its standard input does, so it does not outlive a broker
    that was killed."""
    options = ["--config", config_file, "--log-format", log_format, "--until-input-ends"]
    return [sys.executable, "-m", "duemq", "mqtt-bridge", *options]


class BridgeProcess:
    """Keeps a bridge running from `start` to `stop`. The bridge's standard error is the
    broker's; its standard output is discarded."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        sleep: Sleep = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._command = command
        self._sleep = sleep
        self._monotonic = monotonic
        self._stop_seconds = stop_seconds
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the bridge, in the background."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep_running(), name="MQTT bridge")

    async def stop(self) -> None:
        """Close the bridge's standard input and wait for its end; kill it if that takes too long."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(self._stop_seconds):
                await process.wait()
        except TimeoutError:
            log.warning("mqtt_bridge_killed", pid=process.pid, reason=f"it did not end within {self._stop_seconds:g} s")
            process.kill()
            await process.wait()

    async def _keep_running(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = self._monotonic()
            reason = await self._run()
            if self._monotonic() - began >= STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            log.error("mqtt_bridge_ended", reason=reason, starts_again_in_seconds=pause)
            await self._sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _run(self) -> str:
        """Run a bridge until it ends; return the reason."""
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=DEVNULL))
        try:
            self._process = process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._process = await starting  # `stop` ends it
            raise
        except OSError as error:
            return f"it cannot be started: {error}"
        log.info("mqtt_bridge_started", pid=process.pid)
        code = await process.wait()
        return f"exit code {code}" if code >= 0 else f"signal {-code}"
