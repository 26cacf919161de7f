"""Figures by name, their meanings, and the table that shows them side by side."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Figures = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """A row of the table. `more_is_better` decides in which direction the ratio is good."""

    title: str
    unit: str
    more_is_better: bool


def median(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def part(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; 1 gives the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def table(rows: Mapping[str, Figure], theirs: Figures, mine: Figures, other: str) -> str:
    """Return the figures side by side; a ratio above 1 is in duemq's favour. A figure that one broker lacks is a
    dash."""
    lines = [f"{'':52} {other:>14} {'duemq':>12}  {'ratio':>6}"]
    for name, figure in rows.items():
        a, b = theirs.get(name), mine.get(name)
        if a is None and b is None:
            continue
        line = f"{figure.title:52} {_number(a):>11} {figure.unit:3}{_number(b):>9} {figure.unit:3}"
        if a is not None and b is not None:
            good, bad = (b, a) if figure.more_is_better else (a, b)
            line += f" {good / bad:6.2f}" if bad else ""
        lines.append(line.rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


async def figures_of(
    cases: Iterable[Callable[[T], Awaitable[Figures]]], bench: T, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`; each case is announced before it begins."""
    figures: Figures = {}
    for case in cases:
        if case.__name__ in only:
            say(case.__name__)
            figures |= await case(bench)
    return figures
