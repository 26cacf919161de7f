"""TLS on a client's connection: what the first byte decides, the handshake, and a transport that encrypts.

RocketMQ's clients use the same port with and without TLS. A RocketMQ frame begins with a length of at most 16 MiB, so
its first byte is 0 or 1, while a TLS handshake begins with 22. After its first read, a connection without TLS no longer
uses this module.

With TLS the bytes go through memory (`ssl.MemoryBIO`) and not through a second transport. So a connection's limits
apply unchanged: the write buffer is the socket's, in encrypted bytes, and one place, `Connection`, decides when the
socket is read and what happens if the client does not read. The buffers in memory keep the size of the largest piece
that went through them, so pieces are small: an idle connection holds some ten kilobytes.

Handshakes take turns with the requests of other clients (`RequestTurns`): each step of one may take a millisecond, and
after a restart thousands of clients connect at the same time.

Keeps invariants 10 and 11 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, Final, Protocol

from duemq.broker.errors import TlsRefused
from duemq.broker.net.request_turns import IsOver, RequestTurns

HANDSHAKE: Final = 0x16
"""The first byte of a TLS handshake, and the type of its records."""
HANDSHAKE_BYTES: Final = 128 * 1024
"""The maximum number of bytes of a handshake. A chain of client certificates takes some kilobytes."""
UNREAD_BYTES: Final = 1024 * 1024
"""How many bytes that TLS itself sends (answers to key updates) a client may leave unread."""
_PIECE: Final = 16 * 1024
"""The size of a TLS record."""


class TlsMode(Enum):
    """Whether a server accepts connections with TLS, without TLS, or both; the values are RocketMQ's names."""

    DISABLED = "disabled"
    """Clients with TLS are refused."""
    PERMISSIVE = "permissive"
    """Clients may connect with or without TLS."""
    ENFORCING = "enforcing"
    """Clients without TLS are refused."""


class TlsServer(Protocol):
    """The server's side of TLS: its mode, and its certificate as it is now."""

    @property
    def mode(self) -> TlsMode:
        """Whether clients may, must or must not use TLS."""

    @property
    def context(self) -> ssl.SSLContext | None:
        """The context of new handshakes, None if there is none yet."""

    def prepare(self, then: Callable[[], None]) -> None:
        """Call `then` once there is a context or none can be made. To be called only if there is none yet."""


class TlsOwner(Protocol):
    """The connection, as `TlsEnd` uses it."""

    def decrypted(self, data: bytes) -> None:
        """Take decrypted bytes; called only outside of `TlsEnd.receive`."""

    def end_of_stream(self) -> None:
        """Close the connection, since the client has ended its stream."""

    def refuse_tls(self, reason: str) -> None:
        """Close with one log line, since the handshake or a record is wrong."""


class TlsEnd:
    """The broker's end of TLS on one connection. The connection hands over the bytes that it reads, and writes to
    `transport`."""

    __slots__ = (
        "_bytes",
        "_incoming",
        "_is_ready",
        "_is_waiting",
        "_loop",
        "_outgoing",
        "_owner",
        "_server",
        "_ssl",
        "_turns",
        "transport",
    )

    def __init__(
        self,
        owner: TlsOwner,
        transport: asyncio.Transport,
        server: TlsServer,
        loop: asyncio.AbstractEventLoop,
        turns: RequestTurns,
    ) -> None:
        self._owner = owner
        self._server = server
        self._loop = loop
        self._turns = turns
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl: ssl.SSLObject | None = None
        self._is_ready = False
        self._is_waiting = False
        """Whether the next step of the handshake waits for its turn, or for the context."""
        self._bytes = 0
        """Bytes of the handshake so far."""
        self.transport = TlsTransport(transport, self)
        """The transport that the connection writes to."""

    def receive(self, data: bytes) -> bytes:
        """Take the bytes of a read; return those that they decrypt to, which may be none."""
        if self._is_ready:
            return self._decrypt(data)
        self._bytes += len(data)
        if self._bytes > HANDSHAKE_BYTES:
            self._fail("the handshake is too long")
            return b""
        self._incoming.write(data)
        if self._is_waiting:
            return b""
        if self._server.context is None and self._ssl is None:
            self._is_waiting = True
            self._server.prepare(self._prepared)
        elif self._turns.begin() is None:
            self._wait()
        elif self._shake_hands():
            return self._decrypt(b"")
        return b""

    def encrypt(self, data: bytes | bytearray | memoryview[Any]) -> bytes:
        """Return bytes of the stream, encrypted. Raises ssl.SSLError."""
        assert self._ssl is not None
        write, read = self._ssl.write, self._outgoing.read
        if len(data) <= _PIECE:
            write(data)
            return read()
        view = memoryview(data)
        encrypted = []
        for at in range(0, len(view), _PIECE):
            write(view[at : at + _PIECE])
            encrypted.append(read())
        return b"".join(encrypted)

    def goodbye(self) -> bytes:
        """Return the bytes that tell the client that the stream ends."""
        if self._ssl is not None and self._is_ready:
            with suppress(ssl.SSLError):  # the client has not ended its own stream yet, and need not
                self._ssl.unwrap()
        return self._outgoing.read()

    def work(self, is_over: IsOver) -> bool:
        """Continue the handshake. Returns False: the next step follows when the client has answered. Does not raise."""
        self._is_waiting = False
        if not self.transport.is_closing() and self._shake_hands():
            self._loop.call_soon(self._deliver)
        return False

    def _prepared(self) -> None:
        self._is_waiting = False
        if self.transport.is_closing():
            return
        if self._server.context is None:
            self._owner.refuse_tls("there is no certificate; the log says why")
        else:
            self._wait()

    def _wait(self) -> None:
        self._is_waiting = True
        self._turns.add(self, is_little=True)

    def _shake_hands(self) -> bool:
        """Continue the handshake as far as the bytes received allow; return whether it is done."""
        if self._ssl is None:
            context = self._server.context
            assert context is not None
            self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._flush()
            self._fail(_reason(error))
            return False
        self._is_ready = True
        self._flush()
        return True

    def _deliver(self) -> None:
        if not self.transport.is_closing():
            data = self._decrypt(b"")
            if data:
                self._owner.decrypted(data)

    def _decrypt(self, data: bytes) -> bytes:
        """Decrypt the bytes of a read, and those before that are not decrypted yet."""
        assert self._ssl is not None
        read, pending, incoming = self._ssl.read, self._ssl.pending, self._incoming
        decrypted: list[bytes] = []
        try:
            for at in range(0, len(data) or 1, _PIECE):
                incoming.write(data if len(data) <= _PIECE else data[at : at + _PIECE])
                try:
                    # OpenSSL is asked only while it has bytes, and so wants more only in the middle of a record: that
                    # exception costs as much as a record.
                    while incoming.pending or pending():
                        piece = read(_PIECE)
                        if not piece:
                            self._loop.call_soon(self._owner.end_of_stream)
                            return b"".join(decrypted)
                        decrypted.append(piece)
                except ssl.SSLWantReadError:
                    pass
        except ssl.SSLError as error:
            self._flush()
            self._fail(_reason(error))
            return b""
        if self._outgoing.pending:
            self._flush()
            if self.transport.get_write_buffer_size() > UNREAD_BYTES:
                self._fail("it does not read")
                return b""
        return decrypted[0] if len(decrypted) == 1 else b"".join(decrypted)

    def _flush(self) -> None:
        if self._outgoing.pending:
            self.transport.send(self._outgoing.read())

    def _fail(self, reason: str) -> None:
        self._owner.refuse_tls(reason)


class TlsTransport(asyncio.Transport):
    """A transport whose bytes are encrypted on their way to another one. Its buffer is that of the other one."""

    __slots__ = ("_end", "_raw")

    def __init__(self, raw: asyncio.Transport, end: TlsEnd) -> None:
        self._raw = raw
        self._end = end

    def send(self, data: bytes) -> None:
        """Send bytes that are encrypted already."""
        if not self._raw.is_closing():
            self._raw.write(data)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send bytes; nothing if the connection is closing."""
        if self._raw.is_closing():
            return
        try:
            encrypted = self._end.encrypt(data)
        except ssl.SSLError:  # the stream is broken, and the client will not be able to read the rest
            self._raw.abort()
            return
        self._raw.write(encrypted)

    def close(self) -> None:
        """Send the end of the TLS stream (close_notify), and close the connection once everything is sent."""
        if not self._raw.is_closing():
            last = self._end.goodbye()
            if last:
                self._raw.write(last)
            self._raw.close()

    def abort(self) -> None:
        """Close the connection immediately; bytes that are not sent yet are lost."""
        self._raw.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._raw.is_closing()

    def pause_reading(self) -> None:
        """Read nothing from the socket until `resume_reading`."""
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again."""
        self._raw.resume_reading()

    def is_reading(self) -> bool:
        """Return whether the socket is being read."""
        return self._raw.is_reading()

    def get_write_buffer_size(self) -> int:
        """Return the number of encrypted bytes that the socket has not taken yet."""
        return self._raw.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the numbers of encrypted bytes at which writing is paused (`high`) and resumed (`low`)."""
        self._raw.set_write_buffer_limits(high=high, low=low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a fact about the socket below, such as "peername"; `default` if it is not known."""
        return self._raw.get_extra_info(name, default)


def check_first_byte(data: bytes, mode: TlsMode) -> bool:
    """Return whether a connection whose first bytes are `data` begins with TLS. Raises TlsRefused if the mode does not
    allow a connection with TLS, or without."""
    if data[0] == HANDSHAKE:
        if mode is TlsMode.DISABLED:
            raise TlsRefused("it begins with TLS, but tls.server.mode=disabled")
        return True
    if mode is TlsMode.ENFORCING:
        raise TlsRefused("it begins without TLS, but tls.server.mode=enforcing")
    return False


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in words; `error` may be a subclass without one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is refused: {error.verify_message}"
    return (error.reason or str(error)).lower().replace("_", " ")
