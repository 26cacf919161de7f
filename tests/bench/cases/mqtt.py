"""The cases of the MQTT bridge. In the rounds of Apache's broker they measure Mosquitto alone: the same publisher and
the same subscriber, with nothing between them.

Publisher and subscriber are mosquitto_pub and mosquitto_sub, which cost little. They speak MQTT 3.1.1: Mosquitto before
2.0.13 sends more messages with QoS 2 to a client of MQTT 5 than that client allows, and mosquitto_sub then ends.

Every case counts: each number arrived, and with QoS 2 none of them twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from duemq import Message, Producer
from tests.bench.brokers import MakeBroker, ours, running
from tests.bench.figures import Figure, Figures, figures_of, part
from tests.bench.measure import cpu_seconds, memory
from tests.bench.remote import Remote
from tests.interop.mqtt.environment import BridgeProcess, Mosquitto
from tests.peers import tools
from tests.peers.brokers.broker import HOST, Broker

FIGURES: Mapping[str, Figure] = {
    "mqtt_in": Figure("200 bytes, QoS 1: MQTT publisher to topic", "/s", True),
    "mqtt_in_cpu_us": Figure("  bridge CPU a message", "us", False),
    "mqtt_out": Figure("topic to MQTT subscriber", "/s", True),
    "mqtt_out_cpu_us": Figure("  bridge CPU a message", "us", False),
    "mqtt_both_in": Figure("both ways at once: from MQTT", "/s", True),
    "mqtt_both_out": Figure("  to MQTT", "/s", True),
    "mqtt_both_cpu_us": Figure("  bridge CPU a message", "us", False),
    "mqtt_once_in": Figure("QoS 2: MQTT publisher to topic", "/s", True),
    "mqtt_once_in_cpu_us": Figure("  bridge CPU a message", "us", False),
    "mqtt_once_out": Figure("QoS 2: topic to MQTT subscriber", "/s", True),
    "mqtt_once_out_cpu_us": Figure("  bridge CPU a message", "us", False),
    "mqtt_late_p50_ms": Figure("delayed at 500/s: lateness at the MQTT subscriber, p50", "ms", False),
    "mqtt_late_p99_ms": Figure("  p99", "ms", False),
    "mqtt_late_max_ms": Figure("  max", "ms", False),
    "mqtt_late_cpu_us": Figure("  bridge CPU a message", "us", False),
    "mqtt_bridge_mib": Figure("memory of the bridge after that, resident", "MiB", False),
}


@dataclass(frozen=True)
class Sizes:
    """The size of each case: messages, and seconds of the delayed ones."""

    many: int
    once: int
    late_rate: int
    late_seconds: int


REAL = Sizes(many=50_000, once=15_000, late_rate=500, late_seconds=20)
TINY = Sizes(many=300, once=100, late_rate=100, late_seconds=1)

PAYLOAD_BYTES: Final = 200
_QUEUES: Final = 4
_DELAY_MS: Final = 1000
_PATIENCE: Final = 120
_WARM: Final = 200
"""Messages that go each way before the clock starts: they make the topics and the routes."""
_SETTINGS: Final = ("max_inflight_messages 500",)
"""As docs/mqtt.md advises for speed."""
_RULES: Final = """
[[to_rocketmq]]
filter = "in1/#"
topic = "In1"
qos = 1

[[to_rocketmq]]
filter = "in2/#"
topic = "In2"
qos = 2

[[to_mqtt]]
topic = "Out1"
mqtt_topic = "out1/x"
qos = 1

[[to_mqtt]]
topic = "Out2"
mqtt_topic = "out2/x"
qos = 2
"""


class Arrival(NamedTuple):
    """A message at the subscriber. `sent_ms`: when it was sent, ms since the epoch, as its payload says."""

    number: int
    sent_ms: float
    at_ms: float


@dataclass(frozen=True)
class MqttBench:
    """Mosquitto, and the bridge between it and a broker; both are None where Mosquitto is alone."""

    mosquitto: Mosquitto
    broker: Broker | None
    bridge: BridgeProcess | None
    sizes: Sizes

    def cpu(self) -> float:
        """CPU seconds of the bridge so far; 0 without one."""
        return cpu_seconds(self.bridge.process.pid) if self.bridge is not None else 0.0

    def per_message(self, name: str, since: float, messages: int) -> Figures:
        """Return the bridge's CPU for each message, in microseconds; nothing without a bridge."""
        return {name: (self.cpu() - since) / messages * 1e6} if self.bridge is not None else {}


def payload(number: int) -> bytes:
    """Return a line for mosquitto_pub: the number and the present time, ms since the epoch."""
    return b"%07d %.3f " % (number, time.time() * 1000)


def padded(line: bytes) -> bytes:
    """Return a payload of the size that is measured."""
    return line + b"x" * (PAYLOAD_BYTES - len(line))


def client(mosquitto: Mosquitto, program: str, topic: str, qos: int) -> list[str]:
    """Return the command of a client of Mosquitto's."""
    return [
        tools.find(program), "-V", "mqttv311", "-h", HOST, "-p", str(mosquitto.port), "-t", topic, "-q", str(qos)
    ]  # fmt: skip


async def publish(mosquitto: Mosquitto, topic: str, qos: int, lines: bytes) -> None:
    """Publish each line; return when Mosquitto has acknowledged all."""
    process = await asyncio.create_subprocess_exec(
        *client(mosquitto, "mosquitto_pub", topic, qos), "-l", stdin=asyncio.subprocess.PIPE
    )
    await process.communicate(lines)
    if process.returncode != 0:
        raise RuntimeError(f"mosquitto_pub failed: {process.returncode}")


def lines_of(count: int) -> bytes:
    """Return numbered lines."""
    return b"".join(padded(payload(number)) + b"\n" for number in range(count))


class Subscriber:
    """A mosquitto_sub that ends after `count` messages. Used with `async with`, which returns when it is subscribed."""

    def __init__(self, mosquitto: Mosquitto, topic: str, qos: int, count: int) -> None:
        self._command = [
            *client(mosquitto, "mosquitto_sub", topic, qos), "-i", f"subscriber-{topic}", "-d", "-F", "arrived %U %p",
            "-C", str(count),
        ]  # fmt: skip
        self._qos = qos
        self._count = count

    async def __aenter__(self) -> Subscriber:
        # The debugging output tells when it is subscribed; each of its lines goes out at once, as on a terminal.
        self._process = await asyncio.create_subprocess_exec(
            tools.find("stdbuf"), "-oL", *self._command, stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        await _printed(self._process, b"SUBACK")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def arrivals(self) -> list[Arrival]:
        """Wait for all messages and return them. Raises RuntimeError if one is missing, or came twice with QoS 2."""
        async with asyncio.timeout(_PATIENCE):
            output, _ = await self._process.communicate()
        found = []
        for line in output.splitlines():
            if line.startswith(b"arrived "):
                _, at, number, sent, _ = line.split(b" ", 4)
                found.append(Arrival(int(number), float(sent), float(at) * 1000))
        times = Counter(each.number for each in found)
        if times.keys() != set(range(self._count)) or (self._qos == 2 and max(times.values()) > 1):
            raise RuntimeError(f"{self._count - len(times)} of {self._count} messages are lost, or some came twice")
        return found


def _stored(broker: Broker, topic: str) -> int:
    """Return the number of messages that a topic ever had."""
    with Remote((HOST, broker.port)) as remote:
        return sum(remote.max_offsets(topic, _QUEUES))


def _wait_stored(broker: Broker, topic: str, count: int) -> float:
    """Wait until a topic has `count` messages, and return the time then, seconds since the epoch."""
    deadline = time.monotonic() + _PATIENCE
    while _stored(broker, topic) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{topic} has fewer than {count} messages after {_PATIENCE} s")
        time.sleep(0.005)
    return time.time()


async def _send(broker: Broker, topic: str, count: int) -> None:
    """Send numbered messages to a topic of RocketMQ's."""
    async with Producer(broker.nameserver) as producer:
        for first in range(0, count, 100):
            numbers = range(first, min(count, first + 100))
            await producer.send_batch([Message(topic, padded(payload(number))) for number in numbers])


async def _in(bench: MqttBench, qos: int, count: int) -> float:
    """Return how many messages a second come from the MQTT publisher to RocketMQ's topic; with Mosquitto alone, to an
    MQTT subscriber."""
    topic, lines = f"in{qos}/x", lines_of(count)
    if bench.broker is None:
        async with Subscriber(bench.mosquitto, topic, qos, count) as subscriber:
            begun = time.time()
            await publish(bench.mosquitto, topic, qos, lines)
            return count / (max(each.at_ms for each in await subscriber.arrivals()) / 1000 - begun)
    target = f"In{qos}"
    expected = _stored(bench.broker, target) + count
    begun = time.time()
    _, ended = await asyncio.gather(
        publish(bench.mosquitto, topic, qos, lines),
        asyncio.to_thread(_wait_stored, bench.broker, target, expected),
    )
    if qos == 2 and _stored(bench.broker, target) > expected:
        raise RuntimeError("a message with QoS 2 came twice")
    return count / (ended - begun)


async def _out(bench: MqttBench, qos: int, count: int) -> float:
    """Return how many messages a second come from RocketMQ's topic to the MQTT subscriber; with Mosquitto alone, from
    an MQTT publisher."""
    topic = f"out{qos}/x"
    lines = lines_of(count) if bench.broker is None else b""
    async with Subscriber(bench.mosquitto, topic, qos, count) as subscriber:
        begun = time.time()
        if bench.broker is None:
            await publish(bench.mosquitto, topic, qos, lines)
        else:
            await _send(bench.broker, f"Out{qos}", count)
        return count / (max(each.at_ms for each in await subscriber.arrivals()) / 1000 - begun)


async def mqtt_in(bench: MqttBench) -> Figures:
    """From MQTT to RocketMQ with QoS 1."""
    before, count = bench.cpu(), bench.sizes.many
    return {"mqtt_in": await _in(bench, 1, count)} | bench.per_message("mqtt_in_cpu_us", before, count)


async def mqtt_out(bench: MqttBench) -> Figures:
    """From RocketMQ to MQTT with QoS 1."""
    before, count = bench.cpu(), bench.sizes.many
    return {"mqtt_out": await _out(bench, 1, count)} | bench.per_message("mqtt_out_cpu_us", before, count)


async def mqtt_both(bench: MqttBench) -> Figures:
    """Both ways at once with QoS 1."""
    before, count = bench.cpu(), bench.sizes.many
    into, out = await asyncio.gather(_in(bench, 1, count), _out(bench, 1, count))
    figures = {"mqtt_both_in": into, "mqtt_both_out": out}
    return figures | bench.per_message("mqtt_both_cpu_us", before, 2 * count)


async def mqtt_once(bench: MqttBench) -> Figures:
    """QoS 2, one way and then the other."""
    before, count = bench.cpu(), bench.sizes.once
    figures = {"mqtt_once_in": await _in(bench, 2, count)} | bench.per_message("mqtt_once_in_cpu_us", before, count)
    before = bench.cpu()
    figures["mqtt_once_out"] = await _out(bench, 2, count)
    return figures | bench.per_message("mqtt_once_out_cpu_us", before, count)


async def mqtt_late(bench: MqttBench) -> Figures:
    """Messages that ask for a second of delay, QoS 1, at a steady rate; how much later than a second after they were
    published the subscriber has them. With Mosquitto alone: how long the same messages take without a delay."""
    sizes, is_alone = bench.sizes, bench.broker is None
    count, before = sizes.late_rate * sizes.late_seconds, bench.cpu()
    topic = "late/x" if is_alone else f"$delayed/{_DELAY_MS}ms/late/x"
    async with Subscriber(bench.mosquitto, "late/x", 1, count) as subscriber:
        await _publish_paced(bench.mosquitto, topic, sizes.late_rate, count)
        arrivals = await subscriber.arrivals()
    delay = 0 if is_alone else _DELAY_MS
    late = [each.at_ms - each.sent_ms - delay for each in arrivals if each.number]
    if min(late) < 0:
        raise RuntimeError(f"a message was {-min(late):.1f} ms early")
    figures = {
        "mqtt_late_p50_ms": part(late, 0.5),
        "mqtt_late_p99_ms": part(late, 0.99),
        "mqtt_late_max_ms": max(late),
    }
    return figures | bench.per_message("mqtt_late_cpu_us", before, count)


async def _publish_paced(mosquitto: Mosquitto, topic: str, rate: int, count: int) -> None:
    """Publish numbered messages at a steady rate, once mosquitto_pub, which pauses when it is connected, has published
    the first of them."""
    process = await asyncio.create_subprocess_exec(
        tools.find("stdbuf"), "-oL", *client(mosquitto, "mosquitto_pub", topic, 1), "-l", "-d",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(padded(payload(0)) + b"\n")
    await _printed(process, b"PUBACK")
    reading = asyncio.create_task(process.stdout.read())
    start = time.perf_counter()
    for number in range(1, count):
        pause = start + number / rate - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        process.stdin.write(padded(payload(number)) + b"\n")
    process.stdin.close()
    await reading
    if await process.wait() != 0:
        raise RuntimeError("mosquitto_pub failed")


async def _printed(process: asyncio.subprocess.Process, text: bytes) -> None:
    """Wait for a line with a text. Raises RuntimeError if the process ends before."""
    assert process.stdout is not None
    while text not in (line := await process.stdout.readline()):
        if not line:
            raise RuntimeError(f"a client of Mosquitto's ended before it printed {text!r}")


async def mqtt_memory(bench: MqttBench) -> Figures:
    """Memory of the bridge after the other cases."""
    return {"mqtt_bridge_mib": memory(bench.bridge.process.pid).resident} if bench.bridge is not None else {}


CASES = (mqtt_in, mqtt_out, mqtt_both, mqtt_once, mqtt_late, mqtt_memory)
NAMES: Sequence[str] = tuple(case.__name__ for case in CASES)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`: with the bridge for duemq's broker, else with
    Mosquitto alone."""
    if not any(name in only for name in NAMES):
        return {}
    async with _bench(make, directory / "mqtt", sizes) as bench:
        return await figures_of(CASES, bench, only, say)


@asynccontextmanager
async def _bench(make: MakeBroker, directory: Path, sizes: Sizes) -> AsyncIterator[MqttBench]:
    mosquitto = Mosquitto(directory / "mosquitto", _SETTINGS)
    await mosquitto.start()
    try:
        if make is not ours:
            yield MqttBench(mosquitto, None, None, sizes)
            return
        async with running(make, directory / "duemq", {}) as broker:
            bridge = BridgeProcess(directory / "bridge", mosquitto, broker.nameserver)
            bridge.write(_RULES)
            await bridge.start()
            try:
                bench = MqttBench(mosquitto, broker, bridge, sizes)
                for qos in (1, 2):
                    await _in(bench, qos, _WARM)
                    await _out(bench, qos, _WARM)
                yield bench
            finally:
                await bridge.stop()
    finally:
        await mosquitto.stop()
