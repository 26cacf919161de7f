"""The report: everything is in it, nothing breaks it, and it needs nothing else. tests/spark/test_report.py opens
it in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.analysis import Ahead, Analysis, LatePoint, Minute, Topic
from spark_jobs.audit import Lateness
from spark_jobs.report import formats, plots, render
from spark_jobs.report.verdict import BAD, GOOD, WARN, verdict_of
from tests.unit.spark_jobs import report_analyses as given_by
from tests.unit.spark_jobs.report_analyses import DAY, HOSTILE, HOUR, MINUTE, MONDAY

SECTIONS = [
    "verdict", "lateness", "throughput", "ahead", "forecast", "day", "consumers", "top", "runs", "inputs",
]  # fmt: skip
LOADING = {"src", "srcset", "href", "action", "data", "poster", "background", "formaction"}
VOID = {"meta", "link", "br", "img", "hr", "input"}


@dataclass
class Parsed(HTMLParser):
    """A page as a browser's parser sees it, roughly."""

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    scripts: list[tuple[dict[str, str], str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((values, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data
        elif not self._open or self._open[-1] != "style":
            self.text += data

    @property
    def data(self) -> Any:
        """The numbers for the script."""
        return next(json.loads(text) for attrs, text in self.scripts if attrs.get("id") == "data")


def parse(page: str) -> Parsed:
    page.encode()
    parsed = Parsed()
    parsed.feed(page)
    parsed.close()
    assert parsed._open == []
    return parsed


ALL = {
    "empty": (given_by.analysis(), []),
    "small": (given_by.small(), given_by.history(1)),
    "week": (given_by.week(), given_by.history()),
    "hostile": (given_by.hostile(), given_by.history(2)),
}


@pytest.mark.parametrize("name", ALL)
def test_every_section_is_there_once_and_linked(name: str) -> None:
    page = parse(render(*ALL[name]))
    assert [attrs["id"] for tag, attrs in page.tags if tag == "section"] == SECTIONS
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert {link.removeprefix("#") for link in links} == set(SECTIONS)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_loaded(name: str) -> None:
    text = render(*ALL[name])
    page = parse(text)
    loads = [value for _, attrs in page.tags for key, value in attrs.items() if key in LOADING]
    assert [value for value in loads if not value.startswith("#") and value != "data:,"] == []
    assert re.findall(r"@import|url\(|@font-face|fetch\(|XMLHttpRequest|import\(", text) == []
    # The only address is in the notice of uPlot's licence.
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"https://github.com/leeoniya/uPlot"}
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


@pytest.mark.parametrize("name", ALL)
def test_plots_have_their_figures_and_figures_their_numbers(name: str) -> None:
    page = parse(render(*ALL[name]))
    shown = [attrs["data-plot"] for _, attrs in page.tags if "data-plot" in attrs]
    assert sorted(shown) == sorted(page.data["plots"])
    heats = [attrs["data-heat"] for _, attrs in page.tags if "data-heat" in attrs]
    assert heats == (["due", "p99"] if page.data["heat"] else [])
    for plot in page.data["plots"].values():
        assert plot["x"] == sorted(set(plot["x"])) != []
        assert plot["step"] > 0
        assert {len(series["y"]) for series in plot["series"]} == {len(plot["x"])}


def test_all_plots_of_a_week() -> None:
    page = parse(render(*ALL["week"]))
    assert set(page.data["plots"]) == {
        "lateness", "throughput", "bytes", "ahead", "forecast", "lag", "behind", "runs_late", "runs_wrong",
        "runs_overdue", "runs_bytes",
    }  # fmt: skip


def test_a_usual_page_is_small() -> None:
    analysis = given_by.week()
    analysis.minutes = [Minute(MONDAY + i * MINUTE, 123_456, 65_432, 54_321, 123, 98_765_432) for i in range(1500)]
    analysis.lateness = [LatePoint(MONDAY + i * MINUTE, 99_999, 12, 345, 6789) for i in range(1500)]
    assert len(render(analysis, given_by.history(400)).encode()) < 400_000


def test_hostile_names_are_text() -> None:
    page = parse(render(*ALL["hostile"]))
    assert {tag for tag, _ in page.tags} & {"img", "b", "iframe"} == set()
    assert [text for attrs, text in page.scripts if "alert" in text and attrs.get("type") != "application/json"] == []
    assert len(page.scripts) == 3
    assert HOSTILE in page.text
    assert "\\u202e" in page.text
    assert "\u202e" not in page.text
    names = [series["name"] for series in page.data["plots"]["ahead"]["series"]]
    assert HOSTILE in names
    assert all(len(name) <= 6 * formats.MAX_NAME for name in names)


@given(st.text())
def test_no_name_ends_the_numbers(name: str) -> None:
    text = plots.as_json({"name": formats.name(name)})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"name": formats.name(name)}
    assert all(char.isprintable() or char.isspace() for char in formats.name(name))


@given(st.text(min_size=1))
def test_any_topic_is_in_its_table(name: str) -> None:
    analysis = given_by.small(topics=[Topic(name, 1, 0, 1, 0, 400, 16, 16, MONDAY, MONDAY)])
    analysis.store = name
    page = parse(render(analysis, []))
    assert len(page.scripts) == 3
    # A parser takes a carriage return for a line feed, so names have none.
    assert formats.name(name) in page.text


def test_an_empty_store_has_no_plots_and_says_so() -> None:
    page = parse(render(*ALL["empty"]))
    assert page.data == {"plots": {}, "heat": None}
    for text in ("The store has no messages yet.", "Nothing waits.", "No consumer group", "No topic has a record."):
        assert text in page.text


def test_what_was_read_is_told() -> None:
    analysis = given_by.week()
    page = parse(render(analysis, []))
    audit = analysis.audit
    for text in (audit.inputs_sha256, audit.digest, audit.signature, audit.inputs[7].sha256, "2025-11-24 02:00:00"):
        assert text in page.text
    assert "All times are UTC" in page.text


def test_offenders_and_damaged_stretches_are_listed() -> None:
    analysis = given_by.week()
    page = parse(render(analysis, []))
    for one in analysis.audit.offenders:
        assert one.unique_key is not None
        assert one.unique_key in page.text
        assert str(one.physical_offset) in page.text
    assert "the checksum of the body is another" in page.text
    assert "first 12 of 14" in page.text


@pytest.mark.parametrize(
    ("changes", "mood", "words"),
    [
        ({}, GOOD, "no messages yet"),
        ({"records": 5}, GOOD, "No message was scheduled"),
        ({"records": 5, "scheduled": 2, "pending": 2}, GOOD, "still waits"),
        ({"records": 5, "scheduled": 2, "delivered": 2}, GOOD, "exactly once"),
        ({"scheduled": 2, "delivered": 1, "lost": 1}, BAD, "1 scheduled message was lost."),
        ({"scheduled": 5, "lost": 2, "twice": 3}, BAD, "2 scheduled messages were lost, and 3 delivered more"),
        ({"scheduled": 5, "lost": 2, "damaged": 1}, BAD, "2 scheduled messages were lost."),
        ({"scheduled": 5, "twice": 1}, WARN, "1 message was delivered more than once"),
        ({"scheduled": 5, "delivered": 5, "damaged": 1}, WARN, "1 stretch of the commitlog cannot be read"),
        ({"scheduled": 5, "delivered": 5, "unclaimed": 4}, WARN, "4 deliveries of messages that are not in it"),
    ],
)  # fmt: skip
def test_verdict(changes: dict[str, Any], mood: str, words: str) -> None:
    verdict = verdict_of(given_by.summary(**changes))
    assert verdict.mood == mood
    assert words in verdict.headline
    assert verdict.headline in parse(render(given_by.analysis(audit=given_by.summary(**changes)), [])).text


def test_verdict_notes_tell_what_needs_somebody_first() -> None:
    late = Lateness(10, 1, 2.0, {"p50": 6, "p90": 42, "p99": 911, "p99.9": 21_400, "p100": 154_000})
    summary = given_by.summary(
        scheduled=10, delivered=10, overdue=1, damaged=1, damages=[(0, 2048, "torn")], lateness=late, is_running=True
    )
    notes = verdict_of(summary).notes
    found = [next(i for i, note in enumerate(notes) if word in note) for word in ("2\u00a0KiB", "due", "911", "open")]
    assert found == sorted(found)
    assert "2\u00a0min\u00a034\u00a0s" in notes[found[2]]


# --- series


def plot(name: str, **changes: Any) -> Any:
    return plots.plots_of(given_by.analysis(**changes), [])[name]


def test_throughput_has_noughts_where_nothing_was_stored() -> None:
    minutes = [Minute(MONDAY + i * MINUTE, 5, 2, 1, 0, 100) for i in (0, 1, 30, 31)]
    found = plot("throughput", minutes=minutes)
    sent = dict(zip(found["x"], found["series"][0]["y"], strict=True))
    assert sent == {
        MONDAY + i * MINUTE: (5 if i in {0, 1, 30, 31} else 0) for i in (0, 1, 2, 29, 30, 31)
    }  # fmt: skip
    assert [series["name"] for series in found["series"]] == ["sent for now", "scheduled", "delivered"]
    assert found["step"] == MINUTE


def test_what_is_ahead_is_stacked_from_the_fullest_topic() -> None:
    ahead = [Ahead(MONDAY, "few", 1), Ahead(MONDAY, "many", 5), Ahead(MONDAY + HOUR, "few", 2)]
    found = plot("ahead", ahead=ahead, ahead_step_ms=HOUR)
    assert [(series["name"], series["y"]) for series in found["series"]] == [("many", [5, 0]), ("few", [1, 2])]


def test_one_message_in_a_month_does_not_flatten_the_rest() -> None:
    near = [Ahead(MONDAY + i * HOUR, "orders", 100) for i in range(5)]
    assert plot("ahead", ahead=near, ahead_step_ms=HOUR)["focus"] is None
    found = plot("ahead", ahead=[*near, Ahead(MONDAY + 30 * DAY, "orders", 1)], ahead_step_ms=HOUR)
    assert found["focus"] == MONDAY + 5 * HOUR
    assert found["x"][-1] == MONDAY + 30 * DAY


@pytest.mark.parametrize(
    ("source", "words"), [("given", "were given"), ("measured", "measured in 611 s"), ("fastest", "was never behind")]
)
def test_the_forecast_says_where_its_rate_is_from(source: str, words: str) -> None:
    analysis = given_by.week()
    analysis.forecast.source = source
    assert words in parse(render(analysis, [])).text


def test_one_late_peak_makes_the_scale_logarithmic() -> None:
    usual = [LatePoint(MONDAY + i * 1000, 1, 3, 5, 9) for i in range(50)]
    assert not plot("lateness", lateness=usual)["log"]
    peak = LatePoint(MONDAY + 60_000, 1, 3, 5, 90_000)
    assert plot("lateness", lateness=[*usual, peak])["log"]
    early = LatePoint(MONDAY + 61_000, 1, -3, 5, 9)
    assert not plot("lateness", lateness=[*usual, peak, early])["log"]


def test_times_that_no_calendar_has_are_not_drawn() -> None:
    ahead = [Ahead(MONDAY, "orders", 1), Ahead(1 << 62, "orders", 1)]
    assert plot("ahead", ahead=ahead)["x"] == [MONDAY]


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=60, unique=True), st.integers(1, 5))
def test_coarser_curves_keep_sums(at: list[int], factor: int) -> None:
    times = sorted(MONDAY + i * MINUTE for i in at)
    limit = plots.MAX_POINTS
    try:
        plots.MAX_POINTS = 20  # type: ignore[misc]
        x, (column,) = plots._on_steps(times, MINUTE, [[factor] * len(times)])
    finally:
        plots.MAX_POINTS = limit  # type: ignore[misc]
    assert sum(column) == factor * len(times)
    assert x == sorted(set(x))
    assert len(x) <= 3 * 21


def test_history_has_a_curve_a_group_with_gaps() -> None:
    runs = given_by.history(12)
    found = plots.plots_of(given_by.analysis(), runs)["lag"]
    assert [run.made_ms for run in runs] == found["x"]
    mailer = next(series for series in found["series"] if series["name"].startswith("mailer"))
    assert mailer["y"][:9] == [None] * 9
    assert None not in mailer["y"][9:]


def test_history_of_one_run_has_no_curve() -> None:
    assert plots.plots_of(given_by.analysis(), given_by.history(1)) == {}
    assert "This is the first run" in parse(render(given_by.analysis(), given_by.history(1))).text


def test_queues_of_a_group_are_one_row() -> None:
    page = parse(render(given_by.week(), []))
    text = re.sub(r"\s+", " ", page.text)
    assert text.count("billing") == 1 + 6  # and retries of the group
    assert "164,936" in text


# --- numbers


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "\u2013"), (0, "0 ms"), (999, "999 ms"), (999.6, "1 s"), (1530, "1.53 s"), (59_994, "60 s"),
        (60_000, "1 min"), (154_000, "2 min 34 s"), (3_599_999, "1 h"), (2 * HOUR + 5 * MINUTE, "2 h 5 min"),
        (DAY, "1 d"), (40 * DAY + HOUR, "40 d 1 h"), (4000 * DAY, "10 y 350 d"),
        (-1500, "\u22121.5 s"), (-2, "\u22122 ms"),
    ],
)  # fmt: skip
def test_durations(ms: float | None, text: str) -> None:
    assert formats.duration(ms).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (1 << 62, "4,096 PiB")],
)
def test_sizes(number: int, text: str) -> None:
    assert formats.size(number).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 5, "0 %"), (1, 10**6, "< 0.1 %"), (10**6 - 1, 10**6, "> 99.9 %"), (1, 3, "33.3 %"), (0, 0, "\u2013"),
        (7, 7, "100 %"),
    ],
)  # fmt: skip
def test_shares(part: int, whole: int, text: str) -> None:
    assert formats.share(part, whole).replace("\u00a0", " ").replace("\u202f", " ") == text


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_number_can_be_told(number: int) -> None:
    assert formats.duration(number)
    assert formats.moment(number)
    assert formats.moment(number, exact=True)
    assert formats.count(number)


def test_moments() -> None:
    assert formats.moment(MONDAY + 61_007) == "2025-11-17 00:01:01"
    assert formats.moment(MONDAY + 61_007, exact=True) == "2025-11-17 00:01:01.007"
    assert formats.moment(1 << 62) == f"{1 << 62} ms"


def test_an_analysis_is_not_changed() -> None:
    analysis: Analysis = given_by.week()
    render(analysis, given_by.history())
    assert analysis == given_by.week()
