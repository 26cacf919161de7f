"""The client's intervals and time-outs. Those that RocketMQ's clients have too have RocketMQ's values."""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec.structs import replace

CONNECT_TIMEOUT: Final = 3.0
"""Default time-out for opening a connection, in seconds, as in RocketMQ's clients."""


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and time-outs, in seconds."""

    connect_timeout: float = CONNECT_TIMEOUT
    request_timeout: float = 3.0
    """Time-out of requests for which the caller gives no time-out: routes, heartbeats, offsets."""

    heartbeat: float = 30.0
    """Time between heartbeats, and between refreshes of the routes."""

    expiry: float = 120.0
    """Time without a heartbeat after which a broker forgets a client, and other members get its queues."""

    delays: float = 30.0
    """Validity of the cached delay tables of a broker and its topics, which may change while it runs."""

    rebalance: float = 20.0
    """Time between rebalances, besides those that a broker's notification causes."""

    missing_topic: float = 1.0
    """Longest time between look-ups of a subscribed topic that does not exist yet; the first pauses are shorter.
    RocketMQ waits for its next rebalance."""

    commit: float = 5.0
    """Time between commits of offsets."""

    commit_all_every: int = 12
    """Every Nth commit also stores unchanged offsets, since a broker that crashed may have older ones."""

    suspend: float = 15.0
    """How long a broker may hold a pull that finds no message."""

    pull_timeout: float = 30.0
    """Time-out for the answer to a pull."""

    first_pause: float = 0.1
    """The first pause between failing attempts."""
    longest_pause: float = 5.0
    """The longest pause between failing attempts: pauses begin with `first_pause`, and double each time up to this."""

    retry_here: float = 5.0
    """Time until a consumer handles a message again that failed and could not be sent back to the broker."""

    retry_in_place: float = 1.0
    """Time until an ordered consumer handles a message again that failed."""

    lock: float = 20.0
    """Time between renewals of the locks on an ordered consumer's queues."""

    lock_life: float = 30.0
    """How long the client trusts a lock after its renewal. The broker keeps it for 60 s."""

    exclusive_lock_life: float = 55.0
    """The same for an exclusive consumer: if it lost a queue, another member would get messages that it still has in
    hand."""

    claims: float = 10.0
    """Time after a connection to a broker was reopened in which an exclusive consumer takes no queues that it did not
    have. The broker may have been restarted, and the members that had those queues need time to connect, to lock them
    and to store their offsets."""

    cancelled_handlers: float = 5.0
    """How long a consumer that is being closed waits for handlers that it has cancelled."""

    silence: float = 3.0
    """Time without data from a broker with pending requests after which the client sends it a heartbeat."""

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures in a row, counted from 1."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 20))


def with_timeouts(
    intervals: Intervals | None, connect_timeout: float = CONNECT_TIMEOUT, timeout: float = math.inf
) -> Intervals:
    """Return intervals with the caller's time-outs, in seconds: for connections, and for its requests. The client's own
    requests that precede them, for routes and heartbeats, may take no longer than the caller's."""
    given = intervals or Intervals()
    if connect_timeout != CONNECT_TIMEOUT:
        given = replace(given, connect_timeout=connect_timeout)
    return replace(given, request_timeout=min(given.request_timeout, timeout))
