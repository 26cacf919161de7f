from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from duemq.cli import main
from duemq.mqtt_bridge.cli import _Watch, stop_when_input_ends
from duemq.mqtt_bridge.rules.file import read
from duemq.mqtt_bridge.session.journal import open_journal

RULES = """
[mqtt]
client_id = "b"
[[to_rocketmq]]
filter = "in/+"
topic = "In"
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["mqtt-bridge", *arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "bridge.toml"
    path.write_text(RULES)
    return path


def test_rules_are_tried(config: Path) -> None:
    for arguments in (["check", "--config", str(config)], ["--config", str(config), "check"]):
        result = run(*arguments, "in/x", "delayed/10/in/y")
        assert result.exit_code == 0, result.output
        assert "in/x: to RocketMQ's topic In" in result.output
        assert "waits 10s" in result.output
    assert run("check", "--config", str(config), "elsewhere").exit_code == 1


@pytest.mark.parametrize("kind", ["plain", "null", "closed", "terminal"])
async def test_the_end_of_any_input_is_seen(tmp_path: Path, kind: str) -> None:
    (tmp_path / "plain").write_bytes(b"x" * 10_000)
    stopped = asyncio.Event()
    descriptor: int | None = None
    if kind == "terminal":
        controller, descriptor = os.openpty()
        os.close(controller)  # it hangs up
    elif kind != "closed":
        descriptor = os.open(tmp_path / "plain" if kind == "plain" else os.devnull, os.O_RDONLY)
    stop_when_input_ends(descriptor, stopped)
    async with asyncio.timeout(10):
        await stopped.wait()
    if descriptor is not None:
        os.close(descriptor)


@pytest.mark.parametrize("is_blocking", [True, False])
async def test_a_pipe_that_is_open_goes_on(is_blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, is_blocking)
    stopped = asyncio.Event()
    stop_when_input_ends(reader, stopped)
    os.write(writer, b"x")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await stopped.wait()
    os.close(writer)
    async with asyncio.timeout(10):
        await stopped.wait()
    os.close(reader)


def test_with_a_plain_file_as_input_it_ends_without_a_word(config: Path) -> None:
    command = [sys.executable, "-m", "duemq", "mqtt-bridge", "--config", str(config), "--until-input-ends"]
    with socket.create_server(("127.0.0.1", 0)) as silent, config.open() as file:
        # Servers that do not answer, since the bridge would complain of missing ones.
        port = silent.getsockname()[1]
        rules = RULES.replace("[mqtt]", f"[mqtt]\nport = {port}")
        config.write_text(f'nameserver = "127.0.0.1:{port}"\n{rules}')
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_secrets_are_not_shown(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = 'access_key = "the-account"\nsecret_key = "canary"\n'
    config.write_text(keys + RULES.replace('"b"', '"b"\nuser = "u"\npassword = "canary"'))
    result = run("check", "--config", str(config))
    assert result.exit_code == 0
    assert "with the account the-account" in result.output
    assert "canary" not in result.output


@pytest.mark.parametrize("arguments", [["check"], []])
def test_wrong_rules_are_one_line_with_the_place(config: Path, arguments: list[str]) -> None:
    config.write_text(RULES.replace('"In"', '"no topic"'))
    result = run(*arguments, "--config", str(config))
    assert result.exit_code == 1
    assert f"{config}:6: " in result.output
    assert len(result.output.splitlines()) == 1


def test_a_changed_file_is_read_again_and_a_wrong_one_told_once(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch, reload = _Watch(config, read(config)), asyncio.Event()
    assert watch.changed(reload) is None
    config.write_text(RULES + "[")
    assert watch.changed(reload) is None
    assert watch.changed(reload) is None
    assert caplog.text.count("the old rules stay") == 1
    config.write_text(RULES.replace('"In"', '"New"'))
    os.utime(config, ns=(1, 1))
    found = watch.changed(reload)
    assert found is not None
    assert watch.changed(reload) is None
    reload.set()
    assert watch.changed(reload) is not None
    config.unlink()
    assert watch.changed(reload) is None


async def test_new_rules_whose_state_cannot_be_used_are_told_and_the_old_ones_stay(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = read(config)
    journal = await open_journal(rules.connection.state_directory)
    other = await open_journal(config.parent / "other")
    watch, reload = _Watch(config, rules), asyncio.Event()

    def changed(state: Path) -> bool:
        caplog.clear()
        config.write_text(RULES.replace('"b"', f'"b"\nstate = "{state}"'))
        reload.set()
        return watch.changed(reload) is not None

    for state, why in (
        (config / "x", "Not a directory"),
        (config, "File exists"),
        (config.parent / "other", "another bridge"),
    ):
        assert not changed(state)
        assert f"{config}:4: " in caplog.text
        assert why in caplog.text
        assert "move it away" not in caplog.text
        assert "the old rules stay" in caplog.text
    assert changed(config.parent / "b.state")  # the directory that the bridge has
    assert changed(config.parent / "new")
    watch.use(read(config))
    await other.close()
    assert changed(config.parent / "other")
    await journal.close()
