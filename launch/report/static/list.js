// A list of any length that draws only the rows in view, for pointer and keys.

import { el } from "./dom.js";

const ROW = 30, SPARE = 8;

// `make(item, i)` returns the cells of a row, `choose(i)` opens one.
export function virtualList(label, make, choose) {
  const room = el("div", { class: "room" });
  const node = el("div", { class: "list", role: "listbox", tabindex: 0,
    "aria-label": label, onscroll: () => draw(), onkeydown: press,
    onclick: (event) => {
      const row = event.target.closest(".row");
      if (row) pick(Number(row.dataset.place));
    } }, room);
  const list = { node, items: [], place: -1, draw, show, mark };
  let drawn = "";

  function show(items) {
    list.items = items;
    drawn = "";
    room.style.height = `${items.length * ROW}px`;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(node.scrollTop / ROW) - SPARE);
    const last = Math.min(list.items.length,
      Math.ceil((node.scrollTop + node.clientHeight) / ROW) + SPARE);
    const now = `${first} ${last} ${list.place}`;
    if (now === drawn) return;
    drawn = now;
    room.replaceChildren(...list.items.slice(first, last).map((item, k) => {
      const i = first + k;
      return el("div", { class: "row", role: "option", id: `row-${i}`,
        "data-place": i, "aria-selected": String(i === list.place),
        "aria-setsize": list.items.length, "aria-posinset": i + 1,
        vars: { top: `${i * ROW}px` } }, ...make(item, i));
    }));
    if (list.place >= first && list.place < last)
      node.setAttribute("aria-activedescendant", `row-${list.place}`);
    else node.removeAttribute("aria-activedescendant");
  }

  // Marks a row and scrolls to it, without opening it; -1 is none.
  function mark(i) {
    list.place = i;
    const top = i * ROW, bottom = top + ROW;
    if (i >= 0 && top < node.scrollTop) node.scrollTop = top;
    if (bottom > node.scrollTop + node.clientHeight)
      node.scrollTop = bottom - node.clientHeight;
    draw();
  }

  function pick(i) {
    if (i < 0 || i >= list.items.length) return;
    mark(i);
    choose(list.items[i], i);
  }

  function press(event) {
    const page = Math.max(1, Math.floor(node.clientHeight / ROW) - 1);
    const last = list.items.length - 1;
    const to = { ArrowDown: list.place + 1, ArrowUp: list.place - 1,
      PageDown: list.place + page, PageUp: list.place - page,
      Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    pick(Math.min(last, Math.max(0, to)));
  }
  return list;
}
