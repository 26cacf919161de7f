"""`duemq send`, `duemq receive` and `duemq cancel`."""

from __future__ import annotations

import asyncio
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
    origin,
    print_line,
    run,
    time_limit,
    until_signal,
    with_dates,
)
from duemq.consumer import Consumer, From
from duemq.errors import RequestTimeoutError
from duemq.messages import ReceivedMessage
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
@click.option("--key", "keys", multiple=True, help="Key, by which the broker indexes it. May be repeated.")
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
        return body.encode()
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


@click.command(short_help="Receive messages and print them.")
@click.argument("topic")
@click.option("--group", default=GROUP, show_default=True, help="Consumer group to join.")
@click.option("--follow", "-f", is_flag=True, help="Keep waiting for messages until Ctrl-C.")
@click.option(
    "--wait",
    type=duration,
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="How long to wait for the first message, without --follow.",
)
@click.option("--count", "-n", type=click.IntRange(min=1), metavar="N", help="Stop after N messages.")
@click.option(
    "--tag", "tags", default="*", metavar="TAGS", help="Only messages with this tag; several tags are joined by ||."
)
@click.option(
    "--from",
    "from_",
    type=origin,
    default="first",
    show_default=True,
    metavar="first|last|TIME",
    help="Where to begin if the group has not read the topic before.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each message as a line of JSON, with all its fields.")
@client_options
@one_line_errors
def receive(
    topic: str,
    group: str,
    follow: bool,
    wait: int,
    count: int | None,
    tags: str,
    from_: From,
    as_json: bool,
    nameserver: str,
    account: Keys,
    tls: Tls,
    codec: Codec,
) -> None:
    """Receive messages of TOPIC and print a line for each: when it arrived, its lateness, [tag], (keys), body.

    The lateness is shown if the due time is known: for messages with a timer, and for messages that duemq delayed by a
    level.

    Printed messages are consumed. The broker stores how far the group has read, so the next `receive` continues there.
    Members of a group that run at the same time share the messages, and must all receive the same topic and tags. Give
    another --group to read another topic at the same time, or to read a topic from its beginning again.

    Without --follow the command ends when it has printed all messages that could be received at its start. If there are
    none, it waits up to --wait for the first message. Messages that are not due yet cannot be received.

    \b
    duemq receive orders --follow
    duemq receive orders --group audit --json | jq .lateness_ms
    duemq receive orders --count 1 --wait 1m
    """

    async def work() -> None:
        consumer = Consumer(
            group,
            nameserver=nameserver,
            from_=from_,
            codec=codec,
            access_key=account.access_key,
            secret_key=account.secret_key,
            tls=tls,
        )
        consumer.subscribe(topic, tags)
        async with consumer:
            await until_signal(_print_messages(consumer, topic, follow, wait, count, as_json))

    run(work())


async def _print_messages(
    consumer: Consumer, topic: str, follow: bool, wait_ms: int, count: int | None, as_json: bool
) -> None:
    printed = 0
    while count is None or printed < count:
        message = await _next_message(consumer, follow, wait_ms if not printed else None)
        if message is None:
            break
        line = formatting.message_as_json(message) if as_json else formatting.message_as_text(message)
        if not print_line(line):
            return  # the user did not see this message, so it is not acknowledged
        await message.ack()
        printed += 1
    if not printed and not follow:
        click.echo(f"duemq: no message in {topic} for this group", err=True)


async def _next_message(consumer: Consumer, follow: bool, wait_ms: int | None) -> ReceivedMessage | None:
    """Return the next message, or None at the end: no message arrived within `wait_ms`; or, if `wait_ms` is None, all
    messages available at the start were read."""
    if follow:
        return await consumer.receive()
    if wait_ms is not None:
        try:
            async with asyncio.timeout(wait_ms / 1000):
                return await consumer.receive()
        except TimeoutError:
            return None
    message = asyncio.create_task(consumer.receive())
    end = asyncio.create_task(consumer.caught_up())
    try:
        await asyncio.wait([message, end], return_when=asyncio.FIRST_COMPLETED)
        return message.result() if message.done() else None
    finally:
        message.cancel()
        end.cancel()


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
