"""Invalid arguments of the clients' constructors, also of a wrong type, are refused at once and by name."""

from __future__ import annotations

import inspect
import math
import re
import sys
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import duemq
from duemq import ArgumentError, sync
from duemq.auth import AuthAdmin

CLIENTS: dict[str, Any] = {
    "Producer": duemq.Producer,
    "Consumer": duemq.Consumer,
    "Admin": duemq.Admin,
    "AuthAdmin": AuthAdmin,
    "sync.Producer": sync.Producer,
    "sync.Consumer": sync.Consumer,
    "sync.Admin": sync.Admin,
    "Retries": duemq.Retries,
}
ALSO: dict[str, dict[str, object]] = {
    "access_key": {"secret_key": "s"},
    "secret_key": {"access_key": "a"},
    "offset_file": {"model": "broadcasting"},
    "concurrency": {"on_message": lambda message: None},
}
"""Arguments with which those of other names have a meaning."""


class BytesPath:
    """A path in bytes."""

    def __fspath__(self) -> bytes:
        return b"offsets"

    def __repr__(self) -> str:
        return "<bytes>"


def names_of(client: str) -> list[str]:
    return [name for name in inspect.signature(CLIENTS[client]).parameters if not name.startswith("_")]


def make(client: str, **arguments: object) -> object:
    needed = {"group": "g"} if "Consumer" in client else {}
    return CLIENTS[client](**{**needed, **arguments})


@pytest.mark.parametrize(("client", "name"), [(client, name) for client in CLIENTS for name in names_of(client)])
def test_any_object_is_refused_by_the_name_of_its_argument(client: str, name: str) -> None:
    also = ALSO.get(name, {})
    with pytest.raises(ArgumentError) as caught:
        make(client, **also, **{name: object()})
    named = "retries" if (client, name) == ("Retries", "times") else name
    assert re.search(rf"\b{named}=.* object", str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("client", "name", "value", "told"),
    [
        ("Producer", "nameserver", 5, "nameserver=5: give host:port, as a str"),
        ("Producer", "nameserver", None, "nameserver=None: give host:port"),
        ("Producer", "group", b"g", "group=b'g': give a name, as a str"),
        ("Producer", "connect_timeout", "3", "connect_timeout='3': give seconds, more than 0"),
        ("Producer", "max_in_flight", 0, "max_in_flight=0: give 1 or more"),
        ("Producer", "max_in_flight_bytes", "1", "max_in_flight_bytes='1': give 1 or more"),
        ("Producer", "max_body_bytes", None, "max_body_bytes=None: give 1 or more"),
        ("Producer", "compress_from_bytes", "4k", "compress_from_bytes='4k': give bytes, 0 or more, or None"),
        ("Producer", "interceptors", 5, "interceptors=5: give a list of interceptors"),
        ("Producer", "interceptors", 0, "interceptors=0: give a list of interceptors"),
        ("Producer", "interceptors", False, "interceptors=False: give a list of interceptors"),
        ("Producer", "interceptors", "", "interceptors='': give a list of interceptors"),
        ("Producer", "interceptors", {}, "interceptors={}: give a list of interceptors"),
        ("Consumer", "interceptors", b"", "interceptors=b'': give a list of interceptors"),
        ("Consumer", "interceptors", "x", "interceptors='x': give a list of interceptors"),
        ("Consumer", "interceptors", ["x"], "interceptors: 'x' is not of class ConsumerInterceptor"),
        ("Producer", "interceptors", np.array(1), "interceptors=array(1): give a list of interceptors"),
        ("Producer", "interceptors", np.array([1, 2]), "interceptors: "),
        ("Producer", "codec", np.array(["json", "auto"]), "codec=array("),
        ("Consumer", "model", np.array(["clustering", "broadcasting"]), "model=array("),
        ("Consumer", "from_", np.array(["first", "last"]), "from_=array("),
        ("Consumer", "from_", -1, "from_=-1 is not a time; give seconds since the epoch"),
        ("Consumer", "from_", 10**12, "from_=1000000000000 looks like milliseconds"),
        pytest.param("Consumer", "from_", 10**5000, "from_=<int with too many digits to be shown> looks", id="huge"),
        ("Consumer", "concurrency", True, "concurrency=True: give 1 to 1000"),
        ("sync.Consumer", "concurrency", True, "concurrency=True: give 1 to 1000"),
        ("Producer", "nameserver", ":9876", "nameserver=':9876' is not an address; write it as host:port"),
        ("Admin", "nameserver", "a;b:0", "nameserver='b:0' is not an address; write it as host:port"),
        ("Admin", "nameserver", "a:" + "9" * 5000, "nameserver='a:9"),
        ("Admin", "connect_timeout", 0, "connect_timeout=0: give seconds, more than 0"),
        ("Consumer", "close_timeout", "x", "close_timeout='x': give seconds, 0 or more"),
        ("Consumer", "close_timeout", float("nan"), "close_timeout=nan: give seconds, 0 or more"),
        ("Consumer", "handler_timeout", "x", "handler_timeout='x': give seconds, more than 0, or None"),
        ("Consumer", "from_", None, "from_=None; write 'first', 'last' or give a time"),
        ("Consumer", "from_", datetime(2030, 1, 1), "from_=2030-01-01 00:00:00 has no time zone"),
        ("Consumer", "offset_file", "", "offset_file='': give a path, or None"),
        ("Consumer", "offset_file", BytesPath(), "offset_file=<bytes>: give a path, or None"),
        ("Consumer", "ordered", "no", "ordered='no': give True or False"),
        ("sync.Consumer", "concurrency", "20", "concurrency='20': give 1 to 1000"),
        ("Retries", "jitter", "x", "jitter='x': give a number from 0 to 1"),
    ],
)
def test_the_error_says_what_was_given_and_what_is_allowed(client: str, name: str, value: object, told: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(client, **ALSO.get(name, {}), **{name: value})
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("client", ["Producer", "Consumer", "Admin", "AuthAdmin", "sync.Producer"])
def test_no_error_shows_a_key(client: str) -> None:
    for name, key in (("access_key", b"canary-secret-key"), ("secret_key", b"canary-secret-key")):
        with pytest.raises(ArgumentError) as caught:
            make(client, **{"access_key": "a", "secret_key": "s", name: key})
        assert str(caught.value) == f"{name}= is of type bytes: give a str, or None"


def test_the_least_values_are_accepted() -> None:
    make("Producer", max_in_flight=1, max_in_flight_bytes=1, max_body_bytes=1, compress_from_bytes=0, interceptors=())
    make("Consumer", close_timeout=0, handler_timeout=None, concurrency=1, from_=0)
    make("Consumer", model="broadcasting", offset_file=None, access_key="", secret_key=None)


@pytest.mark.parametrize(
    ("client", "name", "where"),
    [
        ("Producer", "max_in_flight", "_window._most"),
        ("Producer", "max_in_flight", "_max_in_flight"),
        ("Producer", "max_in_flight_bytes", "_window._most_bytes"),
        ("Producer", "max_body_bytes", "_max_body_bytes"),
        ("Producer", "compress_from_bytes", "_compress_from_bytes"),
        ("Producer", "timeout", "_timeout"),
        ("Producer", "connect_timeout", "_client.intervals.connect_timeout"),
        ("Producer", "retries", "_sender._retries.times"),
        ("Admin", "timeout", "_timeout"),
        ("Admin", "timeout", "_changes._timeout"),
        ("AuthAdmin", "timeout", "_timeout"),
        ("AuthAdmin", "connect_timeout", "_client.intervals.connect_timeout"),
        ("Consumer", "concurrency", None),
        ("Consumer", "max_reconsume_times", "_member._config.max_reconsume_times"),
        ("Consumer", "max_ahead", "_member._config.max_ahead"),
        ("Consumer", "max_cached_messages", "_inbox.max_messages"),
        ("Consumer", "max_cached_bytes", "_inbox.max_bytes"),
        ("Consumer", "handler_timeout", None),
        ("Consumer", "close_timeout", "_close_timeout"),
        ("sync.Consumer", "concurrency", None),
        ("Retries", "times", "times"),
        ("Retries", "longest_pause", "longest_pause"),
    ],
)
def test_numbers_of_other_libraries_are_accepted_and_kept_as_those_of_python(
    client: str, name: str, where: str | None
) -> None:
    kept: Any = make(client, **ALSO.get(name, {}), **{name: np.int64(5)})
    for attribute in where.split(".") if where is not None else ():
        kept = getattr(kept, attribute)
    if where is not None:
        assert (type(kept) in (int, float), kept) == (True, 5)


def test_a_handler_gets_numbers_of_python() -> None:
    consumer: Any = make(
        "Consumer",
        on_message=lambda message: None,
        concurrency=np.uint8(2),
        handler_timeout=np.float32(2.5),
        close_timeout=np.int8(100),
    )
    assert (type(consumer._workers._timeout), consumer._workers._timeout) == (float, 2.5)
    assert len(consumer._workers._workers) == 2
    assert type(consumer._member._config.close_timeout) is float


def test_fractions_of_a_limit_and_infinity_are_accepted() -> None:
    producer: Any = make(
        "Producer", max_in_flight=2.5, max_in_flight_bytes=math.inf, compress_from_bytes=Fraction(3, 2)
    )
    assert (producer._window._most, producer._window._most_bytes) == (2, sys.maxsize)
    assert producer._compress_from_bytes == 2
    never: Any = make("Producer", compress_from_bytes=math.inf)
    assert never._compress_from_bytes is None


@pytest.mark.parametrize("value", [Decimal(1), np.array([1]), np.bool_(True), 1j])
def test_what_is_no_real_number_is_refused(value: object) -> None:
    for client, name in (("Producer", "timeout"), ("Producer", "max_in_flight"), ("Retries", "times")):
        with pytest.raises(ArgumentError, match="give"):
            make(client, **{name: value})


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    ("client", "name"),
    [
        ("Producer", "timeout"),
        ("Producer", "connect_timeout"),
        ("Admin", "timeout"),
        ("AuthAdmin", "connect_timeout"),
        ("Consumer", "handler_timeout"),
        ("Consumer", "close_timeout"),
        ("Consumer", "concurrency"),
        ("Consumer", "max_reconsume_times"),
        ("Retries", "first_pause"),
        ("Retries", "longest_pause"),
        ("Retries", "jitter"),
    ],
)
def test_numbers_that_no_float_can_hold_are_refused(client: str, name: str, digits: int) -> None:
    """Also those that Python does not print: it raises ValueError for ints of more than 4300 digits."""
    with pytest.raises(ArgumentError, match=rf"\b{name}=(10|<int)"):
        make(client, **{name: 10**digits})


@pytest.mark.parametrize("name", ["max_in_flight", "max_body_bytes", "compress_from_bytes"])
def test_a_negative_number_that_python_does_not_print_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name}=<int with too many digits to be shown>: give "):
        make("Producer", **{name: -(10**5000)})


def test_infinity_is_a_time_out() -> None:
    make("Producer", timeout=math.inf, connect_timeout=math.inf)
    make("Consumer", handler_timeout=math.inf, close_timeout=math.inf)
    make("Retries", longest_pause=math.inf)
