// Elements, numbers and tooltips. Text of a run only ever reaches the page as
// text nodes and attributes.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set([
  "svg", "g", "line", "polyline", "polygon", "path", "circle", "rect", "text",
]);

// Attributes that begin with "on" are listeners, and `vars` sets properties of
// the style, which the policy of the page allows from scripts alone.
export function el(tag, attributes = {}, ...children) {
  const node = SHAPES.has(tag)
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "vars")
      for (const [name, to] of Object.entries(value))
        node.style.setProperty(name, to);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

export const $ = (selector) => document.querySelector(selector);

export function colour(name) {
  return getComputedStyle(document.body).getPropertyValue(`--${name}`);
}

export function format(value) {
  if (value == null) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1000)
    return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function ticks(low, high, most, least = 0) {
  // Of one place far from 0 the steps must be those of numbers there.
  const rough = Math.max(least,
    Math.max(high - low, 1e-9 * Math.abs(high), 1e-9) / most);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((s) => s >= rough);
  const all = [];
  // 0.35 / 0.05 is a little below 7.
  const last = Math.floor(high / step + 1e-9);
  for (let i = Math.ceil(low / step - 1e-9); i <= last; i++)
    all.push(Number((i * step).toPrecision(12)));
  return all;
}

export function scale(low, high, start, end) {
  return (value) => start + ((value - low) / (high - low || 1)) * (end - start);
}

// Spreading a long list into Math.min would overflow the stack.
export function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? [0, 1] : [low, high];
}

export function options(select, values, texts = values) {
  const before = select.value;
  select.replaceChildren(...values.map((value, i) =>
    el("option", { value }, `${texts[i]}`)));
  if (values.map(String).includes(before)) select.value = before;
}

export function choice(label, attributes = {}) {
  const select = el("select", attributes);
  return [select, el("label", {}, `${label} `, select)];
}

// A part of the page: a title, controls beside it, and a figure.
export function section(id, title, ...controls) {
  const figure = el("figure");
  const node = el("section", { id, "aria-label": title },
    el("div", { class: "bar" }, el("h2", {}, title), ...controls), figure);
  return { node, figure };
}

export function caption(...text) {
  return el("figcaption", {}, ...text);
}

// ---- Tooltip: of any element with data-tip, and of what a canvas draws.

export function showTip(event, text) {
  const tip = $("#tip");
  tip.hidden = !text;
  tip.textContent = text || "";
  if (!text) return;
  const right = innerWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, right))}px`;
  tip.style.top = event.clientY + tip.offsetHeight + 24 > innerHeight
    ? `${event.clientY - tip.offsetHeight - 12}px`
    : `${event.clientY + 16}px`;
}

// Told to those who cannot see the page.
export function say(text) {
  $("#said").textContent = text;
}

export function startTips() {
  document.addEventListener("pointerover", (event) => {
    showTip(event, event.target.closest?.("[data-tip]")?.dataset.tip);
  });
  document.addEventListener("focusin", ({ target }) => {
    const box = target.getBoundingClientRect();
    const at = { clientX: box.left, clientY: box.bottom };
    showTip(at, target.matches(":focus-visible") && target.dataset.tip);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showTip(event, "");
  });
}
