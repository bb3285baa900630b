// The table of rollouts. Only the rows in sight are in the document, and only their pages are asked for.

import { dot, h, number, replace, seconds, signed } from "./dom.js";
import { ask } from "./source.js";
import { filters, go, scope, state } from "./state.js";

const ROW = 32;
const PAGE = 200;
const COLUMNS = [
  ["status", "", "Status"],
  ["iteration", "iter", "Iteration"],
  ["group_id", "task", "Group: the rollouts of one task"],
  ["sample", "#", "Sample in the group"],
  ["environment", "environment", "Environment"],
  ["reward", "reward", "Reward; none for a failed rollout"],
  ["advantage", "adv.", "Advantage, as the train stage recorded it"],
  ["turns", "turns", "Model calls"],
  ["generated_tokens", "tokens", "Generated tokens"],
  ["seconds", "time", "Wall time"],
  ["policy_version", "v", "Policy version that answered last"],
  ["reason", "outcome", "How it ended, and what kept it from training"],
];

export class Table {
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.pages = new Map();
    this.matched = 0;
    this.total = 0;
    this.cursor = -1;
    this.generation = 0;
    this.body = h(".rows", { role: "rowgroup" });
    this.space = h(".space", {}, this.body);
    this.scroller = h(".scroller", { tabindex: "0", role: "grid", "aria-label": "Rollouts" }, this.space);
    this.head = h(".row.head", { role: "row" });
    this.note = h(".tablenote");
    this.element = h(".table", {}, this.head, this.scroller, this.note);
    this.pressed = this.late = false;
    this.scroller.addEventListener("scroll", () => this.draw());
    this.scroller.addEventListener("pointerdown", (event) => { this.pressed = event.target.closest(".row") !== null; });
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(() => this.release()));
    new ResizeObserver(() => this.draw()).observe(this.scroller);
  }

  /** Ask anew, from the first page; keeps the row of the open rollout in sight. */
  async load(span) {
    const generation = ++this.generation;
    this.span = span ?? this.span ?? {};
    const wanted = state();
    const parameters = { ...scope(), ...filters(), limit: PAGE, offset: 0 };
    if (wanted.rollout) Object.assign(parameters, { find: wanted.rollout, find_iteration: wanted.at || 0 });
    const page = await ask("rollouts", parameters);
    if (generation !== this.generation) return page;
    this.pages = new Map([[0, page.rows]]);
    this.matched = page.matched;
    this.total = page.total;
    this.cursor = page.position ?? -1;
    this.space.style.height = `${Math.max(page.matched, 1) * ROW}px`;
    this.drawHead();
    if (this.cursor >= 0) this.reveal(this.cursor);
    else this.scroller.scrollTop = 0;
    this.draw();
    return page;
  }

  drawHead() {
    const { sort, iteration } = state();
    this.element.classList.toggle("all-iterations", (iteration || "all") === "all");
    replace(this.head, COLUMNS.map(([name, label, title]) => {
      const here = sort.replace(/^-/, "") === name;
      const next = here ? (sort.startsWith("-") ? "" : `-${name}`) : ["reward", "advantage", "generated_tokens", "seconds", "turns"].includes(name) ? `-${name}` : name;
      const arrow = here ? (sort.startsWith("-") ? " ↓" : " ↑") : "";
      const toggle = here && sort.startsWith("-") ? name : next;
      return h(`button.cell.c-${name}`, { type: "button", title: `${title}. Sort by it.`, onclick: () => go({ sort: toggle }) }, label + arrow);
    }));
  }

  /** Behind a press, and the click that it may be, the rows may be made anew. */
  release() {
    this.pressed = false;
    if (this.late) this.draw();
  }

  draw() {
    this.late = this.pressed; // a row that is replaced under a press hears no click
    if (this.late) return;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - 8);
    const last = Math.min(this.matched, first + Math.ceil(this.scroller.clientHeight / ROW) + 16);
    const rows = [];
    for (let place = first; place < last; place += 1) rows.push(this.row(place));
    replace(this.body, this.matched ? rows : h(".norows", {}, this.total ? "No rollout matches these filters." : "No rollouts here yet."));
    const share = this.matched === this.total ? "" : ` of ${number(this.total)}`;
    replace(this.note, `${number(this.matched)}${share} rollouts`, h("span.keys", {}, "j k move · enter open · / search · ? keys"));
    this.fetchPages(first, last);
  }

  fetchPages(first, last) {
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) {
      if (this.pages.has(page)) continue;
      this.pages.set(page, null);
      const generation = this.generation;
      ask("rollouts", { ...scope(), ...filters(), limit: PAGE, offset: page * PAGE }).then((found) => {
        if (generation !== this.generation) return;
        this.pages.set(page, found.rows);
        this.draw();
      }).catch(() => this.pages.delete(page));
    }
  }

  at(place) {
    return this.pages.get(Math.floor(place / PAGE))?.[place % PAGE] ?? null;
  }

  row(place) {
    const found = this.at(place);
    const top = `${place * ROW}px`;
    if (!found) return h(".row.waiting", { vars: { top } });
    const { span } = this;
    const open = state().rollout === found.rollout_id && state().at === String(found.iteration);
    const cells = {
      status: dot(found.status),
      iteration: found.iteration,
      group_id: found.group_id,
      sample: found.sample,
      environment: found.environment,
      reward: rewardCell(found.reward, span),
      advantage: h(`span.${found.advantage > 0 ? "pos" : found.advantage < 0 ? "neg" : "dim"}`, {}, signed(found.advantage)),
      turns: found.turns,
      generated_tokens: h("span.bar", { vars: { w: share(found.generated_tokens, span.tokens) } }, number(found.generated_tokens)),
      seconds: seconds(found.seconds),
      policy_version: found.policy_version === null ? "–" : found.policy_version,
      reason: outcome(found),
    };
    const before = place > 0 ? this.at(place - 1) : null;
    const again = before && before.group_id === found.group_id && before.iteration === found.iteration;
    const classes = `${again ? ".again" : ""}${place === this.cursor ? ".cursor" : ""}${open ? ".open" : ""}`;
    return h(`.row${classes}`, { role: "row", vars: { top }, onclick: () => this.open(place, false, found), "data-rollout": found.rollout_id },
      COLUMNS.map(([name]) => h(`.cell.c-${name}`, { title: ["group_id", "environment"].includes(name) ? found[name] : undefined }, cells[name])));
  }

  /** Move the cursor by so many rows; an open rollout follows it. */
  async move(step) {
    if (!this.matched) return;
    this.cursor = Math.min(this.matched - 1, Math.max(0, this.cursor < 0 ? (step > 0 ? 0 : this.matched - 1) : this.cursor + step));
    this.reveal(this.cursor);
    this.draw();
    if (state().rollout) this.open(this.cursor, true);
  }

  async open(place = this.cursor, quiet = false, given = null) {
    this.cursor = place < 0 ? 0 : place;
    let found = given ?? this.at(this.cursor);
    for (let wait = 0; !found && wait < 40; wait += 1) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      found = this.at(this.cursor);
    }
    if (found) this.onOpen(found, quiet);
    this.draw();
  }

  reveal(place) {
    const top = place * ROW;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top - ROW;
    else if (top + ROW > scrollTop + clientHeight) this.scroller.scrollTop = top - clientHeight + 2 * ROW;
  }
}

function share(value, largest) {
  return largest ? `${Math.round((100 * value) / largest)}%` : "0%";
}

export function rewardCell(reward, span = {}) {
  if (reward === null || reward === undefined) return h("span.dim", {}, "none");
  const low = Math.min(0, span.low ?? 0);
  const high = Math.max(span.high ?? 1, low + 1e-9);
  return h("span.rewardbar", { vars: { w: `${Math.round((100 * (reward - low)) / (high - low))}%` } }, h("b", {}, number(reward, 2)));
}

export function outcome(row) {
  if (row.status === "failed") return h("span.tag.bad", { title: row.failure_kind }, row.failure_code || "failed");
  if (row.reason) return h("span.tag.warn", { title: row.outcome }, row.reason.replaceAll("_", " "));
  return h(`span.tag${row.finish_reason === "stop" ? ".quiet" : ""}`, {}, row.finish_reason || row.status);
}
