"""The short ways of a send (`broker/produce/send.py`) accept and refuse the same messages as the long way, store the
same records, and give the same answers.

Method: the same sends go to one broker twice, once with a topic that is marked as needing a further look, so that all
of them go the long way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from duemq.broker.produce.send import SendHandlers
from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.records.properties import NAME_END, PROPERTY_END
from tests.support.broker import Peer, UnboundBroker
from tests.support.wire import send
from tests.unit.broker.produce.test_send import NOW_MS, stored

VALUES = (
    "", "0", "1", "3", "03", "18", "19", "-1", "99999", "1234567890123", "x", "true", f"{NOW_MS}", f"{NOW_MS + 5432}",
)  # fmt: skip
NAMES = (
    "DELAY", "DELAY", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TAGS",
    "KEYS", "UNIQ_KEY", "WAIT", "CLUSTER", "XDELAY", "DUE_MS", "REAL_TOPIC", "REAL_QID", "__CRC32#",
)  # fmt: skip


@contextmanager
def _counted() -> Iterator[list[str]]:
    """Record the property texts of sends that go the long way."""
    taken: list[str] = []
    real = SendHandlers._send_special

    def count(self: SendHandlers, connection: object, request: object) -> object:
        taken.append(request.header.properties or "")  # type: ignore[attr-defined]
        return real(self, connection, request)  # type: ignore[arg-type]

    with patch.object(SendHandlers, "_send_special", count):
        yield taken


def _seen(broker: UnboundBroker, answer: Command) -> tuple[object, ...]:
    """The outcome of a send, without offsets, ids and opaque, which differ between sends."""
    if answer.code != ResponseCode.SUCCESS:
        return answer.code, answer.remark
    (message,) = stored(broker, answer)
    parts = [part for part in message.properties_text.split("\x02") if part]
    names = [part.partition("\x01")[0] for part in parts]
    last = dict(zip(names, parts, strict=True))
    ext = {name: value for name, value in answer.ext.items() if name not in ("msgId", "queueOffset", "recallHandle")}
    return (
        message.topic,
        message.queue_id,
        message.body,
        last,
        [name for name in names if name.startswith("REAL_")],
        message.born_timestamp,
        message.born_host,
        message.flag,
        message.sys_flag,
        message.reconsume_times,
        message.prepared_transaction_offset,
        ext,
        "recallHandle" in answer.ext,
    )


def _texts(seed: int, number: int) -> list[str]:
    chance = random.Random(seed)
    return [
        PROPERTY_END.join(
            f"{chance.choice(NAMES)}{NAME_END}{chance.choice(VALUES)}"
            for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4)))
        )
        + chance.choice(("", PROPERTY_END))
        for _ in range(number)
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_a_short_way_ends_where_the_long_way_ends(broker: UnboundBroker, peer: Peer, seed: int) -> None:
    assert (await peer.ask(send("T"))).code == ResponseCode.SUCCESS
    topic = broker.topics.table["T"]
    for text in _texts(seed, 500):
        found = []
        for is_direct in (True, False):
            topic.is_direct = is_direct
            answer = await peer.ask(send("T", queue_id=1, properties=text, flag=7, reconsume_times=len(text) % 3))
            found.append(_seen(broker, answer))
        assert found[0] == found[1], text


async def test_usual_sends_go_the_short_ways(broker: UnboundBroker, peer: Peer) -> None:
    """Usual sends go the short ways. The long way would accept them too, so only a count shows the difference."""
    await peer.ask(send("T"))
    with _counted() as taken:
        for text in ("", "KEYS\x01k", "DELAY\x013", "DELAY\x0118\x02TAGS\x01t\x02", "TIMER_DELAY_MS\x015000"):
            assert (await peer.ask(send("T", properties=text))).code == ResponseCode.SUCCESS
        assert taken == []
        await peer.ask(send("T", properties="DELAY\x0119"))
        assert taken == ["DELAY\x0119"]
