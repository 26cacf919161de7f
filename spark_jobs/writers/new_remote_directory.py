"""A new directory behind a URI (s3://, hdfs://) in the making. No directory there can be renamed as a whole, so the
file written last shows that all others are written: for an archive its manifest.json.

    <directory>/.scratch/begun    exists from the beginning to the end: if it is left, the next run removes all files
"""

from __future__ import annotations

from typing import Final

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.writers.new_directory import SCRATCH

_BEGUN: Final = f"{SCRATCH}/begun"


class NewRemoteDirectory:
    """A new directory behind a URI in the making, as the module describes. Two runs into the same directory at the same
    time are not detected."""

    def __init__(self, target: str) -> None:
        self.directory = Directory(target)
        self.path = self.directory.path

    def begin(self) -> None:
        """Remove the remains of an interrupted run, and write `begun`. Raises JobError."""
        names = self.directory.names()
        if names and _BEGUN not in names:
            raise JobError(f"{self.path}: exists and is not empty; give another path, or remove it first")
        for name in sorted(names, key=lambda name: name == _BEGUN):
            self.directory.remove(name)
        self.directory.write(_BEGUN, b"a run writes here, or was interrupted\n")

    def need(self, size: int) -> None:
        """Does nothing: the space behind a URI is unknown."""

    def finish(self) -> None:
        """Remove the scratch files. Raises JobError."""
        for name in sorted(self.directory.names(SCRATCH), key=lambda name: name == _BEGUN):
            self.directory.remove(name)

    def give_up(self) -> None:
        """Does nothing: the next run removes what was written."""
