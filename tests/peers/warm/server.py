"""The server's program: it imports what brokers and bridges need, and forks."""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
from typing import Any

from tests.peers.brokers.process import die_with_parent

_MODULES = (
    "duemq.cli",
    "duemq.broker.main",
    "duemq.mqtt_bridge.cli",
    "duemq.mqtt_bridge.bridge",
    "duemq.mqtt_bridge.rules.file",
)


def serve(requests: socket.socket) -> list[str] | None:
    """Fork for each request. Returns the command in each new process, None in the server at the end of requests."""
    ending: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    for each in (woken, wake):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _reap(ending)
                    continue
                data, files = _receive(requests)
                if not data:
                    return None
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (requests, woken, wake, *ending.values()):
                        each.close()
                    return _become(json.loads(data), *files)
                os.close(files[0])
                ending[pid] = socket.socket(fileno=files[1])
                ending[pid].sendall(pid.to_bytes(8, "big", signed=True))


def _receive(requests: socket.socket) -> tuple[bytes, list[int]]:
    size = 2 * array.array("i").itemsize
    data, more, _, _ = requests.recvmsg(1 << 20, socket.CMSG_LEN(size))
    files = array.array("i")
    for _, _, content in more:
        files.frombytes(content)
    return data, files.tolist()


def _reap(ending: dict[int, socket.socket]) -> None:
    while ending:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with ending.pop(pid) as each, contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            each.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def _become(request: dict[str, Any], output: int, ending: int) -> list[str]:
    """Take over all that a process has from the one that starts it."""
    os.setsid()
    die_with_parent()
    os.close(ending)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    # The old ones remember what kind of file the server's are.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    command: list[str] = request["command"]
    return command


def main() -> None:
    die_with_parent()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `duemq serve` does, and so that there is one thread
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a new process would copy all pages that it looks at
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command is None:
        return
    from duemq.cli import main as run

    sys.argv = command
    sys.exit(run())


if __name__ == "__main__":
    main()
