// The trajectories of a report: a filtered list, and one of them turn by turn.
"use strict";

const REWARDS = {
  positive: (reward) => reward > 0,
  zero: (reward) => reward === 0,
  negative: (reward) => reward < 0,
  none: (reward) => reward == null,
};

const keyOf = ({ round, group, index }) => `${round}/${group}/${index}`;
const numTokens = ({ turns }) =>
  turns.reduce((sum, turn) => sum + turn.words.length, 0);

function kind({ status, reward }) {
  if (status !== "completed" && status !== "truncated") return "fault";
  return reward > 0 ? "won" : "lost";
}

// Words of a vocabulary need spaces between them, pieces of text do not.
function spaced(words) {
  return words.some((word) => /\S\s|\s\S/.test(word)) ? "" : " ";
}

function startBrowser() {
  const all = data.trajectories;
  for (const select of document.querySelectorAll("[data-filter]")) {
    const field = select.dataset.filter;
    const values = field === "reward"
      ? Object.keys(REWARDS) : [...new Set(all.map((one) => one[field]))];
    options(select, ["", ...values], ["all", ...values]);
    select.addEventListener("change", drawList);
  }
  drawList();
}

function drawList() {
  const filters = [...document.querySelectorAll("[data-filter]")]
    .filter((select) => select.value !== "")
    .map(({ dataset: { filter }, value }) => (one) => filter === "reward"
      ? REWARDS[value](one.reward) : String(one[filter]) === value);
  const found = data.trajectories.filter((one) =>
    filters.every((accept) => accept(one)));
  const rounds = new Set(data.trajectories.map((one) => one.round)).size;
  $("#shown").textContent = data.trajectories.length
    ? `${found.length} of the ${data.trajectories.length} trajectories on ` +
      `this page: whole groups of ${rounds} round${rounds > 1 ? "s" : ""}, ` +
      "spread over the run. All that were recorded are in trajectories/."
    : "No trajectory on this page.";
  const groups = new Map();
  for (const one of found) {
    const key = `${one.round}/${one.group}`;
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  $("#list").replaceChildren(...[...groups.values()].flatMap((members) => [
    el("p", {}, `Round ${members[0].round}, group ${members[0].group}`,
      el("br"), el("small", {}, members[0].task)),
    ...members.map((one) => el("button", {
      class: `chip ${kind(one)}`, "data-key": keyOf(one),
      "data-tip": `member ${one.index}: ${one.status}`,
      onclick: () => drawDetail(one),
    }, one.reward == null ? "fault" : format(one.reward))),
  ]));
  if (found.length) drawDetail(found[0]);
  else $("#detail").replaceChildren(el("p", { class: "muted" },
    "Nothing matches."));
}

function drawDetail(one) {
  const members = data.trajectories.filter((other) =>
    other.round === one.round && other.group === one.group);
  const parts = Object.entries(one.parts ?? {})
    .map(([name, value]) => `${name} ${format(value)}`);
  const facts = [
    `member ${one.index}`, one.status, `reward ${format(one.reward)}`,
    ...parts, `advantage ${format(one.advantage)}`,
    `${numTokens(one)} tokens in ${one.turns.length} turns`,
  ];
  $("#detail").replaceChildren(
    el("h2", {}, one.task),
    el("p", { class: "muted" },
      `Round ${one.round}, group ${one.group}: its ${members.length} members`),
    el("div", { class: "members" }, ...members.map(memberCard)),
    el("p", {}, facts.join(" · ")),
    ...(one.fault ? [el("p", { class: "notes" }, one.fault)] : []),
    el("p", {}, el("small", {}, "Probability of a token: 0",
      el("span", { class: "scale" }), "1. A line in front: the first token of",
      " newer weights.")),
    ...one.turns.map(turnRow));
  for (const button of document.querySelectorAll("[data-key]"))
    button.setAttribute("aria-pressed", button.dataset.key === keyOf(one));
}

function memberCard(one) {
  const words = one.turns.at(-1)?.words ?? [];
  return el("button", {
    class: `member ${kind(one)}`, "data-key": keyOf(one),
    onclick: () => drawDetail(one),
  },
  el("b", {}, one.reward == null ? "fault" : format(one.reward)),
  el("span", {}, `advantage ${format(one.advantage)}`),
  el("span", {}, `${one.turns.length} turns, ${numTokens(one)} tokens`),
  el("span", {}, words.join(spaced(words)) || one.status));
}

function turnRow(turn, i) {
  const [low, high] = [turn.versions[0], turn.versions.at(-1)];
  const facts = [
    `${turn.words.length} tokens`,
    low === high ? `version ${format(low)}` : `versions ${low} to ${high}`,
    `ended by ${turn.stop}`, `decode ${format(turn.decode_s)} s`,
    `environment ${format(turn.env_s)} s`,
  ];
  const gap = spaced([...turn.context, ...turn.words]);
  return el("div", { class: "turn" },
    el("small", {}, `context ${i + 1}`),
    el("div", { class: "words context" }, turn.context.join(gap)),
    el("small", {}, `agent ${i + 1}`),
    el("div", {},
      el("div", { class: "words" }, ...turn.words.flatMap((word, k) =>
        [token(turn, word, k), gap])),
      el("small", {}, facts.join(" · "))));
}

function token(turn, word, k) {
  const p = Math.exp(turn.logprobs[k]);
  const newer = k > 0 && turn.versions[k] !== turn.versions[k - 1];
  return el("span", {
    class: newer ? "token newer" : "token",
    style: `--tint: ${((1 - p) * 55).toFixed(0)}%`,
    "data-tip": `p = ${p.toPrecision(3)}\nlog-prob ${turn.logprobs[k]}\n` +
      `version ${turn.versions[k]}`,
  }, `${word}`);
}
