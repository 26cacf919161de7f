"""Python processes that run tasks for this one: new interpreters that can import all that this one can, but do not
import its `__main__`.

multiprocessing would import `__main__` in each process, and so run a script again that does not guard against it. Its
workers also outlive this process if it is killed, since each has a copy of the pipe whose end it waits for. Here a
worker has two pipes of its own, for requests and answers, pickled one after the other. It ends when the request pipe
ends, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, Final, NoReturn

from duemq.spark_jobs.errors import JobError

_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]\n"
    "from duemq.spark_jobs.writers.processes import serve\nserve()"
)


class Worker:
    """A process that runs tasks, one at a time. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _PROGRAM, *sys.path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, function: Callable[[Any], Any], item: Any) -> Any:
        """Run a function of a module with an item. Raises the function's exceptions, and JobError if the process
        ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = pickle.dumps((function, item))
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            result, error = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise JobError(_ended(self._process.wait())) from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def kill(self) -> None:
        """End the process in the middle of a task, whose `run` then raises JobError."""
        self._process.kill()


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "a process that ran a task was killed, as the system does when memory runs out: give fewer workers"
    return f"a process that ran a task ended with {'signal' if code < 0 else 'exit code'} {abs(code)}"


def serve() -> NoReturn:
    """Run tasks in a worker process until its requests end."""
    # On Ctrl-C the parent closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Output printed by tasks must not end up among the answers.
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    waiting: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, waiting), daemon=True).start()
    while True:
        answer = _answer(*waiting.get())
        try:
            answers.write(answer)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)


def _receive(requests: IO[bytes], waiting: queue.SimpleQueue[tuple[Any, Exception | None]]) -> None:
    """Receive requests. Runs in a thread, to notice their end whatever the task does."""
    while True:
        try:
            waiting.put((pickle.load(requests), None))
        except EOFError:
            os._exit(0)
        except Exception as error:
            waiting.put((None, error))


def _answer(request: Any, error: Exception | None) -> bytes:
    result = None
    if error is None:
        function, item = request
        try:
            result = function(item)
        except Exception as raised:
            error = raised
    try:
        return pickle.dumps((result, error))
    except Exception as failed:
        return pickle.dumps((None, RuntimeError(f"{type(error or failed).__name__}: {error or failed}")))
