"""Limits on an audit, and the input of a hook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from duemq.spark_jobs.analyse import limits
from duemq.spark_jobs.analyse.comparison import Comparison, Worse
from duemq.spark_jobs.analyse.limits import AnalysisLimits, exit_code, parse_late, tell, worst
from duemq.spark_jobs.audit.audit import Lateness
from duemq.spark_jobs.cli.commands import main
from duemq.spark_jobs.errors import JobError
from tests.unit.spark_jobs.report.report_analyses import summary

LATE = Lateness(10, 0, 1.0, {"p50": 1, "p90": 2, "p99": 200, "p99.9": 900, "p100": 1001})


@pytest.mark.parametrize(
    ("text", "percentile", "ms"),
    [("1s", "p100", 1000), ("p99=200ms", "p99", 200), ("p99.9=1.5m", "p99.9", 90_000), ("p100=2h", "p100", 7_200_000)],
)
def test_a_limit_of_lateness(text: str, percentile: str, ms: float) -> None:
    late = parse_late(text)
    assert (late.percentile, late.ms, late.text) == (percentile, ms, text)


@pytest.mark.parametrize("text", ["", "1", "s", "p98=1s", "p99=", "p99", "-1s", "1s ", "max=1s"])
def test_what_is_no_limit_of_lateness(text: str) -> None:
    with pytest.raises(ValueError, match="is not a limit; write it as 1s, or p99=200ms"):
        parse_late(text)


@pytest.mark.parametrize(
    ("given", "changes", "exceeded"),
    [
        (AnalysisLimits(), {"lateness": LATE, "twice": 5, "damaged": 5}, []),
        (
            AnalysisLimits((parse_late("1s"), parse_late("p99=200ms"))),
            {"lateness": LATE},
            ["lateness p100 is 1,001 ms, over 1s"],
        ),
        (AnalysisLimits((parse_late("p99=199ms"),)), {"lateness": LATE}, ["lateness p99 is 200 ms, over p99=199ms"]),
        (AnalysisLimits((parse_late("1ms"),)), {"lateness": Lateness(0, 0, 0.0, {})}, []),
        (AnalysisLimits(twice=0), {"twice": 1}, ["delivered more than once: 1, over 0"]),
        (AnalysisLimits(twice=1), {"twice": 1}, []),
        (AnalysisLimits(damaged=2), {"damaged": 3}, ["damaged stretches: 3, over 2"]),
        (
            AnalysisLimits(unclaimed=0),
            {"unclaimed": 1000},
            ["deliveries of messages that are not in the log: 1,000, over 0"],
        ),
    ],
)
def test_what_is_over_a_limit(given: AnalysisLimits, changes: dict[str, Any], exceeded: list[str]) -> None:
    found = summary(**changes)
    assert given.exceeded(found) == exceeded
    assert exit_code(found, exceeded) == (3 if exceeded else 0)


def test_worse_than_before_is_too_much_where_one_says_so() -> None:
    comparison = Comparison(1, "store", {"twice": 2}, {}, {}, [Worse("overdue", "count", 1, 2000)], [])
    assert AnalysisLimits().exceeded(summary(), comparison) == []
    given = AnalysisLimits(is_worse_too_much=True)
    assert given.exceeded(summary(), None) == []
    assert given.exceeded(summary(), comparison) == ["2 new twice", "overdue: 2,000, was 1"]


def test_lost_comes_before_all_limits() -> None:
    assert exit_code(summary(lost=1), ["anything"]) == 1
    assert exit_code(summary(destroyed=1), []) == 1


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([0, 3], 3), ([3, 2, 0], 2), ([2, 1, 3], 1)])
def test_the_worst_of_several_runs_counts(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_a_hook_is_told_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "told"
    tell(f"cat > {out}", "audit", "s3://bucket/store", "all's well", 0, summary=summary(delivered=7), report="r.html")
    told = json.loads(out.read_text())
    assert {name: told[name] for name in ("text", "exit", "job", "store", "report")} == {
        "text": "all's well",
        "exit": 0,
        "job": "audit",
        "store": "s3://bucket/store",
        "report": "r.html",
    }
    assert told["totals"]["delivered"] == 7
    assert tuple(told["totals"]) == limits.TOTALS


def test_a_hook_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="the hook ended with exit code 3: exit 3"):
        tell("exit 3", "audit", "store", "", 0)
    tell("exec 0<&-", "audit", "store", "x" * 1_000_000, 0)  # a hook that does not read its input
    monkeypatch.setattr(limits, "HOOK_SECONDS", 0.1)
    with pytest.raises(JobError, match=r"took more than 0\.1 s and was killed: sleep 600"):
        tell("sleep 600 | cat", "audit", "store", "", 0)


def test_a_hook_is_told_of_a_job_that_cannot_be_done(tmp_path: Path) -> None:
    out = tmp_path / "told"
    result = CliRunner().invoke(main, ["audit", str(tmp_path / "nowhere"), "--hook", f"cat > {out}; exit 1"])
    assert result.exit_code == 2
    assert "the hook ended with exit code 1" in result.output
    told = json.loads(out.read_text())
    assert (told["exit"], told["totals"]) == (2, None)
    assert (
        told["text"]
        == f"duemq audit: {tmp_path}/nowhere: there is no such directory; give the directory that holds commitlog/"
    )
