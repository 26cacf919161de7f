"""`duemq schedule`: adds, lists, pauses, resumes and removes recurring messages."""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime
from typing import Any

import click

from duemq._net.connection import Codec
from duemq._net.tls import Tls
from duemq._values.accounts import Keys
from duemq._values.times import now_ms
from duemq.admin import Admin
from duemq.cli import formatting
from duemq.cli.messages import make_producer, read_body, split_pair
from duemq.cli.pending import admin_options
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
from duemq.pending import RecurringResult


@click.group(short_help="Manage recurring messages.")
def schedule() -> None:
    """Have the broker deliver messages again and again, without a process of your own.

    \b
    duemq schedule add reports nightly --name nightly --cron "0 3 * * *" --zone Europe/Paris
    duemq schedule add heartbeats tick --name tick --every 90s
    duemq schedule list
    duemq schedule pause reports nightly
    duemq schedule resume reports nightly
    duemq schedule remove reports nightly

    Needs duemq brokers. docs/timers.md has the details.
    """


@schedule.command(short_help="Add or replace a recurring message.")
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--name", required=True, help="Name of the message in the topic; a message of the same name is replaced.")
@click.option("--every", type=duration, metavar="DURATION", help="Deliver it at this interval: 90s, 1h30m.")
@click.option("--cron", metavar="FIELDS", help="Deliver it at the times of these five or six cron fields.")
@click.option("--zone", metavar="ZONE", help="Time zone of --cron, such as Europe/Paris; UTC by default.")
@click.option("--from", "start", type=moment, metavar="TIME", help="Deliver nothing before this time.")
@click.option("--to", "end", type=moment, metavar="TIME", help="Deliver nothing after this time.")
@click.option("--count", "-n", type=click.IntRange(min=1), metavar="N", help="Deliver it N times, then remove it.")
@click.option("--tag", help="Tag, by which consumers may filter.")
@click.option(
    "--property", "pairs", multiple=True, metavar="NAME=VALUE", help="Property of the message. May be repeated."
)
@click.option("--timeout", type=time_limit, default="3s", show_default=True, help="Give up after this time.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as a line of JSON.")
@client_options
@one_line_errors
@with_dates
def add(
    topic: str,
    body: str | None,
    name: str,
    every: int | None,
    cron: str | None,
    zone: str | None,
    start: datetime | None,
    end: datetime | None,
    count: int | None,
    tag: str | None,
    pairs: tuple[str, ...],
    timeout: int,
    as_json: bool,
    nameserver: str,
    account: Keys,
    tls: Tls,
    codec: Codec,
) -> None:
    """Have the broker deliver this message to TOPIC again and again, and print when the first delivery is due.

    BODY is text. If it is missing or -, the body is read from standard input, unchanged.

    \b
    duemq schedule add reports nightly --name nightly --cron "0 3 * * *" --zone Europe/Paris
    duemq schedule add heartbeats tick --name tick --every 90s --count 10
    duemq schedule add offers winter --name winter --every 1d --from TOMORROW --to DAY-AFTER
    """
    if (every is None) == (cron is None):
        raise click.UsageError("give one of --every and --cron")
    content = read_body(body)
    properties = dict(map(split_pair, pairs))

    async def work() -> None:
        async with make_producer(nameserver, codec, timeout, account, tls) as producer:
            result = await producer.schedule(
                topic,
                content,
                name=name,
                every=None if every is None else every / 1000,
                cron=cron,
                zone=zone,
                start=start,
                end=end,
                count=count,
                tags=tag,
                properties=properties,
            )
        click.echo(formatting.result_as_json(result) if as_json else formatting.result_as_text(result, now_ms(), None))

    run(work())


@schedule.command("list", short_help="List the recurring messages.")
@click.option("--topic", help="Only messages for this topic.")
@admin_options
def list_recurring(topic: str | None, as_json: bool, admin: Admin) -> None:
    """Print a line for each recurring message: when it is delivered next, or "paused"; its topic, [tag] and name; and
    when it recurs. The lines are in no particular order."""

    async def work() -> None:
        async with admin, aclosing(admin.recurring(topic)) as found:
            async for message in found:
                line = formatting.pending_as_json(message) if as_json else formatting.recurring_as_text(message)
                if not print_line(line):
                    return

    run(work())


def _change(action: str, topic: str, name: str, as_json: bool, admin: Admin) -> None:
    async def work() -> None:
        async with admin:
            result: RecurringResult = await getattr(admin, f"{action}_recurring")(topic, name)
        if result is RecurringResult.NOT_FOUND and not as_json:
            fail(f"{topic} has no recurring message with the name {name}; see duemq schedule list")
        click.echo(f'{{"result":"{result.value}"}}' if as_json else _TEXTS[result])

    run(work())


_TEXTS = {
    RecurringResult.PAUSED: "paused",
    RecurringResult.RESUMED: "resumed",
    RecurringResult.REMOVED: "removed",
    RecurringResult.UNCHANGED: "unchanged, since it already was in that state",
}


@schedule.command(short_help="Pause a recurring message.")
@click.argument("topic")
@click.argument("name")
@admin_options
def pause(topic: str, name: str, **options: Any) -> None:
    """Pause the recurring message NAME of TOPIC until it is resumed. Deliveries until then are skipped."""
    _change("pause", topic, name, **options)


@schedule.command(short_help="Resume a paused message.")
@click.argument("topic")
@click.argument("name")
@admin_options
def resume(topic: str, name: str, **options: Any) -> None:
    """Resume the paused message NAME of TOPIC; it continues with its next delivery."""
    _change("resume", topic, name, **options)


@schedule.command(short_help="Remove a recurring message.")
@click.argument("topic")
@click.argument("name")
@admin_options
def remove(topic: str, name: str, **options: Any) -> None:
    """Remove the recurring message NAME of TOPIC; it is no longer delivered."""
    _change("remove", topic, name, **options)
