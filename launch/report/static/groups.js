// Draws the seconds that groups waited, played and queued, a bar each.

import { legend } from "./chart.js";
import { caption, el, format, scale, section, ticks } from "./dom.js";

const PHASES = [
  ["wait", "waited for an engine", "rule"],
  ["play", "played", "decode"],
  ["queue", "queued for the learner", "host"],
  ["train", "trained", "learner"],
];

function groupBar(svg, row, top, height, x) {
  const [group, attempt, outcome, ...ages] = row;
  const told = PHASES.map(([name], i) => `${name} ${format(ages[i])} s`);
  const title = `group ${group}` + (attempt ? ` attempt ${attempt}` : "") +
    (outcome === "trained" ? "" : `, dropped: ${outcome}`);
  let age = 0;
  PHASES.forEach(([, , shade], i) => {
    if (ages[i] <= 0) return;
    svg.append(el("rect", {
      class: "age", x: x(age), y: top,
      width: Math.max(x(age + ages[i]) - x(age), 0.5),
      height, fill: `var(--${outcome === "trained" ? shade : "bad"})`,
      "data-tip": `${title}\n${told.join(", ")}`,
    }));
    age += ages[i];
  });
}

export function groupsSection() {
  const { node, figure } = section("groups", "Ages of groups");
  return { node, draw({ groups }) {
    node.hidden = !groups.length;
    if (!node.hidden) drawGroups(figure, groups);
  } };
}

function drawGroups(figure, rows) {
  const width = Math.max(280, figure.clientWidth);
  const step = Math.max(3, Math.min(14, 480 / rows.length));
  const height = step * rows.length + 34;
  const longest = Math.max(...rows.map((row) =>
    row.slice(3).reduce((sum, age) => sum + age, 0)));
  const x = scale(0, longest, 8, width - 12);
  const svg = el("svg", { height, viewBox: `0 0 ${width} ${height}`,
    role: "img", "aria-label": "Ages of groups" });
  for (const tick of ticks(0, longest, 6))
    svg.append(
      el("line", { x1: x(tick), x2: x(tick), y1: 0, y2: height - 30,
        stroke: "var(--rule)" }),
      el("text", { x: x(tick), y: height - 12, "text-anchor": "middle" },
        `${tick} s`));
  rows.forEach((row, i) =>
    groupBar(svg, row, i * step, step > 5 ? step - 2 : step - 0.5, x));
  figure.replaceChildren(svg,
    legend([...PHASES.map(([, meaning, shade]) => [meaning, `var(--${shade})`]),
      ["dropped", "var(--bad)"]]),
    caption("From submission on, in the order of the run."));
}
