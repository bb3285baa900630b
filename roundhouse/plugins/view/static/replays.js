// Recorded stages that ran again: what was substituted, which stages differ, and why.

import { empty, h, moment, number, replace } from "./dom.js";
import { ask } from "./source.js";
import { state } from "./state.js";

const METRICS = 8;

export async function replaysView(element) {
  const asked = state();
  const { run } = asked;
  const found = await ask("replays", { run }, { fresh: true });
  if (state() !== asked) return undefined; // another view, or another run, is shown by now
  if (!found.length) {
    return replace(element, empty("No replay of this run", `roundhouse replay ${run} --iterations 1:3 runs recorded stages again and compares them.`));
  }
  return replace(element, h("section.replays", {}, found.map(replayed)));
}

function replayed({ name, created_at: created, request, comparison }) {
  const substituted = [...request.set, ...Object.entries(request.inputs).map(([key, value]) => `${key}=${value}`)];
  const [first, last] = request.iterations;
  return h("article.replay", {},
    h("header", {}, h("h2", {}, name), h("span.dim", {}, `${request.stages.join(", ")} of ${first === last ? `iteration ${first}` : `iterations ${first} to ${last}`} · ${moment(created)}`)),
    h(".components", {}, substituted.length ? substituted.map((text) => h("span.tag", {}, text)) : h("span.dim", {}, "nothing substituted")),
    comparison?.stopped && h(".notice.warn", {}, h("b", {}, `Stopped by the drift gate at iteration ${comparison.stopped.iteration}`), h("p", {}, comparison.stopped.reasons.join("; "))),
    comparison ? h(".evidence", {}, comparison.stages.map((stage) => compared(stage))) : h("p.dim", {}, "It has not finished; the same command resumes it."));
}

const MEANING = { equal: ["tag", "equal"], differs: ["tag.warn", "differs"], distribution: ["tag", "sampled anew"] };

function compared(stage) {
  const [look, says] = MEANING[stage.outcome];
  const rows = Object.entries(stage.rows).map(([dataset, { before, after, changed, columns }]) =>
    `${dataset}: ${number(changed)} of ${number(before)} rows changed${after === before ? "" : `, ${number(after)} rows now`}${columns.length ? ` (${columns.join(", ")})` : ""}`);
  const metrics = Object.entries(stage.metrics).map(([name, [before, after]]) => [name, before, after]);
  const means = Object.entries(stage.distribution).map(([name, { before, after }]) => [name, before, after]);
  const changes = [...metrics, ...means];
  return h(".compared", {},
    h("b", {}, `${stage.stage} ${stage.iteration}`), h(`span.${look}`, {}, says),
    h("div", {}, [...stage.because, ...rows, ...stage.weights.map((file) => `other weights in ${file}`)].map((line) => h("p", {}, line))),
    h("dl", {}, changes.slice(0, METRICS).map(([name, before, after]) => [h("dt", {}, name), h("dd", {}, `${number(before)} → ${number(after)}`)]),
      changes.length > METRICS && [h("dt.dim", {}, `${changes.length - METRICS} more`), h("dd")]));
}
