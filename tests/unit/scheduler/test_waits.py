"""The waiting messages by a note, the timer log and later records of any history, compared with those by all records
alone.

Histories follow ARCHITECTURE.md's rules: the writes when a message is sent, put into the wheel, moved, withdrawn and
delivered (13, 14, 18, 20), the notes of a checkpoint (15, 19), and the files after a kill or a power cut (22). The
oracle is the plainest reading of all records: a scheduled message waits unless a record names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from duemq.scheduler import waiting as waits
from duemq.scheduler.levels.runs import Run
from duemq.scheduler.timers.files.small_files import StartFacts, TimerCheck, TimerNote
from duemq.scheduler.timers.files.unit import DELETE, NORMAL, ROLL, UNIT, UNIT_SIZE, WITHDRAWN, seconds_of, withdrawn
from duemq.scheduler.timers.index.sorted_offsets import has, indices_of, is_among, union
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import PADDING_SIZE, WITHDRAWN_SIZE

RECORD = 100
START_MS = 50_000


@dataclass(frozen=True)
class Record:
    offset: int
    kind: str
    """timer, delete, or delivery."""
    due_ms: int = 0
    origin: int = -1
    stored_ms: int = 0


@dataclass(frozen=True)
class Note:
    """The checkpoint's note of a history, see `timers.files.small_files`."""

    end: int = 0
    second: int = START_MS // 1000 - 1
    since: int = 0
    log_since: int = 0
    log_end: int = 0
    enqueued: int = 0
    found: StartFacts = field(default_factory=StartFacts)


@dataclass
class History:
    records: list[Record] = field(default_factory=list)
    now_ms: int = START_MS
    units: list[tuple[int, int]] = field(default_factory=list)
    """Record and second of each unit of the timer log."""
    marked: set[int] = field(default_factory=set)
    """Positions of withdrawn units, as readers see them."""
    note: Note = Note()
    now: Note = Note()
    """The note that a checkpoint would make now."""

    # --- state

    @property
    def end(self) -> int:
        return len(self.records) * RECORD

    def truth(self) -> set[int]:
        named = {record.origin for record in self.records}
        return {record.offset for record in self.records if record.kind == "timer"} - named

    def newest(self, physical: int) -> int | None:
        """The position of a message's last unit."""
        at = [number * UNIT_SIZE for number, unit in enumerate(self.units) if unit[0] == physical]
        return at[-1] if at else None

    def here(self) -> list[int]:
        """Messages that wait in the slot of the current second."""
        places = {each: self.newest(each) for each in sorted(self.truth())}
        return [
            each
            for each, place in places.items()
            if place is not None and self.units[place // UNIT_SIZE][1] == self.now.second
        ]

    def queue(self) -> Any:
        rows = [record for record in self.records if record.kind != "delivery"]
        units = np.zeros(len(rows), UNITS)
        for at, record in enumerate(rows):
            code = 77 if record.kind == "delete" else (1 << 40) + record.due_ms
            units[at] = (record.offset, RECORD, code)
        return units

    def log(self, start: int, end: int) -> tuple[int, Any]:
        units = np.zeros((end - start) // UNIT_SIZE, UNIT)
        for at in range(len(units)):
            position = start + at * UNIT_SIZE
            physical, second = self.units[position // UNIT_SIZE]
            magic = NORMAL | (WITHDRAWN if position in self.marked else 0)
            units[at] = (UNIT_SIZE, -1, magic, second * 1000, 0, physical, RECORD, 0, 1)
        return start, units

    # --- events

    def append(self, kind: str, due_ms: int = 0, origin: int = -1) -> int:
        self.records.append(Record(self.end, kind, due_ms, origin, self.now_ms))
        return self.end - RECORD

    def put(self, physical: int, second: int) -> None:
        self.units.append((physical, max(second, self.now.second)))

    def send(self, number: int) -> None:
        self.append("timer", self.now_ms + number * 250)

    def enqueue(self, number: int) -> None:
        for unit in self.queue()[self.now.enqueued : self.now.enqueued + number + 1]:
            physical = int(unit["physical_offset"])
            if physical in self.truth():
                self.put(physical, (self.records[physical // RECORD].due_ms - 1) // 1000)
            self.now = replace(self.now, enqueued=self.now.enqueued + 1)
        if self.now.enqueued >= self.replayed_to:
            # A message withdrawn in the wheel has its mark.
            self.now = replace(self.now, found=self.now.found._replace(withdrawn=StartFacts().withdrawn))

    def deliver(self, number: int) -> None:
        due = [each for each in self.here() if self.records[each // RECORD].due_ms <= self.now_ms]
        for physical in due[: number + 1]:
            self.append("delivery", origin=physical)

    def move(self, number: int) -> None:
        """Give due messages another slot by a policy, or this one again."""
        if self.now_ms > self.now.second * 1000:
            for physical in self.here()[: number + 1]:
                self.put(physical, self.now.second + number)

    def withdraw(self, number: int) -> None:
        """Cancel a message or append it once more; it is in the wheel by then."""
        left = sorted(self.truth())
        if left:
            physical = left[number % len(left)]
            while self.newest(physical) is None:
                self.enqueue(0)
            self.append(("delete", "timer")[number % 2], self.now_ms + 1000, physical)
            place = self.newest(physical)
            assert place is not None
            self.marked.add(place)

    def turn(self, _: int) -> None:
        frontier = (self.now_ms - 1) // 1000
        if not self.here() and self.now.second < frontier:
            waiting = [second for each in self.truth() for second in [self.slot(each)] if second > self.now.second]
            second = min([frontier, *waiting])
            found = self.now.found._replace(moved=StartFacts().moved, moved_by=StartFacts().moved_by)
            end = len(self.units) * UNIT_SIZE
            self.now = replace(self.now, second=second, since=self.end, log_since=end, found=found)

    def go_on(self, number: int) -> None:
        """Let some time pass, and deliver the due messages."""
        self.send(number % 4)
        self.enqueue(9)
        self.wait(number)
        self.turn(0)
        self.deliver(number)

    def withdraw_here(self, _: int) -> None:
        """Withdraw a message of the current second that was moved within it before."""
        for physical in self.here()[:1]:
            self.put(physical, self.now.second)
            self.withdraw(sorted(self.truth()).index(physical))

    def slot(self, physical: int) -> int:
        place = self.newest(physical)
        return self.units[place // UNIT_SIZE][1] if place is not None else 2**40

    def wait(self, number: int) -> None:
        self.now_ms += number * 300

    def set_back(self, number: int) -> None:
        self.now_ms -= number * 300

    def checkpoint(self, _: int) -> None:
        self.note = self.now = replace(self.now, end=self.end, log_end=len(self.units) * UNIT_SIZE)
        self.noted_marks = set(self.marked)

    noted_marks: set[int] = field(default_factory=set)
    replayed_to: int = 0

    def crash(self, number: int) -> None:
        """Kill, or cut the power: then records behind the checkpoint may be gone. The start goes by the note."""
        if number % 2:
            del self.records[max(self.note.end // RECORD, len(self.records) - number) :]
        withdrawn = {r.origin for r in self.records[self.note.end // RECORD :] if r.kind != "delivery"}
        late = {at for at in self.marked - self.noted_marks if self.units[at // UNIT_SIZE][0] in withdrawn}
        found = self.found()
        del self.units[self.note.log_end // UNIT_SIZE :]
        # Marks of durable records may have been written; the others are set again.
        self.marked = self.noted_marks | {at for at in late if at < self.note.log_end}
        self.now = replace(self.note, since=self.end, log_since=self.note.log_end, found=found)
        self.replayed_to = len(self.queue())
        for physical in withdrawn:
            if (place := self.newest(physical)) is not None:
                self.marked.add(place)

    # --- the question

    def found(self) -> StartFacts:
        since = [record for record in self.records if record.offset >= self.note.since]
        delivered = [np.array([r.origin for r in since if r.kind == "delivery"], np.int64)]
        withdrawn = [np.array([r.origin for r in since if r.kind != "delivery" and r.origin >= 0], np.int64)]
        newest_ms = max((r.stored_ms for r in since if r.kind == "delivery"), default=0)
        note = self.note
        found = waits.found_since(
            note.second, note.found, delivered=delivered, withdrawn=withdrawn, newest_ms=newest_ms, end=self.end
        )
        return waits.with_moved(found, note.second, note.found, [self.log(note.log_since, note.log_end)])

    def told(self) -> set[int]:
        """Return the waiting messages by the note, the timer log up to the noted end, and the records since."""
        note, found = self.note, self.found()
        seen = self.marked
        # Marks behind the checkpoint need not be in the file.
        self.marked = self.noted_marks
        position, units = self.log(0, note.log_end)
        self.marked = seen
        physical = units["physical_offset"].astype(np.int64)
        positions, seconds = position + np.arange(len(units)) * UNIT_SIZE, seconds_of(units)
        due = units["due_ms"].astype(np.int64)
        kept = waits.left_of(physical, positions, units["magic"], due, seconds, noted=note.second, found=found).kept
        kept &= waits.is_live(units, seconds, note.second) & ~is_among(physical, found.withdrawn)
        queue = self.queue()[note.enqueued :]
        behind = queue["physical_offset"][waits.is_behind(queue, found)]
        in_wheel = physical[kept].tolist()
        assert len(in_wheel) == len(set(in_wheel)), "each message has one unit"
        assert not set(in_wheel) & set(behind.tolist())
        return set(in_wheel) | set(behind.tolist())


DEEDS = (
    "send",
    "enqueue",
    "deliver",
    "move",
    "withdraw",
    "turn",
    "go_on",
    "go_on",
    "wait",
    "set_back",
    "withdraw_here",
)
WITHDRAWN_ONCE_MOVED = (
    *("send", "send", "enqueue", "wait", "turn", "withdraw_here"),
    *("checkpoint", "crash", "enqueue", "checkpoint", "crash"),
)
"""A message that got another unit in its second, and then was withdrawn: the first unit stays without a mark."""
steps = st.lists(
    st.tuples(st.sampled_from([*DEEDS, *DEEDS, "checkpoint", "crash", "checkpoint", "crash"]), st.integers(0, 9)),
    min_size=30,
    max_size=90,
)


@given(steps)
@example([(deed, 9 if deed == "enqueue" else 4 if deed == "wait" else 0) for deed in WITHDRAWN_ONCE_MOVED])
def test_any_history(deeds: list[tuple[str, int]]) -> None:
    history = History()
    for deed, number in deeds:
        getattr(history, deed)(number)
        if deed in ("checkpoint", "crash"):
            assert history.told() == history.truth(), (deed, number)
    assert history.told() == history.truth()


# --- the rules one by one


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), min_size=1, max_size=4),
    st.lists(st.integers(0, 60), max_size=30),
)
def test_what_cursors_have_passed(drawn: list[tuple[int, int]], asked: list[int]) -> None:
    starts = sorted({start for start, _ in drawn})
    runs = [Run(start, start + length) for start, (_, length) in zip(starts, drawn, strict=False)]
    found = waits.is_passed(runs, np.array(asked, np.int64)).tolist()
    for offset, is_done in zip(asked, found, strict=True):
        mine = [one for one in runs if one.start <= offset]
        assert is_done == (not mine or offset < mine[-1].cursor)
        assert bool(waits.is_passed(runs, offset)) == is_done
    assert not waits.is_passed([], np.array(asked, np.int64)).any()


def test_units_of_queues_that_stand_for_no_message() -> None:
    sizes = np.array([0, WITHDRAWN_SIZE, 91, PADDING_SIZE])
    assert waits.is_message(sizes).tolist() == [False, False, True, False]
    units = np.array([(0, 100, 77), (0, 100, 2**40), (0, PADDING_SIZE, 2**40), (0, 1, 77)], UNITS)
    assert waits.is_behind(units, StartFacts()).tolist() == [False, True, False, False]
    assert waits.is_told_by_record(units).tolist() == [True, False, False, False]


def test_units_that_delete() -> None:
    magic = np.array([NORMAL, NORMAL | DELETE, NORMAL | DELETE | ROLL, NORMAL | DELETE | WITHDRAWN, NORMAL | WITHDRAWN])
    assert waits.is_deletion(magic).tolist() == [False, True, True, False, False]
    units = np.zeros(len(magic), UNIT)
    units["magic"] = magic
    assert waits.is_live(units, np.full(len(magic), 5), 5).tolist() == [True, False, False, False, False]
    assert not waits.is_live(units, np.full(len(magic), 4), 5).any()


def test_units_that_are_withdrawn_or_superseded_are_done_with() -> None:
    """Units that are withdrawn or superseded, also deleting ones, do not wait."""
    magic = np.array([NORMAL, NORMAL | DELETE, NORMAL | DELETE | WITHDRAWN, NORMAL | WITHDRAWN, NORMAL | DELETE])
    none, due = np.zeros(5, np.int64), np.array([0, 0, 0, 5000, 5000])
    left = waits.left_of(none, none, magic, due, 5, noted=5, found=StartFacts())
    assert left.kept.tolist() == [True, True, False, False, False]


def test_what_the_commitlog_lost_is_no_more() -> None:
    """Records that the commitlog lost are forgotten, since other messages will get their offsets."""
    before = StartFacts(done=np.array([300, 900]), withdrawn=np.array([900]))
    found = waits.found_since(
        5, before, delivered=[np.array([100, 1000])], withdrawn=[np.array([400])], newest_ms=0, end=900
    )
    assert (found.done.tolist(), found.withdrawn.tolist()) == ([100, 300], [400])


def test_where_rocketmq_goes_on() -> None:
    """RocketMQ goes on behind the last unit's message, but not further than the known progress of the master, as its
    broker does."""
    check = TimerCheck(read_ms=12_345, queue_offset=7, master_queue_offset=9)
    assert waits.second_of(check) == 12
    assert [waits.enqueued_to(check, last) for last in (None, 8, 20)] == [7, 8, 9]
    assert waits.runs_of_table({2: 5}) == {2: [Run(0, 5)]}


@pytest.mark.parametrize(
    ("position", "begin", "end", "link", "is_whole"),
    [
        (0, 0, 0, 2**62, True),
        (5200, 0, 0, 2**62, False),
        (104, 0, 104, 0, True),
        (104, 0, 52, 0, False),
        (104, 0, 208, 52, True),
        (5200, 0, 5148, 0, True),  # the file is full
        (5200, 0, 5096, 0, False),
        (10_400, 5200, 10_400, 5200, True),
        (10_400, 5200, 10_400, 52, False),  # the slot had units in a file that is gone
    ],
)
def test_a_timer_log_that_has_not_what_rocketmq_put_into_it_is_not_gone_by(
    position: int, begin: int, end: int, link: int, *, is_whole: bool
) -> None:
    check = TimerCheck(log_position=position)
    assert waits.is_covering(check, begin, end, 5200, [2**62, link]) is is_whole


def test_what_units_of_slots_to_come_link_to() -> None:
    units = np.zeros(4, UNIT)
    units["previous"] = [-1, 104, 52, 0]
    seconds = np.array([5, 6, 5, 4])
    assert [waits.first_link(units, seconds, second) for second in (4, 5, 6, 7)] == [0, 52, 104, 2**62]


def logged(*magic: int) -> Any:
    units = np.zeros(len(magic), UNIT)
    units["size"], units["magic"] = UNIT_SIZE, magic
    units["physical_offset"] = np.arange(len(magic)) * 100
    return units


def test_whether_a_timer_log_is_the_one_that_was_noted() -> None:
    """A timer log is the noted one with or without marks set since; a mark without a cause, a missing file or a changed
    byte is damage."""
    noted = waits.LogCheck(520, {}, np.array([], np.int64))
    noted.add(0, logged(NORMAL, NORMAL))

    def trouble(units: Any, gone: list[int]) -> str | None:
        check = waits.LogCheck(520, noted.sums.by_file, np.array(gone, np.int64))
        if len(units):
            check.add(0, units)
        return check.trouble

    assert trouble(logged(NORMAL, NORMAL), []) is None
    assert trouble(logged(NORMAL, NORMAL), [100]) is None
    assert trouble(logged(NORMAL, withdrawn(NORMAL)), [100]) is None
    assert trouble(logged(NORMAL, withdrawn(NORMAL | ROLL)), [100]) is None
    assert "checksum is wrong" in (trouble(logged(NORMAL, withdrawn(NORMAL)), [0]) or "")
    assert "checksum is wrong" in (trouble(logged(NORMAL), []) or "")
    assert "is missing" in (trouble(logged(), []) or "")


def test_whether_a_timer_log_has_what_was_noted() -> None:
    note = TimerNote(5, 0, 104, 208, 0, 0, 0, {})
    there = [(0, 520), (104, 208), (156, 520), (0, 156)]
    assert [waits.is_covered(note, *each) for each in there] == [True, True, False, False]


# --- membership


@given(st.sets(st.integers(-5, 40)), st.lists(st.integers(-5, 40)))
def test_membership(there: set[int], asked: list[int]) -> None:
    found, values = np.array(sorted(there), np.int64), np.array(asked, np.int64)
    assert is_among(values, found).tolist() == [value in there for value in asked]
    assert [has(found, value) for value in asked] == [value in there for value in asked]
    at, known = indices_of(values, found)
    assert found[at[known]].tolist() == values[known].tolist()
    assert union([values, found]).tolist() == sorted(there | set(asked))
