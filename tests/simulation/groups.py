"""Clients that depend on state in the broker and its name server: a push consumer, which finds its topic through the
name server, gets its group's offsets from the broker, and follows an operator's reset; and another broker, which
registers at the name server."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command
from duemq.protocol.records import record
from duemq.protocol.requests.bodies import DataVersion, TopicConfig
from duemq.protocol.requests.headers import GetRouteInfo, QueryConsumerOffset, RegisterBroker, UpdateConsumerOffset
from duemq.protocol.requests.registration import encode_registration
from tests.simulation.clients import Client
from tests.simulation.script import TOPIC_QUEUES
from tests.simulation.world import World
from tests.support.wire import pull, request
from tests.unit.broker.tables.test_clients import heartbeat

_SENT_TO = re.compile(rb'"queueId":(\d+)[^}]*\}:(\d+)')
_STAYS_SECONDS = 100.0
"""A broker that registered less than these seconds ago is still known, even when the wall clock was set: it is less
than RocketMQ's two minutes."""

_REGISTRATION = encode_registration(
    {
        "dataVersion": DataVersion(timestamp=5, counter=6).to_json(),
        "topicConfigTable": {"far": TopicConfig("far", 4, 4, 6).to_json()},
    }
)


@dataclass
class Route:
    """An answer of the name server about a topic. Times: virtual seconds."""

    asked: float
    code: int


@dataclass
class Resumed:
    """The offset at which the broker told a group to go on in a queue, and the offsets before it. Offsets: -1 for
    none."""

    at: float
    queue: int
    offset: int
    highest: int
    """The highest offset that was ever committed, answered or not."""
    committed: int
    """The last offset whose commit the broker answered."""
    is_same_story: bool
    """Whether no process was killed since that answer."""


class PushConsumer:
    """The only member of a group, which reads all queues of a topic."""

    def __init__(self, world: World, topic: str) -> None:
        self._world = world
        self.topic = topic
        self.group = f"push_{topic}"
        self._client = Client(world, self._asked)
        self._sent_to: dict[int, int] = {}
        self._highest: dict[int, int] = {}
        self.committed: dict[int, tuple[int, int]] = {}
        """By queue: the last offset whose commit the broker answered, and the number of kills at that time."""
        self.offsets: dict[int, int] = {}
        self.seen: set[bytes] = set()
        self.routes: list[Route] = []
        self.resumed: list[Resumed] = []
        self.resets: list[float] = []
        """Times at which an operator reset the group's offsets."""
        self.is_over = False

    def _asked(self, command: Command) -> None:
        """Handle a request from the broker."""
        if command.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
            self.resets.append(self._world.loop.time())
            for queue, offset in _SENT_TO.findall(bytes(command.body)):
                self._sent_to[int(queue)] = int(offset)

    async def run(self) -> None:
        while not self.is_over:
            await asyncio.sleep(0.05)
            asked = self._world.loop.time()
            answer = await self._client.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo(self.topic, True)))
            if answer is None:
                continue
            self.routes.append(Route(asked, answer.code))
            if answer.code or (await self._client.ask(heartbeat(f"pushes {self.topic}", self.group))) is None:
                await asyncio.sleep(0.3)
                continue
            async with asyncio.TaskGroup() as group:
                for queue in range(TOPIC_QUEUES):
                    group.create_task(self._read_on(queue))

    async def _read_on(self, queue: int) -> None:
        """Read as long as this connection lives, and on no other, which the reader of another queue may have made: all
        readers end with their connection, and then the group is joined anew."""
        link = self._client.link()
        while self._client.is_connected and self._client.link() is link and not self.is_over:
            await self._read(queue)
            await asyncio.sleep(0.05)

    async def _read(self, queue: int) -> None:
        """Read until a request gets no answer."""
        answer = await self._client.ask(
            request(RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffset(self.group, self.topic, queue))
        )
        if answer is None or answer.code:
            return
        offset = int(answer.ext["offset"])
        committed, kills = self.committed.get(queue, (-1, 0))
        highest = self._highest.get(queue, -1)
        now = self._world.loop.time()
        self.resumed.append(Resumed(now, queue, offset, highest, committed, kills == self._world.kills))
        self.offsets[queue] = offset
        while not self.is_over:
            self.offsets[queue] = self._sent_to.pop(queue, self.offsets[queue])
            offset = self.offsets[queue]
            answer = await self._client.ask(
                pull(self.topic, offset, queue_id=queue, suspend_ms=1000, group=self.group), 4.0
            )
            if answer is None:
                return
            if queue in self._sent_to:
                continue
            if answer.code == 0:
                for message in record.decode_all(bytes(answer.body)):
                    self.seen.add(message.body)
            if answer.code in (0, 20, 21):
                self.offsets[queue] = int(answer.ext["nextBeginOffset"])
            elif answer.code != 19:
                await asyncio.sleep(0.1)
            if not await self._commit(queue, self.offsets[queue]):
                return

    async def _commit(self, queue: int, offset: int) -> bool:
        self._highest[queue] = max(self._highest.get(queue, -1), offset)
        kills = self._world.kills
        answer = await self._client.ask(
            request(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffset(self.group, self.topic, queue, offset))
        )
        if answer is not None and answer.code == 0:
            self.committed[queue] = offset, kills
        return answer is not None


class OtherBroker:
    """A broker elsewhere that registers at this broker's name server, and checks that it is known there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._client = Client(world)
        self.complaints: list[str] = []
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            await asyncio.sleep(0.1)
            header = RegisterBroker("broker-b", "10.0.0.2:10911", "DefaultCluster", "10.0.0.2:10912", 0)
            link = self._client.link()
            answer = await self._client.ask(request(RequestCode.REGISTER_BROKER, header, _REGISTRATION))
            registered = self._world.loop.time()
            while answer is not None and answer.code == 0 and not self.is_over:
                await asyncio.sleep(3.0)
                now = self._world.loop.time()
                if now - registered > _STAYS_SECONDS or self._client.link() is not link:
                    break  # a closed connection makes the name server forget its broker
                answer = await self._client.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo("far", True)))
                if answer is not None and answer.code != 0 and self._client.link() is link:
                    age = now - registered
                    self.complaints.append(f"a broker that registered {age:.0f} s ago is unknown: {answer.remark}")
