"""Waiting pulls: woken by an append, answered at their time, bounded in number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from duemq.broker.consume.long_poll import HeldPull, LongPolls
from duemq.broker.net.connection import Connection
from duemq.broker.tables.topics import PERM_READ, PERM_WRITE
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.records import record
from duemq.protocol.requests.bodies import SubscriptionGroupConfig
from duemq.protocol.requests.headers import CreateTopic, NoFields, PullMessage, Request, TopicName
from duemq.storage.errors import NotInMemory
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import CountBudget, SteppedLoop, request_turns, turns
from tests.support.wire import pull, request, send


@pytest.fixture
async def topic(peer: Peer) -> str:
    """A topic with one message in queue 0."""
    assert (await peer.ask(send("T"))).code == 0
    return "T"


async def held(broker: UnboundBroker, command: Command) -> Peer:
    """Return a consumer whose pull waits."""
    consumer = broker.connect()
    consumer.post(command)
    await turns()
    assert consumer.responses == []
    return consumer


def offsets(answer: Command) -> list[int]:
    return [message.queue_offset for message in record.decode_all(bytes(answer.body))]


async def test_a_pull_at_the_end_waits_and_the_next_message_answers_it(
    broker: UnboundBroker, peer: Peer, topic: str
) -> None:
    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    await peer.ask(send(topic, b"news"))
    await turns()
    (answer,) = consumer.responses
    assert (answer.code, answer.remark, answer.ext["nextBeginOffset"]) == (0, "FOUND", "2")
    assert offsets(answer) == [1]
    assert broker.running.pulls.polls.count == 0


async def test_nothing_of_any_length_is_kept_of_a_held_pull(broker: UnboundBroker, topic: str) -> None:
    command = pull(topic, 1, suspend_ms=15_000, subscription="a" * 60_000)
    command.language = "J" * 10_000
    await held(broker, command)
    polls = broker.running.pulls.polls
    (pulls,) = polls._held.values()
    (waiting,) = pulls
    request = waiting.request
    assert max(len(value) for value in (*request.header.to_ext().values(), request.language or "", request.body)) < 256


async def test_messages_of_one_turn_come_together(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    await peer.ask_all([send(topic) for _ in range(10)])
    await turns()
    assert [offsets(answer) for answer in consumer.responses] == [list(range(1, 11))]


async def test_a_message_for_another_queue_or_topic_wakes_nobody(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    await peer.ask_all([send(topic, queue_id=1), send("Other")])
    await turns()
    assert consumer.responses == []


async def test_a_pull_of_a_queue_without_messages_waits_too(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    consumer = await held(broker, pull(topic, 0, queue_id=2, suspend_ms=15_000))
    await peer.ask(send(topic, queue_id=2))
    await turns()
    assert offsets(consumer.responses[0]) == [0]


async def test_without_leave_to_wait_a_pull_is_answered_at_once(peer: Peer, topic: str) -> None:
    answer = await peer.ask(pull(topic, 1))
    assert (answer.code, answer.remark) == (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE")


@pytest.mark.parametrize("suspend_ms", [0, 1000, 15_000])
async def test_a_pull_that_nothing_comes_for_is_answered_at_its_time(
    broker: UnboundBroker, topic: str, loop: SteppedLoop, suspend_ms: int
) -> None:
    """A pull without new messages is answered within the second after its time."""
    consumer = await held(broker, pull(topic, 1, suspend_ms=suspend_ms))
    for _ in range(suspend_ms // 1000):
        assert consumer.responses == []
        loop.advance(1)
        await turns()
    loop.advance(1.1)
    await turns()
    loop.advance(1)
    await turns()
    (answer,) = consumer.responses
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "1")
    assert broker.running.pulls.polls.count == 0


@pytest.mark.parametrize("suspend_ms", [-1, -(2**63), 2**63 - 1])
async def test_no_pull_waits_for_ever(broker: UnboundBroker, topic: str, loop: SteppedLoop, suspend_ms: int) -> None:
    consumer = await held(broker, pull(topic, 1, suspend_ms=suspend_ms))
    for _ in range(62):
        loop.advance(1)
        await turns()
    assert [answer.code for answer in consumer.responses] == [ResponseCode.PULL_NOT_FOUND]


async def test_messages_that_are_not_wanted_do_not_answer(
    broker: UnboundBroker, peer: Peer, topic: str, loop: SteppedLoop
) -> None:
    """Messages with other tags do not end a pull, and are not looked at again: the answer at the end has the offset to
    go on from."""
    consumer = await held(broker, pull(topic, 1, subscription="wanted", suspend_ms=5000))
    await peer.ask_all([send(topic, properties="TAGS\x01other") for _ in range(5)])
    await turns()
    assert consumer.responses == []
    for _ in range(7):
        loop.advance(1)
        await turns()
    (answer,) = consumer.responses
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "6")

    consumer = await held(broker, pull(topic, 6, subscription="wanted", suspend_ms=5000))
    await peer.ask_all([send(topic, properties="TAGS\x01other"), send(topic, properties="TAGS\x01wanted")])
    await turns()
    assert offsets(consumer.responses[0]) == [7]


async def test_every_consumer_of_a_queue_gets_the_message(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    consumers = [await held(broker, pull(topic, 1, group=f"g{n}", suspend_ms=15_000)) for n in range(20)]
    await peer.ask(send(topic))
    await turns(5)
    assert [offsets(consumer.responses[0]) for consumer in consumers] == [[1]] * 20


async def test_a_consumer_that_does_not_read_gets_nothing_pushed(
    broker: UnboundBroker, peer: Peer, topic: str, loop: SteppedLoop
) -> None:
    await peer.ask_all([send("Big", bytes(1_000_000)) for _ in range(1)])
    consumer = await held(broker, pull(topic, 1, suspend_ms=3000))
    consumer.transport.block()
    consumer.post(pull("Big"))
    before = consumer.transport.get_write_buffer_size()
    assert before > 1_000_000
    await peer.ask(send(topic))
    await turns()
    assert consumer.transport.get_write_buffer_size() == before
    for _ in range(6):
        loop.advance(1)
        await turns()
    assert consumer.transport.get_write_buffer_size() < before + 1000
    consumer.transport.unblock()
    assert [answer.code for answer in consumer.responses] == [0, ResponseCode.PULL_NOT_FOUND]
    assert (await consumer.ask(pull(topic, 1))).code == 0


async def test_a_consumer_that_reads_again_gets_at_once_what_came_meanwhile(
    broker: UnboundBroker, peer: Peer, topic: str
) -> None:
    """A consumer that reads again gets the messages that came meanwhile at once, not when its pull's time is up: a
    briefly slow link must not make messages late."""
    await peer.ask(send("Big", bytes(1_000_000)))
    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    consumer.post(pull(topic, 0, queue_id=2, suspend_ms=15_000))
    consumer.transport.block()
    consumer.post(pull("Big"))
    await peer.ask(send(topic, b"news"))
    await turns()
    consumer.transport.unblock()
    await turns()
    big, news = consumer.responses
    assert (len(big.body) > 1_000_000, offsets(news)) == (True, [1])
    assert (broker.running.pulls.polls.count, broker.running.pulls.polls._passed_over) == (1, {})


async def test_a_consumer_that_leaves_without_reading_is_forgotten(
    broker: UnboundBroker, peer: Peer, topic: str
) -> None:
    await peer.ask(send("Big", bytes(1_000_000)))
    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    consumer.transport.block()
    consumer.post(pull("Big"))
    await peer.ask(send(topic, b"news"))
    await turns()
    consumer.transport.abort()
    await turns()
    assert (broker.running.pulls.polls.count, broker.running.pulls.polls._passed_over) == (0, {})


async def test_beyond_the_capacity_pulls_are_answered_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "pullThreadPoolQueueCapacity=2") as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        consumers = [await held(broker, pull("T", 1, suspend_ms=15_000)) for _ in range(2)]
        assert (await peer.ask(pull("T", 1, suspend_ms=15_000))).code == ResponseCode.PULL_NOT_FOUND
        await peer.ask(send("T"))
        await turns()
        assert all(consumer.responses for consumer in consumers)
        await held(broker, pull("T", 2, suspend_ms=15_000))


async def test_pulls_of_clients_that_left_make_room(tmp_path: Path, loop: SteppedLoop) -> None:
    """Pulls of clients that left free their places at once, not when their time is up: clients that come and go would
    keep others from waiting."""
    async with running(tmp_path, "pullThreadPoolQueueCapacity=2") as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        for _ in range(5):
            consumers = [await held(broker, pull("T", 1, suspend_ms=15_000)) for _ in range(2)]
            for consumer in consumers:
                consumer.transport.abort()
            await turns()
            assert broker.running.pulls.polls.count == 0


async def test_short_polling_waits_its_own_time(tmp_path: Path, loop: SteppedLoop) -> None:
    async with running(tmp_path, "longPollingEnable=false", "shortPollingTimeMills=2000") as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        consumer = await held(broker, pull("T", 1, suspend_ms=15_000))
        for _ in range(4):
            loop.advance(1)
            await turns()
        assert [answer.code for answer in consumer.responses] == [ResponseCode.PULL_NOT_FOUND]


def deletion(topic: str) -> Command:
    return request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName(topic))


def queues(topic: str, read: int, perm: int = PERM_READ | PERM_WRITE) -> Command:
    """A request that makes or changes a topic."""
    header = CreateTopic(topic, "TBW102", read, 8, perm, "SINGLE_TAG")
    return request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def test_pulls_of_a_topic_that_is_deleted_are_answered_at_once(
    broker: UnboundBroker, peer: Peer, topic: str
) -> None:
    """Pulls of a deleted topic are answered at once, with the same answer as later pulls; those of other topics go on
    waiting."""
    await peer.ask(send("Other"))
    consumers = [
        await held(broker, pull(topic, at, queue_id=queue, suspend_ms=15_000)) for queue, at in ((0, 1), (2, 0))
    ]
    other = await held(broker, pull("Other", 1, suspend_ms=15_000))
    assert (await peer.ask(deletion(topic))).code == 0
    await turns()
    late = await peer.ask(pull(topic, 1, suspend_ms=15_000))
    assert late.code == ResponseCode.TOPIC_NOT_EXIST
    assert [[(answer.code, answer.remark) for answer in consumer.responses] for consumer in consumers] == [
        [(late.code, late.remark)]
    ] * 2
    assert (other.responses, broker.running.pulls.polls.count) == ([], 1)


async def test_a_pull_whose_topic_is_deleted_while_its_queue_is_read_is_told_so(
    broker: UnboundBroker, peer: Peer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = asyncio.Event()

    class ColdQueue:
        """Reads of a consume queue that is not in memory."""

        def at_once(self, *_: object) -> None:
            raise NotInMemory("consumequeue", 0, lambda: None)

        async def run(self, look: Callable[..., object], *arguments: object) -> object:
            await is_read.wait()
            return look(*arguments)

    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    monkeypatch.setattr(broker.running.pulls, "_reads", ColdQueue())
    await peer.ask(send(topic))
    await turns()
    assert (await peer.ask(deletion(topic))).code == 0
    is_read.set()
    await turns()
    assert [answer.code for answer in consumer.responses] == [ResponseCode.TOPIC_NOT_EXIST]


async def test_a_topic_that_is_made_again_wakes_who_waited_for_the_old_one(
    broker: UnboundBroker, peer: Peer, topic: str
) -> None:
    """A topic that is made again ends the pulls that waited for the old one; the next pull waits for the new queue."""
    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    await peer.ask_all([deletion(topic), queues(topic, 8)])
    await turns()
    assert len(consumer.responses) == 1
    consumer.post(pull(topic, 0, suspend_ms=15_000))
    await turns()
    assert len(consumer.responses) == 1
    await peer.ask(send(topic, b"news"))
    await turns()
    assert offsets(consumer.responses[1]) == [0]


async def test_pulls_end_that_a_changed_topic_does_not_allow(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    await peer.ask(queues(topic, 8))
    waiting = [
        await held(broker, pull(topic, at, queue_id=queue, suspend_ms=15_000)) for queue, at in ((0, 1), (4, 0), (7, 0))
    ]
    await peer.ask(queues(topic, 5))
    await turns()
    assert [[answer.code for answer in consumer.responses] for consumer in waiting] == [
        [],
        [],
        [ResponseCode.SYSTEM_ERROR],
    ]
    await peer.ask(queues(topic, 5, PERM_WRITE))
    await turns()
    assert [consumer.responses[0].code for consumer in waiting[:2]] == [ResponseCode.NO_PERMISSION] * 2
    assert broker.running.pulls.polls.count == 0


async def test_a_held_pull_of_a_group_that_may_not_consume_any_more_gets_no_messages(
    broker: UnboundBroker, peer: Peer, topic: str
) -> None:
    consumer = await held(broker, pull(topic, 1, suspend_ms=15_000))
    group = SubscriptionGroupConfig(group_name="consumers", consume_enable=False)
    body = msgspec.json.encode(group)
    assert (await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, NoFields(), body))).code == 0
    await peer.ask(send(topic))
    await turns()
    assert [answer.code for answer in consumer.responses] == [ResponseCode.NO_PERMISSION]


async def test_a_stopping_broker_answers_those_who_wait(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        consumers = [await held(broker, pull("T", 1, suspend_ms=15_000)) for _ in range(3)]
    assert [[answer.code for answer in consumer.responses] for consumer in consumers] == [[19]] * 3


# --- the waiting itself


class FakeQueue:
    """The part of a consume queue that pulls wait for."""

    def __init__(self, queue_id: int = 0) -> None:
        self.topic = "T"
        self.queue_id = queue_id
        self.watchers: list[Callable[[Any], None]] = []

    def watch(self, watcher: Callable[[Any], None]) -> None:
        self.watchers.append(watcher)

    def unwatch(self, watcher: Callable[[Any], None]) -> None:
        self.watchers.remove(watcher)

    def arrive(self) -> None:
        for watcher in self.watchers:
            watcher(self)


class FakeConnection:
    """The part of a connection that pulls wait over."""

    takes_answers = True


def held_pull(queue: FakeQueue, deadline: float, connection: object = None) -> HeldPull:
    request = cast("Request[PullMessage]", SimpleNamespace(header=SimpleNamespace(queue_offset=0)))
    return HeldPull(cast("Connection", connection or FakeConnection()), request, cast("Any", queue), None, deadline)


def long_polls(
    loop: SteppedLoop,
    serve: Callable[[HeldPull], bool],
    expire: Callable[[HeldPull], None] = lambda _: None,
    fail: Callable[[HeldPull, Exception], None] = lambda *_: None,
    *,
    check: Callable[[HeldPull], None] = lambda _: None,
    share: float = float("inf"),
) -> LongPolls:
    """Long polls with a budget of pulls per turn."""
    return LongPolls(
        loop,
        request_turns(loop, CountBudget(share, share)),
        capacity=lambda: 1000,
        serve=serve,
        expire=expire,
        check=check,
        fail=fail,
    )


async def test_serving_many_takes_turns_with_others(loop: SteppedLoop) -> None:
    served: list[HeldPull] = []

    def serve(pull: HeldPull) -> bool:
        served.append(pull)
        return True

    polls = long_polls(loop, serve, share=2)
    queue, deadline = FakeQueue(), loop.time() + 60
    pulls = [held_pull(queue, deadline) for _ in range(20)]
    for each in pulls:
        assert polls.hold(each)
    assert len(queue.watchers) == 1
    queue.arrive()
    queue.arrive()
    counts = []
    while len(served) < 20:
        before = len(served)
        await turns(1)
        counts.append(len(served) - before)
    assert max(counts) <= 2
    assert served == pulls
    assert polls.count == 0
    assert queue.watchers == []


async def test_pulls_that_end_in_one_second_take_turns_too(loop: SteppedLoop) -> None:
    ended: list[HeldPull] = []
    polls = long_polls(loop, lambda _: pytest.fail("nothing came"), ended.append, share=3)
    queues = [FakeQueue() for _ in range(10)]
    pulls = [held_pull(queues[number % 10], loop.time() + 0.5) for number in range(100)]
    for each in pulls:
        polls.hold(each)
    loop.advance(2)
    counts = []
    while len(ended) < 100:
        before = len(ended)
        await turns(1)
        counts.append(len(ended) - before)
    assert max(counts) == 3
    assert set(ended) == set(pulls)
    assert not any(queue.watchers for queue in queues)


async def test_pulls_of_one_client_that_leaves_are_forgotten_in_turns(loop: SteppedLoop) -> None:
    """The pulls of one client that leaves are forgotten over several turns: this delays no work for others, and
    messages that arrive for them meanwhile are not delivered."""
    served: list[HeldPull] = []
    polls = long_polls(loop, lambda pull: not served.append(pull), share=5)  # type: ignore[func-returns-value]
    queue, leaving = FakeQueue(), object()
    for each in [held_pull(queue, loop.time() + 60, leaving) for _ in range(500)]:
        polls.hold(each)
    stays = held_pull(queue, loop.time() + 60)
    polls.hold(stays)
    polls.connection_lost(cast("Connection", leaving))
    assert polls.count == 501
    while polls.count > 1:
        before = polls.count
        await turns(1)
        assert polls.count >= before - 5
    queue.arrive()
    await turns(3)
    assert served == [stays]
    assert queue.watchers == []


async def test_those_who_want_something_else_do_not_hold_up_those_behind_them(loop: SteppedLoop) -> None:
    """Pulls that want other messages do not hold up those behind them, even if they are more than fit into one turn:
    the next turn goes on behind them, and the work ends."""
    looks = 0

    def serve(pull: HeldPull) -> bool:
        nonlocal looks
        looks += 1
        return pull is pulls[-1]

    polls = long_polls(loop, serve, share=4)
    busy, quiet = FakeQueue(), FakeQueue()
    pulls = [held_pull(busy, 2000) for _ in range(30)] + [held_pull(quiet, 2000)]
    for each in pulls:
        polls.hold(each)
    quiet.arrive()
    for _ in range(5):
        busy.arrive()
        await turns(4)
    assert polls.count == 30
    await turns(60)
    assert looks <= 1 + 6 * 30
    polls.stop()


async def test_many_queues_that_get_messages_cost_as_much_as_they_are(loop: SteppedLoop) -> None:
    """Messages in many queues cost one look at each queue."""
    served: list[HeldPull] = []
    polls = long_polls(loop, lambda pull: not served.append(pull), share=50)  # type: ignore[func-returns-value]
    queues = [FakeQueue() for _ in range(900)]
    for queue in queues:
        polls.hold(held_pull(queue, loop.time() + 60))
    for queue in queues:
        queue.arrive()
    await turns(900 // 50 * 2 + 3)
    assert len(served) == 900


async def test_one_pull_that_cannot_be_answered_does_not_keep_the_others_waiting(loop: SteppedLoop) -> None:
    """A pull that cannot be answered, for example because of an error of the disk, does not delay the others: the error
    ends that pull, woken or not."""
    served: list[HeldPull] = []
    failed: list[HeldPull] = []

    def serve(pull: HeldPull) -> bool:
        if pull is pulls[0]:
            raise OSError(5, "io")
        served.append(pull)
        return True

    def expire(pull: HeldPull) -> None:
        serve(pull)

    polls = long_polls(loop, serve, expire, lambda pull, _: failed.append(pull))
    queues = [FakeQueue(), FakeQueue()]
    pulls = [held_pull(queues[0], 2000), held_pull(queues[0], 2000), held_pull(queues[1], 2000)]
    for each in pulls:
        polls.hold(each)
    for queue in queues:
        queue.arrive()
    await turns(5)
    assert set(served) == set(pulls[1:])
    assert failed == pulls[:1]
    assert polls.count == 0

    for each in pulls:
        polls.hold(each)
    served.clear()
    loop.advance(3000)
    await turns(5)
    assert set(served) == set(pulls[1:])
    assert failed == pulls[:1] * 2
    assert polls.count == 0


async def test_nothing_is_kept_of_a_pull_that_was_answered(loop: SteppedLoop) -> None:
    """Nothing is kept of an answered pull: a consumer without a backlog pulls many times a second, and each pull may
    wait a minute."""
    polls = long_polls(loop, lambda _: True)
    queue = FakeQueue()
    for _ in range(50):
        polls.hold(held_pull(queue, loop.time() + 60))
        queue.arrive()
        await turns(2)
    assert polls.count == 0
    assert not (polls._by_second)
    assert not (polls._held)
    assert not (polls._by_connection)


async def test_pulls_of_queues_that_nobody_may_pull_from_end_in_turns(loop: SteppedLoop) -> None:
    ended: list[HeldPull] = []
    polls = long_polls(loop, lambda _: pytest.fail("nothing came"), ended.append, share=3)
    queues = [FakeQueue(number) for number in range(4)]
    pulls = [held_pull(queue, loop.time() + 60) for queue in queues for _ in range(10)]
    for each in pulls:
        assert polls.hold(each)
    polls.end("U")
    await turns()
    assert ended == []
    polls.end("T", 1)
    while len(ended) < 30:
        before = len(ended)
        await turns(1)
        assert before < len(ended) + 1 <= before + 4
    assert ended == pulls[10:]
    assert [len(queue.watchers) for queue in queues] == [1, 0, 0, 0]
    polls.end("T")
    await turns(10)
    assert (len(ended), polls.count, polls._queues) == (40, 0, {})


async def test_pulls_that_are_no_longer_allowed_end_before_any_is_served(loop: SteppedLoop) -> None:
    served: list[HeldPull] = []
    failed: list[HeldPull] = []

    def check(pull: HeldPull) -> None:
        if pull in wrong:
            raise ValueError("not allowed")

    def serve(pull: HeldPull) -> bool:
        served.append(pull)
        return True

    polls = long_polls(loop, serve, fail=lambda pull, _: failed.append(pull), check=check, share=2)
    queue, deadline = FakeQueue(), loop.time() + 60
    pulls = [held_pull(queue, deadline) for _ in range(9)]
    for each in pulls:
        assert polls.hold(each)
    wrong = pulls[1::2]
    queue.arrive()
    polls.check_all()
    await turns(1)
    assert served == []
    await turns(20)
    assert failed == wrong
    assert served == pulls[::2]
    assert polls.count == 0
