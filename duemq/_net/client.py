"""The part that producers and consumers share: connections, routes, heartbeats, requests and their answers.

Each producer and each consumer has its own client, with its own client id and connections: members of one group in one
process need different ids, and a slow reader must not hold up a sender.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from duemq._net.complaints import Complaints
from duemq._net.connection import ClientConnection, Codec, OnRequest, check_codec, connect
from duemq._net.pool import Pool
from duemq._net.routes import NameServers, Routes
from duemq._values.failures import is_passed_on
from duemq._values.intervals import Intervals
from duemq.errors import DueMQError, PeerError, RequestTimeoutError, error_of
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import BodyFormatError, FieldError
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Body, Command
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import HeartbeatData
from duemq.protocol.requests.headers import Header, decode_ext

if TYPE_CHECKING:
    from duemq.protocol.requests.signature import Signer

H = TypeVar("H", bound=Header)
T = TypeVar("T")

SUCCESS: Final = (ResponseCode.SUCCESS,)

log = logging.getLogger("duemq.client")


class Client:
    """Talks to name servers and brokers on behalf of one producer or consumer.

    `heartbeat` returns the heartbeat for a client id. It is sent as the first request on each connection to a broker,
    so that the broker knows the client before it gets other requests.
    """

    def __init__(
        self,
        nameserver: str,
        *,
        codec: Codec,
        heartbeat: Callable[[str], HeartbeatData],
        on_request: OnRequest = lambda command: None,
        intervals: Intervals | None = None,
        signer: Signer | None = None,
        tls: ssl.SSLContext | None = None,
        client_id: str | None = None,
        on_reconnected: Callable[[str], None] = lambda address: None,
        complaints: Complaints | None = None,
    ) -> None:
        """`signer`: signs each request, also those to name servers. `tls`: for all connections; None: no TLS.
        `client_id`: None: a new id. `on_reconnected`: called with the address of a broker after a connection to it was
        opened that is not the first, and after the heartbeat over it. `complaints`: where failing heartbeats are noted;
        None: they are only logged."""
        check_codec(codec)
        self._tls = tls
        self._signer = signer
        self.client_id = client_id or f"{socket.gethostname()}@{os.getpid()}#{os.urandom(5).hex()}"
        """The id that distinguishes this client from all others, above all from the other members of its group."""
        self.intervals = intervals or Intervals()
        self._codec = codec
        self._heartbeat = heartbeat
        self._on_request = on_request
        self._on_reconnected = on_reconnected
        self._nameserver_pool = Pool(self._connect)
        self._brokers = Pool(self._open_broker)
        self._known: set[str] = set()
        """The addresses of brokers to which there has been a connection."""
        self._nameservers = NameServers(nameserver, self._nameserver_pool)
        self.routes = Routes(self._nameservers, self.intervals.request_timeout)
        self.tasks = Tasks()
        self._complaints = complaints or Complaints(log)

    async def start(self) -> None:
        """Connect to a name server, and begin to send heartbeats. Raises ConnectError."""
        await self._nameservers.check(timeout=self.intervals.connect_timeout)
        self.tasks.supervise(self._keep_up, "duemq heartbeats", self.intervals)
        self.tasks.supervise(self._look_for_silence, "duemq looks for silent brokers", self.intervals)

    async def stop(self) -> None:
        """End the background tasks and close all connections; the client can be started again."""
        await self.tasks.close()
        for pool in (self._brokers, self._nameserver_pool):
            for address in pool.addresses:
                pool.drop(address)

    async def close(self) -> None:
        """End the background tasks and close all connections, for good."""
        await self.tasks.close()
        await self._brokers.close()
        await self._nameserver_pool.close()

    async def broker(self, address: str) -> ClientConnection:
        """Return the connection to a broker; open it if necessary. Raises ConnectError, ClosedError, and the errors of
        the first heartbeat."""
        return await self._brokers.get(address)

    def open_connection(self, address: str) -> ClientConnection | None:
        """Return the connection to a broker, or None if it is not open."""
        return self._brokers.open_one(address)

    async def all_brokers(self) -> list[str]:
        """Return the addresses of all brokers that the name servers know. Raises what `NameServers.brokers` raises."""
        return await self._nameservers.brokers(timeout=self.intervals.request_timeout)

    async def brokers_by_name(self) -> dict[str, dict[int, str]]:
        """Return all brokers that the name servers know, see `NameServers.brokers_by_name`."""
        return await self._nameservers.brokers_by_name(timeout=self.intervals.request_timeout)

    @property
    def broker_addresses(self) -> list[str]:
        """The addresses of the brokers with an open connection."""
        return self._brokers.addresses

    async def call(
        self,
        address: str,
        code: int,
        header: Header | None = None,
        body: Body = b"",
        *,
        timeout: float | None = None,
        expected: Iterable[int] = SUCCESS,
    ) -> Command:
        """Send a request to a broker and return its answer, whose code is one of `expected`. `timeout`: in seconds, by
        default `Intervals.request_timeout`.

        Raises a BrokerError for any other code, and what `broker` and `ClientConnection.request` raise.
        """
        connection = await self._brokers.get(address)
        answer = await connection.request(code, header, body, timeout=timeout or self.intervals.request_timeout)
        if answer.code not in expected:
            raise error_of(answer, address)
        return answer

    async def beat(self, addresses: Iterable[str]) -> None:
        """Send a heartbeat to brokers. A failure is logged once until it is over. If a broker does not answer, the
        connection to it is dropped."""
        connected = set(self._brokers.addresses)
        await asyncio.gather(*(self._beat_one(address, address in connected) for address in set(addresses)))

    async def _beat_one(self, address: str, connected: bool) -> None:
        try:
            connection = await self._brokers.get(address)
            if connected:
                await self._send_heartbeat(connection)
        except RequestTimeoutError as error:
            log.warning("%s; dropping the connection", error)
            self._brokers.drop(address)
        except DueMQError as error:
            self._complaints.raise_(f"heartbeats to {address}", error)
        else:
            self._complaints.resolve(f"heartbeats to {address}")

    async def _send_heartbeat(self, connection: ClientConnection) -> None:
        body = fastjson.dumps(self._heartbeat(self.client_id))
        answer = await connection.request(RequestCode.HEART_BEAT, None, body, timeout=self.intervals.request_timeout)
        if answer.code != ResponseCode.SUCCESS:
            raise error_of(answer, connection.address)

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(self.intervals.heartbeat)
            await self.routes.refresh()
            await self.beat(self._brokers.addresses)

    async def _look_for_silence(self) -> None:
        """Send heartbeats to brokers that have been silent for `Intervals.silence` while requests to them are pending.
        A machine that has failed, or a process that hangs, does not close its connections."""
        while True:
            await asyncio.sleep(self.intervals.silence / 2)
            await self.beat(self._brokers.silent(self.intervals.silence))

    async def _connect(self, address: str) -> ClientConnection:
        return await connect(
            address,
            codec=self._codec,
            on_request=self._on_request,
            timeout=self.intervals.connect_timeout,
            signer=self._signer,
            tls=self._tls,
        )

    async def _open_broker(self, address: str) -> ClientConnection:
        connection = await self._connect(address)
        try:
            await self._send_heartbeat(connection)
        except BaseException:
            connection.close()
            raise
        self._complaints.resolve(f"heartbeats to {address}")
        if address in self._known:
            self._on_reconnected(address)
        self._known.add(address)
        return connection


class Tasks:
    """Background tasks, which are ended together. If a task fails, this is logged, since no code waits for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` until it ends or `close` is called."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def supervise(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str, intervals: Intervals
    ) -> asyncio.Task[None]:
        """Run `work` until it returns or `close` is called. If it fails, this is logged, and `work` is called again
        after a pause."""
        return self.start(_insist(work, name, intervals), name)

    async def close(self) -> None:
        """Cancel all tasks, except the current one, and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the task %s failed", task.get_name(), exc_info=task.exception())


async def _insist(work: Callable[[], Coroutine[Any, Any, None]], name: str, intervals: Intervals) -> None:
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        begin = loop.time()
        try:
            return await work()
        except BaseException as error:
            if is_passed_on(error):
                raise
            log.exception("the task %s failed, and is restarted", name)
        failures = failures + 1 if loop.time() - begin < intervals.longest_pause else 1
        await asyncio.sleep(intervals.pause(failures))


def typed_header(answer: Command, header_type: type[H], address: str) -> H:
    """Return the typed header of an answer. Raises PeerError."""
    try:
        return decode_ext(header_type, answer.ext)
    except FieldError as error:
        raise PeerError(address, str(error)) from None


def typed_body(answer: Command, body_type: type[T], address: str) -> T:
    """Return the typed body of an answer. Raises PeerError."""
    try:
        return bodies.decode(answer.body, body_type)
    except BodyFormatError as error:
        raise PeerError(address, str(error)) from None
