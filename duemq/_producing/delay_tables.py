"""The delays of brokers: requested once for each connection, cached, and requested again from time to time.

A broker is asked for its settings. A duemq broker is also asked for each topic, which may have its own levels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from duemq._net.client import Client, typed_body
from duemq._net.connection import ClientConnection
from duemq._net.single_flight import SingleFlight
from duemq._producing.delay import Delays, DelaySpec, TopicLevels, read_delays, read_topic_levels
from duemq.errors import BrokerError, NotSupportedError, TopicNotFoundError
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests.bodies import TopicConfig
from duemq.protocol.requests.headers import TopicName

T = TypeVar("T")


class DelayTables:
    """The delays of brokers and topics, as a producer needs them. Each is cached for `Intervals.delays` seconds."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._brokers = Answers[Delays](client.intervals.delays)
        self._topics = Answers[TopicLevels | None](client.intervals.delays)

    async def find(self, address: str, topic: str, spec: DelaySpec) -> Delays:
        """Return the delays that the broker at `address` has for a message to `topic`. If the broker refuses to report
        them and `spec` is a level, return no delays: the level is then not checked.

        Raises BrokerError if the broker refuses to report its delays and `spec` is not a level, and what `Client.call`
        raises.
        """
        connection = await self._client.broker(address)
        try:
            delays = await self._brokers.get(connection, "", lambda: self._ask_broker(address))
        except BrokerError as error:
            _raise_unless_a_level(spec, error)
            delays = self._brokers.keep(connection, "", Delays())
        if not delays.topics_have_levels or (delays.timers and spec.takes_timer):
            return delays
        try:
            own = await self._own(connection, address, topic)
        except BrokerError as error:
            _raise_unless_a_level(spec, error)
            # Not cached: the broker's own table must not be mistaken for the topic's.
            return Delays()
        return delays if own is None else replace(delays, own=own)

    def known(self, connection: ClientConnection, spec: DelaySpec) -> Delays | None:
        """Return what `find` would return, or None if the broker would have to be asked."""
        delays = self._brokers.kept(connection, "") if spec.takes_timer else None
        return delays if delays is not None and delays.timers else None

    async def _own(self, connection: ClientConnection, address: str, topic: str) -> TopicLevels | None:
        try:
            return await self._topics.get(connection, topic, lambda: self._ask_topic(address, topic))
        except TopicNotFoundError:
            # The send creates the topic, without its own levels. This is not cached: the next send asks again.
            return None

    async def _ask_broker(self, address: str) -> Delays:
        return read_delays(await self._client.call(address, RequestCode.GET_BROKER_CONFIG))

    async def _ask_topic(self, address: str, topic: str) -> TopicLevels | None:
        try:
            answer = await self._client.call(address, RequestCode.GET_TOPIC_CONFIG, TopicName(topic))
        except NotSupportedError:
            return None
        return read_topic_levels(topic, typed_body(answer, TopicConfig, address))


def _raise_unless_a_level(spec: DelaySpec, error: BrokerError) -> None:
    if spec.level is None:
        error.add_note("to send a delay or a time of delivery, the client must know which delays the broker has")
        raise error


class Answers(Generic[T]):
    """Cached answers by connection and question, each valid for `lifetime` seconds of the loop's clock."""

    def __init__(self, lifetime: float) -> None:
        self.lifetime = lifetime
        self._questions = SingleFlight[T]()
        self._kept: WeakKeyDictionary[ClientConnection, dict[str, tuple[T, float]]] = WeakKeyDictionary()

    async def get(self, connection: ClientConnection, name: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the cached answer, or a new one. Raises what `ask` raises; the cached answer is then dropped."""
        time = asyncio.get_running_loop().time
        kept = self._kept.setdefault(connection, {})
        if name in kept:
            answer, until = kept[name]
            if time() < until:
                return answer
            # Sends in the meantime use the cached answer instead of asking too.
            self.keep(connection, name, answer)
        try:
            answer = await self._questions.get((connection, name), ask)
        except BaseException:
            kept.pop(name, None)
            raise
        return self.keep(connection, name, answer)

    def kept(self, connection: ClientConnection, name: str) -> T | None:
        """Return the cached answer if it is still valid, or None."""
        found = self._kept.get(connection, {}).get(name)
        return found[0] if found is not None and asyncio.get_running_loop().time() < found[1] else None

    def keep(self, connection: ClientConnection, name: str, answer: T) -> T:
        """Cache an answer from now on, and return it."""
        until = asyncio.get_running_loop().time() + self.lifetime
        self._kept.setdefault(connection, {})[name] = answer, until
        return answer
