"""Locks on queues: one holder in a group at a time, until it gives up or 60 s pass without renewal."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from duemq.broker.errors import Refused
from duemq.broker.limits import Limits
from duemq.broker.settings.config import load
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.locks import QueueLocks
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests.bodies import BrokerQueue, LockBatch
from duemq.storage.clock import ManualClock
from tests.support.broker import Peer, UnboundBroker
from tests.support.wire import request, send
from tests.unit.broker.consume.test_pull import commit

A, B = BrokerQueue("b", 0, "T"), BrokerQueue("b", 1, "T")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def locks(clock: ManualClock) -> QueueLocks:
    return QueueLocks(clock, Limits(LiveSettings(load(None, ["maxQueueLocks=3"], {}).config)))


def test_a_queue_is_locked_for_one_client_of_a_group(locks: QueueLocks) -> None:
    assert locks.lock("g", "c1", [A]) == [A]
    assert locks.lock("g", "c2", [A, B]) == [B]
    assert locks.lock("g", "c1", [A, B]) == [A]
    assert locks.lock("other", "c2", [A]) == [A]


def test_a_lock_lasts_60_seconds_after_it_was_last_renewed(locks: QueueLocks, clock: ManualClock) -> None:
    locks.lock("g", "c1", [A])
    clock.advance(59_000)
    assert locks.lock("g", "c1", [A]) == [A]
    clock.advance(60_000)
    assert locks.lock("g", "c2", [A]) == []
    clock.advance(1)
    assert locks.lock("g", "c2", [A]) == [A]
    assert locks.lock("g", "c1", [A]) == []


def test_setting_the_wall_clock_ends_no_lock(locks: QueueLocks, clock: ManualClock) -> None:
    locks.lock("g", "c1", [A])
    clock.set_wall(clock.now_ms() + 3_600_000)
    assert locks.lock("g", "c2", [A]) == []


def test_only_the_holder_unlocks(locks: QueueLocks) -> None:
    locks.lock("g", "c1", [A, B])
    locks.release(locks.held("g", "c2", [A]))
    locks.release(locks.held("nobody", "c1", [A]))
    assert locks.lock("g", "c2", [A]) == []
    locks.release(locks.held("g", "c1", [A]))
    assert locks.lock("g", "c2", [A, B]) == [A]


def test_a_lock_that_was_renewed_meanwhile_is_not_released(locks: QueueLocks) -> None:
    locks.lock("g", "c1", [A, B])
    held = locks.held("g", "c1", [A, B])
    locks.lock("g", "c1", [A])
    locks.release(held)
    assert locks.lock("g", "c2", [A, B]) == [B]


def test_old_locks_are_forgotten(locks: QueueLocks, clock: ManualClock) -> None:
    locks.lock("g", "c1", [A])
    clock.advance(30_000)
    locks.lock("g", "c1", [B])
    clock.advance(30_001)
    locks.expire()
    assert locks._locks == {("g", B): ("c1", clock.monotonic() - 30.001)}
    clock.advance(60_001)
    locks.expire()
    assert locks._locks == {}


def test_a_renewed_lock_is_not_forgotten_with_older_ones(locks: QueueLocks, clock: ManualClock) -> None:
    locks.lock("g", "c1", [A, B])
    clock.advance(40_000)
    locks.lock("g", "c1", [A])
    clock.advance(40_000)
    locks.expire()
    assert list(locks._locks) == [("g", A)]


def test_there_are_as_many_locks_as_may_be(locks: QueueLocks) -> None:
    """The number of locks is limited, for all or none of a request; existing locks can be renewed and given up."""
    locks.lock("g", "c1", [A, B])
    with pytest.raises(Refused, match="maxQueueLocks=3"):
        locks.lock("other", "c1", [A, B])
    assert locks.lock("other", "c1", [B]) == [B]
    assert locks.lock("g", "c1", [A, B]) == [A, B]
    assert locks.lock("g", "c2", [A]) == []
    locks.release(locks.held("g", "c1", [A]))
    assert locks.lock("other", "c1", [A]) == [A]


async def test_locks_are_asked_for_and_given_up_by_request(peer: Peer) -> None:
    async def held(client_id: str, code: int = RequestCode.LOCK_BATCH_MQ) -> object:
        answer = await peer.ask(request(code, body=fastjson.dumps(LockBatch("g", client_id, [A, B]))))
        assert answer.code == 0
        return json.loads(bytes(answer.body))["lockOKMQSet"] if answer.body else None

    assert await held("c1") == [A.to_json(), B.to_json()]
    assert await held("c2") == []
    assert await held("c1", RequestCode.UNLOCK_BATCH_MQ) is None
    assert await held("c2") == [A.to_json(), B.to_json()]


async def test_offsets_are_on_the_disk_before_the_queue_is_another_members(
    broker: UnboundBroker, peer: Peer, tmp_path: Path
) -> None:
    """The next member reads them, also if the broker is killed before it does."""
    await peer.ask(send("T"))
    path = tmp_path / "config" / "consumerOffset.json"
    for offset in (7, 9):
        await peer.ask(request(RequestCode.LOCK_BATCH_MQ, body=fastjson.dumps(LockBatch("g", "c1", [A]))))
        await peer.ask(commit("g", "T", 0, offset))
        unlock = request(RequestCode.UNLOCK_BATCH_MQ, body=fastjson.dumps(LockBatch("g", "c1", [A])))
        assert (await peer.ask(unlock)).code == 0
        assert json.loads(path.read_bytes())["offsetTable"]["T@g"] == {"0": offset}
    written = path.stat().st_ino
    assert (await peer.ask(unlock)).code == 0
    assert path.stat().st_ino == written, "who holds no lock has nothing written"


async def test_a_queue_is_unlocked_though_the_offsets_cannot_be_written(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full() -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(broker.offsets, "save", full)
    for client in ("c1", "c2"):
        body = fastjson.dumps(LockBatch("g", client, [A]))
        answer = await peer.ask(request(RequestCode.LOCK_BATCH_MQ, body=body))
        assert json.loads(bytes(answer.body))["lockOKMQSet"] == [A.to_json()]
        assert (await peer.ask(request(RequestCode.UNLOCK_BATCH_MQ, body=body))).code == 0


async def test_a_queue_number_beyond_32_bits_is_refused(peer: Peer) -> None:
    body = b'{"consumerGroup":"g","clientId":"c","mqSet":[{"brokerName":"b","queueId":1e30,"topic":"T"}]}'
    for number in (b"1e30", b"9" * 30, b"2147483648"):
        answer = await peer.ask(request(RequestCode.LOCK_BATCH_MQ, body=body.replace(b"1e30", number)))
        assert answer.code == 1


@pytest.mark.parametrize("code", [RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ])
@pytest.mark.parametrize(
    ("group", "queue"),
    [
        ("g" * 256, A),
        ("g", BrokerQueue("b" * 256, 0, "T")),
        ("g", BrokerQueue("b", 0, "T" * 256)),
    ],
)
async def test_names_that_are_too_long_are_refused(peer: Peer, code: int, group: str, queue: BrokerQueue) -> None:
    """A lock keeps its names for a minute, also of a topic that there is not."""
    answer = await peer.ask(request(code, body=fastjson.dumps(LockBatch(group, "c", [A, queue]))))
    assert (answer.code, "at most 255 characters" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
