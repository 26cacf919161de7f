"""Registration with external name servers (`namesrvAddr`), including RocketMQ's: at start, every
registerNameServerPeriod, and immediately when topics change.

Each name server has a loop of its own, so that one that is unreachable or does not answer does not delay registration
with the others, which forget a broker after 120 s. Changes made during a registration are all sent in the next one.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from duemq.broker.net.connection import Connection
from duemq.broker.tables.topics import Topics
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import BrokerIdentity, RegisterBroker
from duemq.protocol.requests.registration import encode_registration
from duemq.protocol.requests.signature import Signer

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 6.0
GOODBYE_SECONDS = 1.0
_PAUSE_A_BYTE = 25e-9
"""Pause between two registrations, in seconds per byte of one: ten times what encoding takes. It keeps the broker from
being busy with registrations while thousands of topics are created."""
_SHORTEST_PAUSE = 0.001

Address = tuple[str, int]
Connect = Callable[[Address], Awaitable[Connection]]
"""Opens a connection. Raises OSError."""


class Registrar:
    """Keeps one broker registered with some name servers."""

    def __init__(
        self,
        identity: BrokerIdentity,
        addresses: list[Address],
        topics: Topics,
        *,
        period: float,
        connect: Connect,
        signer: Signer | None = None,
    ) -> None:
        """`period` in seconds. `signer`: signs the requests, for name servers with access control."""
        self._signer = signer
        self._identity = identity
        self._topics = topics
        self._servers = [_NameServer(address, period, connect, self._request) for address in addresses]

    def start(self) -> None:
        """Begin to register, in the background: a task for each server, since a task group would end the others'
        registration when one fails."""
        for server in self._servers:
            server.start()

    def register_now(self) -> asyncio.Future[None]:
        """Register with all name servers; the future is done when each has answered or failed. Name servers known to be
        down are tried but not waited for."""
        waiting = [server.register_now() for server in self._servers]
        return asyncio.ensure_future(_wait_for_all([each for each in waiting if each is not None]))

    async def stop(self) -> None:
        """Tell the name servers that the broker stops."""
        goodbye = self._signed(Command(code=RequestCode.UNREGISTER_BROKER, ext=self._identity.to_ext()))
        await asyncio.gather(*(server.stop(goodbye) for server in self._servers))

    def _request(self) -> Command:
        """Return a registration with the current topics."""
        body = encode_registration(self._topics.announcement())
        identity = self._identity
        host, _, port = identity.broker_addr.rpartition(":")
        header = RegisterBroker(
            broker_name=identity.broker_name,
            broker_addr=identity.broker_addr,
            cluster_name=identity.cluster_name,
            ha_server_addr=f"{host}:{int(port) + 1}",
            broker_id=identity.broker_id,
            body_crc32=zlib.crc32(body) & 0x7FFFFFFF,
        )
        return self._signed(Command(code=RequestCode.REGISTER_BROKER, ext=header.to_ext(), body=body))

    def _signed(self, command: Command) -> Command:
        if self._signer is not None:
            self._signer.sign(command.ext, command.body)
        return command


class _NameServer:
    """One name server. Its loop survives all errors."""

    def __init__(self, address: Address, period: float, connect: Connect, request: Callable[[], Command]) -> None:
        self._address = address
        self._name = f"{address[0]}:{address[1]}"
        self._period = period
        self._connect = connect
        self._request = request
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        """Futures to resolve when the next registration has ended."""
        self._why_down: str | None = None
        self._pause = 0.0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_registered())

    def register_now(self) -> asyncio.Future[None] | None:
        """Return a future that is done when a registration that begins from now on has ended; None for a server known
        to be down."""
        self._wanted.set()
        if self._why_down is not None or self._task is None:
            return None
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        return ended

    async def stop(self, goodbye: Command) -> None:
        if self._task is not None:
            self._task.cancel()
        self._tell_those_who_wait(self._waiting)
        connection = self._connection
        if connection is not None and not connection.is_closed:
            with suppress(Exception):
                await _ask(connection, goodbye, GOODBYE_SECONDS)
            connection.close()

    async def _keep_registered(self) -> None:
        while True:
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            try:
                self._note(await self._register())
            finally:
                self._tell_those_who_wait(waiting)
            if self._pause >= _SHORTEST_PAUSE:
                await asyncio.sleep(self._pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period):
                    await self._wanted.wait()

    async def _register(self) -> str | None:
        """Register once; return the reason if that failed, else None."""
        try:
            connection = await self._connected()
            request = self._request()
            self._pause = len(request.body) * _PAUSE_A_BYTE
            answer = await _ask(connection, request, ANSWER_SECONDS)
        except TimeoutError:
            return f"no connection within {CONNECT_SECONDS:g} s"
        except OSError as error:
            return str(error)
        except Exception as error:  # such as a table of topics that does not fit into a frame
            return f"{type(error).__name__}: {error}"
        if answer is None:
            connection.close()
            return f"no answer within {ANSWER_SECONDS:g} s, or the connection was lost"
        return (answer.remark or f"code {answer.code}") if answer.code != ResponseCode.SUCCESS else None

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.is_closed:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._connection = await self._connect(self._address)
        return self._connection

    def _note(self, why: str | None) -> None:
        """Log when the name server is lost, with the reason, and when it is found again, but not every attempt."""
        if why == self._why_down:
            return
        self._why_down = why
        if why is None:
            log.info("name_server_found", name_server=self._name)
        else:
            log.warning("name_server_lost", name_server=self._name, reason=why)

    @staticmethod
    def _tell_those_who_wait(waiting: list[asyncio.Future[None]]) -> None:
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)


async def _wait_for_all(waiting: list[asyncio.Future[None]]) -> None:
    for each in waiting:
        await each


async def _ask(connection: Connection, command: Command, timeout: float) -> Command | None:
    answered: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()

    def on_response(answer: Command | None) -> None:
        if not answered.done():
            answered.set_result(answer)

    connection.request(command, timeout, on_response)
    return await answered
