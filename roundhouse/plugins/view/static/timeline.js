// The run as a line: mean reward of every iteration, evaluations as points. A click chooses the iteration.

import { h, number, replace, svg } from "./dom.js";
import { ask, isExport } from "./source.js";
import { go, isDataset, scope, state } from "./state.js";

/** What the reported iterations used up to one, as `cost.budget` counts it: hours, tokens, and what was not learnt from. */
function costText(totals, currency) {
  if (!totals) return "";
  const used = ["wall", "gpu", "cpu"].filter((kind) => totals[`${kind}_hours`]).map((kind) => `${kind === "wall" ? "" : `${kind.toUpperCase()} `}${duration(totals[`${kind}_hours`] * 3600)}`);
  const tokens = totals.generated_tokens;
  const idle = Object.entries(totals).filter(([name]) => name.startsWith("waste/")).reduce((sum, [, count]) => sum + count, 0);
  if (tokens) used.push(`${compact(tokens)} tokens, ${Math.round((100 * idle) / tokens)} % not learnt from`);
  if (totals.money) used.push(`${number(totals.money, 2)} ${currency ?? ""}`.trim());
  return used.length ? `iterations: ${used.join(" · ")}` : "";
}

function duration(value) {
  return value < 120 ? `${number(value, 0)} s` : value < 7200 ? `${number(value / 60, 0)} min` : `${number(value / 3600, 1)} h`;
}

function compact(value) {
  return Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
}

const HEIGHT = 64;
const PAD = 10;

export class Timeline {
  constructor() {
    this.element = h("section.timeline", { "aria-label": "Reward over iterations" });
    this.points = [];
    this.width = 0;
    // The line is as wide as its box, whatever else of the page takes room or gives it back
    new ResizeObserver(() => { if (this.place && this.place.clientWidth !== this.width) this.draw(); }).observe(this.element);
  }

  async load(currency = "") {
    this.currency = currency;
    if (isExport) return this.element.remove();
    this.points = await ask("curve", scope(), { fresh: true });
    this.draw();
  }

  draw() {
    const { points } = this;
    if (!points.length) return replace(this.element);
    const all = h("button.all", { type: "button", "aria-pressed": String((state().iteration || "all") === "all"), onclick: () => go({ iteration: "all", rollout: "", at: "" }) }, isDataset(state().run) ? "all versions" : "all iterations");
    const legend = h(".legend", {}, h("span.l-train", {}, "reward"));
    const place = this.place = h(".chart");
    const cost = h("span.cost", { title: "What the reported iterations used, CPU time in their stages. roundhouse runs cost has the whole run by cause." },
      costText(points.findLast((point) => point.cost)?.cost, this.currency));
    replace(this.element, legend, place, h(".aside", {}, all, cost));
    this.width = place.clientWidth; // what legend, button and cost leave of the page's width
    const width = Math.max(80, this.width);
    const values = points.flatMap((point) => [point.reward, point.evaluation]).filter((value) => typeof value === "number");
    const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
    const x = (index) => PAD + (points.length < 2 ? 0.5 : index / (points.length - 1)) * (width - 2 * PAD);
    const y = (value) => HEIGHT - PAD - ((value - low) / (high - low || 1)) * (HEIGHT - 2 * PAD - 4);
    const line = (key) => points.map((point, k) => (typeof point[key] === "number" ? `${x(k)},${y(point[key])}` : null)).filter(Boolean).join(" ");
    const chosen = points.findIndex((point) => String(point.iteration) === state().iteration);
    const chart = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": "Mean reward by iteration" },
      chosen >= 0 && svg("line.chosen", { x1: x(chosen), x2: x(chosen), y1: 2, y2: HEIGHT - 2 }),
      svg("polyline.curve", { points: line("reward") }),
      points.map((point, k) => typeof point.reward === "number" && points.length <= 120 && svg("circle.train", { cx: x(k), cy: y(point.reward), r: 2.2 })),
      svg("polyline.curve.held", { points: line("evaluation") }),
      points.map((point, k) => typeof point.evaluation === "number" && svg("circle.held", { cx: x(k), cy: y(point.evaluation), r: 3 })),
      chosen >= 0 && typeof points[chosen].reward === "number" && svg("circle.now", { cx: x(chosen), cy: y(points[chosen].reward), r: 5 }));
    const tip = h(".charttip");
    const nearest = (event) => {
      const at = (event.offsetX - PAD) / Math.max(1, width - 2 * PAD);
      return points[Math.min(points.length - 1, Math.max(0, Math.round(at * (points.length - 1))))];
    };
    chart.addEventListener("mousemove", (event) => {
      const point = nearest(event);
      tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, width - (point.cost ? 480 : 190)))}px`;
      replace(tip, h("b", {}, this.name(point.iteration)), ` reward ${number(point.reward)}`,
        point.evaluation !== undefined && ` · held-out ${number(point.evaluation)}`,
        point.cost && ` · ${costText(point.cost, this.currency)}`);
      tip.classList.add("on");
    });
    chart.addEventListener("mouseleave", () => tip.classList.remove("on"));
    chart.addEventListener("click", (event) => choose(nearest(event)));
    replace(legend, h("span.l-train", {}, "reward"), h("span.l-held", {}, "held-out"), h("small", {}, `${number(low, 2)} … ${number(high, 2)}`));
    replace(place, chart, tip);
    return undefined;
  }

  /** What a person calls an iteration; a version of a dataset has a name. */
  name(iteration) {
    return this.points.find((point) => String(point.iteration) === String(iteration))?.label ?? `iteration ${iteration}`;
  }

  /** The iteration before or after the chosen one. */
  step(by) {
    const index = this.points.findIndex((point) => String(point.iteration) === state().iteration);
    const next = this.points[index < 0 ? (by > 0 ? 0 : this.points.length - 1) : index + by];
    if (next) choose(next);
  }
}

function choose(point) {
  const stages = point.stages;
  const stage = stages.includes(state().stage) || !stages.includes("evaluate") || stages.includes("collect") ? state().stage : "evaluate";
  go({ iteration: point.iteration, stage: point.iteration === 0 && !point.label ? "evaluate" : stage, rollout: "", at: "", group: "" });
}
