"""Parameters of tests that are too many for each run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[object], always: Iterable[object]) -> list[Any]:
    """Return values as parameters for a test: those that are in `always` for each run, the others for `make soak`
    alone. A tuple has the values of several parameters."""
    chosen = list(always)
    marked = [(value, [] if value in chosen else [pytest.mark.soak]) for value in values]
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks) for value, marks in marked]
