"""Two kinds of HTML page: the report of an analysis, which is self-contained and needs neither a network nor other
files; and the page of all nights, which links the reports in its folder.

    page       `render`, `render_index`: the templates, filled in
    plots      the series that the page's script draws
    verdict    the result of an audit, in plain words
    formats    numbers, times and names as people read them
    static/    the templates, their style sheet and script, and uPlot

Plots are drawn by uPlot (MIT, 50 KB in the page, on a canvas). The alternative was SVG pictures by matplotlib. As a
path, a curve of 1,500 points is five times the size of its numbers; it has no values to point at and no zoom, and does
not adapt to the size of the screen. The numbers are in the page anyway, for the tables behind the plots. The heat maps
are grids of HTML, and comparisons of names are bars in a table: these need no library.

Text from the store may be anything that a producer sent. The template escapes all of it, the numbers for the script are
JSON without a `<`, and a policy in the page (CSP) allows only the page's own scripts to run, and nothing to be loaded.
"""

from duemq.spark_jobs.report.page import GENERATOR, render, render_index

__all__ = ["GENERATOR", "render", "render_index"]
