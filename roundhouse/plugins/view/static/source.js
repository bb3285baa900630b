// Where the page's data come from: the server, or the data in a page that was exported.

const embedded = document.getElementById("exported");
const exported = embedded ? JSON.parse(embedded.textContent) : null;
const answers = new Map();
const KEPT = 200;

export const isExport = exported !== null;
export const exportInfo = exported?.info ?? null;

/** The answer to a question, as the server gives it. Complete iterations never change, so answers are kept a while. */
export async function ask(name, parameters = {}, { signal, fresh = false } = {}) {
  if (exported) return fromExport(name, parameters);
  const query = new URLSearchParams(parameters).toString();
  const url = `/api/${name}${query ? `?${query}` : ""}`;
  if (!fresh && answers.has(url)) return answers.get(url);
  const response = await fetch(url, { signal });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? `${response.status} ${response.statusText}`);
  answers.set(url, answer);
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  return answer;
}

export function forget() {
  answers.clear();
}

function fromExport(name, parameters) {
  if (name === "rollouts") return pageOf(parameters);
  if (name === "facets") return { ...exported.facets, histogram: histogram(matching(parameters), exported.facets.span) };
  if (name === "rollout") {
    const found = exported.rollout[parameters.rollout];
    if (!found) throw new Error(`${parameters.rollout} is not in this export.`);
    return found;
  }
  if (name === "group") return { group: parameters.of, rollouts: groupOf(parameters.of) };
  if (name in exported) return exported[name];
  throw new Error("An exported page holds one iteration. `roundhouse view` shows the rest.");
}

function groupOf(group) {
  const members = exported.rows.filter((row) => row.group_id === group);
  return members.map((row) => ({ ...row, ...(exported.rollout[row.rollout_id]?.rollout ?? {}) }));
}

function pageOf(parameters) {
  const found = sorted(matching(parameters), parameters.sort ?? "");
  const offset = Number(parameters.offset ?? 0);
  const position = parameters.find ? found.findIndex((row) => row.rollout_id === parameters.find) : -1;
  return {
    total: exported.rows.length,
    matched: found.length,
    offset,
    rows: found.slice(offset, offset + Number(parameters.limit ?? 200)),
    stages: exported.stages,
    position: position < 0 ? null : position,
  };
}

function matching(wanted) {
  const among = (name, column) => !wanted[name] || wanted[name].split(",");
  const lists = { environment: "environment", status: "status", reason: "reason", code: "failure_code" };
  const text = (wanted.q ?? "").toLowerCase();
  const signal = new Set(exported.rows.filter((row) => row.advantage).map((row) => row.group_id));
  const learning = {
    trained: (row) => Boolean(row.advantage),
    collapsed: (row) => exported.rows.some((each) => each.group_id === row.group_id && each.advantage === 0) && !signal.has(row.group_id),
    refused: (row) => Boolean(row.reason),
  };
  return exported.rows.filter((row) => {
    if (wanted.learning && !learning[wanted.learning](row)) return false;
    for (const [name, column] of Object.entries(lists)) if (among(name) !== true && !among(name).includes(row[column])) return false;
    if (wanted.group && row.group_id !== wanted.group) return false;
    for (const [name, column] of [["reward", "reward"], ["tokens", "generated_tokens"]]) {
      if (wanted[`${name}_min`] && !(row[column] !== null && row[column] >= Number(wanted[`${name}_min`]))) return false;
      if (wanted[`${name}_max`] && !(row[column] !== null && row[column] <= Number(wanted[`${name}_max`]))) return false;
    }
    return !text || exported.text[row.rollout_id].includes(text);
  });
}

function sorted(rows, sort) {
  if (!sort) return rows;
  const column = sort.replace(/^-/, "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const rank = (value) => (value === null || value === undefined ? 1 : 0);
  return [...rows].sort((a, b) => {
    const [x, y] = [a[column], b[column]];
    return rank(x) - rank(y) || (x < y ? -sign : x > y ? sign : 0);
  });
}

function histogram(rows, span) {
  if (span.low === null) return [];
  const count = span.high > span.low ? 24 : 1;
  const width = (span.high - span.low) / count || 1;
  const bins = Array.from({ length: count }, (_, k) => ({ low: span.low + k * width, high: span.low + (k + 1) * width, n: 0 }));
  for (const row of rows) if (row.reward !== null) bins[Math.min(count - 1, Math.floor((row.reward - span.low) / width))].n += 1;
  return bins;
}
