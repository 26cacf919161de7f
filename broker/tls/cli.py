"""The commands under `duemq tls`."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import click

CERTIFICATE: Final = "server.pem"
KEY: Final = "server.key"
_MOST_DAYS: Final = 3650


@click.group(name="tls", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Certificates for a broker."""


@main.command(name="self-signed", short_help="Create a certificate and its key.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name or address by which clients reach the broker. May be repeated; by default this machine's name.",
)
@click.option(
    "--days",
    type=click.IntRange(1, _MOST_DAYS),
    default=365,
    show_default=True,
    help="Number of days it is valid. Renew it in time, with --force; the broker reads the new one while it runs.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Directory for the two files; by default the current one.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
def self_signed_command(hosts: tuple[str, ...], days: int, out: Path, force: bool) -> None:
    """Create a certificate that is signed by its own key, and the key.

    Clients need a copy of the certificate, since no authority vouches for it. If you have a certificate from an
    authority, your own or a public one, you do not need this.

    \b
    duemq tls self-signed --host mq.example.com --host 10.0.0.5 --out /etc/duemq
    """
    from duemq.broker.tls import self_signed

    names = list(dict.fromkeys(hosts)) or [socket.gethostname()]
    if "localhost" not in names and not hosts:
        names += ["localhost", "127.0.0.1"]
    certificate, key = out / CERTIFICATE, out / KEY
    there = [path for path in (certificate, key) if path.exists()]
    if there and not force:
        _fail(f"{there[0]} already exists; --force replaces it, and clients then need the new certificate")
    try:
        pair = self_signed.make(names, days, datetime.datetime.now(datetime.UTC))
    except (ValueError, UnicodeError) as error:
        raise click.UsageError(f"--host: {error}") from None
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(key, pair.key, 0o600)
        _write(certificate, pair.certificate, 0o644)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}")
    click.echo(
        f"""\
made {certificate} and {key}, for {", ".join(names)}, valid for {days} days

For the broker's configuration file:
    tls.server.mode=enforcing
    tls.server.certPath={certificate.absolute()}
    tls.server.keyPath={key.absolute()}
For clients, with a copy of {CERTIFICATE}, which is no secret:
    duemq send --tls-trust {CERTIFICATE} ...
    Producer(..., tls=ssl.create_default_context(cafile="{CERTIFICATE}"))
    java -Dtls.enable=true -Dtls.test.mode.enable=false -Dtls.client.authServer=true \\
         -Dtls.client.trustCertPath={CERTIFICATE} ..."""
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file in one step. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _fail(text: str) -> NoReturn:
    click.echo(f"duemq: {text}", err=True)
    sys.exit(1)
