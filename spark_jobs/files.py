"""Files that jobs leave."""

from __future__ import annotations

import os


def replace_file(path: str, data: bytes) -> None:
    """Replace a file as a whole, durably. Raises OSError."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
