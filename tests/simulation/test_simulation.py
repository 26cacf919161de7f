"""Goal: the broker keeps its promises under any sequence of faults: no acknowledged message is lost, and each scheduled
message is delivered once, never early, and soon after the faults end.

Method: whole brokers on a simulated machine, run by scripts made from seeds (see the package's modules). A failure is
reported with the shortest script that reproduces it and the command that repeats it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulation.__main__ import described
from tests.simulation.failures import Failure, failure_in, failure_of
from tests.simulation.found import FOUND
from tests.simulation.script import generate

# Each kind of action, with each of its ways, and each setting that the scripts of the seeds 0 to 29 have is in two of
# these or in as many as there are. Each run takes these, `make soak` the others below 100 as well.
EACH_RUN = (1, 5, 6, 9, 11, 12, 13, 14, 15, 16, 17, 23, 24, 27, 28, 29)
OTHERS = [seed for seed in range(100) if seed not in EACH_RUN]


def together(seeds: Sequence[int]) -> list[Sequence[int]]:
    """Return the seeds in groups, each for one test."""
    return [seeds[at : at + 4] for at in range(0, len(seeds), 4)]


@pytest.mark.parametrize(
    "seeds", [*together(EACH_RUN), *(pytest.param(each, marks=pytest.mark.soak) for each in together(OTHERS))], ids=str
)
def test_promises_are_kept(seeds: Sequence[int]) -> None:
    for seed in seeds:
        failure = failure_of(str(seed))
        assert failure is None, described(failure, whole=False, events=False)


def test_a_seed_decides_everything() -> None:
    """The same seed gives the same life twice, to the last operation."""
    from tests.simulation.life import run
    from tests.simulation.script import generate

    for seed in ("3", "17"):
        lives = [run(generate(seed)) for _ in range(2)]
        first, second = ((life.world.disk.work, list(life.world.events), life.world.loop.callbacks) for life in lives)
        assert first == second


def test_a_failure_shows_what_the_store_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    told = described(Failure(generate("3"), ["lost: all of it"], []), whole=True, events=False)
    (store,) = tmp_path.glob("*/store")
    assert f"python -m duemq.broker.dump {store} shows all of it" in told
    assert re.search(r"\n  .*checkpoint: checkpoint, \d+ bytes\n", told)
    assert re.search(r"\n  offset=\d+ size=\d+ topic=", told)


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_once_is_not_found_again(what: str) -> None:
    failure = failure_in(FOUND[what])
    assert failure is None, described(failure, whole=False, events=False)
