"""The methods of `Producer` and `Admin` that change waiting messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from duemq._values.times import Span, Time

if TYPE_CHECKING:
    from duemq._producing.changes import PendingChanges, Which
    from duemq.pending import Changes


class Changing:
    """Cancels, reschedules and delivers messages that wait for a timer or a delay level.

    Each method takes either `which`: one or several of a message's handle (`SendResult.handle`), the text of a handle,
    and the broker's id (`offset_message_id`); or a selection: a `topic` and at least one of `key` (one of a message's
    keys, or its message id), `begin` and `end`: messages that are due at `begin` or later, and before `end`, each a
    datetime with a time zone or seconds since the epoch.

    duemq's brokers support all of this. RocketMQ's from 5.3 on, with recallMessageEnable=true, support only the
    cancellation of a message with a timer by its handle, and do not check whether the message still waits or was
    cancelled before. Anything else raises NotSupportedError.

    With access control, duemq's brokers accept a change by handle from accounts that may send to the topic, and any
    other change from accounts that may operate the broker.

    `timeout`: time limit of each request to a broker, in seconds; by default that of the producer or admin. A broker
    completes a change even if the request timed out.

    Raises ArgumentError; ClosedError; NotSupportedError; AccessDeniedError; NoPermissionError if
    recallMessageEnable=false; MessageRejectedError for a time beyond timerMaxDelaySec; BrokerError, ConnectError,
    ConnectionLostError, RequestTimeoutError. Other messages of the same call may have been changed in spite of an
    error.
    """

    def _pending_changes(self) -> PendingChanges:
        """The object that carries out changes. Raises ClosedError."""
        raise NotImplementedError

    async def cancel(
        self,
        which: Which | Iterable[Which] | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
        timeout: float | None = None,
    ) -> Changes:
        """Cancel waiting messages, so that they are not delivered. Return the result for each.

            changes = await producer.cancel(result.handle)
            if changes.result is ChangeResult.ALREADY_DELIVERED: ...

        Which messages, `timeout` and errors: see `Changing`.
        """
        return await self._pending_changes().cancel(which, topic, key, begin, end, timeout)

    async def reschedule(
        self,
        which: Which | Iterable[Which] | None = None,
        *,
        delay: Span | None = None,
        deliver_at: Time | None = None,
        topic: str | None = None,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
        timeout: float | None = None,
    ) -> Changes:
        """Reschedule waiting messages, either to `deliver_at`, or to `delay` after the broker's receipt of the request,
        by the broker's clock; a time in the past means immediately. Their ids and handles stay valid. Return the result
        for each.

        Which messages, `timeout` and errors: see `Changing`.
        """
        return await self._pending_changes().reschedule(which, delay, deliver_at, topic, key, begin, end, timeout)

    async def deliver_now(
        self,
        which: Which | Iterable[Which] | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        begin: Time | None = None,
        end: Time | None = None,
        timeout: float | None = None,
    ) -> Changes:
        """Deliver waiting messages immediately. Return the result for each.

        Which messages, `timeout` and errors: see `Changing`.
        """
        return await self._pending_changes().deliver_now(which, topic, key, begin, end, timeout)
