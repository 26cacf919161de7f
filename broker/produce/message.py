"""Incoming messages, with their properties parsed once.

`read_request` reads the sender's requests from the property text. From them and from the topic, the handlers decide
where the message goes, and make a `NewMessage`. Its `due` says whether it is delivered immediately, by a delay level,
or at a time. `Staging` then stages it without looking at the properties again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.protocol.codes import ResponseCode
from duemq.protocol.errors import TimerIllegal
from duemq.protocol.frames.command import Body
from duemq.protocol.records import properties, recurrence, timer_properties
from duemq.protocol.records.recurrence import RecurrenceRule
from duemq.protocol.requests.headers import Request, SendMessage
from duemq.storage.queues.consume_queue import ConsumeQueue

_OF_BROKER: Final = (properties.CLUSTER, properties.MSG_REGION, properties.TRACE_ON)
_DELAY: Final = f"{properties.DELAY}{properties.NAME_END}"


class DelayRequest(NamedTuple):
    """What the sender of a message requests by its properties."""

    level: int = 0
    """The delay level as sent: it may be beyond the table. 0 or less: none."""
    asks_time: bool = False
    """Whether TIMER_DELAY_SEC, TIMER_DELAY_MS or TIMER_DELIVER_MS is present, even with an invalid value, or the
    message is to recur."""
    replace_key: str | None = None
    """The key whose waiting message this one replaces (TIMER_REPLACE)."""
    recurrence: RecurrenceRule | None = None
    """When the message recurs; it then has a `replace_key`, its name."""
    is_half: bool = False
    """Whether the message is the half message of a transaction (TRAN_MSG)."""

    @property
    def is_delayed(self) -> bool:
        """Whether the message asks for a level or a time."""
        return self.level > 0 or self.asks_time


_NO_REQUEST: Final = DelayRequest()


class ByLevel(NamedTuple):
    """The message waits in the queue of a delay level."""

    level: int
    """A level of the broker's table."""
    tells_due: bool = False
    """Whether the property DUE_MS is to be set to the deliver time."""


class ByTimer(NamedTuple):
    """The message waits for a time in the timer wheel."""

    deliver_ms: int
    """When the message is due, ms since the epoch."""
    deletes: bool = False
    """Whether the record is not a message but deletes a waiting one (TIMER_DEL_UNIQKEY)."""
    origin: int = 0
    """Physical offset of the record that this one replaces; 0 for none."""
    key: int = 0
    """Hash of the topic's key by which the message can be replaced, see `Timers.staged`."""
    recurs: bool = False
    """Whether the message is delivered again and again."""


Due = ByLevel | ByTimer | None
"""How a message waits; None if it is delivered immediately."""


class NewMessage(NamedTuple):
    """A message that is about to be staged."""

    queue: ConsumeQueue
    """The queue that the message is delivered to, immediately or when it is due."""
    due: Due
    text: str
    """The properties that consumers get, without those that say where the message waits."""
    body: Body
    born_timestamp: int
    """When the sender created the message, ms since the epoch."""
    born_host: bytes
    """The sender's address and port, in the form of records."""
    flag: int
    sys_flag: int
    reconsume_times: int
    """How many times a consumer group has tried to process the message."""


def sent_message(
    connection: Connection, request: Request[SendMessage], queue: ConsumeQueue, due: Due, text: str
) -> NewMessage:
    """Return the message of a send. `text`: its properties as records have them, see `as_stored`."""
    header = request.header
    return NewMessage(
        queue,
        due,
        text,
        request.body,
        header.born_timestamp,
        connection.born_host,
        header.flag,
        header.sys_flag,
        header.reconsume_times or 0,
    )


def read_request(text: str) -> DelayRequest:
    """Return the requests in a property text. Raises Refused for a level that is not a number, for TIMER_REPLACE with
    an invalid value or key, and for a recurrence with an invalid value or without a name. `text` comes from
    `without_recurrence`."""
    level = _level_of(text) if _DELAY in text else 0
    has_timers = "TIMER_" in text
    if not has_timers and "TRAN_MSG" not in text:
        return DelayRequest(level) if level else _NO_REQUEST
    asks_time = has_timers and any(
        properties.get(text, name) is not None or properties.is_empty(text, name) for name in properties.TIMERS
    )
    transaction = properties.get(text, properties.TRAN_MSG)
    found = None
    if has_timers and recurrence.recurs(text):
        found = _recurrence_of(text, is_delayed=asks_time or level > 0)
    return DelayRequest(
        level,
        asks_time or found is not None,
        recurrence.name_of(text) if found is not None else _replace_key_of(text) if has_timers else None,
        found,
        (transaction or "").lower() == "true",
    )


def without_recurrence(text: str) -> str:
    """Return the properties of a send, without a recurrence that the sender does not ask for. A delivered message that
    recurs has TIMER_OUT_MS, which the broker added while it waited. A client that sends such a message on does not ask
    for a new recurrence."""
    if recurrence.recurs(text) and properties.get(text, properties.TIMER_OUT_MS) is not None:
        return properties.without_all(text, (*properties.RECURRENCE, properties.TIMER_REPLACE))
    return text


def _recurrence_of(text: str, *, is_delayed: bool) -> RecurrenceRule:
    try:
        if is_delayed:
            raise TimerIllegal(
                "a recurring message can have neither a delay nor a deliver time: TIMER_START says when it begins"
            )
        if properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None:
            raise TimerIllegal(f"a recurring message cannot have {properties.TIMER_DEL_UNIQKEY}")
        recurrence.name_of(text)
        return recurrence.read(text)
    except TimerIllegal as error:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal, {error}") from None


def of_broker(cluster: str, region: str, *, is_traced: bool) -> str:
    """Return the text of the properties that the broker adds to each message, as RocketMQ 5.3 does. A 5.x consumer
    sends no trace of a message without MSG_REGION."""
    return properties.format_properties(
        {
            properties.CLUSTER: cluster,
            properties.MSG_REGION: region,
            properties.TRACE_ON: "true" if is_traced else "false",
        }
    )


def as_stored(text: str, added: str) -> str:
    """Return the properties of a send in the form of records: with those of `of_broker` last. WAIT stays, as in
    RocketMQ 5."""
    if "CLUSTER\x01" in text:  # another broker has added them before
        text = properties.without_all(text, _OF_BROKER)
    if text and text[-1] != properties.PROPERTY_END:
        return f"{text}\x02{added}"
    return f"{text}{added}"


def _level_of(text: str) -> int:
    """Return the delay level, 0 if there is none. Raises Refused if it is empty or not a number: RocketMQ ignores
    properties without a value, and would deliver the message immediately."""
    level = properties.get(text, properties.DELAY)
    if level is None:
        if properties.is_empty(text, properties.DELAY):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the property {properties.DELAY} has no value")
        return 0
    try:
        return int(level)
    except ValueError:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the property DELAY={level} is not a delay level") from None


def _replace_key_of(text: str) -> str | None:
    """Return the key by which a message replaces one that waits (TIMER_REPLACE); None if it replaces none. Raises
    Refused."""
    if properties.TIMER_REPLACE not in text:
        return None
    try:
        key = timer_properties.replace_key(text)
    except TimerIllegal as error:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal, {error}") from None
    if key is not None and properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None:
        raise Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"timer message illegal, {properties.TIMER_REPLACE} and {properties.TIMER_DEL_UNIQKEY} contradict each "
            "other",
        )
    return key
