"""The policies of topics: attributes that change when the messages with a timer are delivered.

    timer.release.rate     deliver at most this many messages per second, evenly; other due messages wait for their turn
    timer.spread.seconds   deliver each message up to this much later than it is due: a burst becomes a stream of that
                           length
    timer.paused           true: deliver no message until it is false again
    timer.catch.up         the handling of messages that are overdue because the broker was down or stopped:
                           all               deliver them immediately (the default)
                           drop:SECONDS      cancel messages that are overdue by more than this
                           spread:SECONDS    deliver them over this time
                           newest            for each key, deliver only the message that is due last
                           (`timers.policy.catch_up`)

Other topics are not affected, not even those whose names have the same hash: if a unit has the hash of a topic with a
policy, the topic of its message is read from the record. A message that is to be delivered later gets another unit in
the timer log, for that time; a message of a paused topic is parked (`timers.seconds.parking`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records import properties
from duemq.scheduler.timers.config import OVERDUE_MS
from duemq.scheduler.timers.policy.catch_up import CatchUpDecision

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Waits = NDArray[Any]

Judge = Callable[[str, "Waits", int], CatchUpDecision | None]
"""The type of `timers.policy.catch_up.CatchUp.judge`."""

RATE: Final = "timer.release.rate"
SPREAD: Final = "timer.spread.seconds"
PAUSED: Final = "timer.paused"
CATCH_UP: Final = "timer.catch.up"
ATTRIBUTES: Final = (RATE, SPREAD, PAUSED, CATCH_UP)

_MAX_SECONDS: Final = 7 * 86_400
_MAX_RATE: Final = 1_000_000
_MIX: Final = 0x9E3779B97F4A7C15


class TimerPolicy(NamedTuple):
    """The policy of one topic. Times are in ms, 0 for none; `rate` is in messages per second, 0 for no limit."""

    rate: int = 0
    spread_ms: int = 0
    is_paused: bool = False
    drop_after_ms: int = 0
    catch_up_spread_ms: int = 0
    newest: bool = False


class Split(NamedTuple):
    """Due messages, divided by their treatment."""

    now: Waits
    """Messages to be delivered now."""
    later: Waits
    """Messages to be delivered later, with their new deliver times."""
    held: Waits
    """Messages to be put off unchanged, until the newest of their keys are known."""
    held_seconds: NDArray[np.int64]
    """The second to whose slot each message in `held` is put off."""
    parked: Waits
    """Messages to be parked until their topic is no longer paused."""
    moved: Waits
    """The messages in `later`, `held` and `parked` as they are before the move, with their old deliver times."""
    dropped: Waits
    """Messages to be cancelled."""
    turns: dict[str, float]
    """For each topic with a rate, the time, ms since the epoch, at which the message behind these has its turn."""


def policy_of(attributes: Mapping[str, str]) -> TimerPolicy | None:
    """Return the policy in a topic's attributes; None if there is none. Raises ValueError, which names the wrong
    attribute."""
    if not any(name in attributes for name in ATTRIBUTES):
        return None
    paused = attributes.get(PAUSED, "false").lower()
    if paused not in ("true", "false"):
        raise ValueError(f"{PAUSED}={paused}: true or false")
    kind, _, limit = attributes.get(CATCH_UP, "all").partition(":")
    if kind not in ("all", "newest", "drop", "spread") or (kind in ("all", "newest") and limit):
        raise ValueError(f"{CATCH_UP}={attributes.get(CATCH_UP)}: all, newest, drop:SECONDS or spread:SECONDS")
    limit_ms = _number(CATCH_UP, limit, _MAX_SECONDS) * 1000 if kind in ("drop", "spread") else 0
    return TimerPolicy(
        rate=_number(RATE, attributes.get(RATE, "0"), _MAX_RATE),
        spread_ms=_number(SPREAD, attributes.get(SPREAD, "0"), _MAX_SECONDS) * 1000,
        is_paused=paused == "true",
        drop_after_ms=limit_ms if kind == "drop" else 0,
        catch_up_spread_ms=limit_ms if kind == "spread" else 0,
        newest=kind == "newest",
    )


def _number(name: str, text: str, limit: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > limit:
        raise ValueError(f"{name}={text}: a whole number from 0 to {limit}")
    return int(text)


class Policies:
    """The policies of all topics, and the next turns by their rates."""

    def __init__(self, topics_of: Callable[[Waits], list[str]], judge: Judge) -> None:
        """Begin without policies. `topics_of`: reads the topics of messages; it returns an empty text for a message to
        which no policy applies. `judge`: decides about due messages of topics with the policy `newest`."""
        self._topics_of = topics_of
        self._judge = judge
        self._policies: dict[str, TimerPolicy] = {}
        self._by_hash: dict[int, list[str]] = {}
        """The topics with a policy, by hash."""
        self._next_ms: dict[str, float] = {}
        self._paused: frozenset[int] = frozenset()

    def is_paused(self, topic_hash: int) -> bool:
        """Whether a topic with this hash is paused."""
        return topic_hash in self._paused

    def __bool__(self) -> bool:
        return bool(self._policies)

    def of(self, topic: str) -> TimerPolicy | None:
        """Return the policy of a topic; None if it has none."""
        return self._policies.get(topic)

    def set(self, topic: str, policy: TimerPolicy | None) -> None:
        """Set or remove the policy of a topic."""
        self._next_ms.pop(topic, None)
        self._policies.pop(topic, None)
        if policy is not None:
            self._policies[topic] = policy
        self._by_hash = {}
        for name in self._policies:
            self._by_hash.setdefault(properties.java_hash(name), []).append(name)
        paused = (name for name, each in self._policies.items() if each.is_paused)
        self._paused = frozenset(map(properties.java_hash, paused))

    def concerns(self, waits: Waits) -> NDArray[np.bool_]:
        """Return, for each message, whether it may be subject to a policy, as far as its unit tells: `split` reads the
        records of these messages."""
        hashes, result = waits["hash"], np.zeros(len(waits), bool)
        for key in set(hashes.tolist()) & self._by_hash.keys():
            mine = hashes == key
            if key not in self._paused:
                mine &= ~waits["held"]  # the policy was applied to those before
            result |= mine
        return result

    def split(self, waits: Waits, now_ms: int, queued: Sequence[int] = ()) -> Split | None:
        """Divide due messages by their treatment; return None if all are to be delivered unchanged. The result counts
        for the rates only once it is passed to `carried_out`; until then this may be called again. `queued`: hashes of
        topics with parked messages that come first; further messages of these topics are parked behind them. Raises
        OSError."""
        is_parked = np.isin(waits["hash"], queued) & ~waits["held"] if queued else np.zeros(len(waits), bool)
        asked = np.flatnonzero(self.concerns(waits) & ~is_parked)
        if not len(asked) and not is_parked.any():
            return None
        topics = self._topics_of(waits[asked]) if len(asked) else []
        concerned = {topic: self._policies[topic] for topic in topics if topic in self._policies}
        is_later, is_dropped, is_put_off = (np.zeros(len(waits), bool) for _ in range(3))
        seconds = np.zeros(len(waits), np.int64)
        release = waits["due"].copy()
        is_held = waits["held"].copy()
        turns: dict[str, float] = {}
        for topic, policy in concerned.items():
            mine = asked[[name == topic for name in topics]]
            if policy.is_paused:
                is_parked[mine] = True
                continue
            mine = mine[~waits["held"][mine]]
            late = now_ms - waits["due"][mine]
            if policy.drop_after_ms:
                dropped = late > max(policy.drop_after_ms, OVERDUE_MS)
                is_dropped[mine[dropped]] = True
                mine, late = mine[~dropped], late[~dropped]
            verdict = self._judge(topic, waits[mine], now_ms) if policy.newest and len(mine) else None
            if verdict is not None:
                is_dropped[mine[verdict.dropped]] = True
                is_put_off[mine[verdict.held]] = True
                seconds[mine[verdict.held]] = verdict.second
                kept = ~verdict.dropped & ~verdict.held
                mine, late = mine[kept], late[kept]
            release[mine], turn_ms = self._release(topic, policy, waits[mine], late, now_ms)
            if turn_ms is not None:
                turns[topic] = turn_ms
            is_later[mine] = release[mine] > now_ms
            is_held[mine] = True
        is_here = ~is_later & ~is_dropped & ~is_put_off & ~is_parked
        if is_here.all() and (is_held == waits["held"]).all():
            return None
        later = waits[is_later]
        later["due"], later["held"] = release[is_later], is_held[is_later]
        parked = waits[is_parked]
        parked["held"] = False  # the policy is applied again when the topic's pause ends
        held, moved = waits[is_put_off], waits[is_later | is_put_off | is_parked]
        return Split(
            now=waits[is_here],
            later=later,
            held=held,
            held_seconds=seconds[is_put_off],
            parked=parked,
            moved=moved,
            dropped=waits[is_dropped],
            turns=turns,
        )

    def carried_out(self, split: Split) -> None:
        """Note that a split was carried out."""
        self._next_ms.update(split.turns)

    def _release(
        self,
        topic: str,
        policy: TimerPolicy,
        waits: Waits,
        late: NDArray[np.int64],
        now_ms: int,
    ) -> tuple[NDArray[np.int64], float | None]:
        """Return when messages of a topic are to be delivered, and when the topic's next message may be, None if the
        topic has no rate. Times are ms since the epoch. `late`: how long the messages have been due, in ms."""
        turn_ms: float | None = None
        release: NDArray[np.int64] = waits["due"].copy()
        if policy.spread_ms:
            release += _scattered(waits, policy.spread_ms)
        if policy.catch_up_spread_ms:
            overdue = late > OVERDUE_MS
            release[overdue] = now_ms + _scattered(waits[overdue], policy.catch_up_spread_ms)
        if policy.rate:
            start = max(float(now_ms), self._next_ms.get(topic, 0.0))
            mine = start + np.arange(len(waits)) * (1000 / policy.rate)
            turn_ms = start + len(waits) * (1000 / policy.rate)
            release = np.maximum(release, mine.astype(np.int64))
        return release, turn_ms


def _scattered(waits: Waits, range_ms: int) -> NDArray[np.int64]:
    """Return a number from 0 to below `range_ms` for each message, always the same for the same record."""
    mixed = waits["physical"].astype(np.uint64) * np.uint64(_MIX)
    numbers: NDArray[np.int64] = ((mixed >> np.uint64(32)) * np.uint64(range_ms) >> np.uint64(32)).astype(np.int64)
    return numbers
