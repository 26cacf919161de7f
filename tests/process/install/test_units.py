"""The units in deploy/: they run existing commands, systemd accepts them, and a failed unit is reported, here with the
test's own systemctl and logger."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duemq.mqtt_bridge.cli import main as bridge
from duemq.spark_jobs.cli.commands import main

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = DEPLOY / "systemd"


@pytest.mark.parametrize(
    ("notify", "told"),
    [
        ({}, "--tag duemq-failed --priority user.err\nstatus --no-pager --full --lines=30 duemq.service\n"),
        ({"NOTIFY": "tr a-z A-Z > mine; cat mine"}, "STATUS --NO-PAGER --FULL --LINES=30 DUEMQ.SERVICE\n"),
    ],
)
def test_a_unit_that_failed_is_told(tmp_path: Path, notify: dict[str, str], told: str) -> None:
    for name, does in (("systemctl", 'echo "$@"'), ("logger", 'echo "$@"; cat')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    text = (UNITS / "duemq-failed@.service").read_text()
    found = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert found is not None
    # As systemd reads it: $$ stands for a dollar, and %i for the instance.
    command = shlex.split(found[1].replace("$$", "$").replace("%i", "duemq.service"))
    done = subprocess.run(
        command,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **notify},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == told


@pytest.mark.parametrize(
    "unit", ["duemq.service", "duemq-analyse.service", "duemq-archive.service", "duemq-mqtt-bridge.service"]
)
def test_units_name_it(unit: str) -> None:
    assert "\nOnFailure=duemq-failed@%n.service\n" in (UNITS / unit).read_text()


def shell_words(path: Path, start: str) -> list[str]:
    """The words of a duemq command in a file, from `spark` on."""
    text = path.read_text()
    line = next(line for line in text.splitlines() if line.startswith(start))
    return shlex.split(line.partition("/bin/duemq ")[2].partition(" 2>&1")[0])


def pod_words(path: Path) -> list[str]:
    """The arguments of a container."""
    text = path.read_text().partition("              args:\n")[2].partition("              envFrom:")[0]
    words = [line.strip().removeprefix("- ").strip('"') for line in text.splitlines() if line.strip()]
    settings = dict(re.findall(r'^  (MASTER|MEMORY): "(.*)"$', path.read_text(), re.MULTILINE))
    return [re.sub(r"^\$\((\w+)\)$", lambda found: settings[found[1]], word) for word in words]


@pytest.mark.parametrize("job", ["analyse", "archive"])
@pytest.mark.parametrize("by", ["systemd", "cron", "kubernetes"])
def test_what_is_run_every_night_is_a_command_of_ours(by: str, job: str) -> None:
    words = {
        "systemd": lambda: shell_words(DEPLOY / "systemd" / f"duemq-{job}.service", "ExecStart="),
        "cron": lambda: shell_words(DEPLOY / "cron" / f"duemq-{job}", "17 " if job == "analyse" else "47 "),
        "kubernetes": lambda: pod_words(DEPLOY / "kubernetes" / f"cronjob-{job}.yaml"),
    }[by]()
    assert words[:2] == ["spark", job]
    context = main.commands[job].make_context(job, words[2:])  # raises for an unknown option
    given = context.params
    assert given["master"] == "local[2]"
    if job == "analyse":
        assert (given["nights"] is not None, given["keep_nights"]) == (True, 90)
    else:
        assert given["append"]
        assert given["directory"].endswith("/messages"), "what a volume or a lock brings along is not in the table"


@pytest.mark.parametrize(
    "names",
    [
        ("duemq-analyse.service", "duemq-analyse.timer"),
        ("duemq-archive.service", "duemq-archive.timer"),
        ("duemq-mqtt-bridge.service",),
    ],
)
def test_systemd_takes_the_units(tmp_path: Path, names: tuple[str, ...]) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    for name in (*names, "duemq-failed@.service"):
        text = (UNITS / name).read_text().replace("/opt/duemq/venv/bin/duemq", "/bin/true")
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / name) for name in names)],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_bridges_command_is_one_of_ours() -> None:
    of_unit = shell_words(UNITS / "duemq-mqtt-bridge.service", "ExecStart=")
    image = (DEPLOY / "mqtt" / "Dockerfile").read_text()
    of_image = json.loads(image.rpartition("CMD ")[2])
    for words in (of_unit, of_image):
        assert words[0] == "mqtt-bridge"
        context = bridge.make_context("mqtt-bridge", words[1:], resilient_parsing=False)  # raises for an unknown option
        assert str(context.params["config"]) == "/etc/duemq/bridge.toml"


def test_a_linter_finds_nothing_in_the_image() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), str(DEPLOY / "mqtt" / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
