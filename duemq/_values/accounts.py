"""The keys of an account, from the environment or from a file in the format of mqadmin's tools.yml.

accessKey: admin-account
secretKey: its-secret
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from duemq.errors import ArgumentError

ACCESS_KEY: Final = "DUEMQ_ACCESS_KEY"
"""The environment variable with the access key."""
SECRET_KEY: Final = "DUEMQ_SECRET_KEY"
"""The environment variable with the secret key."""
ACCOUNT_FILE: Final = "DUEMQ_ACCOUNT"
"""The environment variable with the path of a file that has both keys."""
_ENTRY: Final = re.compile(r"""(accessKey|secretKey)\s*:\s+(?:"([^"\\]*)"|'([^']*)'|([^\s"'#][^#]*?))\s*(?:\s\#.*)?""")
_MAX_BYTES: Final = 64 * 1024


class Keys(NamedTuple):
    """The keys of an account; both are None without an account."""

    access_key: str | None
    secret_key: str | None

    def __repr__(self) -> str:
        return f"Keys({self.access_key!r}, ...)"


def keys_in(environment: Mapping[str, str]) -> Keys:
    """Return the keys in the environment."""
    return Keys(environment.get(ACCESS_KEY), environment.get(SECRET_KEY))


def read_account(file: Path) -> Keys:
    """Return the keys in a file. Raises ArgumentError, which names the file and the line but never quotes the line."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ArgumentError(f"{file}: {reason}") from None
    try:
        return read_keys(text)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from None


def read_keys(text: str) -> Keys:
    """Return the keys in the text of a file. Raises ArgumentError, which names the line but never quotes it."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        entry = _ENTRY.fullmatch(line.rstrip())
        if entry is None or entry[1] in found:
            raise ArgumentError(f"line {number}: write accessKey: KEY on one line, and secretKey: KEY on another")
        found[entry[1]] = next(value for value in entry.groups()[1:] if value is not None)
    if len(found) != 2:
        raise ArgumentError("accessKey or secretKey is missing")
    return Keys(found["accessKey"], found["secretKey"])
