"""The timers' figures for RocketMQ's tools and replicas: GET_TIMER_CHECK_POINT (60) and GET_TIMER_METRICS (61)."""

from __future__ import annotations

from duemq.broker.access.permission import LOOK
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import NoFields, Request, response
from duemq.scheduler.timers.files.small_files import metrics_json
from duemq.scheduler.timers.service import Timers


class TimerStatusHandlers:
    """Reports on the timers."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.GET_TIMER_CHECK_POINT, NoFields, LOOK, self.checkpoint)
        router.add(RequestCode.GET_TIMER_METRICS, NoFields, LOOK, self.metrics)

    def checkpoint(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the timers' progress, in the form that RocketMQ's replicas read."""
        return response(ResponseCode.SUCCESS, body=self._timers.checkpoint_body())

    def metrics(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Return the number of waiting messages of each topic."""
        return response(ResponseCode.SUCCESS, body=metrics_json(self._timers.metrics(), request.now_ms, 0))
