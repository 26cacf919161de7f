"""Messages to send, the outcomes of sends, and received messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from duemq._net.compression import unpack
from duemq._values.times import Span, Time, span_ms
from duemq.errors import ArgumentError, DueMQError
from duemq.handles import MessageHandle
from duemq.protocol.records import message_id, properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.topics import RETRY_PREFIX

SHARDING_KEY: Final = "__SHARDINGKEY"


class MessageQueue(NamedTuple):
    """One queue of a topic at one broker. Queues sort as in RocketMQ: by topic, broker, queue id."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker}:{self.queue_id}"


class SendStatus(StrEnum):
    """How safe an accepted message is. In every case it is stored and will be delivered."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    """The message may not be on disk yet: it would be lost if the broker's machine failed now."""
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    """The message may not have reached a replica yet."""
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    """No replica keeps up with the broker."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """The result of a send whose message is stored."""

    status: SendStatus
    message_id: str
    """The client's id of the message, 32 hex digits. Consumers see the same id."""
    offset_message_id: str
    """The broker's id of the record: the broker's address and the physical offset."""
    queue: MessageQueue
    queue_offset: int
    """Position in the queue. For a delayed message: its position in the broker's schedule, where it waits."""
    due_time_ms: int | None = None
    """When a delayed message is due, ms since the epoch; None for a message without a delay."""
    handle: MessageHandle | None = None
    """The handle of a delayed message, with which it can be cancelled or rescheduled, see `Producer.cancel`. None for a
    message without a delay."""

    @property
    def recall_handle(self) -> str | None:
        """RocketMQ's own handle for `Producer.recall`, if the message has a timer and its broker supports recalls."""
        return None if self.handle is None else self.handle.recall_handle


@dataclass(frozen=True, slots=True)
class Message:
    """A message to send; its fields are the arguments of `Producer.send`. They are checked when it is sent."""

    topic: str
    body: bytes | str
    """Must not be empty; text is sent as UTF-8."""
    tags: str | None = field(default=None, kw_only=True)
    """One tag, by which consumers may filter."""
    keys: str | Iterable[str] = field(default=(), kw_only=True)
    """The keys under which the broker indexes the message."""
    properties: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """The application's own properties, for consumers to read."""
    level: int | None = field(default=None, kw_only=True)
    """The delay level after which it is delivered; the first is 1."""
    delay: Span | None = field(default=None, kw_only=True)
    """The time from the send to the delivery: seconds, a timedelta, or text such as "1h30m"."""
    deliver_at: Time | None = field(default=None, kw_only=True)
    """The time of the delivery: a datetime with a time zone, or seconds since the epoch."""
    replace: bool = field(default=False, kw_only=True)
    """Whether it replaces the waiting message that was sent with this option to the same topic with the same key."""
    sharding_key: str | None = field(default=None, kw_only=True)
    """Messages with the same sharding key go to the same queue."""
    queue: MessageQueue | None = field(default=None, kw_only=True)
    """The queue to send it to. None: the queues take turns."""
    message_id: str | None = field(default=None, kw_only=True)
    """The client's id of the message, from `Producer.new_message_id`. None: a new id."""


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """The outcome of one of several messages. Exactly one of `result` and `error` is set."""

    message: Message
    result: SendResult | None = None
    """The result, if the message is stored."""
    error: DueMQError | None = None
    """Why the message is not stored or, if `error.maybe_stored` is set, why that is unknown."""


class SendManyError(DueMQError):
    """Some messages of `Producer.send_many` were not stored, or it is unknown whether they were.

    Attributes: `outcomes`: a SendResult or an error for each message that was taken from the source, in its order;
    `stored`: the results; `refused`: the outcomes of messages that are certainly not stored; `unknown`: the outcomes of
    messages that may be stored; `retriable`: whether all failures are. The first failure is the `__cause__`.
    """

    def __init__(self, outcomes: Sequence[SendResult | DueMQError], failed: Sequence[SendOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        self.stored: tuple[SendResult, ...] = tuple(each for each in self.outcomes if not isinstance(each, DueMQError))
        errors = [each.error for each in failed if each.error is not None]
        self.unknown = tuple(each for each in failed if each.error is not None and each.error.maybe_stored)
        self.refused = tuple(each for each in failed if each.error is not None and not each.error.maybe_stored)
        self.retriable = all(error.retriable for error in errors)  # type: ignore[misc]
        super().__init__(
            f"of {len(self.outcomes)} messages {len(self.stored)} are stored, {len(self.refused)} are not, and "
            f"{len(self.unknown)} may be; the first failure: {errors[0]}"
        )

    def __reduce__(self) -> tuple[type[SendManyError], tuple[object, ...]]:
        return type(self), (self.outcomes, self.refused + self.unknown)


class Settler(Protocol):
    """Settles received messages at the broker."""

    dropped: bool
    """Whether settling has no effect any longer, since the queue moved or the group's offset was changed."""

    def ack(self, message: ReceivedMessage) -> None:
        """Record that a message is consumed."""

    async def retry(self, message: ReceivedMessage, level: int, delay_ms: int | None) -> None:
        """Have a message delivered again, after the delay of a level, or after `delay_ms` if that is not None."""

    async def dead_letter(self, message: ReceivedMessage) -> None:
        """Have a message moved to the dead-letter topic."""


class ReceivedMessage:
    """A message that a consumer received."""

    __slots__ = (
        "_body",
        "_settler",
        "_stored",
        "_tries",
        "properties",
        "queue",
        "receive_time_ms",
        "settled",
        "topic",
    )

    def __init__(
        self, stored: StoredMessage, queue: MessageQueue, receive_time_ms: int, settler: Settler, tries: int = 0
    ) -> None:
        self._stored = stored
        self._settler = settler
        self._tries = tries
        self._body: bytes | None = None
        self.properties: dict[str, str] = stored.properties
        """All properties, RocketMQ's own included."""
        retried = self.properties.get(properties.RETRY_TOPIC) if stored.topic.startswith(RETRY_PREFIX) else None
        self.topic: str = retried or stored.topic
        """The topic it was sent to, even if it was read from the group's retry topic."""
        self.queue: MessageQueue = queue
        """The queue it was read from."""
        self.receive_time_ms: int = receive_time_ms
        """When this client received it, ms since the epoch."""
        self.settled: bool = False
        """Whether ack, retry or dead_letter was called."""

    def __repr__(self) -> str:
        return f"<ReceivedMessage {self.message_id} {self.queue} offset {self.queue_offset}>"

    @property
    def body(self) -> bytes:
        """The body, decompressed if the producer compressed it. Raises BodyError if that is not possible."""
        if self._body is None:
            self._body = unpack(self._stored.body, self._stored.sys_flag)
        return self._body

    @property
    def stored_size(self) -> int:
        """Size of the record at the broker, in bytes."""
        return self._stored.size

    @property
    def tags(self) -> str | None:
        """The tag. RocketMQ calls it tags, but treats the text as a single tag."""
        return self.properties.get(properties.TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys under which the broker indexes the message."""
        return tuple(self.properties.get(properties.KEYS, "").split())

    @property
    def message_id(self) -> str:
        """The sender's id of the message, the same for all its retries; the broker's id if the sender made none."""
        return self.properties.get(properties.UNIQ_KEY) or self.offset_message_id

    @property
    def offset_message_id(self) -> str:
        """The broker's id of this record of the message."""
        return self._stored.offset_message_id

    @property
    def queue_offset(self) -> int:
        """Its offset in the queue."""
        return self._stored.queue_offset

    @property
    def physical_offset(self) -> int:
        """Its offset in the broker's commitlog, in bytes."""
        return self._stored.physical_offset

    @property
    def born_time_ms(self) -> int:
        """When the sender created it, ms since the epoch, by the sender's clock."""
        return self._stored.born_timestamp

    @property
    def born_host(self) -> str:
        """The sender's "address:port"."""
        return "{}:{}".format(*message_id.unpack_host(self._stored.born_host))

    @property
    def store_time_ms(self) -> int:
        """When the broker stored this record, ms since the epoch; for a delayed message the time of its delivery."""
        return self._stored.store_timestamp

    @property
    def reconsume_times(self) -> int:
        """How many times it was delivered to this group before, including an ordered consumer's retries in place."""
        return self._stored.reconsume_times + self._tries

    @property
    def delay_level(self) -> int | None:
        """The delay level with which it was sent, the first being 1; on a retry, the level of the retry."""
        return self._number(properties.DELAY) or None

    @property
    def due_time_ms(self) -> int | None:
        """When it was due, ms since the epoch. None for a message without a delay or without a record of its deliver
        time.

        If the sender asked for a time of delivery, this is that time. If it asked for a delay, the time is by the clock
        of a duemq broker: exact with a timer (TIMER_DELIVER_MS), and with a level if duemq's producer sent it (DUE_MS).
        With RocketMQ's brokers, a timer's time is rounded down to their precision (TIMER_OUT_MS), and a level's is by
        the sender's clock. A level that another client set leaves no record. A retry keeps the first deliver time.
        """
        for name in (properties.TIMER_DELIVER_MS, properties.DUE_MS, properties.TIMER_OUT_MS):
            number = self._number(name)
            if number is not None:
                return number
        return None

    @property
    def lateness_ms(self) -> int | None:
        """How long after its deliver time it was received, in ms, or None if the deliver time is unknown.

        Compares this machine's clock with the broker's or the sender's: a negative number means that the clocks differ.
        """
        due = self.due_time_ms
        return None if due is None else self.receive_time_ms - due

    @property
    def lost(self) -> bool:
        """Whether this consumer may no longer settle it: its queue moved to another member, which gets the message
        again, or the group's offset was changed."""
        return self._settler.dropped

    async def ack(self) -> None:
        """Mark it as consumed, so that it is not delivered to the group again. Later calls of ack, retry or dead_letter
        have no effect.

        For consumers without a handler; a handler just returns.
        """
        self._settler.ack(self)

    async def retry(self, level: int = 0, *, delay: Span | None = None) -> None:
        """Have it delivered to the group again. Later calls of ack, retry or dead_letter have no effect.

        `delay`: the least time until then: seconds, a timedelta, or text such as "5m". The broker delays a retry by one
            of its levels (1s 5s 10s 30s 1m 2m ... 10m 20m 30m 1h 2h by default): the shortest that is not shorter than
            `delay`. Raises DelayError, and settles nothing, if all levels are shorter or the broker does not report
            them.
        `level`: the delay level, the first being 1. With level 0, the default, the broker chooses a longer delay each
            time (10 s, 30 s, 1 min ...); level -1 is `dead_letter`.

        After `max_reconsume_times` retries the message becomes a dead letter instead. An ordered consumer retries the
        message in place, after exactly `delay`, by default 1 s, and handles nothing else of the queue before; a level
        of 1 or more raises ArgumentError. A broadcasting consumer that is not ordered has no retries: it drops the
        message and logs a line.

        If the broker cannot be reached, this client handles the message again itself, after `delay` and at least 5 s.
        Raises ArgumentError for an invalid `delay`, and if both `level` and `delay` are given.
        """
        delay_ms = None if delay is None else span_ms(delay)
        if delay_ms is not None and level:
            raise ArgumentError("level and delay contradict each other; give one of them")
        if level < 0:
            await self._settler.dead_letter(self)
        else:
            await self._settler.retry(self, level, delay_ms)

    async def dead_letter(self) -> None:
        """Give up: move it to the dead-letter topic, whose name is %DLQ% followed by the group's, without further
        retries. Later calls of ack, retry or dead_letter have no effect.

        A broadcasting consumer has no dead letters: it drops the message and logs a line. If the broker cannot be
        reached, this client handles the message again itself.
        """
        await self._settler.dead_letter(self)

    def _number(self, name: str) -> int | None:
        text = self.properties.get(name, "")
        # int() refuses thousands of digits, and no valid number has more than 19.
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else None


def acknowledge(message: ReceivedMessage) -> None:
    """Do the same as `ack`, which never waits, without a coroutine."""
    message._settler.ack(message)


def next_try(message: ReceivedMessage, *, counts: bool) -> ReceivedMessage:
    """Return the same message, unsettled, for another attempt by this client. `counts`: whether the attempt is one of
    its retries."""
    return ReceivedMessage(
        message._stored, message.queue, message.receive_time_ms, message._settler, message._tries + counts
    )
