/* Draws the plots and the heat maps of the report from the JSON in #data (see plots.py), and the tables behind them.
   Sets data-drawn on each figure, and on the root element to their number; data-failed on one that failed. */
(function () {
  "use strict";

  const root = document.documentElement;
  const { plots, heat } = JSON.parse(document.getElementById("data").textContent);
  const NBSP = "\u00a0", MINUS = "\u2212", DASH = "\u2013";
  const HEIGHT = 230, PRINT_WIDTH = 680, LEAST = 3;
  const SECOND = 1000, MINUTE = 60 * SECOND, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
  const LOG_STEPS = [1, 10, 100, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 10 * HOUR, ...[4, 40, 365, 3650, 36500, 365000, 3650000, 36500000].map((n) => n * DAY)];
  const EVERY = (base, times) => Array.from({ length: 16 }, (_, i) => times.map((n) => n * base ** i)).flat();
  const TIME_STEPS = [...EVERY(10, [1, 2, 5]).filter((ms) => ms <= 20 * SECOND),
    ...[0.5, 1, 2, 5, 10, 20, 30].map((n) => n * MINUTE), ...[1, 2, 4, 8, 12].map((n) => n * HOUR), ...[1, 2, 5, 10, 20, 50, 100, 200, ...EVERY(10, [365, 730, 1825])].map((n) => n * DAY)];
  const BYTE_STEPS = EVERY(1024, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // --- numbers and times, as formats.py writes them

  const digits = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 }).replace("-", MINUS);

  function duration(ms) {
    const sign = ms < 0 ? MINUS : "";
    const value = Math.abs(ms);
    if (value < SECOND) return sign + Number(value.toPrecision(3)) + NBSP + "ms";
    if (Math.round(value / 10) * 10 < MINUTE) return sign + digits(value / SECOND) + NBSP + "s";
    for (const [unit, size, small, part] of [["min", MINUTE, "s", SECOND], ["h", HOUR, "min", MINUTE], ["d", DAY, "h", HOUR], ["y", 365 * DAY, "d", DAY]]) {
      const parts = Math.round(value / part), per = size / part;
      if (parts >= { min: 60, h: 24, d: 1000, y: Infinity }[unit] * per) continue;
      const whole = Math.floor(parts / per), rest = whole >= 100 ? 0 : parts % per;
      return sign + whole.toLocaleString("en") + NBSP + unit + (rest ? NBSP + rest + NBSP + small : "");
    }
  }

  function size(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let i = 0;
    for (; value >= 1024 && i < units.length - 1; i++) value /= 1024;
    return digits(value) + NBSP + units[i];
  }

  function compact(value) {
    const big = Math.abs(value);
    for (const [unit, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (big >= factor * 10 || (big >= factor && unit !== "k")) return Number((value / factor).toPrecision(4)) + NBSP + unit;
    return count(value);
  }

  const iso = (ms) => new Date(ms).toISOString().replace("T", " ").replace("Z", "");
  const MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");

  /* Labels of the x axis: the time, and below it the day where it changes. */
  function xLabels(_plot, splits, _axis, _space, increment) {
    let day = "", year = "";
    return splits.map((ms) => {
      const text = iso(ms), date = new Date(ms);
      const months = MONTHS[date.getUTCMonth()], number = date.getUTCDate();
      const newYear = text.slice(0, 4) !== year ? "\n" + text.slice(0, 4) : "";
      year = text.slice(0, 4);
      if (increment >= 28 * DAY) return months + newYear;
      if (increment >= DAY) return number + NBSP + months + newYear;
      const newDay = text.slice(0, 10) !== day ? "\n" + number + NBSP + months : "";
      day = text.slice(0, 10);
      const clock = increment >= MINUTE ? text.slice(11, 16) : increment >= SECOND ? text.slice(11, 19) : text.slice(14, 23);
      return clock + newDay;
    });
  }

  /* The unit of time of a rate: one in which its greatest value has a digit before the point. */
  function perTime(plot) {
    const most = Math.max(...plot.series.flatMap((series) => series.y)) / plot.step;
    for (const [span, name] of [[SECOND, "s"], [MINUTE, "min"], [HOUR, "h"]])
      if (most * span >= 2 || name === "h") return [span / plot.step, "/" + name];
  }

  /* A plot's factor for values, and their formats: short on the axis, in full in the legend. */
  function unitOf(plot) {
    switch (plot.unit) {
      case "ms": return { factor: 1, short: duration, full: duration, steps: TIME_STEPS };
      case "bytes": return { factor: SECOND / plot.step, short: (v) => size(v) + "/s", full: (v) => size(v) + "/s", steps: BYTE_STEPS };
      case "bytes_total": return { factor: 1, short: size, full: size, steps: BYTE_STEPS };
      case "rate": {
        const [factor, name] = perTime(plot);
        return { factor, short: (v) => compact(v) + name, full: (v) => count(v) + name };
      }
      default: return { factor: 1, short: compact, full: count, steps: EVERY(10, [1, 2, 5]) };
    }
  }

  // --- plots

  function yRange(plot, factor) {
    const values = plot.series.flatMap((series) => series.y).filter((y) => y !== null).map((y) => y * factor);
    const least = values.reduce((a, b) => Math.min(a, b), 0), most = values.reduce((a, b) => Math.max(a, b), 0);
    if (plot.log) return () => [1, LOG_STEPS.find((step) => step >= Math.max(most, 10)) ?? most];
    const whole = plot.unit === "count" ? 1 : 0;
    return (_u, low, high) => {
      const top = plot.style === "area" ? high : Math.max(high ?? most, 0);
      return [Math.min(low ?? least, 0) * 1.08, Math.max(top * 1.08, whole) || 1];
    };
  }

  /* Sums from each series on to the last: an area lies behind those that follow it. */
  function stacked(columns) {
    const sums = columns.map((column) => column.slice());
    for (let k = sums.length - 2; k >= 0; k--) sums[k] = sums[k].map((y, i) => y + sums[k + 1][i]);
    return sums;
  }

  /* The times and columns to draw. Lines break at long stretches without values; an area ends with its last step. */
  function columnsOf(plot, factor) {
    let x = plot.x, columns = plot.series.map((s) => s.y.map((y) => y === null ? null : y * factor));
    if (plot.style === "area") {
      x = [...x, x[x.length - 1] + plot.step];
      columns = columns.map((column) => [...column, 0]);
      return [x, stacked(columns), columns];
    }
    if (plot.log) columns = columns.map((column) => column.map((y) => y === null ? null : Math.max(y, 1)));
    if (plot.style === "line") {
      const apart = Math.max(4 * plot.step, (x[x.length - 1] - x[0]) / 25);
      const longX = [], long = columns.map(() => []);
      x.forEach((at, i) => {
        if (i && at - x[i - 1] > apart) {
          longX.push(x[i - 1] + 1);
          long.forEach((column) => column.push(null));
        }
        longX.push(at);
        long.forEach((column, k) => column.push(columns[k][i]));
      });
      return [longX, long, long];
    }
    return [x, columns, columns];
  }

  function alone(u, index, show) {
    if (show) return null;
    const y = u.data[index];
    return y.flatMap((value, i) => value != null && y[i - 1] == null && y[i + 1] == null ? [i] : []);
  }

  const tintOf = (plot, k) => color("--s" + (plot.series[k].name === "others" && plot.style === "area" ? 9 : k % 9 + 1));

  function seriesOf(plot, raw, unit) {
    const isArea = plot.style === "area";
    return plot.series.map((series, k) => {
      const tint = tintOf(plot, k);
      const options = {
        label: series.name,
        stroke: tint,
        width: 1.75,
        value: (_u, _v, _s, i) => i === null || raw[k][i] == null ? DASH : unit.full(raw[k][i]),
        points: { size: 5, filter: alone, stroke: tint, fill: tint },
        spanGaps: false,
      };
      if (isArea) Object.assign(options, { width: 0, paths: () => null, points: { show: false } });
      if (plot.style === "bar")
        Object.assign(options, { fill: tint, width: 0, paths: uPlot.paths.bars({ size: [0.7, 24, 2] }), points: { show: false } });
      if (!isArea && plot.series.length === 1 && plot.style === "line") options.fill = tint + "22";
      return options;
    });
  }

  /* Stacked bars, drawn here: each topic with a value in a step is at least LEAST px high, so that one message is
     visible beside a million. The pixels added are taken from the highest part of the bar. */
  function paintBars(u, raw, tints, step) {
    const ratio = devicePixelRatio, ctx = u.ctx, { left, top, width, height } = u.bbox;
    const y0 = u.valToPos(0, "y", true), perOne = (y0 - u.valToPos(1, "y", true));
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    for (let i = 0; i < u.data[0].length - 1; i++) {
      const from = Math.round(u.valToPos(u.data[0][i], "x", true)), to = Math.round(u.valToPos(u.data[0][i] + step, "x", true));
      if (to < left || from > left + width) continue;
      const heights = raw.map((column) => column[i] ? Math.max(column[i] * perOne, LEAST * ratio) : 0);
      const exact = raw.reduce((sum, column) => sum + column[i] * perOne, 0);
      const most = heights.indexOf(Math.max(...heights)), sum = heights.reduce((a, b) => a + b, 0);
      heights[most] = Math.max(heights[most] - Math.max(sum - exact, 0), Math.min(heights[most], LEAST * ratio));
      const wide = Math.max(to - from - (to - from > 5 * ratio ? Math.round(ratio) : 0), 2 * ratio);
      let base = y0;
      for (let k = raw.length - 1; k >= 0; k--) {
        if (!heights[k]) continue;
        ctx.fillStyle = tints[k];
        ctx.fillRect(from, Math.round(base - heights[k]), wide, Math.max(Math.round(base) - Math.round(base - heights[k]), 1));
        base -= heights[k];
      }
    }
    ctx.restore();
  }

  function make(name, host, width) {
    const plot = plots[name];
    const unit = unitOf(plot);
    const [x, columns, raw] = columnsOf(plot, unit.factor);
    const pad = plot.style === "bar" ? plot.step : 0;
    const axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const logSplits = (_u, _axis, low, high) => LOG_STEPS.filter((step) => step >= low && step <= high);
    const options = {
      width, height: HEIGHT, ms: 1, padding: [null, 26, null, null],
      tzDate: (ms) => uPlot.tzDate(new Date(ms), "Etc/UTC"),
      legend: { live: true, markers: { width: 0, fill: (_u, i) => i ? tintOf(plot, i - 1) : null } },
      hooks: {
        setLegend: [(u) => u.root.classList.toggle("idle", u.cursor.idx == null)],
        ...(plot.style === "area" && { draw: [(u) => paintBars(u, raw, plot.series.map((_s, k) => tintOf(plot, k)), plot.step)] }),
      },
      cursor: { points: { show: plot.style === "line" }, drag: { x: true, y: false }, y: false },
      scales: {
        x: { time: true, range: (_u, low, high) => plot.x.length === 1 ? [x[0] - plot.step, x[x.length - 1] + plot.step] : [low - pad, high + pad] },
        y: { range: yRange(plot, unit.factor), distr: plot.log ? 3 : 1, log: 10 },
      },
      axes: [
        { ...axis, values: xLabels, space: 68 },
        { ...axis, size: 74, space: 34, values: (_u, splits) => splits.map(unit.short), ...(unit.steps && { incrs: unit.steps }), ...(plot.log && { splits: logSplits, filter: (_u, splits) => splits }) },
      ],
      series: [{ label: "UTC", value: (_u, ms) => ms == null ? DASH : iso(ms).slice(0, plot.step < SECOND ? 23 : 19) }, ...seriesOf(plot, raw, unit)],
    };
    const made = new uPlot(options, [x, ...columns], host);
    if (plot.focus) made.setScale("x", { min: x[0], max: plot.focus });
    return made;
  }

  const live = new Map();

  function draw(figure, width) {
    const host = figure.querySelector(".canvas"), name = figure.dataset.plot;
    live.get(figure)?.destroy();
    host.textContent = "";
    figure.classList.toggle("stacked", plots[name].style === "area");
    const known = make(name, host, width || Math.max(200, host.clientWidth));
    known.root.setAttribute("aria-hidden", "true");
    live.set(figure, known);
    figure.dataset.drawn = "true";
  }

  /* The arrow keys move the cursor, so that the legend shows the values there. */
  function move(event, figure) {
    const u = live.get(figure), steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (!u || steps === undefined) return;
    event.preventDefault();
    const last = u.data[0].length - 1;
    const at = Math.min(Math.max((u.cursor.idx ?? (steps > 0 ? -1 : last + 1)) + steps, 0), last);
    u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.bbox.height / devicePixelRatio / 2 });
  }

  function cells(row, tag, texts) {
    texts.forEach((text, i) => {
      const cell = document.createElement(tag);
      cell.textContent = text;
      cell.className = i ? "n" : "t";
      row.append(cell);
    });
  }

  function fillTable(name, host) {
    const plot = plots[name], unit = unitOf(plot);
    const table = document.createElement("table");
    cells(table.createTHead().insertRow(), "th", ["UTC", ...plot.series.map((series) => series.name)]);
    const body = table.createTBody();
    plot.x.forEach((ms, i) => {
      const values = plot.series.map((series) => series.y[i]);
      if (plot.style !== "line" && values.every((y) => !y)) return;
      cells(body.insertRow(), "td", [iso(ms).slice(0, 19), ...values.map((y) => y === null ? DASH : unit.full(y * unit.factor))]);
    });
    host.replaceChildren(table);
  }

  // --- heat maps

  /* Upper bounds of the classes: round times, or powers that divide the range of the values. */
  function classes(values, isTime) {
    if (isTime) {
      const bounds = [10, 100, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, Infinity];
      const latest = values.reduce((a, b) => Math.max(a, b), 0);
      return bounds.slice(0, Math.max(2, bounds.findIndex((bound) => latest <= bound) + 1));
    }
    const most = values.reduce((a, b) => Math.max(a, b), 1), least = values.reduce((a, b) => Math.min(a, b), most);
    if (most <= 7) return Array.from({ length: most }, (_, i) => i + 1);
    const bounds = Array.from({ length: 7 }, (_, i) => Math.round(Math.max(least, 1) * (most / Math.max(least, 1)) ** ((i + 1) / 7)));
    bounds[6] = most;
    return [...new Set(bounds)];
  }

  function drawHeat(figure) {
    const values = heat[figure.dataset.heat], isTime = figure.dataset.heat === "p99";
    const bounds = classes(values, isTime), write = isTime ? duration : count;
    const grid = figure.querySelector(".grid"), at = new Map(heat.at.map((minute, i) => [minute, i]));
    // Classes of time have the same colours every night.
    const spread = isTime ? 1 : 7 / bounds.length;
    const tint = (value) => "q" + Math.max(1, Math.round((bounds.findIndex((bound) => value <= bound) + 1) * spread));
    const [from, to] = heat.minutes;
    grid.style.setProperty("--columns", to - from + 1);
    grid.classList.toggle("low", heat.hours.length <= 6);
    for (const hour of heat.hours) {
      const label = document.createElement("b");
      label.textContent = String(hour).padStart(2, "0");
      grid.append(label);
      for (let minute = from; minute <= to; minute++) {
        const cell = document.createElement("i"), i = at.get(hour * 60 + minute);
        cell.dataset.at = hour * 60 + minute;
        if (i !== undefined) cell.className = tint(values[i]);
        grid.append(cell);
      }
    }
    grid.append(document.createElement("b"));
    const every = to - from >= 30 ? 10 : to - from >= 15 ? 5 : 2;
    for (let minute = from, next; minute <= to; minute = next) {
      next = Math.min((Math.floor(minute / every) + 1) * every, to + 1);
      const label = document.createElement("b");
      label.style.gridColumn = "span " + (next - minute);
      label.textContent = ":" + String(minute).padStart(2, "0");
      grid.append(label);
    }
    const legend = figure.querySelector(".legend");
    const texts = bounds.map((bound) => bound === Infinity ? "more" : (bound === bounds.indexOf(bound) + 1 ? "" : "to ") + write(bound));
    [["", "none"], ...bounds.map((bound, i) => [tint(bound), texts[i]])].forEach(([name, text]) => {
      const item = document.createElement("span"), box = document.createElement("i");
      if (name) box.className = name;
      item.append(box, text);
      legend.append(item);
    });
    const readout = document.querySelector("[data-readout]");
    grid.addEventListener("pointerover", (event) => {
      const minute = Number(event.target.dataset.at), i = at.get(minute);
      if (event.target.dataset.at === undefined) return;
      const clock = String(Math.floor(minute / 60)).padStart(2, "0") + ":" + String(minute % 60).padStart(2, "0") + " UTC";
      readout.textContent = clock + ": " + (i === undefined ? "nothing was due" : count(heat.due[i]) + " due, p99 " + duration(heat.p99[i]) + " late");
    });
    figure.dataset.drawn = "true";
  }

  // --- copying

  /* Uses the clipboard where the page may; else a fallback, as on a page from a disk or a plain http server. */
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      area.style.cssText = "position:fixed;top:0;opacity:0";
      document.body.append(area);
      area.select();
      const isDone = document.execCommand("copy");
      area.remove();
      return isDone;
    }
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    const state = await copy(button.dataset.copy) ? "done" : "failed";
    button.classList.add(state);
    button.focus({ preventScroll: true });
    setTimeout(() => button.classList.remove(state), 1500);
    document.getElementById("said").textContent = state === "done" ? "copied" : "not copied";
  });

  // --- the page

  const figures = [...document.querySelectorAll("figure[data-plot]")];

  function attempt(figure, work) {
    try {
      work();
      return 1;
    } catch (error) {
      figure.dataset.failed = String(error);
      console.error(error);
      return 0;
    }
  }

  function drawAll(width) {
    return figures.reduce((sum, figure) => sum + attempt(figure, () => draw(figure, width)), 0);
  }

  let drawn = drawAll();
  for (const figure of document.querySelectorAll("figure[data-heat]")) drawn += attempt(figure, () => drawHeat(figure));
  for (const figure of figures) {
    figure.querySelector(".canvas").addEventListener("keydown", (event) => move(event, figure));
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => {
      const host = details.querySelector(".scroll");
      if (details.open && !host.firstChild) fillTable(figure.dataset.plot, host);
    });
    new ResizeObserver(([entry]) => {
      const u = live.get(figure), width = Math.round(entry.contentRect.width);
      if (u && width >= 200 && u.width !== width && !root.classList.contains("paper")) u.setSize({ width, height: HEIGHT });
    }).observe(figure.querySelector(".canvas"));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => { root.classList.add("paper"); drawAll(PRINT_WIDTH); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); drawAll(); });
  root.dataset.drawn = drawn;
})();
