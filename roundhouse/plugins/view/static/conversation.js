// A conversation as a person reads it: who said what, which tool was called with what, and what came back.

import { h, number, seconds } from "./dom.js";

const LONG = 6000;

/**
 * The items of a rollout. `turns` are its model calls; each run of the policy's items is one of them. `branch` gives the command that
 * continues the rollout from a turn.
 */
export function conversation(items, turns = [], { compact = false, branch = null } = {}) {
  if (!Array.isArray(items)) return h("pre.plain", {}, String(items ?? ""));
  const runs = grouped(items);
  const count = runs.filter((run) => run.policy).length;
  let turn = -1;
  return h(`.conversation${compact ? ".compact" : ""}`, {}, runs.map((run) => {
    if (!run.policy) return run.items.map(shown);
    turn += 1;
    return h("section.turn", {}, run.items.map(shown), !compact && count === turns.length && footer(turns[turn], branch));
  }));
}

function grouped(items) {
  const runs = [];
  for (const item of items) {
    const kind = item.type ?? "message";
    const policy = kind === "reasoning" || kind === "function_call" || (kind === "message" && item.role === "assistant");
    if (runs.length && runs.at(-1).policy && policy) runs.at(-1).items.push(item);
    else runs.push({ policy, items: [item] });
  }
  return runs;
}

function footer(turn, branch) {
  const command = branch && h("pre.code.command", { hidden: true }, branch(turn.turn));
  const show = () => {
    command.hidden = !command.hidden;
    if (!command.hidden) navigator.clipboard?.writeText(command.textContent).catch(() => getSelection().selectAllChildren(command));
  };
  return [h("footer", {}, `turn ${turn.turn}`, h("span", {}, `${number(turn.generated_tokens)} tokens`), h("span", {}, seconds(turn.latency_seconds)),
    h("span", {}, `version ${turn.policy_version}`), h("span", {}, turn.finish_reason), !turn.trained && h("span.tag.warn", {}, "not trained on"),
    command && h("button.more", { type: "button", title: "Show and copy the command that continues the rollout from this turn", onclick: show }, "branch")), command];
}

function shown(item) {
  const kind = item.type ?? "message";
  if (kind === "function_call") return call(item.name, item.arguments);
  if (kind === "function_call_output") return said("tool", body(item.output, "tool"));
  if (kind === "reasoning") return thought((item.summary ?? item.content ?? []).map((part) => part.text ?? "").join("\n"));
  if (kind === "message") return [said(item.role ?? "?", body(item.content, item.role)), (item.tool_calls ?? []).map((each) => call(each.function?.name, each.function?.arguments))];
  return said(kind, h("pre.code", {}, JSON.stringify(item, null, 1)));
}

function said(role, ...content) {
  return h(`article.said.by-${/^[a-z]+$/.test(role) ? role : "other"}`, {}, h("header", {}, role), content);
}

function call(name, parameters) {
  return h("article.said.by-call", {}, h("header", {}, "calls ", h("b", {}, name ?? "?")), h("pre.code", {}, pretty(parameters)));
}

function thought(text) {
  return text ? h("details.thought", {}, h("summary", {}, `thinking · ${number(text.length)} characters`), clipped(text)) : null;
}

function body(content, role) {
  const text = plain(content);
  if (role !== "assistant") return role === "tool" ? h("pre.code", {}, clippedText(pretty(text))) : clipped(text);
  const pieces = [];
  let rest = text;
  for (let found = rest.match(/<think>([\s\S]*?)<\/think>/); found; found = rest.match(/<think>([\s\S]*?)<\/think>/)) {
    pieces.push(clipped(rest.slice(0, found.index)), thought(found[1].trim()));
    rest = rest.slice(found.index + found[0].length);
  }
  return [...pieces, clipped(rest)];
}

function plain(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part?.text ?? (typeof part === "string" ? part : named(part))).join("");
  return JSON.stringify(content, null, 1);
}

function named(part) {
  const image = /^data:(image\/[^;]+);sha256,(.{12})/.exec(part?.image_url ?? "");
  return image ? `[${image[1]} ${image[2]}…] ` : `[${part?.type ?? "?"}]`;
}

function clippedText(text) {
  return text.length > LONG ? `${text.slice(0, LONG)}\n… ${number(text.length - LONG)} more characters` : text;
}

function clipped(text) {
  if (!text || text.length <= LONG) return text ? h("p", {}, text) : null;
  const paragraph = h("p", {}, clippedText(text));
  const more = h("button.more", { type: "button", onclick: () => { paragraph.textContent = text; more.remove(); } }, "show all");
  return [paragraph, more];
}

export function pretty(text) {
  if (typeof text !== "string") return JSON.stringify(text, null, 2);
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null ? JSON.stringify(value, null, text.length > 60 ? 2 : 0) : text;
  } catch {
    return text;
  }
}
