"""Paths that jobs are given, and files that they leave."""

from __future__ import annotations

import os
import re
from typing import Final

from spark_jobs.errors import JobError

_SCHEME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_CREDENTIALS: Final = re.compile(r"^([^:/]+://)[^/?]*@")


def is_local(path: str) -> bool:
    """Whether something lies in this machine's file system, as its path or URI tells."""
    return not _SCHEME.match(path) or path.startswith("file://")


def shown(path: str) -> str:
    """A path or URI as it may be told and written down: without the keys that a URI of S3 can have."""
    if is_local(path):
        return path
    return _CREDENTIALS.sub(r"\1", path).partition("?")[0]


def local_path(path: str) -> str:
    """A path of this machine's file system, for what is not read or written elsewhere. Raises JobError for the URI of
    another one, which would else be a directory with a strange name."""
    if not is_local(path):
        raise JobError(
            f"{shown(path)}: only stores are read by URI; give a directory of this machine, or a mounted one"
        )
    return path.removeprefix("file://")


def replace_file(path: str, data: bytes) -> None:
    """Replace a file as a whole, durably. Raises OSError."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
