"""The result of an audit, in plain words."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

from duemq.spark_jobs.report.formats import count, duration, name, share, size, whole
from duemq.spark_jobs.store.local_files import is_same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from duemq.spark_jobs.analyse.comparison import Comparison
    from duemq.spark_jobs.audit.audit import Offender, Summary
    from duemq.spark_jobs.audit.starts import StartOutcome

OURS: Final = "duemq"
GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
_ASKED: Final = 5
"""Most messages that a suggested command queries: few enough to be read by people."""
_DAMAGES: Final = "store, physical_offset, size, reason, path"


class Step(NamedTuple):
    """A step to take about a finding, and a command that helps, if there is one."""

    text: str
    command: str | None = None


class AuditVerdict(NamedTuple):
    """The verdict of an audit. `mood`: GOOD, WARN or BAD. `notes`: sentences, those that need action first."""

    mood: str
    headline: str
    notes: list[str]
    steps: list[Step]


def verdict_of(summary: Summary, new: Sequence[Offender] = ()) -> AuditVerdict:
    """Return the verdict of an audit. `new`: offenders that the run before did not have; the commands query these
    first."""
    mood, headline = _headline(summary)
    return AuditVerdict(mood, headline, [*_troubles(summary), *_facts(summary)], _steps(summary, new))


def _number(number: int, one: str = "message", more: str = "messages") -> str:
    return f"{count(number)} {one if number == 1 else more}"


def _deliveries(number: int) -> str:
    return _number(number, "delivery", "deliveries")


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _them(number: int) -> str:
    return "it" if number == 1 else "them"


def _headline(summary: Summary) -> tuple[str, str]:
    mood, headline = _found(summary)
    if summary.missing:
        mood = BAD if mood == BAD else WARN
        number = f"{count(len(summary.missing))} of {_number(len(summary.stores), 'store', 'stores')}"
        headline = f"{number} could not be read. In the others: {headline}"
    return mood, headline


def _found(summary: Summary) -> tuple[str, str]:
    """Return mood and headline for the stores that could be read."""
    lost, twice = summary.lost, summary.twice
    if lost:
        more = f", and {count(twice)} delivered more than once" if twice else ""
        return BAD, f"{_number(lost, 'scheduled message', 'scheduled messages')} {_was(lost)} lost{more}."
    if summary.destroyed:
        gone = _number(summary.destroyed, "message that waited", "messages that waited")
        return BAD, f"{gone} {_was(summary.destroyed)} destroyed: queues list them, and their records are gone."
    if summary.unreachable:
        waiting = _number(summary.unreachable, "message that waits", "messages that wait")
        return BAD, f"{waiting} will not come: the broker does not find {_them(summary.unreachable)} when it starts."
    if summary.corrupt:
        records = _number(summary.corrupt, "record has", "records have")
        return BAD, f"{records} wrong bytes: what is stored there is not what was sent."
    if twice:
        return WARN, f"Nothing was lost, but {_number(twice)} {_was(twice)} delivered more than once."
    if summary.damaged:
        stretches = _number(summary.damaged, "stretch", "stretches")
        return WARN, f"No message that waited was lost, but {stretches} of the commitlog cannot be read."
    if summary.unclaimed:
        return (
            WARN,
            f"Nothing was lost, but the log has {_deliveries(summary.unclaimed)} of messages that are not in it.",
        )
    again = coming_again(summary.starts)
    if again:
        number = sum(start.again for start in again)
        names = list(dict.fromkeys(start.broker for start in again))
        when = f"when {' and '.join(names)} {'starts' if len(names) == 1 else 'start'}"
        return WARN, f"Nothing was lost, but {_number(number)} that {_was(number)} delivered will come again {when}."
    if not summary.scheduled:
        these, have = ("these stores", "stores have") if summary.stores else ("this store", "store has")
        return GOOD, f"No message was scheduled in {these}." if summary.records else f"The {have} no messages yet."
    if not summary.delivered + summary.cancelled:
        return GOOD, "Nothing was lost: every scheduled message still waits for its time."
    brokers = "brokers" if summary.stores else "broker"
    return GOOD, f"Every scheduled message that the {brokers} came to was delivered exactly once, or cancelled in time."


def coming_again(starts: Sequence[StartOutcome]) -> list[StartOutcome]:
    """Return, for each store, the outcome of the start that delivers messages again: the start of the broker that had
    the store last, else duemq's."""
    found: dict[str | None, StartOutcome] = {}
    for start in starts:
        if start.again and (start.wrote_it or (start.broker == OURS and start.store not in found)):
            found[start.store] = start
    return list(found.values())


def since_of(comparison: Comparison, store: str) -> AuditVerdict:
    """Return the verdict on what changed since the run before. `store`: the store of this run."""
    new = [_describe_offenders(status, number, "new") for status, number in comparison.new.items()]
    notes = []
    if not is_same(comparison.store, store):
        notes.append(
            f"The run before calls its store {name(comparison.store)}: if it was another one, this comparison is wrong."
        )
    for one in comparison.first_read:
        notes.append(f"{name(one)} was read for the first time: none of its offenders count as new.")
    for one in comparison.stores_gone:
        notes.append(f"{name(one)} was taken away.")
    if comparison.known:
        known = ", ".join(_describe_offenders(status, number, "") for status, number in comparison.known.items())
        notes.append(f"Known from the run before: {known}.")
    if comparison.gone:
        gone = ", ".join(_describe_offenders(status, number, "") for status, number in comparison.gone.items())
        notes.append(f"Gone since, expired or delivered after all: {gone}.")
    if new:
        is_bad = bool(comparison.new.get("lost") or comparison.new.get("destroyed"))
        return AuditVerdict(BAD if is_bad else WARN, f"{', '.join(new)}.", notes, [])
    if comparison.worse:
        return AuditVerdict(WARN, "No further message was lost or delivered twice, but some figures grew.", notes, [])
    return AuditVerdict(GOOD, "Nothing new is wrong.", notes, [])


def _describe_offenders(status: str, number: int, new: str) -> str:
    """Describe a number of offenders of a status."""
    words = {"twice": "delivered more than once", "unclaimed": "delivered without a message in the log"}
    return f"{count(number)} {f'{new} ' if new else ''}{words.get(status, status)}"


def _steps(summary: Summary, new: Sequence[Offender]) -> list[Step]:
    """Return the steps to take, the most urgent first; none if nothing is wrong."""
    store = shlex.quote(summary.store)
    offenders = [*new, *summary.offenders]
    found = [
        Step(f"{name(one.store)} could not be audited: {whole(one.why)}. Make it readable, and run this again.")
        for one in summary.missing
    ]
    if summary.lost:
        found.append(
            Step(
                "The broker will not deliver what was lost: send it again. The records with their bodies are still in "
                "the store; offenders.parquet names all of them.",
                _query_of(offenders, "lost", store),
            )
        )
    if summary.destroyed:
        found.append(
            Step(
                "The store no longer has the bodies of what was destroyed: take the messages from a slave, a backup or "
                "an archive of this broker, or ask their producers. offenders.parquet has their times and offsets."
            )
        )
    if summary.unreachable:
        found += [
            Step(
                "With the broker stopped, rebuild the files from the commitlog. This shows what is wrong with them and "
                "writes nothing (leave --dry-run out to repair them):",
                f"duemq store repair {shlex.quote(start.store or summary.store)} --dry-run",
            )
            for start in summary.starts
            if start.wrote_it and start.misses
        ]
    mended = {start.store for start in summary.starts if start.wrote_it and start.misses}
    found += [
        Step(
            "With the broker stopped, rebuild the files from the commitlog, which says what was delivered "
            "(leave --dry-run out to repair them):",
            f"duemq store repair {shlex.quote(start.store or summary.store)} --dry-run",
        )
        for start in coming_again(summary.starts)
        if start.store not in mended
    ]
    if summary.corrupt:
        found.append(
            Step(
                "audit.json says where the wrong bytes are (corruptions). Take these messages from a slave, a backup "
                "or an archive of this broker, or ask their producers."
            )
        )
    if summary.damaged or summary.corrupt:
        found.append(
            Step(
                "Look at the disk (dmesg, smartctl) before anything else is written to it; where the damage is:",
                f'duemq spark sql {store} "select {_DAMAGES if summary.stores else "*"} from damaged"',
            )
        )
    if summary.twice:
        found.append(
            Step(
                "Find out whether the consumers of these topics can receive a message twice without harm: they have "
                "had both deliveries.",
                _query_of(offenders, "twice", store),
            )
        )
    if summary.overdue:
        found.append(
            Step(
                "See whether the broker has caught up: there should be fewer of these by now.",
                f'duemq spark sql {store} "select real_topic, count(*) from pending '
                f'where due_ms < {summary.made_ms} group by real_topic"',
            )
        )
    return found


def _query_of(offenders: Sequence[Offender], what: str, store: str) -> str | None:
    """Return a command that shows the first of some offending messages; None without one."""
    mine = [one for one in offenders if one.what == what]
    if not mine:
        return None
    # For a cluster only those of one store: in another store the same offsets belong to other records.
    offsets = list(dict.fromkeys(str(one.physical_offset) for one in mine if one.store == mine[0].store))[:_ASKED]
    store = shlex.quote(mine[0].store) if mine[0].store is not None else store
    query = f"select real_topic, unique_key, keys, body from messages where physical_offset in ({', '.join(offsets)})"
    return f'duemq spark sql {store} "{query}" --format json'


def _troubles(summary: Summary) -> list[str]:
    found = []
    for start in summary.starts:
        if start.wrote_it and start.misses:
            found.append(
                f"A start of {start.broker} on {_files_of(start)} finds {count(start.finds)} of "
                f"{_number(start.finds + start.misses)} that wait: {'; '.join(start.reasons)}."
            )
    for start in coming_again(summary.starts):
        reasons = f": {'; '.join(start.reasons)}" if start.reasons and not start.misses else ""
        found.append(
            f"A start of {start.broker} on {_files_of(start)} delivers {_number(start.again)} of delay levels again, "
            f"since its files do not say that these were delivered{reasons}."
        )
    if summary.superfluous:
        found.append(f"Beyond each message's first delivery there were {_deliveries(summary.superfluous)} more.")
    if summary.unclaimed and (summary.lost or summary.twice or summary.damaged):
        found.append(
            f"{_deliveries(summary.unclaimed)} belong to messages that are not in the log, although the log covers "
            "their physical offsets."
        )
    if summary.damaged:
        total = sum(damage[1] for damage in summary.damages)
        found.append(
            f"{count(summary.damaged)} damaged or missing parts of the commitlog ({size(total)}) could not be read: "
            "the audit cannot tell what they held, except for messages that the queues list as waiting."
        )
    if summary.destroyed and summary.lost:
        gone = _number(summary.destroyed, "message", "messages")
        found.append(f"{gone} that waited {_was(summary.destroyed)} destroyed with parts of the commitlog.")
    if summary.overdue:
        waiting = _number(summary.overdue, "pending message", "pending messages")
        found.append(
            f"{waiting} {_was(summary.overdue)} already due when the last "
            "record was stored: the broker was behind, or had just started."
        )
    return found


def _files_of(start: StartOutcome) -> str:
    return f"the files of {name(start.store)}" if start.store is not None else "these files"


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
        found.append(f"{_number(late.early)} came before their time ({share(late.early, late.count)}).")
    if summary.expired:
        number = _deliveries(summary.expired)
        found.append(f"{number} belong to messages whose commitlog file has expired, as files do.")
    if summary.is_running:
        stores = "a store" if summary.stores else "the store"
        found.append(f"A broker had {stores} open: what it stored after the files were read is not included.")
    return found
