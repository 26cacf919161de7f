"""What to sync, apart from who does it: a job is planned and noted by the thread that owns the store, and run by any
thread, since waiting for the disk must not hold up the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from storage.checkpoint import Checkpoint, save
from storage.commitlog import Commitlog
from storage.consume_queue import ConsumeQueue
from storage.files import File, Files


class FlushJob:
    """Makes everything that is in the commitlog now durable."""

    def __init__(self, files: Files, root: str, log: Commitlog) -> None:
        self.target = log.end
        """Physical offset up to which records are durable when it has run."""
        self.names = log.names_made
        """How many of the commitlog's files have a durable name then."""
        self._files = files
        self._root = root
        self._logs = log.unflushed_files()
        self._directories = [log.directory] if log.has_unsynced_names else []

    def run(self) -> None:
        """Sync. Raises OSError; then nothing may be called durable any more."""
        for file in self._logs:
            file.sync()
        for directory in _with_parents(self._directories, self._root):
            self._files.sync_directory(directory)


class CheckpointJob(FlushJob):
    """Makes consume queues durable as well, then says so in the checkpoint file."""

    def __init__(
        self,
        files: Files,
        root: str,
        log: Commitlog,
        queues: Iterable[tuple[ConsumeQueue, int]],
        checkpoint: Checkpoint,
        path: str,
        others: Iterable[Callable[[], None]] = (),
    ) -> None:
        super().__init__(files, root, log)
        self.checkpoint = checkpoint
        self._path = path
        self._others = list(others)
        self._queue_files: list[File] = []
        for queue, start in queues:
            self._queue_files += queue.files_between(start, queue.written_offset)
            if directory := queue.take_unsynced_directory():
                self._directories.append(directory)

    def run(self) -> None:
        """Sync, and write the checkpoint. Raises OSError."""
        for file in self._queue_files:
            file.sync()
        super().run()
        for sync in self._others:
            sync()
        save(self._files, self._path, self.checkpoint)


def _with_parents(directories: list[str], root: str) -> list[str]:
    """The directories and those above them, up to the root: a new directory's name has to be durable too."""
    found: dict[str, None] = {}
    for directory in directories:
        at = directory
        while at not in found and len(at) >= len(root):
            found[at] = None
            at = os.path.dirname(at)
    return list(found)
