"""Any time in a record becomes a timestamp, or none."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pyarrow as pa
import pytest

from duemq.spark_jobs.cli.output import print_table
from duemq.spark_jobs.columns import instants
from duemq.spark_jobs.source.tables import RecordColumns
from tests.unit.spark_jobs.compact_world import ODD_MS

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
EDGES = ("1677-12-31 23:59:59.999", "1678-01-01 00:00:00.000", "2261-12-31 23:59:59.999", "2262-01-01 00:00:00.000")


@pytest.mark.parametrize("unit", ["ms", "us"])
def test_what_no_program_can_have_is_null(unit: str) -> None:
    texts = [datetime.datetime.fromisoformat(f"{text}+00:00") for text in EDGES]
    edges = [(text - EPOCH) // datetime.timedelta(milliseconds=1) for text in texts]
    ms = np.array([*edges, *ODD_MS], np.int64)
    found = instants.timestamps(ms, unit)
    assert found.type == pa.timestamp(unit, "UTC")
    near = [EPOCH - datetime.timedelta(milliseconds=1), EPOCH]
    assert found.to_pylist() == [None, texts[1], texts[2], None, None, None, *near, *[None] * 5]
    found.to_pandas()
    assert instants.others(ms).to_pylist() == [
        None if time is not None else value for time, value in zip(found.to_pylist(), ms.tolist(), strict=True)
    ]
    dates = [instants.date_of(day) for day in instants.days(ms).tolist()]
    assert dates == [time and time.date() for time in found.to_pylist()]


class Some:
    """Records with given times."""

    born_ms = store_ms = np.array(ODD_MS, np.int64)


@pytest.mark.parametrize("column", ["born_time", "store_time"])
def test_columns_of_tables_can_be_had(column: str) -> None:
    batch = RecordColumns.__new__(RecordColumns)
    batch.records = Some()  # type: ignore[assignment]
    assert [time is None for time in batch.column(column).to_pylist()] == [not 0 <= -ms <= 1 for ms in ODD_MS]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_any_time_of_a_query_is_printed(unit: str, form: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    times = pa.array([*ODD_MS, None, 1_700_000_000], pa.int64()).cast(pa.timestamp(unit, "UTC"))
    print_table(pa.table({"time": times}), form)
    shown = capfdbinary.readouterr().out.decode()
    assert "1970-01-01" in shown
    if form == "json":
        rows = [json.loads(line)["time"] for line in shown.splitlines()]
        assert len(rows) == len(times)
        assert rows[0] is rows[-2] is None
