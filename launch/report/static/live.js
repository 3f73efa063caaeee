// The page as `launch.view` serves it: data come from the server, and change.

import { start } from "./app.js";

const EVERY_MS = 2000;
const tags = new Map();

// Returns the value of a path, and the one before where nothing has changed.
async function get(path, fields = {}) {
  const url = `api/${path}?${new URLSearchParams(fields)}`;
  const known = tags.get(url);
  const reply = await fetch(url, {
    headers: known ? { "if-none-match": known.tag } : {},
  });
  if (reply.status === 304) return known.value;
  const value = await reply.json();
  if (!reply.ok) throw new Error(value.error);
  const tag = reply.headers.get("etag");
  if (tag) {
    // Only what is on the screen is worth keeping.
    if (tags.size > 32) tags.clear();
    tags.set(url, { tag, value });
  }
  return value;
}

start({
  everyMs: EVERY_MS,
  runs: () => get("runs"),
  curves: (metric) => get("curves", { metric }),
  metrics: (run) => get("metrics", { run }),
  run: (run, log) => get("run", { run, log }),
  index: (run) => get("index", { run }),
  detail: (run, round, offset) => get("trajectory", { run, round, offset }),
});
