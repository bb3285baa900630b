// What is shown. Invariant: all of it stands in the address, so that a link, the back button and a reload show the same.

export const FILTERS = ["environment", "status", "reason", "code", "learning", "group", "reward_min", "reward_max", "tokens_min", "tokens_max", "q"];
const NAMES = [
  "view", "run", "iteration", "stage", ...FILTERS, "sort", "rollout", "at", "tab", "channel", "sequence",
  "b_run", "b_iteration", "b_stage", "task",
];
const DEFAULTS = { view: "rollouts", stage: "collect", tab: "conversation", channel: "mask" };

const listeners = [];
let current = read();

function read() {
  const found = new URLSearchParams(location.protocol === "file:" ? location.hash.slice(1) : location.search);
  return Object.fromEntries(NAMES.map((name) => [name, found.get(name) ?? DEFAULTS[name] ?? ""]));
}

export const state = () => current;

/** A dataset stands among the runs; its versions stand for iterations. */
export const isDataset = (run) => run.startsWith("datasets/");

/** The address of a state that differs from the current one by `changes`. */
export function address(changes = {}) {
  const wanted = { ...current, ...changes };
  const named = NAMES.filter((name) => wanted[name] !== "" && wanted[name] !== undefined && wanted[name] !== DEFAULTS[name]);
  const text = new URLSearchParams(named.map((name) => [name, String(wanted[name])])).toString();
  return location.protocol === "file:" ? `#${text}` : text ? `?${text}` : location.pathname;
}

/** Change what is shown; `quiet` leaves no trace in the history (moving along rows, typing). */
export function go(changes, { quiet = false } = {}) {
  const before = current;
  const target = address(changes);
  current = { ...current, ...Object.fromEntries(Object.entries(changes).map(([name, value]) => [name, String(value ?? "")])) };
  for (const name of NAMES) if (current[name] === "" && DEFAULTS[name]) current[name] = DEFAULTS[name];
  history[quiet ? "replaceState" : "pushState"](null, "", target);
  for (const listener of listeners) listener(current, before);
}

export function onChange(listener) {
  listeners.push(listener);
}

export function followHistory() {
  const follow = () => {
    const before = current;
    current = read();
    for (const listener of listeners) listener(current, before);
  };
  addEventListener("popstate", follow);
}

/** The scope as parameters of a request. */
export function scope(from = current) {
  return { run: from.run, iteration: from.iteration || "all", stage: from.stage };
}

export function filters(from = current) {
  const found = Object.fromEntries(FILTERS.filter((name) => from[name] !== "").map((name) => [name, from[name]]));
  return from.sort ? { ...found, sort: from.sort } : found;
}
