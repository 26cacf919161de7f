"""The option `--account`: the keys with which the commands sign their requests.

There are no options for the keys themselves, since every user of a machine can see the command lines of all processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from duemq._values.accounts import ACCESS_KEY, ACCOUNT_FILE, SECRET_KEY, Keys, keys_in, read_account
from duemq.errors import ArgumentError


def account_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option `--account`; the command gets its keys as the argument `account`."""

    def read(ctx: click.Context, option: click.Parameter, value: Path | None) -> Keys:
        if value is None:
            return keys_in(os.environ)
        try:
            return read_account(value)
        except ArgumentError as error:
            raise click.BadParameter(str(error)) from None

    decorate: Callable[[Any], Any] = click.option(
        "--account",
        type=click.Path(path_type=Path),
        envvar=ACCOUNT_FILE,
        callback=read,
        metavar="FILE",
        help=f"File with the keys of your account, in the format of mqadmin's tools.yml; by default the keys in "
        f"${ACCESS_KEY} and ${SECRET_KEY}.",
    )
    decorated: Callable[..., None] = decorate(command)
    return decorated
