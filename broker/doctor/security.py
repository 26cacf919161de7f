"""Checks of security: who can connect, accounts, certificates, and who may read the files."""

from __future__ import annotations

import datetime
import importlib.util
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from duemq.broker.access import acl_file
from duemq.broker.doctor.findings import Finding, error, ok, warning
from duemq.broker.errors import AclFileError, ConfigError
from duemq.broker.net.tls import TlsMode
from duemq.broker.settings.config import BrokerConfig, check_exposure, credentials_of, free_codes
from duemq.broker.tls import contexts, options
from duemq.broker.tls.options import Identity
from duemq.protocol.codes import RequestCode
from duemq.storage import file_names
from duemq.storage.regular_files import read_regular

_KNOWN_SECRETS: Final = frozenset({"5Jx0v3n7QmZt2cYw", "b8TqKp4sVd6Lr1Hg", "12345678", "secretkey", "rocketmq"})
"""Secrets in this project's documentation and in RocketMQ's examples."""
_SHORT_SECRET: Final = 16
_RENEW_DAYS: Final = 30
_MAKE_ANOTHER: Final = "make another: openssl rand -base64 24"
_NAME_ADDRESSES: Final = "remove it, or list the addresses that are meant"
_ROUTES: Final = frozenset({RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO})
"""The requests in RocketMQ's example of a white list: routes, and the names and addresses of brokers."""
_OTHERS: Final = stat.S_IRWXO


def exposure(config: BrokerConfig) -> Iterator[Finding]:
    """Check who can connect, and what protects the broker from them."""
    about = "exposure"
    if config.listens_on_loopback:
        yield ok(about, f"the broker listens on {config.host}, for this machine only")
        if not config.advertised_host.startswith(("127.", "::1")):
            yield warning(
                about,
                f"clients are told brokerIP1={config.advertised_host}, where the broker does not listen",
                "set bindAddress=0.0.0.0, with access control, or leave brokerIP1 out",
            )
        return
    try:
        check_exposure(config)
    except ConfigError:
        yield error(
            about,
            f"bindAddress={config.host} without access control: the broker does not start",
            "run `duemq user init`, which switches on access control; docs/security.md has more",
        )
    else:
        if config.has_access_control:
            yield ok(about, f"the broker listens on {config.host}, and access control is on")
        else:
            yield warning(
                about,
                f"insecure=true: anyone who can reach {config.host} may read, change and delete everything",
                "run `duemq user init`, unless a firewall keeps all strangers out",
            )
    if config.advertised_host.startswith("127."):
        yield warning(
            about,
            f"clients are told brokerIP1={config.advertised_host}, which is their own machine",
            "set brokerIP1 to this machine's address, as clients see it",
        )


def accounts(config: BrokerConfig, file: str | None) -> Iterator[Finding]:
    """Check the files of accounts. `file`: the configuration file, beside which they are by default."""
    about = "accounts"
    if not config.acl:
        if not config.has_access_control:
            yield ok(about, "access control is off")
        return
    if not config.rocketmq_home and file is None:
        yield error(about, "nothing says where plain_acl.yml is", "set rocketmqHome, or use a configuration file")
        return
    home = config.rocketmq_home
    directory = Path(home, "conf") if home else Path(file or "").absolute().parent
    paths = [path for path in sorted((directory / "acl").rglob("*.y*ml")) if not path.name.startswith((".", "tools."))]
    paths += [path for path in (directory / "plain_acl.yml",) if path.exists()]
    if not paths:
        yield error(about, f"there is no {directory / 'plain_acl.yml'}", "create it; docs/security.md shows one")
    contents = []
    for path in paths:
        yield from _permissions(about, str(path))
        try:
            content = acl_file.parse(read_regular(str(path), acl_file.MAX_BYTES + 1), str(path))
        except (AclFileError, OSError) as failure:
            yield error(about, str(failure), "correct the file: the broker does not start with it")
            continue
        contents.append(content)
        yield from _accounts_in(path, content)
    count = sum(len(content.accounts) for content in contents)
    if count:
        yield ok(about, f"{count} accounts in {len(paths)} files")
    if paths and not any(entry.get("admin") for content in contents for entry in _entries(content)):
        yield warning(
            about,
            "no account is an administrator",
            "give one admin: true, for mqadmin and for changes of settings while the broker runs",
        )


def _accounts_in(path: Path, content: acl_file.AclFile) -> Iterator[Finding]:
    """Check the accounts of one file."""
    about = "accounts"
    for line, text in content.warnings:
        yield warning(about, f"{path}, line {line}: {text}", "change that line")
    for entry in _entries(content):
        secret, key = str(entry.get("secretKey")), entry.get("accessKey")
        if secret in _KNOWN_SECRETS:
            yield error(
                about, f"{path}: the secret key of {key} is from an example, so everyone knows it", _MAKE_ANOTHER
            )
        elif len(secret) < _SHORT_SECRET:
            yield warning(
                about,
                f"{path}: the secret key of {key} has only {len(secret)} characters, so it can be guessed",
                _MAKE_ANOTHER,
            )
    for pattern in content.white_lists:
        if pattern.matches_all:
            yield error(
                about,
                f"{path}: globalWhiteRemoteAddresses has {pattern.text}: anyone may do everything without an account",
                _NAME_ADDRESSES,
            )
    for account in content.accounts:
        if account.white_list.matches_all:
            yield error(
                about,
                f"{path}: the account {account.access_key} has whiteRemoteAddress: {account.white_list.text}, so "
                "anyone who knows its access key, which is no secret, may do what it may, without a signature",
                _NAME_ADDRESSES,
            )


def _entries(content: acl_file.AclFile) -> list[dict[str, Any]]:
    """Return the accounts of a file as they are written there."""
    return content.table.get(acl_file.ACCOUNTS) or []


def users(config: BrokerConfig, file: str | None) -> Iterator[Finding]:
    """Check the settings and files of ACL 2.0. `file`: the configuration file."""
    about = "users"
    if not config.authentication:
        return
    if importlib.util.find_spec("rocksdict") is None:
        yield error(
            about, "the package rocksdict is missing, so the broker does not start", "pip install 'duemq[auth]'"
        )
    if not config.authorization:
        yield warning(
            about, "authorizationEnabled=false: every user may do everything", "set authorizationEnabled=true"
        )
    secrets = (
        credentials_of("initAuthenticationUser", config.init_user, ("username", "password")),
        credentials_of("innerClientAuthenticationCredentials", config.inner_credentials, ("accessKey", "secretKey")),
    )
    for name, secret in filter(None, secrets):
        if len(secret) < _SHORT_SECRET:
            yield warning(
                about,
                f"the secret key of {name} in the configuration has only {len(secret)} characters, so it can be "
                "guessed",
                _MAKE_ANOTHER,
            )
    free = free_codes(config) - _ROUTES
    if free:
        codes = ", ".join(map(str, sorted(free)))
        yield error(
            about,
            f"anyone may make requests of the codes {codes} without an account: they are in authenticationWhitelist "
            f"{'and in authorizationWhitelist' if config.authorization else 'and authorization is off'}",
            "remove the codes, unless a firewall keeps all strangers out",
        )
    if any(secrets) and file is not None:
        yield from _permissions(about, file)
    databases = [Path(config.store_root, each) for each in (file_names.USERS, file_names.ACLS)]
    for database in databases:
        if database.is_dir():
            yield from _permissions(about, str(database))
    if not secrets[0] and not databases[0].is_dir():
        yield error(
            about,
            "there is no user yet, and initAuthenticationUser creates none: nobody can use the broker",
            "run `duemq user init`",
        )
    elif config.authorization and not free:
        yield ok(about, "requests need a user, whose policies say what it may do")


def tls(config: BrokerConfig, now: datetime.datetime) -> Iterator[Finding]:
    """Check certificates and keys."""
    about = "TLS"
    try:
        known = options.read(config)
        if known.mode is not TlsMode.DISABLED and (known.server.certificate or known.server.key):
            contexts.server_context(known)
        if known.to_name_servers:
            contexts.client_context(known.client)
    except ConfigError as failure:
        yield error(about, str(failure), "fix this: the broker cannot start until you do")
        return
    if known.file is not None and (known.server.password or known.client.password):
        yield from _permissions(about, known.file)
    for text in known.warnings:
        yield warning(about, text, "see docs/security.md")
    if known.to_name_servers and known.client.certificate:
        yield from _dates(known.client, now)
    server = known.server
    if known.mode is TlsMode.DISABLED or not server.certificate:
        if config.listens_on_loopback:
            yield ok(about, "the broker has no certificate, and only this machine can connect")
        else:
            yield warning(
                about,
                "the broker has no certificate: messages can be read and changed on the way",
                "run `duemq tls self-signed`, which makes one and says what to configure",
            )
        return
    if known.mode is TlsMode.PERMISSIVE and not config.listens_on_loopback:
        yield warning(
            about,
            "tls.server.mode=permissive: clients may connect without TLS, and then everything can be read on the way",
            "set tls.server.mode=enforcing as soon as all clients use TLS",
        )
    yield from _permissions(about, server.key)
    yield from _dates(server, now)
    yield from _names(server, config.advertised_host)


def _dates(identity: Identity, now: datetime.datetime) -> Iterator[Finding]:
    about, path = "TLS", identity.certificate
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        yield warning(about, f"{path} was not checked", "install the package cryptography")
        return
    for certificate in x509.load_pem_x509_certificates(Path(path).read_bytes()):
        until = certificate.not_valid_after_utc
        name = certificate.subject.rfc4514_string()
        days = (until - now).days
        if until <= now or certificate.not_valid_before_utc > now:
            yield error(
                about,
                f"{path}: {name} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} to {until:%Y-%m-%d} only",
                "renew it; the broker reads the new files while it runs",
            )
        elif days < _RENEW_DAYS:
            yield warning(about, f"{path}: {name} expires in {days} days", "renew it; that needs no restart")
        else:
            yield ok(about, f"{path}: {name}, valid until {until:%Y-%m-%d} ({days} days left)")


def _names(identity: Identity, host: str) -> Iterator[Finding]:
    about, path = "TLS", identity.certificate
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        return
    chain = x509.load_pem_x509_certificates(Path(path).read_bytes())
    try:
        names = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = None
    known = [*names.get_values_for_type(x509.DNSName)] if names is not None else []
    known += [str(address) for address in names.get_values_for_type(x509.IPAddress)] if names is not None else []
    if host not in known:
        yield warning(
            about,
            f"{path} is for {', '.join(known) or 'no name'}, but clients are told brokerIP1={host}: clients that "
            "compare names, such as duemq's, refuse it",
            f"make a certificate that has {host} too",
        )


def own_files(config: BrokerConfig, file: str | None) -> Iterator[Finding]:
    """Check who may change or read the broker's own files."""
    if os.geteuid() == 0:
        yield warning("user", "this check runs as root", "run the broker, and this check, as a user of its own")
    if file is not None:
        has_secrets = bool(config.tls_server_key_password or config.tls_client_key_password)
        yield from _permissions("configuration", file, reads=has_secrets)
    root = config.store_root
    if os.path.isdir(root):
        mode = os.stat(root).st_mode
        if mode & stat.S_IROTH and mode & stat.S_IXOTH:
            yield warning("store", f"every user of this machine may read the messages in {root}", f"chmod 700 {root}")
        if mode & stat.S_IWOTH:
            yield error("store", f"every user of this machine may write into {root}", f"chmod 700 {root}")


def _permissions(about: str, path: str, *, reads: bool = True) -> Iterator[Finding]:
    """Check who may write a file, and with `reads` also who may read it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as failure:
        yield error(about, f"{path}: {failure.strerror}", "make the file readable for the broker's user")
        return
    if mode & stat.S_IWOTH:
        yield error(about, f"every user of this machine may write {path}", f"chmod 600 {path}")
    elif reads and mode & _OTHERS:
        yield error(about, f"every user of this machine may read {path}, which has secrets", f"chmod 600 {path}")
