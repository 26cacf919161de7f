"""Lives that break a promise, and the shortest scripts that still break it."""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from tests.simulation.life import begin
from tests.simulation.oracle import complaints
from tests.simulation.script import Action, Script, generate
from tests.simulation.world import ROOT

_TRIES = 200


@dataclass(frozen=True)
class Failure:
    """A script whose life broke promises."""

    script: Script
    complaints: list[str]
    events: list[str]

    @property
    def kind(self) -> str:
        """The broken promises, without names and numbers."""
        return "".join(letter for letter in self.complaints[0] if not letter.isdigit())[:40]


def failure_of(seed: str) -> Failure | None:
    """Return the failure of a seed; None if all promises were kept."""
    return failure_in(generate(seed))


def failure_in(script: Script) -> Failure | None:
    """Do as `failure_of`, for a script. Nothing is logged."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        life = begin(script)
        try:
            life.world.run(life.live())
            found = list(complaints(life))
        except Exception as error:  # any exception means that the life went wrong
            frames = traceback.format_exc().splitlines()[-8:]
            found = [*life.world.wrong[:1], f"{type(error).__name__}: {error}", *frames]
    finally:
        structlog.configure(**before)  # other tests look at logs
    return Failure(script, found, list(life.world.events)) if found else None


def keep_store(script: Script, directory: Path) -> Path:
    """Live a script once more, and write the store at its end into a directory; return the path of the store there."""
    life = begin(script)
    with suppress(Exception):  # the failure itself is known already
        life.world.run(life.live())
    life.world.disk.keep(directory)
    return directory / ROOT.lstrip("/")


def shortest(failure: Failure) -> Failure:
    """Leave out actions as long as the failure stays of the same kind: halves first, then quarters, and so on."""
    best, tries = failure, 0
    count = max(1, len(best.script.actions) // 2)
    while tries < _TRIES:
        at, is_shorter = 0, False
        while at < len(best.script.actions) and tries < _TRIES:
            tries += 1
            kept = _without(best.script.actions, at, count)
            found = failure_in(replace(best.script, actions=kept))
            if found is not None and found.kind == failure.kind:
                best, is_shorter = found, True
            else:
                at += count
        if count == 1 and not is_shorter:
            break
        count = max(1, count // 2)
    return best


def _without(actions: tuple[Action, ...], at: int, count: int) -> tuple[Action, ...]:
    return actions[:at] + actions[at + count :]
