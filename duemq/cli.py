"""The command line: `duemq send`, `duemq receive`, `duemq cancel`, `duemq pending`, `duemq serve`,
`duemq clock advance`, and `duemq spark`, whose commands `spark_jobs.cli` has.

Errors go to stderr as one line, with exit code 1; wrong usage has exit code 2. Ctrl-C at `receive` is its regular end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from duemq._cli_messages import cancel, receive, send
from duemq._cli_pending import pending
from duemq._cli_shared import duration, fail, nameserver_option, one_line_errors, run
from spark_jobs.cli import main as spark


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


main.add_command(send)
main.add_command(receive)
main.add_command(cancel)
main.add_command(pending)
main.add_command(spark, "spark")


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

    run(work())
