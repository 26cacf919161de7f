"""REPORT_BRIDGE (30006), duemq's own: MQTT bridges report their figures, and brokerStatus shows them."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from duemq.broker.access.permission import OPERATE
from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import ReportBridge, Request, response

MAX_BRIDGES: Final = 64
MAX_FIGURES: Final = 64
"""Maximum number of figures of a bridge."""
_NAME: Final = re.compile(r"[a-zA-Z0-9%_-]{1,64}")
_LIMIT: Final = 2**63

_decode = msgspec.json.Decoder(dict[str, int]).decode


class Bridges:
    """The newest figures of each bridge, by connection. They are dropped when the connection is lost."""

    def __init__(self) -> None:
        self._figures: dict[Connection, tuple[str, dict[str, int]]] = {}

    def register(self, router: Router) -> None:
        """Add the handler to a router."""
        router.add(RequestCode.REPORT_BRIDGE, ReportBridge, OPERATE, self.report)
        router.add_clients(self)

    def report(self, connection: Connection, request: Request[ReportBridge]) -> Answer:
        """Keep the figures of a bridge. The request's body is a JSON object with whole numbers. Raises Refused."""
        name = request.header.bridge
        if not _NAME.fullmatch(name):
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"the bridge's name {name[:64]!r} is not 1 to 64 letters, digits and % _ -"
            )
        try:
            figures = _decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the body is not a JSON object of integers: {error}") from None
        if len(figures) > MAX_FIGURES or not all(map(_NAME.fullmatch, figures)):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"at most {MAX_FIGURES} figures are accepted, and their names are 1 to 64 letters, digits and % _ -",
            )
        if not all(-_LIMIT <= number < _LIMIT for number in figures.values()):
            raise Refused(ResponseCode.SYSTEM_ERROR, "a figure has more than 64 bits")
        if connection not in self._figures and len(self._figures) >= MAX_BRIDGES:
            raise Refused(ResponseCode.SYSTEM_BUSY, f"{MAX_BRIDGES} bridges are already reporting")
        self._figures[connection] = (name, figures)
        return response(ResponseCode.SUCCESS)

    def connection_lost(self, connection: Connection) -> None:
        """Drop the figures of a connection."""
        self._figures.pop(connection, None)

    def status(self) -> dict[str, int]:
        """Return the figures by their names in brokerStatus: mqttBridge.NAME.FIGURE."""
        return {
            f"mqttBridge.{name}.{figure}": number
            for name, figures in self._figures.values()
            for figure, number in figures.items()
        }
