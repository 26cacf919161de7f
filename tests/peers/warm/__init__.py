"""`duemq` processes whose modules are loaded already.

Nine tenths of the CPU time of a start of `duemq serve` are imports. A server, which has imported all modules of brokers
and of the MQTT bridge, forks a process for each start; so a start takes a tenth of a second. The process is one like
any other: it has its own id and session, it can be killed, and it ends when its parent does. Its command line in /proc
is the server's. Tests of the command line itself, of secrets in it and of imports start `duemq` without this.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class Server:
    """The process that forks the others; it ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.peers.warm.server", str(theirs.fileno())]
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(each for each in (root, os.environ.get("PYTHONPATH", "")) if each)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": path}
        )
        theirs.close()
        atexit.register(self.close)

    def start(self, command: Sequence[str], output: int, environment: Mapping[str, str]) -> tuple[int, socket.socket]:
        """Start a process; return its id, and a socket on which its exit code comes in the end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        request = {
            "command": list(command),
            "environment": dict(environment),
            "directory": str(Path.cwd()),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        files = array.array("i", [output, theirs.fileno()])
        self._socket.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        theirs.close()
        return read_number(ours), ours

    def close(self) -> None:
        """End the server, and what it has started."""
        self._socket.close()
        self._process.wait()


_server: Server | None = None


def server() -> Server:
    """Return the server of this process, started at the first call."""
    global _server
    if _server is None:
        _server = Server()
    return _server


def read_number(source: socket.socket) -> int:
    """Read a number of 8 bytes. Raises EOFError if the other side is gone."""
    data = b""
    while len(data) < 8:
        more = source.recv(8 - len(data))
        if not more:
            raise EOFError("the server of warm processes has ended")
        data += more
    return int.from_bytes(data, "big", signed=True)


class Child:
    """A process that the server has started, with the interface of asyncio.subprocess.Process."""

    def __init__(self, pid: int, ending: socket.socket, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        ending.setblocking(False)
        self._ending = ending
        self._ended = asyncio.ensure_future(self._watch())

    async def _watch(self) -> int:
        data = await asyncio.get_running_loop().sock_recv(self._ending, 8)
        self._ending.close()
        if len(data) < 8:
            raise EOFError("the server of warm processes has ended")
        self.returncode = int.from_bytes(data, "big", signed=True)
        return self.returncode

    async def wait(self) -> int:
        """Return the exit code, negative for a signal, once the process has ended."""
        return await asyncio.shield(self._ended)


async def start(command: Sequence[str], environment: Mapping[str, str], limit: int) -> Child:
    """Start `duemq` with the arguments behind `command[0]`; `limit` is that of a stream reader for its output."""
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    pid, ending = server().start(command, writing, environment)
    os.close(writing)
    stdout = asyncio.StreamReader(limit=limit, loop=loop)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout, loop=loop), os.fdopen(reading, "rb"))
    return Child(pid, ending, stdout)
