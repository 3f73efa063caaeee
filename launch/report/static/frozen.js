// One run, or all runs of a sweep, as a file: its data are in it, and stay.

import { start } from "./app.js";

const inlined = JSON.parse(document.getElementById("data").textContent);

function ofRun({ run, index, details }) {
  return {
    run: async () => run,
    index: async () => index,
    detail: async (name, round, offset) => details[index.rows.findIndex(
      (row) => row[0] === round && row.at(-1) === offset)],
  };
}

function ofRuns({ table, runs, meanings }) {
  const curve = (run, metric) => ({ ...run, values: run.metrics[metric] ?? [],
    last: run.last[metric], best: run.best[metric] });
  return {
    runs: async () => table,
    curves: async (metric) => ({
      meaning: meanings[metric] ?? "",
      runs: Object.fromEntries(Object.entries(runs).map(([name, run]) =>
        [name, curve(run, metric)])),
    }),
    metrics: async (name) => ({ ...runs[name], meanings }),
  };
}

start({ everyMs: 0, ...(inlined.table ? ofRuns : ofRun)(inlined) });
