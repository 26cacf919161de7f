"""The tables of bridge.toml as they are written: names, types and default values. `file` makes rules from them."""

from __future__ import annotations

import tomllib
from typing import Annotated, Final, Literal

import msgspec

from duemq.errors import DueMQError
from duemq.mqtt_bridge.rules import lines
from duemq.mqtt_bridge.rules.model import Protocol, QoS, Retained

_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Bytes = Annotated[int, msgspec.Meta(ge=65_536, le=2**40)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Table(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table of the file, with the names that it may have."""


class TlsFiles(_Table, frozen=True):
    """[mqtt.tls] and [tls], or `tls = { ... }`."""

    ca_file: _Text | None = None
    certificate_file: _Text | None = None
    key_file: _Text | None = None
    check_host: bool = True


class MqttTable(_Table, frozen=True):
    """[mqtt]: the MQTT broker, and the bridge's identity there."""

    client_id: _Text
    host: _Text = "127.0.0.1"
    port: _Port | None = None
    protocol: Protocol = "5"
    user: _Text | None = None
    password: str | None = None
    password_file: _Text | None = None
    tls: bool | TlsFiles = False
    websocket_path: _Text | None = None
    keepalive: str = "60s"
    session_expiry: str = "never"
    receive_maximum: _Count = 500
    receive_maximum_bytes: _Bytes = 33_554_432
    max_in_flight: _Count = 500
    max_in_flight_bytes: _Bytes = 33_554_432
    share: _Text | None = None
    state: _Text | None = None


class DelayedTable(_Table, frozen=True):
    """[delayed]: delays that MQTT clients ask for."""

    enabled: bool = True
    prefixes: tuple[_Text, ...] = ("$delayed", "delayed")
    topic: _Text | None = None
    group: _Text | None = None
    qos: QoS = 2
    longest: str = "30d"


class StatusTable(_Table, frozen=True):
    """[status]: the bridge's reports about itself."""

    topic: _Text | None = None


class ToRocketmqTable(_Table, frozen=True):
    """[[to_rocketmq]]: a rule from MQTT to RocketMQ."""

    filter: str
    topic: _Text
    key: str | None = None
    tags: str | None = None
    sharding_key: str | None = None
    qos: QoS = 1
    retained: Retained = "never"


class ToMqttTable(_Table, frozen=True):
    """[[to_mqtt]]: a rule from RocketMQ to MQTT."""

    topic: str
    mqtt_topic: _Text
    tags: str = "*"
    group: _Text | None = None
    qos: QoS = 1
    retain: bool = False
    start: Literal["first", "last"] = "first"


class RulesTables(_Table, frozen=True):
    """The whole file."""

    mqtt: MqttTable
    nameserver: _Text = "127.0.0.1:9876"
    account_file: _Text | None = None
    access_key: _Text | None = None
    secret_key: _Text | None = None
    tls: bool | TlsFiles = False
    delayed: DelayedTable = DelayedTable()
    status: StatusTable = StatusTable()
    to_rocketmq: tuple[ToRocketmqTable, ...] = ()
    to_mqtt: tuple[ToMqttTable, ...] = ()


_TABLES: Final[dict[lines.Path, type[_Table]]] = {
    (): RulesTables,
    ("mqtt",): MqttTable,
    ("mqtt", "tls"): TlsFiles,
    ("delayed",): DelayedTable,
    ("status",): StatusTable,
    ("to_rocketmq",): ToRocketmqTable,
    ("to_mqtt",): ToMqttTable,
}


class WrongTables(DueMQError):
    """A text does not have the tables of `RulesTables`. `line`: the number of the wrong line, from 1 on."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def convert(text: str) -> RulesTables:
    """Return the tables of a text. Raises WrongTables."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, at = str(error).partition(" (at line ")
        number = at.partition(",")[0]
        line = int(number) if number.isdigit() else text.count("\n") + 1
        raise WrongTables(line, f"is not TOML: {reason}") from None
    except RecursionError:
        raise WrongTables(1, "has values that are nested too deeply") from None
    try:
        return msgspec.convert(data, RulesTables)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `")
    place = lines.path_of(where.rstrip("`"))
    name = reason.rstrip("`").rpartition("`")[2]
    if "unknown field" in reason:
        known = _TABLES[tuple(part for part in place if isinstance(part, str))].__struct_fields__
        place, reason = (*place, name), f"{name} is unknown here; known are {', '.join(known)}"
    elif "missing required field" in reason:
        reason = f"{name} is missing"
    else:
        reason = f"{place[-1] if place else 'the file'}: {reason[0].lower()}{reason[1:]}"
    raise WrongTables(lines.line_of(text, place), reason)
