"""Formats messages and results for the command line: a line of text for people, a line of JSON for programs."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

import msgspec

from duemq._net.id_brokers import broker_of
from duemq._values.durations import format_duration
from duemq.messages import ReceivedMessage, SendResult
from duemq.pending import ChangedMessage, ChangeResult, Changes, DueCurve, PendingMessage
from duemq.protocol.printable import printable

_UNKNOWN: Final = "is of the broker {broker}, which the name servers do not know now; it may wait there"
_CHANGED: Final = {
    ChangeResult.CANCELLED: ("is cancelled", "are cancelled"),
    ChangeResult.RESCHEDULED: ("has a new time", "have a new time"),
    ChangeResult.DELIVERED_NOW: ("is due now", "are due now"),
    ChangeResult.ALREADY_DELIVERED: ("was already delivered", "were already delivered"),
    ChangeResult.ALREADY_CANCELLED: ("was already cancelled", "were already cancelled"),
    ChangeResult.NO_LONGER_WAITS: (
        "was delivered or cancelled long ago, or its store has been compacted since",
        "were delivered or cancelled long ago, or their store has been compacted since",
    ),
    ChangeResult.NEVER_EXISTED: ("never waited at these brokers", "never waited at these brokers"),
    ChangeResult.BROKER_UNKNOWN: (_UNKNOWN, _UNKNOWN),
}
_BAR: Final = 50
"""Length of the longest bar of a curve, in characters."""


def result_as_text(result: SendResult, now_ms: int, delay_ms: int | None = None) -> str:
    """Return the result of a send; `delay_ms` is the delay that the user gave, if any. The id in it is the one that
    `duemq cancel` and `duemq pending` accept and that `duemq pending list` prints."""
    sent = f"sent {printable(result.offset_message_id)} to {result.queue}"
    if result.due_time_ms is None:
        return f"{sent} offset {result.queue_offset}"
    when = f"in {format_duration(delay_ms)}" if delay_ms else _from_now(result.due_time_ms - now_ms)
    return f"{sent} schedule offset {result.queue_offset}, due {local_time(result.due_time_ms)} ({when})"


def result_as_json(result: SendResult) -> str:
    """Return the result of a send."""
    return _line(
        {
            "message_id": result.message_id,
            "offset_message_id": result.offset_message_id,
            "status": str(result.status),
            "topic": result.queue.topic,
            "broker": result.queue.broker,
            "queue_id": result.queue.queue_id,
            "queue_offset": result.queue_offset,
            "due_time_ms": result.due_time_ms,
            "handle": None if result.handle is None else str(result.handle),
            "recall_handle": result.recall_handle,
        }
    )


def changed_as_text(message: ChangedMessage) -> str:
    """Return the result for a message that was to be changed."""
    return _outcome(message.offset_message_id, _CHANGED[message.result][0])


def _outcome(offset_message_id: str, text: str) -> str:
    if text is _UNKNOWN:
        text = text.format(broker=broker_of(offset_message_id))
    return f"{printable(offset_message_id)} {text}"


def changed_as_json(message: ChangedMessage) -> str:
    """Return the result for a message that was to be changed."""
    return _line({"id": message.offset_message_id, "result": str(message.result)})


def pending_as_text(message: PendingMessage) -> str:
    """Return the deliver time, topic, level, [tag], (keys) and id of a waiting message."""
    parts = [local_time(message.due_time_ms), printable(message.topic)]
    if message.delay_level is not None:
        parts.append(f"level {message.delay_level}")
    if message.tags:
        parts.append(f"[{printable(message.tags)}]")
    if message.keys:
        parts.append(f"({printable(' '.join(message.keys))})")
    parts.append(printable(message.offset_message_id))
    return "  ".join(parts)


def recurring_as_text(message: PendingMessage) -> str:
    """Return the time of the next delivery, or "paused", and the topic, [tag], name and recurrence of a message."""
    found = message.recurrence
    assert found is not None
    parts = ["paused" if found.is_paused else local_time(message.due_time_ms), printable(message.topic)]
    if message.tags:
        parts.append(f"[{printable(message.tags)}]")
    parts.append(printable(" ".join(message.keys)))
    if found.every_ms is not None:
        parts.append(f"every {format_duration(found.every_ms)}")
    else:
        parts.append(f"cron {printable(found.cron or '')!r} {printable(found.zone)}")
    if found.count is not None:
        parts.append(f"{found.count} times")
    if found.end_ms is not None:
        parts.append(f"until {local_time(found.end_ms)}")
    return "  ".join(parts)


def pending_as_json(message: PendingMessage) -> str:
    """Return all fields of a waiting message."""
    return _line(asdict(message))


def curve_as_text(curve: DueCurve) -> Iterator[str]:
    """Yield a line for each span: when it begins, how many messages are due in it, and a bar."""
    most = max(curve.counts)
    width = len(str(most))
    for number, count in enumerate(curve.counts):
        begin = local_time(curve.begin_ms + number * curve.step_ms)
        yield f"{begin}  {count:{width}}  {'#' * -(-count * _BAR // most) if most else ''}".rstrip()


def curve_as_json(curve: DueCurve) -> str:
    """Return the number of messages due in each span."""
    return _line(asdict(curve))


def changes_as_text(changes: Changes, *, by_id: bool) -> Iterator[str]:
    """Yield the results of changes: with `by_id`, a line for each message; otherwise one for each result, with the
    number of messages."""
    if by_id:
        for message in changes.messages:
            yield changed_as_text(message)
        return
    for result, count in changes.counts.items():
        yield f"{count} message{'s' if count != 1 else ''} {_CHANGED[result][count != 1]}"
    if not changes.counts:
        yield "no waiting message matches"


def changes_as_json(changes: Changes) -> str:
    """Return the results of changes."""
    return _line(asdict(changes))


def message_as_text(message: ReceivedMessage) -> str:
    """Return the time of receipt, lateness, [tag], (keys) and body of a message. Raises BodyError."""
    parts = [local_time(message.receive_time_ms)]
    if message.lateness_ms is not None:
        parts.append(f"{message.lateness_ms:+d}ms")
    if message.tags:
        parts.append(f"[{printable(message.tags)}]")
    if message.keys:
        parts.append(f"({printable(' '.join(message.keys))})")
    parts.append(printable(message.body.decode(errors="backslashreplace")))
    return "  ".join(parts)


def message_as_json(message: ReceivedMessage) -> str:
    """Return all fields of a message; a body that is not UTF-8 is in `body_base64`. Raises BodyError."""
    body: dict[str, str]
    try:
        body = {"body": message.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": base64.b64encode(message.body).decode()}
    return _line(
        {
            "topic": message.topic,
            **body,
            "tags": message.tags,
            "keys": message.keys,
            "properties": message.properties,
            "message_id": message.message_id,
            "offset_message_id": message.offset_message_id,
            "broker": message.queue.broker,
            "queue_id": message.queue.queue_id,
            "queue_offset": message.queue_offset,
            "born_time_ms": message.born_time_ms,
            "store_time_ms": message.store_time_ms,
            "receive_time_ms": message.receive_time_ms,
            "due_time_ms": message.due_time_ms,
            "lateness_ms": message.lateness_ms,
            "delay_level": message.delay_level,
            "reconsume_times": message.reconsume_times,
        }
    )


def local_time(time_ms: int) -> str:
    """Format a time in ms since the epoch, to the millisecond, in this machine's time zone."""
    try:
        return datetime.fromtimestamp(time_ms / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):  # beyond the year 9999
        return f"{time_ms} ms since the epoch"


def _from_now(milliseconds: int) -> str:
    if milliseconds <= 0:
        return "now"
    # Rounded to seconds: after a send with a level of 5s, nobody wants to read that 4s990ms are left.
    return f"in {format_duration(round(milliseconds, -3) or milliseconds)}"


def _line(fields: dict[str, Any]) -> str:
    return msgspec.json.encode(fields).decode()
