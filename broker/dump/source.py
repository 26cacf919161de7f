"""A file under inspection: read in windows, and never written, whatever its content."""

from __future__ import annotations

import errno
import os
import re
from types import TracebackType
from typing import Final

WINDOW: Final = 1 << 20
MAX_WHOLE: Final = 1 << 28
"""Maximum size, in bytes, of a file that is decoded as a whole."""
_NOT_ZERO: Final = re.compile(rb"[^\0]")
NAME_DIGITS: Final = 20
"""Digits in the name of a file that is named by the offset of its first byte."""


class Source:
    """One open file. A context manager. Raises OSError if it cannot be opened or read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
        self.size = os.fstat(self._fd).st_size
        self._window, self._window_at = b"", 0

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    @property
    def parents(self) -> list[str]:
        """Names of the directories that contain the file, the nearest first."""
        return os.path.dirname(os.path.abspath(self.path)).split(os.sep)[:0:-1]

    @property
    def base(self) -> int:
        """The offset in the file's name, 0 if there is none."""
        return int(self.name) if len(self.name) == NAME_DIGITS and self.name.isdecimal() else 0

    def read(self, at: int, size: int) -> bytes:
        """Return bytes of the file; fewer at its end."""
        start = at - self._window_at
        if start < 0 or start + size > len(self._window):
            self._window = self._pread(at, max(size, WINDOW))
            self._window_at, start = at, 0
        return self._window[start : start + size]

    def _pread(self, at: int, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0:
            part = os.pread(self._fd, size, at)
            if not part:
                break
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def whole(self) -> bytes:
        """Return the whole content of a small file. Raises OSError if the file has more than `MAX_WHOLE` bytes."""
        if self.size > MAX_WHOLE:
            raise OSError(errno.EFBIG, f"{self.size} bytes; files of this kind are read up to {MAX_WHOLE} bytes")
        return self._pread(0, self.size)

    def after_zeros(self, at: int) -> int:
        """Return the position of the first non-zero byte from `at` on; the file's size if there is none. Reads no more
        than `read` does if that byte lies in the window; holes of the file are not read."""
        while at < self.size:
            start = at - self._window_at
            if 0 <= start < len(self._window):
                if found := _NOT_ZERO.search(self._window, start):
                    return self._window_at + found.start()
                at = self._window_at + len(self._window)
                continue
            try:
                at = os.lseek(self._fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return self.size
                if error.errno != errno.EINVAL:
                    raise
            if not self.read(at, 1):
                return self.size
        return self.size

    def find(self, pattern: re.Pattern[bytes], at: int, size: int) -> int | None:
        """Return the position of the first match of a pattern from `at` on; None if there is none. `size`: that of all
        matches, in bytes; none of them may begin with a zero byte."""
        while (at := self.after_zeros(at)) + size <= self.size:
            if len(self.read(at, size)) < size:
                return None
            found = pattern.search(self._window, at - self._window_at)
            if found is not None:
                return self._window_at + found.start()
            at = self._window_at + len(self._window) - size + 1
        return None
