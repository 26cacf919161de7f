"""docs/mqtt.md and deploy/mqtt: every name of the file of rules is explained, and the samples are right."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from duemq.cli import main
from duemq.mqtt_bridge.rules import check, tables
from duemq.mqtt_bridge.rules.delays import PROPERTIES
from duemq.mqtt_bridge.rules.file import parse
from tests.bench.cases import mqtt as mqtt_cases

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs" / "mqtt.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"`([\w.]+)`", TEXT))


def blocks(begin: str) -> list[str]:
    """Return the indented blocks of the page whose first line contains a text."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", TEXT, re.MULTILINE)
    return [
        re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found if begin in block.strip().splitlines()[0]
    ]


@pytest.mark.parametrize(
    ("table", "prefix"),
    [
        (tables.MqttTable, ""),
        (tables.TlsFiles, ""),
        (tables.DelayedTable, "delayed."),
        (tables.StatusTable, "status."),
        (tables.ToRocketmqTable, ""),
        (tables.ToMqttTable, ""),
    ],
)
def test_each_name_is_explained(table: type[tables.RulesTables], prefix: str) -> None:
    assert {f"{prefix}{name}" for name in table.__struct_fields__} <= NAMES


def test_each_name_in_front_of_the_tables_is_explained() -> None:
    tables_of_the_file = {"mqtt", "delayed", "status", "to_rocketmq", "to_mqtt"}
    assert set(tables.RulesTables.__struct_fields__) - tables_of_the_file <= NAMES


def test_each_user_property_is_explained() -> None:
    assert set(PROPERTIES) <= set(re.findall(r"`([\w-]+)`", TEXT))


def test_the_sample_of_rules_does_what_is_said() -> None:
    (sample,) = blocks("nameserver =")
    rules = parse(sample, Path("bridge.toml"), {})
    lines, is_taken = check.sample(rules, "sensors/attic/temp", 0)
    assert is_taken
    assert lines[0].startswith("sensors/attic/temp: to RocketMQ's topic Sensors, key attic, tags temp")


def test_the_command_that_tries_the_sample_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,) = blocks("nameserver =")
    (tmp_path / "bridge.toml").write_text(sample)
    (command,) = blocks("duemq mqtt-bridge check")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert "Sensors" in result.output
    assert "waits 10s" in result.output


def test_the_cases_of_the_benchmark_exist() -> None:
    (names,) = re.findall(r"`python -m tests.bench --only ([^`]*)`", TEXT)
    assert set(names.split()) <= set(mqtt_cases.NAMES)


def test_the_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"duemq\[([\w,]+)\]", TEXT):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_each_form_of_a_delay_is_taken() -> None:
    rules = parse('[mqtt]\nclient_id = "b"\n[delayed]\nlongest = "10000d"', Path("bridge.toml"), {})
    topics = re.findall(r"^\| `(\$?delayed/[^`]+)` \|", TEXT, re.MULTILINE)
    assert len(topics) == 6
    for topic in topics:
        lines, is_taken = check.sample(rules, topic, 1_764_000_000_000)
        assert is_taken, lines


def test_the_rules_of_the_containers_are_rules() -> None:
    path = ROOT / "deploy" / "mqtt" / "bridge.toml"
    rules = parse(path.read_text(), path, {})
    assert rules.connection.host == "mosquitto"
    assert rules.nameserver == "duemq:9876"


def test_the_first_five_minutes_are_rules() -> None:
    (written,) = re.findall(r"<<'END'\n((?:    .*\n)+?)    END\n", TEXT)
    rules = parse(re.sub(r"^    ", "", written, flags=re.MULTILINE), Path("bridge.toml"), {})
    assert rules.delayed is not None
    assert "$delayed" in rules.delayed.prefixes
