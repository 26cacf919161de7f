"""The cache directory of the peers: one folder per artefact, rebuilt when its sources have changed.

    <cache>/<name>/           the built files
    <cache>/<name>/.key       hash of everything it was built from: versions, sources, tool versions
    <cache>/.lock             held while installing, so that two test runs do not build at once

An artefact is built in a folder beside its place and renamed into it, so an interrupted build leaves nothing that looks
finished.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.peers.errors import NotInstalledError


def cache_directory() -> Path:
    """The directory of the peers: $DUEMQ_PEERS, or ~/.cache/duemq-peers."""
    configured = os.environ.get("DUEMQ_PEERS")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "duemq-peers"


def key_of(*texts: str, files: Iterable[Path] = ()) -> str:
    """Return the key of an artefact made from these texts and the content of these files."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Artefact:
    """One folder of the cache: its name, its sources, and the function that fills it."""

    name: str
    key: str
    build: Callable[[Path], None]

    @property
    def path(self) -> Path:
        """The folder's path, whether built or not."""
        return cache_directory() / self.name

    def is_current(self) -> bool:
        """Whether the folder in the cache was made from the present sources and versions."""
        try:
            return (self.path / ".key").read_text() == self.key
        except FileNotFoundError:
            return False

    def require(self) -> Path:
        """Return the path of the finished artefact. Raises NotInstalledError, which says how to make it."""
        if not self.is_current():
            raise NotInstalledError(self.name)
        return self.path

    def install(self) -> bool:
        """Build the artefact if it is missing or stale; return whether it was built."""
        if self.is_current():
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{self.name}-", dir=self.path.parent))
        try:
            self.build(staging)
            (staging / ".key").write_text(self.key)
            if self.path.exists():
                shutil.rmtree(self.path)
            staging.rename(self.path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return True


@contextlib.contextmanager
def install_lock() -> Iterator[None]:
    """Hold the lock that keeps other installations out."""
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
