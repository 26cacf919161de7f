"""Registering with external name servers (`namesrvAddr`), RocketMQ's own included: at start, every
registerNameServerPeriod, and at once when topics change."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import structlog

from broker.connection import Connection
from broker.topics import Topics
from protocol.codes import RequestCode, ResponseCode
from protocol.command import Command
from protocol.headers import BrokerIdentity, RegisterBroker
from protocol.registration import encode_registration

log = structlog.get_logger(__name__)

TIMEOUT_SECONDS = 6.0


class Registration:
    """Keeps one broker registered with some name servers."""

    def __init__(
        self,
        identity: BrokerIdentity,
        addresses: list[tuple[str, int]],
        topics: Topics,
        period: float,
        make_connection: Callable[[], Connection],
    ) -> None:
        """`period` in seconds."""
        self._identity = identity
        self._topics = topics
        self._period = period
        self._make_connection = make_connection
        self._connections: dict[tuple[str, int], Connection | None] = dict.fromkeys(addresses)
        self._is_known_down: set[tuple[str, int]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to register, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._keep_registered())

    def register_now(self) -> asyncio.Future[None]:
        """Register with all name servers; done when each has answered, or could not be reached."""
        return asyncio.ensure_future(self._register_all())

    async def stop(self) -> None:
        """Tell the name servers that the broker goes."""
        if self._task is not None:
            self._task.cancel()
        command = Command(code=RequestCode.UNREGISTER_BROKER, ext=self._identity.to_ext())
        connections = [connection for connection in self._connections.values() if connection is not None]
        await asyncio.gather(*(_ask(connection, command, 1.0) for connection in connections))
        for connection in connections:
            connection.close()

    async def _keep_registered(self) -> None:
        while True:
            await self._register_all()
            await asyncio.sleep(self._period)

    async def _register_all(self) -> None:
        await asyncio.gather(*(self._register(address) for address in self._connections))

    async def _register(self, address: tuple[str, int]) -> None:
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
        command = Command(code=RequestCode.REGISTER_BROKER, ext=header.to_ext(), body=body)
        try:
            connection = await self._connection(address)
            answer = await _ask(connection, command, TIMEOUT_SECONDS)
            why = "no answer" if answer is None else answer.remark if answer.code != ResponseCode.SUCCESS else None
        except OSError as error:
            why = str(error)
        self._note(address, why)

    async def _connection(self, address: tuple[str, int]) -> Connection:
        connection = self._connections[address]
        if connection is None or connection.is_closed:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(self._make_connection, *address)
            self._connections[address] = connection
        return connection

    def _note(self, address: tuple[str, int], why: str | None) -> None:
        """Say when a name server is lost or found, not every time."""
        name = f"{address[0]}:{address[1]}"
        if why is not None:
            if address not in self._is_known_down:
                log.warning("name_server_lost", name_server=name, reason=why)
            self._is_known_down.add(address)
        elif address in self._is_known_down:
            self._is_known_down.discard(address)
            log.info("name_server_found", name_server=name)


async def _ask(connection: Connection, command: Command, timeout: float) -> Command | None:
    answered: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()

    def on_response(answer: Command | None) -> None:
        if not answered.done():
            answered.set_result(answer)

    connection.request(command, timeout, on_response)
    return await answered
