// Idle time of both meshes by cause, as one bar each.

import { legend } from "./chart.js";
import { caption, el, format, section } from "./dom.js";

export const CAUSE_COLOURS = {
  compile: "var(--series-5)", "warm start": "var(--series-7)",
  publish: "var(--series-2)", packing: "var(--series-3)",
  evaluation: "var(--series-4)", checkpoint: "var(--series-6)",
  rollout: "var(--decode)", environment: "var(--doubt)", gate: "var(--bad)",
};

export function bubblesSection() {
  const { node, figure } = section("bubbles", "Bubbles by cause");
  return { node, draw({ bubbles: { causes, meshes } }) {
    const names = Object.keys(meshes ?? {});
    node.hidden = !names.length;
    if (node.hidden) return;
    const width = Math.max(280, figure.clientWidth);
    const svg = el("svg", { height: 52 * names.length, role: "img",
      viewBox: `0 0 ${width} ${52 * names.length}`,
      "aria-label": "Busy and idle time of both meshes" });
    names.forEach((name, i) => meshBar(svg, name, meshes[name], 52 * i, width,
      causes));
    const seen = Object.keys(causes).filter((cause) =>
      names.some((name) => meshes[name].causes[cause]));
    figure.replaceChildren(svg,
      legend([["busy", "var(--learner)"],
        ...seen.map((cause) => [`${cause}: ${causes[cause]}`,
          CAUSE_COLOURS[cause]])]),
      caption("From the first to the last span of a mesh. A moment that has " +
        "several causes counts for the first of them. Busy: a warm start and " +
        "what the learner compiles in its first steps included."));
  } };
}

function meshBar(svg, name, mesh, top, width, causes) {
  const share = (seconds) => seconds / (mesh.seconds || 1);
  let left = 0;
  const put = (label, seconds, fill, tip) => {
    const wide = share(seconds) * width;
    svg.append(el("rect", { class: "bubble", x: left, y: top + 18,
      width: Math.max(wide - 1, 0.5), height: 24, fill, "data-cause": label,
      "data-tip": `${name}: ${label}, ${format(seconds)} s, ` +
        `${Math.round(100 * share(seconds))}%\n${tip}` }));
    left += wide;
  };
  svg.append(el("text", { x: 0, y: top + 12 },
    `${name}: busy ${Math.round(100 * share(mesh.busy_s))}% of ` +
    `${format(mesh.seconds)} s`));
  put("busy", mesh.busy_s, "var(--learner)", "programs of the mesh run");
  for (const [cause, seconds] of Object.entries(mesh.causes))
    put(cause, seconds, CAUSE_COLOURS[cause], causes[cause]);
}
