"""A message on its way in, understood once.

`read_request` reads from the property text what the sender asks for. The handlers decide by it, and by the topic, where
the message goes: a `NewMessage`, whose `due` says whether it is delivered at once, by a delay level, or at a time.
`Staging` then stages it, and looks at the properties no more.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from duemq.broker.errors import Refused
from duemq.protocol.codes import ResponseCode
from duemq.protocol.errors import TimerIllegal
from duemq.protocol.frames.command import Body
from duemq.protocol.records import properties, timer_properties
from duemq.storage.queues.consume_queue import ConsumeQueue

_WAIT_TRUE: Final = "\x02WAIT\x01true\x02"
_DELAY: Final = f"{properties.DELAY}{properties.NAME_END}"


class DelayRequest(NamedTuple):
    """What the properties of a message ask for."""

    level: int = 0
    """Delay level, as the sender counts: it may be beyond the table. 0 or less: none."""
    asks_time: bool = False
    """Whether one of TIMER_DELAY_SEC, TIMER_DELAY_MS and TIMER_DELIVER_MS is there, be its value wrong."""
    replace_key: str | None = None
    """The key whose waiting message this one takes the place of (TIMER_REPLACE)."""
    is_half: bool = False
    """Whether it is the half message of a transaction (TRAN_MSG)."""

    @property
    def is_delayed(self) -> bool:
        """Whether it asks for a level or a time."""
        return self.level > 0 or self.asks_time


class ByLevel(NamedTuple):
    """The message waits in the queue of a delay level."""

    level: int
    """One of the broker's table."""
    tells_due: bool = False
    """Whether its property DUE_MS is to say when it is due."""


class ByTimer(NamedTuple):
    """The message waits for a time in the timer wheel."""

    deliver_ms: int
    """When it is due, ms since the epoch."""
    deletes: bool = False
    """Whether it is no message but deletes one that waits (TIMER_DEL_UNIQKEY)."""
    origin: int = 0
    """Physical offset of the record that it replaces; 0 for none."""
    key: int = 0
    """Hash of its topic's key by which it can be replaced, see `Timers.staged`."""


Due = ByLevel | ByTimer | None
"""How a message waits; None where it is delivered at once."""


class NewMessage(NamedTuple):
    """A message that is about to be staged."""

    queue: ConsumeQueue
    """Where it is delivered, at once or when it is due."""
    due: Due
    text: str
    """The properties that its consumers get, without those that tell where it waits."""
    body: Body
    born_timestamp: int
    """When the sender made it, ms since the epoch."""
    born_host: bytes
    """As in the record: address and port."""
    flag: int
    sys_flag: int
    reconsume_times: int
    """How often a consumer group has tried it."""


def read_request(text: str) -> DelayRequest:
    """What a property text asks for. Raises Refused for a level that is no number, and for TIMER_REPLACE with a value
    or keys that it cannot have."""
    level = _level_of(text) if _DELAY in text else 0
    has_timers = "TIMER_" in text
    if not has_timers and "TRAN_MSG" not in text:
        return DelayRequest(level)
    asks_time = has_timers and any(
        properties.get(text, name) is not None or properties.is_empty(text, name) for name in properties.TIMERS
    )
    transaction = properties.get(text, properties.TRAN_MSG)
    return DelayRequest(
        level,
        asks_time,
        _replace_key_of(text) if has_timers else None,
        (transaction or "").lower() == "true",
    )


def as_stored(text: str, cluster: str) -> str:
    """The properties of a send as records have them: without WAIT, which is for the broker only, and with the property
    `cluster` (name and value) last, as RocketMQ has them."""
    if _WAIT_TRUE in text:
        text = text.replace(_WAIT_TRUE, properties.PROPERTY_END, 1)
    elif "WAIT\x01" in text:
        text = properties.without(text, properties.WAIT)
    if "CLUSTER\x01" in text:
        text = properties.without(text, properties.CLUSTER)
    if text and text[-1] != properties.PROPERTY_END:
        return f"{text}\x02{cluster}"
    return f"{text}{cluster}"


def _level_of(text: str) -> int:
    """The delay level, 0 without. Raises Refused where it is no number, or nothing: RocketMQ passes over properties
    without a value, and would deliver the message at once."""
    level = properties.get(text, properties.DELAY)
    if level is None:
        if properties.is_empty(text, properties.DELAY):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the property {properties.DELAY} has no value")
        return 0
    try:
        return int(level)
    except ValueError:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the property DELAY={level} is no delay level") from None


def _replace_key_of(text: str) -> str | None:
    """See `timer_properties.replace_key`. Raises Refused."""
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
