"""An event loop in which time passes only when no callback is ready, and which knows the process of each callback.

Deterministic: callbacks run in the order in which they were scheduled, timers by their time; no thread, no socket, no
clock of the machine. Everything that a broker schedules belongs to that broker's process: once the process is killed,
none of it runs.

Threads are coroutines of another kind (greenlets): a job pauses at each of its file operations for the simulated time
of that operation, and other jobs and the loop go on meanwhile. So a file can be removed between two syncs of a
checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import AsyncGenerator, Callable
from typing import Any

import greenlet


class Killed(SystemExit):
    """A process is cut off in the middle of its work. Not an Exception, since no code may catch it and asyncio must
    pass it on."""


class Process:
    """One run of a program, which owns its callbacks and jobs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.jobs: dict[greenlet.greenlet, None] = {}

    def __repr__(self) -> str:
        return self.name


WORLD = Process("the world")


class Deadlock(AssertionError):
    """Nothing is scheduled any more, and a task still waits."""


class _Selector(selectors.BaseSelector):
    """Lets the loop's time pass instead of waiting."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is left to happen")
        self._loop.pass_time(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        raise NotImplementedError

    def unregister(self, fileobj: Any) -> Any:
        raise NotImplementedError

    def get_map(self) -> Any:
        return {}


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Selector(self)
        self._now = 1000.0
        self.process = WORLD
        """The process of the running callback."""
        self.turns = 0
        self.callbacks = 0
        self._main = greenlet.getcurrent()
        self.set_exception_handler(self._failed)
        self.failures: list[str] = []
        """Exceptions that no code handled."""
        self._generators: dict[int, Process] = {}
        """The process of each asynchronous generator, by the generator's identity."""

    # --- time

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        self.turns += 1
        self._now += seconds

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    # --- owners of callbacks

    def _bound(self, callback: Callable[..., Any], process: Process) -> Callable[..., Any]:
        def run(*arguments: Any) -> None:
            if not process.is_alive:
                return
            before, self.process = self.process, process
            self.callbacks += 1
            try:
                callback(*arguments)
            finally:
                self.process = before

        return run

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return super().call_soon(self._bound(callback, self.process), *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return super().call_at(when, self._bound(callback, self.process), *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_for(self, process: Process, delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        """Schedule a callback of another process, such as the arrival of bytes."""
        before, self.process = self.process, process
        try:
            return self.call_at(self.time() + delay, callback, *arguments)
        finally:
            self.process = before

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._generators[id(agen)] = self.process
        super()._asyncgen_firstiter_hook(agen)  # type: ignore[misc]

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Do not close the generators of a dead process: nothing of it runs any more."""
        if self._generators.pop(id(agen), self.process).is_alive:
            super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]

    # --- jobs

    def start_job(self, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Run a function as a thread of the running process would; `done` is called in a later turn of the loop."""
        process = self.process

        def run() -> None:
            error: Exception | None = None
            try:
                work()
            except Exception as raised:
                error = raised
            process.jobs.pop(job, None)
            if process.is_alive:
                self.call_for(process, 0.0, done, error)

        job = greenlet.greenlet(run, self._main)
        process.jobs[job] = None
        self.call_soon(job.switch)

    @property
    def is_in_job(self) -> bool:
        """Whether the running code is a job, and not the loop."""
        return greenlet.getcurrent() is not self._main

    def pause_job(self, seconds: float) -> None:
        """Pause the running job for `seconds`, while everything else goes on. Called within a job."""
        job, process = greenlet.getcurrent(), self.process
        self.call_for(process, seconds, job.switch)
        self._main.switch()
        self.process = process
        if not process.is_alive:
            raise Killed

    def kill(self, process: Process) -> None:
        """End a process: nothing of it runs any more."""
        process.is_alive = False
        jobs, process.jobs = process.jobs, {}
        for job in jobs:
            if job is greenlet.getcurrent() or job.gr_frame is None:
                continue
            job.parent = greenlet.getcurrent()
            with contextlib.suppress(Killed):
                job.throw(Killed)
