"""PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361)."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from duemq.broker.access.permission import CONSUME
from duemq.broker.admin.stats import BrokerStats
from duemq.broker.consume.long_poll import MAX_HOLD_SECONDS, HeldPull, LongPolls
from duemq.broker.consume.pull_checks import PullChecks
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.request_turns import RequestTurns
from duemq.broker.net.router import Answer, Router
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.workers import Background, Workers
from duemq.protocol.codes import LANGUAGE, VERSION, RequestCode, ResponseCode
from duemq.protocol.frames.command import Body, Command
from duemq.protocol.frames.frame import JSON, join_frame
from duemq.protocol.requests.headers import (
    PULL_COMMIT_OFFSET,
    PULL_SUSPEND,
    PullMessage,
    PullMessageResponse,
    Request,
    response,
)
from duemq.storage.errors import NotInMemory
from duemq.storage.queues.pull import ColdRead, Pulled, PullStatus, without_missing
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)

_CODE_OF: Final = {
    PullStatus.FOUND: int(ResponseCode.SUCCESS),
    PullStatus.NO_MATCHED_MESSAGE: int(ResponseCode.PULL_RETRY_IMMEDIATELY),
    PullStatus.MESSAGE_WAS_REMOVING: int(ResponseCode.PULL_RETRY_IMMEDIATELY),
    PullStatus.OFFSET_FOUND_NULL: int(ResponseCode.PULL_NOT_FOUND),
    PullStatus.OFFSET_OVERFLOW_ONE: int(ResponseCode.PULL_NOT_FOUND),
    PullStatus.OFFSET_OVERFLOW_BADLY: int(ResponseCode.PULL_OFFSET_MOVED),
    PullStatus.OFFSET_TOO_SMALL: int(ResponseCode.PULL_OFFSET_MOVED),
}
_ANSWER: Final = (
    b'{"code":%%d,"extFields":{"maxOffset":"%%d","minOffset":"%%d","nextBeginOffset":"%%d",'
    b'"suggestWhichBrokerId":"0"},"flag":1,"language":"%b","opaque":%%d,"remark":"%%b",'
    b'"serializeTypeCurrentRPC":"JSON","version":%d}' % (LANGUAGE.encode(), VERSION)
)


class PullHandlers:
    """Handles pulls."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        store: MessageStore,
        offsets: ConsumerOffsets,
        stats: BrokerStats,
        router: Router,
        loop: asyncio.AbstractEventLoop,
        turns: RequestTurns,
        workers: Workers,
        reads: ColdReads,
        checks: PullChecks,
    ) -> None:
        self._settings = settings
        self._store = store
        self._offsets = offsets
        self._stats = stats
        self._router = router
        self._loop = loop
        self._workers = workers
        self._reads = reads
        self._check = checks.check
        self._codes = checks.codes
        self.polls = LongPolls(
            loop,
            turns,
            capacity=lambda: settings.config.pull_hold_capacity,
            serve=self._serve_held,
            expire=self._expire_held,
            check=checks.check_account,
            fail=lambda held, error: router.fail(held.connection, held.request, error),
        )

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.PULL_MESSAGE, PullMessage, CONSUME, self.pull, reads=True)
        router.add(RequestCode.LITE_PULL_MESSAGE, PullMessage, CONSUME, self.pull, reads=True)
        router.add_clients(self.polls)

    def stop(self) -> None:
        """Answer all held pulls."""
        self.polls.stop()

    def pull(self, connection: Connection, request: Request[PullMessage]) -> Answer:
        """Answer with messages, or hold the pull until there are some."""
        header = request.header
        self._check(header)
        codes = self._codes(header)
        found = self._find(header, header.queue_offset, codes)
        if header.sys_flag & PULL_COMMIT_OFFSET and header.commit_offset >= 0:
            self._offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        if (
            found.status is PullStatus.FOUND
            or not header.sys_flag & PULL_SUSPEND
            or self._code(header, found) != ResponseCode.PULL_NOT_FOUND
            or not self._hold(connection, request, codes)
        ):
            return self._answer(connection, request, found)
        return None

    # --- answers

    def _find(self, header: PullMessage, offset: int, codes: frozenset[int] | None) -> Pulled:
        config = self._settings.config
        count = min(max(1, header.max_msg_nums), config.pull_max_count)
        return self._store.find(header.topic, header.queue_id, offset, count, config.pull_max_size, codes)

    @staticmethod
    def _code(header: PullMessage, found: Pulled) -> int:
        code = _CODE_OF.get(found.status)
        if code is None:  # the queue has no messages: a pull from an offset other than 0 has to begin elsewhere
            return ResponseCode.PULL_OFFSET_MOVED if header.queue_offset else ResponseCode.PULL_NOT_FOUND
        return code

    def _answer(
        self, connection: Connection, request: Request[PullMessage], found: Pulled, *, at_once: bool = False
    ) -> Answer:
        """Return the answer, or None if it comes later because messages must be read from the disk. Raises NotNow,
        unless `at_once`."""
        code = self._code(request.header, found)
        if found.status is not PullStatus.FOUND:
            if code == ResponseCode.PULL_OFFSET_MOVED:
                log.info(
                    "pull_offset_moved",
                    group=request.header.consumer_group,
                    topic=request.header.topic,
                    queue_id=request.header.queue_id,
                    offset=request.header.queue_offset,
                    moved_to=found.next_offset,
                )
            self._stats.pulled(request.header, found)
            return self._encode(request, found, code, b"")
        body = self._store.read(found.ranges)
        if body is None:
            self._router.spawn(connection, request, self._answer_cold(request, found), size=found.size, at_once=at_once)
            return None
        return self._answer_found(request, found, body)

    def _answer_found(self, request: Request[PullMessage], found: Pulled, body: Body) -> Answer:
        """Return the answer with its messages, except those that are missing from the commitlog."""
        body = without_missing(found, body, self._store.log.segment_size)
        if found.status is not PullStatus.FOUND:
            log.warning(
                "messages_missing",
                topic=request.header.topic,
                queue_id=request.header.queue_id,
                offset=request.header.queue_offset,
                moved_to=found.next_offset,
                reason="a commitlog file has zeros in their place, as an older copy of the file would",
            )
        header = request.header
        self._stats.pulled(header, found)
        self._offsets.pulled(header.consumer_group, header.topic, header.queue_id, found.next_offset)
        return self._encode(request, found, self._code(header, found), body)

    async def _answer_cold(self, request: Request[PullMessage], found: Pulled) -> Answer:
        """Read the messages that are not in the page cache, in a thread, and return the answer."""
        read = ColdRead(self._store.log, found.ranges)
        try:
            body = await self._workers.run(Background.PULLS, read.run)
        except FileNotFoundError:
            body = b""
        if len(body) != found.size:
            found.status, found.next_offset = PullStatus.MESSAGE_WAS_REMOVING, request.header.queue_offset
            return self._encode(request, found, ResponseCode.PULL_RETRY_IMMEDIATELY, b"")
        return self._answer_found(request, found, body)

    @staticmethod
    def _encode(request: Request[PullMessage], found: Pulled, code: int, body: Body) -> bytes | Command:
        if request.codec == JSON:
            head = _ANSWER % (
                code,
                found.max_offset,
                found.min_offset,
                found.next_offset,
                request.opaque,
                found.status.name.encode(),
            )
            return join_frame(JSON, head, body)
        header = PullMessageResponse(0, found.next_offset, found.min_offset, found.max_offset)
        return response(code, found.status.name, header, body)

    # --- waiting

    def _hold(self, connection: Connection, request: Request[PullMessage], codes: frozenset[int] | None) -> bool:
        header = request.header
        seconds = (
            header.suspend_timeout_millis
            if self._settings.config.long_polling
            else self._settings.config.short_polling_ms
        ) / 1000
        queue = self._store.ensure_queue(header.topic, header.queue_id)
        deadline = self._loop.time() + min(max(0.0, seconds), MAX_HOLD_SECONDS)
        request.body = b""
        # A held pull keeps no field that may be of any length and is no longer needed.
        header.subscription = header.expression_type = request.language = None
        return self.polls.hold(HeldPull(connection, request, queue, codes, deadline))

    def _serve_held(self, held: HeldPull) -> bool:
        """Answer a held pull if there are messages for it; return whether it was answered. Raises Refused if the pull
        is no longer allowed."""
        header = held.request.header
        self._check(header)
        try:
            found = self._reads.at_once(self._find, header, held.offset, held.codes)
        except NotInMemory:
            self._answer_later(held)
            return True
        if found.status is PullStatus.NO_MATCHED_MESSAGE:
            held.offset = found.next_offset
            return False
        if self._code(header, found) == ResponseCode.PULL_NOT_FOUND:
            return False
        answer = self._answer(held.connection, held.request, found, at_once=True)
        self._router.answer(held.connection, held.request, answer)
        return True

    def _expire_held(self, held: HeldPull) -> None:
        """Answer a held pull whose time is up. Raises Refused if it is no longer allowed."""
        self._check(held.request.header)
        try:
            found = self._reads.at_once(self._find, held.request.header, held.offset, held.codes)
        except NotInMemory:
            self._answer_later(held)
            return
        answer = self._answer_held(held, found)
        self._router.answer(held.connection, held.request, answer)

    def _answer_later(self, held: HeldPull) -> None:
        """Answer a held pull once the consume queue has been read from the disk, with or without messages."""

        async def answer() -> Answer:
            found = await self._reads.run(self._find, held.request.header, held.offset, held.codes)
            self._check(held.request.header)
            return self._answer_held(held, found)

        self._router.spawn(held.connection, held.request, answer(), at_once=True)

    def _answer_held(self, held: HeldPull, found: Pulled) -> Answer:
        """Return the answer to a held pull. If no new message matched, the answer tells the client to continue behind
        them, so that they need not be looked at again."""
        if held.offset > held.request.header.queue_offset and found.status is not PullStatus.FOUND:
            found.status = PullStatus.NO_MATCHED_MESSAGE
        elif found.status is PullStatus.FOUND and held.connection.is_stalled:
            found = Pulled(PullStatus.OFFSET_FOUND_NULL, held.offset, found.min_offset, found.max_offset)
        return self._answer(held.connection, held.request, found, at_once=True)
