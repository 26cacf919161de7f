"""The command line: `duemq send`, `duemq receive`, `duemq cancel`, `duemq pending`, `duemq schedule`, `duemq serve`,
`duemq clock advance`, `duemq user`, `duemq acl`, `duemq doctor`, `duemq tls self-signed`, `duemq mqtt-bridge` with the
commands of `mqtt_bridge.cli`, `duemq store` with the commands of `broker.repair.cli`, and `duemq spark` with the
commands of `spark_jobs.cli.commands`.

An error is one line on stderr, with exit code 1; wrong usage has exit code 2. Ctrl-C is the regular end of `receive`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from duemq.cli.streams import standard_streams


class _Elsewhere(NamedTuple):
    """A command that is defined in another module."""

    module: str
    name: str
    short_help: str
    """The short help of the command, repeated here so that listing the commands imports none of their modules."""
    extra: str = ""
    """The extra of the package that installs the command's libraries; empty if the client's libraries are enough."""


_ELSEWHERE: Final = {
    "send": _Elsewhere("duemq.cli.messages", "send", "Send a message, now or due later."),
    "receive": _Elsewhere("duemq.cli.messages", "receive", "Receive messages and print them."),
    "cancel": _Elsewhere("duemq.cli.messages", "cancel", "Cancel waiting messages."),
    "pending": _Elsewhere("duemq.cli.pending", "pending", "List and change waiting messages."),
    "schedule": _Elsewhere("duemq.cli.schedule", "schedule", "Manage recurring messages."),
    "clock": _Elsewhere("duemq.cli.clock", "clock", "Move the clock of brokers that run for tests."),
    "user": _Elsewhere("duemq.cli.users", "user", "Manage the users of brokers with ACL 2.0.", "broker"),
    "acl": _Elsewhere("duemq.cli.users", "acl", "Manage what the users of brokers with ACL 2.0 may do."),
    "mqtt-bridge": _Elsewhere("duemq.mqtt_bridge.cli", "main", "Connect an MQTT broker.", "mqtt"),
    "doctor": _Elsewhere(
        "duemq.broker.doctor.cli", "doctor", "Check configuration, security and the machine.", "broker"
    ),
    "tls": _Elsewhere("duemq.broker.tls.cli", "main", "Certificates for a broker.", "broker"),
    "store": _Elsewhere("duemq.broker.repair.cli", "main", "Maintain a store that no broker has open.", "broker"),
    "spark": _Elsewhere(
        "duemq.spark_jobs.cli.commands", "main", "Audit, analyse and compact a store's files.", "spark"
    ),
}
"""By the command's name."""
_EXTRAS: Final = {"serve": "broker"} | {name: command.extra for name, command in _ELSEWHERE.items()}


def _say_what_is_missing(command: str | None, error: ModuleNotFoundError) -> None:
    """Exit with one line on stderr if the missing library is one that the command's extra installs; else return."""
    extra = _EXTRAS.get(command or "", "")
    if extra and (error.name or "").partition(".")[0] != "duemq":
        click.echo(f"duemq: {command} needs the package {error.name}: pip install 'duemq[{extra}]'", err=True)
        sys.exit(1)


class _Commands(click.Group):
    """A group whose commands are imported when they are first used: `duemq serve` does not import the client, and
    `duemq --help` imports no command."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command of the command line, with click's arguments. Exits with 1 if its output cannot be written."""
        with standard_streams():
            return super().main(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, None if there is none. Exits if a package that it needs is missing."""
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        elsewhere = _ELSEWHERE[cmd_name]
        try:
            command: click.Command = getattr(import_module(elsewhere.module), elsewhere.name)
        except ModuleNotFoundError as error:
            _say_what_is_missing(cmd_name, error)
            raise
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Exits if a package that it imports only now is missing."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            _say_what_is_missing(ctx.invoked_subcommand, error)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for the help; click's own method would import each for its short help."""
        rows = []
        for name in self.list_commands(ctx):
            if name in _ELSEWHERE:
                rows.append((name, _ELSEWHERE[name].short_help))
            else:
                rows.append((name, self.commands[name].get_short_help_str(formatter.width)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="duemq", prog_name="duemq")
def main() -> None:
    """A message broker for delayed messages, compatible with Apache RocketMQ.

    \b
    duemq serve                          start a broker with its name server
    duemq receive greetings --follow     wait for messages
    duemq send greetings hello --in 5s   send one that is due in 5 seconds
    duemq pending list                   show waiting messages
    duemq user add orders                add a user, for brokers with access control
    duemq mqtt-bridge --config b.toml    connect an MQTT broker
    duemq doctor --config broker.conf    check configuration and machine
    duemq tls self-signed --host NAME    create a certificate
    duemq store repair ./store           rebuild a store's files from its commitlog

    `send` and `receive` work with Apache RocketMQ's brokers too.
    """


@main.command(short_help="Run a broker with its name server.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="File of settings with RocketMQ's names, one NAME=VALUE per line.",
)
@click.option("--store", type=click.Path(path_type=Path), help="Directory of the store; ./data by default.")
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen on that address without access control: anyone who can connect may do anything.",
)
@click.option(
    "--port", type=int, metavar="PORT", help="Port of the broker; the VIP port is two below; 10911 by default."
)
@click.option("--nameserver-port", type=int, metavar="PORT", help="Port of the embedded name server; 9876 by default.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="One setting, which overrides the file. May be repeated.",
)
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    help="Format of the log, on standard error.",
)
def serve(
    config: Path | None,
    store: Path | None,
    host: str | None,
    insecure: bool,
    port: int | None,
    nameserver_port: int | None,
    settings: tuple[str, ...],
    log_format: str,
) -> None:
    """Start a broker with an embedded name server, and run it until SIGTERM or Ctrl-C.

    \b
    duemq serve --store ./data
    duemq serve --store ./data --set messageDelayLevel='1s 5s 1m 1h' --log-format json
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads for numpy's algebra, which a broker does not use
    # Starting creates many objects and hardly any garbage: collections would be a tenth of its work. The broker turns
    # the collector on once it has started.
    gc.disable()
    try:
        try:
            from duemq.broker.main import serve as run_broker
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        sys.exit(
            run_broker(
                config_file=str(config) if config else None,
                store=str(store) if store else None,
                host=host,
                port=port,
                nameserver_port=nameserver_port,
                settings=[*settings, *(["insecure=true"] if insecure else ())],
                log_format=log_format,
            )
        )
    finally:
        gc.enable()
