"""Idle connections: a connection on which nothing has arrived for a long time is closed, so that a client whose machine
is gone holds no descriptor and no place in a group."""

from __future__ import annotations

from collections.abc import Iterable

from duemq.broker.net.connection import Connection


def close_idle(connections: Iterable[Connection], since: float) -> None:
    """Abort connections on which nothing has arrived since a time of the event loop's clock, in seconds."""
    for connection in [each for each in connections if each.last_read < since]:
        connection.abort()
