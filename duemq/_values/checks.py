"""Checks of arguments before requests are sent. All functions raise ArgumentError.

The limits are RocketMQ's (client/Validators.java and common/topic/TopicValidator.java at 4.9.7).
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Final, TypeGuard

from duemq.errors import ArgumentError
from duemq.protocol.records import properties as property_text
from duemq.protocol.topics import NAME, NOT_FOR_CLIENTS, RETRY_PREFIX

MAX_TOPIC_LENGTH: Final = 127
MAX_GROUP_LENGTH: Final = 255
MAX_RETRIED_GROUP_LENGTH: Final = MAX_TOPIC_LENGTH - len(RETRY_PREFIX)
"""Maximum length of the name of a consumer group that has a retry topic."""
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of a body, in bytes: RocketMQ's default of maxMessageSize, at producers and at brokers."""
MAX_CONCURRENCY: Final = 1000
"""Maximum number of messages that a consumer handles at a time."""
MAX_RETRIES: Final = 2**31 - 1
"""Maximum number of retries of a message: RocketMQ's header has 32 bits for the number."""

_OFFSET_MESSAGE_ID: Final = re.compile(r"[0-9A-Fa-f]{32}(?:[0-9A-Fa-f]{24})?")

# Properties that control how brokers and clients treat a message. A program that forwards a received message must not
# copy them: DELAY would delay it again, TIMER_OUT_MS would make a timer ineffective.
STEERING_PROPERTIES: Final = frozenset(
    """
    KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID
    ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION TRACE_ON UNIQ_KEY
    EXTEND_UNIQ_INFO MAX_RECONSUME_TIMES CONSUME_START_TIME INNER_NUM INNER_BASE DUP_INFO
    CHECK_IMMUNITY_TIME_IN_SECONDS TRAN_PREPARED_QUEUE_OFFSET __transactionId__ TRANSACTION_CHECK_TIMES INSTANCE_ID
    CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE POP_CK POP_CK_OFFSET 1ST_POP_TIME
    __SHARDINGKEY PROPERTY_FORWARD_QUEUE_ID REDIRECT INNER_MULTI_DISPATCH INNER_MULTI_QUEUE_OFFSET TRACE_CONTEXT
    TIMER_DELAY_SEC TIMER_DELAY_MS TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_OUT_MS
    TIMER_DEL_UNIQKEY TIMER_REPLACE TIMER_FIRST_ID TIMER_FROM_LEVEL TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP
    DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID __CRC32# DUE_MS
    """.split()  # noqa: SIM905
)


def check_topic(topic: str) -> None:
    """Check the name of a topic for a subscription. Raises ArgumentError if it is empty, too long or has other
    characters than RocketMQ allows."""
    _check_name("topic", topic, MAX_TOPIC_LENGTH)


def check_topic_to_send(topic: str) -> None:
    """Check the name of a topic for a send. Raises ArgumentError if it is invalid or belongs to the broker itself."""
    check_topic(topic)
    if topic in NOT_FOR_CLIENTS:
        raise ArgumentError(f"the topic {topic} belongs to the broker itself; clients cannot send to it")


def check_timeout(timeout: float, name: str = "timeout", allowed: str = "seconds, more than 0") -> float:
    """Return a time-out, in seconds, as a float. Infinity is allowed. Raises ArgumentError if the time-out is not a
    number above 0, or is one that no float can hold. `name`, `allowed`: the name of the argument and what it may be,
    for the error."""
    if type(timeout) in (float, int) and 0 < timeout < 1e9:  # nearly all time-outs of sends: the cheapest check
        return float(timeout)
    seconds = to_float(timeout)
    if not seconds > 0:
        raise ArgumentError(f"{name}={shown(timeout)}: give {allowed}")
    return seconds


def check_close_timeout(close_timeout: float) -> float:
    """Return how long `close` waits, in seconds, as a float. Raises ArgumentError if it is not a number, is below 0, or
    is one that no float can hold."""
    seconds = to_float(close_timeout)
    if not seconds >= 0:
        raise ArgumentError(f"close_timeout={shown(close_timeout)}: give seconds, 0 or more")
    return seconds


def check_compress_from_bytes(size: float | None) -> int | None:
    """Return the least size of a body that is compressed, in bytes, as an int; None for no compression. Raises
    ArgumentError if it is neither None nor a number from 0 on."""
    if size is None:
        return None
    if not is_number(size) or not size >= 0:
        raise ArgumentError(f"compress_from_bytes={shown(size)}: give bytes, 0 or more, or None")
    return math.ceil(size) if size < math.inf else None


def check_flag(flag: bool, name: str) -> None:
    """Check an argument that is on or off, given by its name. Raises ArgumentError if it is not a bool."""
    if not isinstance(flag, bool):
        raise ArgumentError(f"{name}={flag!r}: give True or False")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, such as an int, a float or one of NumPy's, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def to_float(value: object) -> float:
    """Return a number as a float. Anything else, and a number that no float can hold, become NaN, which is neither
    above nor below any limit."""
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:
        return math.nan


def shown(value: object) -> str:
    """Return the repr of an argument, for an error; a description of an int that has too many digits for Python."""
    try:
        return repr(value)
    except ValueError:
        return f"<{type(value).__name__} with too many digits to be shown>"


def is_whole_number(value: object) -> TypeGuard[int]:
    """Return whether a value is an int or another library's integer, such as one of NumPy's, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    """Check an argument that is one of a few words, given by its name. Raises ArgumentError."""
    if not isinstance(value, str) or value not in choices:  # a NumPy array is compared element by element
        raise ArgumentError(f"{name}={value!r}: give one of {', '.join(choices)}")


def may_be_given(several: object) -> bool:
    """Return whether an argument for several objects may be other than none of them: False for None and for an empty
    tuple or list."""
    return several is not None and not (isinstance(several, tuple | list) and not several)


def check_group(group: str) -> None:
    """Check the name of a producer group, or of a consumer group without a retry topic. Raises ArgumentError if it is
    invalid."""
    _check_name("group", group, MAX_GROUP_LENGTH)


def check_retried_group(group: str) -> None:
    """Check the name of a consumer group that has a retry topic: %RETRY% and the group's name. Raises ArgumentError if
    it is invalid or leaves no room for %RETRY%."""
    check_group(group)
    if len(group) > MAX_RETRIED_GROUP_LENGTH:
        raise ArgumentError(
            f"the name of the group has {len(group)} characters; the limit is {MAX_RETRIED_GROUP_LENGTH} for a "
            f"consumer that retries messages, since the name of its retry topic is {RETRY_PREFIX} and the group's"
        )


def check_loop(loop: asyncio.AbstractEventLoop | None, what: str) -> None:
    """Check that a call is made in the event loop of `start`. `loop`: that loop, None before `start`; `what`: the kind
    of the started object, such as "producer". Raises ArgumentError in another event loop."""
    if loop is not None and asyncio.get_running_loop() is not loop:
        raise ArgumentError(f"the {what} was started in another event loop; use one {what} for each loop")


def check_limit(limit: float, name: str) -> int:
    """Return a limit of a number of things or bytes as an int, rounded down, which allows as many; infinity becomes
    sys.maxsize. `name`: that of the argument. Raises ArgumentError for a limit below 1, with which a client would never
    send or read."""
    if not is_number(limit) or not limit >= 1:
        raise ArgumentError(f"{name}={shown(limit)}: give 1 or more")
    return math.floor(limit) if limit < math.inf else sys.maxsize


def check_concurrency(concurrency: int) -> int:
    """Return how many messages a consumer handles at a time, as an int. Raises ArgumentError if the number is not a
    whole one from 1 to MAX_CONCURRENCY."""
    if not is_whole_number(concurrency) or not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ArgumentError(f"concurrency={shown(concurrency)}: give 1 to {MAX_CONCURRENCY}")
    return int(concurrency)


def check_retries(times: int) -> int:
    """Return how many times a message is retried, as an int. Raises ArgumentError if the number is more than RocketMQ's
    header has room for, or negative: brokers would make a dead letter of each message at its first failure."""
    if not is_whole_number(times) or not 0 <= times <= MAX_RETRIES:
        raise ArgumentError(
            f"max_reconsume_times={shown(times)}: give a whole number from 0 (no retries) to {MAX_RETRIES}"
        )
    return int(times)


def _check_name(kind: str, name: str, max_length: int) -> None:
    if not isinstance(name, str):
        raise ArgumentError(f"{kind}={name!r}: give a name, as a str")
    if not name:
        raise ArgumentError(f"a {kind} needs a name")
    if len(name) > max_length:
        raise ArgumentError(f"the name of a {kind} has {len(name)} characters; the limit is {max_length}")
    if not NAME.fullmatch(name):
        raise ArgumentError(f"the {kind} {name!r} has characters other than letters, digits and % | _ -")


def check_offset_message_id(message_id: str) -> None:
    """Check the id that a broker gave a message. Raises ArgumentError if it does not have 32 or 56 hex digits."""
    if not isinstance(message_id, str) or not _OFFSET_MESSAGE_ID.fullmatch(message_id):
        raise ArgumentError(f"{message_id!r} is not an offset message id, which has 32 or 56 hex digits")


def check_body(body: bytes, limit: int) -> None:
    """Check the body of one message, before it is compressed. Raises ArgumentError if it is empty or has more bytes
    than `limit`."""
    if not body:
        raise ArgumentError("the body is empty; RocketMQ does not store empty bodies")
    if len(body) > limit:
        raise ArgumentError(f"the body has {len(body)} bytes; the limit is {limit}")


def check_properties(properties: Mapping[str, str]) -> None:
    """Check the application's properties. Raises ArgumentError for a name that has a meaning for brokers or clients,
    and for a name or value that is empty or contains a separator."""
    for name, value in properties.items():
        if name in STEERING_PROPERTIES:
            raise ArgumentError(
                f"the property {name} is reserved; use the arguments of send instead, such as tags= or delay="
            )
        check_property_text(name, "a property name")
        check_property_text(value, f"the property {name}")


def check_property_text(text: str, what: str) -> None:
    """Check a name or value of a property. Raises ArgumentError if it is empty or contains a separator. `what`: its
    name for the error."""
    if not isinstance(text, str) or not text:
        raise ArgumentError(f"{what} must be a non-empty string, not {text!r}")
    if property_text.NAME_END in text or property_text.PROPERTY_END in text:
        raise ArgumentError(f"{what} contains \\x01 or \\x02, which RocketMQ uses as separators")


def check_tags(tags: str) -> None:
    """Check a message's tag. Raises ArgumentError if it is empty or no subscription could name it."""
    check_property_text(tags, "a tag")
    if "||" in tags or tags != tags.strip() or tags == "*":
        raise ArgumentError(
            f"no consumer could subscribe to the tag {tags!r}: it must not be *, contain || or have blanks around it"
        )


def encoded(text: str, what: str) -> bytes:
    """Return a text in UTF-8. Raises ArgumentError if it has half of a surrogate pair. `what`: its name for the
    error."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ArgumentError(f"{what} contains {half!r}, half of a surrogate pair, which UTF-8 cannot carry") from None


def check_property_size(text: str) -> None:
    """Check all properties of a message in their wire form. Raises ArgumentError if they are too large, or if UTF-8
    cannot carry them."""
    size = len(encoded(text, "a tag, key or property"))
    if size > property_text.MAX_BYTES:
        raise ArgumentError(f"the properties have {size} bytes; the limit is {property_text.MAX_BYTES}")
