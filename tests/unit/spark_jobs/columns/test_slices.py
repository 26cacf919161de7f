"""Slices of a buffer as columns, compared with Python's own slices."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.columns.slices import column, gather, joined_slices, offsets_of


@st.composite
def sliced(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """A buffer and slices of it, as positions and sizes; short ones, long ones, overlapping and empty."""
    data = draw(st.binary(min_size=1, max_size=600))
    size = st.sampled_from((0, 1, 3, 8, 95, 96, 97, 300))
    pairs = draw(st.lists(st.tuples(st.integers(0, len(data)), size), max_size=30))
    return data, [(at, min(size, len(data) - at)) for at, size in pairs]


def arrays(data: bytes, pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at, size = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    return np.frombuffer(data, np.uint8), at, size


@given(sliced())
def test_joined_slices_are_what_python_joins(given_: tuple[bytes, list[tuple[int, int]]]) -> None:
    data, pairs = given_
    assert joined_slices(*arrays(data, pairs)).tobytes() == b"".join(data[at : at + size] for at, size in pairs)


@given(sliced(), st.data())
def test_a_column_has_the_slices_and_nulls(given_: tuple[bytes, list[tuple[int, int]]], draw: st.DataObject) -> None:
    data, pairs = given_
    missing = draw.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    # A missing slice may have any position.
    lost = [(-1, 0) if gone else pair for pair, gone in zip(pairs, missing, strict=True)]
    found = gather(*arrays(data, lost), missing=np.array(missing, np.bool_))
    found.validate(full=True)
    expected = [None if gone else data[at : at + size] for (at, size), gone in zip(pairs, missing, strict=True)]
    assert found.to_pylist() == expected
    assert gather(*arrays(data, pairs)).to_pylist() == [data[at : at + size] for at, size in pairs]


@given(st.lists(st.binary(max_size=12), max_size=10))
def test_text_that_is_not_utf_8_is_repaired_as_rocketmq_does(parts: list[bytes]) -> None:
    sizes = np.array([len(part) for part in parts], np.int64)
    found = column(np.frombuffer(b"".join(parts), np.uint8), offsets_of(sizes), kind=pa.string())
    found.validate(full=True)
    assert found.to_pylist() == [part.decode("utf-8", "replace") for part in parts]


def test_text_keeps_its_nulls_when_it_is_repaired() -> None:
    data = np.frombuffer(b"ok\xff", np.uint8)
    missing = np.array([False, True, False])
    found = gather(data, np.array([0, 0, 2]), np.array([2, 0, 1]), missing=missing, kind=pa.string())
    assert found.to_pylist() == ["ok", None, "\ufffd"]


def test_more_than_a_column_can_hold_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 GiB"):
        offsets_of(np.array([1 << 30, 1 << 30, 1], np.int64))
