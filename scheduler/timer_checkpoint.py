"""What the timers write with each checkpoint of the store, so that a start knows what waits: the timer log's marks, the
wheel, timercheck, timermetrics, and the note in the checkpoint (`timer_files` has the formats).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from protocol.timer_properties import PRECISION_MS
from scheduler import timer_files
from scheduler.timer_enqueuer import Enqueuer
from scheduler.timer_files import TimerCheck, TimerNote
from scheduler.timer_slots import Slots
from scheduler.timer_topics import TimerTopics
from storage.clock import Clock
from storage.recovery import Recovered
from storage.store import MessageStore

log = structlog.get_logger(__name__)

_MAX_SINCE_BYTES: Final = 16 * 1024 * 1024
_MAX_TURN_SECONDS: Final = 30.0


class TimerCheckpoint:
    """The timers' part of a checkpoint: a `storage.store.Beside`, and its note."""

    def __init__(
        self,
        store: MessageStore,
        clock: Clock,
        enqueuer: Enqueuer,
        slots: Slots,
        topics: TimerTopics,
        on_earlier: Callable[[], None],
    ) -> None:
        """`on_earlier` is called when there may be something to deliver that had to wait for this."""
        self._store = store
        self._clock = clock
        self._enqueuer = enqueuer
        self._slots = slots
        self._topics = topics
        self._on_earlier = on_earlier
        tables = os.path.join(store.config.root, "config")
        self._check_path = os.path.join(tables, "timercheck")
        self._metrics_path = os.path.join(tables, "timermetrics")
        self._check = TimerCheck()
        self._synced = 0
        """The timer log is durable up to here, but for marks of withdrawn units."""
        self._turn_seen = (0, 0.0)
        """Whose turn it is, and when that was first seen."""
        self._noted_log_since = 0
        self.kept_from = 0
        """Where the current second's turn began in the timer log as of the last note, and as of the last that is
        durable: recovery may need what is behind."""

    def load(self, recovered: Recovered) -> tuple[TimerNote | None, TimerCheck | None]:
        """What was noted, as far as it belongs to the store, and what timercheck says. Raises StoreFormatError,
        OSError."""
        files = self._store.files
        files.make_directories(os.path.dirname(self._check_path))
        check = timer_files.load_check(files, self._check_path)
        self._check = check or TimerCheck()
        note = None if recovered.is_foreign else timer_files.decode_note(recovered.notes.get("timers", b""))
        return note, check

    def topic_names(self) -> list[str]:
        """The topics that timermetrics knows."""
        return timer_files.load_topics(self._store.files, self._metrics_path)

    def begin(self) -> None:
        """Be part of the store's checkpoints from now on; `slots` are loaded."""
        self._synced = self._slots.log.begin
        self._store.notes["timers"] = self._note
        self._store.beside.append(self)

    # --- the note

    def _note(self) -> bytes:
        """See `storage.store.MessageStore.notes`."""
        self._noted_log_since = self._slots.log_since
        return TimerNote(
            self._slots.second,
            self._slots.since,
            self._slots.log_since,
            self._slots.log.end,
            self._slots.log.crc(self._slots.log.end),
            self._enqueuer.next_offset,
            self._slots.held_to,
            self._topics.waiting(),
        ).encode()

    def _bound_since(self) -> Iterator[None]:
        """Recovery reads all that came since the current second's turn began. See that this is no more than need be
        where nothing is due, where the clock was set back and the second is long to come, or where it has so many
        messages that they take long."""
        slots, now_s = self._slots, self._clock.monotonic()
        if slots.second != self._turn_seen[0]:
            self._turn_seen = slots.second, now_s
        if self._store.log.end - slots.since <= _MAX_SINCE_BYTES:
            return
        if slots.advance(self._clock.now_ms(), is_idle=True) or now_s - self._turn_seen[1] <= _MAX_TURN_SECONDS:
            return
        slots.is_handing_on = True
        try:
            while slots.hand_on(self._clock.now_ms()):
                yield
            self._enqueuer.mark_newest(self._clock.now_ms())
        except OSError as error:
            log.warning("timers_not_handed_on", second=slots.second, reason=str(error))
        finally:
            slots.is_handing_on = False
        self._on_earlier()

    # --- the files

    def write(self) -> Iterator[None]:
        """See `storage.store.Beside`."""
        yield from self._bound_since()
        yield from self._slots.wheel.write(self._slots.second)

    def plan_sync(self) -> Callable[[], None]:
        """See `storage.store.Beside`."""
        files = self._store.files
        end, wheel = self._slots.log.end, self._slots.wheel.file
        to_sync = self._slots.log.files_between(self._synced, end)
        mark = self._slots.log.plan_marks()
        noted_log_since = self._noted_log_since
        if self.check() != self._check:
            self._check = self.check()
            self._check.state_version, self._check.version_ms = 0, self._clock.now_ms()
            self._check.counter += 1
        check = self._check
        metrics = timer_files.metrics_json(self._topics.metrics(), check.version_ms, check.counter)
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
            timer_files.save_check(files, self._check_path, check)
            files.write_whole(self._metrics_path, metrics, durable=False)
            self._synced = max(self._synced, end)
            self.kept_from = noted_log_since

        return sync

    def check(self) -> TimerCheck:
        """What timercheck says of now."""
        check = self._check
        return TimerCheck(
            self._slots.second * PRECISION_MS,
            self._slots.log.end,
            self._enqueuer.next_offset,
            self._enqueuer.next_offset,
            check.state_version,
            check.version_ms,
            check.counter,
        )
