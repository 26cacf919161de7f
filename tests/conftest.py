"""Settings for all tests: the summary says why a test was tried again."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# The duration of an example proves nothing: the machine may be busy, and first calls of numpy's and pyarrow's functions
# take longer than all others. `make soak` takes more examples, `make quick` fewer.
settings.register_profile("each run", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20)
settings.register_profile("soak", settings.get_profile("each run"), max_examples=2000)
settings.register_profile("quick", settings.get_profile("each run"), max_examples=10)
settings.load_profile("each run")

# numpy starts a thread for each processor, which costs each of the hundreds of processes 60 ms. The tests' processes do
# no algebra.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# pytest parses and rewrites hundreds of test modules while it collects tests: objects by the million, next to no
# garbage. The collector, which looked through them again and again, took a third of that time.
gc.disable()

# Without this a failed check in a helper says "AssertionError" without the values.
pytest.register_assert_rewrite(
    "tests.crash",
    "tests.fuzz",
    "tests.interop",
    "tests.peers",
    "tests.simulation",
    "tests.spark",
    "tests.support",
    "tests.unit",
)

from tests.support import canary  # noqa: E402 (behind what rewrites it)


def pytest_collection_finish() -> None:
    """Freeze modules and tests out of garbage collection: a broker collects garbage at its start, and hundreds of
    brokers start here."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test fail that shows a secret, see `tests.support.canary`."""
    report = yield
    for name, content in report.sections:
        canary.look(name, content)
    found = canary.take()
    if found and report.outcome != "failed":
        report.outcome = "failed"
        report.longrepr = "secrets are shown in\n" + "\n".join(found)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("rerun", [])
    if reports:
        terminalreporter.section("why tests were tried again")
    for report in reports:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = f"{crash.path}:{crash.lineno}: {crash.message}" if crash is not None else str(report.longrepr)
        terminalreporter.write_line(f"{report.nodeid}\n    {reason[:2000]}")
