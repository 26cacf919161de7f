"""`duemq send` and `duemq cancel`."""

from __future__ import annotations

import os
import sys
from datetime import datetime

import click

from duemq._net.connection import Codec
from duemq._net.tls import Tls
from duemq._values.accounts import Keys
from duemq._values.times import now_ms
from duemq.cli import formatting
from duemq.cli.shared import (
    GROUP,
    client_options,
    duration,
    fail,
    moment,
    one_line_errors,
    run,
    time_limit,
    with_dates,
)
from duemq.errors import RequestTimeoutError
from duemq.pending import ChangeResult, Changes
from duemq.producer import Producer


@click.command(short_help="Send a message, now or due later.")
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--in", "delay", type=duration, metavar="DURATION", help="Deliver it after a delay: 250ms, 5s, 1h30m.")
@click.option(
    "--at", type=moment, metavar="TIME", help="Deliver it at a time: 2030-01-31T08:30, local unless it has a zone."
)
@click.option(
    "--level",
    type=click.IntRange(min=1),
    metavar="N",
    help="Deliver it after the delay of this level, in the topic's table of levels or else the broker's.",
)
@click.option("--tag", help="Tag, by which consumers may filter.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    help="Key, by which `duemq pending` finds the message while it waits. May be repeated.",
)
@click.option(
    "--property", "pairs", multiple=True, metavar="NAME=VALUE", help="Property of the message. May be repeated."
)
@click.option("--timeout", type=time_limit, default="3s", show_default=True, help="Give up after this time.")
@click.option(
    "--replace", is_flag=True, help="Replace the waiting message that was sent with --replace and this --key."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as a line of JSON.")
@client_options
@one_line_errors
@with_dates
def send(
    topic: str,
    body: str | None,
    delay: int | None,
    at: datetime | None,
    level: int | None,
    tag: str | None,
    keys: tuple[str, ...],
    pairs: tuple[str, ...],
    timeout: int,
    replace: bool,
    as_json: bool,
    nameserver: str,
    account: Keys,
    tls: Tls,
    codec: Codec,
) -> None:
    """Send one message to TOPIC and print the id that its broker gave it, its queue and offset, and when it is due.

    `duemq cancel` and `duemq pending` accept this id. --json prints more fields, among them the message's handle, which
    is needed to cancel a message at RocketMQ's brokers, and message_id, the id that its sender gave it and consumers
    see.

    BODY is text. If it is missing or -, the body is read from standard input, unchanged.

    --in and --at need a broker with timers: duemq, or RocketMQ 5.0 or later. For an older broker, a duration that
    equals one of its delay levels is sent as that level. Any other time is refused by this command, since that broker
    would deliver the message immediately.

    \b
    duemq send orders '{"id": 7}' --tag paid --key 7
    duemq send reminders 'call back' --in 1h30m
    duemq send reminders 'good morning' --at TOMORROWT08:30
    duemq send searches 'index 4711' --in 30s --key 4711 --replace
    date | duemq send log --level 3
    """
    if sum(each is not None for each in (delay, at, level)) > 1:
        raise click.UsageError("give only one of --in, --at and --level")
    if replace and len(keys) != 1:
        raise click.UsageError("--replace needs exactly one --key, which names the message to replace")
    properties = dict(split_pair(pair) for pair in pairs)
    content = read_body(body)

    async def work() -> None:
        async with make_producer(nameserver, codec, timeout, account, tls) as producer:
            result = await producer.send(
                topic,
                content,
                tags=tag,
                keys=keys,
                properties=properties,
                level=level,
                delay=None if delay is None else delay / 1000,
                deliver_at=at,
                replace=replace,
            )
        click.echo(formatting.result_as_json(result) if as_json else formatting.result_as_text(result, now_ms(), delay))

    run(work())


def read_body(body: str | None) -> bytes:
    """Return the body of a message to send: the argument BODY, or the content of standard input. Raises UsageError."""
    if body is not None and body != "-":
        return os.fsencode(body)  # Python decoded the arguments so that this returns their bytes, valid or not
    # sys.stdin is None if standard input is closed.
    if sys.stdin is None or (body is None and sys.stdin.isatty()):
        raise click.UsageError("no BODY; give it as an argument, or pipe it in")
    return sys.stdin.buffer.read()


def make_producer(nameserver: str, codec: Codec, timeout_ms: int, account: Keys, tls: Tls) -> Producer:
    """Return the producer of a command, which is not started yet."""
    return Producer(
        nameserver,
        group=GROUP,
        codec=codec,
        timeout=timeout_ms / 1000,
        access_key=account.access_key,
        secret_key=account.secret_key,
        tls=tls,
    )


def split_pair(text: str) -> tuple[str, str]:
    """Return the name and the value of a property. Raises UsageError."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(f"{text!r} is not NAME=VALUE")
    return name, value


@click.command(short_help="Cancel waiting messages.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", type=time_limit, default="3s", show_default=True, help="Give up after this time.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each message.")
@client_options
@one_line_errors
def cancel(
    ids: tuple[str, ...], timeout: int, as_json: bool, nameserver: str, account: Keys, tls: Tls, codec: Codec
) -> None:
    """Cancel messages that wait for a time or a delay level, and print the result for each.

    ID is the id that `duemq send` and `duemq pending list` print, or the handle that `duemq send --json` prints. The
    exit code is 0 if none of the messages will be delivered. Works with duemq brokers; handles of messages with a timer
    also work with RocketMQ 5.3 or later.

    \b
    id=$(duemq send reminders 'call back' --in 1h --json | jq -r .handle)
    duemq cancel $id
    """
    found: list[Changes] = []

    async def work() -> None:
        async with make_producer(nameserver, codec, timeout, account, tls) as producer:
            found.append(await producer.cancel(ids))

    try:
        run(work())
    except RequestTimeoutError as error:
        fail(f"{error}. Run the same command again to see the result for each message")
    (changes,) = found
    for message in changes.messages:
        click.echo(formatting.changed_as_json(message) if as_json else formatting.changed_as_text(message))
    if set(changes.counts) - {ChangeResult.CANCELLED, ChangeResult.ALREADY_CANCELLED}:
        sys.exit(1)
