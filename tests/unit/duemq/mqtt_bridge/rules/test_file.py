from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from duemq.messages import MessageQueue, ReceivedMessage
from duemq.mqtt_bridge.rules import check
from duemq.mqtt_bridge.rules.file import MAX_BYTES, parse, read
from duemq.mqtt_bridge.rules.model import (
    NEVER_EXPIRES,
    Delay,
    DelayRefused,
    MqttSubscription,
    Rules,
    RulesError,
    Target,
    TemplateError,
    Tls,
)
from duemq.protocol.records.properties import format_properties
from duemq.protocol.records.record import StoredMessage
from tests.support.tls import write_certificates

HEAD = '[mqtt]\nclient_id = "b"\n'
WHOLE = """\
nameserver = "10.0.0.1:9876;10.0.0.2:9876"

[mqtt]
host = "mqtt.example"
client_id = "bridge-1"
user = "bridge"
password_file = "secret"
tls = { ca_file = "ca.pem" }
keepalive = "30s"
session_expiry = "1d"
receive_maximum = 50
max_in_flight = 20
share = "site"
state = "state"

[delayed]
prefixes = ["later"]
topic = "LATER"
longest = "2d"
qos = 1

[status]
topic = "bridges/1"

[[to_rocketmq]]
filter = "sensors/+/temp"
topic = "Sensors"
key = "{2}"
tags = "{3}"
sharding_key = "{1}-{2}"
qos = 2
retained = "once"

[[to_rocketmq]]
filter = "sensors/#"
topic = "{1}-rest"
key = "{2-}"

[[to_mqtt]]
topic = "Commands"
tags = "a || b"
mqtt_topic = "commands/{key}/{property:unit}"
qos = 2
retain = true
start = "last"

[[to_mqtt]]
topic = "Raw"
mqtt_topic = "{levels:where}"
group = "raw"
"""


def rules_of(text: str, environment: dict[str, str] | None = None) -> Rules:
    return parse(text, Path("/etc/bridge.toml"), environment or {})


def message(topic: str, body: bytes = b"x", **properties: str) -> ReceivedMessage:
    stored = StoredMessage(
        queue_id=0,
        born_timestamp=0,
        born_host=b"",
        store_timestamp=0,
        store_host=b"",
        body=body,
        topic=topic,
        properties_text=format_properties(properties),
    )
    return ReceivedMessage(stored, MessageQueue(topic, "broker", 0), 0, Mock())


@pytest.fixture
def whole(tmp_path: Path) -> Rules:
    (tmp_path / "secret").write_text("pass word\n")
    write_certificates(tmp_path)
    (tmp_path / "bridge.toml").write_text(WHOLE)
    return read(tmp_path / "bridge.toml")


def test_a_file_says_how_to_connect(whole: Rules, tmp_path: Path) -> None:
    connection = whole.connection
    assert whole.nameserver == "10.0.0.1:9876;10.0.0.2:9876"
    assert (connection.host, connection.port, connection.protocol) == ("mqtt.example", 8883, "5")
    assert (connection.user, connection.password) == ("bridge", "pass word")
    assert connection.tls == Tls(ca_file=tmp_path / "ca.pem", certificate_file=None, key_file=None, check_host=True)
    assert (connection.keepalive, connection.session_expiry) == (30, 86_400)
    assert (connection.receive_maximum, connection.max_in_flight, connection.share) == (50, 20, "site")
    assert connection.state_directory == tmp_path / "state"
    assert whole.status_topic == "bridges/1"


def test_a_file_says_what_goes_to_rocketmq(whole: Rules) -> None:
    first, second = whole.inbound
    assert first.target("sensors/attic/temp") == Target("Sensors", "attic", "temp", "sensors-attic")
    assert first.target("sensors/living room|1/temp") == Target(
        "Sensors", "living%20room|1", "temp", "sensors-living%20room|1"
    )
    assert first.target("sensors//temp") == Target("Sensors", None, "temp", "sensors-")
    assert first.target("sensors/attic/wind") is None
    assert (first.qos, first.retained, first.line) == (2, "once", 25)
    assert second.target("sensors/a/b") == Target("sensors-rest", "a/b", is_chosen_by_sender=True)
    with pytest.raises(TemplateError, match="no level 2"):
        second.target("sensors")


KEYS = "accessKey: bridge\nsecretKey: canary\n"


def test_the_account_is_in_the_file_or_another_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "tools.yml").write_text(KEYS)
    of_file = 'access_key = "bridge"\nsecret_key = "canary"\n'
    in_environment = {"DUEMQ_ACCESS_KEY": "bridge", "DUEMQ_SECRET_KEY": "canary"}
    for text, environment in (
        (of_file, {"DUEMQ_ACCOUNT": "/nowhere"}),
        ('account_file = "tools.yml"\n', {}),
        ("", in_environment),
        ("", {"DUEMQ_ACCOUNT": str(tmp_path / "tools.yml")}),
    ):
        rules = parse(text + HEAD, tmp_path / "bridge.toml", environment)
        assert rules.account == ("bridge", "canary")
        assert "canary" not in repr(rules)
    assert rules_of(HEAD).account == (None, None)


def test_an_account_with_one_key_in_the_environment_is_none() -> None:
    with pytest.raises(RulesError, match="only one of DUEMQ_ACCESS_KEY and DUEMQ_SECRET_KEY"):
        rules_of(HEAD, {"DUEMQ_SECRET_KEY": "canary"})


def test_a_file_says_what_goes_to_mqtt(whole: Rules) -> None:
    commands, raw = whole.outbound
    assert commands.mqtt_topic(message("Commands", KEYS="a/#1 b", unit="u")) == "commands/a%2F%231/u"
    with pytest.raises(TemplateError, match="no unit"):
        commands.mqtt_topic(message("Commands", KEYS="k"))
    assert (commands.tags, commands.qos, commands.retain, commands.start) == ("a || b", 2, True, "last")
    assert commands.group == "mqtt-bridge-site-Commands"
    assert raw.mqtt_topic(message("Raw", where="a/b+")) == "a/b%2B"
    for where in ("$SYS/x", "later/5/x"):
        with pytest.raises(TemplateError, match="a special meaning"):
            raw.mqtt_topic(message("Raw", where=where))
    assert raw.group == "raw"


def test_a_file_says_which_delays_there_are(whole: Rules) -> None:
    assert whole.delayed is not None
    assert whole.delayed.read("later/5/a", (), 0) == Delay("a", delay_ms=5_000)
    assert whole.delayed.read("$delayed/5/a", (), 0) is None
    with pytest.raises(DelayRefused, match="the longest is 2d"):
        whole.delayed.read("later/49h/a", (), 0)
    assert (whole.delayed.topic, whole.delayed.group) == ("LATER", "mqtt-bridge-site-delayed")


def test_no_two_subscriptions_overlap(whole: Rules) -> None:
    assert whole.subscriptions == (MqttSubscription("sensors/#", 2, "once"), MqttSubscription("later/#", 1, "never"))
    everything = rules_of(f'{HEAD}[status]\ntopic = "$s"\n[[to_rocketmq]]\nfilter = "#"\ntopic = "A"\nqos = 0\n')
    assert everything.subscriptions == (MqttSubscription("#", 2, "never"), MqttSubscription("$delayed/#", 2, "never"))


def test_what_a_file_need_not_say() -> None:
    rules = rules_of(HEAD)
    connection = rules.connection
    assert (connection.host, connection.port, connection.protocol) == ("127.0.0.1", 1883, "5")
    assert (connection.tls, connection.session_expiry) == (None, NEVER_EXPIRES)
    assert connection.state_directory == Path("/etc/b.state")
    assert rules_of(HEAD, {"STATE_DIRECTORY": "/var/lib/b:/x"}).connection.state_directory == Path("/var/lib/b")
    assert rules.nameserver == "127.0.0.1:9876"
    assert rules.status_topic == "duemq/bridge/b"
    assert rules.delayed is not None
    assert (rules.delayed.topic, rules.delayed.group) == ("MQTT_DELAYED_b", "mqtt-bridge-b-delayed")
    assert rules.subscriptions == (
        MqttSubscription("$delayed/#", 2, "never"),
        MqttSubscription("delayed/#", 2, "never"),
    )
    assert rules_of(f"{HEAD}[delayed]\nenabled = false").delayed is None


@pytest.mark.parametrize(
    ("extra", "port"),
    [("", 1883), ("tls = true", 8883), ('websocket_path = "/mqtt"', 80), ('tls = true\nwebsocket_path = "/"', 443)],
)
def test_the_port_follows_the_way_to_connect(extra: str, port: int) -> None:
    assert rules_of(f"{HEAD}{extra}").connection.port == port


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", 1, "mqtt is missing"),
        ("[mqtt]\n", 1, "client_id is missing"),
        ("a = \n", 1, "is not TOML"),
        (f'{HEAD}port = "x"', 3, "port: expected"),
        (f"{HEAD}port = 70000", 3, "port: expected `int` <= 65535"),
        (f'{HEAD}hots = "x"', 3, "hots is unknown here; known are client_id, host"),
        (f"{HEAD}[other]\n", 3, "other is unknown here; known are mqtt, nameserver"),
        ('[mqtt]\nclient_id = "a/b"', 2, "has a /"),
        ('[mqtt]\nclient_id = "a#"', 2, "only filters may have"),
        (f'{HEAD}keepalive = "60"', 3, "not a duration"),
        (f'{HEAD}keepalive = "1500ms"', 3, "whole seconds"),
        (f'{HEAD}share = "a/b"', 3, "MQTT does not allow"),
        (f'{HEAD}share = "a"\nprotocol = "3.1.1"', 3, "need MQTT 5"),
        (f'[mqtt]\nshare = "a"\nclient_id = "{"ä" * 170}"', 3, "would have 1020 characters: at most 1000"),
        (f'{HEAD}protocol = "3.1"', 3, "protocol: invalid enum value"),
        (f'{HEAD}password = "x"\npassword_file = "y"', 4, "not both"),
        (f'{HEAD}password_file = "\\u0000"', 3, "is not a path"),
        (f'{HEAD}state = "~nobody-here/x"', 3, "the user does not exist"),
        (f'{HEAD}[mqtt.tls]\nca_file = "\\u0000"', 4, "is not a path"),
        (f'{HEAD}[mqtt.tls]\nca_file = "/"', 4, "is missing, or cannot be read"),
        (f'account_file = "~nobody-here/x"\n{HEAD}', 1, "the user does not exist"),
        (f'nameserver = "h:x"\n{HEAD}', 1, "is not an address"),
        (f'nameserver = ";"\n{HEAD}', 1, "no address"),
        (f'{HEAD}host = "a b"', 3, "neither a host name"),
        (f'{HEAD}host = "a..b"', 3, "neither a host name"),
        (f'{HEAD}host = "{"x" * 64}.org"', 3, "neither a host name"),
        (f'{HEAD}websocket_path = "mqtt"', 3, "must begin with /"),
        (f'{HEAD}websocket_path = "/\\r\\nX: y"', 3, "without blanks"),
        (f'{HEAD}user = "\\u0001"', 3, "control character"),
        (f'{HEAD}user = "u"\npassword = "{"x" * 65_536}"', 4, "more than 65535 bytes"),
        (f'{HEAD}password = "x"', 3, "a password needs a user"),
        (f'nameserver = "a..b:9876"\n{HEAD}', 1, "'a..b' is neither a host name"),
        (f'nameserver = "127.0.0.1:9876;{"a" * 64}.de:9876"\n{HEAD}', 1, "is neither a host name"),
        (f'{HEAD}share = "\\u0001"', 3, "control character"),
        (f'{HEAD}[status]\ntopic = "delayed/x"', 4, "prefix of delays"),
        (f'{HEAD}[status]\ntopic = "{"x" * 65_530}"', 4, "more than 65535 bytes"),
        (f'{HEAD}[delayed]\nprefixes = ["$share"]', 4, "$share"),
        (f"x = {'[' * 3000}\n{HEAD}", 1, "nested too deeply"),
        (f"{HEAD}receive_maximum_bytes = 1", 3, "receive_maximum_bytes: expected `int` >= 65536"),
        (f'access_key = "a"\n{HEAD}', 1, "secret_key is missing"),
        (f'secret_key = "canary"\n{HEAD}', 1, "access_key is missing"),
        (f'access_key = "a"\nsecret_key = "canary"\naccount_file = "x"\n{HEAD}', 3, "not both"),
        (f'account_file = "/nowhere/x"\n{HEAD}', 1, "/nowhere/x: No such file"),
        (f"access_key = 'a'\nsecret_key = [\"canary\"]\n{HEAD}", 2, "secret_key: expected `str"),
        (f"access_key = 'a'\nsecret_key = canary\n{HEAD}", 2, "is not TOML"),
        (f'{HEAD}password_file = "/nowhere/y"', 3, "/nowhere/y: cannot be read: No such file"),
        (f'{HEAD}tls = {{ ca_file = "/nowhere/ca" }}', 3, "is missing, or cannot be read"),
        (f'{HEAD}tls = {{ ca_file = "/etc/hostname" }}', 3, "the files of tls cannot be used"),
        (f'{HEAD}tls = {{ certificate_file = "/etc/hostname" }}', 3, "the files of tls cannot be used"),
        (f"{HEAD}[mqtt.tls]\nca = 1", 4, "ca is unknown here"),
        (f'{HEAD}[tls]\nca_file = "/nowhere/ca"', 4, "is missing, or cannot be read"),
        (f'{HEAD}[tls]\nca_file = "/etc/passwd"', 3, "the files of tls cannot be used"),
        (f'{HEAD}[mqtt.tls]\nca_file = "/etc/passwd"', 3, "the files of tls cannot be used"),
        (f"{HEAD}[delayed]\nprefixes = []", 4, "prefixes is empty"),
        (f'{HEAD}[delayed]\nprefixes = ["a/b"]', 4, "has a /"),
        (f'{HEAD}[delayed]\nprefixes = ["a", "a"]', 4, "given twice"),
        (f'{HEAD}[delayed]\nlongest = "x"', 4, "not a duration"),
        (f'{HEAD}[delayed]\ntopic = "a b"', 4, "characters other than"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "a#"\ntopic = "T"', 4, "# stands alone"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "a"\ntopic = "T T"', 5, "characters other than"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "a"\ntopic = "{{0}}"', 5, "which is not a field; known are {1}"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "a"\ntopic = "T"\nkey = "{{key}}"', 6, "which is not a field"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "a"\ntopic = "T"\nqos = 3', 6, "qos: invalid enum value 3"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "a"', 3, "topic is missing"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "duemq/#"\ntopic = "T"', 1, "matches the filter of line 4"),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "x"\ntopic = "MQTT_DELAYED_b"', 3, "delayed messages wait"),
        (f'{HEAD}[[to_mqtt]]\ntopic = "T"\nmqtt_topic = "a/#"', 5, "only filters may have"),
        (f'{HEAD}[[to_mqtt]]\ntopic = "T"\nmqtt_topic = "a/{{1}}"', 5, "which is not a field; known are {topic}"),
        (f'{HEAD}[[to_mqtt]]\ntopic = "T"\nmqtt_topic = "delayed/5/a"', 5, "a prefix of delays"),
        (f'{HEAD}[[to_mqtt]]\ntopic = "T"\nmqtt_topic = "a"\ntags = "||"', 6, "tag"),
        (f'{HEAD}[[to_mqtt]]\ntopic = "MQTT_DELAYED_b"\nmqtt_topic = "a"', 3, "leave it to"),
        (
            f'{HEAD}[[to_mqtt]]\ntopic = "T"\nmqtt_topic = "a"\n[[to_mqtt]]\ntopic = "T"\nmqtt_topic = "b"',
            6,
            "also that of line 3",
        ),
        (
            f'{HEAD}[[to_mqtt]]\ntopic = "T"\nmqtt_topic = "a/{{key}}"\n[[to_rocketmq]]\nfilter = "+/x"\ntopic = "T"',
            3,
            "come back to where it came from, by the rules of lines 3, 6",
        ),
        (
            f'{HEAD}[[to_mqtt]]\ntopic = "A"\nmqtt_topic = "a"\n[[to_mqtt]]\ntopic = "B"\n'
            'mqtt_topic = "b/{levels:x}"\n[[to_rocketmq]]\nfilter = "a"\ntopic = "B"\n'
            '[[to_rocketmq]]\nfilter = "b/+/d"\ntopic = "{2}A"\n[[to_rocketmq]]\nfilter = "b/e"\ntopic = "{2}"',
            3,
            "by the rules of lines 3, 9, 6, 12",
        ),
        (
            f'{HEAD}[[to_rocketmq]]\nfilter = "a/+"\ntopic = "T"\n[[to_rocketmq]]\nfilter = "+/b"\ntopic = "T"',
            6,
            "match topics in common",
        ),
        (f'{HEAD}[[to_rocketmq]]\nfilter = "+/b"\ntopic = "T"', 3, "match topics in common"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(text: str, line: int, why: str) -> None:
    with pytest.raises(RulesError) as caught:
        rules_of(text)
    assert str(caught.value).startswith(f"/etc/bridge.toml:{line}: ")
    assert why in str(caught.value)
    assert "canary" not in str(caught.value)


def test_rules_that_only_look_like_a_loop_are_taken() -> None:
    rules_of(
        f'{HEAD}[[to_mqtt]]\ntopic = "A"\nmqtt_topic = "a/{{key}}"\n'
        '[[to_rocketmq]]\nfilter = "a/b/+"\ntopic = "A"\n'  # the key is one level
        '[[to_rocketmq]]\nfilter = "a/c"\ntopic = "{2}A"\n'
        '[[to_mqtt]]\ntopic = "cA"\nmqtt_topic = "d"'
    )


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bridge.toml"
    with pytest.raises(RulesError, match="No such file"):
        read(path)
    path.write_bytes(b"a = 1\n\xff")
    with pytest.raises(RulesError, match=r"bridge.toml:2: is not UTF-8"):
        read(path)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(RulesError, match="has more than"):
        read(path)


@pytest.mark.parametrize(
    ("topic", "lines", "is_taken"),
    [
        (
            "sensors/a/temp",
            ["sensors/a/temp: to RocketMQ's topic Sensors, key a, tags temp, sharding key sensors-a (line 25)"],
            True,
        ),
        ("other", ["other: no rule takes it to RocketMQ"], False),
        ("a/#", ["a/#: refused: the MQTT topic 'a/#' has + or #, which only filters may have"], False),
        (
            "later/5;key=k/other",
            [
                "later/5;key=k/other: waits 5s, with the key other#k",
                "then other on MQTT: no rule takes it to RocketMQ",
            ],
            True,
        ),
        ("later/recall;key=k/x", ["later/recall;key=k/x: cancels the waiting message with the key x#k"], True),
    ],
)
def test_what_becomes_of_a_topic(whole: Rules, topic: str, lines: list[str], is_taken: bool) -> None:
    assert check.sample(whole, topic, 0) == (lines, is_taken)


def test_a_wrong_delay_is_told(whole: Rules) -> None:
    lines, is_taken = check.sample(whole, "later/soon/x", 0)
    assert not is_taken
    assert lines[0].startswith("later/soon/x: refused: 'soon' is not a delay")


def test_the_rules_are_described(whole: Rules) -> None:
    text = "\n".join(check.describe(whole))
    assert "subscribes to sensors/# with QoS 2" in text
    assert "line 39: RocketMQ Commands (a || b) to MQTT with QoS 2, as group mqtt-bridge-site-Commands" in text
