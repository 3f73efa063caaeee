// Shows one page after the other, as the address says, and keeps it up to date.
//
//   #runs    #compare?a=RUN&b=RUN    #run?name=RUN&trajectory=ROUND/GROUP/INDEX
//
// A page is { node, load, draw }: `load` asks the source and draws what has
// changed, `draw` draws it once more, as for another width.

import { address } from "./address.js";
import { $, el, startTips } from "./dom.js";
import { comparePage } from "./compare.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";

const state = { source: null, page: null, path: "", busy: false };

function open() {
  const { path, fields } = address();
  // A trajectory is a place on the page of its run.
  const identity = `${path} ${fields.get("name")}`;
  if (path === "run" && identity === state.path)
    return state.page.show(fields);
  state.path = identity;
  const { source } = state;
  if (source.run && (path === "run" || !source.runs)) state.page = runPage(source, fields);
  else if (path === "compare") state.page = comparePage(source, fields);
  else state.page = runsPage(source);
  $("#main").replaceChildren(state.page.node);
  scrollTo(0, 0);
  return load();
}

async function load() {
  const { page } = state;
  if (state.busy) return;
  state.busy = true;
  try {
    await page.load();
    tell("");
  } catch (error) {
    tell(`${error.message || error}`);
  } finally {
    state.busy = false;
  }
  if (page !== state.page) await load();
  else document.body.dataset.ready = "true";
}

function tell(text) {
  $("#trouble").hidden = !text;
  $("#trouble").textContent = text;
}

export function start(source) {
  state.source = source;
  startTips();
  const frame = (draw) => {
    let waiting = 0;
    return () => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(draw);
    };
  };
  const redraw = frame(() => state.page.draw());
  addEventListener("hashchange", open);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  if (source.runs)
    $("#head").append(el("nav", { "aria-label": "Pages" },
      el("a", { href: "#runs" }, "All runs")));
  if (source.everyMs)
    setInterval(() => document.hidden || load(), source.everyMs);
  return open();
}
