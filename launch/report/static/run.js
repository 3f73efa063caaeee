// The page of one run: its outcome, its time, its tokens and its trajectories.

import { bubblesSection } from "./bubbles.js";
import { histogram, legend, lineChart, trend } from "./chart.js";
import { caption, choice, el, format, options, section } from "./dom.js";
import { flowSection } from "./flow.js";
import { gapSection } from "./gap.js";
import { groupsSection } from "./groups.js";
import { valueAt } from "./series.js";
import { timelineSection } from "./timeline.js";
import { trajectoriesSection } from "./trajectories.js";

// A section is { node, draw(data) }, and keeps what was chosen in it. It is hidden
// while there is nothing to draw, as most are of a run without rounds.
export function runPage(source, fields) {
  const name = fields.get("name");
  const head = headSection();
  const parts = {
    curve: curveSection(), lags: lagsSection(), warmStart: warmStartSection(),
    timeline: timelineSection(), bubbles: bubblesSection(),
    flow: flowSection(), lengths: lengthsSection(), faults: faultsSection(),
    memory: memorySection(), groups: groupsSection(), gap: gapSection(),
    settings: settingsSection(),
  };
  const browser = trajectoriesSection(source, name);
  const pair = (...sections) =>
    el("div", { class: "pair" }, ...sections.map(({ node }) => node));
  const page = {
    data: null,
    node: el("div", {}, head.node, pair(parts.curve, parts.lags),
      parts.warmStart.node, parts.timeline.node, parts.bubbles.node,
      pair(parts.flow, parts.lengths), pair(parts.faults, parts.memory),
      parts.groups.node, parts.gap.node, browser.node, parts.settings.node),
    draw() {
      if (!page.data) return;
      head.draw(page.data);
      for (const part of Object.values(parts)) part.draw(page.data);
      browser.draw();
    },
    async load() {
      if (source.runs && name === null)
        throw new Error(`${location.hash} names no run; write #run?name=RUN`);
      // A long log takes a while, and the rest need not wait for it.
      if (!page.data) {
        page.update(await source.run(name, "later"));
        await browser.load();
      }
      page.update(await source.run(name, "now"));
      await browser.load();
      browser.reveal();
    },
    update(data) {
      if (data === page.data) return;
      page.data = data;
      document.title = `${data.title} · Twinmesh`;
      page.draw();
    },
    show: (changed) => browser.show(changed.get("trajectory")),
  };
  browser.show(fields.get("trajectory"));
  return page;
}

function headSection() {
  const title = el("h1"), notes = el("div", { id: "notes" });
  const broken = el("div", { id: "violations" });
  const tiles = el("section", { class: "tiles", id: "tiles",
    "aria-label": "Outcome" });
  const node = el("header", {}, el("p", { class: "eyebrow" }, "Twinmesh run"),
    title, notes, broken, tiles);
  return { node, draw(data) {
    title.textContent = data.title;
    notes.replaceChildren(...(data.notes.length ? [el("div",
      { class: "notes" }, ...data.notes.map((n) => el("p", {}, n)))] : []));
    broken.replaceChildren(...(data.violations.length ? [el("div",
      { class: "broken" },
      el("p", {}, `${data.violations.length} broken promises; the first:`),
      ...data.violations.slice(0, 10).map((line) => el("p", {}, line)))] : []));
    tiles.replaceChildren(...data.tiles.map(([label, value, note]) =>
      el("dl", { class: "tile" }, el("dt", {}, label),
        el("dd", {}, value, el("small", {}, note)))));
  } };
}

// Any metric over rounds, tokens or time, raw and smoothed.
function curveSection() {
  let latest = null;
  const redraw = () => draw(latest);
  const [metric, metricLabel] = choice("Metric",
    { id: "metric", onchange: redraw });
  const [axis, axisLabel] = choice("Over", { id: "axis", onchange: redraw });
  options(axis, ["rounds", "tokens", "time"],
    ["rounds", "sampled tokens", "seconds"]);
  const { node, figure } = section("curve", "Learning curve", metricLabel,
    axisLabel);
  const meaning = el("small", { id: "meaning" });
  figure.before(el("p", {}, meaning));

  function draw(data) {
    latest = data;
    node.hidden = !data.metrics.round.length && !data.evaluations.length;
    if (node.hidden) return;
    options(metric, Object.keys(data.metrics).filter((key) => key !== "round"));
    const key = metric.value;
    meaning.textContent = data.meanings[key] || "";
    const places = placesOf(data, axis.value);
    const points = places.map((at, i) => [at, data.metrics[key]?.[i]])
      .filter(([at, value]) => at != null && value != null);
    const dots = key === "success" ? evaluationDots(data, places, axis.value)
      : [];
    if (!points.length && !dots.length)
      return figure.replaceChildren(caption("No round has recorded this."));
    const unit = axis.selectedOptions[0].textContent;
    figure.replaceChildren(
      lineChart(figure, { series: [trend(key, points, "var(--learner)")], dots,
        label: `${key} by ${unit}`, xLabel: unit, percent: key === "success" }),
      caption(`Thin: ${pointOf(data)}, bold: mean of its neighbours` +
        (dots.length ? "; dots: held-out tasks with confidence interval" +
          (data.every_evaluation === 1 ? "."
            : `, one in ${data.every_evaluation} evaluations.`) : ".")));
  }
  return { node, draw };
}

function pointOf({ every }) {
  return every === 1 ? "each round"
    : `mean of ${every} rounds (metrics.jsonl has each)`;
}

function placesOf({ metrics, tokens }, axis) {
  if (axis === "tokens") return tokens;
  return (axis === "rounds" ? metrics.round : metrics.time_s) ?? [];
}

function evaluationDots({ evaluations, metrics }, places, axis) {
  const known = [[0, 0], ...places.map((at, i) => [metrics.round[i], at])
    .filter(([, at]) => at != null)];
  return evaluations.map((one) => {
    const own = { rounds: one.round, time: one.time_s }[axis];
    // The round may lie between two points.
    const x = own ?? valueAt(known, one.round);
    return { x, y: one.success, low: one.low, high: one.high,
      tip: `evaluation after round ${one.round}\n${format(one.success)} ` +
        `(${format(one.low)} to ${format(one.high)}), ${one.episodes} episodes`,
    };
  }).filter(({ x }) => x != null);
}

function lagsSection() {
  const { node, figure } = section("lags", "Lag of trained groups");
  return { node, draw({ lags: { counts, bound } }) {
    node.hidden = !counts.length;
    if (node.hidden) return;
    const last = Math.max(counts.at(-1)[0], bound ?? 0);
    const found = new Map(counts);
    const bars = Array.from({ length: last + 1 }, (_, lag) => ({
      label: `${lag}`, parts: [{ value: found.get(lag) ?? 0,
        fill: `var(--${bound != null && lag > bound ? "bad" : "learner"})`,
        tip: `${format(found.get(lag))} groups trained ${lag} versions late`,
      }] }));
    figure.replaceChildren(
      histogram(figure, { bars, label: "Histogram of lag",
        every: Math.ceil(bars.length / 12) }),
      caption("Versions between a group's first token and its training. " +
        (bound == null ? "The bound is unknown." : `The bound is ${bound}.`)));
  } };
}

function lengthsSection() {
  const { node, figure } = section("lengths", "Length of episodes");
  return { node, draw({ lengths }) {
    node.hidden = !lengths.length;
    if (node.hidden) return;
    const bars = lengths.map(([low, high, launched, trained]) => {
      const ids = low === high ? `${low} ids` : `${low} to ${high} ids`;
      return { label: `${low}`, parts: [
        { value: launched, fill: "var(--decode)",
          tip: `${format(launched)} episodes of ${ids} ended` },
        { value: trained, fill: "var(--learner)",
          tip: `${format(trained)} episodes of ${ids} trained` },
      ] };
    });
    figure.replaceChildren(
      histogram(figure, { bars, label: "Histogram of length",
        every: Math.ceil(bars.length / 8) }),
      legend([["ended or cut off", "var(--decode)"],
        ["trained", "var(--learner)"]]),
      caption("Ids of an episode, context included. Where trained ones are " +
        "shorter, the schedule prefers short episodes."));
  } };
}

function faultsSection() {
  const { node, figure } = section("faults", "Faults by culprit");
  return { node, draw({ faults }) {
    node.hidden = !faults.length;
    if (node.hidden) return;
    figure.replaceChildren(el("div", { class: "scroll tall" },
      el("table", {}, el("thead", {}, el("tr", {},
        ...["Culprit", "Source", "Episodes", "Message"].map((head) =>
          el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...faults.map(([culprit, source, what, count]) =>
        el("tr", {}, el("td", {}, culprit), el("td", {}, source),
          el("td", {}, format(count)), el("td", { class: "wide" }, what)))))),
    caption("Messages that differ in numbers only share a row, with the " +
      "first of them."));
  } };
}

const GIB = 2 ** 30;

function memorySection() {
  const { node, figure } = section("memory", "Memory");
  return { node, draw({ metrics, every }) {
    const series = ["host_memory_bytes", "device_memory_bytes"]
      .filter((key) => metrics[key]?.some((value) => value != null))
      .map((key, i) => ({ name: key.replace("_memory_bytes", ", GiB"),
        colour: i ? "var(--decode)" : "var(--host)",
        points: metrics.round.map((round, k) => [round, metrics[key][k]])
          .filter(([, bytes]) => bytes != null)
          .map(([round, bytes]) => [round, bytes / GIB]) }));
    node.hidden = !series.length;
    if (node.hidden) return;
    figure.replaceChildren(
      lineChart(figure, { series, label: "Memory by round", xLabel: "rounds",
        height: 220 }),
      legend(series.map((one) => [one.name, one.colour])),
      caption("Peak of the process on the host so far and, where the backend " +
        `tells, of its fullest device. A point: ${pointOf({ every })}.`));
  } };
}

function warmStartSection() {
  const { node, figure } = section("warm-start", "Warm start");
  return { node, draw({ warm_start: found }) {
    node.hidden = !found;
    if (!found) return;
    figure.replaceChildren(...(found.points.length ? [lineChart(figure, {
      series: [trend("loss", found.points, "var(--learner)")],
      dots: found.held_out.map(([x, y]) => ({ x, y, low: y, high: y,
        tip: `step ${x}\nheld-out loss ${format(y)}` })),
      label: "Loss of the warm start by step", xLabel: "steps", height: 240,
    })] : []), caption(found.caption));
  } };
}

function settingsSection() {
  const text = el("pre", { id: "config" });
  const node = el("section", {}, el("details", {},
    el("summary", {}, "Settings of the run"), text));
  return { node, draw({ config }) {
    text.textContent = JSON.stringify(config, null, 2);
  } };
}
