"""`duemq receive`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import NoReturn

import click

from duemq._consuming.member import STORING_OFFSETS
from duemq._consuming.subscription import ALL_TAGS, make_subscription
from duemq._net import timeouts
from duemq._net.complaints import Complaints
from duemq._net.connection import Codec
from duemq._net.tls import Tls
from duemq._values.accounts import Keys
from duemq._values.checks import MAX_RETRIED_GROUP_LENGTH
from duemq._values.durations import format_duration
from duemq.cli import formatting
from duemq.cli.shared import (
    GROUP,
    client_options,
    duration,
    one_line_errors,
    origin,
    print_line,
    run,
    until_signal,
)
from duemq.consumer import Consumer, From
from duemq.errors import AccessDeniedError, DueMQError
from duemq.messages import ReceivedMessage

log = logging.getLogger("duemq.consumer")


@click.command(short_help="Receive messages and print them.")
@click.argument("topic")
@click.option(
    "--group",
    metavar="GROUP",
    show_default=f"{GROUP}-TOPIC",
    help="Consumer group to join.",
)
@click.option("--follow", "-f", is_flag=True, help="Keep waiting for messages until Ctrl-C.")
@click.option(
    "--wait",
    type=duration,
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="How long to wait for the first message, and for a broker that fails, without --follow.",
)
@click.option("--count", "-n", type=click.IntRange(min=1), metavar="N", help="Stop after N messages.")
@click.option(
    "--tag",
    "tags",
    default=ALL_TAGS,
    metavar="TAGS",
    help="Only messages with this tag; several tags are joined by ||.",
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
    group: str | None,
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

    The lateness is shown if the deliver time is known: for messages with a timer, and for messages that duemq delayed
    by a level.

    Printed messages are consumed. The broker stores how far the group has read, so the next `receive` of the same topic
    and tags continues there. Members of a group that run at the same time share the messages, and must all receive the
    same topic and tags; so each topic has a default group of its own, duemq-cli-TOPIC, and so has each selection of
    tags, with a checksum of the tags at the end of its name. Give another --group to read a topic from its beginning
    again, or the one as which your account may consume.

    Without --follow the command ends when it has printed all messages that could be received at its start. If there are
    none, it waits up to --wait for the first message. Messages that are not due yet cannot be received.

    The exit code is 1 if messages could not be received: access is refused; or, without --follow, the topic does not
    exist or a broker fails, and that lasts longer than --wait. With --follow, such a failure is reported, and the
    command goes on when it is over.

    \b
    duemq receive orders --follow
    duemq receive orders --group audit --json | jq .lateness_ms
    duemq receive orders --count 1 --wait 1m
    """
    group = group if group is not None else default_group(topic, tags)

    async def work() -> None:
        failures = _Failures(logged=follow)
        consumer = Consumer(
            group,
            nameserver=nameserver,
            from_=from_,
            codec=codec,
            access_key=account.access_key,
            secret_key=account.secret_key,
            tls=tls,
            _complaints=failures,
        )
        consumer.subscribe(topic, tags)
        async with consumer:
            await until_signal(_print_messages(consumer, failures, topic, follow, wait, count, as_json))
        error = failures.present.get(STORING_OFFSETS)
        if error is not None:
            raise DueMQError(
                f"the offsets of the group {group} cannot be stored, so it may receive printed messages again: {error}"
            )

    run(work())


def default_group(topic: str, tags: str) -> str:
    """Return the group that receives a topic and tags if the user names none: the same one for the same topic and tags,
    since members of a group must have the same subscription. Raises ArgumentError."""
    name, mark = f"{GROUP}-{topic}", "||".join(sorted(make_subscription(topic, tags, 0).tags))
    if len(name) > MAX_RETRIED_GROUP_LENGTH:
        name, mark = name[: MAX_RETRIED_GROUP_LENGTH - 9], f"{topic}:{mark}"
    return f"{name}-{hashlib.sha256(mark.encode()).hexdigest()[:8]}" if mark else name


class _Failures(Complaints):
    """The present failures of the command's consumer, which is told of each. `logged`: they are also logged, except the
    refusal of access, with which the command ends."""

    def __init__(self, *, logged: bool) -> None:
        super().__init__(log)
        self._logged = logged
        self._refusal: AccessDeniedError | None = None
        self._since = 0.0
        """When the first of the present failures began, by the event loop's clock."""
        self._changed = asyncio.Event()
        self.present: dict[str, Exception] = {}
        """By the name of the activity that it holds up."""

    def raise_(self, who: str, reason: Exception | str) -> None:
        """Note that activity `who` is failing, and why."""
        if isinstance(reason, AccessDeniedError):
            self._refusal = self._refusal or reason
        elif self._logged or isinstance(reason, str):
            super().raise_(who, reason)
        if isinstance(reason, Exception):
            if not self.present:
                self._since = asyncio.get_running_loop().time()
            self.present[who] = reason
        self._changed.set()

    def resolve(self, who: str) -> None:
        """Note that activity `who` is no longer failing."""
        super().resolve(who)
        self._forget(who)

    def forget(self, who: str) -> None:
        """Forget activity `who`, which has ended."""
        super().forget(who)
        self._forget(who)

    def _forget(self, who: str) -> None:
        if self.present.pop(who, None) is not None:
            self._changed.set()

    def check(self) -> None:
        """Raise the first of the present failures, if there is one."""
        for error in self.present.values():
            raise error

    async def wait(self, patience: float | None) -> NoReturn:
        """Wait until access is refused, or until there have been failures for `patience` seconds without a break; None:
        however long. Raises the refusal or the first failure."""
        while self._refusal is None:
            self._changed.clear()
            try:
                async with timeouts.timeout_at(
                    None if patience is None or not self.present else self._since + patience
                ):
                    await self._changed.wait()
            except TimeoutError:
                self.check()
        raise self._refusal


async def _print_messages(
    consumer: Consumer,
    failures: _Failures,
    topic: str,
    follow: bool,
    wait_ms: int,
    count: int | None,
    as_json: bool,
) -> None:
    failure = asyncio.create_task(failures.wait(None if follow else wait_ms / 1000))
    try:
        printed = 0
        while count is None or printed < count:
            if follow or printed:
                message = await _next_message(consumer, failure, ends=not follow)
            else:
                message = await _first_message(consumer, failures, failure, topic, wait_ms)
            if message is None:
                break
            line = formatting.message_as_json(message) if as_json else formatting.message_as_text(message)
            if not print_line(line):
                return  # the user did not see this message, so it is not acknowledged
            await message.ack()
            printed += 1
    finally:
        if not failure.cancel():
            failure.exception()  # otherwise asyncio would log it as one that nobody has seen


async def _next_message(consumer: Consumer, failure: asyncio.Task[NoReturn], *, ends: bool) -> ReceivedMessage | None:
    """Return the next message. `ends`: return None if all messages available at the start were read. Raises the error
    of `failure` when that task ends."""
    message = asyncio.create_task(consumer.receive())
    end = asyncio.create_task(consumer.caught_up()) if ends else failure
    try:
        await asyncio.wait([message, end, failure], return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            return message.result()
        if failure.done():
            failure.result()
        return None
    finally:
        message.cancel()
        if end is not failure:
            end.cancel()


async def _first_message(
    consumer: Consumer, failures: _Failures, failure: asyncio.Task[NoReturn], topic: str, wait_ms: int
) -> ReceivedMessage | None:
    """Return the first message, or None, with a line on stderr, if the topic has none for the group within `wait_ms`.
    Otherwise like `_next_message`; raises a present failure if there is one after `wait_ms`, or DueMQError if the topic
    could not be read by then."""
    read = asyncio.create_task(consumer.caught_up())
    try:
        async with timeouts.timeout(wait_ms / 1000):
            return await _next_message(consumer, failure, ends=False)
    except TimeoutError:
        failures.check()
        if not read.done():
            raise DueMQError(
                f"{topic} could not be read within {format_duration(wait_ms)}: not all of its brokers have answered"
            ) from None
        if not consumer.assignment:
            click.echo(f"duemq: other members of the group {consumer.group} have all queues of {topic}", err=True)
        else:
            click.echo(f"duemq: no message in {topic} for the group {consumer.group}", err=True)
        return None
    finally:
        read.cancel()
