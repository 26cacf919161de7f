"""From frames to handlers: finds the handler of a request code, types the request's header, encodes the answer.

A handler is a plain function from connection and request to answer, called for every frame of a read; the answers of a
read are written together. A handler returns a `Command`, the bytes of a ready frame on the hot path, or None. With None
the handler either kept the request, to answer it later with `Router.answer`, or the request wants no answer. A handler
that has to wait is a coroutine function and costs a task; the memory of such requests is bounded (see `admission`).

Sends are staged by their handler (see `storage.log.append`) and written here, once for each series of consecutive sends
in a read. Their answers are sent afterwards; with SYNC_FLUSH, once the records are on the disk.

Keeps invariants 9 and 10 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, KeysView
from functools import cache, partial
from typing import Any, Final, Protocol

import msgspec
import structlog

from duemq.broker.access.guard import Guard, SignedDecoder
from duemq.broker.access.permission import ACCOUNT, Permission
from duemq.broker.admin.stats import BrokerStats
from duemq.broker.audit.recorder import Recorder, is_recorded
from duemq.broker.errors import AccessRefused, LimitReached, NotNow, Refused
from duemq.broker.limits import Limits
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.error_answers import not_stored, outcome_of, timed_out
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.net.limited_log import LimitedLog
from duemq.broker.net.limits.admission import OWN_BYTES, Admission
from duemq.broker.net.limits.connections import ConnectionLimits
from duemq.broker.net.request_turns import IsOver
from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, ResponseCode
from duemq.protocol.errors import FieldError, FrameError, ProtocolError
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, Frame
from duemq.protocol.requests.headers import Header, Request, RequestDecoder, response
from duemq.protocol.unsupported import UNSUPPORTED
from duemq.storage.clock import Clock
from duemq.storage.errors import NotInMemory, StoreError
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)

Answer = Command | bytes | None
Handler = Callable[[Connection, Request[Any]], Answer | Coroutine[Any, Any, Answer]]

_START_SIZE: Final = 12
_SMALL_ANSWER: Final = 512
"""Answers up to this size are written together with the others of their read, whose number bounds them."""
_UNSENT_BYTES: Final = 16 * 1024
"""Larger answers are written as soon as they exceed this together, so that a client that does not read is noticed."""
_MAX_REMARK: Final = 1024
"""Maximum length of a remark, in characters; a remark may repeat text that a client sent."""
_SENDS_A_LOOK: Final = 16
"""Sends are short, so the time is checked only once per this many."""

# Decoders have no state, and making one takes a millisecond: many codes, and all brokers of a process, share them.
_request_decoder = cache(RequestDecoder)
_signed_decoder = cache(SignedDecoder)


class RequestRoute:
    """How requests of one code are decoded and handled. `permission`: what the requests need. `guard`: checks that;
    None without access control. `recorder`: records requests that change something; None without an audit log.
    `stages`: the handler stages messages for the log. `reads`: the handler looks into files, see `ColdReads`."""

    __slots__ = ("decode_json", "decoder", "handler", "is_async", "permission", "reads", "stages")

    def __init__(
        self,
        header_type: type[Header],
        permission: Permission,
        handler: Handler,
        guard: Guard | None = None,
        *,
        stages: bool = False,
        reads: bool = False,
        recorder: Recorder | None = None,
        code: int = 0,
    ) -> None:
        is_guarded = guard is not None and not permission.is_open
        self.decoder = (_signed_decoder if is_guarded else _request_decoder)(header_type)
        self.decode_json: Callable[[bytes], Request[Any]] = self._decode_first
        self.is_async = inspect.iscoroutinefunction(handler)
        self.permission = permission
        self.handler = handler if guard is None else guard.guarded(permission, handler, is_async=self.is_async)
        if recorder is not None and is_recorded(code, permission):
            self.handler = recorder.recorded(code, self.handler, is_async=self.is_async)
        self.stages = stages
        self.reads = reads

    def _decode_first(self, header: bytes) -> Request[Any]:
        """Decode the first request of the code. Its decoder is made only now: making all decoders would be a large part
        of a start, and most brokers need few of them."""
        self.decode_json = self.decoder.decode_json
        return self.decode_json(header)


class ConnectionListener(Protocol):
    """A component that is notified of lost connections."""

    def connection_lost(self, connection: Connection) -> None:
        """Called when a connection is lost."""


class Router:
    """Handles the frames of all connections."""

    def __init__(
        self,
        *,
        store: MessageStore,
        clock: Clock,
        held: HeldAnswers,
        stats: BrokerStats,
        admission: Admission,
        reads: ColdReads,
        limits: Limits,
        connection_limits: ConnectionLimits,
        sync_flush: bool,
        guard: Guard | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`clock`: the messages' clock. `sync_flush`: whether answers to sends are held until their records are on the
        disk. `guard`: checks the permissions of requests; None without access control. `recorder`: records requests
        that change something; None without an audit log."""
        self._guard = guard
        self._recorder = recorder
        self._log = store.log
        self._appender = store.appender
        self._clock = clock
        self._admission = admission
        self._reads = reads
        self._is_under_way = False
        self._stats = stats
        self._held = held
        self._sync_flush = sync_flush
        self._routes: dict[int, RequestRoute] = {}
        self._routes_by_start: dict[bytes, RequestRoute] = {}
        """Routes by the first bytes of a JSON header. Every known client writes the code first, so these bytes contain
        it and the comma behind it; longer codes are in `_routes_by_long_start`."""
        self._routes_by_long_start: dict[bytes, RequestRoute] = {}
        """Routes of codes with more than three digits, by all bytes of the header up to the first comma."""
        self._clients: list[ConnectionListener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[Connection, None] = {}
        """A set with an order, so that a simulation of the same seed closes them in the same order."""
        self._limits = limits
        self._connection_limits = connection_limits
        self._refused = 0
        """Frames of the current call of `handle` that do not count as the first request of a new connection: responses,
        requests that do not decode or have an unknown code, and requests that the guard refuses."""
        self._takes_requests = True
        self.limited_log = LimitedLog(clock)

    def add(
        self,
        code: int,
        header_type: type[Header],
        permission: Permission,
        handler: Handler,
        *,
        stages: bool = False,
        reads: bool = False,
    ) -> None:
        """Register the handler of a request code, with what its requests need; see `RequestRoute`. Raises TypeError if
        `permission` is not a Permission."""
        assert code not in self._routes, f"request code {code} has a handler"
        if not isinstance(permission, Permission):
            raise TypeError(f"the handler of request code {code} has no declared permission")
        self._routes[code] = RequestRoute(
            header_type,
            permission,
            handler,
            self._guard,
            stages=stages,
            reads=reads,
            recorder=self._recorder,
            code=code,
        )
        start = b'{"code":%d,' % code
        if len(start) > _START_SIZE:
            self._routes_by_long_start[start] = self._routes[code]
        elif len(start + b'"') >= _START_SIZE:
            self._routes_by_start[(start + b'"')[:_START_SIZE]] = self._routes[code]

    @property
    def permissions(self) -> dict[int, Permission]:
        """The permission that the requests of each code need."""
        return {code: route.permission for code, route in self._routes.items()}

    def add_clients(self, clients: ConnectionListener) -> None:
        """Register a component that is notified of lost connections."""
        self._clients.append(clients)

    # --- connections

    @property
    def connections(self) -> KeysView[Connection]:
        """The open connections, in the order in which they were opened."""
        return self._connections.keys()

    def connection_made(self, connection: Connection) -> None:
        """Admit a connection, or close it if a limit is reached or the broker is stopping."""
        self._connections[connection] = None
        reason = self._connection_limits.admit(connection)
        if reason is not None:
            self.complain("connection_refused", connection, reason)
        if reason is not None or not self._takes_requests:  # it may have been connecting when the stop began
            connection.stop_reading()
            connection.close()

    def connection_lost(self, connection: Connection) -> None:
        """Forget a lost connection, and notify the components that listen for that."""
        self._connections.pop(connection, None)
        self._connection_limits.left(connection)
        self._admission.lost(connection)
        for clients in self._clients:
            clients.connection_lost(connection)

    def close_idle(self, since: float) -> None:
        """Close connections on which nothing has arrived since a time of the event loop's clock, in seconds: a client
        whose machine is gone holds no descriptor and no place in a group."""
        for connection in [each for each in self._connections if each.last_read < since]:
            connection.abort()

    def handle(self, connection: Connection, frames: list[Frame], position: int, is_over: IsOver) -> int:
        """Handle frames in order, from a position on, and return the position behind the last one handled. Stop early
        if the connection cannot take more responses, or, after at least one frame, if `is_over` returns True."""
        if not connection.takes_answers:
            return position
        if self._recorder is not None:
            self._recorder.handle_requests_of(connection.peer)
        if self._connection_limits.count_requests:
            return self._handle_allowed(connection, frames, position, is_over)
        if connection.is_new:
            return self._handle_first(connection, frames, position, is_over)
        return self._handle(connection, frames, position, is_over)

    def _handle_first(self, connection: Connection, frames: list[Frame], position: int, is_over: IsOver) -> int:
        """Handle frames of a new connection, and note whether one of them was a request that counts."""
        self._refused = 0
        end = self._handle(connection, frames, position, is_over)
        if end - position > self._refused:
            self._connection_limits.made_request(connection)
        return end

    def _handle_allowed(self, connection: Connection, frames: list[Frame], position: int, is_over: IsOver) -> int:
        """Handle as many frames as the connection may make requests now, and refuse the rest."""
        wanted = len(frames) - position
        allowed, why = self._connection_limits.allowance(connection, wanted)
        if allowed:
            part = frames[: position + allowed] if allowed < wanted else frames
            handle = self._handle_first if connection.is_new else self._handle
            end = handle(connection, part, position, is_over)
            if end < len(part) or why is None or not connection.takes_answers:
                self._connection_limits.give_back(connection, len(part) - end)
                return end
            position = end
        assert why is not None
        for number in range(position, len(frames)):
            try:
                answer = self._refuse_now(connection, frames[number], why)
            except FrameError as error:
                connection.refuse(error)
                return len(frames)
            if answer is not None:
                connection.write(answer)
            if is_over() or not connection.takes_answers:
                return number + 1
        return len(frames)

    def _refuse_now(self, connection: Connection, frame: Frame, why: LimitReached) -> bytes | None:
        """Refuse a request beyond a limit; return the answer. A response is taken instead. Raises FrameError."""
        command = codec.decode(frame)
        if command.flag & FLAG_RESPONSE:
            connection.take_response(command)
            return None
        self._count_limit(connection, why, command.code)
        return self._error(command, frame[0], why.code, why.remark)

    def _count_limit(self, connection: Connection, error: LimitReached, code: int) -> None:
        self._limits.reached[error.limit] += 1
        if error.reason is not None:
            self.complain("request_refused", connection, error.reason, code=code)

    def _handle(self, connection: Connection, frames: list[Frame], position: int, is_over: IsOver) -> int:
        """Handle frames, see `handle`."""
        answers: list[bytes] = []
        request: Any
        answer: Any
        # Staged sends that are not written yet: the number of their first frame, and how many answers come before
        # theirs. -1: there are none.
        run_frames = run_answers = -1
        # `unsent`: bytes of large answers that are not sent yet; `look_at`: the number of the frame after which the
        # time is checked next.
        unsent, end, fault, look_at = 0, len(frames), None, -1
        now_ms = self._clock.now_ms()
        routes, long_routes = self._routes_by_start, self._routes_by_long_start
        for number in range(position, len(frames)):
            kind, header, body = frames[number]
            route = answer = None
            if kind == JSON:
                route = routes.get(header[:_START_SIZE]) or long_routes.get(header[: header.find(b",") + 1])
                if route is not None:
                    try:
                        request = route.decode_json(header)
                        request.codec = JSON
                        request.body = body
                        request.now_ms = now_ms
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                        route = None
            if route is None:
                try:
                    route, request, answer = self._decode_any(connection, frames[number], now_ms)
                except FrameError as error:
                    end, fault = number, error
                    break
            try:
                if route is not None and route.stages:
                    if run_frames < 0:
                        run_frames, run_answers = number, len(answers)
                    try:
                        answer = route.handler(connection, request)
                        if type(answer) is not bytes and answer is not None:
                            answer = self.encode(request, answer)
                    except Exception as error:
                        answer = self._not_done(connection, route, request, error)
                else:
                    if run_frames >= 0:
                        self._commit(connection, number - run_frames, answers, run_answers)
                        run_frames = look_at = -1
                    if route is not None:
                        answer = self._call(connection, route, request)
            except NotNow:
                end = number
                break
            if answer is not None:
                answers.append(answer)
                if run_frames < 0 and len(answer) > _SMALL_ANSWER:
                    unsent += len(answer)
                    if unsent > _UNSENT_BYTES:
                        connection.write_many(answers)
                        answers, unsent = [], 0
                        if not connection.takes_answers:
                            return number + 1
            if number >= look_at:
                if is_over():
                    end = number + 1
                    break
                look_at = number + (_SENDS_A_LOOK if run_frames >= 0 else 1)
        if run_frames >= 0:
            self._commit(connection, end - run_frames, answers, run_answers)
        if answers:
            connection.write_many(answers)
        if fault is not None:
            connection.refuse(fault)
            return len(frames)
        return end

    def _call(self, connection: Connection, route: RequestRoute, request: Request[Any]) -> bytes | None:
        """Call the handler of a request; return the frame of the answer if there is one already. Raises NotNow."""
        if route.is_async:
            try:
                work = route.handler(connection, request)
            except Exception as error:  # the guard does not let it in
                return self._not_done(connection, route, request, error)
            self.spawn(connection, request, work)  # type: ignore[arg-type]
            return None
        try:
            if route.reads:
                answer = self._reads.at_once(route.handler, connection, request)
            else:
                answer = route.handler(connection, request)
            if answer is None or type(answer) is bytes:
                return answer
            return self.encode(request, answer)
        except Exception as error:  # a failed request must not stop the connection or the other requests
            return self._not_done(connection, route, request, error)

    def _not_done(
        self, connection: Connection, route: RequestRoute, request: Request[Any], error: Exception
    ) -> bytes | None:
        """Deal with a request whose handler raised: return the frame of an answer, or None if the answer comes later,
        once the missing bytes have been read. Raises NotNow."""
        if isinstance(error, NotInMemory):
            self.spawn(connection, request, self._reads.run(self._handle_admitted, route, connection, request))
            return None
        if isinstance(error, NotNow):
            raise error
        return self.encode(request, self._failed(connection, request, error))

    def _handle_admitted(self, route: RequestRoute, connection: Connection, request: Request[Any]) -> Answer:
        """Handle a request that waited for the disk. It is already admitted, so work that its handler spawns is too."""
        self._is_under_way = True
        try:
            return route.handler(connection, request)  # type: ignore[return-value]
        finally:
            self._is_under_way = False

    def _decode_any(
        self, connection: Connection, frame: Frame, now_ms: int
    ) -> tuple[RequestRoute | None, Request[Any] | None, bytes | None]:
        """Decode a frame that the fast path does not: another codec, a response, an unknown code, wrong fields. Return
        the route and the request, or the answer, or neither. Raises FrameError."""
        command = codec.decode(frame)
        connection.last_codec = frame[0]
        if command.flag & FLAG_RESPONSE:
            self._refused += 1
            connection.take_response(command)
            return None, None, None
        route = self._routes.get(command.code)
        if route is None:
            code: int = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            known = UNSUPPORTED.get(command.code)
            remark = f" request type {command.code} not supported"  # so RocketMQ
            if known is not None:
                remark += f": {known.name}. duemq has {known.reason}"
        else:
            try:
                request = route.decoder.from_command(command, frame[0])
                request.now_ms = now_ms
                return route, request, None
            except FieldError as error:
                code, remark = ResponseCode.SYSTEM_ERROR, str(error)
        event, reason = "request_refused", remark.strip()
        if self._guard is not None:
            try:
                self._guard.check_unread(connection, command, route.permission if route is not None else ACCOUNT)
            except AccessRefused as refusal:
                event, reason, code, remark = "access_refused", refusal.reason, refusal.code, refusal.remark
            except LimitReached as refusal:
                self._limits.reached[refusal.limit] += 1
                reason, code, remark = refusal.reason or reason, refusal.code, refusal.remark
        self._refused += 1
        self.complain(event, connection, reason, code=command.code)
        return None, None, self._error(command, frame[0], code, remark[:_MAX_REMARK])

    # --- answers

    def encode(self, request: Request[Any], answer: Command) -> bytes | None:
        """Return the frame of an answer, in its request's codec; None if the request wants no answer."""
        if request.flag & FLAG_ONEWAY:
            return None
        answer.opaque = request.opaque
        answer.flag = FLAG_RESPONSE
        return codec.encode(answer, request.codec)

    def answer(self, connection: Connection, request: Request[Any], answer: Answer) -> None:
        """Send the answer to a request that a handler kept."""
        data = answer if isinstance(answer, bytes) or answer is None else self.encode(request, answer)
        if data is not None:
            connection.write(data)

    def fail(self, connection: Connection, request: Request[Any], error: Exception) -> None:
        """Answer a request with an error, after its handler kept it and could not answer it."""
        self.answer(connection, request, self._failed(connection, request, error))

    def answer_when_flushed(self, connection: Connection, request: Request[Any], answer: Answer) -> Answer:
        """Return the answer to a request that appended a message or reports the outcome for one. With SYNC_FLUSH, hold
        the answer until the records it depends on are on the disk, and return None."""
        if not self._sync_flush or answer is None or self._log.flushed >= self._log.end:
            return answer  # if nothing was appended, no flush would come
        data = answer if isinstance(answer, bytes) else self.encode(request, answer)
        if data is not None:
            self._held.hold(self._log.end, connection, [data], 1, partial(timed_out, [data], of_all=True))
        return None

    def _error(self, command: Command, frame_codec: int, code: int, remark: str) -> bytes | None:
        if command.flag & FLAG_ONEWAY:
            return None
        answer = response(code, remark)
        answer.opaque, answer.flag = command.opaque, FLAG_RESPONSE
        return codec.encode(answer, frame_codec)

    def _failed(self, connection: Connection, request: Request[Any], error: Exception) -> Command:
        """Return the answer to a request whose handler raised."""
        if isinstance(error, LimitReached):
            self._count_limit(connection, error, request.code)
        elif isinstance(error, AccessRefused):
            self._refused += 1
            self.complain("access_refused", connection, error.reason, code=request.code)
        elif isinstance(error, ProtocolError):
            self.complain("request_refused", connection, str(error), code=request.code)
        elif isinstance(error, OSError):
            self.complain("file_not_read_or_written", connection, str(error), code=request.code)
        elif not isinstance(error, Refused | StoreError):
            log.exception("request_failed", peer=connection.peer, code=request.code)
        code, remark = outcome_of(error)
        return response(code, remark[:_MAX_REMARK])

    def complain(self, event: str, connection: Connection, reason: str, **fields: object) -> None:
        """Log a client's error, unless there are too many such lines."""
        self.limited_log.about_client(event, connection.peer, reason, **fields)

    # --- appends

    def _commit(self, connection: Connection, sends: int, answers: list[bytes], start: int) -> None:
        """Write the messages that consecutive sends staged; their answers are `answers` from `start` on."""
        before, appended = time.perf_counter(), self._appender.appended
        try:
            self._appender.commit()
        except StoreError as error:
            self._stats.put_failed += sends
            self.limited_log.about_appends(str(error), sends)
            answers[start:] = not_stored(answers[start:], error)
            return
        self._stats.add_write(time.perf_counter() - before)
        appended = self._appender.appended - appended
        if self._sync_flush and appended and len(answers) > start:
            held = answers[start:]
            del answers[start:]
            self._held.hold(self._log.end, connection, held, appended, partial(timed_out, held))

    # --- tasks

    def spawn(
        self,
        connection: Connection,
        request: Request[Any],
        work: Coroutine[Any, Any, Answer],
        *,
        size: int = 0,
        at_once: bool = False,
    ) -> None:
        """Answer a request with a coroutine's result. `size`: roughly the bytes of the answer, if they are many. Raises
        NotNow if too much is under way, unless `at_once`; the handler must not have changed anything before."""
        size += OWN_BYTES + len(request.body)
        try:
            self._admission.begin(connection, size, at_once=at_once or self._is_under_way)
        except NotNow:
            work.close()
            raise
        request.body = bytes(request.body)
        task = asyncio.get_running_loop().create_task(self._run(connection, request, work, size))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, connection: Connection, request: Request[Any], work: Coroutine[Any, Any, Answer], size: int
    ) -> None:
        try:
            self.answer(connection, request, await work)
        except Exception as error:
            self.fail(connection, request, error)
        finally:
            self._admission.end(connection, size)

    def stop_taking(self) -> None:
        """Accept no more requests, from existing or new connections; outstanding answers are still sent."""
        self._takes_requests = False
        for connection in list(self.connections):
            connection.stop_reading()

    async def finish(self, timeout: float) -> None:
        """Wait until the requests in progress are done, at most `timeout` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
