"""duemq's broker as a process, with the interface of Apache's (tests.peers.brokers.apache.ApacheBroker)."""

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.peers import ports
from tests.peers.brokers.broker import BROKER, CLUSTER, HOST
from tests.peers.brokers.process import Process

_SECRETS = ("initAuthenticationUser", "innerClientAuthenticationCredentials")
"""Properties that the command line may not have."""
# The broker logs JSON lines on stderr; it logs this event once all sockets listen.
_UP = r'"event": ?"listening"'


class DuemqBroker:
    """`duemq serve` with its embedded name server, or registering with another if given its address.

    Properties are RocketMQ's (mappedFileSizeCommitLog, messageDelayLevel ...). `options`: further arguments of the
    command line. A start that fails for configuration, port or lock raises StartError with returncode 2. `is_warm`: its
    starts cost a tenth (see `tests.peers.warm`).
    """

    kind = "duemq"

    def __init__(
        self,
        directory: Path,
        properties: Mapping[str, object] | None = None,
        *,
        store: Path | None = None,
        port: int | None = None,
        nameserver_port: int | None = None,
        nameserver: str | None = None,
        options: tuple[str, ...] = (),
        is_warm: bool = False,
    ) -> None:
        self.directory = directory
        self.store = store or directory / "store"
        self.port = port or ports.free_broker_port()
        self.stderr = directory / "broker.err"
        directory.mkdir(parents=True, exist_ok=True)
        conf = directory / "broker.conf"
        settings = {"brokerClusterName": CLUSTER, "brokerName": BROKER, "brokerIP1": HOST}
        command = [str(Path(sys.executable).with_name("duemq")), "serve", "--config", str(conf)]
        command += ["--store", str(self.store), "--host", HOST, "--port", str(self.port), "--log-format", "json"]
        if nameserver is None:
            self.nameserver_port = nameserver_port or ports.free_port()
            self.nameserver = f"{HOST}:{self.nameserver_port}"
            command += ["--nameserver-port", str(self.nameserver_port)]
        else:
            self.nameserver = nameserver
            settings["namesrvAddr"] = nameserver
        for name, value in (properties or {}).items():
            if name in _SECRETS:
                settings[name] = str(value)
            else:
                command += ["--set", f"{name}={value}"]
        conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        logs = [self.store / "audit" / "audit.log"]
        self._process = Process("duemq", [*command, *options], self.stderr, logs=logs, is_warm=is_warm)

    @property
    def address(self) -> str:
        """The broker's address in routes."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process.running

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while running."""
        return self._process.returncode

    async def start(self) -> None:
        """Start it; return when it accepts connections."""
        await self._process.start(_UP, timeout=30)

    async def stop(self) -> None:
        """Stop it cleanly."""
        await self._process.stop()

    async def kill(self) -> None:
        """End it with SIGKILL."""
        await self._process.kill()
