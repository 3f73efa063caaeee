// Draws the report from the JSON inlined in the page. No network, no library.
// Text of the run only ever reaches the page as text nodes and attributes.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const SHAPES = ["svg", "line", "polyline", "circle", "rect", "text"];

function el(tag, attributes = {}, ...children) {
  const node = SHAPES.includes(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const $ = (selector) => document.querySelector(selector);
const colour = (name) =>
  getComputedStyle(document.body).getPropertyValue(`--${name}`);

function format(value) {
  if (value == null) return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 1000)
    return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function ticks(low, high, most) {
  const rough = Math.max(high - low, 1e-9) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((s) => s >= rough);
  const all = [];
  // 0.35 / 0.05 is a little below 7.
  const last = Math.floor(high / step + 1e-9);
  for (let i = Math.ceil(low / step - 1e-9); i <= last; i++)
    all.push(Number((i * step).toPrecision(12)));
  return all;
}

function scale(low, high, start, end) {
  return (value) => start + ((value - low) / (high - low || 1)) * (end - start);
}

function empty(section, text) {
  $(`${section} figure`).replaceChildren(el("figcaption", {}, text));
}

// ---- Tooltip: of any element with data-tip, and of the drawings below.

function showTip(event, text) {
  tip.hidden = !text;
  tip.textContent = text || "";
  const right = innerWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.min(event.clientX + 12, right)}px`;
  tip.style.top = event.clientY + tip.offsetHeight + 24 > innerHeight
    ? `${event.clientY - tip.offsetHeight - 12}px`
    : `${event.clientY + 16}px`;
}

document.addEventListener("pointerover", (event) => {
  showTip(event, event.target.closest("[data-tip]")?.dataset.tip);
});

// ---- Head

function drawHead() {
  if (data.notes.length)
    $("#notes").append(
      el("div", { class: "notes" }, ...data.notes.map((n) => el("p", {}, n))));
  if (data.violations.length)
    $("#violations").append(el("div", { class: "broken" },
      el("p", {}, `${data.violations.length} broken promises; the first:`),
      ...data.violations.slice(0, 10).map((line) => el("p", {}, line))));
  $("#tiles").append(...data.tiles.map(([label, value, note]) =>
    el("dl", { class: "tile" }, el("dt", {}, label),
      el("dd", {}, value, el("small", {}, note)))));
  $("#config").textContent = JSON.stringify(data.config, null, 2);
}

// ---- Learning curve: any metric by round, raw and smoothed

function smooth(values) {
  const radius = Math.max(1, Math.floor(values.length / 25));
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - radius), i + radius + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

function drawCurve() {
  const key = $("#metric").value;
  $("#meaning").textContent = data.meanings[key] || "";
  const points = data.metrics.round
    .map((round, i) => [round, data.metrics[key][i]])
    .filter(([, value]) => value != null);
  const dots = key === "success" ? data.evaluations : [];
  if (!points.length && !dots.length)
    return empty("#curve", "No round has recorded this.");
  const values = points.map(([, value]) => value);
  const rounds = [...points.map(([round]) => round),
    ...dots.map((dot) => dot.round)];
  const range = key === "success"
    ? [0, 1] : [Math.min(...values), Math.max(...values)];
  if (range[0] === range[1]) range[1] += 1;
  const domain = [Math.min(...rounds), Math.max(...rounds)];
  const width = Math.max(280, $("#curve figure").clientWidth), height = 280;
  const x = scale(...domain, 52, width - 12);
  const y = scale(...range, height - 34, 12);
  const line = (series, style) => el("polyline", {
    points: points.map(([r], i) =>
      `${x(r).toFixed(1)},${y(series[i]).toFixed(1)}`).join(" "),
    fill: "none", stroke: "var(--learner)", "stroke-linejoin": "round",
    ...style,
  });
  const smoothed = smooth(values);
  const svg = el("svg", {
    height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${key} by round`,
  });
  for (const tick of ticks(...range, 5))
    svg.append(
      el("line", { x1: 52, x2: width - 12, y1: y(tick), y2: y(tick),
        stroke: "var(--rule)" }),
      el("text", { x: 44, y: y(tick) + 4, "text-anchor": "end" },
        key === "success" ? `${Math.round(100 * tick)}%` : format(tick)));
  for (const tick of ticks(...domain, 6))
    svg.append(el("text", { x: x(tick), y: height - 12,
      "text-anchor": "middle" }, format(tick)));
  svg.append(line(values, { opacity: 0.35 }),
    line(smoothed, { "stroke-width": 2.5 }));
  for (const dot of dots)
    svg.append(
      el("line", { x1: x(dot.round), x2: x(dot.round), y1: y(dot.low),
        y2: y(dot.high), stroke: "var(--decode)", "stroke-width": 2 }),
      el("circle", { cx: x(dot.round), cy: y(dot.success), r: 4.5,
        fill: "var(--decode)", stroke: "var(--card)", "stroke-width": 1.5,
        "data-tip": `evaluation after round ${dot.round}\n` +
          `${format(dot.success)} (${format(dot.low)} to ` +
          `${format(dot.high)}), ${dot.episodes} episodes` }));
  svg.addEventListener("pointermove", (event) => {
    if (event.target.dataset.tip || !points.length) return;
    const at = event.clientX - svg.getBoundingClientRect().left;
    const near = points.reduce((best, [round], i) =>
      Math.abs(x(round) - at) < Math.abs(x(points[best][0]) - at) ? i : best,
    0);
    showTip(event, `round ${points[near][0]}\n${key} ${format(values[near])}` +
      `\nsmoothed ${format(smoothed[near])}`);
  });
  svg.addEventListener("pointerleave", (event) => showTip(event, ""));
  const caption = "By round; thin: each round, bold: mean of its neighbours" +
    (dots.length ? "; dots: held-out tasks with confidence interval." : ".");
  $("#curve figure").replaceChildren(svg, el("figcaption", {}, caption));
}

// ---- Histogram of lag

function drawLags() {
  const { counts, bound } = data.lags;
  if (!counts.length) return empty("#lags", "No trained group recorded.");
  const last = Math.max(...counts.map(([lag]) => lag), bound ?? 0);
  const most = Math.max(...counts.map(([, count]) => count));
  const width = Math.max(220, $("#lags figure").clientWidth), height = 280;
  const step = (width - 20) / (last + 1);
  const y = scale(0, most, height - 34, 34);
  const bar = Math.min(64, step * 0.72);
  const svg = el("svg", { height, viewBox: `0 0 ${width} ${height}`,
    role: "img", "aria-label": "Histogram of lag" });
  for (let lag = 0; lag <= last; lag++)
    svg.append(el("text", { x: 10 + step * (lag + 0.5), y: height - 12,
      "text-anchor": "middle" }, `${lag}`));
  for (const [lag, count] of counts) {
    const x = 10 + step * (lag + 0.5);
    const over = bound != null && lag > bound;
    svg.append(
      el("rect", { x: x - bar / 2, y: y(count), width: bar, rx: 3,
        height: y(0) - y(count), fill: `var(--${over ? "bad" : "learner"})`,
        "data-tip": `${format(count)} groups trained ${lag} versions late` }),
      el("text", { x, y: y(count) - 7, "text-anchor": "middle" },
        format(count)));
  }
  svg.append(el("line", { x1: 10, x2: width - 10, y1: y(0), y2: y(0),
    stroke: "var(--muted)" }));
  const caption = "Versions between a group's first token and its training. " +
    (bound == null ? "The bound is unknown." : `The bound is ${bound}.`);
  $("#lags figure").replaceChildren(svg, el("figcaption", {}, caption));
}

// ---- Start

function options(select, values, texts = values) {
  select.replaceChildren(...values.map((value, i) =>
    el("option", { value }, `${texts[i]}`)));
}

function drawAll() {
  drawCurve();
  drawLags();
  drawGroups();
  drawTimeline();
  drawGap();
}

drawHead();
const keys = Object.keys(data.metrics).filter((key) => key !== "round");
options($("#metric"), keys);
$("#metric").addEventListener("change", drawCurve);
startTimeline();
startBrowser();
startGap();
drawAll();
addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.body.dataset.ready = "true";
