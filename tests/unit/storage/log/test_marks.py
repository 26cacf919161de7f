"""Marks: seen at once, and in the files only after a job has written them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duemq.storage.log.marks import Marks
from duemq.storage.log.segments import Segments
from tests.crash.simulated_files import SimulatedFiles

UNIT = 20
AT = 8
PER_FILE = 7
FILE = PER_FILE * UNIT
COUNT = 3 * PER_FILE


def filled() -> Segments:
    segments = Segments(SimulatedFiles(), "/s/q", FILE)
    segments.ensure(0)
    while segments.end < COUNT * UNIT:
        segments.ensure(segments.end)
    segments.write(0, bytes(range(1, 1 + UNIT)) * COUNT)
    return segments


def contents(segments: Segments) -> bytes:
    return segments.read(segments.begin, segments.end - segments.begin)


def position(number: int) -> int:
    return number * UNIT + AT


ACTIONS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, COUNT - 1), st.binary(min_size=4, max_size=4)),
    st.tuples(st.just("plan"), st.integers(0, COUNT)),
    st.tuples(st.just("begin")),
    st.tuples(st.just("run")),
    st.tuples(st.just("drop"), st.integers(0, 2)),
)


@given(st.lists(ACTIONS, max_size=30), st.integers(0, COUNT), st.integers(0, COUNT))
def test_readers_see_marks_whatever_the_files_have(actions: list[tuple[object, ...]], start: int, count: int) -> None:
    segments = filled()
    marks = Marks(segments)
    seen, there = bytearray(contents(segments)), bytearray(contents(segments))
    planned: dict[int, bytes] = {}
    waiting: dict[int, bytes] = {}
    begun: set[int] = set()
    job = None
    for action in actions:
        match action:
            case ("set", int(number), bytes(mark)):
                marks.set(position(number), mark)
                seen[position(number) : position(number) + 4] = mark
                waiting[number] = mark
            case ("begin",):
                marks.begin()
                begun = set(waiting)
            case ("plan", int(end)):
                job = marks.plan(end * UNIT)
                planned = {number: waiting[number] for number in begun & waiting.keys() if number < end}
            case ("run",) if job is not None:
                job()
                for number, mark in planned.items():
                    there[position(number) : position(number) + 4] = mark
                    if waiting.get(number) == mark:
                        del waiting[number]
                        begun.discard(number)
                assert bool(marks) == bool(waiting)
                job, planned = None, {}
            case ("drop", int(files)) if job is None:
                segments.drop_before(min(files, 2) * FILE)
        begin = segments.begin
        assert contents(segments) == there[begin:], "nothing is in the files but by a job"
        first = max(start * UNIT, begin)
        data = segments.read(first, count * UNIT)
        assert marks.over(first, data) == seen[first : first + len(data)]


def test_a_mark_that_the_disk_does_not_take_waits_on() -> None:
    segments = filled()
    marks = Marks(segments)
    marks.set(position(3), b"mark")
    marks.begin()
    job = marks.plan(COUNT * UNIT)
    assert marks
    del job  # the job failed
    marks.set(position(4), b"more")
    marks.begin()
    marks.plan(COUNT * UNIT)()
    assert not marks
    assert segments.read(position(3), 4) + segments.read(position(4), 4) == b"markmore"


def test_a_mark_that_is_set_again_while_a_job_writes_the_first_one() -> None:
    segments = filled()
    marks = Marks(segments)
    marks.set(position(3), b"mark")
    marks.begin()
    job = marks.plan(COUNT * UNIT)
    marks.set(position(3), b"next")
    job()
    assert marks
    assert marks.over(position(3), segments.read(position(3), 4)) == b"next"
    marks.begin()
    marks.plan(COUNT * UNIT)()
    assert not marks
    assert segments.read(position(3), 4) == b"next"
