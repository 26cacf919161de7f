"""The timers' part of each checkpoint of the store, from which a start learns which messages wait: the timer log's
marks, the wheel, timercheck, timermetrics, and the note in the checkpoint (`timers.files.small_files` has the formats).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.enqueuer import Enqueuer
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.small_files import Sums, TimerCheck, TimerNote
from duemq.scheduler.timers.seconds.slots import Slots
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage import file_names
from duemq.storage.clock import Moment
from duemq.storage.durability.recovery import Recovered
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)

_MAX_SINCE_BYTES: Final = 16 * 1024 * 1024
_MAX_TURN_SECONDS: Final = 30.0


class TimerCheckpoint:
    """The timers' part of a checkpoint. See `storage.durability.owner.CheckpointPart`."""

    def __init__(
        self,
        store: MessageStore,
        enqueuer: Enqueuer,
        slots: Slots,
        topics: TimerTopics,
        *,
        wake: Callable[[], None],
        unfollowed: Sequence[int],
    ) -> None:
        """Prepare the checkpoints. `wake`: called when deliveries that had to wait for the checkpoint may continue.
        `unfollowed`: the physical offsets of the records of recurring messages whose next records are missing; the
        caller may change this list later."""
        self._unfollowed = unfollowed
        self._store = store
        self._enqueuer = enqueuer
        self._slots = slots
        self._topics = topics
        self._wake = wake
        self._check_path = os.path.join(store.config.root, file_names.TIMER_CHECK)
        self._metrics_path = os.path.join(store.config.root, file_names.TIMER_METRICS)
        self._check = TimerCheck()
        self._synced = 0
        """The position up to which the timer log is durable, apart from marks of withdrawn units."""
        self._turn_seen = (0, 0.0)
        """The current second, and the monotonic time, in seconds, at which it was first seen."""
        self._numbers: dict[str, int] = {}
        """Number of waiting messages by topic at the last note: a start from that note counts later messages again."""
        self._is_bound = False
        """Whether `_bound_since` is done for the checkpoint that is being made."""

    def load(self, recovered: Recovered) -> tuple[TimerNote | None, TimerCheck | None]:
        """Return the note, and timercheck. The note is None if there is none, or if RocketMQ had the store last;
        timercheck is None if it cannot be used. Raises StoreFormatError, OSError."""
        files = self._store.files
        files.make_directories(os.path.dirname(self._check_path))
        check = small_files.load_check(files, self._check_path)
        self._check = check or TimerCheck()
        note = None if recovered.is_foreign else small_files.decode_note(recovered.notes.get("timers", b""))
        return note, check

    def topic_names(self) -> dict[str, int]:
        """Return the topics in timermetrics, each with its number of waiting messages. Raises OSError."""
        return small_files.load_topics(self._store.files, self._metrics_path)

    def begin(self) -> None:
        """Prepare for the first checkpoint. Call this once `slots` are loaded."""
        self._synced = self._slots.log.begin

    # --- the note

    def note(self) -> bytes:
        """Return the note for a checkpoint made now: the state from which recovery continues."""
        slots, turns = self._slots, self._slots.turns
        self._numbers = self._topics.numbers()
        return TimerNote(
            second=turns.second,
            since=turns.since,
            log_since=turns.log_since,
            log_end=slots.log.end,
            queue_offset=self._enqueuer.next_offset,
            policy_end=slots.policy_end,
            counted_at=turns.counted_at,
            waiting=self._topics.waiting(),
            found=slots.findings.facts(turns.second, is_loaded=turns.current.is_loaded),
            superseded=slots.log.superseded.encode(),
            sums=Sums(slots.log.sums.needed(turns.second, turns.log_since), slots.wheel.sums),
            unfollowed=tuple(self._unfollowed),
        ).encode()

    def _note_on_disk(self) -> TimerNote | None:
        """Return the note of the checkpoint on the disk, which recovery would use; None without one."""
        known = self._store.checkpoint
        return None if known.is_foreign else small_files.decode_note(known.notes.get("timers", b""))

    @property
    def needed_from(self) -> int:
        """The physical offset from which on recovery may read the commitlog if it starts from the checkpoint on the
        disk."""
        note = self._note_on_disk()
        if note is None:  # the next start would read all of the commitlog
            return 0
        # `TimerChanges.keep_next` finds waiting messages by the timer log, so it does not find messages that are not in
        # the wheel yet.
        return min(note.since, self._enqueuer.needed_from, *self._unfollowed, *note.unfollowed)

    @property
    def kept_from(self) -> tuple[int, int]:
        """The part of the timer log that recovery may need, as position and second: the units behind the position, and
        the units in the slots of the second and later ones."""
        note = self._note_on_disk()
        return (note.log_since, note.second) if note is not None else (0, 0)

    def _bound_since(self, now: Moment) -> bool:
        """Do a part of the work that limits how much recovery has to read, which is all records since the current
        second's turn began. Without this work these would be many while nothing is due, while the clock is set back to
        long before the second, or while the second has so many messages that delivering them takes long. Return whether
        there is more to do."""
        slots, turns = self._slots, self._slots.turns
        if not slots.is_handing_on:
            if turns.second != self._turn_seen[0]:
                self._turn_seen = turns.second, now.monotonic
            if self._store.log.end - turns.since <= _MAX_SINCE_BYTES:
                return False
            is_turned = turns.advance(now.wall_ms, is_idle=True)
            if is_turned or now.monotonic - self._turn_seen[1] <= _MAX_TURN_SECONDS:
                return False
            slots.begin_handing_on()
        try:
            newest = self._enqueuer.newest()
            if slots.hand_on(now.wall_ms):
                return True
            self._end_handing_on()  # before a read: if it fails and is tried again, no other second is handed on
            slots.mark_newest(newest, now.wall_ms)
        except OSError as error:
            log.warning("timers_not_handed_on", second=turns.second, reason=str(error))
            self._end_handing_on()
        return False

    def _end_handing_on(self) -> None:
        self._slots.end_handing_on()
        self._wake()

    # --- the files

    def begin_write(self) -> None:
        """Prepare to write for a new checkpoint, whose note was taken just now; the next `write_next` begins."""
        self._is_bound = False
        self._slots.log.begin_marks()
        self._slots.wheel.begin_write()

    def write_next(self, now: Moment) -> bool:
        """First limit how much recovery has to read, then write some of the wheel's changed slots into its file; return
        whether there is more to do. Raises OSError; writing then starts over."""
        if not self._is_bound:
            self._is_bound = not self._bound_since(now)
            return True
        return self._slots.wheel.write_next(self._slots.turns.second)

    def plan_sync(self, now: Moment) -> Callable[[], None]:
        """Return the work, run by a worker, that makes durable what was put into the timer log and the wheel so far,
        and replaces timercheck and timermetrics. The work raises OSError, NotDurable."""
        files = self._store.files
        end, wheel = self._slots.log.end, self._slots.wheel.file
        to_sync = self._slots.log.files_between(self._synced, end)
        mark = self._slots.log.plan_marks()
        if self.check() != self._check:
            self._check = self.check()
            self._check.state_version, self._check.version_ms = 0, now.wall_ms
            self._check.counter += 1
        check = self._check
        metrics = small_files.metrics_json(self._numbers, check.version_ms, check.counter)
        root = self._store.config.root

        def sync() -> None:
            mark()
            for file in to_sync:
                file.sync()
            if wheel is not None:
                wheel.sync()
            if to_sync:
                files.sync_directory(self._slots.log.directory)
            files.sync_directory(root)
            small_files.save_check(files, self._check_path, check)
            files.write_whole(self._metrics_path, metrics, durable=False)
            self._synced = max(self._synced, end)

        return sync

    def check(self) -> TimerCheck:
        """Return the present contents of timercheck."""
        check = self._check
        return TimerCheck(
            read_ms=self._slots.turns.second * PRECISION_MS,
            log_position=self._slots.log.end,
            queue_offset=self._enqueuer.next_offset,
            master_queue_offset=self._enqueuer.next_offset,
            state_version=check.state_version,
            version_ms=check.version_ms,
            counter=check.counter,
        )
