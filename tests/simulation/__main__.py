"""Simulate lives: `python -m tests.simulation --seeds 100 --from 0` (make simulate SEEDS=100 FROM=0).

For a life that breaks a promise it prints the seed, the broken promises, the shortest script found that breaks the same
ones, and the command that repeats it. `--script FILE` repeats one that `--keep FILE` wrote."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

from tests.simulation.failures import Failure, failure_of, keep_store, shortest
from tests.support import rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="do not look for a shorter script")
    parser.add_argument("--events", action="store_true", help="tell what happened, in order")
    arguments = parser.parse_args()
    # A killed process leaves coroutines that never began.
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    seeds = [str(seed) for seed in range(arguments.first, arguments.first + arguments.seeds)]
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(arguments.processes) as pool:
        for failure in pool.map(failure_of, seeds):
            if failure is None:
                continue
            failed += 1
            print(described(failure, whole=arguments.whole, events=arguments.events), flush=True)
    print(f"{len(seeds)} lives, {failed} broke a promise; {time.monotonic() - began:.0f} s")
    sys.exit(1 if failed else 0)


def described(failure: Failure, *, whole: bool, events: bool) -> str:
    found = failure if whole else shortest(failure)
    lines = [
        f"seed {failure.script.seed}: {failure.complaints[0]}",
        *(f"    {complaint}" for complaint in failure.complaints[1:10]),
        f"  the shortest script found, {len(found.script.actions)} of {len(failure.script.actions)} actions:",
        *(f"    {action}" for action in found.script.actions),
        f"  which gives: {found.complaints[0]}",
        *(f"    {event}" for event in found.events if events),
        f"  what it leaves: {rows.newest(keep_store(found.script, Path(mkdtemp(prefix='duemq-simulation-'))))}",
        f"  again: make simulate SEEDS=1 FROM={failure.script.seed}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
