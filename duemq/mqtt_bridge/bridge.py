"""The bridge with one set of rules: its parts, and how it starts, reconnects and ends.

RocketMQ's clients, the journal and the window of messages on their way live as long as the bridge. For each connection
to the MQTT broker there is a new `Session`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from duemq._net.complaints import Complaints
from duemq._values.checks import MAX_BODY_BYTES
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, now_ms
from duemq.admin import Admin
from duemq.consumer import PushConsumer
from duemq.errors import ArgumentError, ClosedError, DueMQError
from duemq.mqtt_bridge import delayed
from duemq.mqtt_bridge.inbound import FromMqtt
from duemq.mqtt_bridge.outbound import Flight, ToMqtt, Window
from duemq.mqtt_bridge.rules.fields import encoded_name
from duemq.mqtt_bridge.rules.model import Outbound, Rules
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import MqttConnectionError, Session
from duemq.mqtt_bridge.session.journal import Journal, State, open_journal
from duemq.mqtt_bridge.session.packet_ids import PacketIds
from duemq.mqtt_bridge.session.packets import Ack, Publish
from duemq.mqtt_bridge.status import OFFLINE, Status
from duemq.producer import Producer

PACKET_BYTES: Final = MAX_BODY_BYTES + packets.HEAD_OF_LARGE
"""Maximum size of a packet that is kept whole, in bytes. The payload of larger ones is more than RocketMQ takes."""
COUNTERS_EVERY: Final = 10.0
"""Seconds between two reports of the counters."""
FINISH: Final = 5.0
"""Maximum time for the messages on their way when the bridge is stopped, in seconds."""
PRODUCER_GROUP: Final = "mqtt-bridge"
MAX_REPORTED_NAME: Final = 64
"""Maximum number of characters of a bridge's name in its reports to brokers."""

log = logging.getLogger("duemq.mqtt_bridge")


class Bridge:
    """One bridge with one set of rules: `run` works until `stop` is called, or it is cancelled.

    `is_ready` is set while the bridge is connected on both sides and the MQTT broker has acknowledged its
    subscriptions.
    """

    def __init__(self, rules: Rules, *, intervals: Intervals | None = None, clock: Clock = now_ms) -> None:
        self._rules = rules
        self._intervals = intervals or Intervals()
        self._clock = clock
        self._access: Mapping[str, Any] = {
            **rules.account._asdict(),
            "tls": rules.tls.context() if rules.tls is not None else False,
        }
        """The arguments with which RocketMQ's clients get in."""
        self._name = rules.connection.share or rules.connection.client_id
        self._complaints = Complaints(log)
        self._stopped = asyncio.Event()
        self.status = Status(rules.status_topic, clock)
        self.is_ready = asyncio.Event()

    def stop(self) -> None:
        """Have `run` finish the messages on their way and return."""
        self._stopped.set()

    async def run(self) -> None:
        """Work until stopped. Raises JournalError if the journal cannot be opened or written, and ArgumentError if
        RocketMQ's clients cannot be made with these rules."""
        journal = await open_journal(self._rules.connection.state_directory)
        try:
            async with AsyncExitStack() as stack:
                starting = asyncio.create_task(self._start(journal, stack), name="duemq bridge starts")
                stopped = asyncio.create_task(self._stopped.wait())
                try:
                    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
                    if starting.done():
                        await starting.result().run(self._stopped)
                finally:
                    starting.cancel()
                    stopped.cancel()
                    await asyncio.wait((starting, stopped))
        finally:
            await journal.close()

    async def _start(self, journal: Journal, stack: AsyncExitStack) -> _Running:
        """Start RocketMQ's clients as soon as a name server answers; `stack` closes them."""
        rules, nameserver = self._rules, self._rules.nameserver
        producer = Producer(
            nameserver, group=PRODUCER_GROUP, _intervals=self._intervals, _clock=self._clock, **self._access
        )
        stack.push_async_callback(producer.close)
        await self._insist(producer.start)
        admin = Admin(nameserver, _intervals=self._intervals, **self._access)
        stack.push_async_callback(admin.close)
        await self._insist(admin.start)

        ids = PacketIds(each.packet_id for each in journal.published.values() if each.state is not State.DONE)
        outbound: dict[str, ToMqtt] = {}
        window = Window(
            most=rules.connection.max_in_flight,
            journal=journal,
            ids=ids,
            finished=lambda flights: _share_out(flights, outbound),
        )
        all_rules = [(rule, False) for rule in rules.outbound]
        if rules.delayed is not None:
            all_rules.append((delayed.as_outbound(rules.delayed), True))
        for rule, is_delayed in all_rules:
            consumer = await self._consumer(rule, len(all_rules))
            stack.push_async_callback(consumer.close)
            outbound[rule.group] = ToMqtt(
                rule,
                is_delayed=is_delayed,
                bridge=self._name,
                consumer=consumer,
                is_v5=rules.connection.protocol == "5",
                window=window,
                journal=journal,
                ids=ids,
                status=self.status,
                intervals=self._intervals,
                clock=self._clock,
            )
        inbound = FromMqtt(
            rules,
            bridge=self._name,
            producer=producer,
            recaller=delayed.Waiting(admin),
            journal=journal,
            status=self.status,
            intervals=self._intervals,
            clock=self._clock,
        )
        return _Running(
            rules,
            journal,
            ids,
            window,
            inbound,
            tuple(outbound.values()),
            self.status,
            partial(admin.report_bridge, encoded_name(self._name)[:MAX_REPORTED_NAME]),
            self.is_ready,
            self._intervals,
        )

    async def _consumer(self, rule: Outbound, rules: int) -> PushConsumer:
        """Return a rule's consumer, started. `rules`: number of rules that share the limits of what is on its way."""
        connection = self._rules.connection
        failures = 0
        while True:
            consumer = PushConsumer(
                rule.group,
                nameserver=self._rules.nameserver,
                from_=rule.start,
                max_cached_messages=max(1, connection.max_in_flight // rules),
                max_cached_bytes=connection.max_in_flight_bytes // rules,
                _intervals=self._intervals,
                _clock=self._clock,
                **self._access,
            )
            consumer.subscribe(rule.topic, rule.tags)
            try:
                await consumer.start()
            except DueMQError as error:
                failures += 1
                await self._wait_for_rocketmq(error, failures)
            else:
                self._complaints.resolve(_STARTING)
                return consumer

    async def _insist(self, start: Callable[[], Awaitable[object]]) -> None:
        """Start a client of RocketMQ, and again until a name server answers and the brokers accept the account."""
        failures = 0
        while True:
            try:
                await start()
            except DueMQError as error:
                failures += 1
                await self._wait_for_rocketmq(error, failures)
            else:
                self._complaints.resolve(_STARTING)
                return

    async def _wait_for_rocketmq(self, error: DueMQError, failures: int) -> None:
        if isinstance(error, (ArgumentError, ClosedError)):
            raise error
        self._complaints.raise_(_STARTING, str(error))
        await asyncio.sleep(self._intervals.pause(failures))


_STARTING: Final = "starting"
_MQTT: Final = "the MQTT session"
_UNSURE: Final = -1
"""In the journal, in place of a QoS: a subscription that the MQTT broker has not confirmed."""


class _Running:
    """A bridge whose clients of RocketMQ are started."""

    def __init__(
        self,
        rules: Rules,
        journal: Journal,
        ids: PacketIds,
        window: Window,
        inbound: FromMqtt,
        outbound: tuple[ToMqtt, ...],
        status: Status,
        report: Callable[[Mapping[str, int]], Awaitable[None]],
        is_ready: asyncio.Event,
        intervals: Intervals,
    ) -> None:
        self._rules = rules
        self._journal = journal
        self._ids = ids
        self._window = window
        self._inbound = inbound
        self._outbound = outbound
        self._status = status
        self._report = report
        """Reports the counters to the brokers. Raises DueMQError."""
        self._is_ready = is_ready
        self._intervals = intervals
        self._complaints = Complaints(log)
        self._has_to_leave = asyncio.Event()

    async def run(self, stopped: asyncio.Event) -> None:
        """Work until stopped; then finish the messages on their way, within FINISH seconds. Raises JournalError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(self._window.run(), name="duemq window"),
                    tasks.create_task(self._report_forever(), name="duemq counters"),
                    *(
                        tasks.create_task(each.run(), name=f"duemq to MQTT {each.rule.topic}")
                        for each in self._outbound
                    ),
                ]
                taking = tasks.create_task(self._inbound.run(), name="duemq from MQTT")
                session = tasks.create_task(self._connect_forever(), name="duemq MQTT session")
                await stopped.wait()
                self._inbound.close()
                finishing = asyncio.gather(taking, self._window.drain())
                with suppress(TimeoutError):
                    async with asyncio.timeout(FINISH if self._is_ready.is_set() else 0):
                        await finishing
                self._has_to_leave.set()
                if not self._is_ready.is_set():
                    session.cancel()
                await asyncio.wait((session,), timeout=FINISH)
                for task in (session, taking, *others):
                    task.cancel()
            for each in self._outbound:
                await each.settle()
        except* DueMQError as group:
            raise _first(group) from None

    async def _connect_forever(self) -> None:
        """Keep a connection until the bridge ends. Raises JournalError."""
        failures = 0
        while not self._has_to_leave.is_set():
            session = Session(
                self._rules.connection,
                will=(self._status.topic, OFFLINE),
                limit=PACKET_BYTES,
                received=self._received,
                new_id=self._ids.lend,
            )
            self._inbound.connected(session)
            try:
                async with session:
                    await self._begin(session)
                    failures = 0
                    self._complaints.resolve(_MQTT)
                    why = await self._lost_or_leaving(session)
            except MqttConnectionError as error:
                why = str(error)
            finally:
                self._is_ready.clear()
                self._window.disconnected()
            if not self._has_to_leave.is_set():
                failures += 1
                self._complaints.raise_(_MQTT, why)
                await asyncio.sleep(self._intervals.pause(failures))

    async def _begin(self, session: Session) -> None:
        if not session.is_present:
            self._journal.forget_session()
        await self._window.connected(session)
        await self._subscribe(session)
        self._window.subscribed()
        self._status.connected(session)
        self._is_ready.set()
        log.info("connected to the MQTT broker; the session was %s", "kept" if session.is_present else "new")

    async def _subscribe(self, session: Session) -> None:
        """Make the subscriptions of the rules, and end all others."""
        share, journal = self._rules.connection.share, self._journal
        wanted = {
            each.filter if share is None else f"$share/{share}/{each.filter}": each
            for each in self._rules.subscriptions
        }
        known = dict(journal.subscriptions)
        for topic in known.keys() - wanted.keys():
            await session.unsubscribe_from(topic)
            journal.forget_subscriptions([topic])
        for topic in wanted.keys() - known.keys():
            # Written before it is made. If the bridge is killed and its rules change, the subscription is ended later.
            journal.subscribe(topic, _UNSURE)
        await journal.saved()
        for topic, each in wanted.items():
            if not session.is_v5 and known.get(topic) == each.qos:
                continue  # with MQTT 3.1.1 the broker would send the retained messages again
            refused = await session.subscribe_to(topic, each)
            if refused is not None:
                log.error("the MQTT broker refuses the subscription to %r: %s", topic, refused)
                continue
            journal.subscribe(topic, each.qos)
        await journal.saved()

    async def _lost_or_leaving(self, session: Session) -> str:
        """Wait for the end of a connection; return its reason."""
        lost = asyncio.create_task(session.wait_lost())
        leaving = asyncio.create_task(self._has_to_leave.wait())
        try:
            await asyncio.wait((lost, leaving), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return lost.result()
            self._status.leaving()
            return "the bridge ends"
        finally:
            lost.cancel()
            leaving.cancel()

    def _received(self, items: list[Publish | Ack]) -> None:
        if all(isinstance(each, Publish) for each in items):
            self._inbound.received(items)
            return
        inbound: list[Publish | Ack] = []
        outbound: list[Ack] = []
        for each in items:
            if isinstance(each, Publish) or each.kind == packets.PUBREL:
                inbound.append(each)
            else:
                outbound.append(each)
        self._inbound.received(inbound)
        self._window.received(outbound)

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(COUNTERS_EVERY)
            self._status.publish_counters()
            try:
                await self._report(asdict(self._status.counters))
            except DueMQError as error:
                log.debug("the counters could not be reported to the brokers: %s", error)


def _first(error: BaseException) -> BaseException:
    """Return the first error in nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _share_out(flights: list[Flight], outbound: Mapping[str, ToMqtt]) -> None:
    """Pass completed messages to their rules."""
    by_group: dict[str, list[Flight]] = {}
    for flight in flights:
        by_group.setdefault(flight.place.group, []).append(flight)
    for group, finished in by_group.items():
        outbound[group].finished(finished)
