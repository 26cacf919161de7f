"""From frames to handlers: finds the handler of a request code, types the request's header, encodes the answer.

A handler is a plain function from connection and request to answer, called for every frame that one read brought in;
the answers of a read are written in one go. Its answer is a `Command`, or the bytes of a ready frame on the hot path,
or None: then it has kept the request and answers later with `Router.answer`, or the request wants no answer. A handler
that has to wait is a coroutine function, and costs a task.

Sends are staged by their handler (see `storage.append`) and written here, once for each run of sends in a read. Their
answers go out after that; with SYNC_FLUSH, after the disk has them.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import msgspec
import structlog

from broker.connection import Connection
from broker.errors import Refused
from broker.flusher import Flusher
from broker.stats import Stats
from protocol import codec
from protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, ResponseCode
from protocol.command import Command
from protocol.errors import BodyError, FieldError, FrameError
from protocol.frame import JSON, Frame
from protocol.headers import Header, Request, RequestDecoder, response
from storage.append import Appender
from storage.errors import RecordIllegal, StoreClosed, StoreError, StoreFull

log = structlog.get_logger(__name__)

Answer = Command | bytes | None
Handler = Callable[[Connection, Request[Any]], Answer | Coroutine[Any, Any, Answer]]

_START_SIZE: Final = 12
_LARGE_ANSWER: Final = 16 * 1024
_MAX_LOGGED_A_SECOND: Final = 50


class Route:
    """How requests of one code are decoded and handled. `stages`: the handler stages messages for the log."""

    __slots__ = ("decode_json", "decoder", "handler", "is_async", "stages")

    def __init__(self, header_type: type[Header], handler: Handler, *, stages: bool = False) -> None:
        self.decoder = RequestDecoder(header_type)
        self.decode_json = self.decoder.decode_json
        self.handler = handler
        self.is_async = inspect.iscoroutinefunction(handler)
        self.stages = stages


class Clients(Protocol):
    """Who has to know of connections."""

    def connection_lost(self, connection: Connection) -> None:
        """A client is gone."""


class Router:
    """Handles the frames of all connections."""

    def __init__(self, appender: Appender, flusher: Flusher, stats: Stats, *, sync_flush: bool) -> None:
        self._appender = appender
        self._stats = stats
        self._flusher = flusher
        self._sync_flush = sync_flush
        self._routes: dict[int, Route] = {}
        self._routes_by_start: dict[bytes, Route] = {}
        """By the first bytes of a JSON header, which tell the code with every client that writes it first."""
        self._clients: list[Clients] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: set[Connection] = set()
        self._logged_second = 0
        self._logged = 0

    def add(self, code: int, header_type: type[Header], handler: Handler, *, stages: bool = False) -> None:
        """Register the handler of a request code."""
        assert code not in self._routes, f"request code {code} has a handler"
        self._routes[code] = Route(header_type, handler, stages=stages)
        start = b'{"code":%d,"' % code
        if len(start) >= _START_SIZE:
            self._routes_by_start[start[:_START_SIZE]] = self._routes[code]

    def add_clients(self, clients: Clients) -> None:
        """Tell about lost connections."""
        self._clients.append(clients)

    # --- connections

    def connection_made(self, connection: Connection) -> None:
        """A client connected."""
        self.connections.add(connection)

    def connection_lost(self, connection: Connection) -> None:
        """A client is gone."""
        self.connections.discard(connection)
        for clients in self._clients:
            clients.connection_lost(connection)

    def handle(self, connection: Connection, frames: list[Frame]) -> int:
        """Handle frames in order, and give how many: fewer when the client does not take its answers."""
        if connection.is_stalled:
            return 0
        answers: list[bytes] = []
        run_frames = run_answers = -1
        routes = self._routes_by_start
        for number, frame in enumerate(frames):
            header = frame[1]
            request = answer = route = None
            if frame[0] == JSON:
                route = routes.get(header[:_START_SIZE])
                if route is not None:
                    try:
                        request = route.decode_json(header)
                        request.codec = JSON
                        request.body = frame[2]
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                        route = None
            if request is None:
                route, request, answer = self._slowly(connection, frame)
            if route is not None and route.stages:
                if run_frames < 0:
                    run_frames, run_answers = number, len(answers)
            elif run_frames >= 0:
                self._commit(connection, frames[run_frames:number], answers, run_answers)
                run_frames = -1
            if request is not None and route is not None:
                answer = self._call(connection, route, request)
            if answer is None:
                continue
            answers.append(answer)
            if len(answer) > _LARGE_ANSWER:
                connection.write_many(answers)
                answers = []
                if connection.is_stalled:
                    return number + 1
        if run_frames >= 0:
            self._commit(connection, frames[run_frames:], answers, run_answers)
        if answers:
            connection.write_many(answers)
        return len(frames)

    def _call(self, connection: Connection, route: Route, request: Request[Any]) -> bytes | None:
        """Let a request be handled; gives the frame of the answer, if it is there already."""
        if route.is_async:
            self.spawn(connection, request, route.handler(connection, request))  # type: ignore[arg-type]
            return None
        try:
            answer = route.handler(connection, request)
            if answer is None or type(answer) is bytes:
                return answer
            return self.encode(request, answer)  # type: ignore[arg-type]
        except Exception as error:  # whatever a request does, the connection and the others go on
            return self.encode(request, self._failed(connection, request, error))

    def _slowly(self, connection: Connection, frame: Frame) -> tuple[Route | None, Request[Any] | None, bytes | None]:
        """Decode what the quick way does not: other codecs, responses, unknown codes, wrong fields. Gives the route
        and the request, or the answer, or neither."""
        try:
            command = codec.decode(frame)
        except FrameError as error:
            connection.refuse(error)
            return None, None, None
        connection.last_codec = frame[0]
        if command.flag & FLAG_RESPONSE:
            connection.take_response(command)
            return None, None, None
        route = self._routes.get(command.code)
        if route is None:
            remark = f" request type {command.code} not supported"
            self._complain(connection, command.code, remark.strip())
            return None, None, self._error(command, frame[0], ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
        try:
            return route, route.decoder.from_command(command, frame[0]), None
        except FieldError as error:
            self._complain(connection, command.code, str(error))
            return None, None, self._error(command, frame[0], ResponseCode.SYSTEM_ERROR, str(error))

    # --- answers

    def encode(self, request: Request[Any], answer: Command) -> bytes | None:
        """The frame of an answer, in the codec of its request; None where the request wants none."""
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

    def answer_when_flushed(self, connection: Connection, request: Request[Any], answer: Answer) -> Answer:
        """The answer to a request that appended a message: kept until the disk has it, where that is asked for."""
        if not self._sync_flush or answer is None:
            return answer
        data = answer if isinstance(answer, bytes) else self.encode(request, answer)
        if data is not None:
            self._flusher.wait(connection, [data], 1, lambda: self._timed_out([request]))
        return None

    def _error(self, command: Command, frame_codec: int, code: int, remark: str) -> bytes | None:
        if command.flag & FLAG_ONEWAY:
            return None
        answer = response(code, remark)
        answer.opaque, answer.flag = command.opaque, FLAG_RESPONSE
        return codec.encode(answer, frame_codec)

    def _failed(self, connection: Connection, request: Request[Any], error: Exception) -> Command:
        """The answer to a request whose handler raised."""
        if isinstance(error, FieldError | BodyError):
            self._complain(connection, request.code, str(error))
        elif not isinstance(error, Refused | StoreError):
            log.exception("request_failed", peer=connection.peer, code=request.code)
        return response(*outcome_of(error))

    def _complain(self, connection: Connection, code: int, reason: str) -> None:
        """One log line for a bad request, as long as they are not a flood."""
        second = int(time.monotonic())
        if second != self._logged_second:
            if self._logged > _MAX_LOGGED_A_SECOND:
                log.warning("requests_refused", not_logged=self._logged - _MAX_LOGGED_A_SECOND)
            self._logged_second, self._logged = second, 0
        self._logged += 1
        if self._logged <= _MAX_LOGGED_A_SECOND:
            log.warning("request_refused", peer=connection.peer, code=code, reason=reason)

    # --- appends

    def _commit(self, connection: Connection, frames: list[Frame], answers: list[bytes], start: int) -> None:
        """Write what the handlers of some frames staged; `answers` from `start` on are theirs."""
        before = time.perf_counter()
        try:
            self._appender.commit()
        except StoreError as error:
            self._stats.put_failed += len(frames)
            log.error("append_failed", reason=str(error), messages=len(frames))
            del answers[start:]
            for frame in frames:
                answer = self._error(codec.decode(frame), frame[0], *outcome_of(error))
                if answer is not None:
                    answers.append(answer)
            return
        self._stats.wrote(time.perf_counter() - before)
        if self._sync_flush and len(answers) > start:
            held = answers[start:]
            del answers[start:]
            self._flusher.wait(connection, held, len(held), lambda: self._flush_timeouts(frames))

    def _flush_timeouts(self, frames: list[Frame]) -> list[bytes]:
        """The answers to sends whose flush takes too long: stored, but maybe not durable yet."""
        remark = "the disk did not confirm the message in time"
        errors = (
            self._error(codec.decode(frame), frame[0], ResponseCode.FLUSH_DISK_TIMEOUT, remark) for frame in frames
        )
        return [error for error in errors if error is not None]

    def _timed_out(self, requests: list[Request[Any]]) -> list[bytes]:
        remark = "the disk did not confirm the message in time"
        answers = (self.encode(request, response(ResponseCode.FLUSH_DISK_TIMEOUT, remark)) for request in requests)
        return [answer for answer in answers if answer is not None]

    # --- tasks

    def spawn(self, connection: Connection, request: Request[Any], work: Coroutine[Any, Any, Answer]) -> None:
        """Answer a request with what a coroutine gives."""
        request.body = bytes(request.body)
        task = asyncio.get_running_loop().create_task(self._run(connection, request, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, connection: Connection, request: Request[Any], work: Coroutine[Any, Any, Answer]) -> None:
        try:
            answer = await work
        except Exception as error:
            answer = self._failed(connection, request, error)
        self.answer(connection, request, answer)

    async def finish(self, timeout: float) -> None:
        """Wait for requests that are being handled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)


def outcome_of(error: Exception) -> tuple[int, str]:
    """The response code and remark for what went wrong: the one place where outcomes of the store become codes."""
    if isinstance(error, Refused):
        return error.code, error.remark
    if isinstance(error, RecordIllegal):
        remark = f"the message is illegal, maybe msg body or properties length not matched. {error}"
        return ResponseCode.MESSAGE_ILLEGAL, remark
    if isinstance(error, StoreFull | StoreClosed):
        return ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {error}"
    if isinstance(error, StoreError):
        return ResponseCode.SERVICE_NOT_AVAILABLE, f"the message store is broken: {error}"
    if isinstance(error, FieldError | BodyError):
        return ResponseCode.SYSTEM_ERROR, str(error)
    return ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}"
