"""docs/log-events.md has each event that the broker logs, with its levels and fields, and no others."""

from __future__ import annotations

import re

import pytest

from tests.support.pages.log_events import PAGE, Event, documented, logged, sources

LOGGED = logged()
ROWS = documented(PAGE.read_text(encoding="utf-8"))


def test_each_event_has_a_row_and_each_row_an_event() -> None:
    assert sorted(ROWS) == sorted(LOGGED), f"{PAGE.name} has one row for each event that the code logs"


@pytest.mark.parametrize("name", sorted(LOGGED.keys() & ROWS.keys()))
def test_the_row_has_the_levels_and_fields(name: str) -> None:
    event, row = LOGGED[name], ROWS[name]
    assert row.levels == event.levels
    assert row.fields >= event.fields if event.has_more else row.fields == event.fields


def test_each_logger_is_called_log() -> None:
    """Otherwise its events would not be found."""
    for path in sources():
        for name in re.findall(r"(\w+) = structlog.get_logger\(", path.read_text(encoding="utf-8")):
            assert name == "log", path


def test_events_are_found_wherever_they_are_named() -> None:
    assert LOGGED["store_poisoned"] == Event({"error"}, {"what", "reason"})
    assert LOGGED["access_refused"] == Event({"warning"}, {"peer", "reason", "code"}), "passed to `Router.complain`"
    assert LOGGED["access_refused_often"] == Event({"warning"}, {"not_logged"})
    assert LOGGED["timers_not_counted"] == Event({"warning"}, {"reason"}), "passed to `Retry`"
    assert LOGGED["accounts_read"] == Event({"info"}, {"accounts", "files"}), "passed on twice"
    assert LOGGED["clock_set_forward"] == Event({"warning"}, {"ms", "while_running"}), "one of two"
    assert LOGGED["tls_certificate_expired"] == Event({"error"}, {"certificate", "days", "help"}), "each with its level"
    assert LOGGED["log_lines_lost"] == Event({"warning"}, {"lines", "reason"}), "logged without a logger"
