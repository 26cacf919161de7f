"""The examples in the docs for Python and notebooks run as they are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.spark.world.commands import Commands
from tests.unit.spark_jobs.compact_world import new_broker

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "spark-jobs.md").read_text(encoding="utf-8")


def test_the_snippet_of_the_docs(commands: Commands, tmp_path: Path) -> None:
    for name, count in (("a", 7), ("b", 4)):
        broker = new_broker(tmp_path / name / "store")
        for number in range(count):
            broker.send("orders", b"x", f"KEYS\x01{number}")
            broker.schedule(4, b"later", str(number))
        broker.schedule(1, b"soon", "soon")
        broker.pass_time(1500)
        broker.close()
    _, _, section = TEXT.partition("### In Python and notebooks\n\n")
    lines = re.match(r"(?:(?: {4}.*)?\n)+", section)
    assert lines is not None
    code = re.sub(r"(?m)^ {4}", "", lines[0]).replace("/data/", f"{tmp_path}/")
    code += "print(orders.count(), sorted(row.store[-7:] for row in orders.select('store').distinct().collect()))\n"
    code += "print(waiting.to_dict('records'))\n"
    run = commands.run_code(code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == [
        "1 0 0",
        "13 ['a/store', 'b/store']",
        "[{'real_topic': 'orders', 'count': 7}]",
    ]
