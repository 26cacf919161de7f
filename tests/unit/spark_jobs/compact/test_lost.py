"""The messages that a compaction counts as lost."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from duemq.spark_jobs.audit.events import CONTINUED, DELIVERED
from duemq.spark_jobs.audit.matching import RangeFound
from duemq.spark_jobs.compact import lost
from duemq.spark_jobs.compact.lost import MatchTask, ReadTask
from duemq.spark_jobs.store.walks import Range
from duemq.spark_jobs.writers.spill import save
from tests.unit.spark_jobs.audit.test_matching import Done, Wait, done_of, waits_of

NONE = np.empty(0, np.int64)


@pytest.mark.parametrize(
    ("done", "delivered", "withdrawn"),
    [
        ([Done(20, DELIVERED, 5)], [5], []),
        ([Done(9, CONTINUED, 5, key=7), Done(20, DELIVERED, 9)], [9], [5]),
    ],
    ids=["delivered by us", "given another time by us"],
)
def test_what_rocketmq_rolled_is_done_where_its_last_record_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: list[Done], delivered: list[int], withdrawn: list[int]
) -> None:
    """A message that RocketMQ rolled is done if its last record is: no record names the first one, which would
    otherwise wait again in the new store, whatever the outcome of the last."""
    waits = [Wait(1, 7, 7, passed=True), Wait(5, 7, 7, again=True, passed=True), Wait(9, 7, 7), Wait(3, 8, 8)]
    waits = [wait for wait in waits if wait.offset != 9 or withdrawn]
    found = RangeFound({}, waits_of(waits), done_of(done), NONE, None)
    monkeypatch.setattr(lost, "read_range", lambda *_: found)
    save(str(tmp_path), "delivered", np.array(delivered, np.int64))
    save(str(tmp_path), "withdrawn", np.array(withdrawn, np.int64))
    lost.read(ReadTask(Mock(), Range(0, 100), 0, str(tmp_path), Mock(), 1))
    matched = lost.match_bucket(MatchTask(0, 1, str(tmp_path), NONE))
    assert matched.undelivered.tolist() == [3]
