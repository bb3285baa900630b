// One rollout: verdict, conversation, tokens, group.

import { conversation, pretty } from "./conversation.js";
import { dot, empty, h, moment, number, replace, seconds, signed } from "./dom.js";
import { groupView } from "./group.js";
import { ask } from "./source.js";
import { address, go, isDataset, scope, state } from "./state.js";
import { tokenView } from "./tokens.js";

const TABS = { conversation: "Conversation", tokens: "Tokens", group: "Group", task: "Task & record" };

export class RolloutPane {
  constructor() {
    this.element = h("aside.pane", { "aria-label": "Rollout", tabindex: "-1" });
    this.detail = null;
    this.generation = 0;
  }

  async load() {
    const now = state();
    const generation = ++this.generation;
    document.body.classList.toggle("with-pane", Boolean(now.rollout));
    if (!now.rollout) {
      this.detail = null;
      return replace(this.element);
    }
    try {
      const found = await ask("rollout", { ...scope(), rollout: now.rollout, rollout_iteration: now.at || now.iteration });
      if (generation !== this.generation) return undefined;
      this.detail = found;
      return await this.draw();
    } catch (error) {
      return replace(this.element, empty("This rollout cannot be shown", error.message));
    }
  }

  async draw() {
    if (!this.detail) return;
    const { detail } = this;
    const tab = TABS[state().tab] ? state().tab : "conversation";
    const content = h(`.tab.tab-${tab}`);
    replace(this.element, heading(detail), verdict(detail), tabs(tab), content);
    if (tab === "conversation") replace(content, conversation(detail.rollout.messages, detail.turns, { branch: branchOf(detail) }));
    if (tab === "tokens") replace(content, tokenView(detail));
    if (tab === "task") replace(content, record(detail));
    if (tab === "group") replace(content, await groupView(detail.rollout.group_id, detail.iteration));
  }

  /** The next tab, or the next sample of the group. */
  step(by, what) {
    if (!this.detail) return;
    if (what === "tab") {
      const names = Object.keys(TABS);
      go({ tab: names[(names.indexOf(state().tab) + by + names.length) % names.length] }, { quiet: true });
    } else {
      const { siblings, rollout } = this.detail;
      const place = siblings.findIndex((other) => other.rollout_id === rollout.rollout_id);
      const next = siblings[(place + by + siblings.length) % siblings.length];
      if (next) go({ rollout: next.rollout_id, sequence: "" }, { quiet: true });
    }
  }
}

function follow(changes) {
  return (event) => {
    if (event.metaKey || event.ctrlKey) return;
    event.preventDefault();
    go(changes, { quiet: true });
  };
}

function heading({ rollout, iteration, label, stage, run_id, siblings }) {
  return h("header.panehead", {},
    h(".title", {}, h("h2", {}, rollout.group_id, h("small", {}, ` / ${rollout.sample}`)),
      h("button.close", { type: "button", title: "Close (esc)", "aria-label": "Close", onclick: () => go({ rollout: "", at: "" }) }, "×")),
    h(".where", {}, `${run_id} · ${label || `iteration ${iteration}`} · ${stage} · ${rollout.environment} · ${moment(rollout.started_at)}`),
    h("nav.siblings", { "aria-label": "Samples of the group" }, siblings.map((other) =>
      h(`a.sibling.is-${other.status}${other.rollout_id === rollout.rollout_id ? ".on" : ""}${other.reason ? ".refused" : ""}`, {
        href: address({ rollout: other.rollout_id }), onclick: follow({ rollout: other.rollout_id, sequence: "" }),
        title: `sample ${other.sample}: ${other.status}, reward ${number(other.reward)}${other.reason ? `, ${other.reason}` : ""}`,
        vars: { r: `${Math.round(100 * Math.max(0, Math.min(1, other.reward ?? 0)))}%` },
      }, other.sample))));
}

function verdict({ rollout, quarantine, columns, turns }) {
  const advantages = columns.map((row) => row.advantage).filter((value) => typeof value === "number");
  const fact = (name, ...value) => h(".fact", {}, h("small", {}, name), ...value);
  const parts = rollout.reward_components ?? {};
  const wanted = Object.entries(typeof rollout.task === "object" && rollout.task ? rollout.task : {})
    .filter(([name, value]) => name !== "task_id" && (typeof value === "number" || (typeof value === "string" && value.length <= 60))).slice(0, 3);
  return h("section.verdict", {},
    h(".facts", {},
      h(`.fact.reward${rollout.reward > 0 ? ".pos" : ""}`, {}, h("small", {}, "reward"), h("b", {}, rollout.reward === null ? "none" : number(rollout.reward))),
      fact("status", dot(rollout.status), rollout.status),
      advantages.length > 0 && fact("advantage", h(`span.${advantages[0] > 0 ? "pos" : advantages[0] < 0 ? "neg" : "dim"}`, {}, signed(advantages[0]))),
      fact("ended by", rollout.finish_reason || "–"),
      fact("turns", number(rollout.turns)),
      fact("tokens", `${number(rollout.generated_tokens)} of ${number(rollout.total_tokens)}`),
      fact("time", seconds(rollout.seconds)),
      fact("version", rollout.policy_version_first === rollout.policy_version_last ? number(rollout.policy_version_first) : `${rollout.policy_version_first}–${rollout.policy_version_last}`),
      wanted.map(([name, value]) => fact(`task: ${name.replaceAll("_", " ")}`, String(value))),
      rollout.attempt > 1 && fact("attempt", number(rollout.attempt))),
    Object.keys(parts).length > 0 && h(".components", {}, Object.entries(parts).map(([name, value]) => h("span.tag", {}, `${name} ${number(value)}`))),
    rollout.failure_code && h(".notice.bad", {}, h("b", {}, `${rollout.failure_kind ?? ""} failure: ${rollout.failure_code}`), h("p", {}, rollout.failure_detail)),
    quarantine && h(".notice.warn", {}, h("b", {}, `Kept from training (${quarantine.outcome}): ${quarantine.reason}`),
      h("p", {}, quarantine.evidence, quarantine.turn !== null && ` Turn ${quarantine.turn}.`)));
}

/** The command that continues a collected rollout of a run from a turn; null for others, which have none. */
function branchOf({ rollout, iteration, stage, run_id: run }) {
  if (stage !== "collect" || isDataset(run)) return null;
  const quoted = (text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
  return (turn) => `roundhouse branch ${quoted(run)} --iteration ${iteration} --rollout ${quoted(rollout.rollout_id)} --turn ${turn} --name branches`;
}

function tabs(chosen) {
  return h("nav.tabs", { role: "tablist" }, Object.entries(TABS).map(([name, label]) =>
    h(`a${name === chosen ? ".on" : ""}`, { role: "tab", "aria-selected": String(name === chosen), href: address({ tab: name }), onclick: follow({ tab: name }) }, label)));
}

function record({ rollout, turns, columns, complete }) {
  const { responses_create_params: asked, ...task } = typeof rollout.task === "object" && rollout.task ? rollout.task : { task: rollout.task };
  const names = ["rollout_id", "seed", "attempt", "policy_version_first", "policy_version_last", "generation_seconds", "environment_seconds", "seconds"];
  return [
    h("h3", {}, "Task"), h("pre.code", {}, pretty(task)),
    asked && h("details", {}, h("summary", {}, `request${asked.tools ? `, ${asked.tools.length} tools` : ""}`), h("pre.code", {}, pretty(asked))),
    h("h3", {}, "Metrics"), definitions({ ...rollout.metrics, ...rollout.reward_components }),
    h("h3", {}, "Turns"), rows(turns, ["turn", "parent", "prompt_length", "new_tokens", "generated_tokens", "policy_version", "finish_reason", "latency_seconds", "trained"]),
    columns.length > 0 && [h("h3", {}, "In training"), rows(columns, Object.keys(columns[0]).filter((name) => !["rollout_id", "group_id"].includes(name)))],
    h("h3", {}, "Record"), definitions(Object.fromEntries(names.map((name) => [name, rollout[name]]))),
    h("h3", {}, "Stages"), definitions(Object.fromEntries(Object.entries(complete).map(([name, done]) => [name, done ? "complete" : "not complete"]))),
  ];
}

export function definitions(values) {
  return h("dl", {}, Object.entries(values).map(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : String(value ?? "–"))]));
}

export function rows(found, names) {
  return h(".wide", {}, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name.replaceAll("_", " "))))),
    h("tbody", {}, found.map((row) => h("tr", {}, names.map((name) => h("td", {}, typeof row[name] === "number" ? number(row[name]) : String(row[name] ?? "–"))))))));
}
