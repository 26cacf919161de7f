"""Hashes do not depend on the position of a value and its neighbours, and differ for different values."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.columns.hashes import hash_ints, hash_slices

VALUES = st.lists(st.binary(max_size=40), min_size=1, max_size=20)
INTS = st.integers(-(2**63), 2**63 - 1)


def hashes_of(values: list[bytes], between: bytes = b"") -> list[int]:
    """The hashes of values that lie one after the other, with bytes between them."""
    data, at = b"", []
    for value in values:
        data += between
        at.append(len(data))
        data += value
    array = np.frombuffer(data + b"\xee" * 8, np.uint8)
    size = np.array([len(value) for value in values], np.int64)
    hashes: list[int] = hash_slices(array, np.array(at, np.int64), size).tolist()
    return hashes


@given(VALUES, st.binary(max_size=9))
def test_a_hash_is_of_the_value_alone(values: list[bytes], between: bytes) -> None:
    alone = [hashes_of([value])[0] for value in values]
    assert hashes_of(values) == alone
    assert hashes_of(values, between) == alone
    assert hashes_of(values[::-1])[::-1] == alone
    assert all(0 <= value < 2**63 for value in alone)


@given(VALUES)
def test_different_values_have_different_hashes(values: list[bytes]) -> None:
    assert len(set(hashes_of(values))) == len(set(values))


@given(st.binary(min_size=1, max_size=40), st.data())
def test_one_bit_changes_the_hash(value: bytes, data: st.DataObject) -> None:
    changed = bytearray(value)
    changed[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert hashes_of([value]) != hashes_of([bytes(changed)])
    assert hashes_of([value]) != hashes_of([value + b"\0"])


@given(st.lists(st.tuples(INTS, INTS), min_size=1, max_size=20), st.integers(0, 20))
def test_rows_of_integers_are_hashed_one_by_one(rows: list[tuple[int, int]], cut: int) -> None:
    columns = [np.array([row[i] for row in rows], np.int64) for i in (0, 1)]
    whole = hash_ints(*columns).tolist()
    assert whole == [
        *hash_ints(*(column[:cut] for column in columns)).tolist(),
        *hash_ints(*(column[cut:] for column in columns)).tolist(),
    ]
    assert len(set(whole)) == len(set(rows))
    assert hash_ints(columns[0]).tolist() != whole or not rows


def test_the_order_of_columns_counts() -> None:
    one, two = np.array([1]), np.array([2])
    assert hash_ints(one, two)[0] != hash_ints(two, one)[0]


def test_another_process_has_the_same_hashes() -> None:
    """Another process computes the same hashes, which go from task to task and into files; Python's own differ from
    process to process."""
    code = (
        "from tests.unit.spark_jobs.columns.test_hashes import hashes_of; print(hashes_of([b'', b'orders', b'x' * 33]))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(hashes_of([b"", b"orders", b"x" * 33]))


def test_they_are_spread_evenly() -> None:
    values = [b"order-%06d" % number for number in range(16_000)]
    counts = np.bincount(np.array(hashes_of(values)) % 16, minlength=16)
    assert counts.min() > 800
    assert counts.max() < 1200
