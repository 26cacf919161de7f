"""Finding the delivered messages in a commitlog whose records do not name each other, as RocketMQ writes them.

The oracle goes through the history one event after the other with a list of waiting messages; the code matches in
batches, by sorting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.record import TRANSACTION_COMMIT, TRANSACTION_PREPARED
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.delivery import deliveries as module
from duemq.scheduler.delivery.deliveries import Deliveries
from duemq.storage.log.scan import Scanner
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import SimulatedFiles
from tests.unit.storage.conftest import make_store

HOST = b"\x7f\0\0\x01\0\0\x04\xd2"
HOST_V6 = bytes(15) + b"\x01\0\0\x04\xd2"
BORN_MS = 1_700_000_000_000


class Log:
    """A commitlog that a test writes record by record; each call gives the record's physical offset."""

    def __init__(self) -> None:
        self.store: MessageStore = make_store("/s", SimulatedFiles(), segment_size=8192)
        self.store.open()
        self.now_ms = BORN_MS

    def add(
        self,
        topic: str,
        text: str,
        queue_id: int = 0,
        *,
        body: bytes = b"x",
        born_ms: int = BORN_MS,
        retries: int = 0,
        sys_flag: int = 0,
        host: bytes = HOST,
        prepared: int = 0,
    ) -> int:
        appender = self.store.appender
        self.now_ms += 1
        appender.begin(self.now_ms)
        queue = self.store.ensure_queue(topic, queue_id)
        sys_flag |= 16 if len(host) == 20 else 0
        appender.add(queue, body, text.encode(), 0, born_ms, host, 0, sys_flag, retries, prepared)
        appender.commit()
        return appender.last_physical_offset

    def level(self, key: str, level: int = 1, **more: int) -> int:
        return self.add(SCHEDULE_TOPIC, f"DELAY\x01{level}\x02{text(key)}", level - 1, **more)  # type: ignore[arg-type]

    def timer(self, key: str, slot: int = 5, rolled: int = 0, **more: int) -> int:
        again = f"\x02TIMER_ROLL_TIMES\x01{rolled}" if rolled else ""
        return self.add(TIMER_TOPIC, f"TIMER_OUT_MS\x01{slot * 1000}\x02{text(key)}{again}", **more)  # type: ignore[arg-type]

    def deliver(self, key: str, kind: str = "DELAY\x011", **more: int) -> int:
        return self.add("orders", f"{kind}\x02{text(key)}", 3, **more)  # type: ignore[arg-type]

    def cancel(self, named: str, slot: int = 5) -> int:
        return self.add(TIMER_TOPIC, f"TIMER_OUT_MS\x01{slot * 1000}\x02TIMER_DEL_UNIQKEY\x01{named}\x02{text('c')}")

    def done(self) -> set[int]:
        """Physical offsets of the records that are done."""
        found = Deliveries(self.store.log)
        for record in Scanner(self.store.log, 0):
            found.look(record)
        found.finish()
        assert len(found.delivered) == len(set(found.delivered)), "told twice"
        return {*found.delivered, *found.withdrawn}


def text(key: str) -> str:
    return f"UNIQ_KEY\x01{key}\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"


@pytest.fixture
def log() -> Log:
    return Log()


def test_levels_and_timers_that_were_delivered(log: Log) -> None:
    first, second, third = log.level("a"), log.timer("b"), log.level("c")
    log.deliver("a")
    log.deliver("b", "TIMER_OUT_MS\x015000")
    assert log.done() == {first, second}
    log.deliver("c")
    assert log.done() == {first, second, third}


def test_each_delivery_ends_one_message(log: Log) -> None:
    """Each delivery ends one message, although consumers' retries repeat unique keys: a second delivery of one message
    does not end another."""
    first = log.level("a")
    log.deliver("a")
    log.deliver("a")
    second, third = log.level("a"), log.level("a")
    assert log.done() == {first}
    log.deliver("a")
    assert log.done() == {first, second}
    log.deliver("a")
    assert log.done() == {first, second, third}


@pytest.mark.parametrize(
    ("name", "value"), [("born_ms", BORN_MS + 1), ("retries", 1), ("sys_flag", TRANSACTION_PREPARED)]
)
def test_what_is_not_the_same_delivers_nothing(log: Log, name: str, value: int) -> None:
    """A record that differs from the waiting message delivers nothing: for example a copy that an application sent on
    with all properties has another producer's time."""
    log.level("a")
    log.deliver("a", "DELAY\x011", **{name: value})
    assert log.done() == set()


def test_a_message_in_another_queue_or_topic_delivers_nothing(log: Log) -> None:
    log.level("a")
    log.add("orders", f"DELAY\x011\x02{text('a')}".replace("\x013", "\x012"), 2)
    log.add("others", f"DELAY\x011\x02{text('a')}", 3)
    log.add("orders", text("a"), 3)
    assert log.done() == set()


def test_a_committed_transaction_with_a_delay(log: Log) -> None:
    first = log.level("a", sys_flag=TRANSACTION_COMMIT)
    log.deliver("a", sys_flag=TRANSACTION_COMMIT, prepared=1)
    assert log.done() == {first}


def test_without_a_unique_key_the_body_tells(log: Log) -> None:
    bare = "DELAY\x011\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
    first = log.add(SCHEDULE_TOPIC, bare, body=b"one")
    log.add(SCHEDULE_TOPIC, bare, body=b"two")
    log.add("orders", bare, 3, body=b"one")
    assert log.done() == {first}


def test_addresses_of_either_kind(log: Log) -> None:
    first = log.add(SCHEDULE_TOPIC, f"DELAY\x011\x02{text('a')}", host=HOST_V6)
    log.add("orders", f"DELAY\x011\x02{text('a')}", 3, host=HOST_V6)
    assert log.done() == {first}


def test_what_was_rolled_waits_by_its_last_record(log: Log) -> None:
    first, second, third = log.timer("a"), log.timer("a", rolled=1), log.timer("a", rolled=2)
    assert log.done() == {first, second}
    log.deliver("a", "TIMER_OUT_MS\x015000")
    assert log.done() == {first, second, third}


@pytest.mark.parametrize("named", ["orders+a", "a"])
def test_cancellations_count_in_their_slot(log: Log, named: str) -> None:
    first, other = log.timer("a", slot=5), log.timer("b", slot=5)
    cancel = log.cancel(named, slot=5)
    assert log.done() == {first, cancel}
    late = log.cancel("orders+b", slot=6)
    assert log.done() == {first, cancel, late}
    assert other not in log.done()


def test_our_own_deliveries_name_what_they_deliver(log: Log) -> None:
    """A delivery by duemq names its origin: in a store that both brokers had, of two records with one key the named one
    is done."""
    first = log.level("a")
    second = log.level("a")
    log.deliver("a", prepared=second)
    assert log.done() == {second}
    log.deliver("a")
    assert log.done() == {first, second}


def test_what_was_named_is_not_taken_for_the_next_one(log: Log) -> None:
    log.add("plain", "")  # the field means nothing if the record is at 0
    first = log.level("a")
    second = log.level("a")
    third = log.level("a")
    log.deliver("a", prepared=first)
    log.deliver("a")
    assert log.done() == {first, second}
    assert third not in log.done()


EVENTS = st.lists(
    st.tuples(st.sampled_from(("level", "timer", "deliver", "roll", "cancel")), st.sampled_from("abc")), max_size=40
)


@given(EVENTS, st.sampled_from([1, 2, 5, 1 << 16]))
def test_any_history_by_batches_of_any_size(events: list[tuple[str, str]], batch: int) -> None:
    log, waiting, done = Log(), list[tuple[str, int, bool]](), set[int]()
    cancels = list[str]()
    for what, key in events:
        if what == "level":
            waiting.append((key, log.level(key), False))
        elif what == "timer":
            waiting.append((key, log.timer(key), True))
        elif what == "cancel":
            done.add(log.cancel(f"orders+{key}"))
            cancels.append(key)
        else:
            at = log.deliver(key) if what == "deliver" else log.timer(key, rolled=1)
            ended = next((each for each in waiting if each[0] == key), None)
            if ended is not None:
                waiting.remove(ended)
                done.add(ended[1])
            if what == "roll":
                waiting.append((key, at, True))
    done |= {at for key, at, is_timer in waiting if is_timer and key in cancels}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BATCH", batch)
        assert log.done() == done
