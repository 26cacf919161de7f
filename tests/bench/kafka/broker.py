"""Apache Kafka's broker, for the benchmarks: one node that is its own controller."""

import asyncio
from pathlib import Path

from tests.peers import install, ports, tools
from tests.peers.brokers.broker import HOST
from tests.peers.brokers.process import Process

_CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
_LOGGER = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.log.kafka.server=info")


class KafkaBroker:
    """A broker whose topics have `partitions` partitions, unless they are created with others."""

    def __init__(self, directory: Path, partitions: int, heap: str = "2g") -> None:
        self._port = ports.free_port()
        directory.mkdir(parents=True, exist_ok=True)
        self._properties = directory / "server.properties"
        controller = f"{HOST}:{ports.free_port()}"
        properties = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "log.dirs": directory / "data",
            "num.partitions": partitions,
            # The topics of a cluster with one node have one replica.
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            # By default a broker waits 3 s for further members of a new group.
            "group.initial.rebalance.delay.ms": 0,
        }
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        self._java = [tools.find("java"), *_LOGGER, "-cp", f"{install.kafka().require() / 'lib'}/*"]
        command = [*self._java, f"-Xmx{heap}", "kafka.Kafka", str(self._properties)]
        self._process = Process("Apache Kafka", command, directory / "kafka.out")

    @property
    def address(self) -> str:
        """The address that is given to clients."""
        return f"{HOST}:{self._port}"

    async def start(self) -> None:
        """Format the new store and start the broker; return when clients can connect."""
        format_ = ["kafka.tools.StorageTool", "format", "--cluster-id", _CLUSTER, "--config", str(self._properties)]
        await asyncio.to_thread(tools.run, "Kafka's format", [*self._java, *format_])
        await self._process.start("Kafka Server started")

    async def stop(self) -> None:
        """Stop it cleanly."""
        await self._process.stop()
