"""The bridge with one set of rules: its parts, and how it starts, reconnects and ends.

RocketMQ's clients, the journal and the window of messages in flight live as long as the bridge. For each connection
to the MQTT broker there is a new `Session`.

The subscriptions do not wait for RocketMQ: a message that an MQTT broker acknowledges while nobody is subscribed is
lost. Until RocketMQ's clients are started, messages wait as they do whenever RocketMQ is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Final

from duemq._net import timeouts
from duemq._net.complaints import Complaints
from duemq._values.checks import MAX_BODY_BYTES
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, now_ms
from duemq.errors import DueMQError
from duemq.mqtt_bridge import delayed
from duemq.mqtt_bridge.carried import Carried
from duemq.mqtt_bridge.clients import FINISH, BridgeClients
from duemq.mqtt_bridge.inbound.from_mqtt import FromMqtt
from duemq.mqtt_bridge.outbound import Flight, PublishWindow, ToMqtt
from duemq.mqtt_bridge.rules.fields import encoded_name
from duemq.mqtt_bridge.rules.model import MqttSubscription, Outbound, Rules, RulesError
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import MqttConnectionError, Session
from duemq.mqtt_bridge.session.journal import Journal, MessagePosition, State, open_journal
from duemq.mqtt_bridge.session.packet_ids import PacketIds
from duemq.mqtt_bridge.session.packets import Ack, Publish
from duemq.mqtt_bridge.status import OFFLINE, Status
from duemq.protocol.topics import RETRY_PREFIX

PACKET_BYTES: Final = MAX_BODY_BYTES + packets.HEAD_OF_LARGE
"""Maximum size of a packet that is kept whole, in bytes. RocketMQ does not accept the payload of a larger one."""
COUNTERS_EVERY: Final = 10.0
"""Seconds between two reports of the counters."""
CHECK: Final = 5.0
"""Time limit of a check whether delayed messages wait, in seconds."""
MAX_REPORTED_NAME: Final = 64
"""Maximum number of characters of a bridge's name in its reports to brokers."""

log = logging.getLogger("duemq.mqtt_bridge")


class Bridge:
    """One bridge with one set of rules: `run` works until `stop` is called, or it is cancelled.

    `carried`: the state that the bridge with the previous rules has left, and after `run` the state that this one
    leaves.
    `is_ready` is set while the bridge is connected on both sides and the MQTT broker has accepted its subscriptions.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        carried: Carried | None = None,
        intervals: Intervals | None = None,
        clock: Clock = now_ms,
    ) -> None:
        self._rules = rules
        self._carried = carried if carried is not None else Carried()
        self._intervals = intervals or Intervals()
        self._clock = clock
        self._stopped = asyncio.Event()
        self._running: _Running | None = None
        self.status = Status(rules.status_topic, clock, self._carried.counters)
        self.is_ready = asyncio.Event()

    def stop(self) -> None:
        """Make `run` finish the messages in flight and return."""
        self._stopped.set()

    async def check_change(self, rules: Rules) -> None:
        """Check that new rules neither leave delayed messages behind nor publish them again. Raises RulesError."""
        old, new = self._rules.delayed, rules.delayed
        if old is None:
            return
        known = self._running.delayed_groups if self._running is not None else {}
        delayed.check_group(rules, {**known, old.topic: old.group})
        is_elsewhere = delayed.is_elsewhere(self._rules, rules)
        if new is not None and new.topic == old.topic and not is_elsewhere:
            return
        is_any: bool | None = None
        why = f"messages wait in {old.topic}"
        with suppress(DueMQError, TimeoutError):
            async with timeouts.timeout(CHECK):
                is_any = await self._running.is_any_delayed() if self._running is not None else None
        if is_any is None:
            why = f"RocketMQ does not report whether messages wait in {old.topic}"
        elif not is_any:
            return
        if is_elsewhere:
            what = delayed.left_at(self._rules.nameserver, rules.nameserver)
            raise RulesError(f"{rules.file}:{rules.nameserver_line}: {why}, and {what}")
        what = delayed.left_behind(old.topic, old.group)
        raise RulesError(f"{rules.file}:{rules.delayed_topic_line}: {why}, and {what}")

    async def run(self) -> None:
        """Work until stopped. Raises JournalError if the journal cannot be opened or written, ArgumentError if
        RocketMQ's clients cannot be made with these rules, and RulesError if they would publish delayed messages
        again."""
        clients = BridgeClients(
            self._rules,
            waiting=lambda: self.status.set_online(False),
            intervals=self._intervals,
            clock=self._clock,
        )
        journal = await open_journal(self._rules.connection.state_directory)
        try:
            delayed.check_group(self._rules, journal.delayed)
            async with clients:
                self._running = _Running(
                    self._rules,
                    journal,
                    clients,
                    self._carried,
                    self.status,
                    self.is_ready,
                    self._intervals,
                    self._clock,
                )
                await self._running.run(self._stopped)
        finally:
            await journal.close()


_MQTT: Final = "the MQTT session"
_UNSURE: Final = -1
"""In the journal, in place of a QoS: a subscription that the MQTT broker has not confirmed."""


class _Running:
    """A bridge at work."""

    def __init__(
        self,
        rules: Rules,
        journal: Journal,
        clients: BridgeClients,
        carried: Carried,
        status: Status,
        is_ready: asyncio.Event,
        intervals: Intervals,
        clock: Clock,
    ) -> None:
        self._rules = rules
        self._journal = journal
        self._clients = clients
        self._carried = carried
        self._status = status
        self._is_ready = is_ready
        self._intervals = intervals
        self._clock = clock
        self._ids = PacketIds(each.packet_id for each in journal.published.values() if each.state is not State.DONE)
        self._window = PublishWindow(
            most=rules.connection.max_in_flight,
            journal=journal,
            ids=self._ids,
            comes_again=_comes_again(rules),
            finished=self._share_out,
        )
        self._delayed_messages = delayed.DelayedMessages(clients.admin)
        self._inbound = FromMqtt(
            rules,
            producer=clients.producer,
            recaller=self._delayed_messages,
            journal=journal,
            receipts=carried.receipts,
            status=status,
            waiting=carried.waiting,
            intervals=intervals,
            clock=clock,
        )
        carried.waiting = []
        self._outbound: dict[str, ToMqtt] = {}
        """By group: the rules whose consumers are started."""
        self._complaints = Complaints(log)
        self._started = asyncio.Event()
        """Whether all of RocketMQ's clients are started, and the brokers have accepted the account."""
        self._is_connected = False
        """Whether the MQTT broker has answered to the subscriptions."""
        self._refused: dict[str, MqttSubscription] = {}
        """The subscriptions that the MQTT broker has refused, by filter with $share."""
        self._lowered: dict[str, int] = {}
        """The QoS that the MQTT broker has granted, where it is lower than the rule's, by filter with $share."""
        self._has_to_leave = asyncio.Event()

    async def run(self, stopped: asyncio.Event) -> None:
        """Work until stopped; then finish the messages in flight, within FINISH seconds. Raises JournalError and
        ArgumentError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(self._start(), name="duemq starts RocketMQ's clients")
                others = [
                    tasks.create_task(self._window.run(), name="duemq window"),
                    tasks.create_task(self._inbound.save_forever(), name="duemq journal from MQTT"),
                    tasks.create_task(self._report_forever(), name="duemq counters"),
                ]
                taking = tasks.create_task(self._take(), name="duemq from MQTT")
                session = tasks.create_task(self._connect_forever(), name="duemq MQTT session")
                try:
                    await stopped.wait()
                except asyncio.CancelledError:
                    # A cancelled wait_for of Python 3.11 goes on if it is over at the same time, so the session may not
                    # notice that it was cancelled.
                    self._has_to_leave.set()
                    raise
                self._inbound.close()
                for each in self._outbound.values():
                    each.close()
                if not self._started.is_set():
                    taking.cancel()
                # Also before the subscriptions are made: otherwise another bridge may get the messages in flight too.
                finishing = asyncio.gather(taking, self._window.drain(), return_exceptions=True)
                with suppress(TimeoutError):
                    async with timeouts.timeout(FINISH if self._window.session is not None else 0):
                        await finishing
                self._has_to_leave.set()
                if not self._is_connected:
                    session.cancel()
                await asyncio.wait((session,), timeout=FINISH)
                taking.cancel()
                await asyncio.wait((taking,))
                self._carried.waiting = self._inbound.left()
                for task in (session, starting, *others):
                    task.cancel()
            with suppress(TimeoutError):
                async with timeouts.timeout(FINISH):
                    for each in self._outbound.values():
                        await each.settle()
        except BaseExceptionGroup as group:
            # Not by except*: before Python 3.11.4 an error raised there comes out in another group.
            _, rest = group.split(DueMQError)
            if rest is not None:
                raise
            raise _first(group) from None

    # --- RocketMQ

    async def _start(self) -> None:
        """Start RocketMQ's clients, and publish what the consumers receive. Raises ArgumentError."""
        await self._clients.start()
        rules = self._rules
        all_rules = [(rule, False) for rule in rules.outbound]
        if rules.delayed is not None:
            all_rules.append((delayed.as_outbound(rules.delayed), True))
        await self._look_back()
        async with asyncio.TaskGroup() as tasks:
            for rule, is_delayed in all_rules:
                publishing = self._publish(rule, len(all_rules), is_delayed=is_delayed)
                tasks.create_task(publishing, name=f"duemq to MQTT {rule.topic}")
            if not all_rules:
                self._set_started()

    async def _look_back(self) -> None:
        """Note where delayed messages wait, and log a warning about those that earlier rules have left elsewhere."""
        journal, now = self._journal, self._rules.delayed
        for topic, group in list(journal.delayed.items()):
            if now is not None and topic == now.topic:
                continue
            is_any = False
            with suppress(DueMQError, TimeoutError):
                async with timeouts.timeout(CHECK):
                    is_any = await self._delayed_messages.is_any(topic)
            if is_any:
                log.warning("messages wait in %s, and %s", topic, delayed.left_behind(topic, group))
        if now is not None:
            journal.set_delayed(now.topic, now.group)
        await journal.saved()

    @property
    def delayed_groups(self) -> Mapping[str, str]:
        """The groups of topics in which delayed messages wait or waited."""
        return self._journal.delayed

    async def is_any_delayed(self) -> bool | None:
        """Return whether delayed messages wait, or are due and not published yet; None before RocketMQ has been
        reached. Raises the errors of the clients."""
        rule = self._rules.delayed
        if rule is None:
            return False
        if rule.group not in self._outbound:
            return None
        return await self._delayed_messages.is_any(rule.topic) or await self._outbound[rule.group].is_behind(
            self._clients.producer.end_offset
        )

    async def _publish(self, rule: Outbound, rules: int, *, is_delayed: bool) -> None:
        """Carry the messages of one rule to MQTT. `rules`: how many rules to MQTT there are, with this one."""
        consumer = await self._clients.consumer(rule, rules, self._journal.in_hand(rule.group))
        outbound = self._outbound[rule.group] = ToMqtt(
            rule,
            connection=self._rules.connection,
            is_delayed=is_delayed,
            consumer=consumer,
            window=self._window,
            journal=self._journal,
            ids=self._ids,
            status=self._status,
            intervals=self._intervals,
            clock=self._clock,
        )
        if len(self._outbound) == rules:
            self._set_started()
        await outbound.run()

    def _set_started(self) -> None:
        self._started.set()
        self._status.set_online(True)
        self._update_ready()

    def _update_ready(self) -> None:
        if self._is_connected and self._started.is_set() and not self._refused:
            self._is_ready.set()
            log.info("online: connected to the MQTT broker and to RocketMQ")
        else:
            self._is_ready.clear()

    async def _take(self) -> None:
        # Not before the brokers have accepted the account: with a wrong account, messages whose senders choose their
        # topics would be refused.
        await self._started.wait()
        await self._inbound.run()

    def _share_out(self, flights: list[Flight]) -> None:
        """Pass completed messages to their rules."""
        by_group: dict[str, list[Flight]] = {}
        for flight in flights:
            by_group.setdefault(flight.position.group, []).append(flight)
        for group, finished in by_group.items():
            self._outbound[group].finished(finished)

    # --- the MQTT broker

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
                    if not self._has_to_leave.is_set():
                        await self._begin(session)
                    failures = 0
                    self._complaints.resolve(_MQTT)
                    why = await self._lost_or_leaving(session)
            except MqttConnectionError as error:
                why = str(error)
            finally:
                self._is_connected = False
                self._update_ready()
                if self._window.disconnected():
                    failures = 0  # there is progress, even if a message makes the MQTT broker close each connection
            if not self._has_to_leave.is_set():
                failures += 1
                self._complaints.raise_(_MQTT, why)
                await asyncio.sleep(self._intervals.pause(failures))

    async def _begin(self, session: Session) -> None:
        if not session.is_present:
            self._journal.forget_session()
        self._inbound.accepted(is_present=session.is_present)
        await self._window.connected(session)
        await self._subscribe(session)
        self._window.subscribed()
        self._status.set_subscriptions(self._refused, self._lowered)
        self._status.connected(session)
        self._is_connected = True
        log.info("connected to the MQTT broker; the session was %s", "kept" if session.is_present else "new")
        self._update_ready()

    async def _subscribe(self, session: Session) -> None:
        """Make the subscriptions of the rules, and end all others.

        All requests are sent together: if messages that arrive meanwhile fill the bridge, it reads no answers until
        there is room again. The new subscriptions are made first: it is better to get a message twice than not at all.
        """
        share, journal = self._rules.connection.share, self._journal
        wanted = {
            each.filter if share is None else f"$share/{share}/{each.filter}": each
            for each in self._rules.subscriptions
        }
        known = dict(journal.subscriptions)
        for topic in wanted.keys() - known.keys():
            # Noted before it is made: if the bridge is killed and its rules change, the subscription is ended later.
            journal.subscribe(topic, _UNSURE)
        await journal.saved()
        await asyncio.gather(
            *(
                self._make_subscription(session, topic, each)
                for topic, each in wanted.items()
                # With MQTT 3.1.1 the broker would send the retained messages again.
                if session.is_v5 or known.get(topic) != each.qos
            ),
            *(self._end_subscription(session, topic) for topic in known.keys() - wanted.keys()),
        )
        await journal.saved()

    async def _make_subscription(self, session: Session, topic: str, subscription: MqttSubscription) -> None:
        granted = await session.subscribe_to(topic, subscription)
        what = f"the subscription to {topic!r}"
        if granted.refused is not None:
            self._refused[topic] = subscription
            self._complaints.raise_(what, f"the MQTT broker refused it: {granted.refused}")
            return
        self._refused.pop(topic, None)
        self._complaints.resolve(what)
        if granted.qos >= subscription.qos:
            self._lowered.pop(topic, None)
        elif self._lowered.get(topic) != granted.qos:
            self._lowered[topic] = granted.qos
            log.warning(
                "%s: the MQTT broker grants only QoS %d, and the rule asks for %d; messages get the guarantees of the "
                "lower one",
                what,
                granted.qos,
                subscription.qos,
            )
        self._journal.subscribe(topic, subscription.qos)

    async def _end_subscription(self, session: Session, topic: str) -> None:
        await session.unsubscribe_from(topic)
        self._journal.forget_subscriptions([topic])

    async def _insist_on_subscriptions(self, session: Session) -> None:
        """Retry the refused subscriptions until the MQTT broker accepts them all. Raises MqttConnectionError and
        JournalError."""
        failures = 0
        while self._refused:
            failures += 1
            await asyncio.sleep(self._intervals.pause(failures))
            await asyncio.gather(
                *(self._make_subscription(session, topic, each) for topic, each in list(self._refused.items()))
            )
            await self._journal.saved()
            self._status.set_subscriptions(self._refused, self._lowered)
            self._update_ready()

    async def _lost_or_leaving(self, session: Session) -> str:
        """Wait for the end of a connection; return its reason. Raises MqttConnectionError and JournalError."""
        lost = asyncio.create_task(session.wait_lost())
        leaving = asyncio.create_task(self._has_to_leave.wait())
        insisting = asyncio.create_task(self._insist_on_subscriptions(session))
        try:
            await asyncio.wait((lost, leaving, insisting), return_when=asyncio.FIRST_COMPLETED)
            if insisting.done():
                insisting.result()
                await asyncio.wait((lost, leaving), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return lost.result()
            self._status.leaving()
            return "the bridge ends"
        finally:
            for task in (lost, leaving, insisting):
                task.cancel()
            await asyncio.wait((insisting,))

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
        await self._started.wait()
        name = encoded_name(self._rules.connection.bridge)[:MAX_REPORTED_NAME]
        while True:
            await asyncio.sleep(COUNTERS_EVERY)
            self._status.publish_counters()
            try:
                await self._clients.admin.report_bridge(name, asdict(self._status.counters))
            except DueMQError as error:
                log.debug("cannot report the counters to the brokers: %s", error)


def _comes_again(rules: Rules) -> Callable[[MessagePosition], bool]:
    """Return a function that says whether a rule with QoS 2 reads the message at a position."""
    groups = {rule.group: rule.topic for rule in rules.outbound if rule.qos == 2}
    if rules.delayed is not None and rules.delayed.qos == 2:
        groups[rules.delayed.group] = rules.delayed.topic

    def comes_again(position: MessagePosition) -> bool:
        topic = groups.get(position.group)
        return topic is not None and position.queue.topic in (topic, RETRY_PREFIX + position.group)

    return comes_again


def _first(error: BaseException) -> BaseException:
    """Return the first error in nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
