"""Calls the interceptors of a consumer, see `duemq.interceptors`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, Self

from duemq._consuming.workers import Handler, call_handler
from duemq._values.hooks import Hooks, check_interceptors
from duemq.interceptors import ConsumerInterceptor, Handling, Receiving
from duemq.messages import ReceivedMessage


class ReceiveHooks:
    """The interceptors of one consumer."""

    def __init__(
        self,
        interceptors: Sequence[object],
        group: str,
        client_id: str,
        model: Literal["clustering", "broadcasting"],
    ) -> None:
        self._group = group
        self._client_id = client_id
        self._model: Literal["clustering", "broadcasting"] = model
        backwards = interceptors[::-1]
        self._before_handling = Hooks[Handling](interceptors, ConsumerInterceptor, "before_handling")
        self._after_handling = Hooks[Handling](backwards, ConsumerInterceptor, "after_handling")
        self._after_receive = Hooks[Receiving](backwards, ConsumerInterceptor, "after_receive")

    @classmethod
    def of(
        cls, interceptors: Iterable[object], group: str, client_id: str, model: Literal["clustering", "broadcasting"]
    ) -> Self | None:
        """Return the hooks of these interceptors, or None if there are no interceptors. Raises ArgumentError."""
        checked = check_interceptors(interceptors, ConsumerInterceptor)
        return cls(checked, group, client_id, model) if checked else None

    def around(self, on_message: Handler) -> Handler:
        """Return a handler that calls the interceptors before and after `on_message`."""
        if not self._before_handling and not self._after_handling:
            return on_message

        async def intercepted(message: ReceivedMessage) -> None:
            handling = Handling(message, self._group, self._client_id, self._model)
            self._before_handling.call(handling)
            try:
                await call_handler(on_message, message)
            except BaseException as error:
                handling.error = error
                raise
            finally:
                self._after_handling.call(handling)

        return intercepted

    async def receive(
        self, receive: Callable[[], Awaitable[list[ReceivedMessage]]], *, single: bool
    ) -> list[ReceivedMessage]:
        """Wait for the messages that `receive` returns, and call `after_receive`. Raises what `receive` raises."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        messages = await receive()
        self._after_receive.call(
            Receiving(messages, self._group, self._client_id, self._model, loop.time() - begun, single)
        )
        return messages
