"""`duemq user` and `duemq acl`: users and policies of ACL 2.0.

A secret is never an argument. It is generated here and shown once or written to a file, or it is read from a file or a
prompt.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import click

from duemq._net.tls import Tls
from duemq._values.accounts import Keys, read_keys
from duemq.auth import ACTIONS, AuthAdmin, Decision
from duemq.cli.keys import account_option
from duemq.cli.shared import fail, nameserver_option, one_line_errors, run
from duemq.cli.tls_options import tls_options
from duemq.errors import ArgumentError, NotSupportedError
from duemq.protocol.requests.auth_bodies import AclInfo

_SECRET_BYTES: Final = 24
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_MODE: Final = 0o600
_OF_OTHERS: Final = 0o077
_SETTING: Final = "initAuthenticationUser"

AdminCall = Callable[[AuthAdmin], Coroutine[Any, Any, None]]


@click.group(short_help="Manage the users of brokers with ACL 2.0.")
def user() -> None:
    """List, add, change and remove the users of brokers with ACL 2.0 (authenticationEnabled=true).

    \b
    duemq user init admin --config broker.conf --out admin.yml
    duemq serve --config broker.conf
    duemq user add orders --send orders --out orders.yml --account admin.yml
    duemq user add billing --receive orders --group billing --account admin.yml

    Each change is made at all brokers that the name servers know. RocketMQ's brokers have such users too, from 5.3 on.
    """


@click.group(short_help="Manage what the users of brokers with ACL 2.0 may do.")
def acl() -> None:
    """List and change the policies of users: what each may do. A super user may do anything, whatever its policies say.

    \b
    duemq acl allow orders Topic:orders Topic:returns* --action Pub,Sub
    duemq acl deny orders Topic:* --action Pub --from 10.0.0.0/8
    duemq acl list orders

    A resource is Topic:NAME, Group:NAME or Cluster:NAME, or * for everything. A NAME that ends with * stands for all
    names with that prefix, and Topic:* for all topics. Of the policies about a request, the one with the most specific
    resource decides. A request without such a policy is refused.
    """


def _with_admin(command: Callable[..., AdminCall]) -> Callable[..., None]:
    """Add the options that all commands share. A command returns a function, which is then called with an admin."""

    @one_line_errors
    def wrapper(*, nameserver: str, account: Keys, tls: Tls, **options: Any) -> None:
        call = command(**options)

        async def do() -> None:
            admin = AuthAdmin(nameserver, access_key=account.access_key, secret_key=account.secret_key, tls=tls)
            async with admin:
                await call(admin)

        try:
            run(do())
        except NotSupportedError as error:
            fail(f"{error}. Users and policies need authenticationEnabled=true there, see `duemq user init --help`")

    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    return nameserver_option(account_option(tls_options(wrapper)))


def _secret_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--prompt", is_flag=True, help="Ask for the secret key instead of generating one.")(command)
    command = click.option(
        "--secret-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read the secret key from a file, with accessKey and secretKey in two lines or with the secret key alone, "
        "instead of generating one.",
    )(command)
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the keys to a new file, for --account and mqadmin (as conf/tools.yml), instead of printing them.",
    )(command)


def _secret(name: str, secret_file: Path | None, *, prompt: bool) -> str:
    """Return the secret key that the user of a command gave, or a new one. Raises ArgumentError."""
    if prompt and secret_file is not None:
        raise ArgumentError("give one of --prompt and --secret-file")
    if prompt:
        return str(click.prompt(f"Secret key of {name}", hide_input=True, confirmation_prompt=True)).strip()
    if secret_file is None:
        return secrets.token_urlsafe(_SECRET_BYTES)
    try:
        text = secret_file.read_text()
    except UnicodeDecodeError:
        raise ArgumentError(f"{secret_file} is not UTF-8") from None
    secret = text.strip() if "\n" not in text.strip() else read_keys(text).secret_key or ""
    if not secret:
        raise ArgumentError(f"{secret_file} is empty")
    return secret


def _open_new(path: Path) -> int:
    """Create a file that only its owner may read, and return its descriptor. Raises ArgumentError if it exists."""
    try:
        return os.open(path, _NEW_FILE, _MODE)
    except FileExistsError:
        raise ArgumentError(f"{path} already exists, and is not overwritten") from None


class _Keys:
    """The destination of a user's keys: a new file, or the output. The file is created before the broker is asked for
    the change, so that no secret is lost because it cannot be written. `is_known`: the secret came from the user of the
    command, and is not printed."""

    def __init__(self, name: str, secret: str, out: Path | None, *, is_known: bool) -> None:
        self._text = f"accessKey: {json.dumps(name, ensure_ascii=False)}\nsecretKey: {json.dumps(secret)}\n"
        self._out = out
        self._is_known = is_known
        self._file = os.fdopen(_open_new(out), "w") if out is not None else None

    def done(self) -> None:
        """Write or print the keys."""
        if self._file is not None:
            with self._file:
                self._file.write(self._text)
            click.echo(f"the keys are in {self._out}")
        elif not self._is_known:
            click.echo(self._text, nl=False)
            click.echo("The secret key is shown only once: store it now.", err=True)

    def dropped(self) -> None:
        """Remove the file, since the change failed and no user has these keys."""
        if self._file is not None and self._out is not None:
            self._file.close()
            self._out.unlink()


async def _handing_over(keys: _Keys, change: Coroutine[Any, Any, None]) -> None:
    try:
        await change
    except BaseException:
        keys.dropped()
        raise
    keys.done()


# --- users


@user.command("add", short_help="Add a user.")
@click.argument("name")
@click.option("--super", "is_super", is_flag=True, help="Allow it to do anything.")
@click.option("--send", multiple=True, metavar="TOPIC", help="Allow it to send to this topic. May be repeated.")
@click.option("--receive", multiple=True, metavar="TOPIC", help="Allow it to receive from this topic. May be repeated.")
@click.option("--group", multiple=True, metavar="GROUP", help="Allow it to consume as this group. May be repeated.")
@click.option("--look", is_flag=True, help="Allow it to see topics, groups, statistics and settings of the cluster.")
@_secret_options
@_with_admin
def add(
    name: str,
    is_super: bool,
    send: tuple[str, ...],
    receive: tuple[str, ...],
    group: tuple[str, ...],
    look: bool,
    secret_file: Path | None,
    prompt: bool,
    out: Path | None,
) -> AdminCall:
    """Add the user NAME, with a new secret key, which is printed once. NAME is its access key.

    A name of a topic or group that ends with * stands for all names with that prefix.
    """
    secret = _secret(name, secret_file, prompt=prompt)
    both = set(send) & set(receive)
    wanted = [
        ([f"Topic:{topic}" for topic in sorted(both)], ["Pub", "Sub"]),
        ([f"Topic:{topic}" for topic in send if topic not in both], ["Pub"]),
        ([f"Topic:{topic}" for topic in receive if topic not in both], ["Sub"]),
        ([f"Group:{each}" for each in group], ["Sub"]),
        (["Cluster:*"] if look else [], ["Get", "List"]),
    ]

    async def work(admin: AuthAdmin) -> None:
        keys = _Keys(name, secret, out, is_known=prompt or secret_file is not None)
        await _handing_over(keys, admin.create_user(name, secret, "Super" if is_super else "Normal"))
        for resources, actions in wanted:
            if resources:
                await admin.set_policy(name, resources, actions)

    return work


@user.command("change", short_help="Change a user.")
@click.argument("name")
@click.option(
    "--super/--normal", "is_super", default=None, help="Whether it may do anything, or what its policies allow."
)
@click.option("--enable/--disable", "is_enabled", default=None, help="Whether brokers accept its requests.")
@click.option("--new-secret", is_flag=True, help="Give it a new secret key, which is printed once.")
@_secret_options
@_with_admin
def change(
    name: str,
    is_super: bool | None,
    is_enabled: bool | None,
    new_secret: bool,
    secret_file: Path | None,
    prompt: bool,
    out: Path | None,
) -> AdminCall:
    """Change the user NAME. A new secret key replaces the old one immediately."""
    has_secret = new_secret or prompt or secret_file is not None
    if not has_secret and is_super is None and is_enabled is None:
        raise ArgumentError("say what to change: --super, --normal, --enable, --disable or --new-secret")
    if out is not None and not has_secret:
        raise ArgumentError("--out is for a new secret key: add --new-secret")
    secret = _secret(name, secret_file, prompt=prompt) if has_secret else None

    async def work(admin: AuthAdmin) -> None:
        made = admin.update_user(
            name,
            password=secret,
            user_type=None if is_super is None else "Super" if is_super else "Normal",
            is_enabled=is_enabled,
        )
        if secret is None:
            await made
        else:
            await _handing_over(_Keys(name, secret, out, is_known=prompt or secret_file is not None), made)

    return work


@user.command("remove", short_help="Remove a user.")
@click.argument("name")
@_with_admin
def remove(name: str) -> AdminCall:
    """Remove the user NAME and its policies."""

    async def work(admin: AuthAdmin) -> None:
        if not any(each.username == name for users in (await admin.users()).values() for each in users):
            fail(f"there is no user {name}")
        await admin.delete_user(name)

    return work


@user.command("list", short_help="List the users.")
@_with_admin
def list_users() -> AdminCall:
    """Print a line for each user: its name, Super or Normal, and "disabled" if it is. A line that does not hold for all
    brokers names the brokers for which it does."""

    async def work(admin: AuthAdmin) -> None:
        found = await admin.users()
        lines: dict[str, list[str]] = {}
        for address, users in found.items():
            for each in users:
                status = "" if each.user_status == "enable" else "  disabled"
                lines.setdefault(f"{each.username}  {each.user_type}{status}", []).append(address)
        _print_lines(dict(sorted(lines.items())), len(found))

    return work


@user.command("init", short_help="Prepare a broker's configuration, with its first user.")
@click.argument("name")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The broker's file of settings; it is created if it does not exist.",
)
@_secret_options
@one_line_errors
def init(name: str, config_file: Path, secret_file: Path | None, prompt: bool, out: Path | None) -> None:
    """Turn ACL 2.0 on in a broker's file of settings. The next start of the broker creates the super user NAME.

    The file then contains a secret key, and only its owner may read it. Once the broker has started, the line
    initAuthenticationUser may be removed.
    """
    from duemq.broker.errors import ConfigError
    from duemq.broker.settings import broker_conf

    secret = _secret(name, secret_file, prompt=prompt)
    text = json.dumps({"username": name, "password": secret}, ensure_ascii=False)
    values = {"authenticationEnabled": "true", "authorizationEnabled": "true", _SETTING: text}
    try:
        if config_file.exists() and broker_conf.read(str(config_file)).get(_SETTING):
            raise ArgumentError(f"{config_file} already has {_SETTING}; remove that line first")
        keys = _Keys(name, secret, out, is_known=prompt or secret_file is not None)
        try:
            if config_file.exists():
                config_file.chmod(config_file.stat().st_mode & ~_OF_OTHERS)
            else:
                os.close(_open_new(config_file))
            broker_conf.save(str(config_file), values)
        except BaseException:
            keys.dropped()
            raise
    except ConfigError as error:
        fail(str(error))
    keys.done()


# --- policies


def _checked_resource(text: str) -> str:
    """Return a resource on the command line. Raises BadParameter if it is none, which brokers call "null"."""
    kind, colon, name = text.partition(":")
    if text != "*" and not (colon and name and kind.lower() in ("topic", "group", "cluster")):
        raise click.BadParameter(
            f"{text!r} is not a resource; write Topic:NAME, Group:NAME or Cluster:NAME, or * for everything"
        )
    return text


def _policy_options(command: Callable[..., AdminCall]) -> Callable[..., None]:
    options = [
        click.argument("name"),
        click.argument("resources", nargs=-1, required=True, metavar="RESOURCE...", type=_checked_resource),
        click.option(
            "--action", "actions", required=True, multiple=True, metavar="ACTION[,...]", help=", ".join(ACTIONS) + "."
        ),
        click.option(
            "--from",
            "sources",
            multiple=True,
            metavar="ADDRESS",
            help="Applies only to requests from this address or network.",
        ),
        click.option("--default", "is_default", is_flag=True, help="Applies only if no other policy does."),
    ]
    decorated: Callable[..., Any] = _with_admin(command)
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def _set(
    decision: Decision,
    name: str,
    resources: tuple[str, ...],
    actions: tuple[str, ...],
    sources: tuple[str, ...],
    *,
    is_default: bool,
) -> AdminCall:
    wanted = [action.strip() for part in actions for action in part.split(",")]

    async def work(admin: AuthAdmin) -> None:
        await admin.set_policy(
            name,
            resources,
            wanted,
            decision=decision,
            source_ips=sources,
            policy_type="Default" if is_default else "Custom",
        )

    return work


@acl.command("allow", short_help="Allow a user actions on resources.")
@_policy_options
def allow(
    name: str, resources: tuple[str, ...], actions: tuple[str, ...], sources: tuple[str, ...], is_default: bool
) -> AdminCall:
    """Allow the user NAME actions on resources. This replaces the user's earlier policy for each of these resources."""
    return _set("Allow", name, resources, actions, sources, is_default=is_default)


@acl.command("deny", short_help="Deny a user actions on resources.")
@_policy_options
def deny(
    name: str, resources: tuple[str, ...], actions: tuple[str, ...], sources: tuple[str, ...], is_default: bool
) -> AdminCall:
    """Deny the user NAME actions on resources. This replaces the user's earlier policy for each of these resources."""
    return _set("Deny", name, resources, actions, sources, is_default=is_default)


@acl.command("remove", short_help="Remove policies of a user.")
@click.argument("name")
@click.argument("resource", required=False, type=_checked_resource, metavar="[RESOURCE]")
@click.option("--default", "is_default", is_flag=True, help="With RESOURCE: remove its default policy.")
@_with_admin
def remove_policy(name: str, resource: str | None, is_default: bool) -> AdminCall:
    """Remove the policy of the user NAME for RESOURCE, or all policies of the user."""

    async def work(admin: AuthAdmin) -> None:
        await admin.delete_policy(name, resource, "Default" if is_default else "Custom")

    return work


@acl.command("list", short_help="List policies.")
@click.argument("name", required=False)
@_with_admin
def list_policies(name: str | None) -> AdminCall:
    """Print a line for each policy of all users, or of NAME: the user, Allow or Deny, the resource, the actions, the
    addresses for which it holds, and whether it is a default. A line that does not hold for all brokers names the
    brokers for which it does."""

    async def work(admin: AuthAdmin) -> None:
        found = await admin.policies(name)
        lines: dict[str, list[str]] = {}
        for address, acls in found.items():
            for line in _lines(acls):
                lines.setdefault(line, []).append(address)
        _print_lines(lines, len(found))

    return work


def _lines(acls: list[AclInfo]) -> list[str]:
    lines = []
    for each in acls:
        username = (each.subject or "").removeprefix("User:")
        for policy in each.policies or ():
            for entry in policy.entries or ():
                line = f"{username}  {entry.decision}  {entry.resource}  {','.join(entry.actions or ())}"
                if entry.source_ips:
                    line += f"  from {','.join(entry.source_ips)}"
                lines.append(line + ("  (default)" if policy.policy_type == "Default" else ""))
    return lines


def _print_lines(lines: dict[str, list[str]], brokers: int) -> None:
    """Print lines, each followed by the addresses of its brokers unless it holds for all `brokers`."""
    for line, addresses in lines.items():
        click.echo(line if len(addresses) == brokers else f"{line}  at {', '.join(addresses)}")
