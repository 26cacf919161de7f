"""How fast is this broker beside Apache's 4.9.7? Both are started in turn on this machine, with the same clients.

    python -m tests.bench [--rounds 2] [--tiny] [--only CASE ...]      (make bench)

Time is noise, ratios count: on a small machine client and broker share the processors. Each round measures Apache's
broker and then ours; the table shows the median of the rounds. Every run of a client checks its own answer: nothing
failed, lost, doubled or early. Results are appended to tests/bench/results.jsonl with the date and the commit.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.cases import FIGURES, REAL, TINY, Figures, all_cases, apache, ours

RESULTS = Path(__file__).parent / "results.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="only see that it works")
    arguments = parser.parse_args()
    theirs, mine = asyncio.run(run(arguments.rounds, tiny=arguments.tiny))
    print(table(theirs, mine))
    if not arguments.tiny:
        record(theirs, mine)


async def run(rounds: int, *, tiny: bool) -> tuple[Figures, Figures]:
    """The medians of all figures, Apache's and ours."""
    results: dict[str, list[Figures]] = {"apache": [], "duemq": []}
    for number in range(rounds):
        for name, make in (("apache", apache), ("duemq", ours)):
            with tempfile.TemporaryDirectory(prefix="duemq-bench-") as directory:

                def say(case: str, name: str = name, number: int = number) -> None:
                    print(f"round {number + 1} of {rounds}, {name}: {case}", file=sys.stderr, flush=True)

                results[name].append(await all_cases(make, Path(directory), TINY if tiny else REAL, say))
    return median(results["apache"]), median(results["duemq"])


def median(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def table(theirs: Figures, mine: Figures) -> str:
    """The figures side by side; a ratio above 1 is in our favour."""
    lines = [f"{'':48} {'Apache 4.9.7':>14} {'duemq':>12}  {'ratio':>6}"]
    for name, figure in FIGURES.items():
        if name in mine:
            a, b = theirs[name], mine[name]
            better = (b, a) if figure.more_is_better else (a, b)
            ratio = f"{better[0] / better[1]:6.2f}" if better[1] else "      "
            lines.append(f"{figure.title:48} {_number(a):>11} {figure.unit:3}{_number(b):>9} {figure.unit:3} {ratio}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def record(theirs: Figures, mine: Figures) -> None:
    """Append the result to the file of results."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    entry = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": f"{platform.machine()}, {platform.python_version()}",
        "apache": theirs,
        "duemq": mine,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
