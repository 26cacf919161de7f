"""What an audit found, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from spark_jobs.report.formats import count, duration, share, size

if TYPE_CHECKING:
    from spark_jobs.audit import Summary

GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"


class Verdict(NamedTuple):
    """`mood`: GOOD, WARN or BAD. `notes`: sentences, the ones that need somebody first."""

    mood: str
    headline: str
    notes: list[str]


def verdict_of(summary: Summary) -> Verdict:
    """The verdict of an audit."""
    mood, headline = _headline(summary)
    return Verdict(mood, headline, [*_troubles(summary), *_facts(summary)])


def _number(number: int, one: str = "message", more: str = "messages") -> str:
    return f"{count(number)} {one if number == 1 else more}"


def _deliveries(number: int) -> str:
    return _number(number, "delivery", "deliveries")


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _headline(summary: Summary) -> tuple[str, str]:
    lost, twice = summary.lost, summary.twice
    if lost:
        more = f", and {count(twice)} delivered more than once" if twice else ""
        return BAD, f"{_number(lost, 'scheduled message', 'scheduled messages')} {_was(lost)} lost{more}."
    if twice:
        return WARN, f"Nothing was lost, but {_number(twice)} {_was(twice)} delivered more than once."
    if summary.damaged:
        stretches = _number(summary.damaged, "stretch", "stretches")
        return WARN, f"Nothing was lost as far as one can read, but {stretches} of the commitlog cannot be read."
    if summary.unclaimed:
        return (
            WARN,
            f"Nothing was lost, but the log has {_deliveries(summary.unclaimed)} of messages that are not in it.",
        )
    if not summary.scheduled:
        return GOOD, "No message was scheduled in this store." if summary.records else "The store has no messages yet."
    if not summary.delivered + summary.cancelled:
        return GOOD, "Nothing was lost: every scheduled message still waits for its time."
    return GOOD, "Every scheduled message that the broker came to was delivered exactly once, or cancelled in time."


def _troubles(summary: Summary) -> list[str]:
    found = []
    if summary.superfluous:
        found.append(f"Beyond each message's first delivery there were {_deliveries(summary.superfluous)} more.")
    if summary.unclaimed and (summary.lost or summary.twice or summary.damaged):
        found.append(
            f"{_deliveries(summary.unclaimed)} belong to messages that are not in the log, though their place is."
        )
    if summary.damaged:
        total = sum(damage[1] for damage in summary.damages)
        found.append(
            f"{count(summary.damaged)} damaged or missing parts of the commitlog ({size(total)}) could not be read: "
            "what they held, the audit cannot tell."
        )
    if summary.overdue:
        waiting = _number(summary.overdue, "pending message", "pending messages")
        found.append(
            f"{waiting} {_was(summary.overdue)} already due when the last "
            "record was stored: the broker was behind, or had just started."
        )
    return found


def _facts(summary: Summary) -> list[str]:
    found = []
    late = summary.lateness
    p50, p99, worst = (late.percentiles_ms.get(name) for name in ("p50", "p99", "p100"))
    if late.count and None not in (p50, p99, worst):
        found.append(
            f"Half of the deliveries were at most {duration(p50)} late, 99 in 100 at most {duration(p99)}; "
            f"the latest was {duration(worst)} late."
        )
    if late.early:
        found.append(f"{_number(late.early)} came before the time ({share(late.early, late.count)}).")
    if summary.expired:
        number = _deliveries(summary.expired)
        found.append(f"{number} belong to messages whose commitlog file has expired, as files do.")
    if summary.is_running:
        found.append("A broker had the store open: what it stored after the files were read is not in here.")
    return found
