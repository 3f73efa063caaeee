// Timelines alone, of which one is chosen: a page inside a notebook.

import { $, choice, options, startTips } from "./dom.js";
import { timelineSection } from "./timeline.js";

const runs = JSON.parse(document.getElementById("data").textContent);
const { node, draw } = timelineSection();
const redraw = () => draw(runs[select.value]);
const [select, label] = choice("Run", { id: "run", onchange: redraw });

options(select, Object.keys(runs));
node.querySelector("h2").after(label);
$("#head").remove();
$("#main").append(node);
startTips();
redraw();
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.body.dataset.ready = "true";
