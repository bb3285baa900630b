// Two iterations, or two runs, on the tasks that both have.

import { empty, h, number, replace, signed } from "./dom.js";
import { column } from "./group.js";
import { ask } from "./source.js";
import { go, scope, state } from "./state.js";

const AT_ONCE = 400;

/** What a person wants to see first: the first and the last evaluation, or the first and the last training iteration. */
async function ends(run) {
  const curve = await ask("curve", { run, iteration: "all", stage: "collect" });
  const having = (stage) => curve.filter((point) => point.stages.includes(stage)).map((point) => point.iteration);
  const stage = having("evaluate").length > 1 || !having("collect").length ? "evaluate" : "collect";
  const [first, last] = [having(stage).at(0) ?? "all", having(stage).at(-1) ?? "all"];
  return { iteration: first, stage, b_run: run, b_iteration: last, b_stage: stage };
}

const other = (now) => ({ run: now.b_run || now.run, iteration: now.b_iteration || "all", stage: now.b_stage || now.stage });

export async function compareView(element, store) {
  if (!element.querySelector(".compare")) replace(element, h("section.compare", { "aria-busy": "true" }, empty("Comparing …", "The rollouts of both sides are being read.")));
  const now = state();
  if (!now.b_run && !now.b_iteration && !now.b_stage) {
    const found = await ends(now.run);
    return state() === now ? go(found, { quiet: true }) : undefined;
  }
  const sides = [scope(), other(now)];
  const iterations = await Promise.all(sides.map(({ run }) => ask("run", { run })));
  const picker = h(".pickers", {}, sides.map((side, k) => chooser(side, k ? "b_" : "", store.runs, iterations[k].iterations)));
  let found;
  try {
    found = await ask("compare", { ...sides[0], ...Object.fromEntries(Object.entries(sides[1]).map(([name, value]) => [`b_${name}`, value])) });
  } catch (error) {
    found = { error };
  }
  if (state() !== now) return undefined; // another view, or other sides, are shown by now
  if (found.error) return replace(element, h("section.compare", {}, picker, empty("These cannot be compared", found.error.message)));
  const { tasks, only_a: onlyA, only_b: onlyB } = found;
  const better = tasks.filter((row) => row.delta > 0).length;
  const worse = tasks.filter((row) => row.delta < 0).length;
  const mean = (side) => {
    const values = tasks.map((row) => row[side].reward).filter((value) => typeof value === "number");
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const summary = h(".comparison", {},
    h(".fact", {}, h("small", {}, "shared tasks"), h("b", {}, number(tasks.length))),
    h(".fact", {}, h("small", {}, "A"), h("b", {}, number(mean("a")))), h(".fact", {}, h("small", {}, "B"), h("b", {}, number(mean("b")))),
    h(".fact", {}, h("small", {}, "better in B"), h("b.pos", {}, number(better))), h(".fact", {}, h("small", {}, "worse"), h("b.neg", {}, number(worse))),
    h(".fact", {}, h("small", {}, "only in A · B"), `${number(onlyA)} · ${number(onlyB)}`));
  const list = tasks.length
    ? h(".tasks", {}, tasks.slice(0, AT_ONCE).map((row) => line(row, now.task === row.task)))
    : empty("No task in common", "Training iterations draw different tasks. Evaluations share theirs: choose stage evaluate on both sides.");
  const beside = h(".beside");
  replace(element, h("section.compare", {}, picker, summary, h(".comparebody", {}, list, beside)));
  if (now.task) await sideBySide(beside, sides, now.task);
  else if (tasks.length) replace(beside, empty("Choose a task", "Its rollouts on both sides are shown here."));
  return undefined;
}

async function sideBySide(element, sides, task) {
  const found = await Promise.all(sides.map((side) => ask("group", { ...side, of: task, exact: "0" })));
  replace(element, found.map(({ rollouts }, k) => h("section.side", {},
    h("h3", {}, k ? "B" : "A", h("small", {}, `${sides[k].run} · ${sides[k].iteration} · ${sides[k].stage}`)),
    h(".columns", {}, rollouts.slice(0, 16).map((row) => column(row, { view: "rollouts", ...sides[k], rollout: row.rollout_id, at: row.iteration, tab: "conversation" }))))));
}

function chooser(side, prefix, runs, iterations) {
  const pick = (name, options) => h("select", { "aria-label": `${prefix ? "B" : "A"} ${name}`, onchange: (event) => go({ [`${prefix}${name}`]: event.target.value, task: "" }) },
    options.map(([value, label]) => h("option", { value, selected: String(side[name]) === String(value) }, label)));
  return h(".picker", {}, h("b", {}, prefix ? "B" : "A"), pick("run", runs.map(({ run_id: id }) => [id, id])),
    pick("iteration", [["all", "all iterations"], ...iterations.map((k) => [k, `iteration ${k}`])]),
    pick("stage", [["collect", "collect"], ["evaluate", "evaluate"]]));
}

function line(row, open) {
  const at = (value) => `${Math.round(100 * Math.max(0, Math.min(1, value ?? 0)))}%`;
  const [a, b] = [row.a.reward, row.b.reward];
  return h(`button.task${open ? ".on" : ""}`, { type: "button", onclick: () => go({ task: open ? "" : row.task }, { quiet: true }) },
    h("span.name", { title: row.task }, row.task), h("span.n", {}, `${row.a.n} · ${row.b.n}`),
    h(`span.dumbbell.${row.delta > 0 ? "up" : row.delta < 0 ? "down" : "same"}`, { vars: { a: at(Math.min(a, b)), b: at(Math.max(a, b)), from: at(a), to: at(b) } }, h("i"), h("i.to")),
    h(`b.${row.delta > 0 ? "pos" : row.delta < 0 ? "neg" : "dim"}`, {}, signed(row.delta)),
    h("small", {}, `${number(a, 2)} → ${number(b, 2)}`));
}
