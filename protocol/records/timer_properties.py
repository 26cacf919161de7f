"""Computes when a message with a timer is due, from its properties, by RocketMQ's rules.

    TIMER_DELAY_SEC, TIMER_DELAY_MS   from the store time on, s and ms    the first of these three that exists counts
    TIMER_DELIVER_MS                  a time, ms since the epoch
                                      If some of them exist but none has a value, that is illegal here. RocketMQ ignores
                                      properties without a value, and delivers such a message immediately
    TIMER_REPLACE                     duemq's own: `true` for a message that takes the place of the message that waits
                                      with this property for the same topic and key. KEYS has exactly one key then
    TIMER_OUT_MS                      set by the broker: the start of the second in whose slot the message waits
    TIMER_FIRST_ID                    duemq's own, set by the broker in a record that was appended again: the id that
                                      the sender of the message got, which names its first record; a hyphen, and the
                                      physical offset of the record before this one
    TIMER_FROM_LEVEL                  duemq's own, set by the broker in a record that took the place of a record with a
                                      delay level, whose file was about to expire: the level. The topic's policy for
                                      timers does not apply to such a message

Slot of a deliver time: RocketMQ opens the slot of a second when that second is over, so a message that is due at a
whole second waits in the slot before. For a deliver time D, TIMER_OUT_MS is D - 1000 if D is a whole second, else D
rounded down to a whole second. Either way the slot of second s has the messages that are due after s and not after
s + 1.

duemq's records of the timer topic have the exact time in the prepared-transaction offset, as duemq's records with a
delay level do; RocketMQ does not read that field there. A record that was appended again (rolled, or given another
time), or that takes the place of another message, has its origin in that field instead, and TIMER_ROLL_TIMES says so.

TIMER_FIRST_ID is valid if its second part is the record's origin. In a store that was rewritten (`duemq spark compact`)
records lie in other places, and origins name these places, but the ids in properties are unchanged: they name nothing
there.

Follows apache/rocketmq broker/util/HookUtils.java and store/timer/TimerMessageStore.java (5.3.3).
"""

from __future__ import annotations

from typing import Final

from duemq.protocol.errors import TimerIllegal
from duemq.protocol.records import properties

PRECISION_MS: Final = 1000
"""RocketMQ's timerPrecisionMs, the width of a slot. Delivery times are nevertheless exact to the millisecond."""
AGAIN_ROOM: Final = 128
"""Number of bytes that the properties of a waiting message leave free for the properties that it gets when it is
appended once more: TIMER_DELIVER_MS, TIMER_OUT_MS, TIMER_ROLL_TIMES and TIMER_FROM_LEVEL. TIMER_FIRST_ID is left out if
there is no room; messages that leave less room (retries, RocketMQ's records) lose properties that brokers have
added."""
MAX_DELIVER_AHEAD_MS: Final = 100 * 366 * 86_400_000
"""A value that is later than the store time by more than this, in ms, is not a promised deliver time."""
MAX_HASH: Final = 2**32
"""Largest tags code in the timer topic's queue that is a hash; larger ones are deliver times."""
MAX_MS: Final = 2**53
"""Largest number of ms that counts as a time."""


def deliver_time(text: str, now_ms: int) -> int | None:
    """Return the deliver time for which the properties of a message ask, ms since the epoch; None if they do not ask
    for one. A delay counts from `now_ms` on. Raises TimerIllegal."""
    for name, factor in ((properties.TIMER_DELAY_SEC, 1000), (properties.TIMER_DELAY_MS, 1)):
        value = properties.get(text, name)
        if value is not None:
            return now_ms + _number(name, value) * factor
    value = properties.get(text, properties.TIMER_DELIVER_MS)
    if value is not None:
        return _number(properties.TIMER_DELIVER_MS, value)
    for name in properties.TIMERS:
        if properties.is_empty(text, name):
            raise TimerIllegal(f"the property {name} has no value")
    return None


def _number(name: str, value: str) -> int:
    digits = value[1:] if value[:1] in ("-", "+") else value
    if not (digits.isascii() and digits.isdecimal()):
        raise TimerIllegal(f"the property {name}={value[:40]} is not a number of milliseconds or seconds")
    if len(digits) > 19 or abs(int(value)) > MAX_MS:
        raise TimerIllegal(f"the property {name}={value[:40]} is too large; it is in milliseconds or seconds")
    return int(value)


def replace_key(text: str) -> str | None:
    """Return the key whose waiting message a message is to replace; None if it is not to replace any. Raises
    TimerIllegal."""
    value = properties.get(text, properties.TIMER_REPLACE)
    if value is None or value.lower() == "false":
        return None
    if value.lower() != "true":
        raise TimerIllegal(f"the property {properties.TIMER_REPLACE}={value[:40]} is neither true nor false")
    keys = (properties.get(text, properties.KEYS) or "").split()
    if len(keys) != 1:
        raise TimerIllegal(
            f"the property {properties.TIMER_REPLACE} needs exactly one key in {properties.KEYS}, but the message has "
            f"{len(keys)}"
        )
    return keys[0]


def stored_key(text: str) -> str | None:
    """Return the `replace_key` of a stored message; None also for invalid properties, which a store of Apache's broker
    may have."""
    if properties.TIMER_REPLACE not in text:
        return None
    try:
        return replace_key(text)
    except TimerIllegal:
        return None


def slot_second(deliver_ms: int) -> int:
    """Return the second, since the epoch, in whose slot a message that is due at a time (ms since the epoch) waits."""
    return (deliver_ms - 1) // PRECISION_MS


def out_ms(deliver_ms: int) -> int:
    """Return TIMER_OUT_MS for a deliver time, by RocketMQ's rule. Both are ms since the epoch."""
    return slot_second(deliver_ms) * PRECISION_MS


def promised_ms(store_timestamp: int, prepared_transaction_offset: int) -> int | None:
    """Return the deliver time in a record of a delayed message, ms since the epoch; None if it has none. RocketMQ does
    not use the prepared-transaction offset of such records; duemq's records have the deliver time there, so that a
    message of a level keeps its time when the table of levels changes."""
    prepared = prepared_transaction_offset
    return prepared if store_timestamp <= prepared <= store_timestamp + MAX_DELIVER_AHEAD_MS else None


def due_of(text: str, store_timestamp: int, prepared_transaction_offset: int) -> int | None:
    """Return when a stored message of the timer topic is due, ms since the epoch; None if it is not a timer message.

    The result is exact for duemq's own records, and if a property has the time. For RocketMQ's records with a delay it
    is the store time plus the delay, which is exact except for the time between RocketMQ's two readings of its clock.
    If that does not fit the message's slot, it is the end of the slot.
    """
    slot = properties.get(text, properties.TIMER_OUT_MS)
    if slot is None or not slot.isascii() or not slot.isdecimal() or int(slot) > MAX_MS:
        return None
    is_again = properties.get(text, properties.TIMER_ROLL_TIMES) is not None
    promised = promised_ms(store_timestamp, prepared_transaction_offset)
    if promised is not None and not is_again:
        return promised
    try:
        asked = deliver_time(text, store_timestamp)
    except TimerIllegal:
        asked = None
    latest = int(slot) + PRECISION_MS
    if asked is not None and latest - PRECISION_MS < asked <= latest:
        return asked
    return latest


def deleted_message(text: str) -> tuple[str, str] | None:
    """Return the topic and unique key of the message that a deleting record names, from the record's properties; None
    if it does not name one. TIMER_DEL_UNIQKEY is the topic, `+` and the unique key; older versions of RocketMQ wrote
    only the unique key. It applies only to messages of the topic to which the record itself was sent (REAL_TOPIC),
    since that is the topic to which its sender may send."""
    value, topic = properties.get(text, properties.TIMER_DEL_UNIQKEY), properties.get(text, properties.REAL_TOPIC)
    if value is None or topic is None:
        return None
    return topic, deleted_key(value, topic)


def deleted_key(value: str, topic: str) -> str:
    """Return the unique key that a value of TIMER_DEL_UNIQKEY names among the messages of a topic."""
    return value.removeprefix(f"{topic}+")


def first_id(text: str, prepared_transaction_offset: int) -> str | None:
    """Return the id of a message's first record, from the properties of a record that was appended again; None if they
    have no valid id."""
    value = properties.get(text, properties.TIMER_FIRST_ID)
    if value is None or properties.get(text, properties.TIMER_ROLL_TIMES) is None:
        return None
    found, _, origin = value.partition("-")
    return found if origin == str(max(prepared_transaction_offset, 0)) else None


def first_id_value(first: str, origin: int) -> str:
    """Return TIMER_FIRST_ID for a record that takes the place of the record at the physical offset `origin`. `first`:
    the id of the message's first record."""
    return f"{first}-{origin}"


def queue_code(text: str, store_timestamp: int, prepared_transaction_offset: int) -> int | None:
    """Return the tags code of a record in the timer topic's consume queue: the time when the message is due, ms since
    the epoch; None for a record that deletes another message, whose properties must be read."""
    if properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None:
        return None
    return due_of(text, store_timestamp, prepared_transaction_offset)
