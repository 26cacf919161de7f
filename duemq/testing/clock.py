"""Advances the clocks of brokers, for tests of programs that use delayed messages.

    duemq serve --set testClock=true

    clock = TestClock("127.0.0.1:9876")
    await producer.send("reminders", b"call back", delay="2h")
    await clock.advance("2h")
    message = await consumer.receive()

The clock of such a broker runs like the machine's, and can be moved ahead but not back. Delays and the store times of
messages follow it; clients, connections and the deletion of old messages do not. This process's own clock is not moved,
so a message's `lateness_ms` is less by the time that the brokers are ahead, and usually negative.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from duemq._net.client import typed_header
from duemq._net.connection import ClientConnection, connect
from duemq._net.keys import signer_of
from duemq._net.pool import Pool
from duemq._net.routes import NameServers
from duemq._net.tls import Tls, context_of
from duemq._values.times import span_ms
from duemq.errors import ArgumentError, error_of
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import MoveClock, MoveClockResponse

__all__ = ["TestClock"]


class TestClock:
    """The clocks of all brokers that a name server knows, which are advanced together. `timeout`: of each request, in
    seconds. `access_key`, `secret_key`: an administrator's account, for brokers with access control. `tls`: as for
    `Producer`.

    Its methods raise ConnectError if a name server or a broker cannot be reached or no broker is known,
    NoPermissionError if a broker was started without testClock=true, NotSupportedError if a broker is not duemq's,
    RequestTimeoutError, ConnectionLostError and PeerError.
    """

    __test__ = False
    """Keeps pytest from taking this class, because of its name, for tests."""

    def __init__(
        self,
        nameserver: str = "127.0.0.1:9876",
        *,
        timeout: float = 3.0,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls: Tls = False,
    ) -> None:
        self._signer = signer_of(access_key, secret_key)
        self._tls = context_of(tls)
        self._nameserver = nameserver
        self._timeout = timeout

    async def advance(self, by: str | timedelta | None = None, *, ms: int | None = None) -> datetime:
        """Advance the clocks by text such as "2h" or "1h30m", by a timedelta, or by `ms` milliseconds; return the
        brokers' new time, the earliest if they differ. Messages that have become due are then being delivered. If one
        of the clocks cannot be moved, none is. Raises ArgumentError if the argument is not a span of time."""
        return await self._move(_milliseconds(by, ms))

    async def now(self) -> datetime:
        """Return the brokers' time, the earliest if they differ."""
        return await self._move(0)

    async def _move(self, ms: int) -> datetime:
        pool = Pool(self._connect)
        try:
            addresses = await NameServers(self._nameserver, pool).brokers(timeout=self._timeout)
            times = await self._move_all(pool, addresses, 0)
            if ms:
                times = await self._move_all(pool, addresses, ms)
        finally:
            await pool.close()
        return datetime.fromtimestamp(min(times) / 1000, UTC).astimezone()

    async def _move_all(self, pool: Pool, addresses: list[str], ms: int) -> list[int]:
        return await asyncio.gather(*(self._move_one(pool, address, ms) for address in addresses))

    async def _move_one(self, pool: Pool, address: str, ms: int) -> int:
        connection = await pool.get(address)
        answer = await connection.request(RequestCode.MOVE_CLOCK, MoveClock(ms), timeout=self._timeout)
        if answer.code != ResponseCode.SUCCESS:
            raise error_of(answer, address)
        return typed_header(answer, MoveClockResponse, address).now

    async def _connect(self, address: str) -> ClientConnection:
        return await connect(
            address,
            codec="json",
            on_request=lambda command: None,
            timeout=self._timeout,
            signer=self._signer,
            tls=self._tls,
        )


def _milliseconds(by: str | timedelta | None, ms: int | None) -> int:
    if (by is None) == (ms is None):
        raise ArgumentError("give one span of time: text such as '2h', a timedelta, or ms=")
    if ms is not None:
        if not isinstance(ms, int) or isinstance(ms, bool) or ms < 0:
            raise ArgumentError(f"ms={ms!r}: give a whole number of milliseconds, 0 or more")
        return ms
    if not isinstance(by, str | timedelta):
        raise ArgumentError(f"{by!r} has no unit; give text such as '2h', a timedelta, or ms=")
    return span_ms(by)
