"""Messages from MQTT on their way to RocketMQ, and which of them supersede which.

A message with a key is superseded by a later recall with this key, and by a later replacement if it was sent with
`replace` itself, provided that the later one was received before the message was due. While RocketMQ is away both wait
in the bridge. The message is not sent then: it may be overdue when RocketMQ comes back, and would be delivered before
the later one could cancel or replace it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from duemq.mqtt_bridge.rules.model import Delay, Target
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.journal import Taken
from duemq.mqtt_bridge.session.packets import Ack, Publish


@dataclass(slots=True, eq=False)
class Arrival:
    """The packets of one read of the socket."""

    items: Sequence[Publish | Ack]
    at: float
    """Time of the read, by the monotonic clock, in seconds; of a message that was sent again, of the first read."""
    session: Session | None
    """The connection over which they came; None if nobody waits for acknowledgements."""
    is_lost: bool = False
    """Whether the MQTT broker has lost the session over which they came, or never sends them again for another reason.
    It takes an acknowledgement for that of another message."""
    later: list[tuple[Publish, Delay]] | None = None
    """The recalls and replacements among `items`; None before somebody has asked for them."""


@dataclass(slots=True, eq=False)
class Work:
    """A message on its way to RocketMQ."""

    publish: Publish
    arrival: Arrival
    target: Target | None = None
    delay: Delay | None = None
    taken: Taken | None = None
    """Its row in the journal; None without QoS 2."""
    is_new: bool = True
    """Whether it was never sent before. Otherwise RocketMQ may have it."""
    is_repeated: bool = False
    """Whether an earlier message of its batch is the same, received over a lost connection."""
    is_done: bool = False
    """Whether RocketMQ has it, or nobody has to send it (any more)."""
    is_superseded: bool = False
    """Whether it is in `supersedes` of another one."""
    supersedes: tuple[Work, ...] = ()
    """Messages that are not sent if this one is not refused."""
    number: int = 0
    """Its place among the messages of its batch, if it has a key."""
    reason: int = packets.SUCCESS
    """Reason code of the acknowledgement."""

    @property
    def at(self) -> float:
        """Time of the receipt, by the monotonic clock, in seconds."""
        return self.arrival.at

    @property
    def is_lost(self) -> bool:
        """`is_lost` of the arrival."""
        return self.arrival.is_lost

    @property
    def is_recall(self) -> bool:
        """Whether it cancels other messages, and nothing is sent."""
        return self.delay is not None and self.delay.recall


class Batch:
    """Messages that are sent, and acknowledged in the end. More may be added meanwhile."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.works: list[Work] = []
        """In the order of their receipt."""
        self.to_send: list[Work] = []
        """Those of `works` that RocketMQ gets, unless they turn out to be superseded or refused."""
        self._recalls: dict[str, list[Work]] = {}
        self._later: dict[str, list[Work]] = {}
        """By key: recalls; recalls and replacements. Without repeated messages."""
        self._repeated: dict[str, list[Work]] = {}
        """By key: recalls and replacements that are repeated messages."""
        self._packet_ids: set[int] = set()
        """Packet ids of messages with a key and QoS 1 or 2."""

    def add(self, arrivals: Sequence[Arrival]) -> list[Work]:
        """Add the messages of arrivals; return them."""
        begin = len(self.works)
        self.arrivals += arrivals
        self.works += [
            Work(each, arrival) for arrival in arrivals for each in arrival.items if isinstance(each, Publish)
        ]
        return self.works[begin:]

    def will_send(self, works: Sequence[Work]) -> None:
        """Add those of `works` that are to be sent, behind all others."""
        begin = len(self.to_send)
        self.to_send += works
        for number, work in enumerate(works, begin):
            if work.delay is None or work.delay.key is None:
                continue
            work.number = number
            work.is_repeated = self.repeats(work.publish)
            if work.publish.qos:
                self._packet_ids.add(work.publish.packet_id)
            key = work.delay.key
            if work.is_repeated:
                if work.delay.recall or work.delay.replace:
                    self._repeated.setdefault(key, []).append(work)
                continue
            if work.delay.recall:
                self._recalls.setdefault(key, []).append(work)
            if work.delay.recall or work.delay.replace:
                self._later.setdefault(key, []).append(work)

    def repeats(self, publish: Publish) -> bool:
        """Return whether a message is in the batch already: it was received over a lost connection, and again."""
        return publish.dup and publish.qos > 0 and publish.packet_id in self._packet_ids

    def superseder(self, work: Work, due: float) -> Work | None:
        """Return the message that supersedes another one of the batch, or None. `due`: when that one is due, by the
        monotonic clock, in seconds."""
        assert work.delay is not None
        assert work.delay.key is not None
        key = work.delay.key
        if work.is_repeated:
            # Its own order counts; that of the earlier receipts is over.
            return _first(self._repeated.get(key, ()), work, due) or self._of_new(key, work, due)
        return self._of_new(key, work, due)

    def _of_new(self, key: str, work: Work, due: float) -> Work | None:
        assert work.delay is not None
        return _first((self._later if work.delay.replace else self._recalls).get(key, ()), work, due)


def _first(candidates: Sequence[Work], work: Work, due: float) -> Work | None:
    """Return the first candidate behind `work` that supersedes it. `candidates` are in their order, with its key."""
    for each in islice(candidates, bisect_right(candidates, work.number, key=_number), None):
        if each.at >= due:
            return None
        if each.at >= work.at and each.reason == packets.SUCCESS and can_supersede(each.delay, work.delay):
            return each
    return None


def _number(work: Work) -> int:
    return work.number


def can_supersede(later: Delay | None, earlier: Delay | None) -> bool:
    """Return whether a message cancels or replaces an earlier one that is not due."""
    return (
        later is not None
        and earlier is not None
        and later.key is not None
        and later.key == earlier.key
        and not earlier.recall
        and (later.recall or (later.replace and earlier.replace))
    )
