// Curves of many runs: their place on an axis, and bands over seeds.

import { smooth } from "./chart.js";
import { options, range } from "./dom.js";

const AXES = {
  rounds: "rounds", tokens: "sampled tokens", time: "seconds",
};
const STEP_AXES = {
  rounds: "steps", tokens: "trained tokens", time: "seconds",
};
const GRID = 160, MIN_SMOOTHED = 25;

// The axes and their labels; runs that all fine-tune have steps.
export function axesOf(data) {
  return data.is_tuning ? STEP_AXES : AXES;
}

export function offerAxes(select, data) {
  const axes = axesOf(data);
  options(select, Object.keys(axes), Object.values(axes));
}

// The values of a run over an axis, without the rounds that have none.
export function pointsOf(run, axis) {
  return run[axis].map((at, i) => [at, run.values[i]])
    .filter(([at, value]) => at != null && value != null);
}

export function smoothed(points) {
  // Few points, as of evaluations, are drawn as they are.
  if (points.length < MIN_SMOOTHED) return points;
  const means = smooth(points.map(([, value]) => value));
  return points.map(([at], i) => [at, means[i]]);
}

// The value of a curve at a place between its ends; null beyond them.
export function valueAt(points, at) {
  if (!points.length || at < points[0][0] || at > points.at(-1)[0]) return null;
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= at) low = middle;
    else high = middle;
  }
  const [a, from] = points[low], [b, to] = points[high];
  return b === a ? to : from + ((at - a) / (b - a)) * (to - from);
}

// The mean of some curves, and the least and the most of them, where all have a
// value; `rest` is what each has before and after that.
export function overSeeds(curves) {
  const own = curves.filter((points) => points.length);
  if (own.length < 2) return { points: own[0] ?? [], band: [], rest: [] };
  const from = Math.max(...own.map((points) => points[0][0]));
  const to = Math.min(...own.map((points) => points.at(-1)[0]));
  if (from > to) return { points: [], band: [], rest: own };
  const places = [...new Set(own.flatMap((points) => points.map(([at]) => at)
    .filter((at) => from <= at && at <= to)))].sort((a, b) => a - b);
  // Tokens and seconds of two runs hardly ever agree.
  const stops = places.length <= GRID ? places
    : Array.from({ length: GRID }, (_, i) =>
      Math.min(to, from + (i / (GRID - 1)) * (to - from)));
  const points = [], band = [];
  for (const at of stops) {
    const values = own.map((curve) => valueAt(curve, at));
    points.push([at, values.reduce((sum, v) => sum + v, 0) / values.length]);
    band.push([at, ...range(values)]);
  }
  const edge = (curve, at) => [at, valueAt(curve, at)];
  const rest = own.flatMap((curve) => [
    [...curve.filter(([at]) => at < from), edge(curve, from)],
    [edge(curve, to), ...curve.filter(([at]) => at > to)],
  ]).filter((part) => part.length > 1);
  return { points, band, rest };
}
