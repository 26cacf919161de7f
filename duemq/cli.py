"""The command line: `duemq send`, `duemq receive`, `duemq cancel`, `duemq pending`, `duemq serve`,
`duemq clock advance`, and `duemq spark`, whose commands `spark_jobs.cli` has.

Errors go to stderr as one line, with exit code 1; wrong usage has exit code 2. Ctrl-C at `receive` is its regular end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import click

from duemq import _format
from duemq._admin import LEAST_STEP_MS, MOST_STEPS, Admin
from duemq._connection import Codec
from duemq._consumer import From, PushConsumer
from duemq._durations import parse_duration
from duemq._message import CancelResult, ChangeResult, Changes, ReceivedMessage
from duemq._producer import Producer
from duemq._times import now_ms
from duemq.errors import ArgumentError, DelayError, DueMQError
from spark_jobs.cli import main as spark

P = ParamSpec("P")

GROUP = "duemq-cli"


def duration(text: str) -> int:
    """A duration on the command line, in ms."""
    try:
        return parse_duration(text)
    except ArgumentError as error:
        raise click.BadParameter(str(error)) from None


def moment(text: str) -> datetime:
    """A time on the command line, by this machine's clock unless it names another zone."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time; write it as 2030-01-31T08:30 or 2030-01-31T08:30:00.250+02:00"
        ) from None


def origin(text: str) -> From:
    """Where a new group begins: first, last, or a time."""
    if text == "first":
        return "first"
    return "last" if text == "last" else moment(text)


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn what a user can do something about into one line and an exit code."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (DueMQError, OSError) as error:
            # A delay is wrong only at this broker; the call is right.
            if isinstance(error, ArgumentError) and not isinstance(error, DelayError):
                raise click.UsageError(str(error)) from None
            fail(str(error))

    return wrapper


def fail(text: str) -> NoReturn:
    """End with one line on stderr."""
    click.echo(f"duemq: {text}", err=True)
    sys.exit(1)


nameserver_option = click.option(
    "--nameserver",
    metavar="HOST:PORT[;...]",
    default="127.0.0.1:9876",
    envvar=["DUEMQ_NAMESERVER", "NAMESRV_ADDR"],
    show_default=True,
    show_envvar=True,
    help="Name servers, any of which will do.",
)


def client_options(command: Callable[P, None]) -> Callable[P, None]:
    """The options that `send` and `receive` share."""
    codec = click.option(
        "--codec",
        type=click.Choice(["auto", "json", "msgpack"]),
        default="auto",
        show_default=True,
        help="Codec of the request headers; auto: MessagePack with a duemq broker, JSON with any other.",
    )
    return nameserver_option(codec(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="duemq", prog_name="duemq")
def main() -> None:
    """A message broker for delayed messages, compatible with Apache RocketMQ.

    \b
    duemq serve                          start a broker with its name server
    duemq receive greetings --follow     wait for messages
    duemq send greetings hello --in 5s   send one that is due in 5 seconds
    duemq pending list                   show what waits

    `send` and `receive` work with Apache RocketMQ's brokers too.
    """


@main.command(short_help="Send a message, now or due later.")
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--in", "delay", type=duration, metavar="DURATION", help="Deliver it after so long: 250ms, 5s, 1h30m.")
@click.option(
    "--at", type=moment, metavar="TIME", help="Deliver it at a time: 2030-01-31T08:30, local unless it has a zone."
)
@click.option(
    "--level",
    type=click.IntRange(min=1),
    metavar="N",
    help="Deliver it after the delay of this level, the topic's or the broker's.",
)
@click.option("--tag", help="Tag, by which consumers may filter.")
@click.option("--key", "keys", multiple=True, help="Key, under which the broker indexes it. May be repeated.")
@click.option("--property", "pairs", multiple=True, metavar="NAME=VALUE", help="Property of your own. May be repeated.")
@click.option("--timeout", type=duration, default="3s", show_default=True, help="Give up after so long.")
@click.option("--replace", is_flag=True, help="Take the place of the message that waits with --replace for this --key.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as a line of JSON.")
@client_options
@one_line_errors
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
    codec: Codec,
) -> None:
    """Send one message to TOPIC and print its id, where it lies, and when it is due.

    BODY is text; without it, or if it is -, the body is read from standard input, as it is.

    The broker is asked which delays it has. A duration that equals one of its delay levels, or of the topic's where
    that has its own, is sent as that level; any other duration, and --at, need a broker with timers: duemq, or RocketMQ
    from 5.0 on. An older one would deliver such a message at once, so it is refused here.

    \b
    duemq send orders '{"id": 7}' --tag paid --key 7
    duemq send reminders 'call back' --in 1h30m
    duemq send reminders 'happy new year' --at 2031-01-01T00:00
    duemq send searches 'index 4711' --in 30s --key 4711 --replace
    date | duemq send log --level 3
    """
    properties = dict(_split_pair(pair) for pair in pairs)
    content = _read_body(body)

    async def work() -> None:
        async with Producer(nameserver, group=GROUP, codec=codec, timeout=timeout / 1000) as producer:
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
        click.echo(_format.result_as_json(result) if as_json else _format.result_as_text(result, now_ms(), delay))

    _run(work())


@main.command(short_help="Receive messages and print them.")
@click.argument("topic")
@click.option("--group", default=GROUP, show_default=True, help="Consumer group to be a member of.")
@click.option("--follow", "-f", is_flag=True, help="Do not end: wait for further messages until Ctrl-C.")
@click.option(
    "--wait",
    type=duration,
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="Without --follow: how long to wait for a first message.",
)
@click.option("--count", "-n", type=click.IntRange(min=1), metavar="N", help="End after so many messages.")
@click.option("--tag", "tags", default="*", metavar="TAGS", help="Only messages with this tag; several joined by ||.")
@click.option(
    "--from",
    "from_",
    type=origin,
    default="first",
    show_default=True,
    metavar="first|last|TIME",
    help="Where to begin if the group has not read the topic before.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each message as a line of JSON, with all there is.")
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
    codec: Codec,
) -> None:
    """Receive messages of TOPIC and print one line for each: when it came, how late, [tag], (key), body.

    How late is told where the due time is known: of messages with a timer, and of those that duemq delayed by level.

    Messages that were printed are consumed: the group remembers how far it has read, so the next `receive` goes on from
    there, and members of one group that run at the same time share the messages. Give another --group to read a
    topic from its beginning again.

    Without --follow it ends when everything was printed that was there at its start; if there is nothing, it waits up
    to --wait for a first message. Messages that are not due yet are not there yet.

    \b
    duemq receive orders --follow
    duemq receive orders --group audit --json | jq .lateness_ms
    duemq receive orders --count 1 --wait 1m
    """

    async def work() -> None:
        consumer = PushConsumer(group, nameserver=nameserver, from_=from_, codec=codec)
        consumer.subscribe(topic, tags)
        async with consumer:
            await _until_signal(_print_messages(consumer, topic, follow, wait, count, as_json))

    _run(work())


@main.command(short_help="Cancel messages that wait.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", type=duration, default="3s", show_default=True, help="Give up after so long.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each message.")
@client_options
@one_line_errors
def cancel(ids: tuple[str, ...], timeout: int, as_json: bool, nameserver: str, codec: Codec) -> None:
    """Cancel messages that wait for a time or a delay level, and print what became of each.

    ID is what `duemq send --json` prints as offset_message_id. The exit code is 0 if none of the messages will be
    delivered. Needs duemq brokers.

    \b
    id=$(duemq send reminders 'call back' --in 1h --json | jq -r .offset_message_id)
    duemq cancel $id
    """
    results = dict[str, CancelResult]()

    async def work() -> None:
        async with Producer(nameserver, group=GROUP, codec=codec, timeout=timeout / 1000) as producer:
            results.update(await producer.cancel(ids))

    _run(work())
    for name, result in results.items():
        click.echo(_format.cancelled_as_json(name, result) if as_json else _format.cancelled_as_text(name, result))
    if set(results.values()) - {CancelResult.CANCELLED, CancelResult.ALREADY_CANCELLED}:
        sys.exit(1)


# --- pending ------------------------------------------------------------------------------------------------------


main.add_command(spark, "spark")


@main.group()
def pending() -> None:
    """Look at the messages that wait for a time or a delay level, and change them.

    \b
    duemq pending list --topic reminders --key 4711
    duemq pending curve --step 10m --steps 24
    duemq pending cancel --topic reminders --from 2031-01-01T00:00 --to 2031-01-02T00:00

    Needs duemq brokers; all that the name servers know are asked.
    """


def selection_options(command: Callable[P, None]) -> Callable[P, None]:
    """The options that say which messages, and what all commands about them share."""
    options = [
        click.option("--topic", help="Messages for this topic."),
        click.option("--key", help="Messages with this key, or message id."),
        click.option("--from", "begin", type=moment, metavar="TIME", help="Messages due from this time on."),
        click.option("--to", "end", type=moment, metavar="TIME", help="Messages due before this time."),
    ]
    command = admin_options(command)
    for option in reversed(options):
        command = option(command)
    return command


def admin_options(command: Callable[P, None]) -> Callable[P, None]:
    """What all commands about waiting messages share."""
    timeout = click.option("--timeout", type=duration, default="30s", show_default=True, help="Give up after so long.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line.")
    return timeout(as_json(client_options(command)))


@pending.command("list", short_help="Print messages that wait.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after so many messages.")
@selection_options
@one_line_errors
def list_pending(
    limit: int | None,
    topic: str | None,
    key: str | None,
    begin: datetime | None,
    end: datetime | None,
    as_json: bool,
    timeout: int,
    nameserver: str,
    codec: Codec,
) -> None:
    """Print a line for each message that waits: when it is due, its topic, its level unless it has a timer, [tag],
    (keys), and the broker's id, for `duemq pending cancel` and the like. They are in no order."""

    async def work() -> None:
        printed = 0
        async with (
            Admin(nameserver, codec=codec, timeout=timeout / 1000) as admin,
            aclosing(admin.pending(topic, key=key, begin=begin, end=end)) as found,
        ):
            async for message in found:
                line = _format.pending_as_json(message) if as_json else _format.pending_as_text(message)
                if not _print_line(line):
                    return
                printed += 1
                if printed == limit:
                    return

    _run(work())


@pending.command(short_help="Count messages that wait.")
@selection_options
@one_line_errors
def count(
    topic: str | None,
    key: str | None,
    begin: datetime | None,
    end: datetime | None,
    as_json: bool,
    timeout: int,
    nameserver: str,
    codec: Codec,
) -> None:
    """Print how many messages wait."""

    async def work() -> None:
        async with Admin(nameserver, codec=codec, timeout=timeout / 1000) as admin:
            number = await admin.count(topic, key=key, begin=begin, end=end)
        click.echo(f'{{"count":{number}}}' if as_json else str(number))

    _run(work())


@pending.command(short_help="Show how many messages are due when.")
@click.option("--topic", help="Messages for this topic.")
@click.option("--from", "begin", type=moment, metavar="TIME", help="Begin at this time; now by default.")
@click.option("--to", "end", type=moment, metavar="TIME", help="End at this time, instead of --steps.")
@click.option("--step", type=duration, default="1m", show_default=True, metavar="DURATION", help="Length of a span.")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), metavar="N", help="Number of spans; 60 by default.")
@admin_options
@one_line_errors
def curve(
    topic: str | None,
    begin: datetime | None,
    end: datetime | None,
    step: int,
    steps: int | None,
    as_json: bool,
    timeout: int,
    nameserver: str,
    codec: Codec,
) -> None:
    """Print a line for each span of time: when it begins, how many messages are due in it, and a bar. What is overdue
    counts as due now.

    \b
    duemq pending curve --step 1h --steps 24
    duemq pending curve --topic reminders --from 2031-01-01T00:00 --to 2031-01-02T00:00 --step 30m
    """
    begin = begin or datetime.now().astimezone()
    if step < LEAST_STEP_MS:
        raise click.UsageError("a span is 1s or longer")
    if end is not None:
        if steps is not None or end <= begin:
            raise click.UsageError("--to is a time after --from, and goes without --steps")
        steps = -((begin - end) // timedelta(milliseconds=step))
    number = steps or 60

    async def work() -> None:
        async with Admin(nameserver, codec=codec, timeout=timeout / 1000) as admin:
            found = await admin.due_curve(topic, begin=begin, step=step / 1000, steps=number)
        for line in [_format.curve_as_json(found)] if as_json else _format.curve_as_text(found):
            click.echo(line)

    _run(work())


def change_options(command: Callable[P, None]) -> Callable[P, None]:
    """What the commands share that change messages."""
    return click.argument("ids", metavar="[ID]...", nargs=-1)(selection_options(command))


@pending.command("cancel", short_help="Cancel them.")
@change_options
@one_line_errors
def cancel_pending(**options: Any) -> None:
    """Cancel messages that wait: those with an ID, as `duemq pending list` prints it; or those with --topic and at
    least one of --key, --from and --to. `duemq pending count` with the same options tells beforehand how many they are.

    Prints what became of each ID, or how many had which result. The exit code is 1 if there are some that will be
    delivered all the same.
    """
    _change(Admin.cancel, {ChangeResult.CANCELLED, ChangeResult.ALREADY_CANCELLED}, **options)


@pending.command(short_help="Give them another time.")
@click.option("--in", "delay", type=duration, metavar="DURATION", help="Deliver them after so long: 250ms, 5s, 1h30m.")
@click.option(
    "--at", type=moment, metavar="TIME", help="Deliver them at a time: 2030-01-31T08:30, local unless it has a zone."
)
@change_options
@one_line_errors
def reschedule(delay: int | None, at: datetime | None, **options: Any) -> None:
    """Give messages that wait another time, with --in or --at. Each has another ID then. Which messages, and what is
    printed: as for `duemq pending cancel`. The exit code is 1 if some have no other time.

    \b
    duemq pending reschedule --topic reminders --key 4711 --in 2h
    """
    if (delay is None) == (at is None):
        raise click.UsageError("give one of --in and --at")
    time = at if at is not None else (now_ms() + (delay or 0)) / 1000
    _change(functools.partial(Admin.reschedule, deliver_at=time), {ChangeResult.RESCHEDULED}, **options)


@pending.command(short_help="Deliver them now.")
@change_options
@one_line_errors
def deliver(**options: Any) -> None:
    """Deliver messages that wait at once. Which messages, and what is printed: as for `duemq pending cancel`. The exit
    code is 1 if some are not delivered now."""
    _change(Admin.deliver_now, {ChangeResult.DELIVERED_NOW}, **options)


def _change(
    change: Callable[..., Coroutine[Any, Any, Changes]],
    wanted: set[ChangeResult],
    ids: tuple[str, ...],
    topic: str | None,
    key: str | None,
    begin: datetime | None,
    end: datetime | None,
    as_json: bool,
    timeout: int,
    nameserver: str,
    codec: Codec,
) -> None:
    """Change messages and say what became of them; the exit code is 1 where that is not what was wanted."""
    found: list[Changes] = []

    async def work() -> None:
        async with Admin(nameserver, codec=codec, timeout=timeout / 1000) as admin:
            found.append(await change(admin, ids or None, topic=topic, key=key, begin=begin, end=end))

    _run(work())
    (changes,) = found
    for line in [_format.changes_as_json(changes)] if as_json else _format.changes_as_text(changes, by_id=bool(ids)):
        click.echo(line)
    if set(changes.counts) - wanted:
        sys.exit(1)


@main.command(short_help="Run a broker with its name server.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="File of settings, NAME=VALUE a line, with RocketMQ's names.",
)
@click.option("--store", type=click.Path(path_type=Path), help="Directory of the store; ./data by default.")
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option("--port", type=int, metavar="PORT", help="Port of the broker, and the VIP port two below; 10911.")
@click.option("--nameserver-port", type=int, metavar="PORT", help="Port of the name server inside; 9876.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="One setting, which counts before the file. May be repeated.",
)
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    help="How to log, on standard error.",
)
def serve(
    config: Path | None,
    store: Path | None,
    host: str | None,
    port: int | None,
    nameserver_port: int | None,
    settings: tuple[str, ...],
    log_format: str,
) -> None:
    """Start a broker, with a name server inside, and run it until SIGTERM or Ctrl-C.

    \b
    duemq serve --store ./data
    duemq serve --store ./data --set messageDelayLevel='1s 5s 1m 1h' --log-format json
    """
    try:
        from broker.main import serve as run_broker
    except ModuleNotFoundError as error:
        fail(f"the broker needs the package {error.name}; install duemq[broker]")
    sys.exit(
        run_broker(
            config_file=str(config) if config else None,
            store=str(store) if store else None,
            host=host,
            port=port,
            nameserver_port=nameserver_port,
            settings=list(settings),
            log_format=log_format,
        )
    )


@main.group()
def clock() -> None:
    """Move the clock of brokers that run for tests.

    \b
    duemq serve --store ./test-data --set testClock=true
    duemq clock advance 2h
    """


@clock.command(short_help="Move it ahead.")
@click.argument("by", type=duration, metavar="DURATION")
@nameserver_option
@one_line_errors
def advance(by: int, nameserver: str) -> None:
    """Move the clock of all brokers of a name server ahead by DURATION (5s, 1h30m, 2d), and print their time: what is
    due by then is delivered now. Only brokers that were started with --set testClock=true let themselves be moved;
    where one of them does not, none is.
    """
    from duemq.testing import TestClock

    async def work() -> None:
        now = await TestClock(nameserver).advance(ms=by)
        click.echo(f"the brokers' clock says {now:%Y-%m-%d %H:%M:%S}.{now.microsecond // 1000:03d}")

    _run(work())


# --- what the commands share --------------------------------------------------------------------------------------


def _run(work: Coroutine[Any, Any, None]) -> None:
    logging.basicConfig(level=logging.WARNING, format="duemq: %(message)s")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Do `work` until it ends or SIGINT or SIGTERM comes; a second Ctrl-C then interrupts the end as well."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
    if not task.cancelled():
        task.result()


async def _print_messages(
    consumer: PushConsumer, topic: str, follow: bool, wait_ms: int, count: int | None, as_json: bool
) -> None:
    printed = 0
    while count is None or printed < count:
        message = await _next_message(consumer, follow, wait_ms if not printed else None)
        if message is None:
            break
        line = _format.message_as_json(message) if as_json else _format.message_as_text(message)
        if not _print_line(line):
            return  # this message was not seen and is not acknowledged
        await message.ack()
        printed += 1
    if not printed and not follow:
        click.echo(f"duemq: no message in {topic} for this group", err=True)


def _print_line(line: str) -> bool:
    """Print; whether whoever reads it is still there."""
    try:
        click.echo(line)
    except BrokenPipeError:
        # Python would complain at its end that it cannot write the rest either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


async def _next_message(consumer: PushConsumer, follow: bool, wait_ms: int | None) -> ReceivedMessage | None:
    """The next message, or None at the end: nothing came for `wait_ms`; or without it, all that was there is read."""
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


def _read_body(body: str | None) -> bytes:
    if body is not None and body != "-":
        return body.encode()
    stdin = sys.stdin.buffer
    if body is None and stdin.isatty():
        raise click.UsageError("no BODY; give it as an argument, or pipe it in")
    return stdin.read()


def _split_pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(f"{text!r} is no NAME=VALUE")
    return name, value
