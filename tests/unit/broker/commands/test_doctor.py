"""`duemq doctor` and `duemq tls self-signed`: what they find and make, and a start that would be open to everybody."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import resource
import ssl
import stat
import struct
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from duemq import cli
from duemq.broker import logs, main
from duemq.broker.doctor import machine, security
from duemq.broker.doctor.findings import Finding, Severity
from duemq.broker.errors import ConfigError
from duemq.broker.settings.config import BrokerConfig, check_exposure, load
from tests.support.access import write_accounts
from tests.support.broker import running
from tests.support.tls import Certificates, write_certificates
from tests.support.wire import send
from tests.unit.broker.tls.test_tls import connect, is_served

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return write_certificates(tmp_path / "certificates")


def config(tmp_path: Path, *settings: str) -> BrokerConfig:
    return load(None, [f"storePathRootDir={tmp_path}/store", *settings], {}).config


def bad(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(each.level.value, each.text) for each in findings if each.level is not Severity.OK]


def only(findings: Iterable[Finding], level: Severity, *parts: str) -> Finding:
    """Return the one finding that is not ok, and check it."""
    (found,) = [each for each in findings if each.level is not Severity.OK]
    assert found.level is level
    assert all(part in found.text + found.help for part in parts), found
    assert found.help
    return found


# --- starts that would be open to everybody


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com", ""])
def test_beyond_loopback_a_broker_without_access_control_does_not_start(tmp_path: Path, host: str) -> None:
    def settings(*more: str) -> BrokerConfig:
        return config(tmp_path, f"bindAddress={host}", "brokerIP1=10.1.2.3", *more)

    with pytest.raises(ConfigError, match="--insecure") as caught:
        check_exposure(settings())
    assert "aclEnable=true" in str(caught.value)
    check_exposure(settings("aclEnable=true"))
    check_exposure(settings("insecure=true"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_loopback_it_starts(tmp_path: Path, host: str) -> None:
    check_exposure(config(tmp_path, f"bindAddress={host}", "brokerIP1=127.0.0.1"))


def test_an_insecure_start_is_logged_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], logged: Any
) -> None:
    async def run(*_: Any) -> None:
        return None

    monkeypatch.setattr(main, "_run", run)
    monkeypatch.setattr(logs, "logging_to", lambda *_: nullcontext())  # it would change the logging of other tests
    assert main.serve(store=str(tmp_path), host="0.0.0.0") == main.EXIT_CONFIG
    assert "--insecure" in capfd.readouterr().err
    for times in (1, 2):
        assert main.serve(store=str(tmp_path), host="0.0.0.0", settings=["insecure=true"]) == 0
        assert [line["log_level"] for line in logged if line["event"] == "insecure"] == ["warning"] * times
    assert main.serve(store=str(tmp_path), settings=["insecure=true"]) == 0
    assert [line["event"] for line in logged].count("insecure") == 2, "on loopback it is not"


# --- what doctor finds: security


def test_a_broker_for_this_machine_needs_nothing(tmp_path: Path) -> None:
    plain = config(tmp_path)
    assert bad(security.exposure(plain)) == []
    assert bad(security.accounts(plain, None)) == []
    assert bad(security.tls(plain, NOW)) == []


@pytest.mark.parametrize(
    ("settings", "level", "part"),
    [
        (("bindAddress=0.0.0.0", "brokerIP1=10.0.0.5"), Severity.ERROR, "does not start"),
        (("bindAddress=0.0.0.0", "brokerIP1=10.0.0.5", "insecure=true"), Severity.WARNING, "anyone"),
        (("bindAddress=0.0.0.0", "brokerIP1=127.0.0.1", "aclEnable=true"), Severity.WARNING, "their own machine"),
        (("brokerIP1=10.0.0.5",), Severity.WARNING, "does not listen"),
    ],
)
def test_exposure(tmp_path: Path, settings: tuple[str, ...], level: Severity, part: str) -> None:
    only(security.exposure(config(tmp_path, *settings)), level, part)


SAFE = "accounts:\n- accessKey: administrator\n  secretKey: 0123456789abcdefXYZ\n  admin: true\n"


@pytest.mark.parametrize(
    ("text", "mode", "level", "part"),
    [
        (SAFE, 0o644, Severity.ERROR, "may read"),
        (SAFE, 0o602, Severity.ERROR, "may write"),
        (SAFE.replace("0123456789abcdefXYZ", "12345678"), 0o600, Severity.ERROR, "everyone knows"),
        (SAFE.replace("0123456789abcdefXYZ", "short-one"), 0o600, Severity.WARNING, "9 characters"),
        (SAFE.replace("admin: true", "admin: false"), 0o600, Severity.WARNING, "no account is an administrator"),
        (f"globalWhiteRemoteAddresses: ['*']\n{SAFE}", 0o600, Severity.ERROR, "without an account"),
        (f"globalWhiteRemoteAddresses: ['*:*:*:*:*:*:*:*']\n{SAFE}", 0o600, Severity.ERROR, "without an account"),
        (f"{SAFE}  whiteRemoteAddress: '*'\n", 0o600, Severity.ERROR, "without a signature"),
    ],
)
def test_accounts(tmp_path: Path, text: str, mode: int, level: Severity, part: str) -> None:
    path = write_accounts(tmp_path, SAFE)
    settings = config(tmp_path, "aclEnable=true", f"rocketmqHome={tmp_path}")
    assert bad(security.accounts(settings, None)) == []
    path.write_text(text)
    path.chmod(mode)
    found = only(security.accounts(settings, None), level, part)
    assert "0123456789abcdefXYZ" not in found.text


def test_files_of_accounts_that_are_wrong_or_not_there(tmp_path: Path) -> None:
    settings = config(tmp_path, "aclEnable=true", f"rocketmqHome={tmp_path}")
    only(security.accounts(settings, None), Severity.ERROR, "there is no")
    write_accounts(tmp_path, "accounts: [1]")
    assert bad(security.accounts(settings, None))[0][0] == "error"
    only(security.accounts(config(tmp_path, "aclEnable=true"), None), Severity.ERROR, "nothing says where")


def test_certificates(tmp_path: Path, certificates: Certificates) -> None:
    open_to_all = ("bindAddress=0.0.0.0", "brokerIP1=127.0.0.1")
    only(security.tls(config(tmp_path, *open_to_all), NOW), Severity.WARNING, "no certificate", "duemq tls self-signed")
    for path in Path(certificates.directory).glob("*.key"):
        path.chmod(0o600)
    safe = [*open_to_all, *certificates.server_settings(), "tls.server.mode=enforcing"]
    settings, day = config(tmp_path, *safe), datetime.timedelta(days=1)
    good = list(security.tls(settings, NOW))
    assert bad(good) == []
    assert "(99 days left)" in "".join(each.text for each in good)
    late = NOW + 90 * day
    soon = only(security.tls(settings, late), Severity.WARNING, "expires in", "no restart")
    assert "9 days" in soon.text
    assert bad(security.tls(settings, late - 9 * day)) == [("warning", soon.text.replace("9 days", "18 days"))]
    only(security.tls(settings, NOW + 120 * day), Severity.ERROR, "is valid from")
    own = [line.replace("tls.server", "tls.client") for line in certificates.server_settings("expired")]
    own += ["tls.client.authServer=true", f"tls.client.trustCertPath={certificates.path('ca.pem')}"]
    registers = config(tmp_path, "namesrvAddr=10.0.0.9:9876", "tls.enable=true", *own)
    only(security.tls(registers, NOW), Severity.ERROR, "expired.pem", "is valid from")
    expired = config(tmp_path, *open_to_all, *certificates.server_settings("expired"), "tls.server.mode=enforcing")
    only(security.tls(expired, NOW), Severity.ERROR, "is valid from")
    Path(certificates.path("server.key")).chmod(0o644)
    found = list(security.tls(config(tmp_path, *safe[:-1], "brokerIP1=10.0.0.5"), late))
    assert [text for _, text in bad(found)] == [
        "tls.server.mode=permissive: clients may connect without TLS, and then everything can be read on the way",
        f"every user of this machine may read {certificates.path('server.key')}, which has secrets",
        soon.text,
        f"{certificates.path('server.pem')} is for broker.test, 127.0.0.1, but clients are told brokerIP1=10.0.0.5: "
        "clients that compare names, such as duemq's, refuse it",
    ]
    wrong = config(tmp_path, "tls.server.certPath=/nothing", "tls.server.keyPath=/nothing")
    only(security.tls(wrong, NOW), Severity.ERROR, "No such file")


def test_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    settings = config(tmp_path)
    store, file = Path(settings.store_root), tmp_path / "broker.conf"
    store.mkdir(mode=0o700)
    file.write_text("")
    file.chmod(0o644)
    assert bad(security.own_files(settings, str(file))) == []
    store.chmod(0o755)
    only(security.own_files(settings, None), Severity.WARNING, "may read the messages")
    store.chmod(0o733)
    only(security.own_files(settings, None), Severity.ERROR, "may write into")
    store.chmod(0o700)
    file.chmod(0o646)
    only(security.own_files(settings, str(file)), Severity.ERROR, "may write")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    only(security.own_files(settings, None), Severity.WARNING, "root")


# --- what doctor finds: the machine


class Disk:
    def __init__(self, used: float) -> None:
        self.f_frsize, self.f_blocks = 4096, 100_000_000
        self.f_bfree = self.f_bavail = round(self.f_blocks * (1 - used))


@pytest.mark.parametrize(
    ("used", "level", "part"),
    [
        (0.5, Severity.OK, "free"),
        (0.8, Severity.WARNING, "diskMaxUsedSpaceRatio=75"),
        (0.95, Severity.ERROR, "refused"),
    ],
)
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: float, level: Severity, part: str) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Disk(used))
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    (found,) = machine.disk(config(tmp_path), mounts)
    assert (found.level, part in found.text + found.help) == (level, True)
    for kind, warned in (("tmpfs", "is lost with"), ("nfs4", "lock"), ("ext4", "")):
        mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nx {tmp_path} {kind} rw 0 0\ny {tmp_path}/stor tmpfs rw 0 0\n")
        texts = [each.text for each in machine.disk(config(tmp_path), mounts)][1:]
        assert [warned in text for text in texts] == ([True] if warned else [])


def test_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       8000000 kB\nMemAvailable:   4000000 kB\n")
    assert bad(machine.memory(meminfo, tmp_path)) == []
    (tmp_path / "memory.max").write_text("300000000\n")
    (tmp_path / "memory.current").write_text("200000000\n")
    only(machine.memory(meminfo, tmp_path), Severity.WARNING, "95 MiB are available")
    (tmp_path / "memory.max").write_text("max\n")
    assert bad(machine.memory(meminfo, tmp_path)) == []


def test_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, warnings in ((1024, 2), (1_000_000, 0), (-1, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert len(bad(machine.open_files(config(tmp_path, "maxConnections=5000")))) == warnings


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert struct.calcsize("=I508x") == ctypes.sizeof(machine._Timex) >= 208, "of struct timex"

    class System:
        state = 0

        def adjtimex(self, _: Any) -> int:
            return self.state

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: System)
    monkeypatch.setattr(System, "adjtimex", lambda _: System.state)
    now_ms = 1_800_000_000_000
    assert bad(machine.clock(now_ms)) == []
    only(machine.clock(0), Severity.ERROR, "years behind")
    System.state = 5
    only(machine.clock(now_ms), Severity.WARNING, "not synchronised")
    System.state = -1
    only(machine.clock(now_ms), Severity.WARNING, "does not say")


# --- the commands


def test_doctor_prints_what_it_finds_and_its_exit_code_says_whether_there_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("listenPort=29911\nnameserverPort=29876\nhaListenPort=1\n")
    common = ["doctor", "--config", str(file), "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(cli.main, common)
    assert result.exit_code == 0, result.output
    assert "warning  configuration: RocketMQ's properties without effect: haListenPort" in result.output
    assert not (tmp_path / "store").exists(), "nothing is changed"
    result = CliRunner().invoke(cli.main, [*common, "--host", "0.0.0.0", "--set", "brokerIP1=10.0.0.5", "--json"])
    assert result.exit_code == 1
    findings = [json.loads(line) for line in result.output.splitlines()]
    assert {"level", "about", "text", "help"} == set(findings[0])
    assert [each["about"] for each in findings if each["level"] == "error"] == ["exposure"]
    result = CliRunner().invoke(cli.main, [*common, "--set", "listenPort=x"])
    assert (result.exit_code, result.output.count("\n")) == (1, 2)
    assert "ERROR    configuration: listenPort=x: write a whole number" in result.output


def self_signed(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, ["tls", "self-signed", *arguments])


async def test_a_self_signed_certificate_serves(tmp_path: Path) -> None:
    out = tmp_path / "new"
    result = self_signed("--host", "broker.test", "--host", "127.0.0.1", "--host", "::1", "--out", str(out))
    assert result.exit_code == 0, result.output
    key, certificate = out / "server.key", out / "server.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [path.name for path in sorted(out.iterdir())] == ["server.key", "server.pem"]
    told = [line.strip() for line in result.output.splitlines() if line.startswith("    tls.")]
    async with running(tmp_path / "store", *told) as broker:
        context = ssl.create_default_context(cafile=str(certificate))
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        assert await is_served(connect(broker, context))
        peer = broker.connect()
        peer.post(send("T"))
        assert peer.transport.is_closing(), "the settings that it prints enforce TLS"

    before = certificate.read_bytes()
    result = self_signed("--out", str(out))
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert certificate.read_bytes() == before
    assert self_signed("--out", str(out), "--force", "--days", "5").exit_code == 0
    assert certificate.read_bytes() != before


def test_wrong_names_are_wrong_usage(tmp_path: Path) -> None:
    result = self_signed("--host", "a" * 300, "--out", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert not (tmp_path / "new").exists()


USER = 'initAuthenticationUser={"username":"admin","password":"%s"}'
LONG = "dR6vKx0pQmZt2cYwb8TqK"


def test_users(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("")
    file.chmod(0o600)

    def found(*settings: str) -> Iterable[Finding]:
        return security.users(config(tmp_path, "authenticationEnabled=true", *settings), str(file))

    on = "authorizationEnabled=true"
    assert list(security.users(config(tmp_path), str(file))) == []
    assert bad(found(on, USER % LONG)) == []
    only(found(on), Severity.ERROR, "no user yet", "duemq user init")
    only(found(USER % LONG), Severity.WARNING, "every user may do everything")
    both = "authenticationWhitelist=25,105,310", "authorizationWhitelist=310,105,26"
    only(found(on, USER % LONG, *both), Severity.ERROR, "codes 310 without an account")
    assert bad(found(on, USER % LONG, both[0], "authorizationWhitelist=105,106")) == []
    assert any("codes 25, 310" in text for _, text in bad(found(USER % LONG, *both)))
    only(found(on, USER % "short"), Severity.WARNING, "admin", "5 characters")
    file.chmod(0o644)
    only(found(on, USER % LONG), Severity.ERROR, "may read", str(file))
    file.chmod(0o600)
    users = tmp_path / "store" / "config" / "users"
    users.mkdir(parents=True, mode=0o755)
    only(found(on), Severity.ERROR, "may read", str(users))
    assert not any("short" in each.text + each.help for each in found(on, USER % "short!"))
