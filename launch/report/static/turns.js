// One trajectory in full: its group, its task at other rounds, and its turns.

import { legend, seriesColour } from "./chart.js";
import { choice, el, format, options } from "./dom.js";
import { parts } from "./roles.js";
import { keyOf, kindOf } from "./trajectories.js";

const MAX_TOKENS = 3000, MAX_LISTED = 200;
const COLOURS = {
  logprobs: "log-probability", advantages: "advantage", weights: "weight",
  versions: "version", none: "nothing",
};
const MEANINGS = {
  logprobs: "Stronger: less probable. ",
  advantages: "Green: better than its group, red: worse; where tokens have " +
    "none of their own, that of the member. ",
  weights: "exp(learner - engine) of its log-probabilities, the learner's " +
    "under the policy that ratios are against. Green: above 1, red: below; a " +
    "correction caps or masks this ratio. ",
  versions: "",
  none: "",
};

// `open(key)` shows another trajectory.
export function detailView(open) {
  let latest = null;
  let wanted = "logprobs";
  const redraw = () => latest && draw(latest);
  const [colour, colourLabel] = choice("Colour by", { id: "colour",
    onchange: () => { wanted = colour.value; redraw(); } });
  const box = (id) => el("input", { type: "checkbox", id, onchange: redraw });
  const mask = box("mask"), ids = box("ids");
  const bar = el("p", { class: "bar" }, colourLabel,
    el("label", {}, mask, " mask"), el("label", {}, ids, " raw ids"));
  const body = el("div");
  const node = el("article", { id: "detail", "aria-label": "Trajectory" }, bar,
    body);
  bar.hidden = true;

  function show(row, detail, all) {
    latest = { row, detail, all };
    bar.hidden = false;
    redraw();
  }

  // What is known of the trajectory that is shown may have grown.
  function renew(row, all) {
    if (!latest || keyOf(latest.row) !== keyOf(row)) return;
    const isSame = JSON.stringify(latest.row) === JSON.stringify(row);
    Object.assign(latest, { row, all });
    if (!isSame) redraw();
  }

  function draw({ row, detail, all }) {
    offer(colour, wanted, lackOf(row, detail));
    body.className = mask.checked ? "show-mask" : "";
    body.replaceChildren(...headOf(row, detail, all, open),
      el("p", {}, el("small", {}, legendOf(colour.value, mask.checked))),
      ...(colour.value === "versions" ? [legend(versionsOf(detail).map(
        (version) => [`version ${version}`, seriesColour(version)]))] : []),
      ...detail.turns.map((turn, i) => turnRow(turn, i, {
        row, detail, by: colour.value, isRaw: ids.checked })),
      ...restOf(detail));
  }

  function fail(text) {
    latest = null;
    bar.hidden = true;
    body.replaceChildren(el("p", { class: "broken" }, text));
  }
  return { node, show, renew, fail };
}

// Offers all colours, those that say nothing here with the reason.
function offer(select, wanted, lack) {
  const names = Object.keys(COLOURS);
  options(select, names, names.map((name) =>
    COLOURS[name] + (lack[name] ? ` (${lack[name]})` : "")));
  for (const option of select.options)
    option.disabled = option.value in lack;
  select.value = wanted in lack ? names[0] : wanted;
}

function lackOf({ trained }, detail) {
  const isScored = detail.turns.some((turn) => turn.old_logprobs);
  return {
    ...(isScored ? {} : { weights: trained === false ? "not trained"
      : "not scored again" }),
    ...(versionsOf(detail).length > 1 ? {} : { versions: "only one" }),
  };
}

function versionsOf({ turns }) {
  return [...new Set(turns.flatMap(({ versions }) => versions))]
    .sort((a, b) => a - b);
}

function legendOf(by, isMask) {
  return MEANINGS[by] + "A line in front: the first token of newer weights." +
    (isMask ? " Underlined: trained; pale: not trained." : "");
}

function headOf(row, detail, all, open) {
  const members = all.filter((other) =>
    other.round === row.round && other.group === row.group);
  const others = all.filter((other) =>
    other.task === row.task && other.round !== row.round);
  const listed = (named) => Object.entries(named)
    .map(([name, value]) => `${name} ${format(value)}`);
  const facts = [
    `member ${row.index}`, row.status, `reward ${format(row.reward)}`,
    ...(detail.graded_reward !== detail.reward
      ? [`graded ${format(detail.graded_reward)}`] : []),
    ...listed(detail.parts), ...listed(detail.metrics),
    `advantage ${format(row.advantage)}`, `lag ${format(row.lag)}`,
    `${format(row.tokens)} tokens in ${turnsText(row)}`,
    `${format(row.ids)} ids`, trainedText(row.trained),
  ];
  const buttons = (rows, make) => el("div", { class: "members" },
    ...rows.slice(0, MAX_LISTED).map((one) => el("button", {
      class: `member ${kindOf(one)}`, "data-key": keyOf(one),
      "aria-pressed": String(keyOf(one) === keyOf(row)),
      onclick: () => open(keyOf(one)) }, ...make(one))));
  return [
    el("h2", {}, row.task),
    el("p", { class: "muted" }, `Round ${row.round}, group ${row.group}: its ` +
      `${members.length} members`),
    buttons(members, (one) => [el("b", {}, rewardText(one)),
      el("span", {}, `advantage ${format(one.advantage)}`),
      el("span", {}, `${turnsText(one)}, ${format(one.tokens)} tokens`)]),
    ...(others.length ? [el("details", { class: "others" },
      el("summary", {}, `The same task at other rounds: ${others.length}`),
      buttons(others, (one) => [el("b", {}, rewardText(one)),
        el("span", {}, `round ${one.round}, ${one.status}`)]))] : []),
    el("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    ...(detail.fault ? [el("p", { class: "notes" }, detail.fault)] : []),
  ];
}

function rewardText({ reward }) {
  return reward == null ? "fault" : format(reward);
}

function turnsText({ turns }) {
  return `${turns} turn${turns === 1 ? "" : "s"}`;
}

function trainedText(trained) {
  return trained == null ? "" : trained ? "trained" : "masked";
}

function restOf({ unanswered }) {
  return unanswered.length ? [el("p", { class: "muted" },
    `${unanswered.length} more ids followed, which the limit cut off.`)] : [];
}

function turnRow(turn, i, look) {
  const low = turn.versions[0], high = turn.versions.at(-1);
  const facts = [
    `${turn.words.length} tokens`,
    low === high ? `version ${format(low)}` : `versions ${low} to ${high}`,
    `ended by ${turn.stop}`, `decode ${format(turn.decode_s)} s`,
    `environment ${format(turn.env_s)} s`,
    ...(turn.reward ? [`reward ${format(turn.reward)}`] : []),
  ];
  const { gap } = look.detail;
  const trained = look.row.trained !== false;
  return el("div", { class: trained ? "turn trained" : "turn masked" },
    el("small", {}, `context ${i + 1}`,
      ...(turn.opens && i ? [el("br"), "a new conversation"] : [])),
    wordsOf(turn.context, turn.context_ids, gap, look, "user", (word, id) =>
      el("span", { class: "token", "data-tip": `id ${id}\nnot sampled` },
        word), "words context"),
    el("small", {}, `agent ${i + 1}`),
    el("div", {},
      wordsOf(turn.words, turn.ids, gap, look, "assistant",
        (word, id, k) => token(turn, word, id, k, look), "words"),
      el("small", {}, facts.join(" · "))));
}

function wordsOf(words, ids, gap, { isRaw }, role, make, name) {
  const node = el("div", { class: name });
  const write = (from, to) => {
    for (const part of parts(words, gap, role)) {
      const [first, last] = [Math.max(part.from, from), Math.min(part.to, to)];
      if (first >= last) continue;
      const tokens = [];
      for (let k = first; k < last; k++)
        tokens.push(make(isRaw ? `${ids[k]}` : words[k], ids[k], k),
          isRaw ? " " : gap);
      node.append(part.label
        ? el("div", { class: `part ${part.kind}` },
          el("small", {}, part.label), ...tokens)
        : el("span", {}, ...tokens));
    }
  };
  write(0, MAX_TOKENS);
  if (words.length > MAX_TOKENS) addRest(node, words.length, write);
  return node;
}

function addRest(node, count, write) {
  let shown = MAX_TOKENS;
  const more = el("button", { class: "more", onclick: () => {
    more.remove();
    write(shown, shown + MAX_TOKENS);
    shown += MAX_TOKENS;
    if (shown < count) node.append(more);
  } }, `${format(count)} tokens in all: show more`);
  node.append(more);
}

function token(turn, word, id, k, { detail, by }) {
  const newer = k > 0 && turn.versions[k] !== turn.versions[k - 1];
  const logprob = turn.logprobs[k];
  const advantage = turn.advantages?.[k] ?? detail.advantage;
  const weight = weightOf(turn, k);
  const told = [`id ${id}`, `p = ${probability(logprob)}`,
    `log-prob ${format(logprob)}`, `advantage ${format(advantage)}`,
    ...(weight == null ? [] : [`weight ${format(weight)}`]),
    `version ${turn.versions[k]}`];
  return el("span", {
    class: newer ? "token newer" : "token",
    vars: tint(by, { logprob, advantage, weight, version: turn.versions[k] }),
    "data-tip": told.join("\n"),
  }, word);
}

function probability(logprob) {
  return logprob == null ? "–" : Math.exp(logprob).toPrecision(3);
}

// The ratio of the old policy to the one that sampled.
function weightOf({ old_logprobs: old, logprobs }, k) {
  return old?.[k] == null || logprobs[k] == null
    ? null : Math.exp(old[k] - logprobs[k]);
}

function tint(by, { logprob, advantage, weight, version }) {
  const percent = (share) =>
    `${(Math.min(1, Math.max(0, share)) * 55).toFixed(0)}%`;
  switch (by) {
    case "logprobs":
      return { "--tint": percent(logprob == null ? 0 : 1 - Math.exp(logprob)) };
    case "advantages":
      return { "--hue": advantage < 0 ? "var(--bad)" : "var(--good)",
        "--tint": percent(Math.abs(advantage ?? 0) / 2) };
    case "weights":
      return { "--hue": weight < 1 ? "var(--bad)" : "var(--good)",
        "--tint": percent(2 * Math.abs(Math.log(weight ?? 1))) };
    case "versions":
      return { "--hue": seriesColour(version), "--tint": "30%" };
    default:
      return { "--tint": "0%" };
  }
}
