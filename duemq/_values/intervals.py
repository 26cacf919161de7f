"""The client's own intervals. They have RocketMQ's values where RocketMQ has them; tests use shorter ones."""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec.structs import replace

CONNECT_TIMEOUT: Final = 3.0
"""Time-out for a connection, in seconds, as in RocketMQ's clients."""


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and time-outs, in seconds."""

    connect_timeout: float = CONNECT_TIMEOUT
    request_timeout: float = 3.0
    """Time-out of requests for which the caller gives no timeout: routes, heartbeats, offsets."""

    heartbeat: float = 30.0
    """Time between heartbeats, and between refreshes of the routes."""

    expiry: float = 120.0
    """Time without a heartbeat after which a broker forgets a client, and other members get its queues."""

    delays: float = 30.0
    """Validity of the cached delay tables of a broker and its topics, which may change while it runs."""

    rebalance: float = 20.0
    """Time between reads of the group's members, besides those that a broker's notice causes."""

    missing_topic: float = 1.0
    """Longest time between look-ups of a subscribed topic that does not exist yet; the first ones come sooner. RocketMQ
    waits for its next rebalance."""

    commit: float = 5.0
    """Time between commits of offsets."""

    commit_all_every: int = 12
    """Every Nth commit also rewrites unchanged offsets: a broker that crashed may have an older one."""

    suspend: float = 15.0
    """The time that a broker may hold a pull that finds nothing."""

    pull_timeout: float = 30.0
    """Time-out for the answer to a pull."""

    first_pause: float = 0.1
    longest_pause: float = 5.0
    """The longest pause between tries that fail: the pauses begin with `first_pause`, and are doubled each time up to
    this."""

    retry_here: float = 5.0
    """Time until a message is handled again that could be neither handled nor sent back to the broker."""

    retry_in_place: float = 1.0
    """Time until an ordered consumer handles a message again that was handled without success."""

    lock: float = 20.0
    """Time between renewals of the locks on an ordered consumer's queues."""

    lock_life: float = 30.0
    """Time after its renewal for which a lock counts. The broker's lasts for 60 s."""

    exclusive_lock_life: float = 55.0
    """The same for an exclusive consumer, which others would follow with messages that it still has in hand."""

    claims: float = 10.0
    """Time from a new connection to a broker on in which an exclusive consumer takes no queue that it did not have: the
    broker may have been started again, and those that had the others need time to connect, to lock them and to store
    their offsets."""

    cancelled_handlers: float = 5.0
    """Time that a consumer which is being closed gives to handlers that it has cancelled."""

    silence: float = 3.0
    """Time without a word from a broker of which something is asked, until it is asked for a sign of life."""

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures in a row, counted from 1."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 20))


def with_timeouts(
    intervals: Intervals | None, connect_timeout: float = CONNECT_TIMEOUT, timeout: float = math.inf
) -> Intervals:
    """Return intervals with a caller's own time-outs, in seconds: for connections, and for its requests. Those that
    have to come before, for routes and heartbeats, may take no longer than the caller's."""
    given = intervals or Intervals()
    if connect_timeout != CONNECT_TIMEOUT:
        given = replace(given, connect_timeout=connect_timeout)
    return replace(given, request_timeout=min(given.request_timeout, timeout))
