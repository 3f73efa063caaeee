// The timeline of a run: a canvas that draws only its visible part.

import { CAUSE_COLOURS } from "./bubbles.js";
import {
  caption, colour, el, format, scale, section, showTip, ticks,
} from "./dom.js";

const LABELS = 64;
const RULER = 34;
const timeline = { lanes: [], extent: [0, 1], view: null, drag: null };

const BUTTONS = [
  ["Zoom in", null, () => zoom(0.5)], ["Zoom out", null, () => zoom(2)],
  ["←", "Earlier", () => move(-0.5)], ["→", "Later", () => move(0.5)],
  ["Whole run", null, () => look(timeline.extent)],
];

export function timelineSection() {
  const { node, figure } = section("timeline", "Timeline of both meshes",
    ...BUTTONS.map(([text, label, onclick]) =>
      el("button", { "aria-label": label, onclick }, text)));
  timeline.figure = figure;
  timeline.view = null;
  return { node, draw(data) {
    node.hidden = !data.timeline.rows.length;
    if (node.hidden) return;
    if (timeline.data !== data) startTimeline(data);
    drawTimeline();
  } };
}

// Lanes hold spans in order and without overlap, so both ends are sorted.
function startTimeline(data) {
  timeline.data = data;
  const { rows, tracks, names, total, window: view } = data.timeline;
  const lanes = new Map();
  for (const [track, lane, start, end, name, args] of rows) {
    const key = track * 1e6 + lane;
    if (!lanes.has(key)) lanes.set(key, { track, lane, spans: [] });
    lanes.get(key).spans.push({ start, end, name, args });
  }
  timeline.lanes = [...lanes.keys()].sort((a, b) => a - b)
    .map((key) => lanes.get(key));
  let top = 8;
  for (const row of timeline.lanes) {
    if (row.lane === 0) {
      top += 10;
      row.bubbles = bubblesOf(data, tracks[row.track]);
    }
    Object.assign(row, { top, height: row.lane === 0 ? 26 : 14 });
    top += row.height + 2;
  }
  timeline.height = top + RULER;
  const end = rows.reduce((last, row) => Math.max(last, row[3]), 0);
  timeline.extent = [rows[0][2], end];
  timeline.publish = names.indexOf("publish");
  timeline.shades = names.map((_, i) => [1, 0.62, 0.8, 0.48][i % 4]);
  if (!timeline.figure.querySelector("canvas")) addCanvas(rows.length, total);
  look(timeline.view ?? view);
}

function bubblesOf({ bubbles }, track) {
  const causes = Object.keys(bubbles.causes ?? {});
  return (bubbles.meshes?.[track]?.rows ?? []).map(([start, end, cause]) =>
    ({ start, end, cause: causes[cause] }));
}

function addCanvas(shown, total) {
  const canvas = el("canvas", {
    tabindex: 0, role: "img",
    "aria-label": `Timeline of ${timeline.data.timeline.tracks.join(", ")}`,
    onpointerdown: startDrag, onpointermove: moveDrag, onpointerup: endDrag,
    onpointerleave: (event) => showTip(event, ""),
    onkeydown: press, ondblclick: () => look(timeline.extent),
  });
  // A listener that may keep the page from scrolling has to say so.
  canvas.addEventListener("wheel", wheel, { passive: false });
  const part = shown < total
    ? ` The page holds ${format(shown)} of ${format(total)} spans, ` +
      "from the middle of the run." : "";
  timeline.figure.replaceChildren(canvas, caption(
    "Drag over a stretch to look closer; arrow keys move, + and − zoom, and " +
    "so does the wheel with Ctrl. Vertical lines: weights published. Thin " +
    "and low: idle, in the colour of its cause below." + part));
}

function look([start, end]) {
  const [low, high] = timeline.extent;
  const width = Math.min(Math.max(end - start, 1e-3), high - low);
  const from = Math.min(Math.max(start, low), high - width);
  timeline.view = [from, from + width];
  drawTimeline();
}

function zoom(factor, share = 0.5) {
  const [start, end] = timeline.view;
  const at = start + (end - start) * share;
  look([at - (at - start) * factor, at + (end - at) * factor]);
}

function move(share) {
  const [start, end] = timeline.view;
  look([start + (end - start) * share, end + (end - start) * share]);
}

function firstEndingAfter(spans, time) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function drawTimeline() {
  const canvas = timeline.figure.querySelector("canvas");
  if (!canvas?.isConnected) return;
  const width = canvas.clientWidth, height = timeline.height;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.font = "12px system-ui, sans-serif";
  timeline.x = scale(...timeline.view, LABELS, width);
  timeline.time = scale(LABELS, width, ...timeline.view);
  drawRuler(pen, width, height);
  let drawn = 0;
  for (const row of timeline.lanes) drawn += drawLane(pen, row, width);
  drawPublishes(pen, height);
  if (timeline.drag) {
    pen.globalAlpha = 0.15;
    pen.fillStyle = colour("ink");
    pen.fillRect(timeline.drag[0], 0,
      timeline.drag[1] - timeline.drag[0], height - RULER);
  }
  canvas.dataset.drawn = drawn;
}

function drawRuler(pen, width, height) {
  pen.fillStyle = colour("muted");
  pen.textAlign = "center";
  for (const tick of ticks(...timeline.view, Math.max(2, width / 110))) {
    const at = timeline.x(tick);
    pen.fillText(`${tick} s`, Math.min(Math.max(at, LABELS + 14), width - 20),
      height - 16);
  }
  const whole = scale(...timeline.extent, LABELS, width);
  const [left, right] = timeline.view.map(whole);
  pen.fillStyle = colour("rule");
  pen.fillRect(LABELS, height - 5, width - LABELS, 4);
  pen.fillStyle = colour("muted");
  pen.fillRect(left, height - 5, Math.max(right - left, 3), 4);
}

function drawBubbles(pen, bubbles, top, height, width) {
  const low = 7;
  const first = firstEndingAfter(bubbles, timeline.view[0]);
  for (let i = first; i < bubbles.length; i++) {
    const { start, end, cause } = bubbles[i];
    if (start > timeline.view[1]) break;
    const left = Math.max(timeline.x(start), LABELS);
    const right = Math.min(timeline.x(end), width);
    if (right - left < 0.5) continue;
    pen.fillStyle = colour(CAUSE_COLOURS[cause].slice(6, -1));
    pen.fillRect(left, top + height - low, right - left, low);
  }
}

function drawLane(pen, { track, lane, top, height, spans, bubbles = [] },
  width) {
  const { tracks, names } = timeline.data.timeline;
  const name = tracks[track];
  // Of several engines each has a track: "decode 0", "decode 1".
  const known = ["learner", "decode"].find((mesh) => name.startsWith(mesh));
  pen.textAlign = "left";
  pen.globalAlpha = 1;
  pen.fillStyle = colour("ink");
  if (lane === 0) pen.fillText(name, 0, top + 17);
  pen.fillStyle = colour("well");
  pen.fillRect(LABELS, top, width - LABELS, height);
  drawBubbles(pen, bubbles, top, height, width);
  const fill = colour(known ?? "host"), paper = colour("card");
  let covered = LABELS, drawn = 0;
  const first = firstEndingAfter(spans, timeline.view[0]);
  for (let i = first; i < spans.length; i++) {
    const { start, end, name: what } = spans[i];
    if (start > timeline.view[1]) break;
    const left = Math.max(timeline.x(start), covered);
    const right = Math.min(Math.max(timeline.x(end), left + 1), width);
    // Of many spans in one pixel the first one is enough.
    if (timeline.x(end) < covered + 0.5) continue;
    covered = right;
    drawn++;
    pen.globalAlpha = timeline.shades[what];
    pen.fillStyle = fill;
    pen.fillRect(left, top, right - left - (right - left > 4 ? 1 : 0), height);
    const text = names[what];
    if (right - left < 34 || right - left < pen.measureText(text).width + 12)
      continue;
    pen.globalAlpha = 1;
    pen.fillStyle = paper;
    pen.fillText(text, left + 6, top + height / 2 + 4);
  }
  pen.globalAlpha = 1;
  return drawn;
}

function drawPublishes(pen, height) {
  const lines = timeline.lanes.flatMap(({ spans }) => spans.filter((span) =>
    span.name === timeline.publish && span.end >= timeline.view[0] &&
    span.end <= timeline.view[1]));
  // More than one in ten pixels would hide the timeline.
  if (lines.length > (timeline.x(timeline.view[1]) - LABELS) / 10) return;
  pen.fillStyle = colour("host");
  for (const { end } of lines)
    pen.fillRect(timeline.x(end) - 0.75, 4, 1.5, height - RULER - 4);
}

function startDrag(event) {
  if (event.offsetX < LABELS) return;
  event.target.setPointerCapture(event.pointerId);
  timeline.drag = [event.offsetX, event.offsetX];
}

function moveDrag(event) {
  if (timeline.drag) {
    timeline.drag[1] = Math.max(event.offsetX, LABELS);
    return drawTimeline();
  }
  const row = timeline.lanes.find(({ top, height }) =>
    event.offsetY >= top && event.offsetY < top + height);
  const time = timeline.time(event.offsetX);
  const at = (spans) => {
    const one = spans[firstEndingAfter(spans, time)];
    return one && one.start <= time && event.offsetX >= LABELS ? one : null;
  };
  const span = row && at(row.spans), bubble = row && at(row.bubbles ?? []);
  if (!span)
    return showTip(event, bubble && `idle ` +
      `${format(1000 * (bubble.end - bubble.start))} ms: ${bubble.cause}\n` +
      timeline.data.bubbles.causes[bubble.cause]);
  const args = Object.entries(span.args ?? {}).map((arg) => arg.join(" "));
  const duration = `${format(1000 * (span.end - span.start))} ms`;
  showTip(event, [`${timeline.data.timeline.names[span.name]}, ${duration}`,
    `at ${span.start} s`, ...args].join("\n"));
}

function endDrag() {
  if (!timeline.drag) return;
  const [left, right] = timeline.drag.sort((a, b) => a - b);
  timeline.drag = null;
  if (right - left > 4) look([left, right].map(timeline.time));
  else drawTimeline();
}

function wheel(event) {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const width = event.target.clientWidth - LABELS;
  zoom(2 ** (event.deltaY / 200), (event.offsetX - LABELS) / width);
}

function press(event) {
  const action = {
    ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25),
    "+": () => zoom(0.5), "-": () => zoom(2), 0: () => look(timeline.extent),
  }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
