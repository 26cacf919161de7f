"""`duemq clock`: the clock of brokers that run for tests."""

from __future__ import annotations

import click

from duemq._net.tls import Tls
from duemq._values.accounts import Keys
from duemq.cli.keys import account_option
from duemq.cli.shared import duration, nameserver_option, one_line_errors, run
from duemq.cli.tls_options import tls_options
from duemq.testing import TestClock


@click.group()
def clock() -> None:
    """Move the clock of brokers that run for tests.

    \b
    duemq serve --store ./test-data --set testClock=true
    duemq clock advance 2h
    """


@clock.command(short_help="Advance the clock.")
@click.argument("by", type=duration, metavar="DURATION")
@nameserver_option
@account_option
@tls_options
@one_line_errors
def advance(by: int, nameserver: str, account: Keys, tls: Tls) -> None:
    """Advance the clock of all brokers of a name server by DURATION (5s, 1h30m, 2d), and print the new time. Messages
    that are due by then are delivered now. Only brokers started with --set testClock=true have such a clock; if one
    broker was started without it, no clock is moved.
    """

    async def work() -> None:
        now = await TestClock(
            nameserver, access_key=account.access_key, secret_key=account.secret_key, tls=tls
        ).advance(ms=by)
        click.echo(f"the brokers' clock is now {now:%Y-%m-%d %H:%M:%S}.{now.microsecond // 1000:03d}")

    run(work())
