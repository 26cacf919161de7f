"""Free TCP ports for brokers, together with the neighbouring ports that a broker takes by itself.

A broker on port P also listens on P-2 (the "VIP channel"); Apache's takes P+1 for replication as well. The ports come
from below the range that the kernel hands to outgoing connections, since a client's connection could otherwise sit on a
port at the moment a broker is restarted on it. A process has its own block of ports and gives each of them out once, so
that a broker that is down for a moment finds its ports free, and no two servers share one.
"""

import contextlib
import functools
import itertools
import socket
from collections.abc import Iterator

_FIRST, _BLOCK, _BLOCKS = 12_000, 2_000, 10
_HOST = "127.0.0.1"


@functools.cache
def _block() -> tuple[Iterator[int], socket.socket]:
    """Yield the ports of this process, over and over. They are reserved by a socket name that no other process can take
    while the socket lives."""
    owner = socket.socket(socket.AF_UNIX)
    for number in range(_BLOCKS):
        with contextlib.suppress(OSError):
            owner.bind(f"\0duemq-test-ports-{number}")
            first = _FIRST + number * _BLOCK
            return itertools.cycle(range(first, first + _BLOCK)), owner
    raise OSError(f"all {_BLOCKS} blocks of ports are in use by other test runs")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _find(count: int) -> int:
    """Return the first of a number of free ports in a row."""
    ports, _ = _block()
    found: list[int] = []
    for port in itertools.islice(ports, _BLOCK):
        follows = not found or port == found[-1] + 1
        found = [*(found if follows else ()), port] if _is_free(port) else []
        if len(found) == count:
            return found[0]
    raise OSError(f"no {count} free ports in a row in a block of {_BLOCK}")


def free_port() -> int:
    """Return a port with no listener."""
    return _find(1)


def free_broker_port() -> int:
    """Return a port whose neighbours that a broker needs (P-2 to P+1) are free as well."""
    return _find(4) + 2
