"""Limits that make a nightly run fail, and the user's hook, which receives the result.

A hook is a shell command. It gets one JSON object on standard input:

    text     the result in a sentence or two; chat services take an object with `text` as a message
    exit     the exit code: 0 good, 1 lost, destroyed, unreachable or corrupt, 2 the job could not be done, 3 over a
             limit
    job      audit or analyse
    store    its path or URI, without credentials
    report   path of report.html; null for an audit
    totals   the numbers of the audit by name; null if the job could not be done
    stores   only for a cluster: its stores, objects with `store`, `report` (the path of its own report.html, null
             if it could not be read) and `error` (why it could not, else null)
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from duemq.spark_jobs.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from duemq.spark_jobs.analyse.comparison import Comparison
    from duemq.spark_jobs.audit.audit import Summary

LOST: Final = 1
FAILED: Final = 2
EXCEEDED: Final = 3
TOTALS: Final = (
    "scheduled",
    "delivered",
    "cancelled",
    "pending",
    "lost",
    "destroyed",
    "unreachable",
    "twice",
    "overdue",
    "unclaimed",
    "damaged",
    "corrupt",
)
_LATENESS: Final = re.compile(r"(?:(p\d+(?:\.\d+)?)=)?(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
HOOK_SECONDS: Final = 60


@dataclass(frozen=True)
class LatenessLimit:
    """A limit of lateness: a percentile of the audit (p50, p90, p99, p99.9, p100), and ms."""

    percentile: str
    ms: float
    text: str


def parse_late(text: str) -> LatenessLimit:
    """Parse a limit: `1s` for the latest delivery, `p99=200ms` for a percentile. Raises ValueError."""
    found = _LATENESS.fullmatch(text)
    percentile = found[1] or "p100" if found is not None else ""
    if found is None or percentile not in ("p50", "p90", "p99", "p99.9", "p100"):
        raise ValueError(f"{text!r} is not a limit; write it as 1s, or p99=200ms (p50, p90, p99, p99.9 or p100)")
    return LatenessLimit(percentile, float(found[2]) * _UNITS[found[3]], text)


@dataclass(frozen=True)
class AnalysisLimits:
    """The limits of a run; None for no limit."""

    late: tuple[LatenessLimit, ...] = ()
    twice: int | None = None
    damaged: int | None = None
    unclaimed: int | None = None
    is_worse_too_much: bool = False
    """Whether anything worse than in the run before is over the limit."""

    def exceeded(self, summary: Summary, comparison: Comparison | None = None) -> list[str]:
        """Return a line for each figure of an audit, and of its comparison with the one before, that is over a
        limit."""
        found = []
        for limit in self.late:
            late_ms = summary.lateness.percentiles_ms.get(limit.percentile)
            if late_ms is not None and late_ms > limit.ms:
                found.append(f"lateness {limit.percentile} is {late_ms:,} ms, over {limit.text}")
        for name, what, most in (
            ("twice", "delivered more than once", self.twice),
            ("damaged", "damaged stretches", self.damaged),
            ("unclaimed", "deliveries of messages that are not in the log", self.unclaimed),
        ):
            number = getattr(summary, name)
            if most is not None and number > most:
                found.append(f"{what}: {number:,}, over {most:,}")
        if self.is_worse_too_much and comparison is not None:
            found += [f"{number:,} new {status}" for status, number in comparison.new.items()]
            found += [f"{worse.name}: {worse.now:,}, was {worse.before:,}" for worse in comparison.worse]
        return found


def exit_code(summary: Summary, exceeded: list[str]) -> int:
    """Return the exit code of a run: 0, LOST or EXCEEDED."""
    return LOST if not summary.is_good else EXCEEDED if exceeded else 0


def worst(codes: list[int]) -> int:
    """Return the most severe of some exit codes: LOST, then FAILED, then EXCEEDED, then 0."""
    return next(code for code in (LOST, FAILED, EXCEEDED, 0) if code in codes)


def tell(
    hook: str,
    job: str,
    store: str,
    text: str,
    code: int,
    *,
    summary: Summary | None = None,
    report: str | None = None,
    stores: Sequence[Mapping[str, str | None]] = (),
) -> None:
    """Run a hook. Raises JobError if it fails, or takes more than HOOK_SECONDS."""
    totals = {name: getattr(summary, name) for name in TOTALS} if summary is not None else None
    told = {"text": text, "exit": code, "job": job, "store": store, "report": report, "totals": totals}
    told |= {"stores": list(stores)} if stores else {}
    with subprocess.Popen(hook, shell=True, stdin=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            process.communicate(json.dumps(told), HOOK_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all processes of the shell
            raise JobError(f"the hook took more than {HOOK_SECONDS} s and was killed: {hook}") from None
    if process.returncode:
        raise JobError(f"the hook ended with exit code {process.returncode}: {hook}")
