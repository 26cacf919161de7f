"""A client program as a child process: requests and replies are matched by id, events are handed on (PROTOCOL.md)."""

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.peers.errors import PeerDiedError
from tests.peers.messages import Json, failure

_LINE_LIMIT = 64 << 20


class Program:
    """One running client program."""

    def __init__(
        self, name: str, command: list[str], directory: Path, env: dict[str, str], event: Callable[[Json], None]
    ):
        self.name = name
        self.log = directory / f"{name}.err"
        self._command = command
        self._directory = directory
        self._env = os.environ | env | {"HOME": str(directory)}
        self._event = event
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Json]] = {}
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until it answers."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self._directory,
                env=self._env,
                start_new_session=True,
                limit=_LINE_LIMIT,
            )
        self._reader = asyncio.create_task(self._read(self._child))
        await self.call("hello")

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._child is not None and self._child.returncode is None

    async def call(self, op: str, *, timeout: float = 60, **fields: Any) -> Json:
        """Send a request and return the result in its reply; raise CallError if the reply has an error."""
        if self._child is None or self._child.stdin is None or not self.running:
            raise PeerDiedError(f"{self.name} is not running; see {self.log}")
        number = next(self._ids)
        reply: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        request = {"id": number, "op": op} | {name: value for name, value in fields.items() if value is not None}
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(timeout):
                answer = await reply
        except TimeoutError:
            raise TimeoutError(f"{self.name} did not answer {op} within {timeout:.0f} s; see {self.log}") from None
        finally:
            self._replies.pop(number, None)
        if "error" in answer:
            raise failure(op, answer["error"])
        result: Json = answer["result"]
        return result

    async def stop(self) -> None:
        """End the process, which stops when its input ends."""
        if self._child is None:
            return
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        if self._reader is not None:
            await self._reader

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        end = f"{self.name} has ended; see {self.log}"
        try:
            assert child.stdout is not None
            async for raw in child.stdout:
                line = json.loads(raw)
                if "event" in line:
                    self._event(line)
                elif (reply := self._replies.get(line["id"])) is not None and not reply.done():
                    reply.set_result(line)
        except Exception as error:  # nothing is read any more, so waiting callers must get the reason
            end = f"{self.name} wrote something that cannot be taken: {error!r}"
            child.kill()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(PeerDiedError(end))
