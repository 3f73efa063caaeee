// Roles and tool calls in the text of a conversation, by the marks of chats.
//
// Marks are special tokens of the templates that models are published with;
// text without any is one part, of the role that its place says.

const MARKS = new RegExp([
  "<\\|im_start\\|>\\s*(\\w+)", // ChatML: Qwen and many more.
  "<\\|start_header_id\\|>\\s*(\\w+)", // Llama 3.
  "<start_of_turn>\\s*(\\w+)", // Gemma.
  "<(tool_call|tool_response|think|tools)>",
  "</(tool_call|tool_response|think|tools)>",
].join("|"), "g");
const KINDS = {
  tool_call: ["call", "tool call"], tool_response: ["reply", "tool response"],
  think: ["thought", "thought"], tools: ["reply", "tools"],
};

// Returns [{ from, to, kind, label }] of words, in order; `to` is behind the
// last. A part without a label needs no box: it is what its place says.
export function parts(words, gap, role) {
  const starts = [];
  let text = "";
  for (const word of words) {
    starts.push(text.length);
    text += word + gap;
  }
  const found = [];
  let open = { from: 0, kind: role, label: "" };
  const cut = (place, kind, label) => {
    // One token may hold the end of a mark and the beginning of the next.
    const at = Math.max(place, open.from);
    if (at > open.from) found.push({ ...open, to: at });
    open = { from: at, kind, label };
  };
  let speaker = [role, ""];
  for (const mark of text.matchAll(MARKS)) {
    const [, chatml, llama, gemma, opens, closes] = mark;
    const end = mark.index + mark[0].length;
    if (closes) cut(firstFrom(starts, end), ...speaker);
    else if (opens) cut(containing(starts, mark.index), ...KINDS[opens]);
    else {
      const name = chatml ?? llama ?? gemma;
      speaker = [name === "model" ? "assistant" : name, name];
      cut(containing(starts, mark.index), ...speaker);
    }
  }
  if (words.length > open.from) found.push({ ...open, to: words.length });
  return found;
}

// The first word that begins at an offset or behind it.
function firstFrom(starts, offset) {
  let low = 0, high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] < offset) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The word that holds an offset.
function containing(starts, offset) {
  const next = firstFrom(starts, offset);
  return starts[next] === offset ? next : Math.max(0, next - 1);
}
