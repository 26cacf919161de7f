"""The keys with which the commands sign their requests: from the environment, or from a file as mqadmin's tools.yml.

    accessKey: admin-account
    secretKey: its-secret

They are no options, since every user of a machine sees the command lines of all processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from duemq.errors import ArgumentError

ACCESS_KEY: Final = "DUEMQ_ACCESS_KEY"
SECRET_KEY: Final = "DUEMQ_SECRET_KEY"
_ENTRY: Final = re.compile(r"""(accessKey|secretKey)\s*:\s+(?:"([^"\\]*)"|'([^']*)'|([^\s"'#][^#]*?))\s*(?:\s\#.*)?""")
_MAX_BYTES: Final = 64 * 1024


class Keys(NamedTuple):
    """The keys of an account, None without one."""

    access_key: str | None
    secret_key: str | None

    def __repr__(self) -> str:
        return f"Keys({self.access_key!r}, ...)"


def account_option(command: Callable[..., None]) -> Callable[..., None]:
    """The option that gives a command the keys of its `account`."""

    def read(ctx: click.Context, option: click.Parameter, value: Path | None) -> Keys:
        return _keys(value)

    decorate: Callable[[Any], Any] = click.option(
        "--account",
        type=click.Path(path_type=Path),
        envvar="DUEMQ_ACCOUNT",
        callback=read,
        metavar="FILE",
        help=f"File with the keys of your account, as mqadmin's tools.yml; by default the keys in ${ACCESS_KEY} and "
        f"${SECRET_KEY}.",
    )
    decorated: Callable[..., None] = decorate(command)
    return decorated


def _keys(file: Path | None) -> Keys:
    if file is None:
        return Keys(os.environ.get(ACCESS_KEY), os.environ.get(SECRET_KEY))
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise click.BadParameter(f"{file}: {reason}") from None
    try:
        return read_keys(text)
    except ArgumentError as error:
        raise click.BadParameter(f"{file}: {error}") from None


def read_keys(text: str) -> Keys:
    """The keys in the text of a file. Raises ArgumentError, which names the line and never repeats it."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        entry = _ENTRY.fullmatch(line.rstrip())
        if entry is None or entry[1] in found:
            raise ArgumentError(f"line {number}: write accessKey: KEY in one line, and secretKey: KEY in another")
        found[entry[1]] = next(value for value in entry.groups()[1:] if value is not None)
    if len(found) != 2:
        raise ArgumentError("it has not both accessKey and secretKey")
    return Keys(found["accessKey"], found["secretKey"])
