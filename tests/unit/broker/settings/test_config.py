"""Settings: RocketMQ's names, from a file, the environment and flags, and errors that name the wrong one."""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from duemq.broker import logs, main
from duemq.broker.errors import ConfigError
from duemq.broker.settings.config import FIELDS, SECRET, BrokerConfig, load, parse_addresses
from duemq.broker.settings.rocketmq_properties import UNUSED

AUTH = "org.apache.rocketmq.auth"
OTHER_VALUES: dict[str, str] = {
    "brokerId": "0",
    "brokerRole": "SYNC_MASTER",
    "brokerIP1": "10.1.2.3",
    "bindAddress": "0.0.0.0",
    "flushDiskType": "SYNC_FLUSH",
    "deleteWhen": "01;23",
    "messageDelayLevel": "1s 2m",
    "namesrvAddr": "a:1;b:2",
    "mappedFileSizeCommitLog": "16777216",
    "diskSpaceCleanForciblyRatio": "0.5",
    "diskSpaceWarningLevelRatio": "0.6",
    "timerPrecisionMs": "1000",
    "aclEnable": "false",
    "authenticationEnabled": "false",
    "authorizationEnabled": "false",
    "authenticationProvider": f"{AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
    "authenticationStrategy": f"{AUTH}.authentication.strategy.StatefulAuthenticationStrategy",
    "authenticationWhitelist": "10, 11",
    "initAuthenticationUser": '{"username":"root","password":"canary-secret"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"root","secretKey":"canary-secret"}',
    "authorizationProvider": f"{AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    "authorizationStrategy": f"{AUTH}.authorization.strategy.StatelessAuthorizationStrategy",
    "authorizationWhitelist": "10,apache.rocketmq.v2.SendMessageRequest",
}
"""A value for each property that does not accept arbitrary ones."""


def value_for(name: str) -> str:
    """Return a valid value, different from the default if possible."""
    field = FIELDS[name]
    default = field.default
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if field.metadata["choices"]:
        return str(next(choice for choice in field.metadata["choices"] if choice != default))
    if isinstance(default, bool):
        return "false" if default else "true"
    if isinstance(default, int):
        low, high = field.metadata["range"]
        return str(default + 1 if default < high else low)
    return "other"


def loaded(*settings: str, file: str | None = None, environment: dict[str, str] | None = None) -> BrokerConfig:
    return load(file, settings, environment or {})[0]


@pytest.mark.parametrize("name", FIELDS)
def test_every_property_is_taken_and_reaches_its_field(name: str) -> None:
    text = value_for(name)
    value = getattr(loaded(f"{name}={text}"), FIELDS[name].name)
    if name.startswith("storePath") or name == "auditLogPath":
        assert value == str(Path(text).absolute())
    else:
        assert value == (text == "true") if isinstance(value, bool) else str(value) == text


@pytest.mark.parametrize("name", FIELDS)
def test_every_property_explains_itself_and_has_limits(name: str) -> None:
    metadata = FIELDS[name].metadata
    assert metadata["help"]
    assert re.fullmatch(r"[a-zA-Z0-9.]+", name)
    if isinstance(FIELDS[name].default, int | float) and not isinstance(FIELDS[name].default, bool):
        assert metadata["range"] is not None


@pytest.mark.parametrize("name", sorted(SECRET))
def test_no_secret_is_taken_from_the_command_line(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "logging_to", lambda *_: nullcontext())  # it would change the logging of other tests
    assert main.serve(settings=[f"{name}=canary-secret"]) == main.EXIT_CONFIG
    told = capfd.readouterr().err
    assert f"--set {name}=...: every user of this machine sees it" in told
    assert "canary" not in told


@pytest.mark.parametrize("name", sorted(name for name in SECRET if name.startswith("tls.")))
def test_a_password_may_be_in_the_environment(name: str) -> None:
    config = loaded(environment={f"DUEMQ_{name.replace('.', '_')}": "canary-secret"})
    assert getattr(config, FIELDS[name].name) == "canary-secret", "a shell takes no dots in names"
    assert "canary" not in repr(config)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["range"]])
def test_numbers_beyond_their_limits_are_refused(name: str) -> None:
    low, high = FIELDS[name].metadata["range"]
    for value in (low - 1, high + 1, "", "x", "1 2", "0x10", "nan", "inf", "1_0", "\u0663", "9" * 5000):
        with pytest.raises(ConfigError, match=f"^{name}="):
            loaded(f"{name}={value}")


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if isinstance(field.default, bool)])
@pytest.mark.parametrize("value", ["1", "yes", "", "t"])
def test_a_switch_is_true_or_false(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.*true or false"):
        loaded(f"{name}={value}")


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["choices"]])
def test_a_choice_names_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(f"{name}=other")
    assert all(choice in str(caught.value) for choice in FIELDS[name].metadata["choices"])


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("flushDiskTyp", "flushDiskType"),
        ("FLUSHDISKTYPE", "flushDiskType"),
        ("listenport", "listenPort"),
        ("mapedFileSizeCommitLog", "mappedFileSizeCommitLog"),
        ("transientStorePoolSiz", "transientStorePoolSize"),
    ],
)
def test_an_unknown_property_names_its_neighbour(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"no property {name}; did you mean {suggestion}"):
        loaded(f"{name}=1")


def test_a_property_like_none_is_refused_without_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"^there is no property qwxyz$"):
        loaded("qwxyz=1")


def test_what_rocketmq_knows_and_we_do_not_use_is_ignored_and_named() -> None:
    config, ignored, _ = load(None, ["transientStorePoolEnable=true", "listenPort=12000", "accountStatsEnable=x"], {})
    assert ignored == ["accountStatsEnable", "transientStorePoolEnable"]
    assert config.listen_port == 12000


def test_no_property_is_both_used_and_unused() -> None:
    assert not UNUSED & set(FIELDS)


def test_flags_come_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text(
        "# a comment\n! another\n\nlistenPort = 1111\nbrokerName=file\n  regionId=a=b  \nflushDiskType=SYNC_FLUSH\n"
    )
    environment = {"DUEMQ_listenPort": "2222", "DUEMQ_brokerName": "environment", "DUEMQ_HOME": "x", "listenPort": "9"}
    config = loaded("listenPort=3333", file=str(file), environment=environment)
    assert (config.listen_port, config.broker_name, config.region, config.sync_flush) == (
        3333,
        "environment",
        "a=b",
        True,
    )


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ("DUEMQ_flushDisktype", "the environment has DUEMQ_flushDisktype; .*; did you mean flushDiskType?"),
        ("DUEMQ_storepath", "there is no property storepath"),
        ("DUEMQ_x" + "y" * 1000, "there is no property xyyy"),
    ],
)
def test_a_misspelt_property_in_the_environment_stops_the_start(variable: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(None, (), {variable: "SYNC_FLUSH"})


def test_variables_of_others_are_no_settings() -> None:
    """Kubernetes sets such variables in each pod for a service that is called duemq."""
    environment = {"DUEMQ_SERVICE_HOST": "10.0.0.1", "DUEMQ_PORT_10911_TCP_ADDR": "10.0.0.1", "DUEMQ_": "x"}
    assert loaded(environment=environment) == loaded()


def test_an_unused_property_in_the_environment_is_told() -> None:
    name = min(UNUSED)
    assert load(None, (), {f"DUEMQ_{name}": "1"})[1] == [name]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"listenPort", r"line 1: 'listenPort' is not NAME=VALUE"),
        (b"\n\n=\xff", r"broker\.conf, line 3: '=ÿ' is not NAME=VALUE"),
        (b"a=1", r"broker\.conf, line 1: there is no property a"),
        (b"listenPort=1\n#\nlistenPort=1e3", r"broker\.conf, line 3: listenPort=1e3: write a whole number"),
        (b"flushDiskType=sync_flush", r"broker\.conf, line 1: flushDiskType=sync_flush: write one of"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    file = tmp_path / "broker.conf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        loaded(file=str(file))


def test_a_wrong_value_of_the_environment_is_named_as_that() -> None:
    with pytest.raises(ConfigError, match=r"^the environment, DUEMQ_listenPort: listenPort=x: write a whole number$"):
        load(None, (), {"DUEMQ_listenPort": "x"})
    with pytest.raises(ConfigError, match=r"^listenPort=y: write a whole number$"):
        load(None, ["listenPort=y"], {"DUEMQ_listenPort": "x"})


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("brokerName=a\udcff", r"^brokerName='a\\udcff': write it in UTF-8$"),
        ("brokerName=a\nb", r"^brokerName='a\\nb': write printable characters only$"),
        ("namesrvAddr=;;", "^namesrvAddr=;;: write host:port"),
        ("=1", "^--set =1: write it as NAME=VALUE$"),
    ],
)
def test_a_value_that_no_broker_can_work_with_is_refused(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loaded(setting)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"broker\.conf cannot be read"):
        loaded(file=str(tmp_path / "broker.conf"))


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        loaded("listenPort")


# --- settings that depend on each other


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["authenticationEnabled=true"], None),
        (["authenticationEnabled=true", "authorizationEnabled=TRUE"], None),
        (["authorizationEnabled=true"], "authorizationEnabled=true without authenticationEnabled=true"),
        (["authenticationEnabled=true", "aclEnable=true"], "aclEnable=true and authenticationEnabled=true"),
        (["authenticationStrategy=Stateful"], f"write {AUTH}.authentication.strategy.StatelessAuthenticationStrategy"),
        (["authorizationProvider=com.example.Mine"], "authorizationProvider=com.example.Mine: duemq has no such class"),
        (["authenticationWhitelist=10,SEND"], "authenticationWhitelist=10,SEND: write request codes"),
        (["messageDelayLevel=1x"], "messageDelayLevel=1x"),
        (["messageDelayLevel="], "messageDelayLevel="),
        (["brokerIP1=broker.example"], "brokerIP1=broker.example: write an IP address"),
        (["bindAddress=broker.example"], "bindAddress=broker.example: write an IP address"),
        (["maxMessageSize=8000000", "mappedFileSizeCommitLog=8000000"], "does not fit"),
        (["deleteWhen=4"], "deleteWhen=4"),
        (["timerPrecisionMs=500"], "timerPrecisionMs=500: only 1000 is possible, since the slots of a store would be"),
        (["timerMaxDelaySec=400000000"], "timerMaxDelaySec=400000000: write a number from 1 to 316224000"),
        (["deleteWhen=24"], "deleteWhen=24"),
        (["deleteWhen=04,05"], "deleteWhen"),
        (["nameserverPort=10911"], "nameserverPort=10911 is also a port of the broker"),
        (["nameserverPort=10909"], "nameserverPort=10909 is also a port of the broker"),
        (["namesrvAddr=nowhere:x"], "namesrvAddr=nowhere:x"),
        (["brokerName="], None),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: list[str], complaint: str | None) -> None:
    if complaint is None:
        assert loaded(*settings).broker_name
        return
    with pytest.raises(ConfigError) as caught:
        loaded(*settings)
    assert str(caught.value).startswith(complaint) or complaint in str(caught.value)
    assert "\n" not in str(caught.value)


# A password of a key may be any text.
@pytest.mark.parametrize("name", sorted(name for name in SECRET if not name.startswith("tls.")))
@pytest.mark.parametrize(
    "text", ["canary", '{"username":"canary"}', '{"accessKey":1,"secretKey":"canary"}', "[1]", "{"]
)
def test_a_secret_setting_that_is_wrong_is_not_repeated(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: write ") as caught:
        loaded(f"{name}={text}")
    assert "canary" not in str(caught.value)
    assert "secret" not in repr(loaded(f"{name}={OTHER_VALUES[name]}"))


def test_with_other_name_servers_the_embedded_ones_port_does_not_matter() -> None:
    assert loaded("nameserverPort=10911", "namesrvAddr=10.0.0.1:9876").nameserver_addresses


def test_what_depends_on_the_machine_is_filled_in() -> None:
    config = loaded()
    assert config.broker_name
    assert config.advertised_host == "127.0.0.1"
    assert Path(config.store_root).is_absolute()
    assert loaded("bindAddress=10.9.8.7").advertised_host == "10.9.8.7"
    everywhere = loaded("bindAddress=0.0.0.0").advertised_host
    assert everywhere not in ("", "0.0.0.0")
    assert loaded("bindAddress=::1").advertised_host == "::1"


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded().listen_port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", [("a", 1)]),
        ("a", [("a", 9876)]),
        ("a:1;b:2, c:3;", [("a", 1), ("b", 2), ("c", 3)]),
        ("[::1]:5", [("::1", 5)]),
        ("", []),
    ],
)
def test_name_server_addresses_are_read(text: str, addresses: Any) -> None:
    assert parse_addresses(text) == addresses


@pytest.mark.parametrize("text", ["a:", ":1", "a:0", "a:65536", "a:-1", "a:b", "a:\u0661"])
def test_wrong_name_server_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="namesrvAddr"):
        parse_addresses(text)


def test_where_settings_come_from_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("fileReservedTime=1\n")
    origin = load(str(file), ["listenPort=3333"], {"DUEMQ_brokerName": "b"}).origin
    assert origin.file == str(file)
    assert origin.pinned == {"listenPort", "brokerName"}
    assert load(None, [], {}).origin.file is None
