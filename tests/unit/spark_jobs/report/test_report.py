"""The report: it is complete, nothing breaks it, and it needs no other files. tests/spark/test_report.py opens it in a
browser."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.analyse.analysis import (
    Ahead,
    Analysis,
    BusySecond,
    HeatCell,
    LatePoint,
    TopicSize,
    Traffic,
    figures,
)
from duemq.spark_jobs.analyse.comparison import Comparison, Worse
from duemq.spark_jobs.audit.audit import Cluster, Lateness, Missing
from duemq.spark_jobs.audit.starts import StartOutcome
from duemq.spark_jobs.report import formats, plots, render
from duemq.spark_jobs.report.verdict import BAD, GOOD, WARN, since_of, verdict_of
from tests.unit.spark_jobs.report import report_analyses as given_by
from tests.unit.spark_jobs.report.report_analyses import DAY, HOSTILE, HOUR, MINUTE, MONDAY

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


AGAIN = StartOutcome("duemq", False, 5, 0, 2, [])


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
    "cluster": (given_by.cluster(), given_by.history(2)),
}


@pytest.mark.parametrize("name", ALL)
def test_every_section_is_there_once_and_linked(name: str) -> None:
    page = parse(render(*ALL[name]))
    sections = [*SECTIONS[:1], "stores", *SECTIONS[1:]] if name == "cluster" else SECTIONS
    assert [attrs["id"] for tag, attrs in page.tags if tag == "section"] == sections
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and not attrs["href"].startswith("../")]
    assert {link.removeprefix("#") for link in links} == set(sections)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_loaded(name: str) -> None:
    text = render(*ALL[name])
    page = parse(text)
    loads = [value for _, attrs in page.tags for key, value in attrs.items() if key in LOADING]
    assert [value for value in loads if not value.startswith(("#", "../")) and value != "data:,"] == []
    assert re.findall(r"@import|url\(|@font-face|fetch\(|XMLHttpRequest|import\(", text) == []
    # The only address is in the notice of uPlot's licence.
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"https://github.com/leeoniya/uPlot"}
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


@pytest.mark.parametrize("ms", [-(1 << 63), (1 << 63) - 1])
def test_a_damaged_time_at_the_end_of_all_time_is_a_row_of_the_figures(ms: int) -> None:
    step_ms = 86_400_000
    point = LatePoint(ms // step_ms * step_ms, 1, 2, 3, 4)
    row = figures(given_by.analysis(lateness=[point], lateness_step_ms=step_ms))["lateness"].to_pylist()[0]
    assert row["start_ms"] == max(point.start_ms, -(1 << 63))
    assert row["count"] == 1


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
    analysis.traffic = [Traffic(MONDAY + i * MINUTE, 123_456, 65_432, 54_321, 123, 98_765_432) for i in range(1500)]
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
    analysis = given_by.small(topics=[TopicSize(name, 1, 0, 1, 0, 400, 16, 16, MONDAY, MONDAY)])
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
        assert one.unique_key in copies(page)
        assert f"{one.unique_key[:6]}\u2026{one.unique_key[-8:]}" in page.text
        assert str(one.physical_offset) in page.text
    assert "the checksum of the body is another" in page.text
    assert "first 12 of 14" in page.text


def test_a_cluster_has_its_stores_the_worst_first_and_links_their_reports() -> None:
    made = given_by.cluster()
    text = render(made, given_by.history(2))
    page = parse(text)
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and attrs["href"].startswith("../")]
    names = [one.store for one in made.stores if one.report]
    assert links == [made.stores[names.index(name)].report for name in [names[0], names[-1], *names[1:-1]]]
    rows = re.findall(r'<tr><th scope="row">(?:<a[^>]*>)?<bdi>(/data/[^<]*)</bdi>.*?<span class="tag (\w+)"', text)
    assert [(name, mood) for name, mood in rows[:3]] == [
        ("/data/broker-zz/store", "bad"), ("/data/broker-00/store", "bad"), ("/data/broker-13/store", "warn"),
    ]  # fmt: skip
    assert f"/data/broker-zz/store could not be audited: {made.stores[-1].why}" in page.text
    assert "1 of 15 stores could not be read. In the others: 3 scheduled messages were lost" in page.text
    # The commands query the store with the lost messages, and repair the store that needs it.
    lost = [one for one in made.audit.offenders if one.what == "lost"]
    first = [str(one.physical_offset) for one in lost if one.store == lost[0].store]
    steps = [step.command or "" for step in verdict_of(made.audit).steps]
    assert any(f"sql {lost[0].store} " in step and f"in ({', '.join(first)})" in step for step in steps)
    assert "duemq store repair /data/broker-01/store --dry-run" in steps
    assert any(step.startswith("duemq spark sql '/data/*/store' \"select store, physical_offset") for step in steps)
    offenders = re.search(r'<table class="offenders">.*?</table>', text, re.DOTALL)
    assert offenders is not None
    assert all(one.store in offenders[0] for one in made.audit.offenders[:2] if one.store)


def test_a_cluster_of_whose_stores_all_are_good() -> None:
    summary = given_by.summary(scheduled=2, delivered=2, records=4, cluster=Cluster(["a", "b"], []))
    assert verdict_of(summary)[:2] == (
        GOOD, "Every scheduled message that the brokers came to was delivered exactly once, or cancelled in time.",
    )  # fmt: skip
    summary.cluster = Cluster(["a", "b"], [Missing("b", "is empty")])
    assert verdict_of(summary).mood == WARN
    nothing = given_by.summary(cluster=Cluster(["a", "b"], []))
    assert verdict_of(nothing).headline == "The stores have no messages yet."


def copies(page: Parsed) -> list[str]:
    """The texts that the buttons copy."""
    return [attrs["data-copy"] for tag, attrs in page.tags if tag == "button"]


def rows_of(page: str, label: str) -> list[int]:
    """Number of data rows of each table with a label, the open one and the folded one."""
    found = re.findall(rf'aria-label="{label}(?:, more)?"><table.*?</table>', page, re.DOTALL)
    return [table.count("<tr>") - 1 for table in found]


@pytest.mark.parametrize(("count", "rows"), [(1, [1]), (10, [10]), (11, [10, 1]), (100, [10, 90]), (400, [10, 90])])
def test_ten_offenders_are_open_and_the_rest_folded(count: int, rows: list[int]) -> None:
    offenders = [given_by.offender(number, "lost") for number in range(count)]
    audit = given_by.summary(scheduled=5000, lost=4321, offenders=offenders)
    text = render(given_by.analysis(audit=audit), [])
    assert rows_of(text, "Offending messages") == rows
    page = parse(text)
    assert f"the first {sum(rows)} of 4,321" in page.text
    assert (f"{rows[-1]} more" in page.text) == (len(rows) == 2)
    assert all("open" not in attrs for tag, attrs in page.tags if tag == "details")


def test_both_deliveries_of_a_duplicate_are_told() -> None:
    one = given_by.offender(4, "twice")
    page = parse(render(given_by.analysis(audit=given_by.summary(scheduled=1, twice=1, offenders=[one])), []))
    for ms in (one.delivered_ms, one.last_delivered_ms):
        assert formats.moment(ms, exact=True) in page.text
    assert "1\u00a0h apart; offsets 5001508, 9001508" in page.text
    one.deliveries = 5
    page = parse(render(given_by.analysis(audit=given_by.summary(scheduled=1, twice=1, offenders=[one])), []))
    assert "5 times" in page.text


@given(st.text(min_size=1, max_size=600))
def test_an_id_is_copied_as_it_is_or_not_at_all(text: str) -> None:
    one = given_by.offender(0, "lost", unique_key=text)
    one.keys = None
    page = parse(render(given_by.analysis(audit=given_by.summary(scheduled=1, lost=1, offenders=[one])), []))
    found = [copied for copied in copies(page) if not copied.startswith("duemq ")]
    assert found in ([text], [])
    if text.isalnum() and formats.MAX_ID < len(text) <= formats.MAX_COPIED:
        assert found == [text]
    if not found and len(text) > formats.MAX_COPIED:
        assert formats.name(text) in page.text
    assert all(char.isprintable() or char.isspace() for char in formats.short(text))


def test_half_an_id_is_not_copied() -> None:
    assert formats.copied("x" * formats.MAX_COPIED) == "x" * formats.MAX_COPIED
    assert formats.copied("x" * (formats.MAX_COPIED + 1)) is None
    assert formats.copied("a\x00b") is None


def test_seconds_with_one_message_are_not_busy() -> None:
    busiest = [BusySecond(MONDAY, 7), BusySecond(MONDAY + 1000, 2), *(BusySecond(MONDAY + DAY, 1) for _ in range(48))]
    text = render(given_by.small(busiest=busiest), [])
    assert rows_of(text, "Busiest seconds ahead") == [2]
    assert "In no other second is more than one message due." in text
    text = render(given_by.small(busiest=busiest[2:]), [])
    assert rows_of(text, "Busiest seconds ahead") == []
    assert "In no second is more than one message due." in text


def test_what_to_do_has_commands_that_name_the_store_and_the_messages() -> None:
    analysis = given_by.week()
    analysis.audit.store = "/data/it's here; rm -rf x"
    found = verdict_of(analysis.audit).steps
    commands = [shlex.split(step.command) for step in found if step.command]
    assert [command[:4] for command in commands] == [["duemq", "spark", "sql", analysis.audit.store]] * 4
    lost = [str(one.physical_offset) for one in analysis.audit.offenders if one.what == "lost"]
    assert f"physical_offset in ({', '.join(lost)})" in commands[0][4]
    page = parse(render(analysis, []))
    assert [text for text in copies(page) if text.startswith("duemq")] == [step.command for step in found]
    assert verdict_of(given_by.summary(scheduled=2, delivered=2)).steps == []
    # New offenders are queried first, once.
    new = [given_by.offender(4000, "lost"), analysis.audit.offenders[1]]
    (command, *_) = [step.command for step in verdict_of(analysis.audit, new).steps]
    offsets = [str(one.physical_offset) for one in (*new, analysis.audit.offenders[0], analysis.audit.offenders[2])]
    assert command is not None
    assert f"physical_offset in ({', '.join(offsets)})" in command


def comparison(**changes: Any) -> Comparison:
    known: dict[str, Any] = {"made_ms": MONDAY - DAY, "store": "/var/lib/duemq", "new": {}, "known": {}, "gone": {}}
    return Comparison(**known | {"worse": [], "new_offenders": []} | changes)


def test_what_is_new_stands_before_what_is_known() -> None:
    """New offenders stand before known ones, although the summary's list, which has the first by offset, lacks them."""
    analysis = given_by.offenders()
    new = [given_by.offender(4000 + number, "lost") for number in range(12)]
    both = analysis.audit.offenders[0]
    compared = comparison(
        new={"lost": 12, "twice": 1}, known={"lost": 2288, "twice": 899}, gone={"lost": 4}, new_offenders=[*new, both]
    )
    text = render(analysis, [], compared)
    assert rows_of(text, "New offending messages") == [10, 3]
    assert rows_of(text, "Offending messages") == [10, 89], "what is new is not told again"
    assert text.index("New since 2025-11-16 00:00:00") < text.index("What was wrong before")
    page = parse(text)
    assert "12 new lost, 1 new delivered more than once." in page.text
    assert "Known from the run before: 2,288 lost, 899 delivered more than once." in page.text
    assert "Gone since, expired or delivered after all: 4 lost." in page.text
    assert "first 99 of 3,187" in page.text


def test_what_grew_worse_is_told_with_both_figures() -> None:
    worse = [Worse("late, p99", "ms", 11, 3400), Worse("overdue", "count", 0, 1812), Worse(HOSTILE, "ms", 1, 60_000)]
    text = render(given_by.week(), [], comparison(known={"lost": 3}, worse=worse))
    page = parse(text)
    assert "late, p99: 11\u00a0ms \u2192 3.4\u00a0s" in page.text
    assert "overdue: 0 \u2192 1,812" in page.text
    assert HOSTILE in page.text
    assert "some figures grew" in page.text
    assert "What is wrong, message by message" in page.text


@pytest.mark.parametrize(
    ("changes", "mood", "words"),
    [
        ({}, GOOD, "Nothing new is wrong."),
        ({"known": {"lost": 5}}, GOOD, "Nothing new is wrong."),
        ({"new": {"twice": 5}}, WARN, "5 new delivered more than once."),
        ({"new": {"destroyed": 5, "unclaimed": 1}}, BAD, "5 new destroyed, 1 new delivered without a message"),
    ],
)
def test_the_verdict_on_what_came_since(changes: dict[str, Any], mood: str, words: str) -> None:
    found = since_of(comparison(**changes), "/var/lib/duemq")
    assert (found.mood, words in found.headline) == (mood, True)
    assert not any("calls its store" in note for note in found.notes)
    assert "calls its store /var/lib/duemq" in since_of(comparison(**changes), "/srv")[2][0]


def test_a_report_among_others_links_their_page() -> None:
    links = [
        attrs["href"] for tag, attrs in parse(render(given_by.small(), [], index="../index.html")).tags if tag == "a"
    ]
    assert "../index.html" in links


def test_the_legend_says_what_is_drawn_higher_than_it_is() -> None:
    assert "3 px high at least" in parse(render(given_by.week(), [])).text


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
        ({"scheduled": 5, "destroyed": 3, "damaged": 1}, BAD, "3 messages that waited were destroyed"),
        ({"scheduled": 5, "lost": 1, "destroyed": 3, "damaged": 1}, BAD, "1 scheduled message was lost."),
        ({"scheduled": 5, "pending": 5, "unreachable": 2}, BAD, "2 messages that wait will not come"),
        ({"scheduled": 5, "lost": 1, "unreachable": 2}, BAD, "1 scheduled message was lost."),
        ({"scheduled": 5, "twice": 1, "corrupt": 1}, BAD, "1 record has wrong bytes"),
        ({"records": 5, "corrupt": 0}, GOOD, "No message was scheduled"),
        ({"scheduled": 5, "twice": 1}, WARN, "1 message was delivered more than once"),
        ({"scheduled": 5, "delivered": 5, "damaged": 1}, WARN, "1 stretch of the commitlog cannot be read"),
        ({"scheduled": 5, "delivered": 5, "starts": [AGAIN]}, WARN, "2 messages that were delivered will come again"),
        ({"scheduled": 5, "twice": 1, "starts": [AGAIN]}, WARN, "1 message was delivered more than once"),
        ({"scheduled": 5, "delivered": 5, "unclaimed": 4}, WARN, "4 deliveries of messages that are not in it"),
    ],
)  # fmt: skip
def test_verdict(changes: dict[str, Any], mood: str, words: str) -> None:
    verdict = verdict_of(given_by.summary(**changes))
    assert verdict.mood == mood
    assert words in verdict.headline
    assert verdict.headline in parse(render(given_by.analysis(audit=given_by.summary(**changes)), [])).text


def test_destroyed_messages_are_counted_where_there_are_any() -> None:
    def page(**changes: Any) -> str:
        return parse(render(given_by.analysis(audit=given_by.summary(records=9, scheduled=5, **changes)), [])).text

    assert "destroyed" not in page(pending=5)
    told = page(pending=3, destroyed=2, levels={"pending": 3}, timers={"destroyed": 2})
    assert "2 messages that waited were destroyed" in told
    assert told.count("destroyed") >= 4, "the headline, the tile, the bar's key and the table"


def test_what_a_start_would_deliver_again_is_told_with_what_to_do() -> None:
    """Messages that a start would deliver again are reported with the remedy: for the broker that had the store last,
    or for duemq if that is unknown."""
    theirs = StartOutcome("5.3.3", True, 5, 0, 2, [])
    for starts, broker in (([AGAIN], "duemq"), ([AGAIN, theirs], "5.3.3"), ([theirs, AGAIN], "5.3.3")):
        summary = given_by.summary(records=9, scheduled=7, delivered=2, pending=5, starts=starts)
        verdict = verdict_of(summary)
        assert verdict.headline.endswith(f"will come again when {broker} starts.")
        assert any(f"A start of {broker} on these files delivers 2 messages" in note for note in verdict.notes)
        assert [step.command for step in verdict.steps] == ["duemq store repair /var/lib/duemq --dry-run"]
    other = StartOutcome("4.9.7", False, 5, 0, 2, [])
    assert verdict_of(given_by.summary(scheduled=7, delivered=2, starts=[other])).mood == GOOD
    missing = StartOutcome("5.3.3", True, 1, 4, 2, ["config/delayOffset.json is missing"])
    steps = verdict_of(given_by.summary(scheduled=7, delivered=2, unreachable=4, starts=[missing])).steps
    assert len(steps) == 1, "one repair is enough"


def test_what_is_in_the_way_of_messages_that_wait_is_told_with_what_to_do() -> None:
    reasons = ["consumequeue/SCHEDULE_TOPIC_XXXX/3 lacks units 100 to 999", "timerlog/ is missing"]
    found = [StartOutcome("4.9.7", False, 0, 1000, 0, ["another"]), StartOutcome("5.3.3", True, 100, 900, 0, reasons)]
    verdict = verdict_of(given_by.summary(scheduled=1000, pending=1000, unreachable=900, starts=found))
    (note,) = [note for note in verdict.notes if "5.3.3" in note]
    for words in ("finds 100 of", *reasons):
        assert words in note
    assert not any("another" in note for note in verdict.notes), "nobody asked for that broker"
    assert [step.command for step in verdict.steps] == ["duemq store repair /var/lib/duemq --dry-run"]


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
    traffic = [Traffic(MONDAY + i * MINUTE, 5, 2, 1, 0, 100) for i in (0, 1, 30, 31)]
    found = plot("throughput", traffic=traffic)
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


def test_late_seconds_of_days_are_drawn_by_the_worst_of_some() -> None:
    analysis = given_by.week()
    found = plots.plots_of(analysis, [])["forecast"]
    seconds = analysis.forecast.late_seconds
    assert found["step"] > 60_000
    assert len(found["x"]) < 20
    assert max(found["series"][0]["y"]) == max(second.late_ms for second in seconds)
    assert "the worst of every 10\u00a0min" in parse(render(analysis, [])).text
    analysis.forecast.late_seconds = seconds[:100]
    found = plots.plots_of(analysis, [])["forecast"]
    assert (found["step"], len(found["x"])) == (1000, 100)


def heat(*at: int) -> Any:
    """The heat maps of deliveries in some minutes of the day."""
    cells = [HeatCell(minute // 60 % 24, minute % 60, 1, 5) for minute in at]
    return plots.heat_of(given_by.analysis(heat=sorted(cells, key=lambda cell: (cell.hour, cell.minute))))


def test_a_heat_map_has_no_hours_in_which_nothing_was_due() -> None:
    assert heat(*range(1440))["hours"] == list(range(24))
    found = heat(*range(13 * 60 + 40, 15 * 60 + 10))
    assert (found["hours"], found["minutes"]) == ([13, 14, 15], [0, 59])
    assert found["at"] == list(range(13 * 60 + 40, 15 * 60 + 10))


def test_a_heat_map_of_one_hour_has_its_minutes_alone() -> None:
    found = heat(*range(13 * 60 + 40, 13 * 60 + 52))
    assert (found["hours"], found["minutes"]) == ([13], [40, 51])


def test_a_heat_map_over_midnight_is_in_one_piece() -> None:
    found = heat(*range(23 * 60 + 50, 24 * 60 + 10), 24 * 60 + 70)
    assert found["hours"] == [23, 0, 1]


def test_an_hour_without_deliveries_between_others_stays() -> None:
    assert heat(*range(8 * 60, 9 * 60), *range(10 * 60, 11 * 60))["hours"] == [8, 9, 10]


def test_few_minutes_are_a_table() -> None:
    analysis = given_by.small(heat=[HeatCell(13, minute, 7, 21) for minute in range(5)])
    page = parse(render(analysis, []))
    assert page.data["heat"] is None
    assert "13:04" in page.text
    assert "13:05" not in page.text
    assert plots.heat_of(given_by.small(heat=[HeatCell(13, minute, 7, 21) for minute in range(10)])) is not None


@given(st.sets(st.integers(0, 23), min_size=1))
def test_the_hours_of_a_heat_map_are_the_fewest_in_a_row(hours: set[int]) -> None:
    found = plots._arc(sorted(hours))
    assert hours <= set(found)
    assert found == [(found[0] + i) % 24 for i in range(len(found))]
    rows = [[(first + i) % 24 for i in range(size)] for first in range(24) for size in range(1, 25)]
    assert len(found) == min(len(row) for row in rows if hours <= set(row))


def test_times_that_no_calendar_has_are_not_drawn() -> None:
    ahead = [Ahead(MONDAY, "orders", 1), Ahead(1 << 62, "orders", 1)]
    assert plot("ahead", ahead=ahead)["x"] == [MONDAY]


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=60, unique=True), st.integers(1, 5))
def test_coarser_curves_keep_sums(at: list[int], factor: int) -> None:
    times = sorted(MONDAY + i * MINUTE for i in at)
    limit = plots.MAX_POINTS
    try:
        plots.MAX_POINTS = 20  # type: ignore[misc]
        x, (column,), step = plots._on_steps(times, MINUTE, [[factor] * len(times)])
    finally:
        plots.MAX_POINTS = limit  # type: ignore[misc]
    assert sum(column) == factor * len(times)
    assert x == sorted(set(x))
    assert all(time % step == 0 for time in x)
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
    assert text.count("billing") == 1 + 6  # the rest are the group's retries
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
