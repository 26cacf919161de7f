"""One client's TCP connection: moves bytes between the socket and the router, and bounds the memory that it holds.

Backpressure: a client that does not read its responses fills the socket, then the transport's buffer up to its
high-water mark. From then on none of its requests is handled, and its socket is not read. So a connection holds at most
one read, one partial frame and the responses of one slice.

The unfinished frames of all connections have one limit (see `input_budget`), their unread responses another (see
`output_budget`); beyond it, one of the connections that hold most is closed.

The requests of a read are handled as far as the turn of the event loop has time for them. The rest wait in the backlog,
and the socket is not read, until `RequestTurns` gives the connection its share. The backlog of a closing connection is
dropped: nobody would read the answers.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Callable
from typing import Final, Protocol, cast

import structlog

from duemq.broker.errors import TlsRefused
from duemq.broker.net.limits.input_budget import LARGE_FRAME_BYTES, InputBudget
from duemq.broker.net.limits.output_budget import OutputBudget
from duemq.broker.net.request_turns import IsOver, RequestTurns
from duemq.broker.net.tls import TlsEnd, TlsServer, check_first_byte
from duemq.protocol.codes import FLAG_ONEWAY
from duemq.protocol.errors import FrameError, LocalProtocolError
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, Frame, FrameReader
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.requests.in_flight import InFlightRequests

log = structlog.get_logger(__name__)

WRITE_HIGH_BYTES: Final = 256 * 1024
"""Response bytes buffered for a client before its requests have to wait."""
LARGE_RESPONSE_BYTES: Final = 64 * 1024
"""What one write of this size or more passes to the transport stays in memory as a whole until its last byte is sent.
Until then the client counts as stalled, however little is left."""
FEW_REQUESTS: Final = 16
"""A backlog of up to this many requests waits in the lane for little work."""
MAX_REQUESTS: Final = 128
"""How many of the broker's own requests may wait for one client's responses at the same time."""

ResponseHandler = Callable[[Command | None], None]
"""Called with the response, or with None if there was none."""


class FrameHandler(Protocol):
    """The receiver of a connection's frames."""

    def handle(self, connection: Connection, frames: list[Frame], position: int, is_over: IsOver) -> int:
        """Handle frames in order, from a position on, and return the position behind the last one handled. Stop early
        if the connection cannot take more responses, or, after at least one frame, if `is_over` returns True."""

    def connection_made(self, connection: Connection) -> None:
        """Called when a client has connected."""

    def connection_lost(self, connection: Connection) -> None:
        """Called when a connection is lost."""

    def complain(self, event: str, connection: Connection, reason: str) -> None:
        """Log a client's error, unless there are too many such lines."""


class Connection(asyncio.BufferedProtocol):
    """The asyncio side of a connection. `host` is the client's address, `peer` is "address:port"; `born_host` is the
    same in the form of records."""

    __slots__ = (
        "_backlog",
        "_budget",
        "_handler",
        "_in_flight",
        "_is_held_back",
        "_is_over",
        "_is_plain",
        "_is_queued",
        "_large",
        "_loop",
        "_output",
        "_paused",
        "_position",
        "_reader",
        "_reads",
        "_tls",
        "_tls_server",
        "_transport",
        "_turns",
        "_unfinished_bytes",
        "_waiters",
        "_waits_to_read",
        "born_host",
        "host",
        "is_closed",
        "is_new",
        "is_stranger",
        "last_codec",
        "last_read",
        "peer",
        "under_way",
    )

    def __init__(
        self,
        handler: FrameHandler,
        loop: asyncio.AbstractEventLoop,
        budget: InputBudget,
        output: OutputBudget,
        turns: RequestTurns,
        *,
        tls: TlsServer | None = None,
        is_outgoing: bool = False,
    ) -> None:
        """`tls`: decides whether the client may or must use TLS; None if there is nothing to decide, for example on a
        connection that the broker opened. `is_outgoing`: whether the broker opened the connection."""
        self._handler = handler
        self._loop = loop
        self._budget = budget
        self._output = output
        self._turns = turns
        self._reader = FrameReader()
        self._unfinished_bytes = 0
        self._is_over = False
        """Whether no more requests are accepted."""
        self._large = -1
        """Bytes held of a large frame, -1 without one; the value last given to the budget."""
        self._waits_to_read = False
        self._reads = True
        self._transport: asyncio.Transport | None = None
        self._tls_server = tls
        self._is_plain = tls is None
        """Whether bytes are read and written as they are."""
        self._tls: TlsEnd | None = None
        self._backlog: list[Frame] = []
        self._position = 0
        """The number of backlog frames that are handled."""
        self._is_queued = False
        """Whether the backlog waits for its turn."""
        self._is_held_back = False
        self.under_way = 0
        """Bytes of requests that are begun and not answered yet; see `admission`."""
        self._paused = False
        self._waiters: list[Callable[[Connection], None]] = []
        """Called once when the connection takes answers again."""
        self._in_flight: InFlightRequests[ResponseHandler] | None = None
        self.host = ""
        self.peer = ""
        self.born_host = b""
        self.is_closed = False
        self.is_new = not is_outgoing
        """Whether none of the client's requests has been handled yet; see `limits.connections`."""
        self.is_stranger = True
        """True until an account, or a peer whose address needs none, makes a request over the connection. Without
        access control it stays true."""
        self.last_codec = JSON
        self.last_read = loop.time()
        """When bytes last arrived, in seconds of the loop's clock."""

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and the peer's address; called by asyncio once the client has connected."""
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        # A client that is already gone has no peer name.
        host, port = (transport.get_extra_info("peername") or ("0.0.0.0", 0))[:2]
        self.host = host
        self.peer = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
        self.born_host = pack_host(host, port)
        self._handler.connection_made(self)
        if not port:
            transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read, which all connections share; called by asyncio."""
        return self._budget.buffer() if self._is_plain else self._budget.short_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take the first `nbytes` bytes of the buffer that `get_buffer` returned; called by asyncio."""
        self.data_received(bytes(self._budget.buffer()[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take the bytes of a read, and handle all or some of the requests in them."""
        self.last_read = self._loop.time()
        if self._is_over:
            return
        if not self._is_plain:
            data = self._open(data)
            if not data:
                return
        self._take(data)

    def _take(self, data: bytes) -> None:
        reader = self._reader
        frames = reader.receive_data(data)
        if reader.buffered != self._unfinished_bytes:
            self._hold(reader.buffered)
        if self._backlog:
            self._backlog += frames
            return
        if frames:
            is_over = self._turns.begin()
            position = 0 if is_over is None else self._handler.handle(self, frames, 0, is_over)
            if position < len(frames):
                self._leave(frames, position)
                return
        if reader.error is not None:
            self.refuse(reader.error)

    def eof_received(self) -> bool:
        """Have asyncio close the connection once the client has closed its side: RocketMQ's clients do not half-close
        connections."""
        self._reader.receive_eof()
        if self._reader.error is not None:
            self._handler.complain("connection_broken", self, str(self._reader.error))
        return False

    def pause_writing(self) -> None:
        """Handle no more requests for now; called by asyncio if the client reads its responses too slowly."""
        self._paused = True
        self._hold_output(0)

    def resume_writing(self) -> None:
        """Handle requests again; called by asyncio once the client has read most of its responses."""
        self._paused = False
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._output.release(self)
        self._tell_waiters()
        self._queue_backlog()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that the connection holds; called by asyncio once it is closed."""
        self.is_closed = True
        self._transport = None
        self._drop_backlog()
        self._free_frame()
        self._output.release(self)
        self._waiters.clear()
        if self._in_flight is not None:
            for waiter in self._in_flight.clear():
                waiter(None)
        self._handler.connection_lost(self)

    # --- for handlers

    @property
    def is_stalled(self) -> bool:
        """Whether the client reads its responses too slowly to be sent more."""
        return self._paused

    @property
    def takes_answers(self) -> bool:
        """Whether a request of the client may be handled now: the client reads its responses, and the connection is
        neither held back by `admission` nor closing."""
        return (
            not self._paused
            and not self._is_held_back
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def when_takes_answers(self, then: Callable[[Connection], None]) -> None:
        """Call `then` once, with this connection, when it takes answers again; it must not take any now. Not called if
        the connection is lost before."""
        self._waiters.append(then)

    @property
    def buffered(self) -> int:
        """Bytes of responses that the client has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def queued(self) -> int:
        """Bytes that the kernel holds for the client. A changed number shows that the client has read some, long before
        there is room for more of `buffered`. -1 if unknown."""
        socket = self._transport.get_extra_info("socket") if self._transport is not None else None
        if socket is None:
            return -1
        try:
            return int.from_bytes(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return -1

    def write(self, data: bytes) -> None:
        """Send the bytes of one or several whole frames."""
        transport = self._transport
        if transport is None:
            return
        if len(data) >= LARGE_RESPONSE_BYTES and not self._paused:
            transport.set_write_buffer_limits(high=0)
            transport.write(data)
            if not self._paused:
                transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        else:
            transport.write(data)
        if self._paused:
            self._hold_output(len(data))

    def write_many(self, frames: list[bytes]) -> None:
        """Send frames."""
        self.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def notify(self, command: Command) -> None:
        """Send a one-way request to the client, unless it is stalled."""
        if self._transport is None or self._paused:
            return
        if self._in_flight is None:
            self._in_flight = InFlightRequests()
        command.opaque = self._in_flight.new_opaque()
        command.flag = FLAG_ONEWAY
        self.write(codec.encode(command, self.last_codec))

    def request(self, command: Command, timeout: float, on_response: ResponseHandler) -> None:
        """Send a request to the client. `on_response` is called once: with the response; or with None, after `timeout`
        seconds or when the connection is lost, and immediately if the client is stalled or already owes MAX_REQUESTS
        responses. Raises LocalProtocolError for a request that does not fit into a frame."""
        if self._in_flight is None:
            self._in_flight = InFlightRequests()
        if self._transport is None or self._paused or len(self._in_flight) >= MAX_REQUESTS:
            on_response(None)
            return
        command.opaque = self._in_flight.add(on_response, self._loop.time() + timeout)
        try:
            data = codec.encode(command, self.last_codec)
        except LocalProtocolError:
            self._in_flight.take(command.opaque)
            raise
        self.write(data)
        self._loop.call_later(timeout, self._expire)

    def take_response(self, command: Command) -> None:
        """Pass a client's response to the function that waits for it, if there still is one."""
        waiter = self._in_flight.take(command.opaque) if self._in_flight is not None else None
        if waiter is not None:
            waiter(command)

    def stop_reading(self) -> None:
        """Accept no more requests; outstanding answers are still sent."""
        self._drop_backlog()
        self._is_over = True
        if self._transport is not None and not self._transport.is_closing():
            self._reads = False
            self._transport.pause_reading()

    def close(self) -> None:
        """Close after everything buffered has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close immediately, without sending what is buffered."""
        if self._transport is not None:
            self._transport.abort()

    def refuse(self, error: FrameError) -> None:
        """Close with one log line, because the stream cannot be read further."""
        if self._transport is not None and not self._transport.is_closing():
            self._handler.complain("connection_refused", self, str(error))
            self._transport.close()

    def drop(self, reason: str) -> None:
        """Close immediately with one log line, to free the memory held for this client."""
        self._handler.complain("connection_dropped", self, reason)
        self.discard()

    def discard(self) -> None:
        """Close immediately, to free the memory held for this client."""
        self.abort()
        self._free_frame()

    # --- see `tls.TlsOwner`

    def decrypted(self, data: bytes) -> None:
        """Take bytes that were decrypted later than in the call that read them."""
        if not self._is_over:
            self._take(data)

    def end_of_stream(self) -> None:
        """Close the connection, since the client has ended its stream."""
        if self._transport is not None and not self._transport.is_closing():
            self.eof_received()
            self._transport.close()

    def refuse_tls(self, reason: str) -> None:
        """Close with one log line, because of TLS."""
        if self._transport is not None and not self._transport.is_closing():
            self._is_over = True
            self._handler.complain("tls_refused", self, reason)
            self._transport.close()

    @property
    def has_tls(self) -> bool:
        """Whether the client uses TLS."""
        return self._tls is not None

    # ---

    def work(self, is_over: IsOver) -> bool:
        """Handle part of the backlog, and more until `is_over`; return whether there is more that can be handled now.
        Does not raise."""
        self._is_queued = False
        if not self._backlog:
            return False
        try:
            self._position = self._handler.handle(self, self._backlog, self._position, is_over)
        except Exception:
            # The failing frame must not be handled again, nor keep other connections from their turns.
            log.exception("connection_failed", peer=self.peer)
            self.abort()
            return False
        if self._position < len(self._backlog):
            self._is_queued = self.takes_answers
            return self._is_queued
        self._drop_backlog()
        if self._reader.error is not None:
            self.refuse(self._reader.error)
        self._steer()
        return False

    def hold_back(self) -> None:
        """Hand over no more requests, until `go_on`."""
        self._is_held_back = True

    def go_on(self) -> None:
        """Hand over requests again, beginning with the backlog."""
        self._is_held_back = False
        self._tell_waiters()
        self._queue_backlog()

    def read_on(self) -> None:
        """Continue to read: this connection's turn has come."""
        self._waits_to_read = False
        self._steer()

    def _open(self, data: bytes) -> bytes:
        """Decrypt the bytes of a read, or return them unchanged if they turn out to be the first ones of a connection
        without TLS."""
        if self._tls is None:
            if self._transport is None or self._transport.is_closing():
                return b""
            assert self._tls_server is not None
            try:
                if not check_first_byte(data, self._tls_server.mode):
                    self._is_plain = True
                    return data
            except TlsRefused as error:
                self.refuse_tls(str(error))
                return b""
            self._tls = TlsEnd(self, self._transport, self._tls_server, self._loop, self._turns)
            self._transport = self._tls.transport
        return self._tls.receive(data)

    def _leave(self, frames: list[Frame], position: int) -> None:
        """Keep the frames from a position on for later."""
        if self._transport is None or self._transport.is_closing():
            return
        self._backlog, self._position = frames, position
        self._steer()
        self._queue_backlog()

    def _steer(self) -> None:
        """Pause or resume reading from the socket."""
        if self._transport is None or self._transport.is_closing():
            return
        reads = not self._backlog and not self._waits_to_read and not self._is_over
        if reads != self._reads:
            self._reads = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _queue_backlog(self) -> None:
        """Queue a non-empty backlog for its turn."""
        if self._backlog and not self._paused and not self._is_held_back and not self._is_queued:
            self._is_queued = True
            self._turns.add(self, is_little=len(self._backlog) - self._position <= FEW_REQUESTS)

    def _tell_waiters(self) -> None:
        if self._waiters and self.takes_answers:
            waiters, self._waiters = self._waiters, []
            for then in waiters:
                then(self)

    def _drop_backlog(self) -> None:
        self._backlog, self._position = [], 0

    def _hold(self, size: int) -> None:
        """Account for the unfinished frame; if all together are too large, one of the largest is dropped."""
        large = size if self._reader.announced >= LARGE_FRAME_BYTES else -1
        self._budget.move(self, self._large, large)
        self._large = large
        too_large = self._budget.hold(self, self._unfinished_bytes, size)
        self._unfinished_bytes = size
        if too_large is not None:
            too_large.drop("the unfinished frames of all clients together are too large")
        if self._large >= 0 and self._budget.is_crowded and not self._waits_to_read:
            self._waits_to_read = True
            self._steer()
            self._budget.wait(self)

    def _free_frame(self) -> None:
        """Free the unfinished frame now. Transport and connection refer to each other, so it would otherwise stay in
        memory until the garbage collector runs."""
        self._reader.close()
        self._hold(0)

    def _hold_output(self, given: int) -> None:
        """Account for `given` more bytes that the client does not read. If all clients together leave too much unread,
        one of those that hold most is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._output.hold(self, given)

    def _expire(self) -> None:
        if self._in_flight is not None:
            for waiter in self._in_flight.expire(self._loop.time()):
                waiter(None)
