// Two runs side by side: settings, the end of each metric, and its curves.

import { linkTo } from "./address.js";
import { legend, lineChart, seriesColour } from "./chart.js";
import { caption, choice, el, format, options, section } from "./dom.js";
import { axesOf, offerAxes, pointsOf, smoothed } from "./series.js";

const SIDES = ["a", "b"];

export function comparePage(source, fields) {
  const page = { names: SIDES.map((side) => fields.get(side) ?? ""),
    data: null, both: [] };
  const [axis, axisLabel] = choice("Over", { id: "axis" });
  const curves = section("curves", "Curves", axisLabel);
  const settings = section("settings", "Settings that differ");
  const metrics = section("metrics", "Metrics");
  const choices = SIDES.map((side, i) => choice(side.toUpperCase(), {
    id: `run-${side}`, onchange: (event) => {
      page.names[i] = event.target.value;
      location.hash = linkTo("compare",
        { a: page.names[0], b: page.names[1] });
    } }));
  Object.assign(page, {
    axis, curves, settings, metrics, metric: null,
    selects: choices.map(([select]) => select),
    node: el("div", {}, el("h1", {}, "Two runs"),
      el("p", { class: "bar" }, ...choices.map(([, label]) => label)),
      curves.node, settings.node, metrics.node),
    load: () => loadBoth(page, source),
    draw: () => drawBoth(page),
  });
  axis.addEventListener("change", page.draw);
  return page;
}

async function loadBoth(page, source) {
  const data = await source.runs();
  const known = data.runs.map(({ name }) => name);
  page.names = page.names.map((name, i) =>
    known.includes(name) ? name : known[Math.min(i, known.length - 1)]);
  if (!known.length) throw new Error("there are no runs to compare");
  const both = await Promise.all(page.names.map(source.metrics));
  if (data === page.data && both.every((one, i) => one === page.both[i]))
    return;
  Object.assign(page, { data, both });
  page.metric ??= data.metrics[0] ?? "success";
  offerAxes(page.axis, data);
  page.selects.forEach((select, i) => {
    options(select, known);
    select.value = page.names[i];
  });
  page.draw();
}

function drawBoth(page) {
  if (!page.data) return;
  const { names, data, both, axis, metric } = page;
  const label = axesOf(data)[axis.value];
  const series = both.map((run, i) => ({
    name: `${SIDES[i].toUpperCase()} ${names[i]}`, colour: seriesColour(i),
    points: smoothed(pointsOf({ ...run,
      values: run.metrics[metric] ?? [] }, axis.value)),
  }));
  page.curves.figure.replaceChildren(
    ...(series.some(({ points }) => points.length) ? [lineChart(
      page.curves.figure, { series, xLabel: label,
        label: `${metric} over ${label}` })] : []),
    legend(series.map((one) => [one.name, one.colour])),
    caption(`${metric}: ${both[0].meanings[metric] ??
      both[1].meanings[metric] ?? "means of neighbours."}`));
  page.settings.figure.replaceChildren(settingsTable(names, data));
  page.metrics.figure.replaceChildren(metricsTable(page), caption(
    "Means over the last ten rounds that have the metric; of evaluations, the " +
    "last. Choose a metric to draw it above."));
}

function table(heads, rows) {
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((head) =>
      el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows)));
}

function settingsTable(names, { runs, differing }) {
  const [a, b] = names.map((name) =>
    runs.find((run) => run.name === name).settings);
  const rows = differing.filter((name) => a[name] !== b[name]).map((name) =>
    el("tr", {}, el("th", { scope: "row" }, name),
      el("td", {}, a[name] ?? "–"), el("td", {}, b[name] ?? "–")));
  return rows.length ? table(["Setting", "A", "B"], rows)
    : caption("Both have the same settings.");
}

function metricsTable(page) {
  const { both } = page;
  const keys = [...new Set(both.flatMap(({ metrics }) =>
    Object.keys(metrics)))];
  const focused = document.activeElement?.dataset?.metric;
  const rows = keys.map((key) => {
    const [a, b] = both.map(({ last }) => last[key]);
    return el("tr", {}, el("th", { scope: "row" }, el("button", {
      class: "plain", "data-metric": key,
      "aria-pressed": String(key === page.metric),
      "data-tip": both[0].meanings[key] ?? both[1].meanings[key],
      onclick: () => { page.metric = key; page.draw(); },
    }, key)), ...[a, b, a == null || b == null ? null : b - a].map((value) =>
      el("td", {}, format(value))));
  });
  const found = table(["Metric", "A", "B", "B − A"], rows);
  if (focused) queueMicrotask(() => found.querySelector(
    `[data-metric="${CSS.escape(focused)}"]`)?.focus());
  return found;
}
