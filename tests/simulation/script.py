"""The events of one simulated life, as a list made from a seed before it begins: clients' sends, operators' actions,
and faults, each with its time. A part of the list is a script as well, so the shortest one that still fails can be
searched for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

TOPICS = ("orders", "mails")
TWINS = ("ordersAa", "ordersBB")
"""Topics with the same Java hash, which units of the timer log name topics by; used in some lives."""
QUEUES = 2
"""Queues of a topic that clients send to."""
TOPIC_QUEUES = 4
"""Queues that a topic has."""
LEVELS = "1s 2s 5s 10s"
OTHER_LEVELS = ("1s", "1s 2s 3s 4s", "1s 2s 2s", "2s 3s 5s 10s 20s")
"""Tables of levels that replace the first: longer and shorter ones; no level comes back with another delay."""
_ERRORS = (("sync", "EIO"), ("sync", "EIO"), ("write", "EIO"), ("sync", "EMFILE"), ("write", "ENOSPC"))


@dataclass(frozen=True)
class Action:
    """An event at a time, in seconds since the beginning."""

    at: float
    kind: str
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.at:8.3f}  {self.kind}  " + "  ".join(f"{name}={value}" for name, value in self.details.items())


@dataclass(frozen=True)
class Script:
    """The script of one life. There are no faults after `calm_from`."""

    seed: str
    settings: dict[str, str]
    actions: tuple[Action, ...]
    calm_from: float
    has_groups: bool = False
    """Whether there are push consumers and another broker, see `groups`."""
    skew_ms: int = 0
    """Milliseconds by which the senders' clock is ahead of the broker's."""
    topics: tuple[str, str] = TOPICS


def generate(seed: str) -> Script:
    """Generate the script of a seed."""
    chance = random.Random(seed)
    length = chance.choice((4.0, 10.0, 25.0))
    is_sync = chance.random() < 0.6
    settings = {
        "flushDiskType": "SYNC_FLUSH" if is_sync else "ASYNC_FLUSH",
        "enableScheduleAsyncDeliver": chance.choice(("true", "false")),
        "messageDelayLevel": LEVELS,
        "timerRollWindowSlot": chance.choice(("4", "20", "172800")),
        "scheduleDeliverBatchSize": chance.choice(("1", "7", "512")),
        # On a full disk the broker may remove the oldest files, expired or not, which breaks no promise; turned off
        # here.
        "cleanFileForciblyEnable": "false",
    }
    makers = [
        (30, _send_timer),
        (15, _send_level),
        (10, _send_plain),
        (6, _burst),
        (6, _change),
        (3, _replace),
        (2, _topic),
        (2, _setting),
        (2, _look),
        (2, _bad_manners),
    ]
    # Swarm testing: each life has some kinds of events only, and each more or less often.
    weights = [(weight * chance.choice((0, 1, 1, 3)), make) for weight, make in makers]
    weights = weights if any(weight for weight, _ in weights[:4]) else makers
    actions: list[Action] = []
    for _ in range(chance.choice((20, 60, 150))):
        (make,) = chance.choices([make for _, make in weights], [weight for weight, _ in weights])
        actions.append(make(chance, round(chance.uniform(0.5, length), 3)))
    faults = [_kill, _kill_in_operation, _stop, _evict, _slow, _full, _refused_start, _error, _read_error]
    if is_sync:
        faults += [_power_cut, _power_cut_in_operation]
    if chance.random() < 0.3:
        faults += [_clock]
    chosen = chance.sample(faults, chance.randint(1, len(faults)))
    for _ in range(chance.choice((0, 1, 2, 4, 8))):
        actions += chance.choice(chosen)(chance, round(chance.uniform(0.5, length), 3))
    # From a random source of its own, so that the rest of a seed's script stays the same.
    chance = random.Random(f"{seed}/wrong bytes")
    if chance.random() < 0.3:
        for _ in range(chance.choice((1, 1, 3))):
            actions += _wrong_bytes(chance, round(chance.uniform(0.5, length), 3))
    chance = random.Random(f"{seed}/lying disk")
    if is_sync and chance.random() < 0.3:
        for _ in range(chance.choice((1, 2, 4))):
            actions += _lying_disk(chance, round(chance.uniform(0.5, length), 3))
    chance = random.Random(f"{seed}/pauses")
    if chance.random() < 0.2:
        for _ in range(chance.choice((1, 2, 6))):
            actions += _pause(chance, round(chance.uniform(0.2, length), 3))
    chance = random.Random(f"{seed}/groups")
    has_groups, skew_ms = chance.random() < 0.4, chance.choice((0, 0, 0, -5000, -400, 400, 5000))
    if has_groups:
        actions += [_reset(chance, round(chance.uniform(0.5, length), 3)) for _ in range(chance.choice((0, 0, 1, 3)))]
        if chance.random() < 0.2:
            far = {"ms": chance.choice((-200_000, 200_000))}
            actions.append(Action(round(chance.uniform(0.5, length), 3), "set clock", far))
    chance = random.Random(f"{seed}/clock at an end")
    if chance.random() < 0.15:
        for _ in range(chance.choice((1, 1, 2))):
            actions += _clock_at_an_end(chance, round(chance.uniform(0.5, length), 3))
    chance = random.Random(f"{seed}/visits")
    if chance.random() < 0.2:
        for _ in range(chance.choice((1, 1, 2, 5))):
            actions += _visit(chance, round(chance.uniform(0.5, length), 3))
    actions.sort(key=lambda action: action.at)
    topics = TOPICS
    if random.Random(f"{seed}/twins").random() < 0.25:
        topics = TWINS
        for action in actions:
            if "topic" in action.details:
                action.details["topic"] = TWINS[TOPICS.index(action.details["topic"])]
    return Script(seed, settings, tuple(actions), length + 1.0, has_groups, skew_ms, topics)


# --- clients and operators


def _target(chance: random.Random) -> dict[str, Any]:
    return {
        "topic": chance.choice(TOPICS),
        "queue": chance.randrange(QUEUES),
        "size": chance.choice((0, 10, 300, 3000)),
    }


def _delay(chance: random.Random) -> int:
    return chance.choice((1, 20, 300, 999, 1000, 1500, 3000, 8000, 20_000))


def _send_plain(chance: random.Random, at: float) -> Action:
    return Action(at, "send", {**_target(chance), "how": "plain"})


def _send_level(chance: random.Random, at: float) -> Action:
    return Action(at, "send", {**_target(chance), "how": "level", "level": chance.randint(1, 4)})


def _send_timer(chance: random.Random, at: float) -> Action:
    return Action(at, "send", {**_target(chance), "how": "timer", "delay_ms": _delay(chance)})


def _burst(chance: random.Random, at: float) -> Action:
    make = chance.choice((_send_plain, _send_level, _send_timer))
    more = {"count": chance.choice((5, 40, 120)), "spread_ms": chance.choice((0, 700))}
    return Action(at, "burst", {**make(chance, at).details, **more})


def _change(chance: random.Random, at: float) -> Action:
    how = chance.choice(("cancel", "cancel", "reschedule", "deliver", "recall"))
    details: dict[str, Any] = {"how": how, "which": chance.random()}
    if how == "reschedule":
        details["delay_ms"] = _delay(chance)
    return Action(at, "change", details)


def _replace(chance: random.Random, at: float) -> Action:
    details = {**_target(chance), "how": "timer", "delay_ms": _delay(chance), "key": chance.choice("abc")}
    return Action(at, "send", details)


def _topic(chance: random.Random, at: float) -> Action:
    return Action(at, "topic", {"how": chance.choice(("delete", "pause", "go on", "rate", "spread"))})


def _pause(chance: random.Random, at: float) -> list[Action]:
    """Pause a topic and resume it, with its old policy or another."""
    end = round(at + chance.choice((0.3, 2.0, 5.0)), 3)
    return [
        Action(at, "topic", {"how": "pause"}),
        Action(end, "topic", {"how": chance.choice(("go on", "go on", "rate"))}),
    ]


def _setting(chance: random.Random, at: float) -> Action:
    name, value = chance.choice(
        (
            (
                "messageDelayLevel",
                chance.choice((LEVELS, "1s 2s", "1s 2s 3s 4s", "1s 4s 2s 3s 4s", "2s 3s 5s 10s 20s")),
            ),
            ("timerStopDequeue", chance.choice(("true", "false"))),
            ("timerStopEnqueue", chance.choice(("true", "false"))),
            ("timerRollWindowSlot", chance.choice(("4", "20", "172800"))),
            ("enableScheduleAsyncDeliver", chance.choice(("true", "false"))),
            ("flushIntervalConsumeQueue", chance.choice(("50", "5000"))),
        )
    )
    return Action(at, "setting", {"name": name, "value": value})


def _look(chance: random.Random, at: float) -> Action:
    return Action(at, "look", {"what": chance.choice(("list", "count", "curve", "status"))})


def _reset(chance: random.Random, at: float) -> Action:
    """Send a group to its topic's beginning, its end, or somewhere between."""
    where = chance.choice(("begin", "end", "ago"))
    return Action(at, "reset", {"topic": chance.choice(TOPICS), "where": where, "ago_ms": chance.randint(0, 5000)})


def _bad_manners(chance: random.Random, at: float) -> Action:
    return Action(at, "bad manners", {"how": chance.choice(("reads nothing", "half a frame", "nonsense", "hangs up"))})


# --- faults


def _kill(chance: random.Random, at: float) -> list[Action]:
    """One kill, or several in a row."""
    count = chance.choice((1, 1, 2, 5, 10))
    actions, when = [], at
    for _ in range(count):
        actions.append(Action(round(when, 3), "kill"))
        when += chance.choice((0.05, 0.3, 1.0, 3.0))
    return actions


def _kill_in_operation(chance: random.Random, at: float) -> list[Action]:
    return [Action(at, "kill in operation", {"operations": chance.choice((1, 3, 10, 40, 200))})]


def _power_cut_in_operation(chance: random.Random, at: float) -> list[Action]:
    return [Action(at, "power cut in operation", {"operations": chance.choice((1, 3, 10, 40, 200))})]


def _power_cut(chance: random.Random, at: float) -> list[Action]:
    return [Action(at, "power cut")]


def _stop(chance: random.Random, at: float) -> list[Action]:
    return [Action(at, "stop")]


def _visit(chance: random.Random, at: float) -> list[Action]:
    """The broker is stopped, RocketMQ's broker has the store, and duemq starts again, possibly killed at once."""
    operations = chance.choice((None, 1, 20, chance.randint(1, 150), chance.randint(1, 150)))
    return [Action(at, "visit", {"operations": operations})]


def _evict(chance: random.Random, at: float) -> list[Action]:
    """Evict the page cache once, or again and again: then bytes that were read have to be read again a little later."""
    return [Action(at + 0.3 * number, "evict") for number in range(chance.choice((1, 1, 30)))]


def _clock(chance: random.Random, at: float) -> list[Action]:
    return [Action(at, "set clock", {"ms": chance.choice((-60_000, -3000, -400, 400, 3000, 60_000))})]


def _clock_at_an_end(chance: random.Random, at: float) -> list[Action]:
    """Set the clock right before the broker ends, or while it is down."""
    step = Action(at, "set clock", {"ms": chance.choice((-200_000, -60_000, -3000, 3000, 60_000, 200_000))})
    when = round(at + chance.choice((-0.02, 0.0, 0.02, 0.2, 0.6)), 3)
    return [step, Action(when, chance.choice(("kill", "kill", "stop")))]


def _slow(chance: random.Random, at: float) -> list[Action]:
    return [
        Action(at, "slow", {"factor": chance.choice((10, 100))}),
        Action(round(at + chance.choice((0.5, 3.0)), 3), "slow", {"factor": 1}),
    ]


def _full(chance: random.Random, at: float) -> list[Action]:
    pages = {"pages": chance.choice((0, 1, 5))}
    begin = chance.choice((Action(at, "full", pages), Action(at, "used", {"ratio": 0.95})))
    end = round(at + chance.choice((0.3, 2.0, 12.0)), 3)
    return [begin, Action(end, "room")]


def _refused_start(chance: random.Random, at: float) -> list[Action]:
    """Kill or stop the broker, and keep it from starting for a while."""
    name = chance.choice(("topics.json", "consumerOffset.json", "subscriptionGroup.json"))
    first = Action(at, chance.choice(("kill", "stop", "kill")))
    return [Action(at, "damage", {"name": name}), first, Action(round(at + chance.choice((0.5, 4.0)), 3), "mend")]


def _wrong_bytes(chance: random.Random, at: float) -> list[Action]:
    """Kill the broker, and damage files of consume queues while it is down."""
    how = chance.choice(("zeros", "flip", "cut", "remove", "remove directory"))
    return [Action(at, "wrong bytes", {"how": how, "which": chance.random(), "where": chance.random()})]


def _error(chance: random.Random, at: float) -> list[Action]:
    """Make operations on some files fail for a while, with one of the usual errors."""
    kind, number = chance.choice(_ERRORS)
    where = chance.choice(("commitlog", "consumequeue", "timerlog", "timerwheel", "checkpoint", "config", ""))
    details = {"kind": kind, "errno": number, "where": where, "share": chance.choice((0.05, 0.5, 1.0))}
    return [Action(at, "fail", details), Action(round(at + chance.choice((0.02, 0.3, 2.0)), 3), "fail no more")]


def _lying_disk(chance: random.Random, at: float) -> list[Action]:
    """A sync fails, once or for some ms, and its bytes are lost at the next power cut although later syncs succeed."""
    where = chance.choice(("commitlog", "consumequeue", "timerlog", "timerwheel", "checkpoint", ""))
    details = {"kind": "sync", "errno": "EIO", "where": where, "share": chance.choice((0.5, 1.0))}
    over = round(at + chance.choice((0.005, 0.02, 0.1)), 3)
    cut = round(over + chance.choice((0.01, 0.1, 1.0)), 3)
    return [Action(at, "fail", details), Action(over, "fail no more"), Action(cut, "power cut")]


def _read_error(chance: random.Random, at: float) -> list[Action]:
    where = chance.choice(("commitlog", "consumequeue", "timerlog", "timerwheel"))
    details = {"kind": "read", "errno": "EIO", "where": where, "share": chance.choice((0.05, 0.5, 1.0))}
    return [Action(at, "fail", details), Action(round(at + chance.choice((0.02, 0.3, 2.0)), 3), "fail no more")]
