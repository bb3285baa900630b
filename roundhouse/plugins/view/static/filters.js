// The bar of filters: what there is, how often, and what is chosen.

import { calm, dot, h, number, replace } from "./dom.js";
import { ask } from "./source.js";
import { FILTERS, filters, go, scope, state } from "./state.js";

export class FilterBar {
  constructor() {
    this.element = h("section.filters", { "aria-label": "Filters" });
    const search = calm((value) => go({ q: value }, { quiet: true }), 220);
    this.search = h("input.search", {
      type: "search", placeholder: "Search in conversations and tasks", "aria-label": "Search", spellcheck: "false",
      oninput: (event) => search(event.target.value),
      onkeydown: (event) => { if (event.key === "Enter" || event.key === "Escape") event.target.blur(); },
    });
    this.rest = h(".facets");
    this.element.append(this.search, this.rest);
    this.generation = 0;
  }

  async load() {
    const generation = ++this.generation;
    const facets = await ask("facets", { ...scope(), ...filters() });
    if (generation === this.generation) this.draw(facets);
    return facets;
  }

  draw(facets) {
    const now = state();
    if (document.activeElement !== this.search) this.search.value = now.q;
    replace(this.rest,
      h(".chips", { role: "group", "aria-label": "Status" }, facets.status.map(({ value, n }) => this.chip("status", value, n, dot(value)))),
      facets.environment.length > 1 && this.choice("environment", "any environment", facets.environment),
      facets.reason.length > 0 && this.choice("reason", "any quarantine", facets.reason),
      facets.failure_code.length > 0 && this.choice("code", "any failure", facets.failure_code),
      state().stage === "collect" && this.learning(),
      facets.histogram.length > 1 && this.histogram(facets.histogram),
      this.length(facets.span),
      now.group && h("button.chip.on", { type: "button", title: "Show all groups", onclick: () => go({ group: "" }) }, `group ${now.group} ×`),
      FILTERS.some((name) => now[name]) && h("button.clear", { type: "button", onclick: clear }, "clear"));
  }

  chip(name, value, count, mark) {
    const chosen = state()[name].split(",").filter(Boolean);
    const on = chosen.includes(value);
    const next = on ? chosen.filter((other) => other !== value) : [...chosen, value];
    return h(`button.chip${on ? ".on" : ""}`, { type: "button", "aria-pressed": String(on), onclick: () => go({ [name]: next.join(",") }) }, mark, value, h("small", {}, number(count)));
  }

  choice(name, any, options) {
    return h("select", { "aria-label": name, onchange: (event) => go({ [name]: event.target.value }) },
      h("option", { value: "" }, any),
      options.map(({ value, n }) => h("option", { value, selected: state()[name] === value }, `${value.replaceAll("_", " ")} (${number(n)})`)));
  }

  learning() {
    return h("select", { "aria-label": "learning", onchange: (event) => go({ learning: event.target.value }) },
      [["", "trained or not"], ["trained", "trained on"], ["collapsed", "collapsed groups"], ["refused", "refused"]]
        .map(([value, label]) => h("option", { value, selected: state().learning === value }, label)));
  }

  /** Rewards of the matching rollouts; pull over it to choose a range. */
  histogram(bins) {
    const most = Math.max(1, ...bins.map((bin) => bin.n));
    const now = state();
    const inside = (bin) => (!now.reward_min || bin.high > Number(now.reward_min)) && (!now.reward_max || bin.low <= Number(now.reward_max));
    let from = null;
    const bars = bins.map((bin, k) => h(`i.bin${inside(bin) ? "" : ".out"}`, {
      title: `${number(bin.n)} with reward ${number(bin.low)} … ${number(bin.high)}`,
      vars: { n: bin.n ? `${Math.max(8, Math.round((100 * Math.sqrt(bin.n)) / Math.sqrt(most)))}%` : "0%" },
      onpointerdown: () => { from = k; },
      onpointerup: () => {
        const [a, b] = [Math.min(from ?? k, k), Math.max(from ?? k, k)];
        const last = b === bins.length - 1;
        go({ reward_min: bins[a].low, reward_max: last ? bins[b].high : bins[b].high - 1e-9 });
      },
    }));
    const chosen = now.reward_min || now.reward_max;
    return h(".histogram", {}, h(".bins", {}, bars),
      h("small", {}, chosen ? `reward ${number(Number(now.reward_min), 2)} … ${number(Number(now.reward_max), 2)}` : `reward ${number(bins[0].low, 2)} … ${number(bins.at(-1).high, 2)}`));
  }

  length(span) {
    const field = (name, hint) => h("input.short", {
      type: "number", min: "0", placeholder: hint, value: state()[name], "aria-label": `${name.replace("_", " ")}`,
      onchange: (event) => go({ [name]: event.target.value }),
    });
    return h("label.length", { title: "Generated tokens" }, "tokens", field("tokens_min", "0"), "–", field("tokens_max", String(span.tokens ?? "")));
  }
}

export function clear() {
  go(Object.fromEntries(FILTERS.map((name) => [name, ""])));
}
