"""A connection to a broker or name server: it sends and receives frames, matches answers to requests, and enforces
time-outs.

The codec "auto" of the headers: the first request is sent in JSON, which every peer reads. The header of a duemq
broker's answer names Python as its language, and from then on requests are sent in MessagePack. RocketMQ's brokers name
Java, and would close the connection at an unknown codec.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from duemq._net import timeouts
from duemq._net.tls import reason_of
from duemq.errors import ArgumentError, ConnectError, ConnectionLostError, DueMQError, PeerError, RequestTimeoutError
from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, LANGUAGE, RequestCode, ResponseCode
from duemq.protocol.errors import FrameError, LocalProtocolError
from duemq.protocol.frames import codec as frame_codec
from duemq.protocol.frames.command import Body, Command
from duemq.protocol.frames.frame import JSON, MSGPACK, FrameReader
from duemq.protocol.requests.headers import Header, response
from duemq.protocol.requests.in_flight import InFlightRequests

if TYPE_CHECKING:
    from duemq.protocol.requests.signature import Signer

Codec = Literal["auto", "json", "msgpack"]

MAX_IN_FLIGHT: Final = 16_384
"""Maximum number of requests in flight on one connection; further requests wait for their turn."""

WRITE_BYTES: Final = 64 * 1024
"""The frames of one turn of the event loop are written together, but as soon as they reach this size."""

DEFAULT_PORT: Final = 9876

_KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""An idle connection to a machine that has failed ends after 25 s. While requests are pending, `Client` looks for
silent brokers itself."""

_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")

log = logging.getLogger("duemq.connection")


class ClientConnection(asyncio.Protocol):
    """A connection; `connect` opens one."""

    def __init__(self, address: str, codec: Codec, on_request: OnRequest, signer: Signer | None) -> None:
        self.address = address
        """The address of the peer, "host:port"."""
        self._signer = signer
        self.codec = MSGPACK if codec == "msgpack" else JSON
        """The codec in which requests are sent now."""
        self._choice = codec
        self._on_request = on_request
        self._has_answered = False
        self._frames = FrameReader()
        self._in_flight: InFlightRequests[asyncio.Future[Command]] = InFlightRequests()
        self._turns = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._end_reason: tuple[type[ConnectionLostError | PeerError], str] | None = None
        self._lost = asyncio.Event()
        self._heard_at = asyncio.get_running_loop().time()
        """When data last arrived from the peer, in seconds of the loop's clock."""
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        """Fires at the deadline of the first pending request, or earlier."""

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and self._end_reason is None

    @property
    def silence(self) -> float:
        """The seconds since data last arrived from the peer, while requests are pending; 0 if no request is."""
        return asyncio.get_running_loop().time() - self._heard_at if self._in_flight else 0.0

    async def request(self, code: int, header: Header | None = None, body: Body = b"", *, timeout: float) -> Command:
        """Send a request and wait for the answer, whatever its code. `timeout` is in seconds.

        Raises RequestTimeoutError, ConnectionLostError and PeerError, and ArgumentError if the request is too large for
        a frame.
        """
        # One timer of the connection serves all requests, which is cheaper than an asyncio.timeout for each.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            if self._turns.locked() or not self._writable.is_set():
                async with timeouts.timeout_at(deadline):
                    await self._wait_for_turn()
            else:
                await self._turns.acquire()
            try:
                answer: asyncio.Future[Command] = loop.create_future()
                opaque = self._in_flight.add(answer, deadline)
                try:
                    self._write(self._command(code, opaque, header, body, 0), self.codec)
                    if self._timer is None or self._timer.when() > deadline:
                        self._watch(loop, deadline)
                    return await answer
                finally:
                    self._in_flight.take(opaque)
            finally:
                self._turns.release()
        except TimeoutError:
            raise RequestTimeoutError(self.address, _name(code), timeout) from None

    async def send_oneway(self, code: int, header: Header | None = None, body: Body = b"", *, timeout: float) -> None:
        """Send a request that has no answer; return when it is queued for writing. Raises RequestTimeoutError if that
        takes longer than `timeout`, in seconds, and the other errors of `request`."""
        try:
            async with timeouts.timeout(timeout):
                await self._writable.wait()
        except TimeoutError:
            raise RequestTimeoutError(self.address, _name(code), timeout) from None
        self._write(self._command(code, self._in_flight.new_opaque(), header, body, FLAG_ONEWAY), self.codec)

    def close(self) -> None:
        """Close the connection after the written data is sent. Pending requests fail with ConnectionLostError."""
        self._end(ConnectionLostError, "closed by this client")

    async def wait_closed(self, timeout: float = 1.0) -> None:
        """Wait until the connection is closed. Abort it if the peer does not accept the written data within `timeout`
        seconds."""
        try:
            async with timeouts.timeout(timeout):
                await self._lost.wait()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
            await self._lost.wait()

    async def _wait_for_turn(self) -> None:
        await self._turns.acquire()
        try:
            await self._writable.wait()
        except BaseException:
            self._turns.release()
            raise

    def _watch(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(deadline, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the requests fail whose deadline has passed."""
        self._timer = None
        for answer in self._in_flight.expire(loop.time()):
            if not answer.done():
                answer.set_exception(TimeoutError())
        deadline = self._in_flight.first_deadline()
        if deadline is not None:
            self._watch(loop, deadline)

    def _command(self, code: int, opaque: int, header: Header | None, body: Body, flag: int) -> Command:
        ext = header.to_ext() if header is not None else {}
        if self._signer is not None:
            self._signer.sign(ext, body)
        return Command(code=code, opaque=opaque, ext=ext, body=body, flag=flag)

    def _write(self, command: Command, codec: int) -> None:
        if self._end_reason is not None:
            raise self._error()
        try:
            frame = frame_codec.encode(command, codec)
        except LocalProtocolError as error:
            raise ArgumentError(str(error)) from None
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write_out)
        self._unwritten.append(frame)
        self._unwritten_bytes += len(frame)
        if self._unwritten_bytes >= WRITE_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        """Write the frames of this turn of the event loop, with one system call for all."""
        if self._unwritten:
            frames, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
            assert self._transport is not None
            if not self._transport.is_closing():
                self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    # --- called by the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # A cast, since uvloop's transports are not instances of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            for level, option, value in _KEEP_ALIVE:
                connected.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        """Split the data into frames, and handle the responses and requests in them."""
        self._heard_at = asyncio.get_running_loop().time()
        for frame in self._frames.receive_data(data):
            try:
                command = frame_codec.decode(frame)
            except FrameError as error:
                self._end(PeerError, str(error))
                return
            if command.is_response:
                self._response_received(command)
            else:
                self._request_received(command, frame[0])
        if self._frames.error is not None:
            self._end(PeerError, str(self._frames.error))

    def eof_received(self) -> None:
        """Note that the peer closed the connection."""
        self._frames.receive_eof()

    def pause_writing(self) -> None:
        """Make requests wait, because the peer reads more slowly than this client writes."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Stop making requests wait."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let all pending requests fail, and wake `wait_closed`."""
        self._end(ConnectionLostError, self._why_closed(exc))
        self._lost.set()

    # --------------------------------------------------------------------------------------------------------------

    def _why_closed(self, error: Exception | None) -> str:
        if self._choice == "msgpack" and not self._has_answered:
            return "closed at a MessagePack header, which only duemq brokers read; use the codec 'auto' or 'json'"
        if self._frames.error is not None:
            return str(self._frames.error)
        if error is not None:
            return _reason(error)
        return "closed by the other side"

    def _response_received(self, command: Command) -> None:
        self._has_answered = True
        if self._choice == "auto" and command.language == LANGUAGE:
            self.codec = MSGPACK
        answer = self._in_flight.take(command.opaque)
        if answer is not None and not answer.done():
            answer.set_result(command)

    def _request_received(self, command: Command, codec: int) -> None:
        try:
            answer = self._on_request(command)
        except Exception as error:
            # The error is logged here, since it must not end the connection for all other requests.
            log.exception("cannot handle a request of %s, code %d", self.address, command.code)
            answer = response(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
        if command.is_oneway or not self.is_open:
            return
        if answer is None:
            answer = response(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"this client does not support request {command.code}"
            )
        answer.opaque = command.opaque
        answer.flag = FLAG_RESPONSE
        self._write(answer, codec)

    def _end(self, kind: type[ConnectionLostError | PeerError], why: str) -> None:
        if self._end_reason is not None:
            return
        self._write_out()
        self._end_reason = (kind, why)
        self._writable.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for answer in self._in_flight.clear():
            if not answer.done():
                answer.set_exception(self._error())
        if self._transport is not None:
            self._transport.close()

    def _error(self) -> DueMQError:
        # Each waiter gets a new exception: one that is raised in several tasks would collect all their tracebacks.
        assert self._end_reason is not None
        kind, why = self._end_reason
        return kind(self.address, why)


OnRequest = Callable[[Command], Command | None]
"""A function that handles a request from the broker. It returns the answer, or None if the request is unknown or needs
no answer."""


async def connect(
    address: str,
    *,
    codec: Codec,
    on_request: OnRequest,
    timeout: float,
    signer: Signer | None = None,
    tls: ssl.SSLContext | None = None,
) -> ClientConnection:
    """Open a connection to "host:port". `timeout` is in seconds. `signer` signs each request. `tls`: None for no TLS.
    Raises ConnectError, and ArgumentError for an invalid address."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    try:
        async with timeouts.timeout(timeout):
            _, connection = await loop.create_connection(
                lambda: ClientConnection(address, codec, on_request, signer), host, port, ssl=tls
            )
    except TimeoutError:
        raise ConnectError(address, f"no answer within {timeout:g} s") from None
    except (OSError, ValueError) as error:  # ValueError: the host is not a valid name
        reason = _reason(error)
        if tls is not None and isinstance(error, ConnectionResetError | ConnectionAbortedError):
            reason = f"it closed the connection during the TLS handshake; does it have TLS? ({reason})"
        raise ConnectError(address, reason) from None
    return connection


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port", "host" or "[::1]:port". Raises ArgumentError."""
    host, separator, port = address.strip().rpartition(":")
    if not separator or port.endswith("]"):
        host, port = address.strip(), str(DEFAULT_PORT)
    number = port.lstrip("0")  # of a port at most 5 digits: Python refuses to convert thousands of them
    if not host or not port.isascii() or not port.isdigit() or len(number) > 5 or not 0 < int(number or 0) < 65536:
        raise ArgumentError(f"{address!r} is not an address; write it as host:port")
    return host.removeprefix("[").removesuffix("]"), int(number)


def check_codec(codec: Codec) -> None:
    """Raise ArgumentError unless the value is one of the codecs."""
    if not isinstance(codec, str) or codec not in get_args(Codec):  # a NumPy array is compared element by element
        raise ArgumentError(f"codec={codec!r}: give one of {', '.join(get_args(Codec))}")


def _reason(error: Exception) -> str:
    """Return the operating system's text for an error: asyncio adds addresses and numbers to it, and joins the errors
    of a host's several addresses into one text."""
    if isinstance(error, ssl.SSLError):
        return reason_of(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _ERRNO.search(str(error))):
        number = int(found[1])
    if number is not None and number > 0:
        return os.strerror(number)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _name(code: int) -> str:
    try:
        return RequestCode(code).name
    except ValueError:
        return f"the request {code}"
