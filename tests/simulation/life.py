"""One life of a simulated machine, run by a script; records its clients' requests, the answers and the messages they
saw."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from duemq.broker.daemon import Broker
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import (
    ChangePending,
    CreateTopic,
    ListPending,
    QueryDueCurve,
    RecallMessage,
    ResetOffset,
)
from duemq.protocol.requests.headers import TopicName as TopicHeader
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.clock import look
from tests.simulation.audit import Left
from tests.simulation.clients import Attempt, Change, Client, Consumer, properties_of
from tests.simulation.groups import OtherBroker, PushConsumer
from tests.simulation.machine.loop import Process
from tests.simulation.machine.memory import held_by
from tests.simulation.script import QUEUES, Action, Script
from tests.simulation.world import ROOT, World
from tests.support.wire import request, send

_TRIES = 3
_QUIET_SECONDS = 30.0
"""Once all faults have ended and every message is due, all of them must be delivered within these seconds."""
_REFUSED = {
    "recall failed, the message is already delivered": "ALREADY_DELIVERED",
    "recall failed, it was delivered or cancelled, or the store was compacted since": "NO_LONGER_WAITS",
    "recall failed, no such message": "NEVER_EXISTED",
}


_ONE_MORE = bytes(range(1, 256)) + b"\0"


def _without_zeros(chance: random.Random, size: int) -> bytes:
    """Return the same as `bytes(chance.randrange(1, 256) for _ in range(size))` in a tenth of the time. What `chance`
    gives afterwards is the same, too."""
    found = b""
    while left := size - len(found):
        words = chance.getrandbits(32 * left).to_bytes(4 * left, "little")
        found += words[3::4].translate(_ONE_MORE, b"\xff")
    return found


@dataclass
class Life:
    """The state of a life as known from outside the broker."""

    script: Script
    world: World
    attempts: list[Attempt] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    groups: list[PushConsumer] = field(default_factory=list)
    deleted: dict[str, list[float]] = field(default_factory=dict)
    """Times at which the deletion of a topic was requested."""
    paused: set[str] = field(default_factory=set)
    policies: set[str] = field(default_factory=set)
    """Topics that had a policy at some time: their messages may be delivered late."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Times at which the wall clock was set, and the change in ms."""
    power_cuts: list[float] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Broken promises that were noticed during the life."""
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    client: Client = None  # type: ignore[assignment]
    left: Left | None = None
    """The disk after one of the kills."""
    calm_work: tuple[int, int, int] = (0, 0, 0)
    """Operations of the disk, bytes read and pieces of work since the faults ended."""
    calm_seconds: float = 0.0
    """Seconds since the faults ended."""
    held: Counter[str] = field(default_factory=Counter)
    """Memory of the broker at the end, see `memory`."""

    def __post_init__(self) -> None:
        self.client = Client(self.world)
        self.tables.append(self.script.settings["messageDelayLevel"])
        self._saved: dict[str, bytes] = {}
        self._slow = 1.0
        self._kept_kill = random.Random(f"{self.script.seed}/kept").choice((1, 1, 2, 3))
        self.world.on_killed.append(self._keep)
        self._has_wrong_bytes = False
        self.world.on_start.append(self._started)
        self._has_fault = False
        """Whether an injected fault of the disk is active."""
        self._visit: dict[str, Any] | None = None
        """RocketMQ's broker is to have the store after the next stop."""
        self.world.on_stopped.append(self._visited)

    def _keep(self) -> None:
        """Keep the disk after one of the kills; but not one with wrong bytes, which the next start finds and no job
        does."""
        if self.world.kills <= self._kept_kill and not self._has_wrong_bytes:
            world = self.world
            self.left = Left(world.disk.image(), world.loop.time(), look(world.clock))

    def _started(self, _: Broker) -> None:
        self._has_wrong_bytes = False

    def _visited(self) -> None:
        """Let RocketMQ's broker start and stop without doing anything; duemq, which takes the store over from it, may
        be killed in the middle of that. Skipped if files for RocketMQ's broker could not be written: the log of the
        stop says so."""
        disk = self.world.disk
        if self._visit is None or self._has_fault or disk.room is not None:
            return
        visit, self._visit = self._visit, None
        disk.put(f"{ROOT}/lock", b"lock")
        self.world.note("RocketMQ's broker had the store")
        if visit["operations"] is not None:
            disk.kill_at = disk.count + visit["operations"]
            disk.on_kill = self.world.killed

    @property
    def has_disk_faults(self) -> bool:
        """Whether the script has faults by which a file may not be written on time."""
        return any(action.kind in ("fail", "full", "damage", "used") for action in self.script.actions)

    # --- the course of a life

    async def live(self) -> None:
        world = self.world
        world.disk.latency = self._latency
        supervisor = asyncio.ensure_future(world.supervise())
        supervisor.add_done_callback(self._supervised)
        self.consumers = [Consumer(world, topic, queue) for topic in self.script.topics for queue in range(QUEUES)]
        others: list[OtherBroker] = []
        if self.script.has_groups:
            self.groups = [PushConsumer(world, topic) for topic in self.script.topics]
            others = [OtherBroker(world)]
        everyone: list[Consumer | PushConsumer | OtherBroker] = [*self.consumers, *self.groups, *others]
        readers = [asyncio.ensure_future(each.run()) for each in everyone]
        begin = world.loop.time()
        for number, action in enumerate(self.script.actions):
            await asyncio.sleep(max(0.0, begin + action.at - world.loop.time()))
            world.note(str(action))
            self._start(self._act(action, random.Random(f"{self.script.seed}/{action.at}/{number}")))
        await asyncio.sleep(max(0.0, begin + self.script.calm_from - world.loop.time()))
        await self._calm()
        world.is_over = True
        world.want_stop()
        await supervisor
        for each in everyone:
            each.is_over = True
        for reader in readers:
            reader.cancel()
        for result in await asyncio.gather(*readers, return_exceptions=True):
            if isinstance(result, Exception):
                self.complaints.append(f"a consumer failed: {result!r}")
        for other in others:
            self.complaints += other.complaints

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks[task] = None
        task.add_done_callback(self._done)

    def _supervised(self, task: asyncio.Task[Any]) -> None:
        if task.exception() is not None:
            self.world.wrong.append("".join(traceback.format_exception(task.exception())))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.complaints.append(f"a client failed: {task.exception()!r}")

    async def _calm(self) -> None:
        """End all faults: every promised message has to arrive now."""
        world, disk = self.world, self.world.disk
        world.note("calm")
        disk.fault = lambda kind, path: None
        disk.kill_at, disk.room, disk.used, self._slow = None, None, 0.1, 1.0
        self._visit, self._has_fault = None, False
        self._mend()
        world.restart_delay = lambda: 0.05
        while self.tasks:
            await asyncio.wait(list(self.tasks))
        for name, value in (("timerStopDequeue", "false"), ("timerStopEnqueue", "false")):
            await self._until_told(request(RequestCode.UPDATE_BROKER_CONFIG, body=f"{name}={value}\n".encode()))
        for topic in sorted(self.paused):
            await self._until_told(self._attributes(topic, "+timer.paused=false"))
        work = disk.work
        before = sum(work.operations.values()), work.read_bytes, type(world).pieces_total()
        last_due = max((attempt.deliver_ms or 0 for attempt in self.attempts), default=0)
        last_due = max([last_due, *(change.deliver_ms or 0 for each in self.attempts for change in each.changes)])
        wait = max(0.0, (last_due - world.clock.now_ms()) / 1000) + max(
            DelayLevels(table).delay_ms(level) / 1000
            for table in self.tables
            for level in range(1, DelayLevels(table).maximum + 1)
        )
        # A message released before the clock was set back is delivered when the clock reaches that time again.
        wait += sum(max(0, -ms) for _, ms in self.steps) / 1000
        begin = world.loop.time()
        end = begin + wait + _QUIET_SECONDS
        while world.loop.time() < end:
            await asyncio.sleep(1.0)
        after = sum(work.operations.values()), work.read_bytes, type(world).pieces_total()
        self.calm_seconds = world.loop.time() - begin
        if world.broker is not None:
            self.held = held_by(world.broker)
        self.calm_work = tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[assignment]

    async def _until_told(self, command: Command) -> Command:
        for _ in range(100):
            answer = await self.client.ask(command)
            if answer is not None and answer.code == 0:
                return answer
            await asyncio.sleep(0.1)
        raise AssertionError(f"nothing goes wrong, but request {command.code} gets no answer: {answer}")

    # --- actions

    async def _act(self, action: Action, chance: random.Random) -> None:
        details, world, disk = action.details, self.world, self.world.disk
        match action.kind:
            case "send":
                await self._send(details, chance, "")
            case "burst":
                await self._burst(details, chance)
            case "change":
                await self._change(details)
            case "topic":
                await self._topic(details["how"], chance.choice(self.script.topics))
            case "setting":
                if details["name"] == "messageDelayLevel":
                    self.tables.append(details["value"])
                body = f"{details['name']}={details['value']}\n".encode()
                await self.client.ask(request(RequestCode.UPDATE_BROKER_CONFIG, body=body))
            case "look":
                await self._look(details["what"])
            case "reset":
                await self._reset(details)
            case "bad manners":
                await self._bad_manners(details["how"], chance)
            case "kill":
                world.kill()
            case "power cut":
                self.power_cuts.append(world.loop.time())
                world.kill("power cut")
            case "kill in operation" | "power cut in operation":
                disk.kill_at = disk.count + details["operations"]
                disk.on_kill = self._cut_power if action.kind.startswith("power") else world.killed
            case "stop":
                if world.broker is not None:
                    world.want_stop()
            case "visit":
                self._visit = details
                if world.broker is not None:
                    world.want_stop()
            case "evict":
                disk.evict()
            case "set clock":
                self.steps.append((world.loop.time(), details["ms"]))
                world.clock.ahead_ms += details["ms"]
            case "slow":
                self._slow = float(details["factor"])
            case "full":
                disk.room = details["pages"]
            case "used":
                disk.used = details["ratio"]
            case "room":
                disk.room, disk.used = None, 0.1
            case "damage":
                self._damage(details["name"])
            case "mend":
                self._mend()
            case "wrong bytes":
                if world.process is not None:
                    world.kill()
                    self._spoil(details)
            case "fail":
                disk.fault = self._fault(details, chance)
                self._has_fault = True
            case "fail no more":
                disk.fault = lambda kind, path: None
                self._has_fault = False
            case _:
                raise AssertionError(f"nobody knows how to {action.kind}")

    def _cut_power(self, process: Process) -> None:
        self.power_cuts.append(self.world.loop.time())
        self.world.killed(process, "power cut")

    def _latency(self, kind: str) -> float:
        usual = {"sync": (0.001, 0.004, 0.02), "read": (0.0002, 0.004)}.get(kind, (0.00002,))
        return self.world.chance.choice(usual) * self._slow

    def _fault(self, details: dict[str, Any], chance: random.Random) -> Any:
        number = getattr(errno, details["errno"])

        def fault(kind: str, path: str) -> OSError | None:
            if kind != details["kind"] or details["where"] not in path or chance.random() >= details["share"]:
                return None
            if kind == "read" and self.world.process is None:
                return None  # a start that cannot read a file fails; other actions test that
            return OSError(number, errno.errorcode[number], path)

        return fault

    def _damage(self, name: str) -> None:
        for path in (f"{ROOT}/config/{name}", f"{ROOT}/config/{name}.bak"):
            node = self.world.disk.names.get(path)
            if node is not None and path not in self._saved:
                self._saved[path] = node.read(0, node.size)
                node.write(0, b"{")
                node.pages[0][1:] = bytes(len(node.pages[0]) - 1)
                node.durable = {number: bytes(page) for number, page in node.pages.items()}

    def _spoil(self, details: dict[str, Any]) -> None:
        disk = self.world.disk
        self._has_wrong_bytes = True
        paths = sorted(path for path in disk.names if "/consumequeue/" in path)
        if paths:
            path = paths[int(details["which"] * len(paths))]
            directory = os.path.dirname(path)
            is_all = details["how"] == "remove directory"
            for each in [other for other in paths if os.path.dirname(other) == directory] if is_all else [path]:
                disk.spoil(each, details["how"], details["where"])

    def _mend(self) -> None:
        """Restore the damaged files, unless the broker wrote them anew."""
        for path, content in self._saved.items():
            node = self.world.disk.names.get(path)
            if node is not None and node.read(0, 2) == b"{\0":
                node.pages.clear()
                node.write(0, content)
                node.size = len(content)
                node.sync()
        self._saved.clear()

    # --- actions of clients

    async def _send(self, details: dict[str, Any], chance: random.Random, suffix: str) -> None:
        """Send a message until an answer says that it is stored, as a producer does: each try is a message of its
        own."""
        client = self.client if chance.random() < 0.7 else Client(self.world)
        for number in range(_TRIES):
            attempt, command = self._attempt(details, chance, f"{suffix}.{number}")
            attempt.answer = await client.ask(command)
            attempt.answered = self.world.loop.time()
            if attempt.code == 0:
                return
            await asyncio.sleep(0.2)

    def _attempt(self, details: dict[str, Any], chance: random.Random, suffix: str) -> tuple[Attempt, Command]:
        number = len(self.attempts)
        body = f"{number}{suffix}|".encode()
        size = details["size"]
        body += _without_zeros(chance, size) if size < 500 else b"x" * size
        world = self.world
        attempt = Attempt(body, details["topic"], details["queue"], world.loop.time())
        values: dict[str, Any] = {"UNIQ_KEY": f"K{number}", "KEYS": details.get("key") or f"k{number}"}
        if details["how"] == "level":
            attempt.level = values["DELAY"] = details["level"]
        elif details["how"] == "timer":
            attempt.delay_ms = details["delay_ms"]
            if chance.random() < 0.5:
                client_ms = world.clock.now_ms() + self.script.skew_ms
                attempt.deliver_ms = values["TIMER_DELIVER_MS"] = client_ms + attempt.delay_ms
            else:
                values["TIMER_DELAY_MS"] = attempt.delay_ms
                attempt.deliver_ms = world.clock.now_ms() + attempt.delay_ms
        if "key" in details:
            attempt.key = details["key"]
            values["TIMER_REPLACE"] = "true"
        command = send(details["topic"], body, queue_id=details["queue"], properties=properties_of(values))
        self.attempts.append(attempt)
        return attempt, command

    async def _burst(self, details: dict[str, Any], chance: random.Random) -> None:
        """Send many messages that arrive in one read, each tried once."""
        made = []
        for _ in range(details["count"]):
            each = dict(details)
            if details["how"] == "timer":
                each["delay_ms"] = details["delay_ms"] + chance.randint(0, details["spread_ms"])
            made.append(self._attempt(each, chance, ""))
        answers = await self.client.ask_all([command for _, command in made])
        for (attempt, _), answer in zip(made, answers, strict=True):
            attempt.answer, attempt.answered = answer, self.world.loop.time()

    async def _change(self, details: dict[str, Any]) -> None:
        """Change one of the sent messages as an operator, by the id or the handle that its sender got."""
        known = [attempt for attempt in self.attempts if attempt.message_id and (attempt.level or attempt.deliver_ms)]
        if not known:
            return
        attempt = known[int(details["which"] * len(known))]
        how, now_ms = details["how"], self.world.clock.now_ms()
        handle = (attempt.answer.ext if attempt.answer is not None else {}).get("recallHandle")
        if how == "recall":
            if handle is None:
                return
            change = Change("cancel", self.world.loop.time(), None)
            attempt.changes.append(change)
            answer = await self.client.ask(request(RequestCode.RECALL_MESSAGE, RecallMessage(attempt.topic, handle)))
            if answer is not None and answer.code in (0, 604):
                change.outcome = "CANCELLED OR BEFORE" if answer.code == 0 else _REFUSED.get(answer.remark or "")
                change.answered = self.world.loop.time()
        else:
            deliver_ms = now_ms + details["delay_ms"] if how == "reschedule" else None
            change = Change(how, self.world.loop.time(), deliver_ms)
            attempt.changes.append(change)
            header = ChangePending(how, deliver_ms, attempt.message_id)
            answer = await self.client.ask(request(RequestCode.CHANGE_PENDING, header))
            if answer is not None and answer.code == 0:
                change.outcome = json.loads(bytes(answer.body))["messages"][0]["result"]
        change.answered = self.world.loop.time()

    async def _topic(self, how: str, topic: str) -> None:
        if how == "delete":
            self.deleted.setdefault(topic, []).append(self.world.loop.time())
            await self.client.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic)))
            self.deleted[topic].append(self.world.loop.time())
            return
        change = {
            "pause": "+timer.paused=true",
            "go on": "+timer.paused=false",
            "rate": "+timer.release.rate=50",
            "spread": "+timer.spread.seconds=2",
        }[how]
        if how == "pause":
            self.paused.add(topic)
        self.policies.add(topic)
        await self.client.ask(self._attributes(topic, change))

    def _attributes(self, topic: str, text: str) -> Command:
        header = CreateTopic(topic, "TBW102", 4, 4, 6, "SINGLE_TAG", attributes=text)
        return request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    async def _look(self, what: str) -> None:
        match what:
            case "list":
                command = request(RequestCode.LIST_PENDING, ListPending(limit=50))
            case "count":
                command = request(RequestCode.LIST_PENDING, ListPending(count_only=True))
            case "curve":
                command = request(RequestCode.DUE_CURVE, QueryDueCurve(1000, 30))
            case _:
                command = request(RequestCode.GET_ALL_DELAY_OFFSET)
        answer = await self.client.ask(command)
        if answer is not None and answer.code not in (0, 1, 2, 14):
            self.complaints.append(f"{what} was answered {answer.code} {answer.remark}")

    async def _reset(self, details: dict[str, Any]) -> None:
        """Reset a group's offsets as an operator."""
        times = {"begin": 0, "end": -1, "ago": self.world.clock.now_ms() - details["ago_ms"]}
        header = ResetOffset(details["topic"], f"push_{details['topic']}", times[details["where"]], True)
        await self.client.ask(request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header))

    async def _bad_manners(self, how: str, chance: random.Random) -> None:
        client = Client(self.world)
        link = client.link()
        if link is None:
            return
        match how:
            case "reads nothing":
                link.is_read = False
                topic = chance.choice(self.script.topics)
                commands = [
                    request(RequestCode.LIST_PENDING, ListPending(limit=1000)) for _ in range(chance.choice((1, 30)))
                ]
                del topic
                self._start(client.ask_all(commands, 2.0))
                await asyncio.sleep(1.0)
            case "half a frame":
                link.send(b"\0\0\1\0\0\0\0\x20" + b"{" * 10)
                await asyncio.sleep(0.5)
            case "nonsense":
                link.send(chance.randbytes(64))
        client.hang_up()


def begin(script: Script) -> Life:
    """Create the life of a script, before it is lived."""
    return Life(script, World(script.seed, script.settings))


def run(script: Script) -> Life:
    """Live a script."""
    life = begin(script)
    life.world.run(life.live())
    return life
