"""Calls the interceptors of a producer, see `duemq.interceptors`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self, TypeVar

from duemq._values.failures import ends_program
from duemq._values.hooks import Hooks, check_interceptors
from duemq.errors import DueMQError
from duemq.interceptors import ProducerInterceptor, SendBatch, Sending
from duemq.messages import Message, SendResult

T = TypeVar("T")


class SendHooks:
    """The interceptors of one producer. `make_id` makes message ids."""

    def __init__(
        self,
        interceptors: Sequence[object],
        group: str,
        client_id: str,
        make_id: Callable[[], str],
    ) -> None:
        self._group = group
        self._client_id = client_id
        self._make_id = make_id
        backwards = interceptors[::-1]
        self._before_send = Hooks[Sending](interceptors, ProducerInterceptor, "before_send")
        self._after_send = Hooks[Sending](backwards, ProducerInterceptor, "after_send")
        self._before_batch = Hooks[SendBatch](interceptors, ProducerInterceptor, "before_batch")
        self._after_batch = Hooks[SendBatch](backwards, ProducerInterceptor, "after_batch")

    @classmethod
    def of(cls, interceptors: Iterable[object], group: str, client_id: str, make_id: Callable[[], str]) -> Self | None:
        """Return the hooks of these interceptors, or None if there are no interceptors. Raises ArgumentError."""
        checked = check_interceptors(interceptors, ProducerInterceptor)
        return cls(checked, group, client_id, make_id) if checked else None

    def sending(self, message: Message, *, batched: bool) -> Sending:
        """Return the `Sending` of a message that is going to be sent. Raises ClosedError."""
        return Sending(self._identified(message), self._group, self._client_id, batched)

    def before(self, sending: Sending) -> Message:
        """Call `before_send`; return the message to be sent. Raises the DueMQError of an interceptor that refuses the
        message."""
        for method in self._before_send:
            given = sending.message
            try:
                method(sending)
                if not isinstance(sending.message, Message):
                    raise TypeError(f"{sending.message!r} is not a Message")
            except DueMQError:
                raise
            except BaseException as error:
                if ends_program(error):
                    raise
                sending.message = given
                self._before_send.complain(method)
            else:
                self._before_send.resolve(method)
        sending.message = self._identified(sending.message)
        return sending.message

    def after(self, sending: Sending, result: SendResult | None, error: BaseException | None) -> None:
        """Call `after_send`."""
        sending.result, sending.error = result, error
        self._after_send.call(sending)

    async def around_send(self, message: Message, send: Callable[[Message], Awaitable[T]]) -> T:
        """Send one message on its own, and call the interceptors before and after it. Raises ClosedError, and what
        `send` raises."""
        sending = self.sending(message, batched=False)
        try:
            result = await send(self.before(sending))
        except BaseException as error:
            self.after(sending, None, error)
            raise
        self.after(sending, result if isinstance(result, SendResult) else None, None)
        return result

    async def around_batch(self, sendings: Sequence[Sending], request: Awaitable[T]) -> T:
        """Wait for a request that sends several messages, and call the interceptors before and after it. Raises what
        the request raises."""
        batch = SendBatch(sendings)
        self._before_batch.call(batch)
        try:
            return await request
        except BaseException as error:
            batch.error = error
            raise
        finally:
            self._after_batch.call(batch)

    def _identified(self, message: Message) -> Message:
        """Return the message with an id, and with keys that can be iterated over more than once."""
        keys = message.keys if isinstance(message.keys, str | tuple) else tuple(message.keys)
        if message.message_id and keys is message.keys:
            return message
        return replace(message, message_id=message.message_id or self._make_id(), keys=keys)
