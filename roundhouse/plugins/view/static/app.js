// The page: what stands where, which change draws what, and the keys.

import { compareView } from "./compare.js";
import { empty, h, number, refresh, replace, svg } from "./dom.js";
import { clear, FilterBar } from "./filters.js";
import { quarantineView } from "./quarantine.js";
import { replaysView } from "./replays.js";
import { RolloutPane } from "./rollout.js";
import { ask, exportInfo, forget, isExport } from "./source.js";
import { address, FILTERS, followHistory, go, isDataset, onChange, scope, state } from "./state.js";
import { Table } from "./table.js";
import { Timeline } from "./timeline.js";

const KEYS = [
  ["j / k", "next, previous rollout"], ["enter", "open"], ["esc", "close, then clear the filters"], ["/", "search"],
  ["[ ]", "previous, next sample of the group"], ["tab 1–4", "conversation, tokens, group, task"], ["m l a r v", "colour: mask, log-probability, advantage, ratio, version"],
  ["← →", "previous, next iteration"], ["q", "quarantine"], ["c", "compare"], ["t", "dark or light"], ["?", "these keys"],
];
const AGAIN_SECONDS = 8;

const timeline = new Timeline();
const bar = new FilterBar();
const pane = new RolloutPane();
const table = new Table((row, quiet) => go({ rollout: row.rollout_id, at: row.iteration, sequence: "" }, { quiet: quiet || Boolean(state().rollout) }));
const top = h("header.top");
const notices = h(".notices", { role: "status" });
const other = h("main.other");
const list = h("main.list", {}, bar.element, table.element);
const help = h("dialog.help", { onclick: () => help.close() }, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])));
let store = null;

function drawTop() {
  const now = state();
  const run = store.runs.find((each) => each.run_id === now.run);
  const link = (view, label) => h(`a.view${now.view === view ? ".on" : ""}`, { href: address({ view }), onclick: (event) => { event.preventDefault(); go({ view }); } }, label);
  const stage = (name) => h(`a.view${now.stage === name ? ".on" : ""}`, { href: address({ stage: name }), onclick: (event) => { event.preventDefault(); go({ stage: name, rollout: "", at: "", reason: "" }); } }, name);
  refresh(top, h("header.top", {},
    h("a.brand", { href: address({ view: "rollouts", rollout: "", at: "" }), title: store.store }, logo(), "roundhouse"),
    store.runs.length > 1
      ? h("select.run", { "aria-label": "Run", onchange: (event) => go({ ...Object.fromEntries(FILTERS.map((name) => [name, ""])), run: event.target.value, iteration: "", ...(isDataset(event.target.value) ? { stage: "collect" } : {}), rollout: "", at: "", task: "" }) }, store.runs.map(({ run_id: id }) => h("option", { value: id, selected: id === now.run }, id.replace(/^datasets\//, "dataset "))))
      : h("b.run", {}, run?.run_id ?? now.run),
    h("span.iteration", {}, (now.iteration || "all") === "all" ? (isDataset(now.run) ? "all versions" : "all iterations") : timeline.name(now.iteration)),
    !isExport && !isDataset(now.run) && h("nav.switch", { "aria-label": "Stage" }, stage("collect"), stage("evaluate")),
    h("nav.views", {}, link("rollouts", "Rollouts"), link("quarantine", "Quarantine"), !isExport && link("compare", "Compare"), !isExport && !isDataset(now.run) && link("replays", "Replays")),
    h("button.icon", { type: "button", title: "Dark or light (t)", "aria-label": "Dark or light", onclick: switchTheme }, "◐"),
    h("button.icon", { type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: () => help.showModal() }, "?")));
}

function logo() {
  const spokes = [0, 45, 90, 135, 180, 225, 270, 315].map((angle) => svg("line", { x1: 12, y1: 1.5, x2: 12, y2: 6, transform: `rotate(${angle} 12 12)` }));
  return svg("svg.logo", { viewBox: "0 0 24 24", width: 22, height: 22, "aria-hidden": "true" }, spokes, svg("circle", { cx: 12, cy: 12, r: 5.2 }), svg("line.bridge", { x1: 12, y1: 7, x2: 12, y2: 17, transform: "rotate(30 12 12)" }));
}

function tellStages(stages = {}) {
  const of = (state().iteration || "all") === "all" ? "some iterations" : timeline.name(state().iteration);
  const open = Object.entries(stages).filter(([, how]) => how !== "complete");
  if (ended) replace(notices, h("span", {}, endText(ended)));
  else replace(notices, open.map(([name, how]) => h("span", {}, how === "unfinished" ? `${name} of ${of} is not complete: what is there so far` : `${name} of ${of} has not run`)));
  return open.length > 0;
}

async function loadRows() {
  const facets = await bar.load();
  const page = await table.load(facets.span);
  clearTimeout(waiting);
  if (tellStages(page.stages) && !isExport) waiting = setTimeout(again, AGAIN_SECONDS * 1000);
}

/** How a run ended that no process works on. */
function endText({ state: how, seconds, stage, iteration }) {
  const ago = seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
  return `${how} ${ago} ago${stage ? ` in ${stage} of iteration ${iteration}` : ""}`;
}

let waiting = 0;
let ended = null;

/** Look again at an iteration that is still being made, while its first rows are in sight. */
function again() {
  if (document.hidden || state().view !== "rollouts" || table.scroller.scrollTop > 0) {
    waiting = setTimeout(again, AGAIN_SECONDS * 1000);
    return undefined;
  }
  forget();
  return guarded(loadRows)();
}

function guarded(work) {
  return async (...values) => {
    try {
      document.body.classList.add("busy");
      return await work(...values);
    } catch (error) {
      if (error.name !== "AbortError") replace(notices, h("span.bad", {}, error.message));
      return undefined;
    } finally {
      document.body.classList.remove("busy");
    }
  };
}

let shown = {};

/** Draw what differs from what is shown. */
async function changed(now) {
  if (!now.run || !now.iteration) return start();
  const before = shown;
  shown = now;
  const differs = (...names) => names.some((name) => now[name] !== before[name]);
  const rows = differs("run", "view", "iteration", "stage", "sort", ...FILTERS);
  drawTop();
  document.body.dataset.view = now.view;
  if (differs("run")) guarded(async () => { await timeline.load(store.runs.find((run) => run.run_id === now.run)?.currency); drawTop(); })();
  else if (differs("iteration", "stage")) timeline.draw();
  if (now.view === "quarantine") return quarantineView(other);
  if (now.view === "replays") return replaysView(other);
  if (now.view === "compare") {
    if (before.view !== "compare") replace(other);
    return compareView(other, store);
  }
  if (rows) await Promise.all([loadRows(), pane.load()]);
  else if (differs("rollout", "at")) await pane.load();
  else if (differs("tab", "channel", "sequence")) await pane.draw();
  table.draw();
  return undefined;
}

/** Everything from the start: which run, which iteration, then its rows. */
async function start() {
  store = await ask("store");
  const now = state();
  if (!store.runs.length) return replace(document.body, top, empty("No runs in this store", store.store, "Start one with `roundhouse quickstart`, or give --store."));
  const run = now.run || store.runs[0].run_id;
  const answer = await ask("run", { run }, { fresh: true });
  const { iterations, newest } = answer;
  ended = answer.ended;
  const first = newest ?? iterations.at(-1) ?? "all";
  go({ run, iteration: now.iteration || first, stage: isExport ? exportInfo.stage : now.stage }, { quiet: true });
  return undefined;
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* a page from a file may not keep anything */ }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function onKey(event) {
  if (event.metaKey || event.ctrlKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (help.open) return;
  const channels = { m: "mask", l: "logprob", a: "advantage", r: "ratio", v: "version" };
  const tabs = { 1: "conversation", 2: "tokens", 3: "group", 4: "task" };
  const { key } = event;
  const inRows = state().view === "rollouts";
  const actions = {
    j: () => inRows && table.move(1), ArrowDown: () => inRows && table.move(1), k: () => inRows && table.move(-1), ArrowUp: () => inRows && table.move(-1),
    Enter: () => inRows && table.open(), Escape: back, "/": () => { go({ view: "rollouts" }, { quiet: true }); bar.search.focus(); },
    "[": () => pane.step(-1, "sample"), "]": () => pane.step(1, "sample"), ArrowLeft: () => timeline.step(-1), ArrowRight: () => timeline.step(1),
    q: () => go({ view: state().view === "quarantine" ? "rollouts" : "quarantine" }), c: () => !isExport && go({ view: state().view === "compare" ? "rollouts" : "compare" }),
    t: switchTheme, "?": () => help.showModal(),
  };
  const onLink = (key === "Enter") && /^(A|BUTTON|SUMMARY)$/.test(event.target.tagName);
  if (channels[key] && state().rollout) go({ tab: "tokens", channel: channels[key] }, { quiet: true });
  else if (tabs[key] && state().rollout) go({ tab: tabs[key] }, { quiet: true });
  else if (actions[key] && !onLink) actions[key]();
  else return;
  event.preventDefault();
}

function back() {
  if (state().view !== "rollouts") go({ view: "rollouts", task: "" });
  else if (state().rollout) go({ rollout: "", at: "" });
  else if (FILTERS.some((name) => state()[name])) clear();
}

function begin() {
  try { if (localStorage.getItem("theme")) setTheme(localStorage.getItem("theme")); } catch { /* as above */ }
  document.body.append(top, timeline.element, notices, h(".stage", {}, list, pane.element, other), help);
  if (isExport) document.body.append(h("footer.exported", {}, `Exported ${exportInfo.at}: ${exportInfo.run}, iteration ${exportInfo.iteration}, ${number(exportInfo.rollouts)} of ${number(exportInfo.total)} rollouts`));
  document.body.dataset.view = state().view;
  onChange(guarded(changed));
  followHistory();
  addEventListener("keydown", onKey);
  guarded(start)().then(() => document.body.classList.add("ready"));
}

begin();
