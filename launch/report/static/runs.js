// All runs of a directory: a table, and the curves of one metric.

import { linkTo } from "./address.js";
import { legend, lineChart, seriesColour, seriesDash } from "./chart.js";
import { caption, choice, el, format, options, section } from "./dom.js";
import { axesOf, offerAxes, overSeeds, pointsOf, smoothed } from "./series.js";

const MAX_LINES = 24, MAX_COLUMNS = 12, MAX_NAME = 100;

export function runsPage(source) {
  const page = { data: null, curves: null, chosen: new Set(),
    sort: { key: "name", down: false } };
  const [metric, metricLabel] = choice("Metric", { id: "metric" });
  const [axis, axisLabel] = choice("Over", { id: "axis" });
  const bands = el("input", { type: "checkbox", id: "bands", checked: true });
  const search = el("input", { type: "search", id: "search",
    placeholder: "name or setting", "aria-label": "Filter runs" });
  const wide = el("input", { type: "checkbox", id: "wide" });
  const compare = el("button", { id: "compare", disabled: true,
    onclick: () => { location.hash = compareLink(page); } }, "Compare two");
  const curves = section("curves", "Curves", metricLabel, axisLabel,
    el("label", {}, bands, " one line for all seeds"));
  const meaning = el("p", {}, el("small", { id: "meaning" }));
  curves.figure.before(meaning);
  const table = section("runs", "Runs",
    el("label", {}, wide, " all settings that differ"), search, compare);
  const scroll = el("div", { class: "scroll" });
  const leftOut = el("span", { id: "left-out" });
  table.figure.append(scroll, caption("Last and best are means over ten " +
    "rounds or steps; evaluations stand alone. Settings that differ have a " +
    "column each. Ticked runs alone are drawn.", leftOut));
  const title = el("h1");
  Object.assign(page, {
    isFrozen: !source.run, metric, axis, bands, wide, search, compare, scroll, title, meaning, leftOut,
    figure: curves.figure,
    node: el("div", {}, el("p", { class: "eyebrow" }, "All runs of"), title,
      curves.node, table.node),
    load: () => loadRuns(page, source),
    draw: () => drawRuns(page),
  });
  metric.addEventListener("change", () => page.load());
  for (const control of [axis, bands, wide])
    control.addEventListener("change", page.draw);
  search.addEventListener("input", page.draw);
  return page;
}

function compareLink({ chosen }) {
  const [a, b] = [...chosen];
  return linkTo("compare", { a, b });
}

async function loadRuns(page, source) {
  const data = await source.runs();
  const metrics = data.metrics.length ? data.metrics : ["success"];
  if (data !== page.data) {
    options(page.metric, metrics);
    offerAxes(page.axis, data);
  }
  if (!page.data && data.sort) page.sort = data.sort;
  const curves = await source.curves(page.metric.value);
  if (data === page.data && curves === page.curves) return;
  Object.assign(page, { data, curves });
  page.title.textContent = data.title;
  page.leftOut.textContent = data.left_out
    ? ` ${format(data.left_out)} more, the last by name, are not listed.` : "";
  document.title = `${data.title} · Twinmesh`;
  page.draw();
}

function drawRuns(page) {
  if (!page.data || !page.curves) return;
  const text = page.search.value.trim().toLowerCase();
  const shown = page.data.runs.filter((run) => !text || [run.name, run.state,
    ...page.data.differing.map((name) => `${name}=${run.settings[name]}`)]
    .some((one) => one.toLowerCase().includes(text)));
  page.meaning.firstChild.textContent = page.curves.meaning;
  drawCurves(page, shown);
  drawTable(page, shown);
}

function drawCurves(page, shown) {
  const { curves, axis, bands, chosen, figure } = page;
  const picked = shown.filter(({ name }) => chosen.has(name));
  const runs = picked.length ? picked : shown;
  const groups = new Map();
  for (const run of runs) {
    const key = bands.checked ? run.group : run.name;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  const series = [...groups].map(([name, members], i) => ({
    name: nameOfAll(name, members),
    colour: seriesColour(i), dash: seriesDash(i),
    ...overSeeds(members.map(({ name: run }) =>
      smoothed(pointsOf(curves.runs[run] ?? NOTHING, axis.value)))),
  })).filter(({ points, rest }) => points.length || rest.length);
  if (!series.length)
    return figure.replaceChildren(caption("No run has recorded this."));
  const drawn = series.slice(0, MAX_LINES);
  const more = series.length - drawn.length;
  const xLabel = axesOf(page.data)[axis.value];
  figure.replaceChildren(
    lineChart(figure, { series: drawn, height: 320,
      label: `${page.metric.value} over ${xLabel}`, xLabel }),
    legend(drawn.map((one) => [one.name, one.colour, one.dash])),
    caption("Of 25 points or more: means of neighbours, a twenty-fifth of the " +
      "run each way. A band reaches from the least to the most of its runs, " +
      "where all have a value; beyond that they go on thin." +
      (more > 0 ? ` ${more} more are not drawn: tick those to see.` : "")));
}

// In a file a run is a link to the file of its own, if it has one.
function nameOf({ name, page }, isFrozen) {
  const href = isFrozen ? page : linkTo("run", { name });
  return href ? el("a", { href, "data-focus": `open ${name}` }, name) : name;
}

// Runs that have little in common differ in all they have.
function nameOfAll(group, members) {
  const { length, 0: { name } } = members;
  if (length === 1) return name;
  return group.length > MAX_NAME ? `${name} and ${length - 1} more`
    : `${group} (${length} runs)`;
}

const NOTHING = { rounds: [], tokens: [], time: [], values: [] };

function columnsOf({ data, curves, metric, wide }) {
  const settings = wide.checked ? data.differing
    : data.differing.slice(0, MAX_COLUMNS);
  const number = (field) => (run) => curves.runs[run.name]?.[field];
  return [
    { key: "name", title: "Run", of: (run) => run.name },
    { key: "state", title: "State", of: (run) => run.state },
    { key: "round", title: data.is_tuning ? "Steps" : "Rounds",
      of: (run) => run.round,
      text: (run) => `${run.round} / ${format(run.rounds)}` },
    { key: "last", title: `Last ${metric.value}`, of: number("last") },
    { key: "best", title: `Best ${metric.value}`, of: number("best") },
    ...settings.map((name) => ({ key: `=${name}`, title: name,
      of: (run) => run.settings[name] ?? "–" })),
    ...(data.runs.some(({ note }) => note)
      ? [{ key: "note", title: "Note", of: (run) => run.note }] : []),
  ];
}

function inOrder(runs, { key, down }, columns) {
  const column = columns.find((one) => one.key === key) ?? columns[0];
  const rank = (run) => {
    const value = column.of(run);
    return value == null || value === "" || Number.isNaN(Number(value))
      ? value ?? "" : Number(value);
  };
  return [...runs].sort((a, b) => {
    const [one, other] = [rank(a), rank(b)];
    // Runs without a value come last, either way.
    if ((one === "") !== (other === "")) return one === "" ? 1 : -1;
    const both = typeof one === typeof other;
    const order = both && typeof one === "number" ? one - other
      : `${one}`.localeCompare(`${other}`, "en", { numeric: true });
    return down ? -order : order;
  });
}

function drawTable(page, shown) {
  const columns = columnsOf(page), { sort, chosen } = page;
  const focused = document.activeElement?.dataset?.focus;
  const at = page.scroll.scrollLeft;
  const head = el("tr", {}, el("th", {}, el("span", { class: "unseen" },
    "Ticked")), ...columns.map(({ key, title }) => el("th", {
    scope: "col", "aria-sort": sort.key !== key ? "none"
      : sort.down ? "descending" : "ascending",
  }, el("button", { class: "plain", "data-focus": `sort ${key}`,
    onclick: () => {
      page.sort = { key, down: sort.key === key && !sort.down };
      page.draw();
    } }, title))));
  const rows = inOrder(shown, sort, columns).map((run) => el("tr", {
    "data-run": run.name, class: run.state },
  el("td", {}, el("input", { type: "checkbox", checked: chosen.has(run.name),
    "aria-label": `Tick ${run.name}`, "data-focus": `tick ${run.name}`,
    onchange: (event) => {
      if (event.target.checked) chosen.add(run.name);
      else chosen.delete(run.name);
      page.draw();
    } })),
  ...columns.map(({ key, of, text }) => el("td", {}, key === "name"
    ? nameOf(run, page.isFrozen)
    : text ? text(run) : format(of(run))))));
  page.scroll.replaceChildren(el("table", {}, el("thead", {}, head),
    el("tbody", {}, ...rows)));
  page.scroll.scrollLeft = at;
  const more = page.data.differing.length - MAX_COLUMNS;
  page.wide.parentNode.hidden = more <= 0;
  page.compare.disabled = chosen.size !== 2;
  if (focused) page.scroll.querySelector(
    `[data-focus="${CSS.escape(focused)}"]`)?.focus();
}
