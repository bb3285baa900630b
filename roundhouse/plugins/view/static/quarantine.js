// What did not reach training, and why.

import { empty, h, number, replace } from "./dom.js";
import { ask } from "./source.js";
import { address, go, scope, state } from "./state.js";

const AT_ONCE = 300;

export async function quarantineView(element) {
  if (state().stage === "evaluate") {
    return replace(element, empty("No quarantine", "Held-out rollouts are not trained on, so none is refused."));
  }
  const asked = state();
  const { stages, reasons, failed, rows } = await ask("quarantine", scope());
  if (state() !== asked) return undefined; // another view, or another scope, is shown by now
  if (stages.validate !== "complete") {
    const note = stages.validate === "unfinished" ? "has begun and is not complete" : "has not run";
    if (!rows.length) return replace(element, empty("Not validated yet", `Stage validate ${note}: what it will refuse is not known.`), failures(failed));
  }
  if (!rows.length) return replace(element, empty("Nothing was refused", "Every rewarded rollout became training sequences."), failures(failed));
  const chosen = state().reason;
  const shown = rows.filter((row) => !chosen || row.reason === chosen);
  return replace(element, h("section.quarantine", {},
    h("h2", {}, "Kept from training"),
    h(".reasons", {}, reasons.map(({ reason, outcome, n }) => h(`button.reason${chosen === reason ? ".on" : ""}`, { type: "button", onclick: () => go({ reason: chosen === reason ? "" : reason }) },
      h("b", {}, number(n)), h("span", {}, reason.replaceAll("_", " ")), h("small", {}, outcome)))),
    failures(failed),
    h(".evidence", {}, shown.slice(0, AT_ONCE).map(line)),
    shown.length > AT_ONCE && h("p.dim", {}, `${number(shown.length - AT_ONCE)} more: choose a reason, or filter the table.`)));
}

function failures(failed) {
  if (!failed.length) return null;
  return h(".reasons", {}, failed.map(({ value, n }) => h("button.reason.bad", { type: "button", onclick: () => go({ view: "rollouts", code: value, reason: "" }) },
    h("b", {}, number(n)), h("span", {}, value.replaceAll("_", " ")), h("small", {}, "failed"))));
}

function line(row) {
  const target = { view: "rollouts", rollout: row.rollout_id, at: row.iteration, reason: "" };
  return h("a.refusal", { href: address(target), onclick: (event) => { event.preventDefault(); go(target); } },
    h("span.tag.warn", {}, row.reason.replaceAll("_", " ")), h("b", {}, row.rollout_id), h("span.dim", {}, `iteration ${row.iteration}${row.turn === null ? "" : `, turn ${row.turn}`}`), h("p", {}, row.evidence));
}
