"""Which directories a path with wildcards names."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_jobs.errors import JobError
from spark_jobs.files import expand


def test_a_path_without_wildcards_is_itself(tmp_path: Path) -> None:
    assert expand(str(tmp_path / "nowhere")) == [str(tmp_path / "nowhere")]
    assert expand("s3://key:secret@bucket/store?region=x") == ["s3://key:secret@bucket/store?region=x"]


def test_wildcards_name_directories_in_order(tmp_path: Path) -> None:
    for name in ("b-2", "b-10", "c-1", "a[1]"):
        (tmp_path / name / "store").mkdir(parents=True)
    (tmp_path / "b-file").write_text("no directory")
    assert expand(f"{tmp_path}/b-*") == [f"{tmp_path}/b-10", f"{tmp_path}/b-2"]
    assert expand(f"file://{tmp_path}/[bc]-?/store") == [f"{tmp_path}/b-2/store", f"{tmp_path}/c-1/store"]
    # A directory of that very name is meant before what its name would match.
    assert expand(f"{tmp_path}/a[1]") == [f"{tmp_path}/a[1]"]
    with pytest.raises(JobError, match=r"d-\*: there is no such directory"):
        expand(f"{tmp_path}/d-*")
