"""What access control costs: signed sends to a broker that checks them, and to one that does not. With the accounts of
4.9, and with the users and policies of 5.3, ACL 2.0, for which Apache's broker is 5.3.3."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from duemq.protocol.frames import codec
from tests.bench.blast import blast, send_frame
from tests.bench.brokers import MakeBroker, apache, apache_5, running
from tests.bench.figures import Figure, Figures
from tests.bench.measure import cpu_seconds
from tests.bench.remote import Remote
from tests.peers.brokers.broker import HOST, Broker
from tests.support.access import ADMIN, signed, write_accounts
from tests.support.auth import SUPER, USER, create_user, entry, update_acl

FIGURES: Mapping[str, Figure] = {
    "signed_unchecked": Figure("signed 1 KiB sends, 512 under way, not checked", "/s", True),
    "signed_unchecked_cpu_us": Figure("  broker CPU a message", "us", False),
    "signed": Figure("  with access control", "/s", True),
    "signed_cpu_us": Figure("  broker CPU a message", "us", False),
    "signed_more_percent": Figure("  more CPU", "%", False),
    "signed_one_unchecked_cpu_us": Figure("one signed send at a time, not checked, CPU a message", "us", False),
    "signed_one_cpu_us": Figure("  with access control", "us", False),
    "signed_one_more_percent": Figure("  more CPU", "%", False),
}
FIGURES_OF_USERS: Mapping[str, Figure] = {
    "users_unchecked": Figure("signed 1 KiB sends, 512 under way, not checked", "/s", True),
    "users_unchecked_cpu_us": Figure("  broker CPU a message", "us", False),
    "users": Figure("  with ACL 2.0", "/s", True),
    "users_cpu_us": Figure("  broker CPU a message", "us", False),
    "users_more_percent": Figure("  more CPU", "%", False),
    "users_one_unchecked_cpu_us": Figure("one signed send at a time, not checked, CPU a message", "us", False),
    "users_one_cpu_us": Figure("  with ACL 2.0", "us", False),
    "users_one_more_percent": Figure("  more CPU", "%", False),
}


_AUTH: Final = "org.apache.rocketmq.auth"
WITH_USERS: Mapping[str, object] = {
    "authenticationEnabled": "true",
    "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
    "authorizationEnabled": "true",
    "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    "initAuthenticationUser": json.dumps({"username": SUPER[0], "password": SUPER[1]}),
}
"""ACL 2.0 as RocketMQ's documentation switches it on; Apache's broker needs the names of the classes."""


@dataclass(frozen=True)
class Sizes:
    """Messages of each run."""

    many: int
    single: int


REAL = Sizes(many=200_000, single=20_000)
TINY = Sizes(many=3200, single=200)
_RUNS: Final = 3
"""Runs of each kind; the one with the least CPU counts, since the first ones warm up a JVM."""
_PROPERTIES: Final = "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02TAGS\x01blast\x02"


async def access_control(make: MakeBroker, directory: Path, sizes: Sizes) -> Figures:
    """The same signed requests to a broker without and with access control."""
    figures: Figures = {}
    for name, enabled in (("signed{}_unchecked", "false"), ("signed{}", "true")):
        home = directory / enabled / "broker"
        write_accounts(home)
        properties = {"aclEnable": enabled, "rocketmqHome": str(home)}
        async with running(make, directory / enabled, properties) as broker:
            await _measure(broker, name, ADMIN, sizes, figures)
    _compare(figures, "signed")
    return figures


async def users(make: MakeBroker, directory: Path, sizes: Sizes) -> Figures:
    """The same signed requests of a user with policies to a broker without and with ACL 2.0."""
    figures: Figures = {}
    for name, properties in (("users{}_unchecked", {}), ("users{}", WITH_USERS)):
        async with running(make, directory / str(bool(properties)), properties) as broker:
            if properties:
                await asyncio.to_thread(_make_user, broker)
            await _measure(broker, name, USER, sizes, figures)
    _compare(figures, "users")
    return figures


def _make_user(broker: Broker) -> None:
    """Make a user as a service has it: it may send to one topic, and some more."""
    others = (entry(f"Topic:other-{number}*", "Pub", "Sub") for number in range(10))
    policies = update_acl(USER[0], entry("Topic:signed", "Pub"), entry("Group:*", "Sub"), *others)
    with Remote((HOST, broker.port)) as remote:
        for command in (create_user(USER), policies):
            frame = codec.encode(signed(command, SUPER))
            (answer,) = remote.exchange(frame, command.opaque, 1)
            if answer.code:
                raise RuntimeError(f"the user could not be made: {answer.remark}")


async def _measure(broker: Broker, name: str, account: tuple[str, str], sizes: Sizes, figures: Figures) -> None:
    """Send in both ways, and note the least CPU. `name`: of the figures, with a place for the way."""
    many, single = name.format(""), name.format("_one")
    for _ in range(_RUNS):
        used, result = await _used(broker, partial(_many, broker, sizes.many, account))
        figures[many] = max(figures.get(many, 0), result)
        _keep_least(figures, f"{many}_cpu_us", used / sizes.many * 1e6)
        used, _ = await _used(broker, partial(_one_by_one, broker, sizes.single, account))
        _keep_least(figures, f"{single}_cpu_us", used / sizes.single * 1e6)


def _compare(figures: Figures, what: str) -> None:
    for name in (what, f"{what}_one"):
        unchecked = figures[f"{name}_unchecked_cpu_us"]
        # A run of the smallest size may take less than the system's unit of CPU time.
        figures[f"{name}_more_percent"] = 100 * (figures[f"{name}_cpu_us"] / unchecked - 1) if unchecked else 0.0


NAMES = (access_control.__name__, users.__name__)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    figures: Figures = {}
    if access_control.__name__ in only:
        say(access_control.__name__)
        figures |= await access_control(make, directory / "acl", sizes)
    if users.__name__ in only:
        say(users.__name__)
        figures |= await users(apache_5 if make is apache else make, directory / "users", sizes)
    return figures


async def _used(broker: Broker, work: Callable[[], float]) -> tuple[float, float]:
    before = cpu_seconds(broker.pid)
    result = await asyncio.to_thread(work)
    return cpu_seconds(broker.pid) - before, result


def _keep_least(figures: Figures, name: str, value: float) -> None:
    figures[name] = min(figures.get(name, value), value)


def _many(broker: Broker, count: int, account: tuple[str, str]) -> float:
    result = blast((HOST, broker.port), "signed", count, account=account)
    if result.failed:
        raise RuntimeError(f"{result.failed} sends were refused")
    return result.per_second


def _one_by_one(broker: Broker, count: int, account: tuple[str, str]) -> float:
    frame = send_frame("signed", 0, 1, b"x" * 1024, _PROPERTIES, account)
    with socket.create_connection((HOST, broker.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            connection.sendall(frame)
            if b'"code":0,' not in connection.recv(65536):
                raise RuntimeError("a send was refused")
    return 0.0
