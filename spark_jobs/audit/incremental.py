"""A run that reads what came since the last one, and finds what one finds that reads everything.

The commitlog only grows, so all of its ranges but the last are read once (`kept`). What was matched in them is in two
parts: groups that are closed, of which there are figures and the hashes of their messages; and groups with a message
that has no delivery, which are kept as they are. A run

    reads the ranges that are new                     -> WAITS and DONE
    adds the whole ones to the open groups            -> more that is closed; that is kept
    adds the last range, of which the next run will see more    -> the figures of now

A group that is closed stays so unless a new record is of it: a second delivery, or the same message sent once more.
Then, and where the log has lost its first files, progress went back or a curve has another step, all is matched anew,
from what is kept of the ranges. Nothing depends on which way it went.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from duemq.spark_jobs.analyse.usage import RangeUsage, Usage
from duemq.spark_jobs.audit import kept
from duemq.spark_jobs.audit.cases import (
    AHEAD,
    CLOSED,
    HASHES,
    Found,
    Left,
    Matching,
    RangeFound,
    ahead_of,
    cases_without,
    closed_figures,
    find,
    is_among,
    match_by_origin,
    read_range,
    settle,
    unclaimed,
)
from duemq.spark_jobs.audit.events import DELIVERED, DONE, WAITS, are_passed
from duemq.spark_jobs.audit.figures import Figures, again_of
from duemq.spark_jobs.audit.kept import Bucket, Folder, KeptRange, Manifest, Matches, Ref
from duemq.spark_jobs.audit.shuffle import Here
from duemq.spark_jobs.compact.state import compacted_to
from duemq.spark_jobs.errors import NotKept
from duemq.spark_jobs.store.ranges import begin_ms_of, boundary, plan
from duemq.spark_jobs.store.walks import Range

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.audit.shuffle import Shuffle
    from duemq.spark_jobs.store.progress import Progress
    from duemq.spark_jobs.store.store_files import StoreFiles
    from duemq.spark_jobs.store.walks import Segment

    Hashes = NDArray[np.int64]

SMALL_BYTES: Final = 512 << 20
"""Of the commitlog, that are read and matched in this process: Spark would take longer to begin."""
_READERS: Final = 2
"""Threads that read ranges: while one decodes, another one reads and hashes."""
_SMALL_PART: Final = 50
"""A part of a store that is small: one of so many."""
_LAST: Final = (1 << 63) - 1
"""The greatest hash."""
_GROUP_ROWS: Final = 1 << 18
"""Open records that are matched at a time."""
_MAX_RUNS: Final = 8
"""Small files of hashes before they are made one."""
_MAX_LOOKS: Final = 16
"""Ranges in which it is looked up what an origin is."""


class _Touched(Exception):
    """Something new is of what was closed."""


class _Runs:
    """Hashes in files, each ascending; `more` are not on the disk yet."""

    def __init__(self, directory: str, refs: Sequence[Ref]) -> None:
        self.refs = list(refs)
        self.more: list[Hashes] = []
        self._directory = directory

    def having(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which hashes are among them. Raises NotKept."""
        found = np.zeros(len(hashes), np.bool_)
        if len(hashes):
            for run in self._all():
                found |= is_among(hashes, run)
        return found

    def _all(self) -> Iterator[Hashes]:
        for ref in self.refs:
            yield np.frombuffer(kept.read_file(self._directory, ref), HASHES)
        yield from self.more

    def add(self, hashes: Hashes) -> None:
        """Add some, ascending."""
        if len(hashes):
            self.more.append(hashes)

    def write(self, put: Callable[[str, bytes], Ref], kind: str) -> list[Ref]:
        """Write what is not on the disk; small files become one. Raises OSError, NotKept."""
        if self.more:
            largest = max((ref.size for ref in self.refs), default=0)
            small = [ref for ref in self.refs if ref.size < largest // 4]
            rows = self.more
            if len(small) >= _MAX_RUNS:
                rows = rows + [np.frombuffer(kept.read_file(self._directory, ref), HASHES) for ref in small]
                self.refs = [ref for ref in self.refs if ref not in small]
            self.refs = [*self.refs, put(kind, np.unique(np.concatenate(rows)).tobytes())]
            self.more = []
        return self.refs


class _State:
    """What was matched of whole ranges."""

    def __init__(self, directory: str, matches: Matches) -> None:
        """Raises NotKept."""
        self.directory = directory
        self.buckets = matches.buckets
        self.duplicates = matches.duplicates
        self.matched = _Runs(directory, matches.matched)
        self.stray = _Runs(directory, matches.stray)
        self.keys = _Runs(directory, matches.keys)
        self.unique = _Runs(directory, matches.unique)
        self.figures, self.ahead, self.usage = Figures.added([]), np.empty(0, AHEAD), list[RangeUsage]()
        if matches.figures is not None:
            self.figures = Figures.decode(kept.read_file(directory, matches.figures))
        if matches.ahead is not None:
            self.ahead = np.frombuffer(kept.read_file(directory, matches.ahead), AHEAD)
        if matches.usage is not None:
            self.usage = [RangeUsage.decode(kept.read_file(directory, matches.usage))]

    def add(self, closed: NDArray[Any], matching: Matching, progress: Progress) -> None:
        """Add closed cases."""
        figures = closed_figures(closed, matching)
        self.figures = Figures.added([self.figures, figures])
        rows = np.concatenate([self.ahead, ahead_of(closed)])
        self.ahead = rows[~progress.is_level_done(rows["level"], rows["queue_offset"])]

    def duplicates_in(self, unique: Hashes, *, is_kept: bool) -> int:
        """How many of some hashes of messages came before, or more than once. Raises NotKept."""
        distinct = np.unique(unique)
        known = self.unique.having(distinct)
        if is_kept:
            self.unique.add(distinct[~known])
        return len(unique) - len(distinct) + int(np.count_nonzero(known))

    def is_touched(self, events: _Events) -> bool:
        """Whether some events are of groups that are closed. Raises NotKept."""
        waits, done = (np.unique(rows["message"]) for rows in (events.waits, events.nameless))
        delivered = events.nameless["key"][events.nameless["what"] == DELIVERED]
        keys = np.unique(np.concatenate([events.waits["key"], delivered]))
        return bool(
            self.matched.having(waits).any()
            or self.matched.having(done).any()
            or self.stray.having(waits).any()
            or self.keys.having(keys).any()
        )


class _Groups(NamedTuple):
    """Some buckets together. Their hashes are from `low` to `high`."""

    low: int
    high: int
    files: list[Ref]


def _groups(buckets: Sequence[Bucket]) -> list[_Groups]:
    """Buckets that are matched together, for a start one that has none."""
    found = [_Groups(0, _LAST, [])]
    rows = 0
    for bucket in buckets:
        size = bucket.file.size // WAITS.itemsize if bucket.file is not None else 0
        if rows and rows + size > _GROUP_ROWS:
            found[-1] = found[-1]._replace(high=bucket.low - 1)
            found.append(_Groups(bucket.low, _LAST, []))
            rows = 0
        rows += size
        if bucket.file is not None:
            found[-1].files.append(bucket.file)
    return found


class _LeftFiles(msgspec.Struct):
    """`cases.Left`, written."""

    bucket: Bucket
    matched: Ref | None
    stray: Ref | None
    keys: Ref | None
    unique: Ref | None
    ahead: bytes


class _Events(NamedTuple):
    """Of some ranges."""

    waits: NDArray[Any]
    named: NDArray[Any]
    """DONE that name their origins..."""
    nameless: NDArray[Any]
    """...and that do not."""
    unique: Hashes

    @classmethod
    def of(cls, parts: Iterable[RangeFound]) -> _Events:
        """Of what was found in some ranges."""
        waits, done, unique = [np.empty(0, WAITS)], [np.empty(0, DONE)], [np.empty(0, HASHES)]
        for part in parts:
            waits.append(part.waits)
            done.append(part.done)
            unique.append(part.unique)
        rows = np.concatenate(done)
        is_named = rows["origin"] >= 0
        return cls(np.concatenate(waits), rows[is_named], rows[~is_named], np.concatenate(unique))

    def within(self, low: int, high: int) -> _Events:
        """Those of messages with hashes from one to another, and all that name their origins."""
        waits, nameless = (
            rows[(rows["message"] >= low) & (rows["message"] <= high)] for rows in (self.waits, self.nameless)
        )
        return self._replace(waits=waits, nameless=nameless)


class Applied(NamedTuple):
    """Events put to open groups."""

    closed: NDArray[Any]
    """CASE of the groups that are closed by that..."""
    open: NDArray[Any]
    """...and of those that are open..."""
    waits: NDArray[Any]
    """...with their WAITS, in any order..."""
    done: NDArray[Any]
    """...DONE..."""
    named: NDArray[Any]
    """...and CLOSED."""
    matched: Hashes
    """Hashes of what is closed by that, as `cases.Settled` has them."""
    stray: Hashes
    keys: Hashes
    known: NDArray[np.bool_]
    """Of the events that name their origins, those whose origin is there."""


def apply(waits: NDArray[Any], done: NDArray[Any], named: NDArray[Any], events: _Events) -> Applied:
    """Put events to open groups, WAITS by the hash of their message, DONE and CLOSED."""
    # A message that is alone in its group, and of which there is nothing new, is what it was.
    origins, messages = np.unique(events.named["origin"]), waits["message"]
    is_same = messages[1:] == messages[:-1]
    hot = is_among(waits["offset"], origins)
    hot[1:] |= is_same
    hot[:-1] |= is_same
    others = [rows["message"] for rows in (done, named, events.waits, events.nameless)]
    hot |= is_among(messages, np.unique(np.concatenate(others)))
    every = np.concatenate([waits[hot], events.waits])
    known = is_among(events.named["origin"], np.sort(every["offset"]))
    matched = match_by_origin(every, events.named[known])
    settled = settle(matched.waits, np.concatenate([done, events.nameless]), np.concatenate([named, matched.closed]))
    rest = waits[~hot]
    return Applied(
        settled.closed,
        np.concatenate([cases_without(rest), settled.open]),
        np.concatenate([rest, settled.waits]),
        settled.done,
        settled.named,
        settled.matched,
        settled.stray,
        settled.keys,
        known,
    )


def _by_message(waits: NDArray[Any]) -> NDArray[Any]:
    ordered: NDArray[Any] = waits[np.argsort(waits["message"], kind="stable")]
    return ordered


class Kept:
    """What the last run kept of a store, as far as it still counts, and the ranges of this run."""

    def __init__(
        self,
        folder: Folder,
        store: StoreFiles,
        progress: Progress,
        *,
        with_usage: bool,
        check: bool,
        tell: Callable[[str], None],
        anew: bool,
        range_size: int,
        bucket_bytes: int,
        now_ns: int | None = None,
    ) -> None:
        """`with_usage`, `check`: what is wanted, as for `cases.read_range`; who looks for wrong bytes reads everything.
        `tell`: is given a line where what is kept does not count, or cannot be kept. `anew`: nothing of it shall count.
        `range_size`, `bucket_bytes`: of the
        commitlog. `now_ns`: since the epoch; when the store is looked at. Raises OSError where it cannot be read."""
        self._folder, self._store, self._progress, self._tell = folder, store, progress, tell
        self._bucket_bytes = bucket_bytes
        self._segments = kept.segments_of(store, store.versions("commitlog"), now_ns or time.time_ns())
        self._before = None if anew else self._read()
        before = self._before
        self._is_usage_asked = with_usage
        self._with_usage = with_usage or (before is not None and before.with_usage)
        self._check = check
        found = list[KeptRange]()
        if before is not None and before.with_usage >= with_usage and not check:
            found = self._trusted_of(before)
        self._trusted = {part.place: part for part in found}
        self.ranges = _plan(store, found, range_size)
        """The ranges of the store, as `ranges.plan` has them."""
        self._failure: OSError | None = None

    def _read(self) -> Manifest | None:
        try:
            return self._folder.read()
        except NotKept as error:
            self._told(error, "everything is read")
            return None

    def _told(self, error: NotKept, what: str) -> None:
        self._tell(f"what was kept in {self._folder.path} does not count: {error}; {what}")

    def _trusted_of(self, before: Manifest) -> list[KeptRange]:
        begin = self._store.segments[0].first_offset
        found = kept.trusted(self._store, before, self._segments)
        there = sum(part.place[0] >= begin for part in before.ranges)
        if len(found) < there:
            self._tell(f"{there - len(found)} ranges of the commitlog are not as they were; these are read anew")
        delays = self._progress.delays_ms
        known = [part for part in found if kept.is_same_table(part, before.delays_ms, delays)]
        if len(known) < len(found):
            self._tell("the table of delay levels is another one; what was read by the last one is read anew")
        return known

    def find(self, step_ms: int, shuffle: Callable[[], Shuffle]) -> Found:
        """Find what `cases.find` finds in all ranges. `step_ms`: of curves over time. `shuffle`: gives one for what is
        too much for this process."""
        begin, end = self._store.segments[0].first_offset, self._store.readable_end
        self._matching = Matching(
            begin,
            step_ms,
            max(1, (end - begin) // self._bucket_bytes),
            self._bucket_bytes,
            begin_ms_of(self._store),
            compacted_to(self._store),
        )
        self._shuffle = shuffle
        complete, last = self.ranges[:-1], self.ranges[-1:]
        matches = self._still_matched(complete)
        missing = complete[len(self._before.ranges) :] if matches is not None and self._before is not None else []
        found = self._read_ranges([*missing, *last])
        found, tail = found[: len(missing)], found[len(missing) :]
        ended = self._grown(matches, complete, found, tail) if matches is not None else None
        ended = ended or self._matched_anew(complete, tail)
        if ended is None:
            return self._all()
        self._keep(ended)
        if ended.figures is None:  # what is not kept is of what is closed
            return self._all()
        reads = [part.read for part in ended.parts] + [part.read for part in tail]
        usage = ended.state.usage + [RangeUsage.decode(part.usage) for part in tail if part.usage is not None]
        return self._asked(Found(reads, ended.figures, usage, ended.duplicates))

    def _asked(self, found: Found) -> Found:
        """Without what was not asked for."""
        if not self._check:
            found = found._replace(reads=[read | {"corrupt": None, "corruptions": []} for read in found.reads])
        return found if self._is_usage_asked else found._replace(usage=[])

    # --- with what was matched

    def _grown(
        self, matches: Matches, complete: list[Range], found: list[RangeFound], tail: list[RangeFound]
    ) -> _Ended | None:
        """What was matched, and what was found since; None where that does not go together."""
        assert self._before is not None
        parts = list(self._before.ranges)
        for each in found:
            if (part := self._keep_range(each)) is not None:
                self._trusted[part.place] = part
            parts.append(part or KeptRange(each.read, [], Ref("", 0, 0)))
        try:
            state = _State(self._folder.path, matches)
            since = int(found[0].read["start"]) if found else complete[-1].end if complete else 0
            figures, duplicates = self._advance(state, found, tail, since)
        except NotKept as error:
            self._told(error, "all is matched anew")
            return None
        except _Touched:
            return None
        return _Ended(state, parts, figures, duplicates, is_new=bool(found))

    def _still_matched(self, complete: list[Range]) -> Matches | None:
        """What was matched, where it is of the first of the ranges, would be matched the same now, and the others are
        few."""
        matches = self._before.matches if self._before is not None else None
        if matches is None or self._before is None:
            return None
        places = [part.place for part in self._before.ranges]
        if places != complete[: len(places)] or not self._trusted.keys() >= {*places}:
            return None
        size = sum(part.end - part.start for part in complete[len(places) :])
        if size > max(SMALL_BYTES, (self._store.readable_end - matches.begin) // _SMALL_PART):
            return None
        now = self._matching
        is_same = (matches.begin, matches.begin_ms, matches.step_ms) == (now.begin, now.begin_ms, now.step_ms)
        return matches if is_same and kept.has_gone_on(matches.levels, self._progress) else None

    def _advance(
        self, state: _State, found: list[RangeFound], tail: list[RangeFound], since: int
    ) -> tuple[Figures | None, int]:
        """Add whole ranges, from the physical offset `since` on, to what was matched; and find the figures with the
        last range, and the duplicates. No figures where that is of what is closed then. Raises _Touched where a whole
        one is; NotKept."""
        matching, progress = self._matching, self._progress
        new, now = _Events.of(found), _Events.of(tail)
        end = int(tail[0].read["start"]) if tail else since
        if state.is_touched(new):
            raise _Touched
        if found:
            state.duplicates += state.duplicates_in(new.unique, is_kept=True)
        duplicates = state.duplicates + state.duplicates_in(now.unique, is_kept=False)
        closed: list[NDArray[Any]] = []
        figures = list[Figures]()
        buckets = list[Bucket]()
        known, known_now = np.zeros(len(new.named), np.bool_), np.zeros(len(now.named), np.bool_)
        for group in _groups(state.buckets):
            waits, done, named = self._open(group)
            if found:
                applied = apply(waits, done, named, new.within(group.low, group.high))
                known |= applied.known
                closed.append(applied.closed)
                state.matched.add(applied.matched)
                state.stray.add(applied.stray)
                state.keys.add(applied.keys)
                waits, done, named = _by_message(applied.waits), applied.done, applied.named
                buckets += self._write_open(group.low, waits, done, named)
            ended = apply(waits, done, named, now.within(group.low, group.high))
            known_now |= ended.known
            cases = np.concatenate([ended.closed, ended.open])
            figures.append(matching.figures(cases))
        if found:
            closed.append(unclaimed(self._stray(new.named[~known], since)))
            state.add(np.concatenate(closed), matching, progress)
            state.buckets = buckets
            folded = Usage([*state.usage, *(RangeUsage.decode(part.usage) for part in found if part.usage is not None)])
            state.usage = [folded.summary()] if self._with_usage else []
        try:
            if state.is_touched(now):
                raise _Touched
            cases = unclaimed(self._stray(now.named[~known_now], end))
        except _Touched:
            return None, duplicates
        ahead = Figures.added([])
        ahead.again = again_of(state.ahead["level"][~progress.is_level_done(*(state.ahead[n] for n in _LEVEL_PLACE))])
        figures += [state.figures, ahead, matching.figures(cases)]
        return Figures.added(figures), duplicates

    def _open(self, group: _Groups) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The open records of some buckets: WAITS, DONE and CLOSED. Raises NotKept."""
        waits, done, named = [np.empty(0, WAITS)], [np.empty(0, DONE)], [np.empty(0, CLOSED)]
        for ref in group.files:
            for rows, data, dtype in zip(
                (waits, done, named),
                msgspec.msgpack.decode(kept.read_file(self._folder.path, ref)),
                (WAITS, DONE, CLOSED),
                strict=True,
            ):
                rows.append(np.frombuffer(data, dtype))
        every = np.concatenate(waits)
        every["passed"] = are_passed(every, self._progress)
        closed = np.concatenate(named)  # of timers nobody asks
        closed["passed"] = self._progress.is_level_done(closed["delay_level"], closed["queue_offset"])
        return _by_message(every), np.concatenate(done), closed

    def _write_open(self, low: int, waits: NDArray[Any], done: NDArray[Any], named: NDArray[Any]) -> list[Bucket]:
        """Write the open records of some buckets, WAITS by message, in parts that are not too large."""
        count = max(1, -(-len(waits) // _GROUP_ROWS))
        lows = [low, *(int(waits["message"][len(waits) * part // count]) for part in range(1, count))]
        buckets = []
        for first, last in zip(lows, [*(each - 1 for each in lows[1:]), _LAST], strict=True):
            parts = [rows[(rows["message"] >= first) & (rows["message"] <= last)] for rows in (waits, done, named)]
            ref = None
            if len(parts[0]):
                ref = self._put("open", msgspec.msgpack.encode([rows.tobytes() for rows in parts]))
            buckets.append(Bucket(first, ref))
        return buckets

    def _stray(self, named: NDArray[Any], since: int) -> NDArray[Any]:
        """Of what names origins that are not open, in ranges from a physical offset on: the deliveries, if their
        messages are not in the log. Raises _Touched where one is, and so closed; NotKept."""
        before = named["origin"][(named["origin"] >= self._matching.begin) & (named["origin"] < since)]
        places = np.array([part.start for part in self.ranges], np.int64)
        numbers = np.searchsorted(places, before, "right") - 1
        distinct = np.unique(numbers)
        if len(distinct) > _MAX_LOOKS:
            raise _Touched
        for number in distinct.tolist():
            part = self._trusted.get(self.ranges[number]) if number >= 0 else None
            if part is None:
                raise _Touched
            waits = kept.decode_range(kept.read_file(self._folder.path, part.file), part.read).waits
            if is_among(before[numbers == number], np.sort(waits["offset"])).any():
                raise _Touched
        deliveries: NDArray[Any] = named[named["what"] == DELIVERED]
        return deliveries

    # --- without

    def _matched_anew(self, complete: list[Range], tail: list[RangeFound]) -> _Ended | None:
        """All whole ranges matched, of which those that are not kept are read; None where it cannot be kept."""
        path = self._folder.path

        def leave(left: Left) -> bytes:
            try:
                rows = msgspec.msgpack.encode([left.waits, left.done, left.named])
                files = _LeftFiles(
                    Bucket(left.low, kept.write_file(path, "open", rows) if left.waits else None),
                    kept.write_file(path, "matched", left.matched) if left.matched else None,
                    kept.write_file(path, "stray", left.stray) if left.stray else None,
                    kept.write_file(path, "keys", left.keys) if left.keys else None,
                    kept.write_file(path, "unique", left.unique) if left.unique else None,
                    left.ahead,
                )
            except OSError as error:
                return msgspec.msgpack.encode(error.strerror or str(error))
            return msgspec.msgpack.encode(files)

        shuffle = self._shuffle_for(complete)
        if not shuffle.sees(path):
            self._cannot("Spark's tasks do not see it; give a directory (--state) that all of them can write to")
            return None
        done = find(shuffle, self._load(complete), len(complete), self._matching, leave=leave)
        parts = dict(self._trusted)
        for note in done.notes:
            told = msgspec.msgpack.decode(note, type=_Loaded)
            if told.why is not None:
                self._tell(told.why)
            if told.part is None:
                self._failure = self._failure or OSError(0, told.failure)
            else:
                parts[told.part.place] = told.part
        lefts = [msgspec.msgpack.decode(data, type=_LeftFiles | str) for data in done.left]
        failures = [each for each in lefts if isinstance(each, str)]
        if failures or self._failure is not None:
            self._cannot(failures[0] if self._failure is None else str(self._failure.strerror or self._failure))
            return None
        files = sorted((each for each in lefts if isinstance(each, _LeftFiles)), key=lambda each: each.bucket.low)
        self._trusted = parts
        state = _State(path, _matches_of(files, self._matching, done.found.duplicates))
        state.figures, state.usage = done.found.figures, []
        if self._with_usage:
            state.usage = [Usage(done.found.usage).summary()]
        state.ahead = np.concatenate([np.empty(0, AHEAD), *(np.frombuffer(each.ahead, AHEAD) for each in files)])
        try:
            figures, duplicates = self._advance(state, [], tail, complete[-1].end if complete else 0)
        except NotKept as error:
            self._cannot(str(error))
            return None
        return _Ended(state, [parts[part] for part in complete], figures, duplicates, is_new=True)

    def _all(self) -> Found:
        """All ranges, read or as they are kept, matched; nothing is kept of that."""
        done = find(
            self._shuffle_for(self.ranges), self._load(self.ranges, is_kept=False), len(self.ranges), self._matching
        )
        return self._asked(done.found)

    def _load(self, ranges: list[Range], *, is_kept: bool = True) -> Callable[[int], RangeFound]:
        """What loads a range in a task: from what is kept, or from the commitlog, and keeps it if it `is_kept`."""
        path, store, progress = self._folder.path, self._store, self._progress
        with_usage, check, trusted = self._with_usage, self._check, self._trusted

        def load(number: int) -> RangeFound:
            part, why = trusted.get(ranges[number]), None
            if part is not None:
                try:
                    found = kept.decode_range(kept.read_file(path, part.file), part.read)
                except (NotKept, ValueError, msgspec.DecodeError) as error:
                    why = f"what was kept in {path} does not count: {error}; its range is read"
                else:
                    found.waits["passed"] = are_passed(found.waits, progress)
                    return found
            found = read_range(store, ranges[number], progress, with_usage=with_usage, check=check)
            if not is_kept:
                return found
            try:
                told = _Loaded(why, kept.keep_range(path, store, found))
            except OSError as error:
                told = _Loaded(why, None, str(error.strerror or error))
            return found._replace(note=msgspec.msgpack.encode(told))

        return load

    def _shuffle_for(self, ranges: list[Range]) -> Shuffle:
        return Here() if sum(part.end - part.start for part in ranges) <= SMALL_BYTES else self._shuffle()

    # --- what is kept

    def _read_ranges(self, ranges: list[Range]) -> list[RangeFound]:
        def read(part: Range) -> RangeFound:
            return read_range(self._store, part, self._progress, with_usage=self._with_usage, check=self._check)

        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, ranges))

    def _keep_range(self, found: RangeFound) -> KeptRange | None:
        try:
            return kept.keep_range(self._folder.path, self._store, found)
        except OSError as error:
            self._failure = error
            return None

    def _put(self, kind: str, data: bytes) -> Ref | None:
        try:
            return kept.write_file(self._folder.path, kind, data)
        except OSError as error:
            self._failure = error
            return None

    def _keep(self, ended: _Ended) -> None:
        """Keep what this run matched; where that cannot be, what was kept before stays."""
        state = ended.state
        before = self._before.matches if self._before is not None else None
        try:
            if self._failure is not None:
                raise self._failure
            if ended.is_new or before is None:
                matches = self._written(state)
            else:
                matches = msgspec.structs.replace(before, levels=kept.runs_of(self._progress))
            self._folder.write(
                Manifest(
                    rules=kept.rules(),
                    with_usage=self._with_usage,
                    delays_ms=self._progress.delays_ms,
                    segments=self._segments,
                    ranges=ended.parts,
                    matches=matches,
                )
            )
        except OSError as error:
            self._cannot(str(error.strerror or error))
        except NotKept as error:
            self._cannot(str(error))

    def _written(self, state: _State) -> Matches:
        path = self._folder.path

        def put(kind: str, data: bytes) -> Ref:
            return kept.write_file(path, kind, data)

        return Matches(
            begin=self._matching.begin,
            begin_ms=self._matching.begin_ms,
            step_ms=self._matching.step_ms,
            levels=kept.runs_of(self._progress),
            buckets=state.buckets,
            figures=put("figures", state.figures.encode()),
            ahead=put("ahead", state.ahead.tobytes()),
            usage=put("usage", msgspec.msgpack.encode(state.usage[0])) if state.usage else None,
            matched=state.matched.write(put, "matched"),
            stray=state.stray.write(put, "stray"),
            keys=state.keys.write(put, "keys"),
            unique=state.unique.write(put, "unique"),
            duplicates=state.duplicates,
        )

    def _cannot(self, why: str) -> None:
        self._tell(f"{self._folder.path}: nothing is kept for the next run: {why}")
        self._folder.tidy()


_LEVEL_PLACE: Final = ("level", "queue_offset")


class _Ended(NamedTuple):
    """What was matched, with the last range."""

    state: _State
    parts: list[KeptRange]
    """The whole ranges."""
    figures: Figures | None
    """None where the last range is of what is closed."""
    duplicates: int
    is_new: bool
    """Whether the state is another than the one that was kept."""


class _Loaded(msgspec.Struct):
    """What a task tells of a range that it has read."""

    why: str | None
    """Why what was kept does not count, where something was."""
    part: KeptRange | None
    failure: str = ""
    """Why there is none."""


def _matches_of(files: list[_LeftFiles], matching: Matching, duplicates: int) -> Matches:
    return Matches(
        begin=matching.begin,
        begin_ms=matching.begin_ms,
        step_ms=matching.step_ms,
        levels={},
        buckets=[each.bucket for each in files],
        figures=None,
        ahead=None,
        matched=[each.matched for each in files if each.matched is not None],
        stray=[each.stray for each in files if each.stray is not None],
        keys=[each.keys for each in files if each.keys is not None],
        unique=[each.unique for each in files if each.unique is not None],
        usage=None,
        duplicates=duplicates,
    )


def _plan(store: StoreFiles, known: list[KeptRange], size: int) -> list[Range]:
    """The ranges of a store, as `ranges.plan` has them; where it would cut is known of some."""
    ranges = list[Range]()
    ends = dict(part.place for part in known)
    for segment in store.segments:
        at, last = segment.first_offset, min(segment.end, store.readable_end)
        while at < last and at in ends and _is_end(store, segment, at, ends, size):
            ranges.append(Range(at, ends[at]))
            at = ends[at]
        if at < last:
            ranges += plan(store, size, start=at, end=last)
    return ranges


def _is_end(store: StoreFiles, segment: Segment, start: int, ends: dict[int, int], size: int) -> bool:
    """Whether a range ends where the known one ended."""
    end, last = ends[start], min(segment.end, store.readable_end)
    if end == segment.end:
        return True
    # Where the next one is known, too, a record begins there as it did.
    return last - start > size * 3 // 2 and (
        end in ends or boundary(store, segment, start + size, last, known=start) == end
    )
