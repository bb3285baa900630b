// The tokens of a rollout, coloured by what is recorded of each.

import { empty, h, number, replace, signed } from "./dom.js";
import { address, go, state } from "./state.js";

export const CHANNELS = {
  mask: { label: "loss mask", about: "Coloured: the loss is computed on it" },
  logprob: { label: "log-probability", about: "The stronger, the less likely the policy found its own token" },
  advantage: { label: "advantage", about: "Green is made likelier, red less likely" },
  ratio: { label: "importance ratio", about: "Trainer's probability over the engine's, before the first update; 1 is agreement" },
  version: { label: "policy version", about: "Which weights said it" },
};
const SURPRISE = 5;

/** The whole tab: channels, legend, streams. */
export function tokenView(detail) {
  const { streams, missing } = detail;
  const now = state();
  const channel = CHANNELS[now.channel] ? now.channel : "mask";
  const stream = streams[Math.min(Number(now.sequence) || 0, streams.length - 1)];
  const choose = h(".channels", { role: "tablist" }, Object.entries(CHANNELS).map(([name, { label, about }]) =>
    h(`a.channel${name === channel ? ".on" : ""}${missing[name] ? ".none" : ""}`, { href: address({ channel: name }), title: missing[name] ?? about, onclick: follow({ channel: name }) }, label)));
  if (!stream || !stream.ids.length) return h(".tokenview", {}, choose, empty("No tokens", missing.mask ?? "The rollout has none."));
  const scale = scaleOf(channel, stream);
  const facts = h(".facts");
  return h(".tokenview", {},
    choose,
    missing[channel] ? h(".missing", {}, h("b", {}, `No ${CHANNELS[channel].label}. `), missing[channel]) : legend(channel, scale),
    streams.length > 1 && h(".streams", {}, streams.map((each, k) => h(`a.chip${each === stream ? ".on" : ""}`, { href: address({ sequence: k }), onclick: follow({ sequence: k }) }, each.sequence_id ?? `chain ${k}`))),
    !stream.texts && h(".missing", {}, "The run keeps no tokenizer.json: tokens are shown by their numbers."),
    body(stream, channel, scale, facts, detail.turns),
    facts);
}

function follow(changes) {
  return (event) => {
    event.preventDefault();
    go(changes, { quiet: true });
  };
}

function value(channel, stream, k) {
  if (channel === "ratio") {
    const [trainer, engine] = [stream.trainer_logprob?.[k], stream.logprob?.[k]];
    return typeof trainer === "number" && typeof engine === "number" ? trainer - engine : null;
  }
  if (channel === "mask") return stream.mask ? stream.mask[k] : null;
  return stream[channel]?.[k] ?? null;
}

function scaleOf(channel, stream) {
  const values = stream.ids.map((_, k) => value(channel, stream, k)).filter((found) => found !== null);
  const largest = Math.max(0, ...values.map(Math.abs));
  return { largest, versions: [...new Set(values)].sort((a, b) => a - b), reach: channel === "ratio" ? Math.max(largest, 0.01) : largest || 1 };
}

/** Class and strength of a token's colour. */
function colour(channel, found, scale) {
  if (found === null) return ["", 0];
  if (channel === "mask") return found ? ["t-mask", 34] : ["", 0];
  if (channel === "logprob") return ["t-logprob", Math.round(Math.sqrt(Math.min(1, Math.max(0, -found) / SURPRISE)) * 85)];
  if (channel === "version") return [`t-v${scale.versions.indexOf(found) % 6}`, 38];
  return [found > 0 ? "t-pos" : found < 0 ? "t-neg" : "", Math.round((Math.abs(found) / scale.reach) * 60)];
}

function legend(channel, scale) {
  const swatches = (...marks) => h(".legend.tokens", {}, marks.map(([kind, strength, text]) => [h(`i.tok.${kind}`, { vars: { v: `${strength}%` } }), text]));
  if (channel === "mask") return swatches(["t-mask", 34, "trained on"], ["t-none", 0, "prompt, tool output, template"]);
  if (channel === "logprob") return swatches(["t-logprob", 0, "p = 1"], ["t-logprob", 38, "p = 0.37"], ["t-logprob", 85, `p ≤ ${number(Math.exp(-SURPRISE))}`]);
  if (channel === "advantage") return swatches(["t-neg", 60, signed(-scale.reach)], ["t-pos", 60, signed(scale.reach)]);
  if (channel === "ratio") return swatches(["t-neg", 60, `÷ ${number(Math.exp(scale.reach))}`], ["t-pos", 60, `× ${number(Math.exp(scale.reach))}`], ["t-none", 0, `largest difference ${number(scale.largest)} nats`]);
  return swatches(...scale.versions.map((version, k) => [`t-v${k % 6}`, 38, `version ${version}`]));
}

function body(stream, channel, scale, facts, turns) {
  const blocks = [];
  let block = null;
  let key = null;
  stream.ids.forEach((id, k) => {
    const turn = stream.turn?.[k] ?? 0;
    const own = `${turn}:${stream.generated[k]}`;
    if (own !== key) {
      key = own;
      block = h(`.block${stream.generated[k] ? ".said" : ""}`, { "data-label": stream.generated[k] ? `turn ${turn}` : blocks.length ? "added" : "prompt" });
      blocks.push(block);
    }
    const text = stream.texts?.[k] ?? `${id} `;
    const [kind, strength] = colour(channel, value(channel, stream, k), scale);
    const token = h(`span.tok${kind ? `.${kind}` : ""}${/^<[|/]?[a-z_|]+>$/i.test(text) ? ".special" : ""}`, { "data-k": k, vars: strength ? { v: `${strength}%` } : {} }, visible(text));
    block.append(token);
  });
  const shown = h(".stream", { tabindex: "0" }, blocks);
  const tell = (event) => {
    const token = event.target.closest?.("[data-k]");
    if (token) replace(facts, factsOf(stream, Number(token.dataset.k), turns));
  };
  shown.addEventListener("mouseover", tell);
  shown.addEventListener("click", tell);
  replace(facts, h("span.dim", {}, `${number(stream.ids.length)} tokens, ${number(stream.generated.filter(Boolean).length)} generated. Point at one.`));
  return shown;
}

function visible(text) {
  if (!/[\n\t]/.test(text)) return text;
  return text.split(/(\n|\t)/).filter(Boolean).map((part) => (part === "\n" ? [h("em", {}, "⏎"), "\n"] : part === "\t" ? h("em", {}, "⇥") : part));
}

function factsOf(stream, k) {
  const facts = [["token", JSON.stringify(stream.texts?.[k] ?? "")], ["id", stream.ids[k]], ["position", k], ["turn", stream.turn?.[k]]];
  const engine = stream.logprob?.[k];
  if (typeof engine === "number") facts.push(["log-probability", number(engine, 4)], ["p", number(Math.exp(engine), 4)]);
  const difference = value("ratio", stream, k);
  if (difference !== null) facts.push(["trainer", number(stream.trainer_logprob[k], 4)], ["ratio", number(Math.exp(difference), 5)]);
  if (typeof stream.advantage?.[k] === "number") facts.push(["advantage", signed(stream.advantage[k], 3)]);
  if (typeof stream.version?.[k] === "number") facts.push(["version", stream.version[k]]);
  if (stream.mask) facts.push(["in the loss", stream.mask[k] ? "yes" : "no"]);
  return facts.map(([name, found]) => h("span", {}, h("small", {}, name), String(found ?? "–")));
}
