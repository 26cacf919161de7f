"""Apache's own broker and name server, from the jars of Maven Central."""

from collections.abc import Mapping
from pathlib import Path

from tests.peers import install, ports, tools
from tests.peers.brokers.broker import BROKER, CLUSTER, HOST
from tests.peers.brokers.process import Process
from tests.peers.class_archives.options import options as class_archive

# Netty and the mapped files access the internals of the JDK, which Java 17 must be told to allow.
_OPENS = [
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.util=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
]
SHORT_LIVED = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dtls.server.mode=disabled")
"""For brokers that live less than a minute: no costly optimisation of hot code, which would not pay off, a
single-threaded collector, and no key pair of a certificate for TLS, which takes half of a start. Not for brokers whose
speed is measured."""
# Both print "... boot success. serializeType=JSON" as the last step of their start.
_UP = "boot success"
_LOGBACK = """<configuration>
<appender name="file" class="ch.qos.logback.core.FileAppender">
<file>{file}</file><encoder><pattern>%d %p %logger{{0}} %m%n</pattern></encoder>
</appender>
<root level="WARN"><appender-ref ref="file"/></root>
</configuration>
"""


def _home(directory: Path, log: Path) -> Path:
    """Make a ROCKETMQ_HOME; the start classes need only the log configuration in it."""
    conf = directory / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    for program in ("broker", "namesrv"):
        (conf / f"logback_{program}.xml").write_text(_LOGBACK.format(file=log))
    return directory


def _write_properties(path: Path, properties: Mapping[str, object]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))


class ApacheNameServer:
    """Apache's name server alone."""

    def __init__(
        self, version: str, directory: Path, port: int | None = None, java_options: tuple[str, ...] = ()
    ) -> None:
        self.version = version
        self.directory = directory
        self.port = port or ports.free_port()
        home = _home(directory / "namesrv", directory / "namesrv.log")
        conf = home / "conf" / "namesrv.conf"
        _write_properties(
            conf,
            {
                "listenPort": self.port,
                "kvConfigPath": home / "kvConfig.json",
                "configStorePath": home / "namesrv.properties",
            },
        )
        jars = install.apache(version).require() / "lib"
        self._process = Process(
            f"Apache's name server {version}",
            [
                tools.find("java"),
                f"-Duser.home={directory}",
                "-Xmx256m",
                *SHORT_LIVED,
                *class_archive(version, "namesrv"),
                *java_options,
                *_OPENS,
                "-cp",
                f"{jars}/*",
                "org.apache.rocketmq.namesrv.NamesrvStartup",
                "-c",
                str(conf),
            ],
            directory / "namesrv.out",
            {"ROCKETMQ_HOME": str(home)},
            [directory / "namesrv.log"],
        )

    @property
    def address(self) -> str:
        """The address given to clients and brokers."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process.running

    async def start(self) -> None:
        """Start it; return when it accepts connections."""
        await self._process.start(_UP)

    async def stop(self) -> None:
        """Stop it cleanly."""
        await self._process.stop()

    async def kill(self) -> None:
        """End it with SIGKILL."""
        await self._process.kill()


class ApacheBroker:
    """Apache's broker, with its own name server unless given the address of another."""

    def __init__(
        self,
        version: str,
        directory: Path,
        properties: Mapping[str, object] | None = None,
        *,
        store: Path | None = None,
        port: int | None = None,
        nameserver_port: int | None = None,
        nameserver: str | None = None,
        heap: str = "1g",
        java_options: tuple[str, ...] = (),
    ) -> None:
        self.version = version
        self.kind = f"apache-{version}"
        self.directory = directory
        self.store = store or directory / "store"
        self.port = port or ports.free_broker_port()
        self._own_nameserver = None if nameserver else ApacheNameServer(version, directory, nameserver_port)
        self.nameserver = nameserver or (self._own_nameserver.address if self._own_nameserver else "")
        home = _home(directory / "broker", directory / "broker.log")
        conf = home / "conf" / "broker.conf"
        settings: dict[str, object] = {
            "brokerClusterName": CLUSTER,
            "brokerName": BROKER,
            "brokerId": 0,
            "brokerIP1": HOST,
            "listenPort": self.port,
            "namesrvAddr": self.nameserver,
            "storePathRootDir": self.store,
            "storePathCommitLog": self.store / "commitlog",
            "autoCreateTopicEnable": "true",
            # Otherwise the broker refuses sends on a busy machine: these tests do not measure its speed.
            "waitTimeMillsInSendQueue": "60000",
            "osPageCacheBusyTimeOutMills": "60000",
            "diskMaxUsedSpaceRatio": 98,
        }
        _write_properties(conf, settings | dict(properties or {}))
        jars = install.apache(version).require() / "lib"
        self._process = Process(
            f"Apache's broker {version}",
            [
                tools.find("java"),
                f"-Duser.home={directory}",
                f"-Xms{heap}",
                f"-Xmx{heap}",
                "-XX:MaxDirectMemorySize=4g",
                *class_archive(version, "broker"),
                *java_options,
                *_OPENS,
                "-cp",
                f"{jars}/*",
                "org.apache.rocketmq.broker.BrokerStartup",
                "-c",
                str(conf),
            ],
            directory / "broker.out",
            {"ROCKETMQ_HOME": str(home)},
            [directory / "broker.log"],
        )

    @property
    def address(self) -> str:
        """The broker's address in routes."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the broker, not of its name server."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the broker process runs."""
        return self._process.running

    async def start(self) -> None:
        """Start name server and broker; return when the broker has registered and accepts connections."""
        if self._own_nameserver is not None and not self._own_nameserver.running:
            await self._own_nameserver.start()
        await self._process.start(_UP)

    async def stop(self) -> None:
        """Stop the broker cleanly, and then kill its name server, which has nothing to lose and would take seconds to
        stop."""
        try:
            await self._process.stop()
        finally:
            if self._own_nameserver is not None and self._own_nameserver.running:
                await self._own_nameserver.kill()

    async def kill(self) -> None:
        """End both with SIGKILL."""
        await self._process.kill()
        if self._own_nameserver is not None and self._own_nameserver.running:
            await self._own_nameserver.kill()
