"""A new directory behind a URI (s3://, hdfs://) in the making. Nothing there can be renamed as a whole, so the last
file that is written says that all are there: for an archive its manifest.json.

    <directory>/.scratch/begun    there from the beginning to the end: where there is one, the next run removes all
"""

from __future__ import annotations

from typing import Final

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.writers.place import SCRATCH

_BEGUN: Final = f"{SCRATCH}/begun"


class RemotePlace:
    """See the module. Two runs into the same directory at once are not noticed."""

    def __init__(self, target: str) -> None:
        self.directory = Directory(target)
        self.path = self.directory.path

    def begin(self) -> None:
        """Make ready, without what an interrupted run left. Raises JobError."""
        names = self.directory.names()
        if names and _BEGUN not in names:
            raise JobError(f"{self.path}: exists and is not empty; give another path, or remove it first")
        for name in sorted(names, key=lambda name: name == _BEGUN):
            self.directory.remove(name)
        self.directory.write(_BEGUN, b"a run writes here, or was interrupted\n")

    def need(self, size: int) -> None:
        """There is room, as far as one knows."""

    def finish(self) -> None:
        """Remove what only the job reads. Raises JobError."""
        for name in sorted(self.directory.names(SCRATCH), key=lambda name: name == _BEGUN):
            self.directory.remove(name)

    def give_up(self) -> None:
        """Leave what was written: the next run removes it."""
