"""Distinct values, compared with numpy's own function."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.scheduler.timers.index.sorted_offsets import distinct_of, union

OFFSETS = st.lists(st.integers(-5, 5) | st.integers(-(2**62), 2**62), max_size=30)


@given(OFFSETS)
def test_distinct_values_with_their_first_places_and_counts(values: list[int]) -> None:
    found = distinct_of(np.array(values, np.int64))
    wanted = sorted(set(values))
    assert found.values.tolist() == wanted
    assert found.firsts.tolist() == [values.index(value) for value in wanted]
    assert found.counts.tolist() == [values.count(value) for value in wanted]


@given(st.lists(OFFSETS, max_size=4))
def test_joined(parts: list[list[int]]) -> None:
    arrays = [np.array(part, np.int64) for part in parts]
    assert union(arrays).tolist() == sorted({value for part in parts for value in part})


@pytest.mark.parametrize("call", ["union([np.array([3, 1, 3])])", "distinct_of(np.array([3, 1, 3]))"])
def test_no_module_is_imported_for_it(call: str) -> None:
    program = f"""
import sys
import numpy as np
from duemq.scheduler.timers.index.sorted_offsets import distinct_of, union
before = set(sys.modules)
{call}
print(*set(sys.modules) - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
