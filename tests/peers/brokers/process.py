"""A broker or name server as a child process whose output is kept in a file and watched for the line that says it is
up.

The output goes through a pipe, so that a wait for a line ends with an event and needs no polling. The child dies with
its parent (PDEATHSIG), since a killed test run must not leave JVMs behind.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from tests.peers import warm
from tests.peers.errors import PeerError, StartError
from tests.support import canary

_PR_SET_PDEATHSIG = 1
_SHOWN_LINES = 40
_LONGEST_LINE = 1 << 22
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """One child process. Its whole output, standard output and error together, is appended to `output`; `logs`: other
    log files of the process. `is_warm`: duemq, with its modules loaded already (see `warm`)."""

    _started: ClassVar[list["Process"]] = []

    def __init__(
        self,
        name: str,
        command: list[str],
        output: Path,
        env: dict[str, str] | None = None,
        logs: Sequence[Path] = (),
        *,
        is_warm: bool = False,
    ) -> None:
        self.name = name
        self.logs = (output, *logs)
        self._ended_at: float | None = None
        self.command = command
        self._is_ours = Path(command[0]).name == "duemq"
        """Whether no secret may be in what it shows; RocketMQ's programs log some."""
        self.output = output
        self._env = os.environ | (env or {})
        self._is_warm = is_warm
        self._child: asyncio.subprocess.Process | warm.Child | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._child is not None and self._child.returncode is None

    @property
    def pid(self) -> int:
        """The process id, also after the process has ended."""
        if self._child is None:
            raise PeerError(f"{self.name} was not started")
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while running."""
        return self._child.returncode if self._child is not None else None

    async def start(self, ready: str, timeout: float = 60) -> str:
        """Start the process and return the line that matches the pattern `ready`, once it has been printed."""
        if self.running:
            raise PeerError(f"{self.name} is running already")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        begin = self.output.stat().st_size if self.output.exists() else 0
        child = await self._started_child()
        self._child = child
        self._ended_at = None
        self._started.append(self)
        seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pump = asyncio.create_task(self._copy_output(child, re.compile(ready), seen))
        try:
            async with asyncio.timeout(timeout):
                return await seen
        except (TimeoutError, EOFError):
            if self.running:
                await self.kill()
            else:
                await child.wait()
            raise StartError(self.name, child.returncode, self._text_from(begin)) from None

    async def _started_child(self) -> asyncio.subprocess.Process | warm.Child:
        if self._is_warm:
            canary.look(f"the command line of {self.name}", "\0".join(self.command))
            return await warm.start(self.command, self._env, _LONGEST_LINE)
        return await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
            preexec_fn=die_with_parent,
            limit=_LONGEST_LINE,
        )

    async def stop(self, timeout: float = 60) -> int:
        """Ask the process to end (SIGTERM), wait until it has, and return its exit code."""
        if self.running:
            self._signal(signal.SIGTERM)
        return await self.ended(timeout)

    async def ended(self, timeout: float = 60) -> int:
        """Wait until the process has ended, and return its exit code."""
        try:
            async with asyncio.timeout(timeout):
                return await self._finish()
        except TimeoutError:
            await self.kill()
            raise PeerError(f"{self.name} did not end within {timeout:.0f} s; see {self.output}") from None

    async def kill(self) -> None:
        """End the process with SIGKILL; only what it had written by then stays."""
        if self.running:
            self._signal(signal.SIGKILL)
        await self._finish()

    @classmethod
    def logs_since(cls, begin: float) -> Iterator[tuple[str, str]]:
        """Yield the ends of the logs of all processes that ran at some time from `begin` on (seconds since the epoch):
        the name of each, and its last lines."""
        for process in dict.fromkeys(cls._started):
            if process._ended_at is None or process._ended_at >= begin:
                for path in process.logs:
                    if path.exists():
                        text = path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
                        yield f"{process.name}, the end of {path}", "\n".join(text)

    def _signal(self, number: int) -> None:
        if self._is_ours:
            canary.look_at_processes(self.pid)
        # Not by the child's own methods: these reap a child that has just ended, and asyncio, which waits for it, then
        # cannot get the exit code.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def _finish(self) -> int:
        if self._child is None:
            raise PeerError(f"{self.name} was not started")
        returncode = await self._child.wait()
        if self._is_ours:
            canary.look_at_files(self.logs[1:])
        self._ended_at = time.time()
        if self._pump is not None:
            await self._pump
            self._pump = None
        return returncode

    def _text_from(self, begin: int) -> str:
        with self.output.open("rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    async def _copy_output(
        self, child: asyncio.subprocess.Process | warm.Child, ready: re.Pattern[str], seen: asyncio.Future[str]
    ) -> None:
        assert child.stdout is not None
        with self.output.open("ab", buffering=0) as file:
            async for raw in child.stdout:
                file.write(raw)
                if self._is_ours:
                    canary.look(self.name, raw)
                line = raw.decode(errors="replace").rstrip()
                if not seen.done() and ready.search(line):
                    seen.set_result(line)
        if not seen.done():
            seen.set_exception(EOFError())
            seen.exception()  # retrieved here, in case no caller waits any more
