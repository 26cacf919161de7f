"""The brokers that have each topic: their addresses are requested from the name servers, cached, and requested again
from time to time."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from duemq._net import timeouts
from duemq._net.connection import ClientConnection, split_address
from duemq._net.pool import Pool
from duemq._net.single_flight import SingleFlight
from duemq.errors import (
    ArgumentError,
    ConnectError,
    ConnectionLostError,
    DueMQError,
    NoRouteError,
    PeerError,
    RequestTimeoutError,
    error_of,
)
from duemq.messages import MessageQueue
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import BodyFormatError
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import ClusterInfo, TopicRoute
from duemq.protocol.requests.headers import GetRouteInfo, Header

AUTO_CREATE_TOPIC: Final = "TBW102"
"""A topic of brokers that create topics automatically: a send names it as the template of the new topic."""

_MAX_QUEUES: Final = 65_536
"""Maximum number of queues of a topic at one broker, since each becomes an object of the route."""
AUTO_CREATE_QUEUES: Final = 4
"""Maximum number of queues per broker of a topic that a send creates."""

PERM_WRITE: Final = 2
PERM_READ: Final = 4
PRIMARY: Final = 0

log = logging.getLogger("duemq.routes")


class Route(msgspec.Struct, frozen=True):
    """The queues of one topic and the brokers that have them."""

    topic: str
    write_queues: tuple[MessageQueue, ...]
    """Queues to which messages may be sent, at brokers whose primary is known."""
    read_queues: tuple[MessageQueue, ...]
    """Queues from which messages may be read, sorted."""
    brokers: Mapping[str, Mapping[int, str]]
    """The addresses "host:port" of each broker: broker name to broker id to address; id 0 is the primary, others are
    replicas."""

    def address(self, broker: str, broker_id: int = PRIMARY) -> str | None:
        """Return the address of the member of a broker with this id; if it does not exist, that of the primary, or else
        of any member; None if the broker has no members."""
        members = self.brokers.get(broker, {})
        return members.get(broker_id) or members.get(PRIMARY) or next(iter(members.values()), None)

    def primary(self, broker: str) -> str | None:
        """Return the address of a broker's primary, or None if it has no primary now."""
        return self.brokers.get(broker, {}).get(PRIMARY)

    @property
    def addresses(self) -> set[str]:
        """The addresses of all members of all brokers."""
        return {address for members in self.brokers.values() for address in members.values()}


def build_route(topic: str, answer: TopicRoute, *, most_queues: int | None = None) -> Route:
    """Return the route in a name server's answer. `most_queues`: for a topic that a send is going to create, the
    maximum number of queues per broker."""
    brokers = {broker.broker_name: dict(broker.broker_addrs) for broker in answer.broker_datas}
    write, read = [], []
    for queues in sorted(answer.queue_datas, key=lambda queues: queues.broker_name):
        count = queues.write_queue_nums
        if most_queues is not None:
            # For a new topic RocketMQ derives both numbers from the read queues of the template topic.
            count = min(most_queues, queues.read_queue_nums)
        name = queues.broker_name
        if queues.perm & PERM_WRITE and PRIMARY in brokers.get(name, {}):
            write += [MessageQueue(topic, name, number) for number in range(count)]
        if queues.perm & PERM_READ and most_queues is None:
            read += [MessageQueue(topic, name, number) for number in range(queues.read_queue_nums)]
    return Route(topic, tuple(write), tuple(read), brokers)


class NameServers:
    """The name servers, one of which is enough: the one that answered last is tried first.

    `addresses`: "host:port"; several are joined by semicolons, as in RocketMQ.
    """

    def __init__(self, addresses: str, pool: Pool) -> None:
        self.addresses = parse_nameservers(addresses)
        self._pool = pool
        self._preferred = 0

    async def ask(self, code: int, header: Header | None, *, timeout: float) -> tuple[Command, str]:
        """Send a request to one name server; return the answer, whatever its code, and the address of that server.
        `timeout` is in seconds, for all servers together.

        If none answers, raises the last server's ConnectError, ConnectionLostError, RequestTimeoutError, or PeerError
        (it speaks another protocol).
        """
        count = len(self.addresses)
        start, share = self._preferred, timeout / count
        for attempt in range(count):
            address = self.addresses[(start + attempt) % count]
            try:
                answer = await (await self._connection(address, share)).request(code, header, timeout=share)
            except (ConnectError, ConnectionLostError, RequestTimeoutError, PeerError) as error:
                if isinstance(error, RequestTimeoutError):
                    # Its machine may have failed, which does not close the connection.
                    self._pool.drop(address)
                if attempt == count - 1:
                    raise
                log.warning("%s; trying the next name server", error)
            else:
                self._preferred = (start + attempt) % count
                return answer, address
        raise AssertionError("no name server")

    async def brokers(self, *, timeout: float) -> list[str]:
        """Return the addresses of all brokers that a name server knows. Raises what `brokers_by_name` does."""
        brokers = await self.brokers_by_name(timeout=timeout)
        return sorted({one for members in brokers.values() for one in members.values()})

    async def brokers_by_name(self, *, timeout: float) -> dict[str, dict[int, str]]:
        """Return the brokers that a name server knows, at least one: the addresses of each by its name, as in
        `Route.brokers`. Raises ConnectError if it knows none, BrokerError, PeerError, and the errors of `ask`."""
        answer, address = await self.ask(RequestCode.GET_BROKER_CLUSTER_INFO, None, timeout=timeout)
        if answer.code != ResponseCode.SUCCESS:
            raise error_of(answer, address)
        try:
            table = bodies.decode(answer.body, ClusterInfo).broker_addr_table
        except BodyFormatError as error:
            raise PeerError(address, str(error)) from None
        brokers = {name: dict(broker.broker_addrs) for name, broker in table.items() if broker.broker_addrs}
        if not brokers:
            raise ConnectError(address, "the name server knows no broker")
        return brokers

    async def check(self, *, timeout: float) -> None:
        """Connect to one of the name servers. Raises ConnectError if that fails for all of them."""
        count = len(self.addresses)
        for number, address in enumerate(self.addresses):
            try:
                await self._connection(address, timeout / count)
            except ConnectError as error:
                if number == count - 1:
                    raise
                log.warning("%s; trying the next name server", error)
            else:
                self._preferred = number
                return

    async def _connection(self, address: str, timeout: float) -> ClientConnection:
        try:
            async with timeouts.timeout(timeout):
                return await self._pool.get(address)
        except TimeoutError:
            raise ConnectError(address, f"no answer within {timeout:g} s") from None


def parse_nameservers(text: str) -> list[str]:
    """Return the addresses in "a:9876;b:9876". Raises ArgumentError."""
    if not isinstance(text, str):
        raise ArgumentError(f"nameserver={text!r}: give host:port, as a str; several are joined by semicolons")
    addresses = [part.strip() for part in text.replace(",", ";").split(";") if part.strip()]
    if not addresses:
        raise ArgumentError("nameserver= has no address: give host:port")
    try:
        return ["{}:{}".format(*_bracketed(*split_address(address))) for address in addresses]
    except ArgumentError as error:  # it begins with the address
        raise ArgumentError(f"nameserver={error}") from None


def _bracketed(host: str, port: int) -> tuple[str, int]:
    return (f"[{host}]" if ":" in host else host), port


class Routes:
    """The routes of the topics in use, cached until `refresh` finds new ones. `timeout`: of a look-up, in seconds."""

    def __init__(self, nameservers: NameServers, timeout: float) -> None:
        self._nameservers = nameservers
        self._timeout = timeout
        self._routes: dict[str, Route] = {}
        self._fallbacks: dict[str, Route] = {}
        self._found: set[str] = set()
        self._lookups = SingleFlight[Route]()

    async def find(self, topic: str) -> Route:
        """Return the route of an existing topic. Raises NoRouteError, and the errors of the name servers."""
        route = self._routes.get(topic)
        if route is not None:
            return route
        route = self._routes[topic] = await self._lookups.get(topic, lambda: self._look_up(topic))
        return route

    async def find_to_send(self, topic: str) -> Route:
        """Return the route of a topic, or of the brokers that would create it. Raises NoRouteError, and the errors of
        `find`."""
        route = self._routes.get(topic) or self._fallbacks.get(topic)
        if route is None:
            try:
                route = await self.find(topic)
            except NoRouteError:
                route = await self._lookups.get((AUTO_CREATE_TOPIC, topic), lambda: self._find_fallback(topic))
        if not route.write_queues:
            raise NoRouteError(topic, "none of its queues can be written to now")
        return route

    def known_to_send(self, topic: str) -> Route | None:
        """Return what `find_to_send` would return, or None if it would have to ask a name server."""
        route = self._routes.get(topic) or self._fallbacks.get(topic)
        return route if route is not None and route.write_queues else None

    def was_found(self, topic: str) -> bool:
        """Return whether a route of the topic was ever found."""
        return topic in self._found

    def known(self) -> list[Route]:
        """Return the cached routes, also those of brokers that would create a topic."""
        return [*self._routes.values(), *self._fallbacks.values()]

    async def refresh(self) -> None:
        """Look up all routes again. If a look-up fails, the route stays as it is. The route of a topic that no longer
        exists is dropped."""
        for topic in {*self._routes, *self._fallbacks}:
            try:
                self._routes[topic] = await self._look_up(topic)
                self._fallbacks.pop(topic, None)
            except NoRouteError:
                self._routes.pop(topic, None)
            except DueMQError as error:
                log.warning("cannot refresh the route of %s: %s", topic, error)

    async def _find_fallback(self, topic: str) -> Route:
        try:
            answer = await self._ask(AUTO_CREATE_TOPIC)
        except NoRouteError:
            raise NoRouteError(topic, "it does not exist, and no broker creates topics automatically") from None
        route = self._fallbacks[topic] = build_route(topic, answer, most_queues=AUTO_CREATE_QUEUES)
        return route

    async def _look_up(self, topic: str) -> Route:
        route = build_route(topic, await self._ask(topic))
        self._found.add(topic)
        return route

    async def _ask(self, topic: str) -> TopicRoute:
        header = GetRouteInfo(topic=topic, accept_standard_json_only=True)
        answer, address = await self._nameservers.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, timeout=self._timeout)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRouteError(topic, "it does not exist")
        if answer.code != ResponseCode.SUCCESS:
            raise error_of(answer, address)
        try:
            route = bodies.decode(answer.body, TopicRoute)
        except BodyFormatError as error:
            raise PeerError(address, str(error)) from None
        for queues in route.queue_datas:
            count = max(queues.read_queue_nums, queues.write_queue_nums)
            if count > _MAX_QUEUES:
                raise PeerError(address, f"the topic {topic} has {count} queues, more than {_MAX_QUEUES}")
        return route


class RoundRobin:
    """Chooses queues in turn, and skips the queues of the broker that just failed if another broker has queues."""

    def __init__(self, choose_start: Callable[[int], int] = random.randrange) -> None:
        # The start is random, so that many short-lived producers do not all begin with the first queue.
        self._next = choose_start(1 << 16)

    def choose(self, queues: tuple[MessageQueue, ...], failed_broker: str | None = None) -> MessageQueue:
        """Return the next of `queues`, which is not empty."""
        for _ in queues:
            queue = queues[self._next % len(queues)]
            self._next += 1
            if queue.broker != failed_broker:
                return queue
        queue = queues[self._next % len(queues)]
        self._next += 1
        return queue
