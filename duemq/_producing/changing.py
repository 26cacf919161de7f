"""The methods with which one changes one's mind about messages that wait: those of `Producer` and `Admin` alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from duemq._values.times import Span, Time

if TYPE_CHECKING:
    from duemq._producing.changes import PendingChanges, Which
    from duemq.pending import Changes


class Changing:
    """Cancels, reschedules and delivers messages that wait for a time or a delay level.

    Which messages, in each of the methods: either `which`, one of these or several: the handle of a message
    (`SendResult.handle`), its text, or the id that the broker gave (`offset_message_id`). Or a selection: a `topic` and
    at least one of `key` (one of the keys of a message, or its message id), `begin` and `end`: messages that are due
    from `begin` on and before `end`, each a datetime with a time zone or seconds since the epoch.

    What brokers can do: duemq's all of it. RocketMQ's from 5.3 on cancel a message with a timer, by its handle, with
    recallMessageEnable=true; they do not look whether it still waits, or whether it was cancelled before. For anything
    else NotSupportedError is raised.

    With access control, duemq's brokers take changes by handle from whoever may send to the topic, and all others from
    accounts that may operate.

    `timeout`: for each request to a broker, in seconds; by default as of the object. A broker goes on with a change
    that it did not answer in time.

    Raises ArgumentError; ClosedError; NotSupportedError; AccessDeniedError; NoPermissionError where
    recallMessageEnable=false; MessageRejectedError for a time beyond timerMaxDelaySec; BrokerError, ConnectError,
    ConnectionLostError, RequestTimeoutError. Other messages of the same call may have been changed then.
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
        """Cancel messages that wait: they are not delivered. Returns what became of each.

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
        """Give messages that wait another time, with one of `delay`, which counts from when the broker is asked, by its
        clock, and `deliver_at`; a time that has passed means at once. Their ids and handles stay. Returns what became
        of each.

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
        """Deliver messages that wait at once. Returns what became of each.

        Which messages, `timeout` and errors: see `Changing`.
        """
        return await self._pending_changes().deliver_now(which, topic, key, begin, end, timeout)
