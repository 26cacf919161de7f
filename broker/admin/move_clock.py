"""MOVE_CLOCK (30001), duemq's own: users' tests move the broker's clock instead of waiting for a delay."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from duemq.broker.access.permission import ADMINISTER
from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import MoveClock, MoveClockResponse, Request, response
from duemq.storage.clock import Clock, MovableClock

log = structlog.get_logger(__name__)


class ClockHandlers:
    """Moves a clock, if it can be moved; `moved` is called afterwards."""

    def __init__(self, clock: Clock, moved: Callable[[], None]) -> None:
        self._clock = clock
        self._moved = moved

    def register(self, router: Router) -> None:
        """Add the handler to a router."""
        router.add(RequestCode.MOVE_CLOCK, MoveClock, ADMINISTER, self.move)

    def move(self, connection: Connection, request: Request[MoveClock]) -> Answer:
        """Move the clock ahead; the answer has the new time. A move by 0 only returns the time."""
        clock, ms = self._clock, request.header.advance_millis
        if not isinstance(clock, MovableClock):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                "this broker's clock cannot be moved: for tests, start one with --set testClock=true",
            )
        try:
            clock.advance(ms)
        except ValueError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"advanceMillis={ms}: {error}") from None
        if ms:
            log.info("clock_moved", ms=ms, peer=connection.peer)
            self._moved()
        return response(ResponseCode.SUCCESS, None, MoveClockResponse(clock.now_ms()))
