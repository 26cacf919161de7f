from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory for tests that ask which parts of a file are in memory. `make test` has `tmp_path` in /dev/shm, whose
    file system cannot answer that."""
    with TemporaryDirectory(prefix="duemq-") as path:
        yield Path(path)
