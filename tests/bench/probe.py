"""Single requests at a steady rate, one at a time, and the latency of each while the broker does other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import PULL_SUBSCRIPTION, PullMessage
from tests.bench.blast import send_frame
from tests.bench.remote import Remote

_INTERVAL = 0.01


class Sample(NamedTuple):
    """One request."""

    wall_ms: float
    """The scheduled time of the request, ms since the epoch."""
    latency_ms: float


def send_regularly(address: tuple[str, int], topic: str, done: threading.Event) -> list[Sample]:
    """Send 1 KiB messages to queue 0 of a topic, each when the one before is acknowledged."""
    body, properties = b"x" * 1024, "UNIQ_KEY\x017F00000100002A9F0000000000000001\x02WAIT\x01true\x02"
    with Remote(address) as remote:

        def send(number: int) -> None:
            (answer,) = remote.exchange(send_frame(topic, 0, number, body, properties), number, 1)
            if answer.code != ResponseCode.SUCCESS:
                raise RuntimeError(f"a send was refused: {answer.code} {answer.remark}")

        return _regularly(send, done)


def pull_regularly(address: tuple[str, int], topic: str, done: threading.Event) -> list[Sample]:
    """Pull from queue 0 of a topic, up to 32 messages at a time; an empty pull returns at once."""
    offset = 0
    with Remote(address) as remote:

        def pull(number: int) -> None:
            nonlocal offset
            header = PullMessage(
                consumer_group="bench",
                topic=topic,
                queue_id=0,
                queue_offset=offset,
                max_msg_nums=32,
                sys_flag=PULL_SUBSCRIPTION,
                commit_offset=0,
                suspend_timeout_millis=0,
                sub_version=0,
                subscription="*",
                expression_type="TAG",
            )
            frame = codec.encode(
                Command(code=RequestCode.PULL_MESSAGE, language="JAVA", opaque=number, ext=header.to_ext())
            )
            (answer,) = remote.exchange(frame, number, 1)
            if answer.code == ResponseCode.SUCCESS:
                offset = int(answer.ext["nextBeginOffset"])

        return _regularly(pull, done)


def _regularly(request: Callable[[int], None], done: threading.Event) -> list[Sample]:
    """Make requests on a schedule. A request that had to wait for the one before it counts from its scheduled time, or
    a broker that stalls for a second would give one slow request instead of a hundred."""
    samples: list[Sample] = []
    start = time.perf_counter()
    wall = time.time() - start
    number = 0
    while not samples or not done.is_set():
        planned = start + number * _INTERVAL
        pause = planned - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
            planned = time.perf_counter()
        request(number + 1)
        samples.append(Sample((wall + planned) * 1000, (time.perf_counter() - planned) * 1000))
        number += 1
    return samples
