"""`duemq user` and `duemq acl` with a real broker, which `duemq user init` has prepared."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from duemq import Producer, cli
from duemq._values.accounts import read_keys
from duemq.broker.settings.config import load
from duemq.errors import AccessDeniedError
from tests.peers.brokers.duemq import DuemqBroker


def run(*arguments: object, text: str | None = None, code: int = 0, **environment: str) -> Result:
    result = CliRunner().invoke(cli.main, [str(each) for each in arguments], input=text, env=environment)
    assert result.exit_code == code, result.output
    return result


def test_init_prepares_a_configuration(tmp_path: Path) -> None:
    config, keys = tmp_path / "broker.conf", tmp_path / "admin.yml"
    config.write_text("# ours\nlistenPort=12345\n")
    config.chmod(0o644)
    output = run("user", "init", "admin", "--config", config, "--out", keys).output
    found = read_keys(keys.read_text())
    assert found.access_key == "admin"
    assert found.secret_key is not None
    assert len(found.secret_key) == 32
    assert found.secret_key not in output
    assert [path.stat().st_mode & 0o777 for path in (config, keys)] == [0o600, 0o600]
    loaded = load(str(config), (), {}).config
    assert (loaded.authentication, loaded.authorization, loaded.listen_port) == (True, True, 12345)
    assert json.loads(loaded.init_user) == {"username": "admin", "password": found.secret_key}
    assert config.read_text().startswith("# ours\n")
    assert "remove that line first" in run("user", "init", "admin", "--config", config, code=2).output
    new = tmp_path / "new.conf"
    printed = run("user", "init", "admin", "--config", new).stdout
    assert json.loads(load(str(new), (), {}).config.init_user)["password"] == read_keys(printed).secret_key
    assert new.stat().st_mode & 0o777 == 0o600
    failed = run("user", "init", "admin", "--config", tmp_path / "nowhere" / "x", "--out", tmp_path / "x", code=1)
    assert "No such file" in failed.output
    assert not (tmp_path / "x").exists()
    assert "already exists" in run("user", "init", "a", "--config", tmp_path / "y", "--out", keys, code=2).output
    assert not (tmp_path / "y").exists()


def documented() -> list[list[str]]:
    """The commands of the first section of docs/security.md, in the order in which they are there."""
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    section = text.partition("## Users and policies: ACL 2.0")[2].partition("\n### ")[0]
    return [line.split()[1:] for line in section.splitlines() if line.startswith("    duemq ")]


async def run_process(*arguments: str, nameserver: str) -> str:
    """Run a command that may end by a signal, for which it needs a process of its own; return its standard output."""
    duemq = Path(sys.executable).with_name("duemq")
    environment = os.environ | {"DUEMQ_NAMESERVER": nameserver}
    child = await asyncio.create_subprocess_exec(duemq, *arguments, stdout=PIPE, stderr=PIPE, env=environment)
    output, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    return output.decode()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_commands_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, serve, *others = documented()
    run(*prepare)
    assert serve == ["serve", "--config", "broker.conf"]
    prepared = load("broker.conf", (), {}).config
    properties = {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": prepared.init_user,
    }
    broker = DuemqBroker(tmp_path / "broker", properties, is_warm=True)
    await broker.start()
    try:
        outputs = {arguments[0]: await run_process(*arguments, nameserver=broker.nameserver) for arguments in others}
    finally:
        await broker.kill()
    assert outputs["receive"].endswith("hello\n")
    assert outputs["acl"].splitlines() == [
        "billing  Allow  Topic:orders  Sub",
        "billing  Allow  Group:billing  Sub",
        "orders-service  Allow  Topic:orders  Pub",
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DuemqBroker]:
    directory = tmp_path_factory.mktemp("users")
    config, keys = directory / "prepared.conf", directory / "admin.yml"
    run("user", "init", "admin", "--config", config, "--out", keys)
    prepared = load(str(config), (), {}).config
    properties = {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": prepared.init_user,
    }
    made = DuemqBroker(directory, properties, is_warm=True)
    await made.start()
    yield made
    await made.kill()


@pytest.mark.asyncio(loop_scope="module")
async def test_users_and_policies_from_the_command_line(broker: DuemqBroker, tmp_path: Path) -> None:
    where = ("--nameserver", broker.nameserver)
    as_admin = (*where, "--account", broker.directory / "admin.yml")

    async def done(*arguments: object, text: str | None = None, code: int = 0) -> Result:
        return await asyncio.to_thread(run, *arguments, text=text, code=code)

    out = tmp_path / "orders.yml"
    added = await done("user", "add", "orders", "--send", "orders", "--out", out, *as_admin)
    keys = read_keys(out.read_text())
    assert keys.secret_key is not None
    assert keys.secret_key not in added.output
    printed = await done(
        "user", "add", "billing", "--receive", "orders", "--send", "orders", "--group", "b*", "--look", *as_admin
    )
    assert read_keys(printed.stdout).access_key == "billing"
    own = tmp_path / "own.yml"
    own.write_text("a-secret-of-mine\n")
    assert (await done("user", "add", "own", "--secret-file", own, *as_admin)).stdout == ""
    assert "a-secret" not in (await done("user", "add", "asked", "--prompt", *as_admin, text="s1\ns1\n")).stdout

    async with Producer(broker.nameserver, access_key="orders", secret_key=keys.secret_key) as producer:
        await producer.send("orders", b"1")
        assert (await producer.send("orders", b"2", delay="7s")).due_time_ms is not None
        with pytest.raises(AccessDeniedError, match="no permission to access Topic:others"):
            await producer.send("others", b"1")
        await done("acl", "allow", "orders", "Topic:oth*", "--action", "Pub,sub", "--from", "127.0.0.0/8", *as_admin)
        await producer.send("others", b"1")
        await done("acl", "deny", "orders", "Topic:others", "--action", "All", *as_admin)
        with pytest.raises(AccessDeniedError, match="the decision is deny"):
            await producer.send("others", b"1")
        await done("acl", "allow", "orders", "*", "--action", "List", "--default", *as_admin)
        listed = await done("acl", "list", *as_admin)
        assert listed.output.splitlines() == [
            "billing  Allow  Topic:orders  Pub,Sub",
            "billing  Allow  Group:b*  Sub",
            "billing  Allow  Cluster:*  Get,List",
            "orders  Allow  Topic:orders  Pub",
            "orders  Allow  Topic:oth*  Pub,Sub  from 127.0.0.0/8",
            "orders  Deny  Topic:others  All",
            "orders  Allow  *  List  (default)",
        ]
        await done("acl", "remove", "orders", "Topic:others", *as_admin)
        await done("acl", "remove", "orders", "*", "--default", *as_admin)
        assert "others" not in (await done("acl", "list", "orders", *as_admin)).output
        await done("user", "change", "orders", "--disable", *as_admin)
        with pytest.raises(AccessDeniedError, match="User:orders is disabled"):
            await producer.send("orders", b"1")
    await done("user", "change", "own", "--super", *as_admin)
    assert (await done("user", "list", *as_admin)).output.splitlines() == [
        "admin  Super",
        "asked  Normal",
        "billing  Normal",
        "orders  Normal  disabled",
        "own  Super",
    ]
    changed = await done("user", "change", "asked", "--new-secret", *as_admin)
    assert len(read_keys(changed.stdout).secret_key or "") == 32
    await done("user", "remove", "asked", *as_admin)
    for arguments, code, says in (
        (("user", "remove", "asked", *as_admin), 1, "there is no user asked"),
        (("user", "add", "orders", "--out", tmp_path / "unused", *as_admin), 1, "The user is existed"),
        (("user", "add", "new", "--out", out, *as_admin), 2, "already exists"),
        (("user", "add", "new", "--prompt", "--secret-file", own, *as_admin), 2, "give one of"),
        (("user", "change", "orders", *as_admin), 2, "say what to change"),
        (("user", "change", "orders", "--enable", "--out", out, *as_admin), 2, "add --new-secret"),
        (("acl", "allow", "orders", "Nope:x", "--action", "Pub", *as_admin), 2, "'Nope:x' is not a resource"),
        (("acl", "allow", "orders", "Topic:x", "--action", "Publish", *as_admin), 1, "The action Publish is unknown"),
        (("user", "list", *where), 1, "username cannot be null"),
    ):
        result = await done(*arguments, code=code)
        assert says in result.output
        assert "Traceback" not in result.output
    assert not (tmp_path / "unused").exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_broker_registers_at_another_with_the_keys_of_a_user(broker: DuemqBroker, tmp_path: Path) -> None:
    """The other one's name server takes registrations from whoever may change the cluster."""
    as_admin = ("--nameserver", broker.nameserver, "--account", broker.directory / "admin.yml")
    keys_file = tmp_path / "inner.yml"
    await asyncio.to_thread(run, "user", "add", "inner", "--out", keys_file, *as_admin)
    keys = read_keys(keys_file.read_text())
    inner = json.dumps({"accessKey": keys.access_key, "secretKey": keys.secret_key})
    properties = {"brokerName": "broker-b", "innerClientAuthenticationCredentials": inner}
    other = DuemqBroker(tmp_path, properties, nameserver=broker.nameserver, is_warm=True)
    await other.start()
    try:
        async with asyncio.timeout(20):
            while "name_server_lost" not in other.stderr.read_text():
                await asyncio.sleep(0.02)
        assert "User:inner has no permission to access Cluster:DefaultCluster" in other.stderr.read_text()
        await other.kill()
        await asyncio.to_thread(run, "acl", "allow", "inner", "Cluster:*", "--action", "Update", *as_admin)
        await other.start()
        async with asyncio.timeout(20):
            while '"broker_registered"' not in broker.stderr.read_text():
                await asyncio.sleep(0.02)
        assert keys.secret_key is not None
        assert keys.secret_key not in other.stderr.read_text()
    finally:
        if other.running:
            await other.kill()
