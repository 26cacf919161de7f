"""Jobs that wait for the disk. The thread that owns the store plans them and handles their results; a worker runs them,
so that waiting for the disk holds up nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Protocol

from duemq.storage.durability.checkpoint import Checkpoint, save
from duemq.storage.files import File, Files
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.queues.consume_queue import ConsumeQueue
from duemq.storage.queues.extension import extension_of


class Lane(Enum):
    """Groups of jobs. Jobs of one lane run one at a time, in the order in which they were started; jobs of different
    lanes run in parallel."""

    FLUSH = auto()
    """Syncs of the commitlog, and nothing else: the kernel reports a failed write-back only once, so one lane must see
    all reports."""
    FILES = auto()
    """Checkpoints, and removals of files that a checkpoint might be syncing."""
    ALLOCATE = auto()
    """Allocation of disk space ahead of the commitlog's end."""


class JobWorkers(Protocol):
    """Runs jobs in worker threads."""

    def start(self, lane: Lane, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Run `work` in a thread that may wait. `done` is called in the thread that owns the store, never before
        `start` has returned: with None, or with the exception if `work` failed or could not be run. Raises nothing."""


class FlushJob:
    """Makes durable everything that the commitlog holds when the job is made."""

    def __init__(self, files: Files, log: Commitlog) -> None:
        self.target = log.end
        """Physical offset up to which records are durable when the job has run."""
        self.names = log.names_made
        """Number of commitlog files whose names are durable when the job has run."""
        self._files = files
        self._logs = log.unflushed_files()
        self._directory = log.directory if log.has_unsynced_names else None

    def run(self) -> None:
        """Sync the commitlog. Raises NotDurable: nothing may then be reported as durable any longer; OSError."""
        for file in self._logs:
            file.sync()
        if self._directory is not None:
            self._files.sync_directory(self._directory)


class CheckpointJob:
    """Syncs the consume queues and the other files beside the commitlog, then writes the checkpoint file. Before the
    job is started, the commitlog must be durable up to the checkpoint's recovery offset."""

    def __init__(
        self,
        files: Files,
        queue_directory: str,
        queues: Iterable[tuple[ConsumeQueue, int]],
        checkpoint: Checkpoint,
        path: str,
        others: Iterable[Callable[[], None]] = (),
        last: Callable[[], None] = lambda: None,
    ) -> None:
        """Plan the job. `queues`: queues with units that are not durable, and the queue offsets where those units
        start. `path`: of the checkpoint file. `others` write and sync the files that the checkpoint's notes describe.
        `last` is called once the checkpoint is durable."""
        self.checkpoint = checkpoint
        self._files = files
        self._queue_directory = queue_directory
        self._path = path
        self._others = list(others)
        self._last = last
        self._queue_files: list[File] = []
        self.names: list[tuple[ConsumeQueue, int]] = []
        """For each queue with new files: the number of files whose names are durable when the job has run."""
        self._extensions: list[str] = []
        for queue, start in queues:
            self._queue_files += queue.files_between(start, queue.written_offset)
            if queue.has_unsynced_names:
                self.names.append((queue, queue.names_made))
                if (directory := queue.extension_directory) is not None:
                    self._extensions.append(directory)

    def run(self) -> None:
        """Sync the files, and write the checkpoint. Raises NotDurable if a sync failed, and OSError if a write did."""
        for file in self._queue_files:
            file.sync()
        for directory in _with_parents([queue.directory for queue, _ in self.names], self._queue_directory):
            self._files.sync_directory(directory)
        for directory in _with_parents(self._extensions, extension_of(self._queue_directory)):
            self._files.sync_directory(directory)
        for other in self._others:
            other()
        save(self._files, self._path, self.checkpoint)
        self._last()


class RemoveJob:
    """Removes files and whole directories."""

    def __init__(self, files: Files, paths: Iterable[str], directories: Iterable[str] = ()) -> None:
        self._files = files
        self._paths = list(paths)
        self._directories = list(directories)
        self.removed: list[str] = []
        """The files that are gone."""

    def run(self) -> None:
        """Remove the files and directories that still exist; the removal of directories is durable. If a file cannot be
        removed, the files after it in the same directory are kept, too. Raises OSError, NotDurable; may be run
        again."""
        stuck: dict[str, OSError] = {}
        for path in self._paths:
            directory = os.path.dirname(path)
            if directory in stuck:
                continue
            try:
                self._files.remove(path)
            except OSError as error:
                stuck[directory] = error
            else:
                self.removed.append(path)
        for directory in self._directories:
            self._files.remove_tree(directory)
            self._files.sync_directory(os.path.dirname(directory))
        for first in stuck.values():
            raise first


def _with_parents(directories: list[str], root: str) -> list[str]:
    """Return the directories and their parents up to the root, each once: the names of new directories must be durable,
    too. All directories must lie below the root."""
    found: dict[str, None] = {}
    for directory in directories:
        at = directory
        while at not in found:
            found[at] = None
            if at == root:
                break
            at = os.path.dirname(at)
    return list(found)
