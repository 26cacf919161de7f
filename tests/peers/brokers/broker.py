"""The interface of a broker under test, duemq's or Apache's."""

from pathlib import Path
from typing import Protocol

CLUSTER = "DefaultCluster"
BROKER = "broker-a"
HOST = "127.0.0.1"


class Broker(Protocol):
    """A broker with a name server; after a stop or a kill it may be started again on the same store."""

    @property
    def kind(self) -> str:
        """`duemq`, `apache-4.9.7` or `apache-5.3.3`."""

    @property
    def store(self) -> Path:
        """The store directory (storePathRootDir)."""

    @property
    def port(self) -> int:
        """The port for clients."""

    @property
    def address(self) -> str:
        """The broker's address in routes."""

    @property
    def nameserver(self) -> str:
        """The name server's address for clients."""

    @property
    def pid(self) -> int:
        """The process id of the broker itself."""

    @property
    def running(self) -> bool:
        """Whether the broker process runs."""

    async def start(self) -> None:
        """Start it; return when clients can connect."""

    async def stop(self) -> None:
        """Stop it cleanly."""

    async def kill(self) -> None:
        """End it with SIGKILL."""
