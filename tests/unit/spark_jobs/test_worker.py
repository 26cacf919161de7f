"""The setup of processes that run Spark's tasks."""

from __future__ import annotations

import traceback
from unittest.mock import Mock

import pytest

from duemq.spark_jobs.worker import prepare_worker


def test_each_task_begins_with_nothing_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that one task imports are not looked through after each of the next ones."""
    freeze = Mock()
    monkeypatch.setattr("gc.freeze", freeze)
    monkeypatch.setattr(traceback, "print_exc", traceback.print_exc)
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    for tasks in (1, 2, 3):
        prepare_worker()
        assert freeze.call_count == tasks


def test_a_users_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    print_exc, freeze = traceback.print_exc, Mock()
    monkeypatch.setattr("gc.freeze", freeze)
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    prepare_worker()
    assert freeze.call_count == 0
    assert traceback.print_exc is print_exc
