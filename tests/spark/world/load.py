"""The load of the stores: messages of every kind that a broker accepts, each with its expected outcome."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

from duemq import Admin, ChangeResult
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, FrameReader
from tests.interop.support import eventually
from tests.peers.brokers.broker import HOST, Broker
from tests.peers.clients import JavaClient, Outcome, Producer, unique
from tests.peers.messages import Outgoing
from tests.spark.world import oracle
from tests.support import wire

# Levels 1 and 2 are delivered while the store is written; 3 and on are for retries; the last two stay pending.
LEVELS: Final = "1s 2s 1s 1s 1h 2h"
LEVEL_MS: Final = (1000, 2000, 1000, 1000, 3_600_000, 7_200_000)
ROLL_WINDOW_SECONDS: Final = 10
"""Messages due later than that get another unit, in RocketMQ another record, each time it has passed."""
HOUR_MS: Final = 3_600_000
BURST: Final = 300
SOON_MS: Final = 45_000
"""From the end of the load on until its last timers are due: long enough for the broker to be stopped before."""
_EVERY: Final = 0.3
"""Seconds between two questions to a broker that takes seconds to do its work: each costs it and the client time."""

Kind = Literal["plain", "level", "timer", "half"]
Fate = Literal["delivered", "pending", "cancelled", "committed", "rolled back", "open", "either"]


@dataclass(frozen=True)
class Sent:
    """One message that a broker accepted."""

    unique_key: str
    """UNIQ_KEY; empty for the message sent without. 5.3.3's client appends the key of the whole batch to each part's
    own: stored by 5.3.3's broker a part has two, and the last one, the same for all, is the one that counts in
    RocketMQ."""
    physical_offset: int | None
    """Physical offset of the record that the send made, the waiting one if the message is scheduled. Unknown for
    halves."""
    topic: str
    """The topic that the message is for."""
    tags: str | None
    keys: str | None
    body: bytes
    """The producer's body, not compressed."""
    kind: Kind
    outcome: Fate
    """"delivered" for plain messages. "either": delivered or pending, for messages under way when the broker was
    killed."""
    level: int = 0
    """The delay level, from 1; 0 without. The delay is LEVEL_MS[level - 1]."""
    deliver_ms: int | None = None
    """The requested time of timers with TIMER_DELIVER_MS, ms since the epoch."""
    delay_ms: int | None = None
    """The requested delay of timers with a delay."""
    properties: tuple[tuple[str, str], ...] = ()
    """The user's own properties."""


@dataclass(frozen=True)
class Retried:
    """A message that a consumer group sent back: `attempts` times through a level, at last to %DLQ% if `is_dead`."""

    unique_key: str
    topic: str
    group: str
    attempts: int
    is_dead: bool


class Load:
    """One run of the load against a broker with the settings of `tests.spark.world.stores`."""

    def __init__(self, broker: Broker, java: JavaClient, producer: Producer, seed: int = 1) -> None:
        self._broker = broker
        self._java = java
        self._producer = producer
        self._admin = java.admin(broker.nameserver)
        self._chance = random.Random(seed)
        self._has_timers = broker.kind != "apache-4.9.7"
        self._has_transactions = broker.kind != "duemq"
        self.sent: list[Sent] = []
        self.retried: list[Retried] = []
        self.progress: dict[str, dict[int, int]] = {}
        self._timer_topic = self._burst_topic = ""
        # RocketMQ recalls only a message that is due within one window, and rolls those due later by its wheel's clock,
        # which is seconds behind on a busy machine. duemq recalls any, so that such a machine has time for the recall.
        self._recall_ms = 30_000 if broker.kind == "duemq" else ROLL_WINDOW_SECONDS * 1000 - 3000

    async def run(self) -> None:
        """Send everything but the rest, and wait until the broker has delivered all of that which is due."""
        parts = [self._plain(), self._levels(), self._retries()]
        parts += [self._timers()] if self._has_timers else []
        parts += [self._transactions()] if self._has_transactions else []
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)

    async def begin_burst(self) -> None:
        """Send levels, and return while the broker delivers them."""
        self._burst_topic = await self._topic("burst", 1)
        await self._send(
            self._burst_topic, [self._small(f"burst {n}", level=1) for n in range(BURST)], "level", "either"
        )
        await self._stored(self._burst_topic, 1, every=0.02)

    async def finish(self) -> None:
        """Wait for the rest of the burst, and send what still waits when the broker is stopped, but soon is due."""
        await self._stored(self._burst_topic, BURST)
        self.sent = [replace(sent, outcome="delivered") if sent.outcome == "either" else sent for sent in self.sent]
        if self._has_timers:
            now = _now_ms()
            await self._send(
                self._timer_topic, [self._timer(now + SOON_MS + n * 50) for n in range(20)], "timer", "pending"
            )
            await self._recalled(self._timer_topic, 2)
            # On a busy machine RocketMQ's timers may lag behind their topic, also in rolls. What they have not taken
            # in when the broker stops is not in the timer log.
            stats = partial(self._admin.runtime_stats, self._broker.address)
            await eventually(stats, lambda found: found["timerOffsetBehind"] == "0", timeout=60, every=_EVERY)

    # --- sending

    async def _plain(self) -> None:
        topic, other = await self._topic("plain", 4), await self._topic("unicode_and_batches", 2)
        chance = self._chance
        messages = []
        for number in range(2500):
            size = chance.choice((1, 40, 300, 1000, 2000))
            messages.append(
                Outgoing(
                    chance.randbytes(size),
                    tags=chance.choice(("red", "green", "blue", None)),
                    keys=chance.choice((f"order-{number}", f"order-{number} customer-{number % 17}", None)),
                    properties=chance.choice(({}, {"region": "north", "n": str(number)})),
                )
            )
        # Beyond 4 KiB Java's client compresses bodies, also those that get larger by it.
        messages += [Outgoing(b"%05d " % number * 1500, tags="large") for number in range(60)]
        messages += [Outgoing(chance.randbytes(9000), tags="noise") for _ in range(30)]
        await self._send(topic, messages, "plain", "delivered")
        odd = [
            Outgoing("schlüssel 漢字 🐢".encode(), tags="étiquette", keys="ключ-1", properties={"città": "Forlì 🐢"}),
            Outgoing(b"\0\1\2\xff", tags="a=b", properties={"long": "x" * 3000}),
        ]
        await self._send(other, odd, "plain", "delivered")
        for batch in range(4):
            parts = [Outgoing(b"part %d of %d" % (n, batch), tags="batch", keys=f"b-{n}") for n in range(25)]
            (result,) = await self._producer.send(other, parts, "batch")
            assert result.msg_id is not None
            assert result.offset_msg_id is not None
            keys, ids = result.msg_id.split(","), result.offset_msg_id.split(",")
            for part, key, offset_id in zip(parts, keys, ids, strict=True):
                self._note(other, part, key, offset_id, "plain", "delivered")
        if self._broker.kind != "apache-5.3.3":  # it fails on an empty body
            offset_id = await self._send_empty(other)
            self._note(other, Outgoing(b"", tags="empty"), "", offset_id, "plain", "delivered")
        await self._consume_next(other)

    async def _levels(self) -> None:
        topic = await self._topic("levels", 3)
        for level, count, outcome in (
            (1, 150, "delivered"),
            (2, 80, "delivered"),
            (5, 40, "pending"),
            (6, 10, "pending"),
        ):
            messages = [self._small(f"level {level}, {n}", level=level) for n in range(count)]
            await self._send(topic, messages, "level", outcome)  # type: ignore[arg-type]
        large = Outgoing(self._chance.randbytes(200_000), level=1)  # most of the room left in a file
        await self._send(topic, [large], "level", "delivered")
        delivered = 231
        if self._broker.kind == "duemq":
            await self._change_levels(topic)
            delivered += 2
        await self._stored(topic, delivered)

    async def _timers(self) -> None:
        topic = self._timer_topic = await self._topic("timers", 3)
        # Each message has time to be sent, also on a busy machine, before its requested time is past.
        now = _now_ms()
        rolled = [self._timer(now + (ROLL_WINDOW_SECONDS + 6) * 1000 + n) for n in range(5)]
        await self._send(topic, rolled, "timer", "delivered")
        await self._recalled(topic, 4)
        now = _now_ms()
        due = [self._timer(now + 3000 + self._chance.randrange(4000)) for _ in range(120)]
        # Whole seconds are a special case in RocketMQ.
        due += [self._timer(now // 1000 * 1000 + 5000), self._timer(now // 1000 * 1000 + 6000)]
        due += [Outgoing(b"ms", properties={"TIMER_DELAY_MS": "2345"})]
        due += [Outgoing(b"s", properties={"TIMER_DELAY_SEC": "3"})]
        await self._send(topic, due, "timer", "delivered")
        await self._send(topic, [self._timer(now - 5000)], "plain", "delivered")
        far = [now + HOUR_MS + n * 777 for n in range(20)] + [now + 60 * HOUR_MS + n for n in range(3)]
        await self._send(topic, [self._timer(at) for at in far], "timer", "pending")
        delivered = len(due) + 1 + len(rolled)
        if self._broker.kind == "duemq":
            # A handle finds its message there in any state; RocketMQ's only finds one that was never rolled.
            await self._send(topic, [self._timer(now + 200 * 24 * HOUR_MS)], "timer", "cancelled")
            await self._change_timers(topic, _now_ms())
            await self._replace_timers(topic, _now_ms())
            delivered += 2
        await self._stored(topic, delivered)

    async def _transactions(self) -> None:
        topic = await self._topic("transactions", 2)
        shares: dict[Outcome, int] = {"commit": 8, "rollback": 4, "open": 2}
        outcomes = [outcome for outcome, count in shares.items() for _ in range(count)]
        fates: dict[Outcome, Fate] = {"commit": "committed", "rollback": "rolled back", "open": "open"}
        messages = [self._small(f"half {n}", tags="half") for n in range(len(outcomes))]
        producer = await self._java.transaction_producer(self._broker.nameserver)
        for message, outcome, result in zip(
            messages, outcomes, await producer.send(topic, messages, outcomes), strict=True
        ):
            assert result.msg_id is not None
            self._note(topic, message, result.msg_id, result.offset_msg_id or "", "half", fates[outcome])
        await self._stored(topic, shares["commit"])

        # 4.9.7 gives clients no route to the topic in which it records ended transactions.
        async def ended() -> int:
            ops = [one.body for one in oracle.contents(self._broker.store).records if one.topic == oracle.OP_TOPIC]
            return sum(len(body.rstrip(b",").split(b",")) for body in ops)

        await eventually(ended, lambda count: count >= shares["commit"] + shares["rollback"], every=_EVERY)
        await producer.stop()

    async def _retries(self) -> None:
        topic = await self._topic("retries", 2)
        again, dead = unique("again"), unique("dead")
        nameserver = self._broker.nameserver
        messages = [self._small(f"retry {n}") for n in range(12)]
        keys = [sent.unique_key for sent in await self._send(topic, messages, "plain", "delivered")]
        async with (
            await self._java.consumer(nameserver, again, topic, fail_first=1) as first,
            await self._java.consumer(nameserver, dead, topic, fail_first=99, max_reconsume_times=1),
        ):
            await first.until(lambda got: sum(one.reconsume_times == 1 for one in got) >= len(messages))
            await self._stored(f"%DLQ%{dead}", len(messages))
            # While the consumers run, since their last commit, a one-way request, may get lost at their end.
            for group in (again, dead):
                await self._committed(topic, group, 2, len(messages))
                await self._committed(f"%RETRY%{group}", group, 1, len(messages))
        self.retried += [Retried(key, topic, again, 1, is_dead=False) for key in keys]
        self.retried += [Retried(key, topic, dead, 1, is_dead=True) for key in keys]

    # --- changes that only duemq has

    async def _change_levels(self, topic: str) -> None:
        """Cancel one message of the last level, deliver one now, and give one a time that comes soon."""
        messages = [self._small(f"changed level {n}", level=6) for n in range(3)]
        cancelled, now, later = await self._send(topic, messages, "level", "delivered")
        self._correct(cancelled, replace(cancelled, outcome="cancelled"))
        async with Admin(self._broker.nameserver) as admin:
            changes = await admin.cancel(topic=topic, key=cancelled.unique_key)
            assert changes.counts == {ChangeResult.CANCELLED: 1}
            changes = await admin.deliver_now(topic=topic, key=now.unique_key)
            assert changes.counts == {ChangeResult.DELIVERED_NOW: 1}
            at = time.time() + 2
            changes = await admin.reschedule(topic=topic, key=later.unique_key, deliver_at=at)
            assert changes.counts == {ChangeResult.RESCHEDULED: 1}

    async def _change_timers(self, topic: str, now: int) -> None:
        """Give one timer of an hour an early time, and one a later time."""
        messages = [self._timer(now + HOUR_MS), self._timer(now + HOUR_MS)]
        soon, later = await self._send(topic, messages, "timer", "pending")
        at, far = (now + 5000) / 1000, (now + 3 * HOUR_MS) / 1000
        async with Admin(self._broker.nameserver) as admin:
            await admin.reschedule(topic=topic, key=soon.unique_key, deliver_at=at)
            await admin.reschedule(topic=topic, key=later.unique_key, deliver_at=far)
        self._correct(soon, replace(soon, outcome="delivered", deliver_ms=now + 5000))
        self._correct(later, replace(later, deliver_ms=now + 3 * HOUR_MS))

    async def _replace_timers(self, topic: str, now: int) -> None:
        """Send messages that replace others with their key: a waiting one, one that itself replaced another, and one
        that was given another time; the last of each is delivered, or still waits."""
        soon, far = now + 6000, now + HOUR_MS
        for key, times in (("once", (far, soon)), ("chain", (far, far + 7, far + 1007)), ("moved", (far, far + 2000))):
            for number, at in enumerate(times):
                is_last = number == len(times) - 1
                message = self._timer(at)
                message = replace(message, keys=key, properties={**message.properties, "TIMER_REPLACE": "true"})
                (sent,) = await self._send(topic, [message], "timer", "delivered" if at == soon else "pending")
                if key == "moved" and not is_last:
                    async with Admin(self._broker.nameserver) as admin:
                        await admin.reschedule(topic=topic, key=sent.unique_key, deliver_at=(far + HOUR_MS) / 1000)
                    sent = self._corrected(sent, deliver_ms=far + HOUR_MS)
                if not is_last:
                    self._corrected(sent, outcome="cancelled")

    # --- helpers

    async def _topic(self, prefix: str, queues: int) -> str:
        topic = unique(prefix)
        await self._admin.create_topic(self._broker.address, topic, queues)
        await eventually(lambda: self._admin.route(topic))
        return topic

    def _small(self, text: str, **fields: object) -> Outgoing:
        body = text.encode() + b" " + bytes(self._chance.randrange(33, 127) for _ in range(self._chance.randrange(400)))
        return Outgoing(body, keys=text.replace(" ", "-"), **fields)  # type: ignore[arg-type]

    def _timer(self, at: int) -> Outgoing:
        return replace(self._small(f"timer {at}", tags="timer"), properties={"TIMER_DELIVER_MS": str(at)})

    async def _send(self, topic: str, messages: Sequence[Outgoing], kind: Kind, outcome: Fate) -> list[Sent]:
        results = await self._producer.send(topic, messages, "async")
        sent = [
            self._note(topic, message, result.msg_id or "", result.offset_msg_id or "", kind, outcome)
            for message, result in zip(messages, results, strict=True)
        ]
        for result in results if outcome == "cancelled" else ():
            assert result.recall_handle is not None
            await self._producer.recall(topic, result.recall_handle)
        return sent

    async def _recalled(self, topic: str, count: int) -> None:
        """Send timers, and recall each before the next is sent: on a busy machine, several together would be due by the
        time of the last recall."""
        for _ in range(count):
            await self._send(topic, [self._timer(_now_ms() + self._recall_ms)], "timer", "cancelled")

    def _note(self, topic: str, message: Outgoing, key: str, offset_id: str, kind: Kind, outcome: Fate) -> Sent:
        found = dict(message.properties)
        deliver = found.pop("TIMER_DELIVER_MS", None)
        seconds, delay = found.pop("TIMER_DELAY_SEC", None), found.pop("TIMER_DELAY_MS", None)
        sent = Sent(
            unique_key=key,
            physical_offset=int(offset_id[-16:], 16) if offset_id else None,
            topic=topic,
            tags=message.tags,
            keys=message.keys,
            body=message.body,
            kind=kind,
            outcome=outcome,
            level=message.level or 0,
            deliver_ms=int(deliver) if deliver else None,
            delay_ms=int(delay) if delay else int(seconds) * 1000 if seconds else None,
            properties=tuple(found.items()),
        )
        self.sent.append(sent)
        return sent

    def _correct(self, before: Sent, after: Sent) -> None:
        self.sent[self.sent.index(before)] = after

    def _corrected(self, before: Sent, **changes: Any) -> Sent:
        after = replace(before, **changes)
        self._correct(before, after)
        return after

    async def _send_empty(self, topic: str) -> str:
        """Send a message without a body, which the clients refuse to send; return the broker's id."""
        reader, writer = await asyncio.open_connection(HOST, self._broker.port)
        writer.write(codec.encode(wire.send(topic, b"", properties="TAGS\x01empty"), JSON))
        frames, answers = FrameReader(), list[Command]()
        while not answers:
            answers = [codec.decode(frame) for frame in frames.receive_data(await reader.read(1 << 16))]
        writer.close()
        answer = answers[0]
        assert answer.code == 0, answer
        return answer.ext["msgId"]

    async def _stored(self, topic: str, count: int, every: float = _EVERY) -> None:
        """Wait until a topic has this many messages."""

        async def total() -> int:
            return sum(queue.max for queue in (await self._admin.topic_stats(topic)).values())

        await eventually(total, lambda found: found >= count, timeout=60, every=every)

    async def _consume_next(self, topic: str) -> None:
        """Run a group that stops midway. Its client commits for the last time in a one-way request."""
        group = unique("midway")
        await self._java.lite_pull(self._broker.nameserver, group, topic, 20)
        await self._committed(topic, group, 2, 1)

    async def _committed(self, topic: str, group: str, queues: int, at_least: int) -> None:
        """Wait until the broker has a group's offsets in its file, and record them."""
        name = f"{topic}@{group}"

        async def offsets() -> tuple[dict[int, int], dict[int, int]]:
            known = {
                queue: await self._java.consumer_offset(self._broker.nameserver, group, topic, queue)
                for queue in range(queues)
            }
            known = {queue: offset for queue, offset in known.items() if offset >= 0}
            try:
                stored = oracle.consumer_offsets(self._broker.store)
            except json.JSONDecodeError:  # Apache's broker is writing the file
                stored = {}
            return known, stored.get(name, {})

        def is_written(found: tuple[dict[int, int], dict[int, int]]) -> bool:
            # For a queue that was never consumed the broker may answer 0 while its file has no entry.
            told, stored = found
            return all(stored.get(queue, 0) == at for queue, at in told.items()) and sum(told.values()) >= at_least

        _, self.progress[name] = await eventually(offsets, is_written, timeout=30, every=_EVERY)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
