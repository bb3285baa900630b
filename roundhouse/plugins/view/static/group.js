// The rollouts of a group beside one another.

import { conversation } from "./conversation.js";
import { dot, h, number, signed } from "./dom.js";
import { ask } from "./source.js";
import { address, go, scope } from "./state.js";
import { outcome } from "./table.js";

/** All samples that a group has in an iteration, each a column. */
export async function groupView(group, iteration) {
  const { rollouts: own } = await ask("group", { ...scope(), of: group, of_iteration: iteration });
  const rewards = own.filter((row) => row.status !== "masked").map((row) => row.reward).filter((reward) => typeof reward === "number");
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
  return [
    h(".groupnote", {}, `${own.length} samples, mean reward ${number(rewards.length ? mean : null)}`,
      rewards.length > 1 && rewards.every((reward) => reward === rewards[0]) && h("span.tag.warn", {}, "no spread: the group teaches nothing")),
    h(".columns", {}, own.map((row) => column(row, { rollout: row.rollout_id, at: row.iteration, tab: "conversation" }))),
  ];
}

/** One rollout as a column; `target` is where a click on its head leads. */
export function column(row, target) {
  return h("section.column", {},
    h("a.columnhead", target ? { href: address(target), onclick: (event) => { event.preventDefault(); go(target); } } : {},
      dot(row.status), h("b", {}, `#${row.sample}`),
      h(`span.score${row.reward > 0 ? ".pos" : ""}`, {}, row.reward === null ? "no reward" : number(row.reward)),
      typeof row.advantage === "number" && h(`span.${row.advantage > 0 ? "pos" : row.advantage < 0 ? "neg" : "dim"}`, {}, signed(row.advantage)),
      outcome(row)),
    conversation(row.messages, [], { compact: true }));
}
