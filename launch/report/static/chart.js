// Curves with bands, and histograms, as SVG. Arrow keys walk along a curve.

import { el, format, range, scale, say, showTip, ticks } from "./dom.js";

const LEFT = 58, RIGHT = 12, TOP = 12, BOTTOM = 34;
const NUM_COLOURS = 8;
const DASHES = [null, "7 4", "2 4"];

export function smooth(values) {
  const radius = Math.max(1, Math.floor(values.length / 25));
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const from = Math.max(0, i - radius);
    const to = Math.min(values.length, i + radius + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

export function seriesColour(i) {
  return `var(--series-${i % NUM_COLOURS})`;
}

export function seriesDash(i) {
  return DASHES[Math.floor(i / NUM_COLOURS) % DASHES.length];
}

function path(points, x, y) {
  return points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`)
    .join(" ");
}

// The place of the point that is nearest to a value of x; points are sorted.
export function nearest(points, value) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < value) low = middle + 1;
    else high = middle;
  }
  const before = points[low - 1];
  return before && value - before[0] < points[low][0] - value ? low - 1 : low;
}

// series: [{ name, points: [[x, y]], band: [[x, low, high]], raw: [[x, y]],
//            rest: [[[x, y]]], colour, dash }], raw and rest thin;
// dots: [{ x, y, low, high, tip }].
export function lineChart(figure, {
  series, dots = [], label, xLabel = "", percent = false, height = 280,
}) {
  const width = Math.max(280, figure.clientWidth);
  const ys = [], xs = [];
  for (const { points, band = [], raw = [], rest = [] } of series) {
    for (const [a, b] of [...points, ...raw, ...rest.flat()]) {
      xs.push(a);
      ys.push(b);
    }
    for (const [, low, high] of band) ys.push(low, high);
  }
  for (const dot of dots) { xs.push(dot.x); ys.push(dot.low, dot.high, dot.y); }
  const domain = range(xs), values = percent ? [0, 1] : range(ys);
  if (values[0] === values[1]) values[1] += 1;
  const x = scale(...domain, LEFT, width - RIGHT);
  const y = scale(...values, height - BOTTOM, TOP);
  const svg = el("svg", { class: "chart", height, tabindex: 0, role: "img",
    viewBox: `0 0 ${width} ${height}`, "aria-label": label });
  for (const tick of ticks(...values, 5))
    svg.append(
      el("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick),
        stroke: "var(--rule)" }),
      el("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" },
        percent ? `${Math.round(100 * tick)}%` : format(tick)));
  // Rounds, steps and tokens are whole.
  const least = xLabel === "seconds" ? 0 : 1;
  for (const tick of ticks(...domain, Math.max(4, width / 110), least))
    svg.append(el("text", { x: x(tick), y: height - 14,
      "text-anchor": "middle" }, format(tick)));
  if (xLabel)
    svg.append(el("text", { class: "x-label", x: width - RIGHT, y: height - 3,
      "text-anchor": "end" }, xLabel));
  for (const one of series) drawSeries(svg, one, x, y);
  for (const dot of dots)
    svg.append(
      el("line", { x1: x(dot.x), x2: x(dot.x), y1: y(dot.low),
        y2: y(dot.high), stroke: "var(--decode)", "stroke-width": 2 }),
      el("circle", { cx: x(dot.x), cy: y(dot.y), r: 4.5, class: "dot",
        fill: "var(--decode)", stroke: "var(--card)", "stroke-width": 1.5,
        "data-tip": dot.tip }));
  startCursor(svg, series, x, y, { label, xLabel, width });
  return svg;
}

function drawSeries(svg, one, x, y) {
  const { points, band = [], raw = [], rest = [], colour: stroke, dash } = one;
  if (band.length > 1)
    svg.append(el("polygon", { class: "band", fill: stroke, opacity: 0.16,
      points: path([...band.map(([a, , b]) => [a, b]),
        ...band.map(([a, b]) => [a, b]).reverse()], x, y) }));
  const style = { fill: "none", stroke, "stroke-linejoin": "round" };
  if (raw.length)
    svg.append(el("polyline", { ...style, points: path(raw, x, y),
      opacity: 0.35 }));
  for (const part of rest)
    svg.append(el("polyline", { ...style, points: path(part, x, y),
      class: "rest", "stroke-dasharray": dash }));
  svg.append(el("polyline", { ...style, points: path(points, x, y),
    class: "curve", "stroke-width": 2.5, "stroke-dasharray": dash,
    "data-series": one.name }));
  for (const part of [points, ...rest])
    if (part.length === 1)
      svg.append(el("circle", { cx: x(part[0][0]), cy: y(part[0][1]), r: 3,
        fill: stroke }));
}

// A line that follows the pointer or the arrow keys, with all values there.
function startCursor(svg, series, x, y, { xLabel, width }) {
  const drawn = series.filter(({ points }) => points.length);
  const stops = [...new Set(drawn.flatMap(({ points }) =>
    points.map(([at]) => at)))].sort((a, b) => a - b);
  if (!stops.length) return;
  const line = el("line", { class: "cursor", y1: TOP, y2: TOP, x1: LEFT,
    x2: LEFT, stroke: "var(--muted)" });
  svg.append(line);
  let place = stops.length - 1;
  const told = (at) => [`${xLabel || "x"} ${format(at)}`,
    ...drawn.slice(0, 12).map(({ name, points, raw }) => {
      const i = nearest(points, at);
      const more = raw?.length ? ` (${format(raw[nearest(raw, at)][1])})` : "";
      return `${name} ${format(points[i][1])}${more}`;
    })].join("\n");
  const look = (event, at) => {
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(at));
    line.setAttribute("y2", svg.viewBox.baseVal.height - BOTTOM);
    showTip(event, told(at));
  };
  svg.addEventListener("pointermove", (event) => {
    if (event.target.dataset.tip) return;
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * width / box.width;
    place = nearest(stops.map((stop) => [x(stop)]), at);
    look(event, stops[place]);
  });
  svg.addEventListener("pointerleave", (event) => showTip(event, ""));
  svg.addEventListener("blur", (event) => showTip(event, ""));
  svg.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(stops.length / 20));
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: far, PageDown: -far,
      Home: -stops.length, End: stops.length }[event.key];
    if (!step) return;
    event.preventDefault();
    place = Math.min(stops.length - 1, Math.max(0, place + step));
    const box = svg.getBoundingClientRect();
    look({ clientX: box.left + x(stops[place]) * box.width / width,
      clientY: box.top + box.height / 2 }, stops[place]);
    say(told(stops[place]));
  });
}

// A curve of each value and a bold one of the mean of its neighbours.
export function trend(name, points, stroke) {
  const smoothed = smooth(points.map(([, value]) => value));
  return { name, colour: stroke, raw: points,
    points: points.map(([at], i) => [at, smoothed[i]]) };
}

// bars: [{ label, parts: [{ value, fill, tip }] }], drawn side by side.
export function histogram(figure, { bars, label, height = 260, every = 1 }) {
  const width = Math.max(220, figure.clientWidth);
  const most = range(bars.flatMap(({ parts }) =>
    parts.map(({ value }) => value)))[1];
  const step = (width - 20) / bars.length;
  const y = scale(0, Math.max(most, 1), height - BOTTOM, 34);
  const svg = el("svg", { height, viewBox: `0 0 ${width} ${height}`,
    role: "img", "aria-label": label });
  bars.forEach(({ label: text, parts }, i) => {
    const middle = 10 + step * (i + 0.5);
    const wide = Math.min(64, step * 0.76) / parts.length;
    if (i % every === 0)
      svg.append(el("text", { x: middle, y: height - 12,
        "text-anchor": "middle" }, text));
    parts.forEach(({ value, fill, tip }, k) => {
      if (!value) return;
      const left = middle + (k - parts.length / 2) * wide;
      svg.append(el("rect", { class: "bar", x: left, y: y(value), rx: 3,
        width: Math.max(1, wide - 1), height: Math.max(1, y(0) - y(value)),
        fill, "data-tip": tip }));
      if (bars.length <= 12 && parts.length === 1)
        svg.append(el("text", { x: middle, y: y(value) - 7,
          "text-anchor": "middle" }, format(value)));
    });
  });
  svg.append(el("line", { x1: 10, x2: width - 10, y1: y(0), y2: y(0),
    stroke: "var(--muted)" }));
  return svg;
}

// names: [[name, fill, dash]]
export function legend(names) {
  return el("ul", { class: "legend" }, ...names.map(([name, fill, dash]) =>
    el("li", {}, el("span", { class: "key",
      vars: { background: dash ? dashed(fill, dash) : fill } }), name)));
}

function dashed(fill, dash) {
  const [on, off] = dash.split(" ").map(Number);
  return `repeating-linear-gradient(90deg, ${fill} 0 ${on}px, ` +
    `transparent ${on}px ${on + off}px)`;
}
