// The recorded trajectories of a run: filters, a list, and one turn by turn.

import { address, linkTo } from "./address.js";
import { el, format, say } from "./dom.js";
import { rowFilters } from "./filters.js";
import { virtualList } from "./list.js";
import { detailView } from "./turns.js";

const HEADS = ["round", "member", "reward", "task", "tokens"];

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
  const browser = { all: [], found: [], index: null, wanted: "", open: null,
    isNamed: false };
  const filters = rowFilters(filter);
  const shown = el("small", { id: "shown" });
  const view = detailView(openKey);
  const list = virtualList("Trajectories", rowOf, (row) => open(row));
  const heads = el("div", { class: "row heads", "aria-hidden": "true" },
    ...HEADS.map((head) => el("span", {}, head)));
  const node = el("section", { id: "trajectories",
    "aria-label": "Trajectories" },
  el("div", { class: "bar" }, el("h2", {}, "Trajectories")), filters.node,
  el("p", {}, shown),
  el("div", { class: "browser" }, el("div", {}, heads, list.node), view.node));

  function filter() {
    node.hidden = !browser.all.length;
    browser.found = filters.chosen(browser.all);
    shown.textContent = shownText(browser);
    say(`${browser.found.length} trajectories`);
    list.place = browser.found.findIndex((row) => keyOf(row) === browser.open);
    list.show(browser.found);
  }

  async function load() {
    const index = await source.index(run);
    if (index === browser.index) return;
    browser.index = index;
    browser.all = objects(index);
    filters.offer(browser.all);
    filter();
    const row = rowOfKey(browser.open);
    if (row) view.renew(row, browser.all);
    if (browser.wanted) openWanted();
    else if (browser.open === null && browser.found.length)
      await open(browser.found[0], false);
  }

  function rowOfKey(key) {
    return browser.all.find((one) => keyOf(one) === key);
  }

  function openKey(key) {
    const row = rowOfKey(key);
    if (row) open(row);
  }

  // What the address names may come with a later round.
  function openWanted() {
    if (rowOfKey(browser.wanted)) return openKey(browser.wanted);
    if (browser.open === browser.wanted) return;
    browser.open = null;
    list.mark(-1);
    node.hidden = false;
    view.fail(`There is no trajectory ${browser.wanted} on this page.`);
  }

  // Scrolls the page here, once for each address that names a trajectory.
  function reveal() {
    if (!browser.isNamed || !browser.index) return;
    browser.isNamed = false;
    node.scrollIntoView();
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
    // Somebody may have gone on meanwhile, and the index too.
    if (browser.open === key)
      view.show(rowOfKey(key) ?? row, detail, browser.all);
  }

  return { node, load, reveal, draw: () => list.draw(), show(key) {
    browser.wanted = key ?? "";
    browser.isNamed = Boolean(key);
    if (key && browser.index) {
      openWanted();
      reveal();
    }
  } };
}

// Puts a trajectory into the address, where it can be kept.
function remember(key) {
  const { path, fields } = address();
  if (path !== "run") return;
  fields.set("trajectory", key);
  history.replaceState(null, "", linkTo(path, Object.fromEntries(fields)));
}

function shownText({ all, found, index }) {
  if (!all.length) return "No trajectory on this page.";
  const rounds = new Set(all.map(({ round }) => round)).size;
  return `${found.length} of the ${all.length} trajectories on this page: ` +
    (index.is_sample ? "whole groups" : "all that were recorded") +
    ` of ${rounds} round${rounds > 1 ? "s" : ""}` +
    (index.is_sample ? ", spread over the run. All that were recorded are in " +
      "trajectories/." : ".") +
    (index.odd ? ` Lines left out: ${index.odd}.` : "");
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
