"""The command `duemq doctor`."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

_MARKS: Final = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


@click.command(name="doctor", short_help="Check configuration, security and the machine.")
@click.option("--config", type=click.Path(path_type=Path), help="The broker's configuration file.")
@click.option("--store", type=click.Path(path_type=Path), help="Directory of the store; ./data by default.")
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="One setting, which overrides the file. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one finding per line.")
def doctor(config: Path | None, store: Path | None, host: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Check a broker's configuration and this machine, and say what to change.

    Checks the settings; who can connect, and what protects the broker; accounts, certificates and who may read their
    files; disk, memory, open files, clock and ports. Changes nothing, and needs no running broker. Run it as the
    broker's user. The exit code is 1 if there is an error.

    \b
    duemq doctor --config /etc/duemq/broker.conf --store /var/lib/duemq
    """
    from duemq.broker.doctor.findings import Severity

    worst = 0
    for finding in _findings(config, store, host, settings):
        about, text, help_ = finding["about"], finding["text"], finding["help"]
        worst = max(worst, int(finding["level"] == Severity.ERROR.value))
        if as_json:
            click.echo(json.dumps(finding))
            continue
        click.echo(f"{_MARKS[finding['level']]}  {about}: {text}")
        if help_:
            click.echo(f"             {help_}")
    sys.exit(worst)


def _findings(
    file: Path | None, store: Path | None, host: str | None, settings: tuple[str, ...]
) -> Iterator[dict[str, str]]:
    """Yield the findings, each as a dict of texts."""
    from duemq.broker.doctor import machine, security
    from duemq.broker.doctor.findings import Finding, error, ok, warning
    from duemq.broker.errors import ConfigError
    from duemq.broker.settings.config import load

    def found() -> Iterator[Finding]:
        flags = {"storePathRootDir": store, "bindAddress": host}
        overrides = [*settings, *(f"{name}={value}" for name, value in flags.items() if value is not None)]
        try:
            config, ignored, origin = load(str(file) if file else None, overrides)
        except ConfigError as failure:
            yield error("configuration", str(failure), "fix this: the broker cannot start until you do")
            return
        yield ok("configuration", "it is valid" if file else "there is no file, so the defaults apply")
        if ignored:
            yield warning(
                "configuration",
                f"RocketMQ's properties without effect: {', '.join(ignored)}",
                "you may remove them",
            )
        yield from security.exposure(config)
        yield from security.accounts(config, origin.file)
        yield from security.users(config, origin.file)
        yield from security.tls(config, datetime.datetime.now(datetime.UTC))
        yield from security.own_files(config, origin.file)
        yield from machine.disk(config)
        yield from machine.memory()
        yield from machine.open_files(config)
        yield from machine.clock(time.time_ns() // 1_000_000)
        yield from machine.ports(config)

    for finding in found():
        yield {**asdict(finding), "level": finding.level.value}
