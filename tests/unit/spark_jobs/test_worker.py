"""The setup of processes that run Spark's tasks."""

from __future__ import annotations

import itertools
import traceback
from unittest.mock import Mock

import pytest

from duemq.spark_jobs import worker


def test_modules_are_frozen_and_the_objects_of_later_tasks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that the first task imports are not looked through after each of the next ones; what these make is
    collected, however many they are."""
    freeze = Mock()
    monkeypatch.setattr("gc.freeze", freeze)
    monkeypatch.setattr(traceback, "print_exc", traceback.print_exc)
    monkeypatch.setattr(worker, "_TASKS", itertools.count())
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    counts = []
    for _ in range(5):
        worker.prepare_worker()
        counts.append(freeze.call_count)
    assert counts == [1, 2, 2, 2, 2]


def test_a_users_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    print_exc, freeze = traceback.print_exc, Mock()
    monkeypatch.setattr("gc.freeze", freeze)
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    worker.prepare_worker()
    assert freeze.call_count == 0
    assert traceback.print_exc is print_exc
