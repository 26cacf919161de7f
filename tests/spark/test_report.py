"""The report in a browser: plots are drawn in both colour schemes, without an error or a request, and nothing is wider
than a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duemq.spark_jobs.analyse.analysis import Ahead, HeatCell
from duemq.spark_jobs.report import render, render_index
from tests.soak import sampled
from tests.spark.world.browser import Page, chromium
from tests.unit.spark_jobs.report import report_analyses as given_by
from tests.unit.spark_jobs.report.report_analyses import many_nights

PHONE, LARGE_PHONE, LAPTOP, WIDE = 360, 390, 1280, 1400
REPORTS = {
    "empty": (given_by.analysis(), []),
    "small": (given_by.small(), given_by.history(1)),
    "week": (given_by.week(), given_by.history()),
    "hostile": (given_by.hostile(), given_by.history(2)),
    "offenders": (given_by.offenders(), given_by.history(3)),
    "cluster": (given_by.cluster(), given_by.history(3)),
}
COLOURS = """(figure) => {
  const canvas = figure.querySelector("canvas"), at = new Set();
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 250) at.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return at;
}"""
"""JavaScript: the opaque colours in a plot's canvas."""
MISSING = f"""[...document.querySelectorAll("figure[data-plot]")].flatMap((figure) => {{
  const wanted = [...figure.querySelectorAll(".u-legend .u-series:not(:first-child) .u-marker")].map((marker) => {{
    const [r, g, b] = getComputedStyle(marker).backgroundColor.match(/\\d+/g).map(Number);
    return r << 16 | g << 8 | b;
  }});
  const found = ({COLOURS})(figure);
  return wanted.every((colour) => found.has(colour)) ? [] : [figure.dataset.plot];
}})"""
"""JavaScript: the plots that lack the colour of one of their series."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


def written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.html"
    path.write_text(render(*REPORTS[name]), encoding="utf-8")
    return path


@pytest.fixture
def week(tmp_path: Path) -> Path:
    return written("week", tmp_path)


def check_drawn(page: Page) -> None:
    assert page.errors == []
    assert page.evaluate('[...document.querySelectorAll("[data-failed]")].map((one) => one.dataset.failed)') == []
    figures = page.evaluate('document.querySelectorAll("figure").length')
    assert page.evaluate('document.querySelectorAll("figure[data-drawn]").length') == figures
    assert page.evaluate("document.documentElement.dataset.drawn") == str(figures)


VIEWS = [
    (name, dark, width) for name in REPORTS for dark in (False, True) for width in (PHONE, LARGE_PHONE, LAPTOP, WIDE)
]
# A page takes the browser seconds: each report is seen once in each run, the usual one twice.
EACH_RUN = [
    ("empty", False, PHONE), ("small", True, LAPTOP), ("week", False, PHONE), ("week", True, WIDE),
    ("hostile", False, PHONE), ("offenders", True, LAPTOP), ("cluster", True, LARGE_PHONE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dark", "width"), sampled(VIEWS, EACH_RUN))
def test_it_is_drawn_and_what_is_too_wide_scrolls_in_its_own_box(
    browser: Page, tmp_path: Path, name: str, dark: bool, width: int
) -> None:
    report = written(name, tmp_path)
    browser.open(report, dark=dark, width=width)
    check_drawn(browser)
    assert browser.requests == [report.resolve().as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    outside = browser.evaluate("""[...document.querySelectorAll("main *")].filter((one) =>
      !one.closest("table, .uplot, .skip") && one.getBoundingClientRect().right > innerWidth + 0.5)
      .map((one) => one.outerHTML.slice(0, 80))""")
    assert outside == []
    boxes = browser.evaluate("""[...document.querySelectorAll("table:not(.u-legend)")].map((table) => {
      const box = table.closest(".scroll");
      if (!box) return "no box";
      if (getComputedStyle(box).overflowX != "auto") return "no box that a reader can scroll";
      box.scrollLeft = 1e6;
      const reached = box.scrollLeft + box.clientWidth >= table.scrollWidth - 1;
      return reached ? "" : box.getAttribute("aria-label");
    })""")
    assert [box for box in boxes if box] == []
    assert boxes


@pytest.mark.parametrize("dark", [False, True])
def test_each_curve_is_there_in_its_colour(browser: Page, week: Path, dark: bool) -> None:
    browser.open(week, dark=dark)
    # Later series are drawn above earlier ones; where lines overlap, some pixels of each remain.
    assert browser.evaluate(MISSING) == []


@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_one_message_alone_is_seen(browser: Page, tmp_path: Path, width: int) -> None:
    """The plot shows a single message, although its minute is narrower than a pixel."""
    analysis = given_by.small(audit=given_by.summary(records=2, scheduled=2, pending=2))
    days = [given_by.MONDAY, given_by.MONDAY + 3 * given_by.DAY, given_by.MONDAY + 6 * given_by.DAY]
    analysis.ahead = [Ahead(at, "orders", 1) for at in days]
    analysis.ahead_step_ms = given_by.MINUTE
    path = tmp_path / "report.html"
    path.write_text(render(analysis, []), encoding="utf-8")
    browser.open(path, width=width)
    assert "ahead" not in browser.evaluate(MISSING)


def test_offenders_with_usual_names_need_no_scrolling_on_a_laptop(browser: Page, week: Path) -> None:
    browser.open(week, width=LAPTOP)
    widths = browser.evaluate("""(() => {
      const box = document.querySelector('[aria-label="Offending messages"]');
      return [box.scrollWidth, box.clientWidth];
    })()""")
    assert widths[0] == widths[1]


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_an_id_is_copied(browser: Page, week: Path, has_clipboard: bool) -> None:
    """A click copies an id, also where a page may not use the clipboard, as in some browsers a page from a disk."""
    browser.open(week)
    browser.evaluate(f"""(() => {{
      window.copied = [];
      navigator.clipboard.writeText = async (text) => {{
        if (!{str(has_clipboard).lower()}) throw new Error("not allowed");
        window.copied.push(text);
      }};
      document.addEventListener("copy", () => window.copied.push(document.activeElement.value));
    }})()""")
    key = REPORTS["week"][0].audit.offenders[0].unique_key
    x, y = browser.evaluate(f"""(() => {{
      const button = document.querySelector('button.id[data-copy="{key}"]');
      button.scrollIntoView({{ block: "center", behavior: "instant" }});
      const box = button.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    }})()""")
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    said = browser.evaluate("""new Promise((done) => {
      const line = document.getElementById("said"), tell = () => done(line.textContent);
      if (line.textContent) tell();
      else new MutationObserver(tell).observe(line, { childList: true });
    })""")
    assert said == "copied"
    assert browser.evaluate("window.copied") == [key]
    assert browser.evaluate("document.activeElement.dataset.copy") == key


LEGENDS = """[...document.querySelectorAll(".u-legend th, .u-legend .u-value")].filter((one) => one.checkVisibility(
  { visibilityProperty: true })).map((one) => one.textContent.trim())"""


def test_a_legend_has_values_only_where_somebody_points(browser: Page, week: Path) -> None:
    browser.open(week)
    texts = browser.evaluate(LEGENDS)
    assert {"p50", "p99", "orders"} <= set(texts)
    assert [text for text in texts if text in ("UTC", "\u2013", "")] == []
    browser.evaluate('document.querySelector("[data-plot=lateness] .canvas").focus()')
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Home")
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert {"UTC", "2025-11-17 00:00:00"} <= set(browser.evaluate(LEGENDS))


@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_one_message_beside_a_quarter_of_a_million_is_seen(browser: Page, tmp_path: Path, width: int) -> None:
    """The plot shows a single message beside a peak of a quarter of a million: at other times, and below the peak
    itself."""
    step, start = 15 * given_by.MINUTE, given_by.MONDAY
    analysis = given_by.small()
    analysis.ahead_step_ms = step
    analysis.ahead = [Ahead(start + 40 * step, "orders", 250_000), Ahead(start + 40 * step, "below", 1)]
    analysis.ahead += [Ahead(start, "beside", 1), Ahead(start + 80 * step, "beside", 1)]
    path = tmp_path / "report.html"
    path.write_text(render(analysis, []), encoding="utf-8")
    browser.open(path, width=width)
    assert "ahead" not in browser.evaluate(MISSING)


def test_a_heat_map_has_the_hours_that_have_something(browser: Page, tmp_path: Path) -> None:
    cells = [HeatCell(at // 60 % 24, at % 60, 3, 40) for at in range(23 * 60 + 30, 24 * 60 + 20)]
    path = tmp_path / "report.html"
    path.write_text(render(given_by.small(heat=cells), []), encoding="utf-8")
    browser.open(path)
    check_drawn(browser)
    assert browser.evaluate('document.querySelectorAll("[data-heat=due] .grid i").length') == 120
    assert browser.evaluate('document.querySelectorAll("[data-heat=due] .grid i[class]").length') == 50
    labels = browser.evaluate('[...document.querySelectorAll("[data-heat=due] .grid b")].map((one) => one.textContent)')
    assert labels[:2] == ["23", "00"]


def test_colours_follow_the_scheme(browser: Page, week: Path) -> None:
    browser.open(week)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(paper)
    browser.prefer(dark=True)
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.evaluate(paper) != light
    dark = browser.evaluate(
        'parseInt(getComputedStyle(document.documentElement).getPropertyValue("--s1").slice(1), 16)'
    )
    curve = f'({COLOURS})(document.querySelector("[data-plot=lateness]")).has({dark})'
    assert browser.evaluate(curve)
    assert browser.evaluate(MISSING) == []
    check_drawn(browser)


@pytest.mark.parametrize(
    ("name", "dark"),
    sampled(
        [(name, dark) for name in ("week", "cluster") for dark in (False, True)], [("week", False), ("cluster", True)]
    ),
)
def test_text_can_be_read(browser: Page, tmp_path: Path, dark: bool, name: str) -> None:
    """All text has WCAG's contrast of 4.5 to 1."""
    browser.open(written(name, tmp_path), dark=dark)
    assert browser.evaluate(CONTRAST) == []


CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walker.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest("script, noscript")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(back(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.add(node.tagName + "." + node.className + ": " + text.data.slice(0, 30));
  }
  return [...found];
})()"""


def test_the_arrow_keys_tell_values(browser: Page, week: Path) -> None:
    browser.open(week)

    def press(key: str) -> Any:
        browser.evaluate('document.querySelector("[data-plot=lateness] .canvas").focus()')
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key)
        browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return browser.evaluate(
            '[...document.querySelectorAll("[data-plot=lateness] .u-value")].map((one) => one.textContent)'
        )

    first, *_ = press("Home")
    second, *values = press("ArrowRight")
    assert first == "2025-11-17 00:00:00"
    assert second == "2025-11-17 00:10:00"
    expected = REPORTS["week"][0].lateness[1]
    assert values[0].replace("\u00a0", " ") == f"{expected.p50_ms} ms"


def test_the_table_behind_a_plot_has_its_numbers(browser: Page, week: Path) -> None:
    browser.open(week)
    rows = browser.evaluate("""(() => {
      const details = document.querySelector("[data-plot=lateness] details");
      details.open = true;
      return new Promise((done) => setTimeout(() => done([...details.querySelectorAll("tr")].map(
        (row) => [...row.cells].map((cell) => cell.textContent))), 0));
    })()""")
    points = REPORTS["week"][0].lateness
    assert rows[0] == ["UTC", "p50", "p99", "latest"]
    assert len(rows) == len(points) + 1
    assert rows[1][0] == "2025-11-17 00:00:00"
    assert [cell.replace("\u00a0", " ") for cell in rows[1][1:2]] == [f"{points[0].p50_ms} ms"]


@pytest.mark.parametrize("name", sampled(REPORTS, ("week", "cluster")))
def test_paper_is_wide_enough(browser: Page, tmp_path: Path, name: str) -> None:
    """The printed report is not wider than the paper: the browser would shrink all of it."""
    browser.open(written(name, tmp_path), width=690)
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        browser.evaluate("dispatchEvent(new Event('beforeprint'))")
        too_wide = browser.evaluate("""[...document.querySelectorAll("main *")].filter((one) =>
          one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".uplot, .skip"))
          .map((one) => one.outerHTML.slice(0, 80))""")
        assert too_wide == []
        assert browser.evaluate("document.documentElement.scrollWidth") == 690
        ids = browser.evaluate("""[...document.querySelectorAll("button.id")].map((one) =>
          getComputedStyle(one, "::after").content.length >= one.title.length)""")
        assert all(ids)
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize(
    ("dark", "width"),
    sampled(
        [(dark, width) for dark in (False, True) for width in (LARGE_PHONE, LAPTOP)],
        [(False, LARGE_PHONE), (True, LAPTOP)],
    ),
)
def test_the_page_of_all_nights(browser: Page, tmp_path: Path, dark: bool, width: int) -> None:
    path = tmp_path / "index.html"
    path.write_text(render_index(many_nights()), encoding="utf-8")
    browser.open(path, dark=dark, width=width)
    assert browser.errors == []
    assert browser.requests == [path.resolve().as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(CONTRAST) == []
    box = browser.evaluate(
        "(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])(document.querySelector('.scroll'))"
    )
    assert (box[0] > box[1]) == (width == LARGE_PHONE)


def test_it_prints(browser: Page, week: Path) -> None:
    browser.open(week, dark=True)
    assert browser.pdf().startswith(b"%PDF")
    check_drawn(browser)
    assert not browser.evaluate('document.documentElement.classList.contains("paper")')


def test_a_changed_script_does_not_run_and_that_is_seen(browser: Page, week: Path) -> None:
    """The page's policy runs its own scripts only: with a changed script no plot is drawn, so the checks above can
    fail."""
    broken = week.with_name("broken.html")
    broken.write_text(week.read_text(encoding="utf-8").replace("var uPlot=", "var  uPlot="), encoding="utf-8")
    browser.open(broken)
    assert any("Content Security Policy" in error for error in browser.errors)
    plots = browser.evaluate('document.querySelectorAll("figure[data-plot]").length')
    assert browser.evaluate('document.querySelectorAll("[data-failed]").length') == plots > 0
    assert browser.evaluate('document.querySelectorAll("[data-plot][data-drawn]").length') == 0
