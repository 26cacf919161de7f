"""bridge.toml: the file of rules. docs/mqtt.md explains each name.

    nameserver = "127.0.0.1:9876"

    [mqtt]
    host = "127.0.0.1"
    client_id = "bridge-1"

    [delayed]
    longest = "30d"

    [[to_rocketmq]]
    filter = "sensors/+/temp"
    topic = "Sensors"
    key = "{2}"
    tags = "{3}"

    [[to_mqtt]]
    topic = "Commands"
    mqtt_topic = "commands/{key}"

Every error names the file and the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from duemq._consuming.subscription import make_subscription
from duemq._net.routes import parse_nameservers
from duemq._values import checks
from duemq._values.accounts import ACCESS_KEY, ACCOUNT_FILE, SECRET_KEY, Keys, keys_in, read_account
from duemq._values.durations import parse_duration
from duemq.errors import ArgumentError
from duemq.mqtt_bridge.rules import fields, lines, loops
from duemq.mqtt_bridge.rules.delays import read_delay
from duemq.mqtt_bridge.rules.filters import Filter, check_topic
from duemq.mqtt_bridge.rules.model import (
    NEVER_EXPIRES,
    Delay,
    Delayed,
    Inbound,
    MqttConnection,
    MqttSubscription,
    Outbound,
    Rules,
    RulesError,
    Tls,
    UserProperties,
)
from duemq.mqtt_bridge.rules.tables import TlsFiles, WrongTables, convert
from duemq.mqtt_bridge.rules.templates import Template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

MAX_BYTES: Final = 1 << 20
"""Maximum size of the file."""
MAX_FIELD_BYTES: Final = 65_535
"""Maximum size of user and password in MQTT."""
MAX_SHARED_ID: Final = 1000
"""Maximum number of characters of an encoded client id with a share: it is a part of RocketMQ's client id, for which
brokers accept at most 1,024."""
LONGEST_OF_STATUS: Final = "/counters"
"""The longest suffix of the status topic."""
_HOST: Final = re.compile(r"[^\x00-\x20\x7f/.]+(?:\.[^\x00-\x20\x7f/.]+)*\.?")
_PATH: Final = re.compile(r"/[!-~]*")


def read(path: Path) -> Rules:
    """Return the rules of a file. Raises RulesError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RulesError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise RulesError(f"{path}: has more than {MAX_BYTES} bytes, the limit of a file of rules")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RulesError(f"{path}:{data[: error.start].count(10) + 1}: is not UTF-8, which TOML requires") from None
    return parse(text, path)


def parse(text: str, path: Path, environment: dict[str, str] | None = None) -> Rules:
    """Return the rules of a file's text. `path`: the file's path, for errors; relative paths in the file are relative
    to its directory. `environment`: None for the process's. Raises RulesError."""
    return _Reader(text, path, dict(os.environ) if environment is None else environment).rules()


@dataclass(frozen=True, slots=True)
class _Names:
    """Default names of topics and groups, which contain the name of the share or else the client id. So bridges of
    different MQTT brokers do not take each other's messages, while bridges that share the load have the same names."""

    bridge: str

    @property
    def delayed_topic(self) -> str:
        return f"MQTT_DELAYED_{self.bridge}"

    def group(self, topic: str) -> str:
        return f"mqtt-bridge-{self.bridge}-{topic}"


class _Reader:
    """Reads one file."""

    def __init__(self, text: str, path: Path, environment: dict[str, str]) -> None:
        self._text = text
        self._path = path
        self._environment = environment
        try:
            self._file = convert(text)
        except WrongTables as error:
            raise self._error_at(error.line, error) from None
        mqtt = self._file.mqtt
        self._names = _Names(fields.encoded_name(mqtt.share or mqtt.client_id))

    def rules(self) -> Rules:
        """Check everything and return the rules. Raises RulesError."""
        file = self._file
        connection = self._connection()
        delayed = self._delayed() if file.delayed.enabled else None
        refused = file.delayed.prefixes if file.delayed.enabled else ()
        to_rocketmq = [self._to_rocketmq(number) for number in range(len(file.to_rocketmq))]
        to_mqtt = [self._to_mqtt(number, refused) for number in range(len(file.to_mqtt))]
        inbound, outbound = [rule for rule, _ in to_rocketmq], [rule for rule, _ in to_mqtt]
        self._check_groups(outbound, delayed)
        self._check_loops([each for _, each in to_rocketmq], [each for _, each in to_mqtt], delayed)
        status_topic = self._status_topic()
        subscriptions = self._subscriptions([each for _, each in to_rocketmq], delayed)
        return Rules(
            file=self._path,
            delayed_topic_line=self._delayed_line("topic"),
            delayed_group_line=self._delayed_line("group"),
            nameserver_line=lines.line_of(self._text, ("nameserver",)),
            connection=connection,
            nameserver=file.nameserver,
            account=self._account(),
            tls=self._tls(self._file.tls, "tls"),
            delayed=delayed,
            status_topic=status_topic,
            inbound=tuple(inbound),
            outbound=tuple(outbound),
            subscriptions=subscriptions,
        )

    # --- errors

    def _error(self, place: lines.Path, reason: object) -> RulesError:
        return self._error_at(lines.line_of(self._text, place), reason)

    def _error_at(self, line: int, reason: object) -> RulesError:
        return RulesError(f"{self._path}:{line}: {reason}")

    @contextmanager
    def _at(self, *place: str | int) -> Iterator[None]:
        """Add the file and the line of `place` to ArgumentErrors."""
        try:
            yield
        except ArgumentError as error:
            raise self._error(place, error) from None

    # --- tables to rules

    def _account(self) -> Keys:
        """Return the keys of the account: those of the file of rules, or else of the environment."""
        file, environment = self._file, self._environment
        if file.access_key is not None or file.secret_key is not None:
            for name, other in (("access_key", "secret_key"), ("secret_key", "access_key")):
                if getattr(file, name) is None:
                    raise self._error((other,), f"{name} is missing: an account has both access_key and secret_key")
            if file.account_file is not None:
                raise self._error(("account_file",), "give account_file, or access_key and secret_key, not both")
            return Keys(file.access_key, file.secret_key)
        if file.account_file is not None:
            with self._at("account_file"):
                return read_account(self._relative(file.account_file))
        if environment.get(ACCOUNT_FILE):
            with self._at():
                return read_account(Path(environment[ACCOUNT_FILE]))
        keys = keys_in(environment)
        if bool(keys.access_key) != bool(keys.secret_key):
            raise self._error((), f"the environment has only one of {ACCESS_KEY} and {SECRET_KEY}; set both, or none")
        return keys

    def _connection(self) -> MqttConnection:
        mqtt = self._file.mqtt
        with self._at("mqtt", "client_id"):
            check_topic(mqtt.client_id)
            if "/" in mqtt.client_id:
                raise ArgumentError(f"the client id {mqtt.client_id!r} has a /; it becomes a level of the status topic")
        if mqtt.share is not None:
            with self._at("mqtt", "share"):
                check_topic(mqtt.share)
                if "/" in mqtt.share:
                    raise ArgumentError(f"the share {mqtt.share!r} has a /, which MQTT does not allow")
            with self._at("mqtt", "client_id"):
                size = len(fields.encoded_name(mqtt.client_id))
                if size > MAX_SHARED_ID:
                    raise ArgumentError(
                        f"with a share, the bridge also uses its client id in RocketMQ, where this one would have "
                        f"{size} characters: at most {MAX_SHARED_ID} are possible, and some characters become six there"
                    )
        if mqtt.share is not None and mqtt.protocol != "5":
            raise self._error(
                ("mqtt", "share"), 'shared subscriptions need MQTT 5; leave share out, or set protocol = "5"'
            )
        keepalive = self._seconds(("mqtt", "keepalive"), mqtt.keepalive, 1, 65_535)
        expiry = NEVER_EXPIRES
        if mqtt.session_expiry != "never":
            expiry = self._seconds(("mqtt", "session_expiry"), mqtt.session_expiry, 1, NEVER_EXPIRES - 1)
        self._check_address()
        tls = self._tls(mqtt.tls, "mqtt", "tls")
        is_websocket = mqtt.websocket_path is not None
        default_port = (443 if tls else 80) if is_websocket else (8883 if tls else 1883)
        return MqttConnection(
            state_directory=self._state_directory(),
            state_line=lines.line_of(self._text, ("mqtt", "state")),
            host=mqtt.host,
            port=mqtt.port or default_port,
            protocol=mqtt.protocol,
            client_id=mqtt.client_id,
            user=mqtt.user,
            password=self._password(),
            tls=tls,
            websocket_path=mqtt.websocket_path,
            keepalive=keepalive,
            session_expiry=expiry,
            receive_maximum=mqtt.receive_maximum,
            receive_maximum_bytes=mqtt.receive_maximum_bytes,
            max_in_flight=mqtt.max_in_flight,
            max_in_flight_bytes=mqtt.max_in_flight_bytes,
            share=mqtt.share,
        )

    def _check_address(self) -> None:
        """Check the addresses of both sides and the user. Raises RulesError, with the line of the first that is
        wrong."""
        mqtt = self._file.mqtt
        with self._at("nameserver"):
            for address in parse_nameservers(self._file.nameserver):
                _check_host(address.rpartition(":")[0])
        with self._at("mqtt", "host"):
            _check_host(mqtt.host)
        if mqtt.websocket_path is not None and not _PATH.fullmatch(mqtt.websocket_path):
            raise self._error(
                ("mqtt", "websocket_path"),
                f"{mqtt.websocket_path!r} is not a path: it must begin with / and have only ASCII characters "
                "without blanks",
            )
        if mqtt.user is not None and (
            fields.encoded_text(mqtt.user) != mqtt.user or len(mqtt.user.encode()) > MAX_FIELD_BYTES
        ):
            raise self._error(
                ("mqtt", "user"), f"the user has a control character, or more than {MAX_FIELD_BYTES} bytes"
            )

    def _seconds(self, place: lines.Path, text: str, least: int, most: int) -> int:
        """Return a duration in whole seconds."""
        with self._at(*place):
            ms = parse_duration(text)
        seconds, rest = divmod(ms, 1000)
        if rest or not least <= seconds <= most:
            raise self._error(place, f"{place[-1]} is {text!r}; write whole seconds, from {least} to {most}")
        return seconds

    def _relative(self, name: str) -> Path:
        """Return the path for a name in the file. Raises ArgumentError if it is not a path."""
        if "\0" in name:
            raise ArgumentError(f"{name!r} is not a path: it has the character U+0000")
        try:
            return self._path.parent / Path(name).expanduser()
        except RuntimeError:
            raise ArgumentError(f"{name!r}: the user does not exist, or has no home directory") from None

    def _state_directory(self) -> Path:
        if self._file.mqtt.state is not None:
            with self._at("mqtt", "state"):
                return self._relative(self._file.mqtt.state)
        of_systemd = self._environment.get("STATE_DIRECTORY", "").partition(":")[0]
        if of_systemd:
            return Path(of_systemd)
        return self._relative(f"{fields.encoded_name(self._file.mqtt.client_id)}.state")

    def _password(self) -> str | None:
        password = self._given_password()
        if password is not None and self._file.mqtt.user is None:
            place = "password" if self._file.mqtt.password is not None else "password_file"
            raise self._error(("mqtt", place), "a password needs a user")
        if password is not None and len(password.encode()) > MAX_FIELD_BYTES:
            place = "password" if self._file.mqtt.password is not None else "password_file"
            raise self._error(("mqtt", place), f"the password has more than {MAX_FIELD_BYTES} bytes")
        return password

    def _given_password(self) -> str | None:
        mqtt = self._file.mqtt
        if mqtt.password_file is None:
            return mqtt.password
        place = ("mqtt", "password_file")
        if mqtt.password is not None:
            raise self._error(place, "give password or password_file, not both")
        with self._at(*place):
            path = self._relative(mqtt.password_file)
        try:
            return path.read_text().removesuffix("\n")
        except OSError as error:
            raise self._error(place, f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise self._error(place, f"{path}: is not UTF-8") from None

    def _tls(self, tls: bool | TlsFiles, *table: str) -> Tls | None:
        """Return the encryption that `table` configures; None for no encryption. Raises RulesError if a file of it is
        missing or cannot be used."""
        if not tls:
            return None
        if tls is True:
            tls = TlsFiles()
        files: dict[str, Path | None] = {}
        for name in ("ca_file", "certificate_file", "key_file"):
            text = getattr(tls, name)
            if text is None:
                files[name] = None
                continue
            with self._at(*table, name):
                files[name] = path = self._relative(text)
            if not path.is_file() or not os.access(path, os.R_OK):
                raise self._error((*table, name), f"{path}: is missing, or cannot be read")
        if files["key_file"] is not None and files["certificate_file"] is None:
            raise self._error((*table, "key_file"), "a key_file needs a certificate_file")
        found = Tls(check_host=tls.check_host, **files)
        try:
            found.context()
        except OSError as error:
            raise self._error(table, f"the files of tls cannot be used: {error.strerror or error}") from None
        return found

    @property
    def _own_topic(self) -> str:
        return self._file.status.topic or f"duemq/bridge/{self._file.mqtt.client_id}"

    def _status_topic(self) -> str:
        file, topic = self._file, self._own_topic
        with self._at("status", "topic"):
            check_topic(f"{topic}{LONGEST_OF_STATUS}")
            if file.delayed.enabled and topic.partition("/")[0] in file.delayed.prefixes:
                raise ArgumentError(f"the status topic {topic!r} begins with a prefix of delays")
        for number, rule in enumerate(self._file.to_rocketmq):
            if Filter(rule.filter).overlaps(Filter(f"{topic}/#")):
                line = lines.line_of(self._text, ("to_rocketmq", number, "filter"))
                raise self._error(
                    ("status", "topic"),
                    f"the status topic {topic!r} matches the filter of line {line}: the bridge would receive its own "
                    "reports; give another topic or another filter",
                )
        return topic

    def _delayed_line(self, name: Literal["topic", "group"]) -> int:
        """Return the line that gives the topic or the group of delayed messages, or else the name in their defaults."""
        if not self._file.delayed.enabled:
            place: lines.Path = ("delayed", "enabled")
        elif getattr(self._file.delayed, name) is not None:
            place = ("delayed", name)
        else:
            place = ("mqtt", "client_id" if self._file.mqtt.share is None else "share")
        return lines.line_of(self._text, place)

    def _delayed(self) -> Delayed:
        delayed = self._file.delayed
        place = ("delayed", "prefixes")
        if not delayed.prefixes:
            raise self._error(place, "prefixes is empty; leave it out for $delayed and delayed, or set enabled = false")
        with self._at(*place):
            for prefix in delayed.prefixes:
                check_topic(prefix)
                if "/" in prefix:
                    raise ArgumentError(f"the prefix {prefix!r} has a /; it must be one level, the first of a topic")
                Filter(f"{prefix}/#")
            if len(set(delayed.prefixes)) < len(delayed.prefixes):
                raise ArgumentError("a prefix is given twice")
        topic = delayed.topic or self._names.delayed_topic
        with self._at("delayed", "topic"):
            checks.check_topic_to_send(topic)
        group = delayed.group or self._names.group("delayed")
        with self._at("delayed", "group"):
            checks.check_group(group)
        with self._at("delayed", "longest"):
            longest_ms = parse_duration(delayed.longest)
        return Delayed(
            read=_delay_reader(delayed.prefixes, longest_ms, self._own_topic),
            prefixes=delayed.prefixes,
            topic=topic,
            group=group,
            qos=delayed.qos,
        )

    def _to_rocketmq(self, number: int) -> tuple[Inbound, loops.ToRocketmqEdge]:
        rule = self._file.to_rocketmq[number]
        table = ("to_rocketmq", number)
        with self._at(*table, "filter"):
            accepts = Filter(rule.filter)

        def template(name: str, text: str | None) -> Template | None:
            if text is None:
                return None
            with self._at(*table, name):
                return Template(text, fields.is_inbound_field, fields.INBOUND_FIELDS)

        topic = template("topic", rule.topic)
        assert topic is not None
        if topic.is_constant:
            with self._at(*table, "topic"):
                checks.check_topic_to_send(topic.render(str))
        target = fields.target_maker(
            accepts,
            topic,
            template("key", rule.key),
            template("tags", rule.tags),
            template("sharding_key", rule.sharding_key),
        )
        line = lines.line_of(self._text, table)
        inbound = Inbound(filter=rule.filter, target=target, qos=rule.qos, retained=rule.retained, line=line)
        return inbound, loops.ToRocketmqEdge(line, accepts, topic, rule.qos, rule.retained)

    def _to_mqtt(self, number: int, refused: Sequence[str]) -> tuple[Outbound, loops.ToMqttEdge]:
        rule = self._file.to_mqtt[number]
        table = ("to_mqtt", number)
        with self._at(*table, "topic"):
            checks.check_topic(rule.topic)
        with self._at(*table, "tags"):
            make_subscription(rule.topic, rule.tags, 0)
        with self._at(*table, "mqtt_topic"):
            template = Template(rule.mqtt_topic, fields.is_outbound_field, fields.OUTBOUND_FIELDS)
            loops.as_filter(template)
            if template.is_constant:
                check_topic(template.render(str))
            if template.text.partition("/")[0] in refused:
                raise ArgumentError(
                    f"{rule.mqtt_topic!r} begins with a prefix of delays, which would delay each message"
                )
        group = rule.group or self._names.group(rule.topic)
        with self._at(*table, "group"):
            checks.check_group(group)
        line = lines.line_of(self._text, table)
        outbound = Outbound(
            topic=rule.topic,
            mqtt_topic=fields.mqtt_topic_maker(template, tuple(refused)),
            group=group,
            tags=rule.tags,
            qos=rule.qos,
            retain=rule.retain,
            start=rule.start,
            line=line,
        )
        return outbound, loops.ToMqttEdge(line, rule.topic, template)

    # --- rules beside each other

    def _check_groups(self, outbound: Sequence[Outbound], delayed: Delayed | None) -> None:
        of_group = {delayed.group: "the group of [delayed]"} if delayed is not None else {}
        for rule in outbound:
            if rule.group in of_group:
                raise self._error_at(
                    rule.line,
                    f"the group {rule.group} is also {of_group[rule.group]}; members of a group share its messages: "
                    'give each rule its own, group = "..."',
                )
            of_group[rule.group] = f"that of line {rule.line}"

    def _check_loops(
        self, to_rocketmq: Sequence[loops.ToRocketmqEdge], to_mqtt: Sequence[loops.ToMqttEdge], delayed: Delayed | None
    ) -> None:
        if delayed is not None:
            for out in to_mqtt:
                if out.topic == delayed.topic:
                    raise self._error_at(
                        out.line, f"{out.topic} is the topic in which delayed messages wait; leave it to [delayed]"
                    )
            for back in to_rocketmq:
                if loops.can_make(back, delayed.topic):
                    raise self._error_at(
                        back.line, f"the rule may send to {delayed.topic}, the topic in which delayed messages wait"
                    )
        way = loops.find_loop(to_rocketmq, to_mqtt)
        if way is not None:
            numbers = ", ".join(str(rule.line) for rule in way)
            raise self._error_at(
                way[0].line,
                f"a message would come back to where it came from, by the rules of lines {numbers}: give one of these "
                "rules another topic or filter",
            )

    def _subscriptions(
        self, to_rocketmq: Sequence[loops.ToRocketmqEdge], delayed: Delayed | None
    ) -> tuple[MqttSubscription, ...]:
        wanted = [loops.Wanted(rule.filter, rule.qos, rule.retained) for rule in to_rocketmq]
        if delayed is not None:
            wanted += [loops.Wanted(Filter(f"{prefix}/#"), delayed.qos, "never") for prefix in delayed.prefixes]
        found = []
        for each in loops.subscriptions(wanted):
            if isinstance(each, loops.Wanted):
                found.append(MqttSubscription(each.filter.text, each.qos, each.retained))
                continue
            one, other = (_line(rule, to_rocketmq) for rule in each)
            raise self._error_at(
                max(one, other),
                f"the filters {each[0].filter.text!r} and {each[1].filter.text!r} match topics in common; an MQTT "
                "broker may deliver their messages twice: make one match all that the other does, or none of it",
            )
        return tuple(found)


def _check_host(host: str) -> None:
    """Raise ArgumentError if a text is neither a host name nor an address."""
    if not _HOST.fullmatch(host) or any(len(label) > 63 for label in host.split(".")):
        raise ArgumentError(f"{host!r} is neither a host name nor an address")


def _line(wanted: loops.Wanted, rules: Sequence[loops.ToRocketmqEdge]) -> int:
    """Return the line of the rule that wants a subscription; 1 for the prefixes of delays."""
    return next((rule.line for rule in rules if rule.filter is wanted.filter), 1)


def _delay_reader(
    prefixes: tuple[str, ...], longest_ms: int, own_topic: str
) -> Callable[[str, UserProperties, int], Delay | None]:
    def read_one(topic: str, properties: UserProperties, now_ms: int) -> Delay | None:
        return read_delay(topic, properties, prefixes, now_ms, longest_ms, own_topic)

    return read_one
