"""The RocketMQ clients of a bridge. Starting them is retried until the brokers answer and accept the account."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from duemq._net.complaints import Complaints
from duemq._values.intervals import Intervals
from duemq._values.times import Clock
from duemq.admin import Admin
from duemq.consumer import Consumer
from duemq.errors import ArgumentError, ClosedError, DueMQError
from duemq.messages import MessageQueue
from duemq.mqtt_bridge.rules.fields import encoded_name
from duemq.mqtt_bridge.rules.model import Outbound, Rules
from duemq.producer import Producer

PRODUCER_GROUP: Final = "mqtt-bridge"
FINISH: Final = 5.0
"""Time limit for the messages in flight when the bridge is stopped, in seconds; and time between two checks whether the
messages in flight of a queue that another bridge is to get are finished."""

T = TypeVar("T")

log = logging.getLogger("duemq.mqtt_bridge")


class BridgeClients:
    """The producer, the admin client and the consumers of a bridge with these rules; `async with` closes them all.

    `waiting` is called whenever a client could not be started and the start will be retried. Raises ArgumentError if
    the clients cannot be made with these rules.
    """

    def __init__(self, rules: Rules, *, waiting: Callable[[], None], intervals: Intervals, clock: Clock) -> None:
        tls = rules.tls.context() if rules.tls is not None else False
        self._access: dict[str, Any] = {**rules.account._asdict(), "tls": tls}
        """The arguments of clients for access to the brokers: the account's keys and TLS."""
        self._rules = rules
        self._waiting = waiting
        self._intervals = intervals
        self._clock = clock
        self._complaints = Complaints(log)
        self._open = AsyncExitStack()
        self.producer = Producer(
            rules.nameserver, group=PRODUCER_GROUP, _intervals=intervals, _clock=clock, **self._access
        )
        self.admin = Admin(rules.nameserver, _intervals=intervals, **self._access)

    async def __aenter__(self) -> BridgeClients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def start(self) -> None:
        """Start the producer and the admin client as soon as a name server answers, and wait until the brokers accept
        the account. Raises ArgumentError."""
        self._open.push_async_callback(self.producer.close)
        await self._insist(self.producer.start, _STARTING)
        self._open.push_async_callback(self.admin.close)
        await self._insist(self.admin.start, _STARTING)
        # The start of a client does not show this, since it succeeds without a broker, and a consumer whose topic does
        # not exist yet connects to no broker.
        await self._insist(self.admin.check_account, _STARTING)

    async def consumer(self, rule: Outbound, rules: int, in_hand: Mapping[MessageQueue, int]) -> Consumer:
        """Return a rule's consumer, started. `rules`: number of rules that share the limits of messages in flight.
        `in_hand`: by queue, the offset after the last message that the journal has. Raises ArgumentError."""
        connection = self._rules.connection

        async def start() -> Consumer:
            is_shared = connection.share is not None
            consumer = Consumer(
                rule.group,
                nameserver=self._rules.nameserver,
                from_=rule.start,
                max_cached_messages=max(1, connection.max_in_flight // rules),
                max_cached_bytes=connection.max_in_flight_bytes // rules,
                _intervals=self._intervals,
                _clock=self._clock,
                # Each bridge has its own journal, so no two bridges may publish messages of a queue at the same time.
                close_timeout=FINISH,
                _exclusive=is_shared,
                _in_hand=in_hand,
                _client_id=f"mqtt-bridge@{encoded_name(connection.client_id)}" if is_shared else None,
                **self._access,
            )
            consumer.subscribe(rule.topic, rule.tags)
            await consumer.start()
            return consumer

        consumer = await self._insist(start, f"{_STARTING} the consumer of {rule.topic}")
        self._open.push_async_callback(consumer.close)
        return consumer

    async def _insist(self, start: Callable[[], Awaitable[T]], who: str) -> T:
        """Start a client, and retry until a name server answers and the brokers accept the account."""
        failures = 0
        while True:
            try:
                started = await start()
            except (ArgumentError, ClosedError):
                raise
            except DueMQError as error:
                failures += 1
                self._waiting()
                self._complaints.raise_(who, str(error))
                await asyncio.sleep(self._intervals.pause(failures))
            else:
                self._complaints.resolve(who)
                return started


_STARTING: Final = "starting"
