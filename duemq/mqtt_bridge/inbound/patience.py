"""How the bridge waits while RocketMQ does not accept messages from MQTT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from duemq._net import timeouts
from duemq._net.complaints import Complaints
from duemq._values.intervals import Intervals
from duemq.errors import (
    AccessDeniedError,
    ArgumentError,
    ClosedError,
    DueMQError,
    MessageRejectedError,
    NotSupportedError,
)
from duemq.messages import MessageQueue
from duemq.mqtt_bridge.inbound.batch import Transfer
from duemq.mqtt_bridge.session import packets

_FINAL: Final = (ArgumentError, MessageRejectedError, NotSupportedError)
"""Errors that a later attempt would get as well; all others may be temporary."""
_SENDING: Final = "sending messages from MQTT to RocketMQ"

log = logging.getLogger("duemq.mqtt_bridge")


class Recaller(Protocol):
    """Cancels and finds waiting messages."""

    async def cancel_key(self, topic: str, key: str) -> int:
        """Cancel the messages with a key that wait for a topic; return their number."""

    async def waits(self, topic: str, message_id: str) -> bool:
        """Return whether a message waits for a topic."""

    async def is_durable(self, queue: MessageQueue) -> bool:
        """Return whether all that the broker of a queue has stored is as durable as its settings promise."""


class _LeavingError(Exception):
    """The bridge ends while RocketMQ is away."""


class Patience:
    """Waits after errors, and logs why, until `closing` is set because the bridge ends."""

    def __init__(self, recaller: Recaller, intervals: Intervals) -> None:
        self.closing = asyncio.Event()
        self._recaller = recaller
        self._intervals = intervals
        self._complaints = Complaints(log)

    @contextmanager
    def until_leaving(self) -> Iterator[None]:
        """Run the block, and leave it early if the bridge ends while RocketMQ is away."""
        with suppress(_LeavingError):
            yield

    def check(self) -> None:
        """Leave the block of `until_leaving` if the bridge ends."""
        if self.closing.is_set():
            raise _LeavingError

    def resolve(self) -> None:
        """Note that RocketMQ accepts messages; logged if it did not before."""
        self._complaints.resolve(_SENDING)

    async def until_durable(self, queue: MessageQueue) -> None:
        """Wait until all messages that the broker of a queue has stored are on its disk: it answers FLUSH_DISK_TIMEOUT
        to sends while the disk is slow. Raises DueMQError; messages that it had stored may then be lost."""
        failures = 0
        while not await self._recaller.is_durable(queue):
            failures += 1
            await self._pause(f"{queue.broker} has stored messages, but they are not on its disk yet", failures)
        if failures:
            self.resolve()

    async def wait(self, error: DueMQError, failures: int) -> None:
        """Wait after an error that may be temporary, then `check`. `failures`: the number of errors in a row. Raises
        ClosedError."""
        if isinstance(error, ClosedError):
            raise error
        await self._pause(str(error), failures)

    async def _pause(self, reason: str, failures: int) -> None:
        self._complaints.raise_(_SENDING, reason)
        with suppress(TimeoutError):
            async with timeouts.timeout(self._intervals.pause(failures)):
                await self.closing.wait()
        self.check()


def is_final(error: DueMQError, transfer: Transfer) -> bool:
    """Return whether a message has to be refused. An account that must not send to the topic of a rule may get the
    permission, and until then the MQTT broker keeps the messages. But a sender that chooses a forbidden topic must not
    hold up all the others. Wrong keys are no reason to refuse anything: then the brokers of RocketMQ 4.9 and 5.3 do not
    speak of a permission."""
    if isinstance(error, AccessDeniedError):
        return transfer.target is not None and transfer.target.is_chosen_by_sender and "permission" in str(error)
    return isinstance(error, _FINAL)


def reason_of(error: DueMQError) -> int:
    """Return the reason code for a message that is refused for an error."""
    return packets.NOT_AUTHORIZED if isinstance(error, AccessDeniedError) else packets.IMPLEMENTATION_ERROR
