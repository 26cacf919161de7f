"""The broker logs that a failing test shows."""

from __future__ import annotations

import time
from pathlib import Path

from tests.peers.brokers.process import Process


async def test_the_logs_of_what_ran_are_found(tmp_path: Path) -> None:
    before = Process("before", ["sh", "-c", "echo up"], tmp_path / "before.out")
    await before.start("up")
    await before.stop()
    begin = time.time()
    log = tmp_path / "broker.log"
    script = f"seq 100 > {log}; echo first; echo up"
    broker = Process("a broker", ["sh", "-c", script], tmp_path / "broker.out", logs=[log, tmp_path / "none.log"])
    for _ in range(2):
        await broker.start("up")
        await broker.stop()
    assert dict(Process.logs_since(begin)) == {
        f"a broker, the end of {tmp_path}/broker.out": "first\nup\nfirst\nup",
        f"a broker, the end of {log}": "\n".join(map(str, range(61, 101))),
    }
