// The recorded trajectories of a run: filters, a list, and one turn by turn.

import { address, linkTo } from "./address.js";
import { el, format, options, say } from "./dom.js";
import { virtualList } from "./list.js";
import { detailView } from "./turns.js";

const ALL = "all";
const CHOICES = ["round", "source", "status", "lag", "trained"];
const HEADS = ["round", "member", "reward", "task", "tokens"];
const RANGES = { reward: "Reward", tokens: "Sampled tokens" };

export const keyOf = ({ round, group, index }) => `${round}/${group}/${index}`;

export function kindOf({ status, reward }) {
  if (status !== "completed" && status !== "truncated") return "fault";
  return reward > 0 ? "won" : "lost";
}

// Rows of numbers as objects, in the order of the run.
function objects({ columns, rows }) {
  return rows.map((row) =>
    Object.fromEntries(columns.map((column, i) => [column, row[i]])));
}

export function trajectoriesSection(source, run) {
  const browser = { all: [], found: [], index: null, wanted: "", open: null };
  const selects = Object.fromEntries(CHOICES.map((field) =>
    [field, el("select", { "data-filter": field, onchange: filter })]));
  const inputs = Object.fromEntries(Object.keys(RANGES).map((field) =>
    [field, ["least", "most"].map((end) => el("input", { type: "number",
      step: "any", placeholder: end, "data-filter": `${field}-${end}`,
      "aria-label": `${RANGES[field]}, ${end}`, oninput: filter }))]));
  const task = el("input", { type: "search", "data-filter": "task",
    placeholder: "part of a name", "aria-label": "Task", oninput: filter });
  const shown = el("small", { id: "shown" });
  const view = detailView(openKey);
  const list = virtualList("Trajectories", rowOf, (row) => open(row));
  const label = (text, ...nodes) => el("label", {}, `${text} `, ...nodes);
  const node = el("section", { id: "trajectories",
    "aria-label": "Trajectories" },
  el("div", { class: "bar" }, el("h2", {}, "Trajectories")),
  el("div", { class: "filters" },
    ...CHOICES.map((field) => label(titleOf(field), selects[field])),
    ...Object.entries(RANGES).map(([field, text]) =>
      el("span", {}, label(text, inputs[field][0]), " ", inputs[field][1])),
    label("Task", task),
    el("button", { id: "clear", onclick: clear }, "Clear")),
  el("p", {}, shown),
  el("div", { class: "browser" }, el("div", {},
    el("div", { class: "row heads", "aria-hidden": "true" },
      ...HEADS.map((head) => el("span", {}, head))), list.node), view.node));

  function filter() {
    const tests = [];
    for (const [field, select] of Object.entries(selects))
      if (select.value && select.value !== ALL)
        tests.push((row) => String(row[field]) === select.value);
    for (const [field, [least, most]] of Object.entries(inputs)) {
      if (least.value !== "") {
        const bound = Number(least.value);
        tests.push((row) => row[field] != null && row[field] >= bound);
      }
      if (most.value !== "") {
        const bound = Number(most.value);
        tests.push((row) => row[field] != null && row[field] <= bound);
      }
    }
    const text = task.value.trim().toLowerCase();
    if (text) tests.push((row) => row.task.toLowerCase().includes(text));
    browser.found = tests.length
      ? browser.all.filter((row) => tests.every((test) => test(row)))
      : browser.all;
    tellShown();
    list.place = browser.found.findIndex((row) => keyOf(row) === browser.open);
    list.show(browser.found);
  }

  function clear() {
    for (const select of Object.values(selects)) select.value = ALL;
    for (const input of [task, ...Object.values(inputs).flat()])
      input.value = "";
    filter();
  }

  function tellShown() {
    const { all, found, index } = browser;
    const rounds = new Set(all.map(({ round }) => round)).size;
    shown.textContent = !all.length ? "No trajectory on this page."
      : `${found.length} of the ${all.length} trajectories on this page: ` +
        (index.is_sample ? "whole groups" : "all that were recorded") +
        ` of ${rounds} round${rounds > 1 ? "s" : ""}` +
        (index.is_sample ? ", spread over the run. All that were recorded " +
          "are in trajectories/." : ".") +
        (index.odd ? ` Lines left out: ${index.odd}.` : "");
    say(`${found.length} trajectories`);
  }

  async function load() {
    const index = await source.index(run);
    if (index === browser.index) return;
    browser.index = index;
    browser.all = objects(index);
    for (const field of CHOICES) {
      const values = [...new Set(browser.all.map((row) => String(row[field])))];
      options(selects[field], [ALL, ...values.sort((a, b) =>
        a.localeCompare(b, "en", { numeric: true }))]);
    }
    filter();
    if (browser.wanted) openKey(browser.wanted);
    else if (browser.open === null && browser.found.length)
      await open(browser.found[0], false);
  }

  function openKey(key) {
    const row = browser.all.find((one) => keyOf(one) === key);
    if (row) open(row);
  }

  async function open(row, isAsked = true) {
    const key = keyOf(row);
    if (key === browser.open) return;
    browser.open = browser.wanted = key;
    list.mark(browser.found.findIndex((one) => keyOf(one) === key));
    if (isAsked) remember(key);
    let detail;
    try {
      detail = await source.detail(run, row.round, row.offset);
    } catch (error) {
      return browser.open === key && view.fail(`${error.message || error}`);
    }
    // Somebody may have gone on meanwhile.
    if (browser.open === key) view.show(row, detail, browser.all);
  }

  function remember(key) {
    const { path, fields } = address();
    if (path !== "run") return;
    fields.set("trajectory", key);
    history.replaceState(null, "",
      linkTo(path, Object.fromEntries(fields)));
  }

  return { node, load, draw: () => list.draw(), show(key) {
    browser.wanted = key ?? "";
    if (key && browser.index) openKey(key);
  } };
}

function titleOf(field) {
  return field[0].toUpperCase() + field.slice(1);
}

function rowOf(row) {
  return [
    el("span", {}, `${row.round}`),
    el("span", {}, `${row.group}.${row.index}`),
    el("span", { class: kindOf(row) },
      row.reward == null ? "fault" : format(row.reward)),
    el("span", {}, row.task.startsWith(`${row.source}/`)
      ? row.task.slice(row.source.length + 1) : row.task),
    el("span", {}, format(row.tokens)),
  ];
}
