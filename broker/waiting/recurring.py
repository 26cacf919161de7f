"""Recurring messages: CHANGE_RECURRING (30007), duemq's own, pauses, resumes and removes one. LIST_PENDING lists them,
and a send with the same topic and name replaces one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from duemq.broker.access.permission import SEND
from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.produce.key_turns import KeyTurns
from duemq.broker.waiting.changes_by_id import ChangesById
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import TimerIllegal
from duemq.protocol.frames import fastjson
from duemq.protocol.requests.bodies import ChangedRecurring
from duemq.protocol.requests.headers import ChangeRecurring, Request, response
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock

ACTIONS: Final = ("pause", "resume", "remove")


class RecurringHandlers:
    """Changes recurring messages. `clock` is the messages' clock."""

    def __init__(self, timers: Timers, turns: KeyTurns, changes: ChangesById, router: Router, clock: Clock) -> None:
        self._timers = timers
        self._turns = turns
        self._changes = changes
        self._router = router
        self._clock = clock

    def register(self, router: Router) -> None:
        """Add the handler to a router."""
        router.add(RequestCode.CHANGE_RECURRING, ChangeRecurring, SEND, self.change)

    async def change(self, connection: Connection, request: Request[ChangeRecurring]) -> Answer:
        """Pause, resume or remove a recurring message; return whether there was one, and when it is delivered next. The
        answer is sent once the change is as durable as a send would be."""
        header = request.header
        self._changes.check_allowed(header.action[:40])
        if header.action not in ACTIONS:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"action={header.action[:40]} is not one of {', '.join(ACTIONS)}")
        try:
            done = await self._turns.change(header.topic, header.name, self._look, header)
        except TimerIllegal as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{header.action} failed, {error}") from None
        return self._router.answer_when_flushed(
            connection, request, response(ResponseCode.SUCCESS, body=fastjson.dumps(done))
        )

    def _look(self, header: ChangeRecurring) -> Callable[[], ChangedRecurring]:
        now_ms, changes = self._clock.now_ms(), self._timers.changes
        recurring = changes.recurring(header.topic, header.name, now_ms)

        def change() -> ChangedRecurring:
            if not recurring:
                return ChangedRecurring("NOT_FOUND", None)
            if header.action == "remove":
                changes.remove(recurring, now_ms)
                return ChangedRecurring("REMOVED", None)
            if header.action == "pause":
                return ChangedRecurring("PAUSED" if changes.pause(recurring, now_ms) else "UNCHANGED", None)
            due_ms = changes.resume(recurring, now_ms)
            return ChangedRecurring("RESUMED" if due_ms is not None else "UNCHANGED", due_ms)

        return change
