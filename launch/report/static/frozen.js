// The page of one run as a file: its data are in it, and stay.

import { start } from "./app.js";

const inlined = JSON.parse(document.getElementById("data").textContent);

start({
  everyMs: 0,
  run: async () => inlined.run,
  index: async () => inlined.index,
  detail: async (run, round, offset) => {
    const place = inlined.index.rows.findIndex((row) =>
      row[0] === round && row.at(-1) === offset);
    return inlined.details[place];
  },
});
