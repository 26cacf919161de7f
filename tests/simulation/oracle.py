"""The promises of a life, checked against the clients' requests and answers, the messages consumers saw, and the
records on the disk at the end. The oracle knows nothing of the broker's code; it reads records by RocketMQ's layout."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from duemq.protocol.records import properties
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.config_file import decode_table
from duemq.storage.log.scan import Scanner
from duemq.storage.store import MessageStore
from tests.simulation import audit
from tests.simulation.clients import Attempt
from tests.simulation.groups import PushConsumer
from tests.simulation.life import Life
from tests.simulation.script import QUEUES
from tests.simulation.world import ROOT
from tests.support.store_problems import problems

_STORED = 0
_SLEWED_SECONDS = 0.5
"""Changes of the clock up to these seconds look to the broker like a clock that was slowed down or sped up."""
_STORED_MAYBE = (10, None)
_MOST_WORK = (4, 5000, 10)
_MOST_OBJECT_BYTES = 650_000
_MOST_ARRAY_BYTES = 700_000


@dataclass
class Stored:
    """A record of a topic that consumers read."""

    topic: str
    queue: int
    offset: int
    body: bytes
    store_timestamp: int
    origin: int
    level: int


def complaints(life: Life) -> Iterator[str]:
    """Yield a sentence for each broken promise."""
    yield from life.world.wrong
    yield from life.complaints
    for failure in life.world.loop.failures:
        if "was destroyed but it is pending" not in failure and "Killed()" not in failure:
            yield failure
    for path, times in life.world.disk.loop_waits.items():
        yield f"the event loop waited {times} times for the disk to read {path}"
    if life.world.broker is not None:
        yield "the last broker did not end"
    yield from _of_work(life)
    yield from _of_memory(life)
    yield from _of_consumers(life)
    yield from audit.complaints(life)
    store, _ = audit.open_store(life.world.config, life.world.disk)
    yield from problems(store, life.deleted)
    yield from _times_ascend(life, store)
    stored = list(_stored(store))
    yield from _once(stored)
    by_body: defaultdict[bytes, list[Stored]] = defaultdict(list)
    for each in stored:
        by_body[each.body].append(each)
    # Retention may remove even young records when the disk is full: a message that was seen counts as stored.
    seen = {each.body for consumer in life.consumers for each in consumer.seen.values()}
    for attempt in life.attempts:
        yield from _of_attempt(life, attempt, by_body.get(attempt.body, []), was_seen=attempt.body in seen)
    yield from _kept_their_delay(life)
    yield from _replaced(life, by_body)
    yield from _read_wholly(life, store, stored)
    yield from _in_order(life, stored)
    for group in life.groups:
        yield from _of_group(life, store, group, stored)
        yield from _of_routes(life, group)
    store.abandon()


def _of_work(life: Life) -> Iterator[str]:
    """Check that the rest of the work takes operations in proportion to the messages and the time that passes. In some
    hundred lives there were at most 1.1 operations, 1,300 bytes and 2.7 pieces per message and per 0.1 s."""
    share = len(life.attempts) + life.calm_seconds * 10 + 10
    for name, count, most in zip(
        ("operations", "bytes read", "pieces of work"), life.calm_work, _MOST_WORK, strict=True
    ):
        if count > most * share:
            yield f"{count} {name} after everything was well, for {len(life.attempts)} messages: over {most} each"


def _of_memory(life: Life) -> Iterator[str]:
    """Check that a broker's memory does not depend on its past once all is delivered: in some hundred lives at most 530
    kB of objects, and arrays of 520 kB."""
    arrays = life.held["numpy.ndarray"]
    objects = life.held.total() - arrays
    if objects > _MOST_OBJECT_BYTES or arrays > _MOST_ARRAY_BYTES:
        most = ", ".join(f"{name} {size}" for name, size in life.held.most_common(6))
        yield f"the broker holds {objects} bytes and arrays of {arrays}, and nothing waits: {most}"


def _stored(store: MessageStore) -> Iterator[Stored]:
    for found in Scanner(store.log, store.log.begin):
        topic = found.topic.decode()
        if topic in ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"):
            continue
        message = store.message_at(found.physical_offset, found.size)
        assert message is not None
        level = properties.get(message.properties_text, properties.DELAY)
        yield Stored(
            topic,
            found.queue_id,
            found.queue_offset,
            message.body,
            found.store_timestamp,
            found.prepared_transaction_offset,
            int(level) if level else 0,
        )


def _times_ascend(life: Life, store: MessageStore) -> Iterator[str]:
    """Check that no record is stored before the one that it follows, as long as the clock is not set: searches rely on
    this order."""
    if life.steps:
        return
    for before, after in pairwise(Scanner(store.log, store.log.begin)):
        if after.store_timestamp < before.store_timestamp:
            back = before.store_timestamp - after.store_timestamp
            yield f"the record at {after.physical_offset} is stored {back} ms before the one that it follows"


def _once(stored: list[Stored]) -> Iterator[str]:
    origins = Counter(each.origin for each in stored if each.origin)
    for origin, count in origins.items():
        if count > 1:
            which = next(each for each in stored if each.origin == origin)
            yield f"the message scheduled at {origin}, {_name(which.body)}, was delivered {count} times"


def _name(body: bytes) -> str:
    return body.split(b"|")[0].decode()


def _of_attempt(life: Life, attempt: Attempt, found: list[Stored], *, was_seen: bool) -> Iterator[str]:
    name = f"message {_name(attempt.body)}"
    for each in found:
        if (each.topic, each.queue) != (attempt.topic, attempt.queue):
            yield f"{name} is for {attempt.topic} {attempt.queue}, and was delivered to {each.topic} {each.queue}"
    if len(found) > 1:
        yield f"{name} was delivered {len(found)} times"
    if attempt.code not in (_STORED, *_STORED_MAYBE) and found:
        yield f"{name} was refused ({attempt.code}), and delivered"
    outcomes = [change.outcome for change in attempt.changes]
    told_cancelled = any(outcome in ("CANCELLED", "CANCELLED OR BEFORE", "ALREADY_CANCELLED") for outcome in outcomes)
    may_be_cancelled = told_cancelled or any(
        change.how == "cancel" and change.outcome is None for change in attempt.changes
    )
    came = bool(found) or was_seen
    if attempt.code == _STORED and not came and not may_be_cancelled and not _may_be_gone(life, attempt):
        yield f"{name} was acknowledged, and never delivered"
    if attempt.code != _STORED:
        return
    if told_cancelled and came:
        yield f"{name} was told to be cancelled, and delivered: {outcomes}"
    if (
        "ALREADY_CANCELLED" in outcomes
        and not any(change.how == "cancel" for change in attempt.changes)
        and not _may_be_gone(life, attempt)
    ):
        yield f"{name} was told to be cancelled already, and nobody did: {outcomes}"
    if "ALREADY_DELIVERED" in outcomes and not came and attempt.topic not in life.deleted:
        yield f"{name} was told to be delivered already, and never was: {outcomes}"
    if "NEVER_EXISTED" in outcomes:
        yield f"{name} was acknowledged, and told never to have existed: {outcomes}"
    yield from _not_afterwards(life, attempt, found, name)
    yield from _not_early(life, attempt, found, name)


def _not_afterwards(life: Life, attempt: Attempt, found: list[Stored], name: str) -> Iterator[str]:
    """Check that no message is delivered after the broker said that it no longer waits."""
    if life.steps:
        return
    for change in attempt.changes:
        if change.outcome not in ("ALREADY_DELIVERED", "NO_LONGER_WAITS"):
            continue
        told_ms = int((change.answered - life.world.loop.time()) * 1000) + life.world.clock.now_ms()
        for each in found:
            if each.store_timestamp > told_ms + 1:
                late = each.store_timestamp - told_ms
                yield f"{name} was told not to wait ({change.outcome}), and was delivered {late} ms after that"


def _may_be_gone(life: Life, attempt: Attempt) -> bool:
    """Whether the message may be missing for another reason: its topic was deleted, or a later message of its key
    replaced it."""
    if attempt.topic in life.deleted:
        return True
    if attempt.key is None:
        return False
    return any(
        other.key == attempt.key
        and other.topic == attempt.topic
        and other is not attempt
        and other.code in (0, 10, None)
        for other in life.attempts
        if other.answered >= attempt.asked
    )


def _not_early(life: Life, attempt: Attempt, found: list[Stored], name: str) -> Iterator[str]:
    if life.steps:
        return
    asked_ms = int((attempt.asked - life.world.loop.time()) * 1000) + life.world.clock.now_ms()
    if attempt.level:
        promised = asked_ms + min(DelayLevels(table).delay_ms(attempt.level) for table in life.tables)
    elif attempt.deliver_ms is not None:
        promised = attempt.deliver_ms
    else:
        return
    for change in attempt.changes:
        if change.how != "cancel":
            changed_ms = int((change.asked - life.world.loop.time()) * 1000) + life.world.clock.now_ms()
            promised = min(promised, change.deliver_ms if change.deliver_ms is not None else changed_ms)
    for each in found:
        if each.store_timestamp < promised - 1:
            yield f"{name} was promised for {promised}, and delivered {promised - each.store_timestamp} ms early"


def _kept_their_delay(life: Life) -> Iterator[str]:
    """Check that no consumer gets a message of a level before its delay is over by a clock that is never set, even when
    the wall clock was set. This relies on the checkpoint: it excludes a checkpoint by RocketMQ or from before a reboot,
    and between two checkpoints only the sum of the clock's changes is known."""
    if len(life.steps) != 1 or life.power_cuts or any(action.kind == "visit" for action in life.script.actions):
        return
    delays = [DelayLevels(table) for table in life.tables]
    attempts = {each.body: each for each in life.attempts if each.level and not each.changes}
    for consumer in life.consumers:
        for _, seen in consumer.history:
            attempt = attempts.get(seen.body)
            if attempt is None:
                continue
            early = attempt.asked + min(table.delay_ms(attempt.level) for table in delays) / 1000 - seen.at
            if early > 0.002 + _SLEWED_SECONDS:
                yield f"message {_name(seen.body)} came {early:.3f} s early, by a clock never set"


def _replaced(life: Life, by_body: dict[bytes, list[Stored]]) -> Iterator[str]:
    """Check that of two messages of one key, the second sent when the first was stored and waiting, the first is never
    delivered."""
    if life.steps or life.policies or life.deleted:
        return
    keyed = [each for each in life.attempts if each.key is not None and each.code == 0 and not each.changes]
    for first in keyed:
        for second in keyed:
            if (first.topic, first.key) != (second.topic, second.key) or first.answered >= second.asked:
                continue
            told_ms = int((second.answered - life.world.loop.time()) * 1000) + life.world.clock.now_ms()
            if (first.deliver_ms or 0) > told_ms + 1 and by_body.get(first.body):
                yield f"message {_name(first.body)} was replaced by {_name(second.body)}, and delivered"


def _of_consumers(life: Life) -> Iterator[str]:
    for consumer in life.consumers:
        yield from consumer.conflicts
        if life.power_cuts or consumer.topic in life.deleted:
            continue
        first: dict[int, bytes] = {}
        for offset, seen in consumer.history:
            if offset < 0:
                yield f"{consumer.topic} {consumer.queue} lost what was seen: it ends at {seen.store_timestamp}"
            elif first.setdefault(offset, seen.body) != seen.body:
                names = _name(first[offset]), _name(seen.body)
                where = f"{consumer.topic} {consumer.queue}"
                yield f"offset {offset} of {where} was given to {names[0]}, then to {names[1]}"


def _read_wholly(life: Life, store: MessageStore, stored: list[Stored]) -> Iterator[str]:
    """Check that at the end consumers have read everything in the queues."""
    for consumer in life.consumers:
        if consumer.topic in life.deleted:
            continue
        queue = store.queue(consumer.topic, consumer.queue)
        end = queue.next_offset if queue is not None else 0
        place = consumer.topic, consumer.queue
        mine = {each.offset: each.body for each in stored if (each.topic, each.queue) == place}
        seen = {offset: each.body for offset, each in consumer.seen.items() if offset < end}
        for offset, body in mine.items():
            if seen.get(offset) != body and not life.power_cuts:
                yield f"{place} has {_name(body)} at {offset}, and its consumer did not see it"
                break
        if consumer.offset != end:
            yield f"the consumer of {consumer.topic} {consumer.queue} is at {consumer.offset} of {end}"


def _of_group(life: Life, store: MessageStore, group: PushConsumer, stored: list[Stored]) -> Iterator[str]:
    """Check that a group gets every message, is never told to skip one, and at the end has reached the end of its
    queues."""
    if group.topic in life.deleted or life.power_cuts:
        return
    for each in group.resumed:
        if each.offset > max(0, each.highest) and not any(at <= each.at for at in group.resets):
            yield f"{group.group} was told to go on at {each.offset} of {each.queue}, and had come to {each.highest}"
        if each.is_same_story and each.committed > each.offset and not life.has_disk_faults:
            yield (
                f"{group.group} was told to go on at {each.offset} of {each.queue} after a stop, and had committed "
                f"{each.committed}"
            )
    for message in stored:
        if message.topic == group.topic and message.body not in group.seen and not group.resets:
            yield f"{group.group} never got {_name(message.body)}"
    path = f"{ROOT}/config/consumerOffset.json"
    data = life.world.disk.names.get(path)
    table = decode_table(data.read(0, data.size), path)["offsetTable"] if data is not None else {}
    for queue in range(QUEUES):
        found = store.queue(group.topic, queue)
        end = found.next_offset if found is not None else 0
        if end and group.offsets.get(queue) != end:
            yield f"{group.group} is at {group.offsets.get(queue)} of {end} in queue {queue}"
        kept = table.get(f"{group.topic}@{group.group}", {}).get(str(queue), 0)
        if kept != end:
            yield f"{group.group} has committed {end} of queue {queue}, and the table has {kept} after the last stop"


def _of_routes(life: Life, group: PushConsumer) -> Iterator[str]:
    """Check that the name server knows a topic once a client has been told that a message of it is stored."""
    if group.topic in life.deleted:
        return
    told = min((each.answered for each in life.attempts if each.topic == group.topic and each.code == 0), default=None)
    for route in group.routes:
        if told is not None and route.asked > told and route.code != 0:
            yield f"{group.topic} has messages, and the name server says {route.code}"


def _in_order(life: Life, stored: list[Stored]) -> Iterator[str]:
    """Check that messages of one level are delivered in the order in which they were scheduled."""
    if life.steps or len(life.tables) > 1:
        return
    last: dict[tuple[str, int, int], tuple[int, Stored]] = {}
    changed = {attempt.body for attempt in life.attempts if attempt.changes}
    for each in stored:
        if not each.level or not each.origin or each.body in changed:
            continue
        key = each.topic, each.queue, each.level
        before = last.get(key)
        if before is not None and each.origin < before[0]:
            earlier = _name(before[1].body)
            yield f"{_name(each.body)} of level {each.level} came after {earlier}, though scheduled before"
        last[key] = each.origin, each
