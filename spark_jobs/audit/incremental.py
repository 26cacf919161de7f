"""A run that reads only the records since the last one, and has the same result as one that reads everything.

The commitlog only grows, so all of its ranges but the last are read once (`kept`). Their matched records are kept in
two parts: closed groups, as figures and hashes of their messages; and open groups, which have a message without a
delivery, as records. A run

    reads the ranges that are new                     -> WAITS and DONE
    adds the whole ones to the open groups            -> more closed groups; the result is kept
    adds the last range, which the next run will find longer    -> the present figures

A closed group stays closed unless a new record belongs to it: a second delivery, or the same message sent once more. If
that happens, or if the log lost its first files, the progress went back or a curve has another step, everything is
matched again from the kept ranges. The result is the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.spark_jobs.analyse.usage import RangeUsage, Usage
from duemq.spark_jobs.audit import kept
from duemq.spark_jobs.audit.events import DELIVERED, DONE, WAITS, are_passed
from duemq.spark_jobs.audit.figures import Figures, again_of
from duemq.spark_jobs.audit.kept import Bucket, Folder, KeptManifest, KeptRange, Matches, Ref
from duemq.spark_jobs.audit.matching import (
    AHEAD,
    CLOSED,
    HASHES,
    KeptBucket,
    Matching,
    RangeFound,
    StoreFindings,
    ahead_of,
    cases_without,
    closed_figures,
    find,
    match_by_origin,
    read_range,
    settle,
    unclaimed,
)
from duemq.spark_jobs.audit.shuffle import Here
from duemq.spark_jobs.compact.state import compacted_to
from duemq.spark_jobs.errors import NotKept
from duemq.spark_jobs.store.ranges import begin_ms_of, boundary, plan
from duemq.spark_jobs.store.walks import Range
from duemq.storage import file_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.audit.shuffle import Shuffle
    from duemq.spark_jobs.store.progress import Progress
    from duemq.spark_jobs.store.store_files import StoreFiles
    from duemq.spark_jobs.store.walks import Segment

    Hashes = NDArray[np.int64]

SMALL_BYTES: Final = 512 << 20
"""Bytes of the commitlog up to which ranges are read and matched in this process: Spark would take longer to start."""
_READERS: Final = 2
"""Threads that read ranges: while one decodes, another one reads and hashes."""
_SMALL_PART: Final = 50
"""Divisor: a part of a store is small if it has less than one in this many of its bytes."""
_LAST: Final = (1 << 63) - 1
"""The greatest hash."""
_GROUP_ROWS: Final = 1 << 18
"""Number of open records that are matched at a time."""
_MAX_RUNS: Final = 8
"""Number of small files of hashes that are merged into one."""
_MAX_LOOKS: Final = 16
"""Most ranges that are searched for origins before everything is matched again."""


class _Touched(Exception):
    """A new record belongs to a closed group."""


class _Runs:
    """Hashes in files, each ascending; those in `more` are not on the disk yet."""

    def __init__(self, directory: str, refs: Sequence[Ref]) -> None:
        self.refs = list(refs)
        self.more: list[Hashes] = []
        self._directory = directory

    def having(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Return which hashes are among them. Raises NotKept."""
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
        """Add hashes, ascending."""
        if len(hashes):
            self.more.append(hashes)

    def write(self, put: Callable[[str, bytes], Ref], kind: str) -> list[Ref]:
        """Write the hashes that are not on the disk; merge small files into one. Return all files. Raises OSError,
        NotKept."""
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
    """The matched records of whole ranges."""

    def __init__(self, directory: str, matches: Matches) -> None:
        """Load what is kept. Raises NotKept."""
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
        """Return how many of the given hashes of messages came before, or more than once. `is_kept`: also add the new
        ones. Raises NotKept."""
        distinct = np.unique(unique)
        known = self.unique.having(distinct)
        if is_kept:
            self.unique.add(distinct[~known])
        return len(unique) - len(distinct) + int(np.count_nonzero(known))

    def is_touched(self, events: _Events) -> bool:
        """Return whether some events belong to closed groups. Raises NotKept."""
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
    """Neighbouring buckets that are matched together. Their hashes are from `low` to `high`."""

    low: int
    high: int
    files: list[Ref]


def _groups(buckets: Sequence[Bucket]) -> list[_Groups]:
    """Return the buckets as they are matched together; one empty group if there are none."""
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
    """`cases.KeptBucket`, written to files."""

    bucket: Bucket
    matched: Ref | None
    stray: Ref | None
    keys: Ref | None
    unique: Ref | None
    ahead: bytes


class _Events(NamedTuple):
    """The events of some ranges."""

    waits: NDArray[Any]
    named: NDArray[Any]
    """DONE that name their origins."""
    nameless: NDArray[Any]
    """DONE that name no origin."""
    unique: Hashes

    @classmethod
    def of(cls, parts: Iterable[RangeFound]) -> _Events:
        """Return the events found in some ranges."""
        waits, done, unique = [np.empty(0, WAITS)], [np.empty(0, DONE)], [np.empty(0, HASHES)]
        for part in parts:
            waits.append(part.waits)
            done.append(part.done)
            unique.append(part.unique)
        rows = np.concatenate(done)
        is_named = rows["origin"] >= 0
        return cls(np.concatenate(waits), rows[is_named], rows[~is_named], np.concatenate(unique))

    def within(self, low: int, high: int) -> _Events:
        """Return the events of messages with hashes from `low` to `high`, and all that name their origins."""
        waits, nameless = (
            rows[(rows["message"] >= low) & (rows["message"] <= high)] for rows in (self.waits, self.nameless)
        )
        return self._replace(waits=waits, nameless=nameless)


class Applied(NamedTuple):
    """The result of adding events to open groups."""

    closed: NDArray[Any]
    """CASE of the groups that this closed."""
    open: NDArray[Any]
    """CASE of the groups that are open."""
    waits: NDArray[Any]
    """WAITS of the open groups, in any order."""
    done: NDArray[Any]
    """DONE of the open groups."""
    named: NDArray[Any]
    """CLOSED of the open groups."""
    matched: Hashes
    """`matched`, `stray` and `keys`: hashes of the groups that this closed, as in `cases.Settled`."""
    stray: Hashes
    keys: Hashes
    known: NDArray[np.bool_]
    """For the events that name their origins, whether the origin is there."""


def apply(waits: NDArray[Any], done: NDArray[Any], named: NDArray[Any], events: _Events) -> Applied:
    """Add events to open groups: WAITS ordered by the hash of their message, DONE and CLOSED."""
    # A message that is alone in its group and has no new event keeps its case.
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
    """The results that the last run kept of a store, as far as they can be used, and the ranges of this run."""

    def __init__(
        self,
        folder: Folder,
        store: StoreFiles,
        progress: Progress,
        shuffle: Callable[[], Shuffle],
        *,
        with_usage: bool,
        check: bool,
        tell: Callable[[str], None],
        anew: bool,
        range_size: int,
        bucket_bytes: int,
        now_ns: int | None = None,
    ) -> None:
        """`shuffle`: returns a shuffle for ranges too large for this process. `with_usage`, `check`: as for
        `cases.read_range`; with `check` everything is read. `tell`: called with a line
        if kept results cannot be used, or none can be kept. `anew`: use no kept results. `range_size`, `bucket_bytes`:
        bytes of the commitlog. `now_ns`: the time of this look at the store, ns since the epoch; now by default. Raises
        OSError if the store cannot be read."""
        self._folder, self._store, self._progress, self._tell = folder, store, progress, tell
        self._shuffle = shuffle
        self._bucket_bytes = bucket_bytes
        self._segments = kept.segments_of(store, store.versions(file_names.COMMITLOG), now_ns or time.time_ns())
        self._before = None if anew else self._read()
        before = self._before
        self._is_usage_asked = with_usage
        self._with_usage = with_usage or (before is not None and before.with_usage)
        self._check = check
        found = list[KeptRange]()
        if before is not None and before.with_usage >= with_usage and not check:
            found = self._trusted_of(before)
        self._trusted = {part.range: part for part in found}
        self.ranges = _plan(store, found, range_size)
        """The ranges of the store, as by `ranges.plan`."""
        self._failure: OSError | None = None

    def _read(self) -> KeptManifest | None:
        try:
            return self._folder.read()
        except NotKept as error:
            self._tell_not_kept(error, "everything is read")
            return None

    def _tell_not_kept(self, error: NotKept, what: str) -> None:
        self._tell(f"the results kept in {self._folder.path} are not used: {error}; {what}")

    def _trusted_of(self, before: KeptManifest) -> list[KeptRange]:
        begin = self._store.segments[0].first_offset
        found = kept.trusted(self._store, before, self._segments)
        there = sum(part.range[0] >= begin for part in before.ranges)
        if len(found) < there:
            self._tell(f"{there - len(found)} ranges of the commitlog have changed; they are read again")
        delays = self._progress.delays_ms
        known = [part for part in found if kept.is_same_table(part, before.delays_ms, delays)]
        if len(known) < len(found):
            self._tell("the table of delay levels has changed; what was read with the old one is read again")
        return known

    def find(self, step_ms: int) -> StoreFindings:
        """Return the result of `matching.find` over all ranges. `step_ms`: step of curves over time, ms."""
        begin, end = self._store.segments[0].first_offset, self._store.readable_end
        self._matching = Matching(
            begin,
            step_ms,
            max(1, (end - begin) // self._bucket_bytes),
            self._bucket_bytes,
            begin_ms_of(self._store),
            compacted_to(self._store),
        )
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
        if ended.figures is None:  # an unkept range has records of closed groups
            return self._all()
        reads = [part.read for part in ended.parts] + [part.read for part in tail]
        usage = ended.state.usage + [RangeUsage.decode(part.usage) for part in tail if part.usage is not None]
        return self._asked(StoreFindings(reads, ended.figures, usage, ended.duplicates))

    def _asked(self, found: StoreFindings) -> StoreFindings:
        """Return the result without parts that were not asked for."""
        if not self._check:
            found = found._replace(reads=[read | {"corrupt": None, "corruptions": []} for read in found.reads])
        return found if self._is_usage_asked else found._replace(usage=[])

    # --- continuing from matched groups

    def _grown(
        self, matches: Matches, complete: list[Range], found: list[RangeFound], tail: list[RangeFound]
    ) -> _Ended | None:
        """Continue from the matched groups with the ranges found since; None if that is not possible."""
        assert self._before is not None
        parts = list(self._before.ranges)
        for each in found:
            if (part := self._keep_range(each)) is not None:
                self._trusted[part.range] = part
            parts.append(part or KeptRange(each.read, [], Ref("", 0, 0)))
        try:
            state = _State(self._folder.path, matches)
            since = int(found[0].read["start"]) if found else complete[-1].end if complete else 0
            figures, duplicates = self._advance(state, found, tail, since)
        except NotKept as error:
            self._tell_not_kept(error, "everything is matched again")
            return None
        except _Touched:
            return None
        return _Ended(state, parts, figures, duplicates, is_new=bool(found))

    def _still_matched(self, complete: list[Range]) -> Matches | None:
        """Return the kept matches if they cover the first of these ranges and would be the same now, and if the
        remaining ranges are small; else None."""
        matches = self._before.matches if self._before is not None else None
        if matches is None or self._before is None:
            return None
        known = [part.range for part in self._before.ranges]
        if known != complete[: len(known)] or not self._trusted.keys() >= {*known}:
            return None
        size = sum(part.end - part.start for part in complete[len(known) :])
        if size > max(SMALL_BYTES, (self._store.readable_end - matches.begin) // _SMALL_PART):
            return None
        now = self._matching
        is_same = (matches.begin, matches.begin_ms, matches.step_ms) == (now.begin, now.begin_ms, now.step_ms)
        return matches if is_same and kept.has_gone_on(matches.levels, self._progress) else None

    def _advance(
        self, state: _State, found: list[RangeFound], tail: list[RangeFound], since: int
    ) -> tuple[Figures | None, int]:
        """Add whole ranges, from the physical offset `since` on, to the matched groups; return the figures including
        the last range, and the number of duplicates. The figures are None if the last range has records of closed
        groups. Raises _Touched if a whole range has such records; NotKept."""
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
        ahead.again = again_of(
            state.ahead["level"][~progress.is_level_done(*(state.ahead[n] for n in _LEVEL_AND_OFFSET))]
        )
        figures += [state.figures, ahead, matching.figures(cases)]
        return Figures.added(figures), duplicates

    def _open(self, group: _Groups) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the open records of some buckets: WAITS, DONE and CLOSED. Raises NotKept."""
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
        closed = np.concatenate(named)  # only for levels: timers do not need it
        closed["passed"] = self._progress.is_level_done(closed["delay_level"], closed["queue_offset"])
        return _by_message(every), np.concatenate(done), closed

    def _write_open(self, low: int, waits: NDArray[Any], done: NDArray[Any], named: NDArray[Any]) -> list[Bucket]:
        """Write the open records of some buckets, WAITS by message, in parts of limited size."""
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
        """Return the deliveries among events whose named origins are not open, in ranges from physical offset `since`
        on. Raises _Touched if such an origin is in the log, and so closed; NotKept."""
        before = named["origin"][(named["origin"] >= self._matching.begin) & (named["origin"] < since)]
        starts = np.array([part.start for part in self.ranges], np.int64)
        numbers = np.searchsorted(starts, before, "right") - 1
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

    # --- matching everything again

    def _matched_anew(self, complete: list[Range], tail: list[RangeFound]) -> _Ended | None:
        """Match all whole ranges, reading those that are not kept; None if the result cannot be kept."""
        path = self._folder.path

        def leave(left: KeptBucket) -> bytes:
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
                parts[told.part.range] = told.part
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

    def _all(self) -> StoreFindings:
        """Match all ranges, read or kept, without keeping anything."""
        done = find(
            self._shuffle_for(self.ranges), self._load(self.ranges, is_kept=False), len(self.ranges), self._matching
        )
        return self._asked(done.found)

    def _load(self, ranges: list[Range], *, is_kept: bool = True) -> Callable[[int], RangeFound]:
        """Return a function that loads a range in a task: from the kept files, or from the commitlog, and then keeps it
        if `is_kept`."""
        path, store, progress = self._folder.path, self._store, self._progress
        with_usage, check, trusted = self._with_usage, self._check, self._trusted

        def load(number: int) -> RangeFound:
            part, why = trusted.get(ranges[number]), None
            if part is not None:
                try:
                    found = kept.decode_range(kept.read_file(path, part.file), part.read)
                except (NotKept, ValueError, msgspec.DecodeError) as error:
                    why = f"the results kept in {path} are not used: {error}; their range is read"
                else:
                    found.waits["passed"] = are_passed(found.waits, progress)
                    return found
            found = read_range(store, ranges[number], progress, with_usage=with_usage, check=check)
            if not is_kept:
                return found
            try:
                told = _Loaded(why, kept.keep_range(path, found))
            except OSError as error:
                told = _Loaded(why, None, str(error.strerror or error))
            return found._replace(note=msgspec.msgpack.encode(told))

        return load

    def _shuffle_for(self, ranges: list[Range]) -> Shuffle:
        return Here() if sum(part.end - part.start for part in ranges) <= SMALL_BYTES else self._shuffle()

    # --- keeping results

    def _read_ranges(self, ranges: list[Range]) -> list[RangeFound]:
        def read(part: Range) -> RangeFound:
            return read_range(self._store, part, self._progress, with_usage=self._with_usage, check=self._check)

        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, ranges))

    def _keep_range(self, found: RangeFound) -> KeptRange | None:
        try:
            return kept.keep_range(self._folder.path, found)
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
        """Keep the results of this run; if that fails, those kept before stay."""
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
                KeptManifest(
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


_LEVEL_AND_OFFSET: Final = ("level", "queue_offset")


class _Ended(NamedTuple):
    """The result of matching, with the last range."""

    state: _State
    parts: list[KeptRange]
    """The whole ranges."""
    figures: Figures | None
    """None if the last range has records of closed groups."""
    duplicates: int
    is_new: bool
    """Whether the state differs from the kept one."""


class _Loaded(msgspec.Struct):
    """The note of a task on a range that it has read."""

    why: str | None
    """Why the kept file of the range cannot be used, if there was one."""
    part: KeptRange | None
    failure: str = ""
    """Why the range was not kept."""


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
    """Return the ranges of a store, as by `ranges.plan`, using the ends of known ones."""
    ranges = list[Range]()
    ends = dict(part.range for part in known)
    for segment in store.segments:
        at, last = segment.first_offset, min(segment.end, store.readable_end)
        while at < last and at in ends and _is_end(store, segment, at, ends, size):
            ranges.append(Range(at, ends[at]))
            at = ends[at]
        if at < last:
            ranges += plan(store, size, start=at, end=last)
    return ranges


def _is_end(store: StoreFiles, segment: Segment, start: int, ends: dict[int, int], size: int) -> bool:
    """Return whether a range ends where the known one ended."""
    end, last = ends[start], min(segment.end, store.readable_end)
    if end == segment.end:
        return True
    # If the next one is known too, a record still begins there.
    return last - start > size * 3 // 2 and (
        end in ends or boundary(store, segment, start + size, last, known=start) == end
    )
