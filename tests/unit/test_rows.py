"""The rows of a store that failing tests show."""

from __future__ import annotations

from pathlib import Path

from tests.support import rows
from tests.unit.spark_jobs.compact_world import START_MS, Broker, new_broker


def test_the_records_with_some_bodies_and_the_newest(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    for number in range(100):
        broker.send("orders", b"body %d" % number)
    broker.timer(START_MS + 60_000, b"later")
    broker.run()
    broker.close()
    head, first, second = rows.about(broker.root, [b"body 7", b"later", b"unknown"]).splitlines()
    assert head == f"2 records of {broker.root} have these bodies:"
    assert first.endswith(' body="body 7"')
    assert second.endswith(' body="later"')
    newest = rows.newest(broker.root)
    assert "queueOffset=99" in newest
    assert "queueOffset=40 " not in newest
    assert "position=0 second=" in newest
    assert "note timers, " in newest
    Broker.let_go_of_all()
