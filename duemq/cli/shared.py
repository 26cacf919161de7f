"""What the commands share: parsers of values, options, the reporting of errors, and running a coroutine."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import click

from duemq._values.accounts import Keys
from duemq._values.durations import parse_duration
from duemq.cli.keys import account_option
from duemq.cli.tls_options import tls_options
from duemq.errors import AccessDeniedError, ArgumentError, DelayError, DueMQError

if TYPE_CHECKING:
    from duemq.consumer import From

P = ParamSpec("P")

GROUP = "duemq-cli"


def duration(text: str) -> int:
    """Parse a duration on the command line; return ms. Raises BadParameter."""
    try:
        return parse_duration(text)
    except ArgumentError as error:
        raise click.BadParameter(str(error)) from None


def time_limit(text: str) -> int:
    """Parse a time limit on the command line; return ms, more than 0. Raises BadParameter."""
    found = duration(text)
    if not found:
        raise click.BadParameter(f"{text!r} leaves no time; write it as 250ms, 5s, 1h30m or 2d")
    return found


def moment(text: str) -> datetime:
    """Parse a time on the command line: a date and time, by this machine's clock unless it names another zone, or a
    duration: `1h` and `+1h` are an hour from now, `-1h` is an hour ago. Raises BadParameter."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        pass
    try:
        span = timedelta(milliseconds=parse_duration(text[1:] if text[:1] in ("+", "-") else text))
        return datetime.now().astimezone() + (-span if text.startswith("-") else span)
    except (ArgumentError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is not a time; write it as 2030-01-31T08:30, as 2030-01-31T08:30:00.250+02:00, or as 1h or -1h, "
            "an hour from now or an hour ago"
        ) from None


def with_dates(command: Callable[P, None]) -> Callable[P, None]:
    """Replace TOMORROW and DAY-AFTER in a command's help by the dates of tomorrow and of the day after, so that the
    examples work when they are copied."""
    today = datetime.now().astimezone().date()
    text = command.__doc__ or ""
    for name, days in (("TOMORROW", 1), ("DAY-AFTER", 2)):
        text = text.replace(name, (today + timedelta(days=days)).isoformat())
    command.__doc__ = text
    return command


def origin(text: str) -> From:
    """Parse the position where a new group begins: first, last, or a time. Raises BadParameter."""
    if text == "first":
        return "first"
    return "last" if text == "last" else moment(text)


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Report errors that a user can act on as one line, with an exit code."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of the output wanted no more
        except (DueMQError, OSError) as error:
            # A DelayError is not wrong usage: only this broker does not accept the delay.
            if isinstance(error, ArgumentError) and not isinstance(error, DelayError):
                raise click.UsageError(str(error)) from None
            if isinstance(error, AccessDeniedError) and _has_no_keys():
                fail(f"{error}. Give the keys of your account with --account FILE")
            if isinstance(error, OSError) and error.filename is not None:
                fail(f"{error.filename}: {error.strerror}")
            fail(str(error))

    return wrapper


def _has_no_keys() -> bool:
    """Whether the command that runs was given no keys of an account."""
    context = click.get_current_context(silent=True)
    account = context.params.get("account") if context is not None else None
    return isinstance(account, Keys) and account.access_key is None


def fail(text: str) -> NoReturn:
    """Exit with code 1 and one line on stderr."""
    click.echo(f"duemq: {text}", err=True)
    sys.exit(1)


nameserver_option = click.option(
    "--nameserver",
    metavar="HOST:PORT[;...]",
    default="127.0.0.1:9876",
    envvar=["DUEMQ_NAMESERVER", "NAMESRV_ADDR"],
    show_default=True,
    show_envvar=True,
    help="Addresses of the name servers; one that answers is enough.",
)


def client_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options of all commands that send requests with a codec: name servers, account, TLS and codec."""
    codec = click.option(
        "--codec",
        type=click.Choice(["auto", "json", "msgpack"]),
        default="auto",
        show_default=True,
        help="Encoding of the request headers; auto: MessagePack with a duemq broker, JSON with any other.",
    )
    return nameserver_option(account_option(tls_options(codec(command))))


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine of a command, on uvloop if it is installed."""
    logging.basicConfig(level=logging.WARNING, format="duemq: %(message)s")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends, or cancel it at SIGINT or SIGTERM. A second Ctrl-C interrupts the shutdown too."""
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


def print_line(line: str) -> bool:
    """Print a line. Return False if the reader of the output has closed the pipe."""
    try:
        click.echo(line)
    except BrokenPipeError:
        # Without this, Python would report at exit that it cannot flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
