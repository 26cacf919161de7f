"""Parameters and examples of tests that are too many for each run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def sampled(values: Iterable[object], always: Iterable[object]) -> list[Any]:
    """Return values as parameters for a test: those that are in `always` for each run, the others for `make soak`
    alone. A tuple has the values of several parameters."""
    chosen = list(always)
    marked = [(value, [] if value in chosen else [pytest.mark.soak]) for value in values]
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks) for value, marks in marked]


def examples(share: float) -> settings:
    """Return Hypothesis's settings for a test whose examples cost much: a share of the number of examples that other
    tests have, whether in each run, in `make quick` or in `make soak`, and at least 4."""
    return settings(max_examples=max(4, round(settings().max_examples * share)))
