"""Filters that Spark hands down: what they leave of a store's ranges, and of the records of one.

Spark applies them to what comes out once more, so that leaving in too much costs time and never a wrong row.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spark_jobs.roles import NAMES

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql.datasource import Filter

    from spark_jobs.records import Records

_MAX: Final = (1 << 63) - 1
_BOUNDED: Final = ("physical_offset", "store_ms", "born_ms", "queue_offset", "queue_id", "reconsume_times")


class Filters:
    """What rows have to be. Picklable."""

    def __init__(self) -> None:
        self.topics: frozenset[str] | None = None
        self.roles: frozenset[str] | None = None
        self.bounds: dict[str, tuple[int, int]] = {}
        """Of a column the least and the greatest value."""

    def add(self, filters: Iterable[Filter]) -> None:
        """Take up what is understood of them."""
        from pyspark.sql import datasource as spark

        for item in filters:
            attribute = getattr(item, "attribute", None)
            if not attribute or len(attribute) != 1:
                continue
            name, value = attribute[0], getattr(item, "value", None)
            if isinstance(item, spark.In):
                self._one_of(name, list(value or ()))
            elif isinstance(item, spark.EqualTo | spark.EqualNullSafe):
                self._one_of(name, [value])
                self._bound(name, value, value)
            elif isinstance(item, spark.GreaterThan):
                self._bound(name, value, None, open_ends=True)
            elif isinstance(item, spark.GreaterThanOrEqual):
                self._bound(name, value, None)
            elif isinstance(item, spark.LessThan):
                self._bound(name, None, value, open_ends=True)
            elif isinstance(item, spark.LessThanOrEqual):
                self._bound(name, None, value)

    def _one_of(self, name: str, values: list[Any]) -> None:
        chosen = frozenset(value for value in values if isinstance(value, str))
        if len(chosen) != len(values):
            return
        if name == "topic":
            self.topics = chosen if self.topics is None else self.topics & chosen
        elif name in ("role", "kind"):
            self.roles = chosen if self.roles is None else self.roles & chosen

    def _bound(self, name: str, low: Any, high: Any, *, open_ends: bool = False) -> None:
        if name in ("store_time", "born_time"):
            # Whole ms on the outside: a timestamp has microseconds, a record has not.
            name, open_ends = name.replace("_time", "_ms"), False
            low = _floor_ms(low)
            high = _floor_ms(high)
        if name not in _BOUNDED or not all(value is None or type(value) is int for value in (low, high)):
            return
        low = -_MAX if low is None else low + open_ends
        high = _MAX if high is None else high - open_ends
        known = self.bounds.get(name, (-_MAX, _MAX))
        self.bounds[name] = max(known[0], low), min(known[1], high)

    def span(self, name: str) -> tuple[int, int]:
        """The least and the greatest value that a column may have."""
        return self.bounds.get(name, (-_MAX, _MAX))

    def keep(self, records: Records) -> Records:
        """The records that may be wanted."""
        if not len(records):
            return records
        for name in self.bounds:
            values: NDArray[np.int64] = getattr(records, name)
            low, high = self.bounds[name]
            wanted = (values >= low) & (values <= high)
            if not wanted.all():
                records = records.take(wanted)
            if not len(records):
                return records
        if self.topics is not None:
            codes, names = records.topics()
            wanted = np.array([name in self.topics for name in names], np.bool_)[codes]
            if not wanted.all():
                records = records.take(wanted)
        return records

    def role_mask(self, role: NDArray[np.int8]) -> NDArray[np.bool_] | None:
        """Which of some roles are wanted; None for all."""
        if self.roles is None:
            return None
        mask: NDArray[np.bool_] = np.array([name in self.roles for name in NAMES], np.bool_)[role]
        return mask


def _floor_ms(value: Any) -> Any:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return int(value.timestamp() * 1_000_000) // 1000
    return None
