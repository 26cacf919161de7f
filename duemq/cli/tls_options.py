"""The options of the commands for TLS."""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from duemq._net.tls import Tls

KEY_PASSWORD: Final = "DUEMQ_TLS_KEY_PASSWORD"
"""The environment variable with the password of the key. There is no option for it, since every user of a machine can
see the command lines of all processes."""


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for TLS; the command gets them as one argument, `tls`. Raises UsageError."""

    @functools.wraps(command)
    def wrapper(
        *args: Any,
        tls: bool,
        tls_unverified: bool,
        tls_trust: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        **kwargs: Any,
    ) -> Any:
        value = _value(tls, tls_unverified, tls_trust, tls_cert, tls_key)
        return command(*args, tls=value, **kwargs)

    file = click.Path(path_type=Path)
    for option in (
        click.option("--tls-key", type=file, envvar="DUEMQ_TLS_KEY", help="Key of that certificate, PEM."),
        click.option(
            "--tls-cert",
            type=file,
            envvar="DUEMQ_TLS_CERT",
            help="Use TLS, and present this certificate to brokers, PEM.",
        ),
        click.option(
            "--tls-trust",
            type=file,
            envvar="DUEMQ_TLS_TRUST",
            help="Use TLS, and trust only the certificates in this file, PEM.",
        ),
        click.option(
            "--tls-unverified",
            is_flag=True,
            envvar="DUEMQ_TLS_UNVERIFIED",
            help="Use TLS without checking certificates: anyone on the way can read and change everything.",
        ),
        click.option(
            "--tls",
            is_flag=True,
            envvar="DUEMQ_TLS",
            help="Use TLS, and trust the certificates that this machine trusts.",
        ),
    ):
        wrapper = option(wrapper)
    return wrapper


def _value(is_on: bool, is_unverified: bool, trust: Path | None, certificate: Path | None, key: Path | None) -> Tls:
    if not (is_on or is_unverified or trust or certificate or key):
        return False
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if is_unverified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif trust is not None:
            context.load_verify_locations(trust)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a self-signed certificate trusts itself
        else:
            context.load_default_certs()
    except OSError as error:
        raise click.UsageError(f"--tls-trust {trust}: {_reason(error)}") from None
    if certificate is not None and key is not None:
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate, key, lambda: os.environ.get(KEY_PASSWORD, ""))
        except OSError as error:
            raise click.UsageError(
                f"--tls-cert {certificate} --tls-key {key}: {_reason(error)}; if the key has a password, set "
                f"${KEY_PASSWORD}"
            ) from None
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "not certificates in PEM, or not the key that belongs to them"
    return error.strerror or str(error)
