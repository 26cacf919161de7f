"""A folder of nights: each run has its directory, the page lists them, and only nights are ever removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from duemq.spark_jobs.analyse import nights
from duemq.spark_jobs.analyse.analysis import Analysis
from duemq.spark_jobs.analyse.comparison import Comparison
from duemq.spark_jobs.analyse.history import Night, read_history, run_of
from duemq.spark_jobs.analyse.nights import RunOutput
from duemq.spark_jobs.cli.commands import main
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.report import formats, render_index
from duemq.storage.files import OsFiles
from tests.unit.spark_jobs.report import report_analyses as given_by
from tests.unit.spark_jobs.report.report_analyses import DAY, HOSTILE, MONDAY, many_nights, write_audit
from tests.unit.spark_jobs.report.test_report import parse

STORE = "/var/lib/duemq"
NAMES = [f"2025-11-{17 + day}T000000Z" for day in range(10)]


def night(day: int, lost: int = 0, store: str = STORE) -> Analysis:
    """The findings of a run on a day: a number of lost messages, always the same first ones."""
    offenders = [given_by.offender(number, "lost") for number in range(lost)]
    counts = {"scheduled": 100, "delivered": 100 - lost, "records": 100, "lost": lost}
    audit = given_by.summary(**counts, offenders=offenders, store=store)
    return given_by.analysis(audit=audit, made_ms=MONDAY + day * DAY, store=store)


def run(folder: Path, analysis: Analysis, keep: int | None = None) -> tuple[Comparison | None, list[str]]:
    """Run as the command does; the output of Spark is written by hand."""
    with RunOutput(analysis.store, folder=str(folder)) as output:
        write_audit(analysis.audit, Path(output.out))
        report, comparison, left = output.finish(analysis, keep=keep)
    assert Path(report).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    return comparison, left


def listed(folder: Path) -> list[str]:
    """The nights that the page links, in order."""
    page = parse((folder / "index.html").read_text(encoding="utf-8"))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links[0] == links[1], "the last night is at the top, and in the table"
    for link in links:
        assert (folder / link).is_file()
    return [link.removesuffix("/report.html") for link in links[1:]]


def test_each_run_has_a_night_and_the_page_lists_them(tmp_path: Path) -> None:
    folder = tmp_path / "nights"
    assert run(folder, night(0)) == (None, [])
    for day, lost in ((1, 0), (2, 3), (3, 3)):
        comparison, _ = run(folder, night(day, lost))
        assert comparison is not None
        assert comparison.made_ms == given_by.summary().made_ms
        assert comparison.new == ({"lost": 3} if day == 2 else {})
        assert comparison.known == ({"lost": 3} if day == 3 else {})
    assert listed(folder) == NAMES[3::-1]
    names = {path.name for path in folder.iterdir()}
    assert names == {*NAMES[:4], "index.html", "history.jsonl", ".nights.lock"}
    assert {path.name for path in (folder / NAMES[1]).iterdir()} == {
        "report.html", "analysis.json", "audit.json", "offenders.parquet", "comparison.json", "night.json", "parquet",
    }  # fmt: skip
    assert [one.made_ms for one in read_history(str(folder / "history.jsonl"))] == [MONDAY + d * DAY for d in range(4)]
    text = parse((folder / "index.html").read_text(encoding="utf-8")).text
    assert "3 scheduled messages were lost" in text
    assert "2025-11-20 00:00:00" in text
    report = (folder / NAMES[3] / "report.html").read_text(encoding="utf-8")
    assert 'href="../index.html"' in report
    assert "runs_late" in parse(report).data["plots"], "curves over the nights"


def test_nights_of_another_store_are_not_compared(tmp_path: Path) -> None:
    run(tmp_path, night(0, 2, store=STORE + "/"))
    run(tmp_path, night(1, 1, store="/srv/other"))
    comparison, _ = run(tmp_path, night(2, 2))
    assert comparison is not None
    assert (comparison.new, comparison.known) == ({}, {"lost": 2})
    assert "/srv/other" in parse((tmp_path / "index.html").read_text(encoding="utf-8")).text


def test_a_store_is_the_same_by_whatever_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nights"
    for name in ("a", "b"):
        (tmp_path / name / "store").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/store")
    known = []
    paths = (
        ("a", "store"), ("b", "store"), ("a", "./store/"), ("b", "./store"), ("", f"{tmp_path}/a//store"),
        ("b", "../link"), ("b", "../b/store/"),
    )  # fmt: skip
    for day, (at, path) in enumerate(paths):
        monkeypatch.chdir(tmp_path / at)
        comparison, _ = run(folder, night(day, 1 + (at == "b" and "link" not in path), store=path), keep=2)
        known.append(comparison.known["lost"] if comparison is not None else None)
        assert comparison is None or not comparison.new
    assert known == [None, None, 1, 2, 1, 1, 2]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == NAMES[3:7], "two of each"


def test_what_cannot_be_read_is_not_compared_and_the_night_before_it_is(tmp_path: Path) -> None:
    run(tmp_path, night(0, 2))
    run(tmp_path, night(1, 1))
    (tmp_path / NAMES[1] / "offenders.parquet").write_bytes(b"torn")
    comparison, _ = run(tmp_path, night(2, 2))
    assert comparison is not None
    assert comparison.known == {"lost": 2}


@pytest.mark.parametrize("name", ["night.json", "audit.json", "offenders.parquet", "../history.jsonl", "../index.html"])
def test_a_pipe_in_the_folder_of_nights_is_told_or_passed_over(tmp_path: Path, name: str) -> None:
    """Opening it waited for a writer."""
    run(tmp_path, night(0, 2))
    run(tmp_path, night(1, 1))
    path = tmp_path / NAMES[1] / name
    path.unlink()
    os.mkfifo(path)
    if name.startswith(".."):
        with pytest.raises(JobError, match="is not a regular file"):
            run(tmp_path, night(2, 2))
        return
    comparison, _ = run(tmp_path, night(2, 2))
    assert comparison is not None
    assert comparison.known == {"lost": 2}


def test_nights_that_are_too_many_are_removed_the_oldest_first(tmp_path: Path) -> None:
    for day in range(5):
        assert run(tmp_path, night(day), keep=3)[1] == []
    assert listed(tmp_path) == [NAMES[4], NAMES[3], NAMES[2]]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == NAMES[2:5]
    assert len(read_history(str(tmp_path / "history.jsonl"))) == 5, "curves go on"
    run(tmp_path, night(5), keep=1)
    assert listed(tmp_path) == [NAMES[5]]


def test_a_night_stays_where_the_clock_was_ahead_before(tmp_path: Path) -> None:
    for day in (7, 8):
        run(tmp_path, night(day), keep=2)
    for day, others in ((1, [NAMES[8]]), (2, [NAMES[8]])):
        assert run(tmp_path, night(day), keep=2)[1] == []
        assert listed(tmp_path) == [*others, NAMES[day]]
    run(tmp_path, night(3), keep=1)
    assert listed(tmp_path) == [NAMES[3]]


def test_several_stores_share_a_folder(tmp_path: Path) -> None:
    """When several stores share a folder each keeps the same number of nights; a report's curves are of its own store,
    and the page begins with the last night of each store, the worst first."""
    folder = tmp_path / "nights"
    for day in range(4):
        run(folder, night(2 * day, store="/data/a"), keep=2)
        run(folder, night(2 * day + 1, lost=day, store="/data/b"), keep=2)
    page = parse((folder / "index.html").read_text(encoding="utf-8"))
    links = [attrs["href"].removesuffix("/report.html") for tag, attrs in page.tags if tag == "a"]
    assert links == [NAMES[7], NAMES[6], *NAMES[7:3:-1]]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == NAMES[4:8]
    history = read_history(str(folder / "history.jsonl"))
    assert sorted(one.made_ms for one in history) == [MONDAY + day * DAY for day in range(8)]
    report = parse((folder / NAMES[6] / "report.html").read_text(encoding="utf-8")).text
    for day in range(8):
        assert (formats.moment(MONDAY + day * DAY) in report) == (day % 2 == 0), day


def test_nothing_but_nights_is_removed(tmp_path: Path) -> None:
    """Only nights are removed: not a link, a file, or a directory without a matching night.json under a night's name,
    and not a night into which somebody put a file."""
    folder, outside = tmp_path / "nights", tmp_path / "outside"
    for day in range(3):
        run(folder, night(day))
    (folder / NAMES[0] / "notes.txt").write_text("ask the team of the orders")
    (folder / NAMES[1] / "parquet" / "mine.csv").write_text("1,2")
    run(outside, night(0))
    (folder / "2024-01-01T000000Z").symlink_to(outside / NAMES[0])
    (folder / "2024-01-02T000000Z").mkdir()
    (folder / "2024-01-02T000000Z" / "report.html").write_text("mine")
    (folder / "2024-01-03T000000Z").mkdir()
    (folder / "2024-01-03T000000Z" / "night.json").write_text('{"duemq_night": 99}')
    (folder / "2024-01-04T000000Z").write_text("a file")
    (folder / "january").mkdir()
    (folder / "january" / "night.json").write_bytes((folder / NAMES[2] / "night.json").read_bytes())

    def files() -> dict[str, bytes]:
        found = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != folder]
        return {str(path): path.read_bytes() for path in found} | {"": (folder / "2024-01-04T000000Z").read_bytes()}

    before = files()
    _, left = run(folder, night(3), keep=1)
    assert [line.partition(": ")[2] for line in left] == [
        "is kept, since it has parquet/mine.csv, which is not part of a night",
        "is kept, since it has notes.txt, which is not part of a night",
    ]
    missing = {path for path in before if path not in files()}
    assert missing == {path for path in before if f"/nights/{NAMES[2]}/" in path} != set()
    assert (folder / "2024-01-01T000000Z").is_symlink()
    assert listed(folder) == [NAMES[3]]


def test_a_removal_that_was_interrupted_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(2):
        run(tmp_path, night(day))
    unlink, calls = os.unlink, 0

    def fail(path: str) -> None:
        nonlocal calls
        calls += os.path.dirname(path) == str(tmp_path / NAMES[0])
        if calls == 3:
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", fail)
    _, left = run(tmp_path, night(2), keep=2)
    assert left == [f"{tmp_path / NAMES[0]}: cannot be removed: Operation not permitted"]
    assert listed(tmp_path) == [NAMES[2], NAMES[1]]
    monkeypatch.undo()
    assert (tmp_path / NAMES[0] / "night.json").exists()
    run(tmp_path, night(3), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == NAMES[2:4]


def test_the_page_is_replaced_as_a_whole(tmp_path: Path) -> None:
    run(tmp_path, night(0))
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    with open(tmp_path / "index.html", encoding="utf-8") as opened:
        run(tmp_path, night(1))
        assert opened.read() == text, "who reads it while it is made anew reads the old one to its end"
    assert listed(tmp_path) == [NAMES[1], NAMES[0]]


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    run(tmp_path, night(0))
    before = sorted(tmp_path.rglob("*"))

    def fail() -> None:
        with RunOutput(STORE, folder=str(tmp_path)) as output:
            write_audit(given_by.summary(), Path(output.out))
            raise JobError("the store went away")

    with pytest.raises(JobError, match="went away"):
        fail()
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_run_left_goes_and_a_run_at_work_stays(tmp_path: Path) -> None:
    for name in (".night-dead", ".night-busy", ".night-mine"):
        write_audit(given_by.summary(), tmp_path / name)
    (tmp_path / ".night-mine" / "diary.txt").write_text("dear diary")
    (tmp_path / ".night-file").write_text("no directory")
    busy = os.open(tmp_path / ".night-busy", os.O_RDONLY)
    fcntl.flock(busy, fcntl.LOCK_EX)
    try:
        run(tmp_path, night(0))
    finally:
        os.close(busy)
    assert sorted(path.name for path in tmp_path.glob(".night-*")) == [".night-busy", ".night-file", ".night-mine"]


def test_runs_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    with RunOutput(STORE, folder=str(tmp_path)) as one, RunOutput(STORE, folder=str(tmp_path)) as other:
        for output in (one, other):
            write_audit(night(0).audit, Path(output.out))
            output.finish(night(0))
    assert listed(tmp_path) == [f"{NAMES[0]}-2", NAMES[0]]


def test_a_page_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>My site</h1>")
    with pytest.raises(JobError, match=r"has an index\.html that was not written for nights"):
        RunOutput(STORE, folder=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


def test_runs_into_one_directory_are_compared_too(tmp_path: Path) -> None:
    for day, lost in ((0, 1), (1, 3)):
        with RunOutput(STORE, out=str(tmp_path)) as output:
            write_audit(night(day, lost).audit, tmp_path)
            report, comparison, _ = output.finish(night(day, lost))
        assert report == str(tmp_path / "report.html")
        assert (comparison is None) == (day == 0) == (not (tmp_path / "comparison.json").exists())
    assert comparison is not None
    assert (comparison.new, comparison.known) == ({"lost": 2}, {"lost": 1})
    # A first night in that directory continues it.
    comparison, _ = run(tmp_path, night(2, 4))
    assert comparison is not None
    assert (comparison.new, comparison.known) == ({"lost": 1}, {"lost": 3})
    assert len(read_history(str(tmp_path / "history.jsonl"))) == 3


def test_a_run_is_compared_with_the_one_that_is_named(tmp_path: Path) -> None:
    write_audit(night(0, 2, store="/mnt/copy").audit, tmp_path / "before")
    with RunOutput(STORE, out=str(tmp_path / "now"), previous=str(tmp_path / "before")) as output:
        write_audit(night(1, 3).audit, tmp_path / "now")
        _, comparison, _ = output.finish(night(1, 3))
    assert comparison is not None
    assert comparison.new == {"lost": 1}
    with pytest.raises(JobError, match=r"has no audit\.json"):
        RunOutput(STORE, out=str(tmp_path / "now"), previous=str(tmp_path))


def test_the_commands_say_what_does_not_go_together(tmp_path: Path) -> None:
    for rest, told in (
        ([], "give --out DIR or --nights DIR"),
        (["--out", "a", "--nights", "b"], "give --out DIR or --nights DIR"),
        (["--out", "a", "--keep-nights", "3"], "--keep-nights is for --nights"),
        (["--nights", "b", "--keep-nights", "0"], "0 is not in the range"),
    ):
        found = CliRunner().invoke(main, ["analyse", str(tmp_path), *rest])
        assert (found.exit_code, told in found.output) == (2, True)
    assert list(tmp_path.iterdir()) == []


# --- the page


def test_the_page_has_a_row_a_night() -> None:
    text = render_index(many_nights())
    assert text.count('<th scope="row"') == 30
    heads = re.findall(r'<th class="n">([\w ]+)</th>', text)
    (row,) = re.findall(r'<tr><th scope="row".*2025-01-01T000000Z.*</tr>', text)
    cells = re.findall(r'<td class="n[ \w]*">(.*?)</td>', row)
    last = given_by.history(30)[-1]
    assert dict(zip(heads, cells, strict=True)) == {
        "new": "0", "lost": "3", "destroyed": "0", "twice": "9", "p99 late": formats.duration(last.p99_ms),
        "latest": "2\u00a0min\u00a034\u00a0s", "overdue": formats.count(last.overdue), "pending": "4,000,000",
        "scheduled": "28,160,000", "delivered": "23,000,000",
    }  # fmt: skip
    page = parse(text)
    assert page.scripts == []
    assert "27,000,000" in page.text


def test_a_page_of_no_nights() -> None:
    assert "There is no night yet." in parse(render_index([])).text


def test_names_are_text_on_the_page_too() -> None:
    nights_ = many_nights()
    nights_[0].night.run.store = nights_[0].night.headline = HOSTILE
    text = render_index(nights_)
    page = parse(text)
    assert {tag for tag, _ in page.tags} & {"img", "script", "iframe"} == set()
    assert HOSTILE in page.text
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy
    assert re.findall(r"@import|url\(|https?://", text) == []


def test_a_night_reads_what_it_wrote(tmp_path: Path) -> None:
    run(tmp_path, night(0, 2))
    (only,) = nights.nights(str(tmp_path))
    assert only.name == NAMES[0]
    assert only.night.run == run_of(night(0, 2))
    assert only.night.mood == "bad"
    told = json.loads((tmp_path / NAMES[0] / "night.json").read_bytes())
    assert msgspec.convert(told, Night) == only.night


def test_a_night_that_cannot_be_written_is_not_in_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nights"
    run(folder, night(0))

    write_whole = OsFiles.write_whole

    def full(self: OsFiles, path: str, data: bytes, *, durable: bool = True) -> None:
        if path.endswith("night.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write_whole(self, path, data, durable=durable)

    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "write_whole", full)
        with pytest.raises(JobError, match="cannot be written"):
            run(folder, night(1))
    run(folder, night(1, lost=2))
    assert listed(folder) == NAMES[1::-1]
    assert [one.lost for one in read_history(str(folder / "history.jsonl"))] == [0, 2]
