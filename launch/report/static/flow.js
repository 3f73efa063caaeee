// The token ledger as a flow: from sampled to trained, masked and dropped.

import { caption, el, format, section } from "./dom.js";

const WIDTH_OF_NODE = 12;

function outlets({ trained, masked, dropped, in_flight: flying }) {
  const rows = (kind, parts, fill) => Object.entries(parts).map(([why, n]) =>
    [`${kind}: ${why}`, n, fill]);
  return [
    ["trained", trained, "var(--learner)"],
    ...rows("masked", masked, "var(--host)"),
    ...rows("dropped", dropped, "var(--bad)"),
    ["in flight", flying, "var(--decode)"],
  ].filter(([, count]) => count > 0);
}

export function flowSection() {
  const { node, figure } = section("ledger", "Ledger of tokens");
  return { node, draw({ ledger }) {
    node.hidden = !ledger;
    if (node.hidden) return;
    const parts = outlets(ledger);
    const width = Math.max(280, figure.clientWidth);
    const gap = 22, room = 190, height = room + gap * parts.length;
    const svg = el("svg", { height, viewBox: `0 0 ${width} ${height}`,
      role: "img", "aria-label": "Sampled tokens by their fate" });
    const thick = (count) => Math.max(1, count / ledger.sampled * room);
    const left = 74, right = Math.max(left + 60, width - 250);
    const start = (height - room) / 2;
    svg.append(
      el("rect", { x: left - WIDTH_OF_NODE, y: start, width: WIDTH_OF_NODE,
        height: room, fill: "var(--muted)" }),
      el("text", { x: 0, y: height / 2 - 4 }, "sampled"),
      el("text", { x: 0, y: height / 2 + 12 }, format(ledger.sampled)));
    let from = start, to = gap / 2;
    for (const [label, count, fill] of parts) {
      const size = thick(count), middle = (left + right) / 2;
      const share = count / ledger.sampled;
      svg.append(
        el("path", { class: "flow", fill, opacity: 0.35, "data-fate": label,
          "data-count": count,
          "data-tip": `${label}: ${format(count)} tokens, ` +
            `${(100 * share).toFixed(1)}%`,
          d: `M${left},${from} C${middle},${from} ${middle},${to} ` +
            `${right},${to} L${right},${to + size} C${middle},${to + size} ` +
            `${middle},${from + size} ${left},${from + size} Z` }),
        el("rect", { x: right, y: to, width: WIDTH_OF_NODE, height: size,
          fill }),
        el("text", { x: right + WIDTH_OF_NODE + 8, y: to + size / 2 + 4 },
          `${label} ${format(count)} (${(100 * share).toFixed(1)}%)`));
      from += count / ledger.sampled * room;
      to += size + gap;
    }
    figure.replaceChildren(svg, caption("Every sampled token has one fate."));
  } };
}
