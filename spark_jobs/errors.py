"""What a job tells its user in one line."""

from __future__ import annotations


class JobError(Exception):
    """A job cannot do what it was asked to: one line that says what is wrong and what to do."""


class NoStore(JobError):
    """There is no store at a path. Attributes: `path`, `why`."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[type[NoStore], tuple[str, str]]:
        return NoStore, (self.path, self.why)


class NotKept(JobError):
    """What an earlier run kept cannot be used; the text says why. The run reads what it is missing anew."""
