// Draws the log-probabilities of engine and learner, one over the other.

import {
  caption, choice, el, format, options, scale, section, ticks,
} from "./dom.js";

const LAG_COLOURS = ["learner", "decode", "host"];

function lagColour(lag) {
  return `var(--${LAG_COLOURS[Math.min(lag, LAG_COLOURS.length - 1)]})`;
}

function gapPoints(gaps) {
  return gaps.flatMap((gap) => gap.engine.map((engine, i) =>
    ({ round: gap.round, engine, learner: gap.learner[i], lag: gap.lags[i] })));
}

function gapPlot(points) {
  const both = points.flatMap((p) => [p.engine, p.learner]);
  // Never empty, and a single value gets some room around it.
  const low = both.reduce((a, b) => Math.min(a, b), 0) - 0.05;
  const high = Math.max(0, both.reduce((a, b) => Math.max(a, b), low));
  const size = 400, left = 56, top = 12, bottom = 42;
  const x = scale(low, high, left, size - 12);
  const y = scale(low, high, size - bottom, top);
  const svg = el("svg", { viewBox: `0 0 ${size} ${size}`, role: "img",
    "aria-label": "Learner's over engine's log-probability" });
  for (const tick of ticks(low, high, 6))
    svg.append(
      el("line", { x1: left, x2: size - 12, y1: y(tick), y2: y(tick),
        stroke: "var(--rule)" }),
      el("line", { x1: x(tick), x2: x(tick), y1: top, y2: size - bottom,
        stroke: "var(--rule)" }),
      el("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" },
        format(tick)),
      el("text", { x: x(tick), y: size - bottom + 16,
        "text-anchor": "middle" }, format(tick)));
  svg.append(
    el("line", { x1: x(low), y1: y(low), x2: x(high), y2: y(high),
      stroke: "var(--muted)", "stroke-dasharray": "4 3", class: "identity" }),
    el("text", { x: (left + size - 12) / 2, y: size - 6,
      "text-anchor": "middle" }, "engine, nats"),
    el("text", { "text-anchor": "middle",
      transform: `translate(12 ${(top + size - bottom) / 2}) rotate(-90)` },
      "learner, nats"));
  for (const p of points)
    svg.append(el("circle", { class: "gap", cx: x(p.engine).toFixed(1),
      cy: y(p.learner).toFixed(1), r: 2.5, fill: lagColour(p.lag),
      "fill-opacity": 0.5,
      "data-tip": `round ${p.round}, lag ${p.lag}\n` +
        `engine ${format(p.engine)}, learner ${format(p.learner)}\n` +
        `gap ${format(Math.abs(p.learner - p.engine))} nats` }));
  return svg;
}

function gapTable(gaps) {
  const head = ["Round", "Tokens", "Mean gap", "Largest"];
  const cells = (tag, values) =>
    el("tr", {}, ...values.map((value) => el(tag, {}, value)));
  return el("table", {}, cells("th", head), ...gaps.map((gap) =>
    cells("td", [gap.round, gap.tokens, gap.mean, gap.max].map(format))));
}

function gapLegend(points) {
  const last = LAG_COLOURS.length - 1;
  const lags = [...new Set(points.map((p) => Math.min(p.lag, last)))].sort();
  return lags.flatMap((lag) => [
    el("b", { vars: { color: lagColour(lag) } }, "● "),
    `lag ${lag}${lag === last ? " or more" : ""} `]);
}

export function gapSection() {
  let latest = null;
  const [round, label] = choice("Round",
    { id: "gap-round", onchange: () => draw(latest) });
  const { node, figure } = section("gap",
    "Log-probabilities of engine and learner", label);

  function draw(data) {
    latest = data;
    node.hidden = !data.gaps.length;
    if (node.hidden) return;
    options(round, ["all", ...data.gaps.map((gap) => `${gap.round}`)]);
    drawGap(figure, data.gaps.filter((gap) =>
      round.value === "all" || `${gap.round}` === round.value));
  }
  return { node, draw };
}

function drawGap(figure, gaps) {
  const all = gapPoints(gaps);
  const points = all.filter((p) => p.engine != null && p.learner != null);
  const lost = all.length - points.length;
  const compared = gaps.reduce((sum, gap) => sum + gap.tokens, 0);
  const text = `${format(points.length)} of ${format(compared)} tokens ` +
    "compared, each under the weights that sampled it. Gaps are in nats; on " +
    "the dashed line there is none. " +
    (lost ? `Not drawn, for lack of a finite number: ${format(lost)}. ` : "");
  figure.replaceChildren(gapPlot(points), el("div", {},
    gapTable(gaps), caption(text, ...gapLegend(points))));
}
