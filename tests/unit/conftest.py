from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory for tests that ask what is in memory of a file. `make test` has that of `tmp_path` in /dev/shm, whose
    file system cannot tell."""
    with TemporaryDirectory(prefix="duemq-") as path:
        yield Path(path)
