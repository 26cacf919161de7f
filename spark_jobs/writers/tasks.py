"""Running one function over many items in parallel: in processes of this machine, or as Spark tasks, which must see the
same directory, and check that they do. Failures of tasks are raised as JobError."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.spark_errors import OUT_OF_MEMORY, in_one_line
from duemq.spark_jobs.store.local_files import reason
from duemq.spark_jobs.worker import prepare_worker
from duemq.spark_jobs.writers.new_directory import NewDirectory
from duemq.spark_jobs.writers.processes import Worker

Item = TypeVar("Item")
Result = TypeVar("Result")
Done = Callable[[Any], None]


class Runner(Protocol):
    """Runs tasks. `run` returns the results in the order of the items; `done` is called with each result as it
    arrives."""

    def run(
        self, function: Callable[[Item], Result], items: Sequence[Item], done: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Run a function on each item. Raises JobError if a task failed; tasks that were not begun by then are not
        begun."""

    def close(self) -> None:
        """Release processes and threads."""


class Inline:
    """Runs tasks one after the other, in this process."""

    def run(
        self, function: Callable[[Item], Result], items: Sequence[Item], done: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Run a function on each item, and return the results in the order of the items; `done` is called with each
        result. Raises JobError if a task failed; the tasks after it are not begun."""
        results = []
        for item in items:
            result = _unwrapped(_guarded(function, item))
            if done is not None:
                done(result)
            results.append(result)
        return results

    def close(self) -> None:
        """Do nothing: there are no processes or threads to release."""


class Processes:
    """Runs tasks in a given number of processes, each with a thread here that waits for it."""

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers)
        self._of_thread = threading.local()
        self._workers: list[Worker] = []

    def run(
        self, function: Callable[[Item], Result], items: Sequence[Item], done: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Run a function on each item, and return the results in the order of the items; `done` is called with each
        result as it arrives. Raises JobError if a task failed; tasks that were not begun by then are not begun."""
        task = partial(_guarded, function)
        return _collect([self._threads.submit(self._run, task, item) for item in items], done, self._kill)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _run(self, task: Callable[[Any], tuple[bool, Any]], item: Any) -> tuple[bool, Any]:
        worker: Worker | None = getattr(self._of_thread, "worker", None)
        if worker is None:
            worker = self._of_thread.worker = Worker()
            self._workers.append(worker)
        outcome: tuple[bool, Any] = worker.run(task, item)
        return outcome

    def close(self) -> None:
        """Release processes and threads."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


class SparkTasks:
    """Runs tasks in Spark, each as a job of its own, so that results arrive while other tasks run."""

    def __init__(self, spark: Any, directory: NewDirectory | SharedDirectory) -> None:
        self._context = spark.sparkContext
        self._directory = directory
        self._threads = ThreadPoolExecutor(max(1, int(self._context.defaultParallelism)))

    def run(
        self, function: Callable[[Item], Result], items: Sequence[Item], done: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Run a function on each item, and return the results in the order of the items; `done` is called with each
        result as it arrives. Raises JobError if a task failed; tasks that were not begun by then are not begun."""
        task = _Task(function, self._directory.target, self._directory.mark)

        def one(item: Item) -> Any:
            with in_one_line():
                return self._context.parallelize([item], 1).map(task).collect()[0]

        return _collect([self._threads.submit(one, item) for item in items], done)

    def close(self) -> None:
        """Release the threads; the session is the caller's."""
        self._threads.shutdown(cancel_futures=True)


class SharedDirectory(NamedTuple):
    """A directory that every machine sees. `mark`: as for `NewDirectory`; None: tasks do not look for one."""

    target: str
    mark: str | None = None


def runner(directory: NewDirectory | SharedDirectory, spark: Any = None, workers: int | None = None) -> Runner:
    """Return a runner for tasks that write into a directory: Spark's if a session is given, else one with `workers`
    processes (by default as many as there are cores; 1: none)."""
    if spark is not None:
        return SparkTasks(spark, directory)
    count = workers if workers is not None else len(os.sched_getaffinity(0))
    return Processes(count) if count > 1 else Inline()


class _Task:
    """A function that returns failures as values. At module level, so that tasks find it by its name."""

    def __init__(self, function: Callable[[Any], Any], target: str, mark: str | None) -> None:
        self._function = function
        self._target = target
        self._mark = mark

    def __call__(self, item: Any) -> tuple[bool, Any]:
        prepare_worker()
        if self._mark is not None and not os.path.exists(self._mark):
            # It would write there anyway, into a directory of its own machine, and nothing would notice the missing
            # files.
            return False, (
                f"{self._target}: {socket.gethostname()}, where a task runs, does not see this directory of the "
                "driver's; give one that all executors share, or --master 'local[*]'"
            )
        return _guarded(self._function, item)


def _guarded(function: Callable[[Any], Any], item: Any) -> tuple[bool, Any]:
    try:
        return True, function(item)
    except JobError as error:
        return False, str(error)
    except OSError as error:
        return False, f"{error.filename}: {reason(error)}" if error.filename else reason(error)
    except MemoryError:
        return False, OUT_OF_MEMORY


def _unwrapped(outcome: tuple[bool, Any]) -> Any:
    is_good, value = outcome
    if not is_good:
        raise JobError(value)
    return value


def _collect(
    futures: Sequence[Future[tuple[bool, Any]]], done: Done | None, interrupt: Callable[[], None] | None = None
) -> list[Any]:
    """Return the results. `interrupt` ends running tasks if the program is being interrupted."""
    try:
        for future in as_completed(futures):
            result = _unwrapped(future.result())
            if done is not None:
                done(result)
    except BaseException as error:
        if interrupt is not None and not isinstance(error, Exception):
            interrupt()
        _cancel(futures)
        raise
    return [_unwrapped(future.result()) for future in futures]


def _cancel(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
    # Running tasks must end before the caller removes their files.
    for future in futures:
        if not future.cancelled():
            future.exception()
