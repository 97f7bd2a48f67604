// What an adapter learned, pair by pair, as curves with the versions marked: an SVG that is drawn anew when it changes.

import { byId, h, number, percent, setText, signed } from "./text.js";

/** Pairs over which the daemon's running means go. */
export const RECENT = 50;
/** The pair that curves begin at: means over fewer say nothing. */
const FIRST = 10;
/** Pairs of the axis at least. */
const LEAST_PAIRS = 10;
/** From so many pairs on the line alone tells enough, without points. */
const LINE_ALONE = 3;
const SPACE = "http://www.w3.org/2000/svg";
const MARGIN = { left: 44, right: 10, top: 8, bottom: 34 };
/** Beginning and end of each part, as shares of the height between the margins. */
const PARTS = { shares: [0, 0.5], nats: [0.56, 0.9], versions: [0.94, 1] };

const NO_PAIRS = "No pairs yet: pick an answer in the chat, or send feedback.";

export const CURVES = [
  { key: "reward_accuracy", name: "reward accuracy", part: "shares", show: percent },
  { key: "win_rate", name: "win rate", part: "shares", show: percent },
  { key: "clpd", name: "CLPD", part: "nats", show: (value) => `${signed(value)} nats` },
];

let drawn = null;
const resized = new ResizeObserver(() => drawn && draw());

/** Draw `scored` (one row a pair, oldest first) and `versions` (newest first) into the page. */
export function drawCurves(scored, versions) {
  const element = byId("curves");
  const rows = scored.filter((row) => row.pair >= FIRST);
  element.hidden = !rows.length;
  setText(byId("no-curves"), scored.length ? `The curves begin at ten pairs: there are ${scored.length}.` : NO_PAIRS);
  byId("no-curves").hidden = rows.length > 0;
  drawn = rows.length ? { rows, versions } : null;
  if (!drawn) return;
  element.setAttribute("aria-label", inWords(rows, versions));
  resized.observe(element);
  draw();
}

/** An element of SVG with attributes and children. */
function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw() {
  const element = byId("curves");
  const { rows, versions } = drawn;
  const { width, height } = element.getBoundingClientRect();
  if (!width) return;
  const inner = height - MARGIN.top - MARGIN.bottom;
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const first = rows[0].pair;
  const x = scale(first - 0.7, Math.max(rows.at(-1).pair, first + LEAST_PAIRS - 1) + 0.7, left, right);
  const [low, high] = range(rows.map((row) => row.clpd));
  const place = (part, share) => MARGIN.top + inner * (PARTS[part][0] + share * (PARTS[part][1] - PARTS[part][0]));
  const y = {
    shares: scale(1.05, -0.05, place("shares", 0), place("shares", 1)),
    nats: scale(high, low, place("nats", 0), place("nats", 1)),
  };
  const bottom = place("versions", 1);
  const axis = (part, value, text) => s("g", {},
    s("line", { class: part === "nats" && value === 0 ? "zero" : "grid", x1: left, x2: right, y1: y[part](value), y2: y[part](value) }),
    s("text", { x: left - 6, y: y[part](value) + 4, "text-anchor": "end" }, text));
  const pointer = s("line", { class: "pointer", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
  const told = h("p", { class: "told", hidden: true });
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    ...[0, 0.25, 0.5, 0.75, 1].map((share) => axis("shares", share, percent(share))),
    ...ticks(low, high, 4).map((value) => axis("nats", value, `${value}`)),
    ...ticks(first, rows.at(-1).pair, 6).filter(Number.isInteger).map((pair) =>
      s("text", { x: x(pair), y: bottom + 14, "text-anchor": "middle" }, number(pair))),
    s("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, "pair"),
    ...marks(placed(rows, versions), x, bottom),
    ...CURVES.map((curve) => line(curve, rows, x, y[curve.part])), pointer);
  svg.addEventListener("pointermove", (event) => point(rows, versions, x, event, pointer, told));
  svg.addEventListener("pointerleave", () => { pointer.setAttribute("visibility", "hidden"); told.hidden = true; });
  element.replaceChildren(svg, told);
}

/** A function from values between `low` and `high` to places between `from` and `to`. */
const scale = (low, high, from, to) => (value) => Math.round((from + ((value - low) / (high - low || 1)) * (to - from)) * 10) / 10;

/** The least and the largest value, with room about them, and 0 among them. */
function range(values) {
  const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [0, 0]);
  const room = (high - low || 1) * 0.06;
  return [low - (low < 0 ? room : 0), high + room];
}

/** Round values between two, at most so many. */
function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const begin = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - begin + 1 }, (_, i) => Number(((begin + i) * step).toPrecision(12)));
}

function line(curve, rows, x, y) {
  const points = rows.map((row) => [x(row.pair), y(row[curve.key])]);
  return s("g", { class: `curve ${curve.key}` }, s("path", { d: `M${points.map((at) => at.join(" ")).join("L")}` }),
    ...(rows.length < LINE_ALONE ? points.map(([cx, cy]) => s("circle", { cx, cy, r: 3 })) : []));
}

/** The versions with the pair from which on each was in use, oldest first; the newest may wait for its first. */
function placed(rows, versions) {
  const found = [];
  for (const version of [...versions].reverse()) {
    const row = rows.find((each) => each.version >= version.version);
    const before = rows[0].version >= version.version;
    if (!before) found.push({ ...version, at: (row?.pair ?? rows.at(-1).pair + 1) - 0.5 });
  }
  return found;
}

/** Whether a version is a step's, as most are: of new pairs, of learned ones in idle time, or of a job. */
export const isTrained = (version) => ["trained", "practised", "repeated", "job"].includes(version.reason);

const named = (version) => `version ${version.version}: ${version.reason}`;

/** A short line for each version; those that are no step's go all the way up, and the latest have their reasons. */
function marks(versions, x, bottom) {
  const turned = versions.filter((version) => !isTrained(version));
  return [
    ...versions.map((version) => s("line", { class: isTrained(version) ? "version" : "version turned", x1: x(version.at), x2: x(version.at),
      y1: bottom - (isTrained(version) ? 8 : 13), y2: bottom }, s("title", {}, named(version)))),
    ...turned.map((version) => s("line", { class: "turn", x1: x(version.at), x2: x(version.at), y1: MARGIN.top, y2: bottom })),
    ...turned.slice(-3).map((version) => s("text", { class: "turned", "text-anchor": "end",
      transform: `translate(${x(version.at) - 4} ${MARGIN.top}) rotate(-90)` }, version.reason.split(":")[0])),
  ];
}

/** Tell the means at the pair that is nearest to the pointer, and the version that comes there. */
function point(rows, versions, x, event, pointer, told) {
  const at = event.clientX - event.currentTarget.getBoundingClientRect().left;
  const row = rows.reduce((nearest, each) => (Math.abs(x(each.pair) - at) < Math.abs(x(nearest.pair) - at) ? each : nearest));
  pointer.setAttribute("x1", x(row.pair));
  pointer.setAttribute("x2", x(row.pair));
  pointer.setAttribute("visibility", "visible");
  const came = placed(rows, versions).filter((version) => version.at === row.pair - 0.5);
  told.textContent = [`pair ${number(row.pair)}`, ...CURVES.map((curve) => `${curve.name} ${curve.show(row[curve.key])}`), ...came.map(named)].join(" · ");
  told.hidden = false;
}

function inWords(rows, versions) {
  const [first, last] = [rows[0], rows.at(-1)];
  const changes = CURVES.map((curve) => `${curve.name} from ${curve.show(first[curve.key])} to ${curve.show(last[curve.key])}`);
  return `Means over the last ${RECENT} pairs, from pair ${number(first.pair)} to ${number(last.pair)}: ${changes.join(", ")}; ` +
    `${number(versions.length)} versions.`;
}
