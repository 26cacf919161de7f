"""What it takes to find the few messages of a rare tag in a long queue: three groups walk the whole queue, one after
the other, over numbers of other tags and rarities, and once with the tags codes in consumequeue_ext."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from duemq import Message, Producer
from duemq._net.connection import ClientConnection, connect
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.records.record import decode_all
from duemq.protocol.requests.headers import PULL_SUBSCRIPTION, PullMessage, PullMessageResponse, decode_ext
from tests.bench.brokers import MakeBroker, running
from tests.bench.figures import Figure, Figures
from tests.bench.measure import cpu_seconds
from tests.peers.brokers.broker import HOST, Broker

RARE: Final = "rare"
_WALKS: Final = ("first", "second", "third")
_MOVED_ON: Final = (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY)


@dataclass(frozen=True)
class Sizes:
    """`messages` in one queue. `kinds`: the number of other tags, and one message in how many has the rare tag."""

    messages: int
    kinds: tuple[tuple[int, int], ...]


_KINDS: Final = ((4, 100), (4, 10_000), (4, 100_000), (64, 100_000))
_EXTENDED: Final = (4, 10_000)
REAL = Sizes(300_000, _KINDS)
TINY = Sizes(3000, ((4, 1000),))


def _rows(case: str, others: int, every: int, title: str) -> dict[str, Figure]:
    return {
        f"{case}_{others}_{every}_{walk}": Figure(title if walk == "first" else f"  {walk} group", "ms", False)
        for walk in _WALKS
    }


FIGURES: Mapping[str, Figure] = {
    name: figure
    for others, every in _KINDS
    for name, figure in _rows(
        "tag", others, every, f"1 in {every:,} beside {others} tags, walk of 300,000: CPU"
    ).items()
} | _rows("tag_extended", *_EXTENDED, "1 in 10,000, enableConsumeQueueExt, 300,000: CPU")


async def rare_tag(make: MakeBroker, directory: Path, sizes: Sizes) -> Figures:
    """The broker's CPU, in ms, for the pulls of a group that reads a queue from its begin for one tag."""
    return await _walks(make, directory / "tags", {}, "tag", sizes.messages, sizes.kinds)


async def rare_tag_extended(make: MakeBroker, directory: Path, sizes: Sizes) -> Figures:
    """The same with enableConsumeQueueExt, from the first message on."""
    properties = {"enableConsumeQueueExt": "true"}
    return await _walks(make, directory / "extended", properties, "tag_extended", sizes.messages, [_EXTENDED])


async def _walks(
    make: MakeBroker,
    directory: Path,
    properties: Mapping[str, object],
    case: str,
    messages: int,
    kinds: Iterable[tuple[int, int]],
) -> Figures:
    figures: Figures = {}
    async with running(make, directory, properties) as broker:
        for others, every in kinds:
            topic = f"tags_{others}_{every}"
            queue_id = await _fill(broker, topic, messages, others, every)
            connection = await connect(f"{HOST}:{broker.port}", codec="json", on_request=lambda _: None, timeout=10)
            await _walk(connection, (topic, queue_id), "warm", f"tag{others - 1}", messages)
            for walk in _WALKS:
                before = cpu_seconds(broker.pid)
                found = await _walk(connection, (topic, queue_id), walk, RARE, messages)
                figures[f"{case}_{others}_{every}_{walk}"] = (cpu_seconds(broker.pid) - before) * 1e3
                if found != messages // every:
                    raise RuntimeError(f"{found} messages with the tag, sent were {messages // every}")
            connection.close()
    return figures


async def _fill(broker: Broker, topic: str, count: int, others: int, every: int) -> int:
    """Send the messages to one queue; return its id."""

    def message(number: int) -> Message:
        tag = RARE if number % every == every - 1 else f"tag{number % others}"
        return Message(topic, b"x" * 100, tags=tag, sharding_key="one")

    async with Producer(broker.nameserver) as producer:
        result = await producer.send(message(0))
        await producer.send_many(message(number) for number in range(1, count))
    return result.queue.queue_id


async def _walk(connection: ClientConnection, queue: tuple[str, int], group: str, tag: str, end: int) -> int:
    """Pull from the begin of a queue to its end; return the number of messages."""
    offset = found = 0
    until = time.monotonic() + 120
    while offset < end:
        if time.monotonic() > until:
            raise RuntimeError(f"{group} has come to {offset} of {end} within two minutes")
        header = PullMessage(group, *queue, offset, 32, PULL_SUBSCRIPTION, 0, 0, 0, tag, "TAG")
        answer = await connection.request(RequestCode.PULL_MESSAGE, header, timeout=10)
        if answer.code not in _MOVED_ON:
            break
        if answer.code == ResponseCode.SUCCESS:
            found += len(list(decode_all(bytes(answer.body))))
        offset = decode_ext(PullMessageResponse, answer.ext).next_begin_offset
    return found


_CASES: Final = (rare_tag, rare_tag_extended)
NAMES = tuple(case.__name__ for case in _CASES)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    figures: Figures = {}
    for case in _CASES:
        if case.__name__ in only:
            say(case.__name__)
            figures |= await case(make, directory, sizes)
    return figures
