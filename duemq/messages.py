"""The values that callers see: messages to send, what became of them, messages received."""

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

RETRY_PREFIX: Final = "%RETRY%"
"""A group's retry topic is this and the group's name."""
SHARDING_KEY: Final = "__SHARDINGKEY"


class MessageQueue(NamedTuple):
    """One queue of a topic at one broker. They sort as RocketMQ sorts them: by topic, broker, queue id."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker}:{self.queue_id}"


class SendStatus(StrEnum):
    """How safe a message is that the broker took. In every case it is stored and will be delivered."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    """Not known to be on disk yet: it would be lost if the broker's machine failed now."""
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    """Not known to be at a replica yet."""
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    """There is no replica that keeps up."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """What became of a message that was sent."""

    status: SendStatus
    message_id: str
    """The client's id, which consumers see too; 32 hex digits."""
    offset_message_id: str
    """The broker's id: where the message lies at which broker."""
    queue: MessageQueue
    queue_offset: int
    """Position in the queue. For a delayed message: in the broker's schedule, where it waits."""
    due_time_ms: int | None = None
    """When a delayed message is due, ms since the epoch; None for one that is delivered at once."""
    handle: MessageHandle | None = None
    """Of a delayed message: with it one changes one's mind, see `Producer.cancel`. None for one that is delivered at
    once."""

    @property
    def recall_handle(self) -> str | None:
        """RocketMQ's own handle, for `Producer.recall`: of a message with a timer, at a broker with recall."""
        return None if self.handle is None else self.handle.recall_handle


@dataclass(frozen=True, slots=True)
class Message:
    """A message to send, with all that `Producer.send` may be told about one. Checked when it is sent."""

    topic: str
    body: bytes | str
    """Not empty; text is sent as UTF-8."""
    tags: str | None = field(default=None, kw_only=True)
    """One tag, by which consumers may filter."""
    keys: str | Iterable[str] = field(default=(), kw_only=True)
    """Keys, under which the broker indexes the message."""
    properties: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """The sender's own properties, for consumers to read."""
    level: int | None = field(default=None, kw_only=True)
    """Deliver it after the delay of this level, the first being 1."""
    delay: Span | None = field(default=None, kw_only=True)
    """Deliver it so long after the send: seconds, a timedelta, or text such as "1h30m"."""
    deliver_at: Time | None = field(default=None, kw_only=True)
    """Deliver it at this time: a datetime with a time zone, or seconds since the epoch."""
    replace: bool = field(default=False, kw_only=True)
    """Whether it takes the place of the message that waits with this option for its topic and key."""
    sharding_key: str | None = field(default=None, kw_only=True)
    """Messages with the same one lie in the same queue."""
    queue: MessageQueue | None = field(default=None, kw_only=True)
    """The queue for it, instead of all in turn."""
    message_id: str | None = field(default=None, kw_only=True)
    """The client's id for it, from `Producer.new_message_id`. None: a new one."""


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """What became of one message of several. Exactly one of `result` and `error` is set."""

    message: Message
    result: SendResult | None = None
    """Of a message that is stored."""
    error: DueMQError | None = None
    """Why it is not, or, with `error.maybe_stored`, why that is not known."""


class SendManyError(DueMQError):
    """Some messages of `Producer.send_many` were not stored, or it is not known whether they were.

    Attributes: `outcomes`, a SendResult or an error for each message that was taken from those given, in their order;
    `stored`, the results; `refused`, the outcomes of messages that are certainly not stored; `unknown`, the outcomes of
    those that may be; `retriable`, whether each failure is. The first failure is the `__cause__`.
    """

    def __init__(self, outcomes: Sequence[SendResult | DueMQError], failed: Sequence[SendOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        self.stored: tuple[SendResult, ...] = tuple(each for each in self.outcomes if not isinstance(each, DueMQError))
        errors = [each.error for each in failed if each.error is not None]
        self.unknown = tuple(each for each in failed if each.error is not None and each.error.maybe_stored)
        self.refused = tuple(each for each in failed if each.error is not None and not each.error.maybe_stored)
        self.retriable = all(error.retriable for error in errors)  # type: ignore[misc]
        super().__init__(
            f"of {len(self.outcomes)} messages {len(self.stored)} are stored, {len(self.refused)} are not, and of "
            f"{len(self.unknown)} it is not known; the first failure: {errors[0]}"
        )

    def __reduce__(self) -> tuple[type[SendManyError], tuple[object, ...]]:
        return type(self), (self.outcomes, self.refused + self.unknown)


class Settler(Protocol):
    """Who is told what became of a received message."""

    dropped: bool
    """Whether that does not matter any more."""

    def ack(self, message: ReceivedMessage) -> None:
        """It is consumed."""

    async def retry(self, message: ReceivedMessage, level: int, delay_ms: int | None) -> None:
        """It is to be delivered again, after the delay of a level, or after `delay_ms` if that is given."""

    async def dead_letter(self, message: ReceivedMessage) -> None:
        """It is given up."""


class ReceivedMessage:
    """A message as a consumer gets it."""

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
        """All properties, those of RocketMQ among them."""
        retried = self.properties.get(properties.RETRY_TOPIC) if stored.topic.startswith(RETRY_PREFIX) else None
        self.topic: str = retried or stored.topic
        """The topic it was sent to, also when it comes back through the group's retry topic."""
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
        """The body, unpacked where the producer compressed it. Raises BodyError where that is not possible."""
        if self._body is None:
            self._body = unpack(self._stored.body, self._stored.sys_flag)
        return self._body

    @property
    def stored_size(self) -> int:
        """Size of the record at the broker, in bytes."""
        return self._stored.size

    @property
    def tags(self) -> str | None:
        """The tag: RocketMQ says tags, but takes the text for one."""
        return self.properties.get(properties.TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys under which the broker indexes it."""
        return tuple(self.properties.get(properties.KEYS, "").split())

    @property
    def message_id(self) -> str:
        """The sender's id for it; it stays the same through retries. The broker's id where the sender made none."""
        return self.properties.get(properties.UNIQ_KEY) or self.offset_message_id

    @property
    def offset_message_id(self) -> str:
        """The broker's id of this record of it."""
        return self._stored.offset_message_id

    @property
    def queue_offset(self) -> int:
        """Its position in the queue."""
        return self._stored.queue_offset

    @property
    def physical_offset(self) -> int:
        """Its position in the broker's commitlog, in bytes."""
        return self._stored.physical_offset

    @property
    def born_time_ms(self) -> int:
        """When the sender made it, ms since the epoch, by the sender's clock."""
        return self._stored.born_timestamp

    @property
    def born_host(self) -> str:
        """Where it was sent from, "address:port"."""
        return "{}:{}".format(*message_id.unpack_host(self._stored.born_host))

    @property
    def store_time_ms(self) -> int:
        """When the broker stored this record, ms since the epoch; for a delayed message that is its delivery."""
        return self._stored.store_timestamp

    @property
    def reconsume_times(self) -> int:
        """How often it has been delivered to this group before; with an ordered consumer, with the times that this
        member tried it in its place."""
        return self._stored.reconsume_times + self._tries

    @property
    def delay_level(self) -> int | None:
        """The level it was delayed by, the first being 1. On a retry: that of the retry."""
        return self._number(properties.DELAY) or None

    @property
    def due_time_ms(self) -> int | None:
        """When it was due, ms since the epoch. None for a message that was not delayed, or does not say.

        For a time of delivery it is what the sender asked for. For a delay it is by the clock of a duemq broker, exact
        with a timer (TIMER_DELIVER_MS), and with a level where duemq's producer sent it (DUE_MS). With RocketMQ's
        brokers, a timer's is rounded down to their precision (TIMER_OUT_MS), and a level's is by the sender's clock. A
        level that another client set leaves no trace of when the message was due. A retry keeps the first due time.
        """
        for name in (properties.TIMER_DELIVER_MS, properties.DUE_MS, properties.TIMER_OUT_MS):
            number = self._number(name)
            if number is not None:
                return number
        return None

    @property
    def lateness_ms(self) -> int | None:
        """How long after its due time it was received, in ms, or None where the due time is not known.

        Compares this machine's clock with the broker's, or the sender's: a negative number means that they differ.
        """
        due = self.due_time_ms
        return None if due is None else self.receive_time_ms - due

    @property
    def lost(self) -> bool:
        """Whether its queue went to another member of the group meanwhile, which gets the message again; or the group
        was sent to other offsets."""
        return self._settler.dropped

    async def ack(self) -> None:
        """Say that it is consumed: it is not delivered to the group again. Later calls of ack, retry or dead_letter do
        nothing.

        For a consumer without a handler; a handler need only return.
        """
        self._settler.ack(self)

    async def retry(self, level: int = 0, *, delay: Span | None = None) -> None:
        """Have it delivered to the group again; later calls of ack, retry or dead_letter do nothing.

        `delay`: after so long, never earlier: seconds, a timedelta, or text such as "5m". The broker delays a retry by
            one of its levels (1s 5s 10s 30s 1m 2m ... 10m 20m 30m 1h 2h by default): the shortest that is not shorter
            than `delay`. Raises DelayError, and nothing is settled, where all are shorter, or the broker does not tell
            its levels.
        `level`: after the delay of this level, the first being 1. Level 0, the default, lets the broker choose a longer
            one each time (10 s, 30 s, 1 min ...); level -1 is `dead_letter`.

        After `max_reconsume_times` retries it goes to the dead letters anyway. An ordered consumer tries the message
        again in its place, after exactly `delay`, by default 1 s; nothing else of its queue is handled before, and
        levels from 1 on are an ArgumentError. A broadcasting consumer that is not ordered has no retries: the message
        is dropped, with a line in the log.

        Where the broker cannot be reached, this client handles the message again itself, after `delay`, and after 5 s
        at least. Raises ArgumentError for a `delay` that is none, and for both of `level` and `delay`.
        """
        delay_ms = None if delay is None else span_ms(delay)
        if delay_ms is not None and level:
            raise ArgumentError("level and delay contradict each other; give one of them")
        if level < 0:
            await self._settler.dead_letter(self)
        else:
            await self._settler.retry(self, level, delay_ms)

    async def dead_letter(self) -> None:
        """Give it up: it goes to the dead letters at once, the topic %DLQ% and the group's name, and is not delivered
        to the group again. Later calls of ack, retry or dead_letter do nothing.

        A broadcasting consumer has no dead letters: the message is dropped, with a line in the log. Where the broker
        cannot be reached, this client handles the message again itself.
        """
        await self._settler.dead_letter(self)

    def _number(self, name: str) -> int | None:
        text = self.properties.get(name, "")
        # Python makes no number of thousands of digits, and no number of ours has more than 19.
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else None


def acknowledge(message: ReceivedMessage) -> None:
    """Do what `ack` does, which waits for nothing."""
    message._settler.ack(message)


def next_try(message: ReceivedMessage, *, counts: bool) -> ReceivedMessage:
    """Return the same message, not settled, for one more try by this client. `counts`: as one of its retries."""
    return ReceivedMessage(
        message._stored, message.queue, message.receive_time_ms, message._settler, message._tries + counts
    )
