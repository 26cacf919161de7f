"""The directories that a path with wildcards names."""

from __future__ import annotations

from pathlib import Path

import pytest

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.local_files import each_once, expand, refuse_within, size_text


def test_a_path_without_wildcards_is_itself(tmp_path: Path) -> None:
    assert expand(str(tmp_path / "nowhere")) == [str(tmp_path / "nowhere")]
    assert expand("s3://key:secret@bucket/store?region=x") == ["s3://key:secret@bucket/store?region=x"]


def test_wildcards_name_directories_in_order(tmp_path: Path) -> None:
    for name in ("b-2", "b-10", "c-1", "a[1]"):
        (tmp_path / name / "store").mkdir(parents=True)
    (tmp_path / "b-file").write_text("no directory")
    assert expand(f"{tmp_path}/b-*") == [f"{tmp_path}/b-10", f"{tmp_path}/b-2"]
    assert expand(f"file://{tmp_path}/[bc]-?/store") == [f"{tmp_path}/b-2/store", f"{tmp_path}/c-1/store"]
    # A directory of exactly that name takes precedence over matches of the pattern.
    assert expand(f"{tmp_path}/a[1]") == [f"{tmp_path}/a[1]"]
    with pytest.raises(JobError, match=r"d-\*: there is no such directory"):
        expand(f"{tmp_path}/d-*")


def test_a_store_of_several_names_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name / "commitlog").mkdir(parents=True)
    (tmp_path / "a-link").symlink_to("a")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "commitlog").symlink_to("../b/commitlog")
    told: list[str] = []
    for names in (["a", "a/"], ["a", "./a"], ["a", f"file://{tmp_path}/a"], ["a", "b/../a"], ["a", "a"]):
        told.clear()
        assert each_once(names, told.append) == ["a"]
        assert told == ([] if names[1] == "a" else [f"{names[1]} is a by another name, and is read once"])
    told.clear()
    assert each_once([*expand("*"), "b", "./b"], told.append) == ["a", "b"]
    others = [("a-link", "a"), ("c", "b"), ("./b", "b")]
    assert told == [f"{other} is {name} by another name, and is read once" for other, name in others]
    # Missing ones are told apart by their paths.
    assert each_once(["nowhere", "nowhere/", "elsewhere"]) == ["nowhere", "elsewhere"]


def test_a_store_behind_a_uri_of_several_names() -> None:
    uris = ["hdfs://name/store", "hdfs://name/store/", "hdfs://name/other", "s3://b/s?region=x", "s3://b/s?region=y"]
    assert each_once(uris) == [uris[0], *uris[2:]]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (900, "900 B"), (5000, "4.9 KiB"), (3_800_000, "3.6 MiB"), (1 << 41, "2.0 TiB")]
)
def test_sizes_have_the_unit_that_fits(size: int, text: str) -> None:
    assert size_text(size) == text


def test_a_store_may_lie_elsewhere_than_its_commitlog(tmp_path: Path) -> None:
    (tmp_path / "disk" / "log").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "commitlog").symlink_to(tmp_path / "disk" / "log")
    refuse_within(
        str(tmp_path / "store"), None, str(tmp_path / "disk" / "other"), str(tmp_path / "store-2"), "s3://b/a"
    )
    for inside in ("store/x", "disk/log/x"):
        with pytest.raises(JobError, match="lies in the store that is read"):
            refuse_within(str(tmp_path / "store"), str(tmp_path / inside))
    with pytest.raises(JobError, match="lies in the store that is read"):
        refuse_within("hdfs://name/store/", "hdfs://name/store/report")
    refuse_within("hdfs://name/store", "hdfs://name/store-2", "/store/x")


@pytest.mark.parametrize("name", ["config", "consumequeue", "index", "timerlog", "consumequeue/T", "consumequeue/T/0"])
def test_a_store_may_have_directories_that_are_links(tmp_path: Path, name: str) -> None:
    """An output inside a linked directory of the store is refused: files written there a broker takes for a topic, a
    queue or a file of its own."""
    link = tmp_path / "store" / name
    link.parent.mkdir(parents=True)
    (tmp_path / "real" / "there").mkdir(parents=True)
    link.symlink_to(tmp_path / "real")
    for path in ("real", "real/report", "real/there/x/y", f"store/{name}/report"):
        with pytest.raises(JobError, match=f"{tmp_path}/{path}: lies in the store that is read, {tmp_path}/store;"):
            refuse_within(str(tmp_path / "store"), str(tmp_path / path))
    refuse_within(f"file://{tmp_path}/store", str(tmp_path / "report"), str(tmp_path / "real-2"), "s3://b/real")


def test_a_link_of_a_store_into_what_holds_it_refuses_nothing(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    (tmp_path / "store" / "up").symlink_to(tmp_path)
    (tmp_path / "store" / "itself").symlink_to(tmp_path / "store" / "itself")
    (tmp_path / "store" / "gone").symlink_to(tmp_path / "gone")
    refuse_within(str(tmp_path / "store"), str(tmp_path / "report"))
    with pytest.raises(JobError, match="lies in the store that is read"):
        refuse_within(str(tmp_path / "store"), str(tmp_path / "store" / "up" / "store" / "x"))
