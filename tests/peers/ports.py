"""Free TCP ports for brokers, together with the neighbours that a broker takes without being told.

A broker on port P also listens on P-2 (the "VIP channel"); Apache's takes P+1 for replication as well. The ports come
from below the range that the kernel hands to outgoing connections, since a client's connection could otherwise sit on
a port at the moment a broker is restarted on it.
"""

import contextlib
import random
import socket

_FIRST, _LAST = 20_000, 30_000
_HOST = "127.0.0.1"


def _all_free(ports: range) -> bool:
    with contextlib.ExitStack() as stack:
        for port in ports:
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind((_HOST, port))
            except OSError:
                return False
    return True


def _find(before: int, after: int) -> int:
    choose = random.SystemRandom()
    for _ in range(1000):
        port = choose.randrange(_FIRST, _LAST)
        if _all_free(range(port - before, port + after + 1)):
            return port
    raise OSError(f"no free ports between {_FIRST} and {_LAST}")


def free_port() -> int:
    """Return a port that nobody listens on now."""
    return _find(0, 0)


def free_broker_port() -> int:
    """Return a port whose neighbours that a broker needs (P-2 to P+1) are free as well."""
    return _find(2, 1)
