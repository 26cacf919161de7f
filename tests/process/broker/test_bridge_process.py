"""The MQTT bridge that a broker runs: started, started again, and ended with the broker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from duemq.broker.bridge_process import MAX_PAUSE_SECONDS, BridgeProcess, command_of

UNTIL_INPUT_ENDS = """
import sys
with open(sys.argv[1], "a", buffering=1) as file:
    print("begun", file=file)
    sys.stdin.read()
    print("ended", file=file)
"""


class Pauses:
    """The pauses that were made; they take no time, and the last one does not end."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.seconds: list[float] = []
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._left -= 1
        if not self._left:
            self.over.set()
            await asyncio.Event().wait()


class Clock:
    """A clock on which each look is `step` seconds after the one before."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._step
        return self._now


async def until_written(path: Path, text: str) -> None:
    while not path.exists() or path.read_text() != text:
        await asyncio.sleep(0.01)


async def test_a_bridge_ends_when_its_input_does(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    bridge = BridgeProcess([sys.executable, "-c", UNTIL_INPUT_ENDS, str(path)])
    bridge.start()
    await until_written(path, "begun\n")
    await bridge.stop()
    assert path.read_text() == "begun\nended\n"


async def test_a_bridge_that_does_not_end_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    program = "import sys, time; open(sys.argv[1], 'w').write('begun\\n'); time.sleep(1000)"
    bridge = BridgeProcess([sys.executable, "-c", program, str(path)], stop_seconds=0.01)
    bridge.start()
    await until_written(path, "begun\n")
    with capture_logs() as lines:
        await bridge.stop()
    assert [line["event"] for line in lines] == ["mqtt_bridge_killed"]


async def test_a_bridge_that_ends_is_started_again_after_longer_and_longer_pauses() -> None:
    pauses = Pauses(7)
    bridge = BridgeProcess(["/bin/sh", "-c", "exit 2"], sleep=pauses.sleep, monotonic=Clock(1.0))
    with capture_logs() as lines:
        bridge.start()
        await pauses.over.wait()
    await bridge.stop()
    assert pauses.seconds == [1, 2, 4, 8, 16, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]
    assert {line["reason"] for line in lines if line["event"] == "mqtt_bridge_ended"} == {"exit code 2"}


async def test_a_bridge_that_ran_for_long_is_started_again_soon() -> None:
    pauses = Pauses(3)
    bridge = BridgeProcess(["/bin/true"], sleep=pauses.sleep, monotonic=Clock(100.0))
    bridge.start()
    await pauses.over.wait()
    await bridge.stop()
    assert pauses.seconds == [1, 1, 1]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/bin/sh", "-c", f"kill -{int(signal.SIGKILL)} $$"], "signal 9"),
        (["/nowhere/python"], "it cannot be started: "),
    ],
)
async def test_why_a_bridge_ended_is_told(command: list[str], why: str) -> None:
    pauses = Pauses(1)
    bridge = BridgeProcess(command, sleep=pauses.sleep)
    with capture_logs() as lines:
        bridge.start()
        await pauses.over.wait()
    await bridge.stop()
    assert lines[-1]["reason"].startswith(why)


async def test_a_stop_while_a_bridge_starts_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    bridge = BridgeProcess(["/bin/sh", "-c", f"echo $$ > {path}; cat"])
    bridge.start()
    await asyncio.sleep(0)
    await bridge.stop()
    if path.exists() and path.read_text():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_the_command_runs_this_python(tmp_path: Path) -> None:
    command = command_of("bridge.toml", "json")
    assert command[:4] == [sys.executable, "-m", "duemq", "mqtt-bridge"]
    assert "bridge.toml" in command
