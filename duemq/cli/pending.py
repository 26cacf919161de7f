"""`duemq pending`: lists, counts and changes waiting messages."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any

import click

from duemq._net.connection import Codec
from duemq._net.tls import Tls
from duemq._values.accounts import Keys
from duemq.admin import LEAST_STEP_MS, MOST_STEPS, Admin
from duemq.cli import formatting
from duemq.cli.shared import (
    client_options,
    duration,
    fail,
    moment,
    one_line_errors,
    print_line,
    run,
    time_limit,
    with_dates,
)
from duemq.errors import RequestTimeoutError
from duemq.pending import ChangeResult, Changes
from duemq.protocol.codes import RequestCode


@click.group(short_help="List and change waiting messages.")
@with_dates
def pending() -> None:
    """List, count and change the messages that wait for a time or a delay level.

    \b
    duemq pending list --topic reminders --key 4711
    duemq pending curve --step 10m --steps 24
    duemq pending cancel --topic reminders --from TOMORROW --to DAY-AFTER

    Needs duemq brokers, and addresses all that the name servers know. Messages that wait at a broker that is down are
    neither listed nor changed.
    """


def admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all commands about waiting messages share. The command gets an `admin`, which is not started
    yet, and `as_json`."""

    @functools.wraps(command)
    @one_line_errors
    def wrapper(*, nameserver: str, account: Keys, tls: Tls, codec: Codec, timeout: int, **options: Any) -> None:
        admin = Admin(
            nameserver,
            codec=codec,
            timeout=timeout / 1000,
            access_key=account.access_key,
            secret_key=account.secret_key,
            tls=tls,
        )
        command(admin=admin, **options)

    timeout = click.option(
        "--timeout", type=time_limit, default="30s", show_default=True, help="Time limit of each request."
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
    return timeout(as_json(client_options(wrapper)))


def selection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select messages, whose parameters have the names of the arguments of `Admin`'s methods, and
    the options that all commands share."""
    options = [
        click.option("--topic", help="Only messages for this topic."),
        click.option("--key", help="Only messages with this key or message id."),
        click.option(
            "--from",
            "begin",
            type=moment,
            metavar="TIME",
            help="Only messages due at this time or later; 1h is in an hour.",
        ),
        click.option("--to", "end", type=moment, metavar="TIME", help="Only messages due before this time."),
    ]

    @functools.wraps(command)
    def checked(*, begin: datetime | None, end: datetime | None, **others: Any) -> None:
        if begin is not None and end is not None and end <= begin:
            raise click.UsageError("--to must be after --from")
        command(begin=begin, end=end, **others)

    command_with_options = admin_options(checked)
    for option in reversed(options):
        command_with_options = option(command_with_options)
    return command_with_options


@pending.command("list", short_help="List waiting messages.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N messages.")
@selection_options
def list_pending(limit: int | None, as_json: bool, admin: Admin, **selection: Any) -> None:
    """Print a line for each waiting message: when it is due, its topic, its level unless it has a timer, [tag], (keys),
    and the id that its broker gave it, for `duemq pending cancel` and similar commands. The lines are in no particular
    order."""

    async def work() -> None:
        printed = 0
        async with admin, aclosing(admin.pending(**selection)) as found:
            async for message in found:
                line = formatting.pending_as_json(message) if as_json else formatting.pending_as_text(message)
                if not print_line(line):
                    return
                printed += 1
                if printed == limit:
                    return

    run(work())


@pending.command(short_help="Count waiting messages.")
@selection_options
def count(as_json: bool, admin: Admin, **selection: Any) -> None:
    """Print the number of waiting messages."""

    async def work() -> None:
        async with admin:
            number = await admin.count(**selection)
        click.echo(f'{{"count":{number}}}' if as_json else str(number))

    run(work())


@pending.command(short_help="Show how many messages are due when.")
@click.option("--topic", help="Only messages for this topic.")
@click.option("--from", "begin", type=moment, metavar="TIME", help="Begin at this time; now by default.")
@click.option("--to", "end", type=moment, metavar="TIME", help="End at this time; replaces --steps.")
@click.option("--step", type=duration, default="1m", show_default=True, metavar="DURATION", help="Length of a span.")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), metavar="N", help="Number of spans; 60 by default.")
@admin_options
@with_dates
def curve(
    topic: str | None,
    begin: datetime | None,
    end: datetime | None,
    step: int,
    steps: int | None,
    as_json: bool,
    admin: Admin,
) -> None:
    """Print a line for each span of time: when it begins, how many messages are due in it, and a bar. Overdue messages
    count as due now.

    \b
    duemq pending curve --step 1h --steps 24
    duemq pending curve --topic reminders --from TOMORROW --to DAY-AFTER --step 30m
    """
    if step < LEAST_STEP_MS:
        raise click.UsageError("--step: write 1s or more")
    if end is not None:
        begin = begin or datetime.now().astimezone()
        if steps is not None or end <= begin:
            raise click.UsageError("--to must be after --from, and cannot be combined with --steps")
        steps = -((begin - end) // timedelta(milliseconds=step))
    number = steps or 60

    async def work() -> None:
        async with admin:
            found = await admin.due_curve(topic, begin=begin, step=step / 1000, steps=number)
        for line in [formatting.curve_as_json(found)] if as_json else formatting.curve_as_text(found):
            click.echo(line)

    run(work())


def change_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and the options of the commands that change messages."""
    return click.argument("ids", metavar="[ID]...", nargs=-1)(selection_options(command))


@pending.command("cancel", short_help="Cancel waiting messages.")
@change_options
def cancel_pending(**options: Any) -> None:
    """Cancel waiting messages, selected by ID or by options. An ID is a message handle, or the id that `duemq send` and
    `duemq pending list` print. Without IDs, give --topic and at least one of --key, --from and --to; `duemq pending
    count` with the same options counts the messages beforehand.

    Prints the result for each ID, or the number of messages with each result. The exit code is 1 if some messages are
    not known to be cancelled, or if a broker does not finish within --timeout; the broker then continues nevertheless.
    """
    _change(Admin.cancel, {ChangeResult.CANCELLED, ChangeResult.ALREADY_CANCELLED}, **options)


@pending.command(short_help="Reschedule waiting messages.")
@click.option("--in", "delay", type=duration, metavar="DURATION", help="Deliver them after a delay: 250ms, 5s, 1h30m.")
@click.option(
    "--at", type=moment, metavar="TIME", help="Deliver them at a time: 2030-01-31T08:30, local unless it has a zone."
)
@change_options
def reschedule(delay: int | None, at: datetime | None, **options: Any) -> None:
    """Give waiting messages a new time, with --in or --at. Their IDs do not change. The messages are selected, and the
    results printed, as by `duemq pending cancel`. The exit code is 1 if some messages did not get the new time.

    \b
    duemq pending reschedule --topic reminders --key 4711 --in 2h
    """
    if (delay is None) == (at is None):
        raise click.UsageError("give one of --in and --at")
    span = None if delay is None else timedelta(milliseconds=delay)
    _change(functools.partial(Admin.reschedule, deliver_at=at, delay=span), {ChangeResult.RESCHEDULED}, **options)


@pending.command(short_help="Deliver waiting messages now.")
@change_options
def deliver(**options: Any) -> None:
    """Deliver waiting messages immediately. The messages are selected, and the results printed, as by `duemq pending
    cancel`. The exit code is 1 if some messages are not delivered now."""
    _change(Admin.deliver_now, {ChangeResult.DELIVERED_NOW}, **options)


def _change(
    change: Callable[..., Coroutine[Any, Any, Changes]],
    wanted: set[ChangeResult],
    ids: tuple[str, ...],
    as_json: bool,
    admin: Admin,
    **selection: Any,
) -> None:
    """Change messages and print the results; exit with code 1 if some results are not among `wanted`. Raises UsageError
    unless either ids or a selection are given."""
    given = {name for name, value in selection.items() if value is not None}
    if (ids and given) or (not ids and not ("topic" in given and len(given) > 1)):
        raise click.UsageError("give IDs, or else --topic with at least one of --key, --from and --to")
    found: list[Changes] = []

    async def work() -> None:
        async with admin:
            found.append(await change(admin, ids or None, **selection))

    try:
        run(work())
    except RequestTimeoutError as error:
        # Other requests, such as those to a name server, change nothing.
        fail(f"{error}. {_what_now(ids)}" if error.request == RequestCode.CHANGE_PENDING.name else str(error))
    (changes,) = found
    for line in (
        [formatting.changes_as_json(changes)] if as_json else formatting.changes_as_text(changes, by_id=bool(ids))
    ):
        click.echo(line)
    if set(changes.counts) - wanted:
        sys.exit(1)


def _what_now(ids: tuple[str, ...]) -> str:
    """Return advice for a user whose change was not answered in time."""
    goes_on = "The broker continues with the change"
    if ids:
        return f"{goes_on}; run the same command again to see the result for each message"
    options = click.get_current_context().params
    words = ["duemq", "pending", "count"]
    for option, name in (("topic", "topic"), ("key", "key"), ("from", "begin"), ("to", "end"), ("nameserver",) * 2):
        value = options[name]
        if value is not None:
            words += [f"--{option}", value.isoformat() if isinstance(value, datetime) else value]
    return f"{goes_on}; to count the messages that still wait: {shlex.join(words)}"
