// Filters of the list of trajectories: choices, ranges and a part of a name.

import { el, options } from "./dom.js";

const ALL = "all";
const CHOICES = ["round", "source", "status", "lag", "trained"];
const RANGES = { reward: "Reward", tokens: "Sampled tokens" };

// `changed()` is called whenever a filter is; the controls keep their values.
export function rowFilters(changed) {
  const selects = Object.fromEntries(CHOICES.map((field) =>
    [field, el("select", { "data-filter": field, onchange: changed })]));
  const inputs = Object.fromEntries(Object.keys(RANGES).map((field) =>
    [field, ["least", "most"].map((end) => rangeInput(field, end, changed))]));
  const task = el("input", { type: "search", "data-filter": "task",
    placeholder: "part of a name", "aria-label": "Task", oninput: changed });
  const label = (text, node) => el("label", {}, `${text} `, node);

  function clear() {
    for (const select of Object.values(selects)) select.value = ALL;
    for (const input of [task, ...Object.values(inputs).flat()])
      input.value = "";
    changed();
  }

  // Offers the values that rows have.
  function offer(rows) {
    for (const [field, select] of Object.entries(selects)) {
      const values = [...new Set(rows.map((row) => String(row[field])))];
      options(select, [ALL, ...values.sort((a, b) =>
        a.localeCompare(b, "en", { numeric: true }))]);
    }
  }

  function chosen(rows) {
    const tests = [
      ...Object.entries(selects).flatMap(([field, select]) =>
        equals(field, select.value)),
      ...Object.entries(inputs).flatMap(([field, [least, most]]) =>
        [...atLeast(field, least.value), ...atMost(field, most.value)]),
      ...holds(task.value.trim().toLowerCase()),
    ];
    return tests.length
      ? rows.filter((row) => tests.every((test) => test(row))) : rows;
  }

  const node = el("div", { class: "filters" },
    ...CHOICES.map((field) => label(titleOf(field), selects[field])),
    ...Object.entries(RANGES).map(([field, text]) =>
      el("span", {}, label(text, inputs[field][0]), " ", inputs[field][1])),
    label("Task", task),
    el("button", { id: "clear", onclick: clear }, "Clear"));
  return { node, offer, chosen };
}

function rangeInput(field, end, changed) {
  return el("input", { type: "number", step: "any", placeholder: end,
    "data-filter": `${field}-${end}`, "aria-label": `${RANGES[field]}, ${end}`,
    oninput: changed });
}

// Each returns the tests of a filter: none where it is empty.
function equals(field, value) {
  return value && value !== ALL ? [(row) => String(row[field]) === value] : [];
}

function atLeast(field, text) {
  const bound = Number(text);
  return text === "" ? []
    : [(row) => row[field] != null && row[field] >= bound];
}

function atMost(field, text) {
  const bound = Number(text);
  return text === "" ? []
    : [(row) => row[field] != null && row[field] <= bound];
}

function holds(text) {
  return text ? [(row) => row.task.toLowerCase().includes(text)] : [];
}

function titleOf(field) {
  return field[0].toUpperCase() + field.slice(1);
}
