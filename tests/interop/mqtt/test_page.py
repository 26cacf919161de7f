"""Goal: the commands of docs/mqtt.md do what the page says.

Method: they are taken from the page and run in its order. They are changed only where several tests share a machine:
hosts and ports, and ten seconds of waiting that become two.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

from duemq import Message, Producer
from tests.interop.mqtt.environment import READY, Mosquitto, run
from tests.peers import ports
from tests.peers.brokers.broker import HOST
from tests.peers.brokers.process import Process

PAGE = (Path(__file__).parents[3] / "docs" / "mqtt.md").read_text(encoding="utf-8")
BIN = str(Path(sys.executable).parent)
NEEDED_BELOW = """
[[to_mqtt]]
topic = "Lamps"
mqtt_topic = "lamp/{key}"
qos = 2
"""


def blocks(begin: str) -> list[str]:
    """Return the indented blocks of the page that have a line which begins with a text."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, re.MULTILINE)
    texts = [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]
    return [text for text in texts if any(line.startswith(begin) for line in text.splitlines())]


def command(begin: str) -> str:
    """Return the first command of the page that begins with a text."""
    return next(line for text in blocks(begin) for line in text.splitlines() if line.startswith(begin))


class Terminals:
    """Runs the commands of the page in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        settings = blocks("persistence true")[0].splitlines()
        self._mosquitto = Mosquitto(directory / "mosquitto", settings)
        self.nameserver = f"{HOST}:{ports.free_port()}"
        self._port = ports.free_broker_port()
        self._environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "DUEMQ_NAMESERVER": self.nameserver}
        self._running: list[Process] = []

    def words(self, text: str) -> list[str]:
        """Return a command of the page with this test's host and ports."""
        words = shlex.split(text)
        if words[0].startswith("mosquitto_"):
            words += ["--host", HOST, "--port", str(self._mosquitto.port)]
        if words[0] == "mosquitto_sub":
            # It tells of its subscription with --debug only, and prints at once to a terminal only.
            words = ["stdbuf", "-oL", *words, "--debug"]
        if words[:2] == ["duemq", "serve"]:
            words += ["--port", str(self._port), "--nameserver-port", self.nameserver.rpartition(":")[2]]
        return ["env", "--chdir", str(self.directory), *words]

    async def start(self, text: str, ready: str) -> Process:
        """Run a command in a terminal of its own until a line matches `ready`; it keeps running."""
        number = len(self._running)
        process = Process(f"terminal {number}", self.words(text), self.directory / f"{number}.log", self._environment)
        self._running.append(process)
        await process.start(ready, timeout=30)
        return process

    async def run(self, text: str) -> str:
        """Run a command to its end, and return its output."""
        settings = [f"{name}={value}" for name, value in self._environment.items()]
        return (await run("env", *settings, *self.words(text))).decode()

    def write_rules(self, block: str) -> None:
        """Write bridge.toml as a block of the page does, with this test's host and ports."""
        match = re.search(r"cat > bridge\.toml <<'END'\n(.*?)^END$", block, re.MULTILINE | re.DOTALL)
        assert match is not None
        head = f'nameserver = "{self.nameserver}"\n'
        rules = match[1].replace("[mqtt]\n", f"[mqtt]\nport = {self._mosquitto.port}\n")
        (self.directory / "bridge.toml").write_text(head + rules + NEEDED_BELOW)

    async def open(self) -> None:
        await self._mosquitto.start()

    async def close(self) -> None:
        for process in reversed(self._running):
            if process.running:
                await process.stop()
        await self._mosquitto.stop()


async def test_five_minutes(tmp_path: Path) -> None:
    terminals = Terminals(tmp_path)
    await terminals.open()
    try:
        await terminals.start(command("duemq serve --store"), "listening")
        terminals.write_rules(blocks("cat > bridge.toml")[0])
        await terminals.start(command("duemq mqtt-bridge --config"), READY)
        listener = await terminals.start(command("mosquitto_sub"), "SUBACK")
        await terminals.run(command("mosquitto_pub").replace("/10/", "/5/"))
        (list_waiting,) = re.findall(r"`(duemq [^`]*)` shows it while it waits", PAGE)
        while "MQTT_DELAYED_my-bridge" not in await terminals.run(list_waiting):
            pass
        (printed,) = re.findall(r"the subscriber prints `(.*)`", PAGE)
        await shown(listener, printed)
        await a_burst_with_qos_2(terminals)
    finally:
        await terminals.close()


async def a_burst_with_qos_2(terminals: Terminals) -> None:
    """The subscriber of the chapter about Mosquitto's settings, which allows more than Mosquitto sends."""
    (subscribe,) = re.findall(r"^    (mosquitto_sub .* receive-maximum .*)$", PAGE, re.MULTILINE)
    listener = await terminals.start(subscribe, "SUBACK")
    expected = [f"lamp/on {number}" for number in range(500)]
    async with Producer(terminals.nameserver) as producer:
        await producer.send_batch([Message("Lamps", line.split()[1], keys="on") for line in expected])
    await shown(listener, *expected)
    found = [line for line in listener.output.read_text().splitlines() if line.startswith("lamp/on ")]
    assert sorted(found) == sorted(expected)


async def shown(process: Process, *lines: str) -> None:
    """Wait until a process has printed all lines."""
    async with asyncio.timeout(30):
        while not set(lines) <= set(process.output.read_text().splitlines()):
            await asyncio.sleep(0.02)
