"""The report of an analysis: one HTML page that needs nothing else, neither network nor files beside it. And the page
of all nights, which links the reports in its folder.

    page       `render`, `render_index`: the templates, filled in
    plots      the series that the page's script draws
    verdict    what the audit found, in plain words
    formats    numbers, times and names as people read them
    static/    the templates, their style sheet and script, and uPlot

Plots are uPlot's (MIT, 50 KB in the page, drawn on a canvas). Pictures made here, as SVG by matplotlib, were the other
way: a curve of 1,500 points is five times the size of its numbers as a path, has no values to point at, no zoom, and
looks the same on a phone as on a wall. The numbers are in the page anyway, for the tables behind the plots. The heat
maps are grids of HTML, and what compares names is a bar in a table: these need no library.

What comes from the store is whatever producers sent. The template escapes all of it, the numbers for the script are
JSON without a `<`, and a policy in the page (CSP) lets run the page's own scripts alone, and load nothing.
"""

from duemq.spark_jobs.report.page import GENERATOR, render, render_index

__all__ = ["GENERATOR", "render", "render_index"]
