// The box: its processors, memory by owner, heat and power; queues, punctuality, and why nothing is learned if so.

import { byId, bytes, count, h, milliseconds, number, percent, plural, setText } from "./text.js";

const FACTS = [
  ["output", (s) => `${number(s.rates.output_tokens_per_s)} tok/s`],
  ["wait · prefill · decode", (s) => `${s.queue.waiting} · ${s.queue.prefill} · ${s.queue.decode}`],
  ["TTFT p50, p95", (s) => both(s.latency.ttft_ms)],
  ["TBT p50, p95", (s) => both(s.latency.tbt_ms)],
  ["TTFT, TBT in time", (s) => `${percent(s.slo.ttft_attainment)}, ${percent(s.slo.tbt_attainment)}`],
  ["learning", (s) => `${number(s.rates.pairs_per_s, 1)} pairs/s`],
  ["processor", (s) => `${number(s.device.cpu_percent)} % of ${plural(s.device.cpu_count, "core")}`],
  ["GPU", (s) => known(s.device.gpu_percent, (value) => `${number(value)} %`)],
  ["temperature", (s) => known(s.device.temperature_c, (value) => `${number(value)} °C${known(s.device.temperature_limit_c, (limit) => ` of ${number(limit)}`)}`)],
  ["power", (s) => known(s.device.power_w, (value) => `${number(value, 1)} W${known(s.device.power_limit_w, (limit) => ` of ${number(limit)}`)}`)],
  ["power mode", (s) => s.device.power_mode ?? ""],
  ["energy", (s) => known(s.governors?.energy?.joules_per_output_token, (value) => `${number(value, 2)} J a token`)],
];

const known = (value, show) => (value === null || value === undefined ? "" : show(value));
const both = (values) => `${number(values.p50, values.p50 < 10 ? 1 : 0)}, ${milliseconds(values.p95)}`;

/** Show one reading of `GET /v1/status`. */
export function showStatus(status) {
  const model = status.model;
  setText(byId("model"), `${model.name} · ${count(model.parameters)} parameters, ${model.dtype} on ${model.device}`);
  showFacts(status);
  showMemory(status);
  setText(byId("health"), status.verdict);
  byId("health").classList.toggle("problem", status.degraded.length > 0);
  setText(byId("tuning"), tuningOf(status));
  byId("tuning").classList.toggle("held", held(status));
  setText(byId("degraded"), status.degraded.length ? `Not as it should be: ${status.degraded.join("; ")}.` : "");
}

/** Names and values; the elements stay, so that nothing jumps and nothing is read twice. */
function showFacts(status) {
  const facts = FACTS.map(([name, show]) => [name, show(status)]).filter(([, value]) => value);
  const list = byId("facts");
  if (list.children.length !== facts.length) {
    list.replaceChildren(...facts.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", {}))));
  }
  facts.forEach(([name, value], index) => {
    setText(list.children[index].firstChild, name);
    setText(list.children[index].lastChild, value);
  });
}

/** Whose memory it is: on a discrete GPU the GPU's, else the box's. */
function owners(status) {
  const { device, memory, pages } = status;
  // Pages of a machine that gives memory back take none while nothing lies in them.
  const held = status.governors?.memory?.kv_resident_bytes ?? memory.kv_bytes;
  const kv = memory.kv_bytes - (pages.free + pages.retired) * pages.bytes_per_page;
  const free = Math.max(0, held - kv);
  const cached = pages.cached * pages.bytes_per_page;
  const own = [
    ["weights", memory.weights_bytes],
    ["K/V in use", kv - cached],
    ["K/V prefixes", cached],
    ["K/V free", free],
    ["adapters", memory.adapters_bytes],
  ];
  const ours = memory.weights_bytes + kv + free + memory.adapters_bytes;
  const onGpu = device.gpu_memory_total_bytes;
  const total = onGpu || device.memory_total_bytes;
  const used = onGpu ? device.gpu_memory_used_bytes : total - device.memory_available_bytes;
  const rest = onGpu ? 0 : Math.max(0, device.process_rss_bytes - ours);
  // Pages that were never touched are not in the system's count yet, though they are promised.
  const others = Math.max(0, used - ours - rest);
  own.push(["rest of edged", rest], ["others", others], ["free", Math.max(0, total - ours - rest - others)]);
  return own.filter(([, size]) => size > 0);
}

function showMemory(status) {
  const parts = owners(status);
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  const key = (name) => name.toLowerCase().replaceAll(/[^a-z]+/g, "-");
  const bar = byId("memory");
  if (Array.from(bar.children, (part) => part.dataset.owner).join() !== parts.map(([name]) => key(name)).join()) {
    bar.replaceChildren(...parts.map(([name]) => h("span", { class: `owner-${key(name)}`, "data-owner": key(name) })));
    byId("owners").replaceChildren(...parts.map(([name]) => h("li", { class: `owner-${key(name)}` }, h("span", {}, name), h("strong", {}))));
  }
  parts.forEach(([, size], index) => {
    bar.children[index].style.flexGrow = Math.max(size / total, 0.004);
    setText(byId("owners").children[index].lastChild, bytes(size));
  });
  const words = parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
  if (bar.getAttribute("aria-label") !== words) bar.setAttribute("aria-label", `Memory: ${words}`);
}

/** What the governors hold back, and why. */
function reasons(status) {
  const { enabled, memory, power } = status.governors ?? {};
  const said = [];
  if (!enabled) return said;
  if (memory?.holds?.length) said.push(`${memory.holds.join(", ")} (${memory.reason})`);
  if (power?.finetune_share < 1) said.push(`fine-tuning to ${percent(power.finetune_share)} of the time (${power.reasons.join("; ")})`);
  if (power?.throttled?.length) said.push(`the device's clocks (${power.throttled.join(", ")})`);
  return said;
}

const held = (status) => !status.finetune.enabled || reasons(status).length > 0;

/** What fine-tuning does, or why it does not. */
function tuningOf(status) {
  const why = reasons(status);
  return `${doing(status.finetune)}.${why.length ? ` Held back: ${why.join("; ")}.` : ""}`;
}

function doing(tuning) {
  const waiting = tuning.pairs_queued ? `, ${plural(tuning.pairs_queued, "pair")} waiting` : "";
  if (!tuning.enabled) return `Fine-tuning is paused${tuning.reason ? `: ${tuning.reason}` : ""}${waiting}`;
  const names = tuning.active_adapters.join(", ");
  if (names) return `${tuning.testing ? "Testing" : "Fine-tuning"} ${names}${waiting}`;
  if (waiting) return `Fine-tuning waits for its turn${waiting}`;
  return `Fine-tuning has nothing to do: ${plural(tuning.pairs_trained, "pair")} learned in ${plural(tuning.steps, "step")}`;
}
