// The iterations of the last seconds as bars: as wide as they took, as high as they took, filled by who had the time.

import { byId, milliseconds, number, percent, setText } from "./text.js";

const KINDS = ["prefill", "decode", "finetune"];
const KEPT_S = 65;
const REDRAW_MS = 200;
const LEAST_BAR = 3;
const LEAST_STRIPE = 2;
const GAP = 1;
const IDLE = 12;
const OUTLIER = 3;
const LABEL = 26;
const SCALES_MS = [5, 10, 20, 30, 50, 80, 120, 200, 300, 500, 800, 1200, 2000, 3000, 5000, 10000, 30000, 100000];
const SHRINK_AFTER_MS = 3000;
const SPOKEN_EVERY_MS = 10000;
const MARGIN = { left: 50, right: 6, top: 16, bottom: 18 };

const canvas = byId("canvas");
const frame = byId("bins");
const pen = canvas.getContext("2d");

let records = [];
/** The records when the timeline was paused; null while it runs. */
let frozen = null;
let selected = null;
let aheadS = -Infinity;
let bars = [];
let scaleMs = SCALES_MS[0];
let smallerSinceMs = 0;
let spokenAtMs = -Infinity;
let colours = {};
let drawn = false;

const endS = (record) => record.at_s + record.latency_ms / 1e3;
const spanS = () => Number(byId("span").value);

/** Take in new iterations, oldest first. */
export function addIterations(fresh) {
  if (!fresh.length) return;
  // Numbers begin anew with a new daemon.
  if (records.length && fresh[0].number <= records.at(-1).number) records = [];
  records.push(...fresh);
  const oldest = endS(fresh.at(-1)) - KEPT_S;
  if (records[0].at_s < oldest - 5) records = records.filter((record) => record.at_s >= oldest);
  // The daemon's clock is not ours; what took longest to come says least of the difference.
  aheadS = Math.max(aheadS - 0.001, endS(fresh.at(-1)) - Date.now() / 1e3);
  drawn = false;
}

/** Wire the timeline up. */
export function startTimeline() {
  byId("pause").addEventListener("click", () => pause(frozen === null));
  byId("span").addEventListener("change", redraw);
  canvas.addEventListener("click", (event) => selectAt(event.offsetX));
  frame.addEventListener("keydown", key);
  new ResizeObserver(redraw).observe(frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    redraw();
  });
  readColours();
  setInterval(tick, REDRAW_MS);
  redraw();
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [...KINDS, "budget", "line", "muted", "ink"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  pen.font = `11px ${getComputedStyle(frame).fontFamily}`;
}

/** Time goes on without iterations too, until the last has left the picture. */
function tick() {
  if (document.hidden || frozen !== null || !frame.offsetParent) return;
  const moving = records.length && records.at(-1).at_s > Date.now() / 1e3 + aheadS - spanS() - 1;
  if (!drawn || moving) redraw();
}

function pause(yes) {
  frozen = yes ? { records: [...records], now: Date.now() / 1e3 + aheadS } : null;
  if (!yes) selected = null;
  const button = byId("pause");
  button.setAttribute("aria-pressed", yes);
  setText(button, yes ? "Go on" : "Pause");
  redraw();
}

function key(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === " ") pause(frozen === null);
  else if (event.key === "Escape" && frozen) pause(false);
  else if (step && records.length) {
    if (!frozen) pause(true);
    const at = selected === null ? frozen.records.length : frozen.records.indexOf(selected) + step;
    selected = frozen.records[Math.min(frozen.records.length - 1, Math.max(0, selected === null ? at - 1 : at))];
    redraw();
  } else return;
  event.preventDefault();
}

function selectAt(x) {
  if (!records.length) return;
  if (!frozen) pause(true);
  const nearest = bars.reduce((best, bar) => (Math.abs(middle(bar) - x) < Math.abs(middle(best) - x) ? bar : best), bars[0]);
  selected = nearest?.records.at(-1) ?? null;
  redraw();
}

const middle = (bar) => (bar.from + bar.to) / 2;

function redraw() {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [frame.clientWidth, frame.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = `11px ${getComputedStyle(frame).fontFamily}`;
  pen.clearRect(0, 0, width, height);
  const nowS = frozen ? frozen.now : Math.max(Date.now() / 1e3 + aheadS, records.length ? endS(records.at(-1)) : 0);
  const shown = (frozen?.records ?? records).filter((record) => endS(record) > nowS - spanS());
  const area = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  bars = packed(shown, nowS, area);
  rescale();
  drawAxes(area);
  for (const bar of bars) drawBar(bar, area);
  drawOutliers(area);
  drawBudget(area);
  drawSelection(area);
  describe(shown, nowS);
  drawn = true;
}

/** Records as bars that are wide enough to be seen: short ones that follow each other share one, which shows their means. */
function packed(shown, nowS, area) {
  const x = (atS) => area.right - ((nowS - atS) / spanS()) * (area.right - area.left);
  const made = [];
  for (const record of shown) {
    const last = made.at(-1);
    const [from, to] = [Math.max(area.left, x(record.at_s)), x(endS(record))];
    if (last && (to - last.from < LEAST_BAR + GAP || from < last.to)) {
      last.records.push(record);
      last.to = Math.max(last.to, to);
    } else {
      made.push({ from, to: Math.max(to, from + LEAST_BAR), records: [record] });
    }
  }
  for (const bar of made) summarize(bar);
  return made;
}

function summarize(bar) {
  const mean = (of) => bar.records.reduce((sum, record) => sum + of(record), 0) / bar.records.length;
  bar.latency = mean((record) => record.latency_ms);
  for (const kind of KINDS) bar[kind] = mean((record) => record[`${kind}_ms`]);
  const budgets = bar.records.map((record) => record.budget_ms).filter((budget) => budget !== null);
  bar.budget = budgets.length ? Math.min(...budgets) : null;
}

/**
 * The scale holds the bars, but for a few that are far higher, and the budget where it is near; it grows at once and
 * shrinks after a while.
 */
function rescale() {
  const sorted = (values) => values.toSorted((a, b) => a - b);
  const latencies = sorted(bars.map((bar) => bar.latency));
  const usual = latencies[Math.floor(latencies.length * 0.9)] ?? 0;
  const highest = Math.min(latencies.at(-1) ?? 0, usual * OUTLIER);
  const budgets = sorted(bars.map((bar) => bar.budget).filter((budget) => budget !== null));
  const budget = budgets[budgets.length >> 1] ?? 0;
  const needed = Math.max(highest, budget < OUTLIER * highest ? budget : 0) * 1.08;
  const wanted = SCALES_MS.find((scale) => scale >= needed) ?? SCALES_MS.at(-1);
  if (wanted >= scaleMs) smallerSinceMs = performance.now();
  if (wanted > scaleMs || performance.now() - smallerSinceMs > SHRINK_AFTER_MS) scaleMs = wanted;
}

const heightOf = (ms, area) => Math.min(1, ms / scaleMs) * (area.bottom - area.top);

function drawAxes(area) {
  pen.strokeStyle = colours.line;
  pen.fillStyle = colours.muted;
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(area.bottom - share * (area.bottom - area.top)) + 0.5;
    pen.beginPath();
    pen.moveTo(area.left, y);
    pen.lineTo(area.right, y);
    pen.stroke();
    pen.fillText(`${number(scaleMs * share, scaleMs < 10 && share === 0.5 ? 1 : 0)}${share === 1 ? " ms" : ""}`, area.left - 5, y);
  }
  pen.textBaseline = "alphabetic";
  for (const share of [0, 0.5, 1]) {
    const past = spanS() * (1 - share);
    pen.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
    pen.fillText(past ? `−${past} s` : frozen ? "paused" : "now", area.left + share * (area.right - area.left), area.bottom + 14);
  }
}

/** In whole pixels, and what there was at all is seen, however short it was. */
function drawBar(bar, area) {
  const from = Math.round(bar.from);
  const width = Math.max(1, Math.round(bar.to - GAP) - from);
  let y = Math.round(area.bottom);
  for (const kind of KINDS) {
    if (!bar[kind]) continue;
    const height = Math.max(LEAST_STRIPE, Math.round(heightOf(bar[kind], area)));
    pen.fillStyle = colours[kind];
    pen.fillRect(from, y - height, width, height);
    y -= height;
  }
}

/** How high the bars really are that do not fit. */
function drawOutliers(area) {
  pen.fillStyle = colours.muted;
  pen.textAlign = "center";
  pen.textBaseline = "bottom";
  let free = area.left;
  for (const bar of bars) {
    if (bar.latency <= scaleMs || middle(bar) - LABEL / 2 < free) continue;
    pen.fillText(number(bar.latency), middle(bar), area.top - 1);
    free = middle(bar) + LABEL / 2;
  }
}

/** A line through the budgets; where most are beyond the scale, their least is named. */
function drawBudget(area) {
  pen.strokeStyle = colours.budget;
  pen.lineWidth = 1.5;
  pen.beginPath();
  let drawing = false;
  for (const [index, bar] of bars.entries()) {
    // Nobody was waiting in between: there was no budget.
    if (index && bar.from - bars[index - 1].to > IDLE) drawing = false;
    if (bar.budget === null || bar.budget > scaleMs) {
      drawing = false;
      continue;
    }
    const y = area.bottom - heightOf(bar.budget, area);
    if (drawing) pen.lineTo(bar.from, y);
    else pen.moveTo(bar.from, y);
    pen.lineTo(bar.to, y);
    drawing = true;
  }
  pen.stroke();
  const beyond = bars.filter((bar) => bar.budget > scaleMs).map((bar) => bar.budget);
  if (beyond.length < bars.length / 2 || !bars.length) return;
  pen.fillStyle = colours.budget;
  pen.textAlign = "left";
  pen.textBaseline = "top";
  pen.fillText(`budget ↑ ${milliseconds(Math.min(...beyond))}`, area.left + 4, area.top + 2);
}

function drawSelection(area) {
  const bar = selected && bars.find((each) => each.records.includes(selected));
  if (!bar) return;
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 1.5;
  pen.strokeRect(bar.from - 1.5, area.top, bar.to - bar.from + 2, area.bottom - area.top);
}

/** The same in words: for those who see it, and now and then for those who do not. */
function describe(shown, nowS) {
  const covered = Math.min(spanS(), shown.length ? nowS - shown[0].at_s : spanS());
  const share = (kind) => shown.reduce((sum, record) => sum + record[`${kind}_ms`], 0) / (covered * 1e3);
  const mean = shown.reduce((sum, record) => sum + record.latency_ms, 0) / shown.length;
  const [prefill, decode, finetune] = KINDS.map(share);
  const idle = Math.max(0, 1 - prefill - decode - finetune);
  const text = shown.length
    ? `${number(shown.length / covered, 0)} a second, ${milliseconds(mean)} each. Time: prefill ${percent(prefill)}, ` +
      `decode ${percent(decode)}, fine-tune ${percent(finetune)}, idle ${percent(idle)}.`
    : "Nothing ran: nobody asks, and nothing is left to learn.";
  setText(byId("summary"), text);
  if (performance.now() - spokenAtMs > SPOKEN_EVERY_MS || frozen) {
    spokenAtMs = performance.now();
    canvas.setAttribute("aria-label", `Iterations of the last ${spanS()} seconds. ${text}`);
  }
  setText(byId("detail"), selected ? detail(selected) : "");
}

function detail(record) {
  const parts = KINDS.filter((kind) => record[`${kind}_ms`] > 0 || record[`${kind}_tokens`]).map((kind) => {
    const units = kind === "finetune" && record.finetune_units ? `, ${number(record.finetune_units)} units` : "";
    return `${kind === "finetune" ? "fine-tune" : kind} ${milliseconds(record[`${kind}_ms`])} (${number(record[`${kind}_tokens`])} tokens${units})`;
  });
  const budget = record.budget_ms === null ? "nobody waited" : `budget ${milliseconds(record.budget_ms)}`;
  const preempted = record.preempted ? `, ${record.preempted} preempted` : "";
  return `Iteration ${number(record.number)}: ${milliseconds(record.latency_ms)}, predicted ${milliseconds(record.predicted_ms)}, ${budget}. ` +
    `${parts.join(", ")}. ${number(record.free_pages)} pages free${preempted}.`;
}
