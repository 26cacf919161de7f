"""GET_BROKER_RUNTIME_INFO (28) and VIEW_BROKER_STATS_DATA (315). The answer to the first has all of RocketMQ's keys,
since its tools and the exporter read most of them without checking that they exist."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from duemq.broker.access.accounts import REFUSALS
from duemq.broker.access.guard import Guard
from duemq.broker.access.permission import LOOK
from duemq.broker.admin.bridges import Bridges
from duemq.broker.admin.stats import PUT_TIME_LIMITS_MS, BrokerStats
from duemq.broker.consume.long_poll import LongPolls
from duemq.broker.errors import Refused
from duemq.broker.limits import Limits
from duemq.broker.net.connection import Connection
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.net.router import Answer, Router
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tls.contexts import TlsContexts
from duemq.protocol.codes import VERSION, VERSION_NAME, RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import headers
from duemq.protocol.requests.headers import NoFields, Request, response
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock
from duemq.storage.durability.retention import Retention
from duemq.storage.files import Files
from duemq.storage.log.scan import read_record
from duemq.storage.store import MessageStore


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The components that the figures are taken from."""

    settings: LiveSettings
    store: MessageStore
    stats: BrokerStats
    levels: LevelQueues
    timers: Timers
    held: HeldAnswers
    retention: Retention
    polls: LongPolls
    bridges: Bridges
    clock: Clock
    """The machine's clock."""
    messages_clock: Clock
    """The messages' clock."""
    limits: Limits
    router: Router
    tls: TlsContexts
    guard: Guard | None = None
    """None without access control."""


class RuntimeInfoHandlers:
    """Handles the requests of RocketMQ's admin API about the broker itself: its figures, and its counts of messages."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.GET_BROKER_RUNTIME_INFO, NoFields, LOOK, self.runtime_info, reads=True)
        router.add(RequestCode.VIEW_BROKER_STATS_DATA, headers.ViewBrokerStatsData, LOOK, self.stats_data)

    def runtime_info(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the broker's runtime figures."""
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({"table": collect(self._sources)}))

    def stats_data(self, _: Connection, request: Request[headers.ViewBrokerStatsData]) -> Answer:
        """Return a count of messages over the last minute, hour and day."""
        name, key = request.header.stats_name, request.header.stats_key
        found = self._sources.stats.items.view(name, key)
        if found is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(found))


def collect(sources: Sources) -> dict[str, str]:
    """Return the table; times are in ms since the epoch, sizes in bytes unless the value has a unit."""
    now_ms = sources.messages_clock.now_ms()
    table = _broker(sources) | _store(sources) | _rates(sources, now_ms) | sources.bridges.status()
    table |= _connections(sources) | _levels(sources, now_ms)
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in table.items()}


def _broker(sources: Sources) -> dict[str, object]:
    """The broker itself, and its queues of requests."""
    config, stats = sources.settings.config, sources.stats
    yesterday, today = stats.day_starts()
    return {
        "brokerVersionDesc": VERSION_NAME,
        "brokerVersion": VERSION,
        "brokerActive": True,
        "bootTimestamp": stats.start_ms,
        "runtime": _duration(stats.running_ms),
        "msgPutTotalYesterdayMorning": yesterday[0],
        "msgPutTotalTodayMorning": today[0],
        "msgPutTotalTodayNow": sources.store.appender.appended,
        "msgGetTotalYesterdayMorning": yesterday[1],
        "msgGetTotalTodayMorning": today[1],
        "msgGetTotalTodayNow": stats.transferred,
        "sendThreadPoolQueueSize": sources.held.waiting,
        "sendThreadPoolQueueCapacity": config.send_queue_capacity,
        "sendThreadPoolQueueHeadWaitTimeMills": sources.held.head_wait_ms,
        "pullThreadPoolQueueSize": sources.polls.count,
        "pullThreadPoolQueueCapacity": config.pull_hold_capacity,
        "pullThreadPoolQueueHeadWaitTimeMills": 0,
        "queryThreadPoolQueueSize": 0,
        "queryThreadPoolQueueCapacity": 0,
        "queryThreadPoolQueueHeadWaitTimeMills": 0,
        "EndTransactionQueueSize": 0,
        "EndTransactionThreadPoolQueueCapacity": 0,
    }


def _store(sources: Sources) -> dict[str, object]:
    """The commitlog, and the writes to it."""
    store, stats = sources.store, sources.stats
    log, appender = store.log, store.appender
    oldest = read_record(log, log.begin, check_crc=False)
    size = appender.appended_bytes
    return {
        "dispatchBehindBytes": 0,
        "dispatchMaxBuffer": 0,
        "pageCacheLockTimeMills": 0,
        "earliestMessageTimeStamp": oldest.store_timestamp if oldest is not None else -1,
        "startAcceptSendRequestTimeStamp": 0,
        "remainTransientStoreBufferNumbs": 2**31 - 1,
        "remainHowManyDataToFlush": _size(log.end - log.flushed),
        "commitLogDirCapacity": _capacity(store.files, log.directory),
        "commitLogMinOffset": log.begin,
        "commitLogMaxOffset": log.end,
        "commitLogDiskRatio": sources.retention.used_ratio,
        "consumeQueueDiskRatio": sources.retention.used_ratio,
        "putMessageEntireTimeMax": stats.put_time_max_ms,
        "putMessageTimesTotal": appender.appended,
        "putMessageFailedTimes": stats.put_failed,
        "putMessageSizeTotal": size,
        "putMessageAverageSize": size / max(1, appender.appended),
        "putMessageDistributeTime": _distribution(stats),
        "putLatency99": f"{stats.put_time_percentile(0.99):.2f}",
        "putLatency999": f"{stats.put_time_percentile(0.999):.2f}",
        "getMessageEntireTimeMax": 0,
    }


def _rates(sources: Sources, now_ms: int) -> dict[str, object]:
    """Sends, pulls and timers per second, and how far the timers are behind."""
    stats, timers = sources.stats, sources.timers.state(now_ms)
    return {
        "putTps": stats.rates("put"),
        "getFoundTps": stats.rates("found"),
        "getMissTps": stats.rates("missed"),
        "getTotalTps": stats.rates("total"),
        # 4.9 and 5.x spell this key differently, and their tools read only their own spelling.
        "getTransferedTps": stats.rates("transferred"),
        "getTransferredTps": stats.rates("transferred"),
        "timerReadBehind": timers.late_ms // 1000,
        "timerOffsetBehind": timers.behind_messages,
        "timerCongestNum": timers.pending,
        "timerEnqueueTps": float(timers.enqueue_tps),
        "timerDequeueTps": float(timers.dequeue_tps),
    }


def _connections(sources: Sources) -> dict[str, object]:
    """Connections, what ended some of them, certificates, and how often each limit was reached and each kind of request
    refused: duemq's own figures."""
    connections = sources.router.connections
    table: dict[str, object] = {
        "connections": len(connections),
        "connectionsWithTls": sum(connection.has_tls for connection in connections),
    }
    for expiry in sources.tls.expiries:
        name = "tlsCertificate" if expiry.setting == "tls.server" else "tlsClientCertificate"
        table[f"{name}ValidUntil"] = expiry.until_ms
        table[f"{name}DaysLeft"] = expiry.days_left(sources.clock.now_ms())
    table |= {f"connections{how}": count for how, count in sources.router.limited_log.ended.items()}
    table |= {f"limitReached_{name}": count for name, count in sources.limits.reached.items()}
    if sources.guard is not None:
        table |= {f"accessRefused_{kind}": sources.guard.refusals[kind] for kind in REFUSALS}
    return table


def _levels(sources: Sources, now_ms: int) -> dict[str, object]:
    """The progress of the delay levels."""
    table: dict[str, object] = {}
    for level in sources.levels.levels.values():
        table[f"scheduleMessageOffset_{level.number}"] = f"{level.offset},{level.queue.next_offset}"
        # duemq's own: backlog and lateness of the level, which an operator looks at next.
        table[f"scheduleLevel_{level.number}"] = sources.levels.describe(level, now_ms)
    return table


def _distribution(stats: BrokerStats) -> str:
    names = ["[<=0ms]"]
    for low, high in itertools.pairwise(PUT_TIME_LIMITS_MS):
        names.append(f"[{_limit(low)}~{_limit(high)}]")
    names.append(f"[{_limit(PUT_TIME_LIMITS_MS[-1])}~]")
    return "".join(f"{name}:{count} " for name, count in zip(names, stats.put_times, strict=True))


def _limit(ms: int) -> str:
    return f"{ms // 1000}s" if ms >= 1000 else f"{ms}ms" if ms else "0"


def _duration(ms: int) -> str:
    minutes, seconds = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB", "GiB"):
        count_in_unit = count / 1024
        if count_in_unit < 1024:
            return f"{count_in_unit:.1f} {unit}"
        count //= 1024
    return f"{count / 1024:.1f} TiB"


def _capacity(files: Files, directory: str) -> str:
    total, free = files.space(directory)
    return f"Total : {_size(total)}, Free : {_size(free)}."
