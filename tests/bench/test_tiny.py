"""The benchmarks' cases of delay levels at their smallest, over this broker alone: they must not rot between releases.

What a case measures is checked by the case itself: each message delivered once, none early.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import level_cases
from tests.bench.brokers import ours

# Cases of one group share the broker's stores, which take seconds to fill and to become due.
ALONE = [("overdue", "drain_latency", "paths"), ("overdue_levels",), ("steady",), ("pending",)]
WITH_JAVA = [("overdue_java",)]


@pytest.mark.parametrize(
    "names", [*ALONE, *(pytest.param(names, marks=pytest.mark.interop) for names in WITH_JAVA)], ids="+".join
)
async def test_a_case_gives_its_figures(names: tuple[str, ...], tmp_path: Path) -> None:
    said: list[str] = []
    figures = await level_cases.run(ours, tmp_path, level_cases.TINY, names, said.append)
    assert tuple(said) == names
    assert figures
    assert set(figures) <= set(level_cases.FIGURES)
    assert all(value >= 0 for value in figures.values()), figures
    assert figures.get("steady_refused", 0) == 0


def test_every_case_is_exercised_here() -> None:
    assert {name for names in ALONE + WITH_JAVA for name in names} == set(level_cases.NAMES)
