// What an adapter learned, pair by pair, as curves with the versions marked.

import { byId, number, percent, setText, signed } from "./text.js";

const LIBRARY = "page/plotly.js";
/** Pairs over which the daemon's running means go. */
export const RECENT = 50;
/** The pair that curves begin at: means over fewer say nothing. */
const FIRST = 10;

const NO_PAIRS = "No pairs yet: pick an answer in the chat, or send feedback.";

export const CURVES = [
  { key: "reward_accuracy", name: "reward accuracy", colour: "--accuracy", axis: "y", show: percent },
  { key: "win_rate", name: "win rate", colour: "--win", axis: "y", show: percent },
  { key: "clpd", name: "CLPD", colour: "--clpd", axis: "y2", show: (value) => `${signed(value)} nats` },
];

let loading = null;

/** The chart library: a big file, and only of use where there is something to draw. */
function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = LIBRARY;
    // It brings the styles of its maps along and writes them into the page, which the page's policy refuses.
    document.head.appendChild = (node) => (node instanceof HTMLStyleElement ? node : Node.prototype.appendChild.call(document.head, node));
    script.onload = () => {
      delete document.head.appendChild;
      resolve(globalThis.Plotly);
    };
    script.onerror = () => {
      delete document.head.appendChild;
      loading = null;
      reject(new Error("the chart library could not be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

/** Draw `scored` (one row a pair, oldest first) and `versions` (newest first) into the page. */
export async function drawCurves(scored, versions) {
  const element = byId("curves");
  const rows = scored.filter((row) => row.pair >= FIRST);
  element.hidden = !rows.length;
  setText(byId("no-curves"), scored.length ? `The curves begin at ten pairs: there are ${scored.length}.` : NO_PAIRS);
  byId("no-curves").hidden = rows.length > 0;
  if (!rows.length) return;
  element.setAttribute("aria-label", inWords(rows, versions));
  try {
    const plotly = await library();
    await plotly.react(element, [...CURVES.map((curve) => line(curve, rows)), marks(rows, versions)], layout(rows, versions), {
      displayModeBar: false,
      responsive: true,
      doubleClick: false,
      showTips: false,
    });
  } catch (error) {
    byId("no-curves").hidden = false;
    byId("no-curves").textContent = `The curves cannot be drawn: ${error.message}.`;
  }
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function line(curve, rows) {
  return {
    x: rows.map((row) => row.pair),
    y: rows.map((row) => row[curve.key]),
    name: curve.name,
    yaxis: curve.axis,
    type: "scatter",
    mode: rows.length < 3 ? "lines+markers" : "lines",
    line: { color: colour(curve.colour), width: curve.key === "reward_accuracy" ? 2.5 : 1.75 },
    marker: { color: colour(curve.colour), size: 6 },
    cliponaxis: false,
    hovertemplate: curve.axis === "y" ? "%{y:.0%}" : "%{y:+.1f} nats",
  };
}

/** The versions with the pair from which on each was in use, oldest first; the newest may wait for its first. */
function placed(rows, versions) {
  const found = [];
  for (const version of [...versions].reverse()) {
    const row = rows.find((each) => each.version >= version.version);
    const before = rows[0].version >= version.version;
    if (!before) found.push({ ...version, x: (row?.pair ?? rows.at(-1).pair + 1) - 0.5 });
  }
  return found;
}

/** Whether a version is a step's, as most are: of new pairs, of learned ones in idle time, or of a job. */
export const isTrained = (version) => ["trained", "practised", "repeated", "job"].includes(version.reason);

function marks(rows, versions) {
  const shown = placed(rows, versions);
  return {
    x: shown.map((version) => version.x),
    y: shown.map(() => 0),
    text: shown.map((version) => `version ${version.version}: ${version.reason}`),
    name: "versions",
    yaxis: "y3",
    type: "scatter",
    mode: "markers",
    marker: {
      symbol: "line-ns",
      size: shown.map((version) => (isTrained(version) ? 8 : 13)),
      line: { width: 1.5, color: shown.map((version) => colour(isTrained(version) ? "--muted" : "--problem")) },
    },
    hovertemplate: "%{text}<extra></extra>",
  };
}

function layout(rows, versions) {
  const [ink, grid] = [colour("--muted"), colour("--line")];
  const axis = { gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { size: 11 }, fixedrange: true };
  const first = rows[0].pair;
  const turned = placed(rows, versions).filter((version) => !isTrained(version));
  return {
    margin: { l: 44, r: 8, t: 6, b: 34 },
    showlegend: false,
    dragmode: false,
    hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", size: 11, color: ink },
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: grid, font: { color: colour("--ink"), size: 12 } },
    xaxis: { ...axis, range: [first - 0.7, Math.max(rows.at(-1).pair, first + 9) + 0.7], title: { text: "pair", standoff: 4 },
      anchor: "y3", tickformat: ",d", unifiedhovertitle: { text: "pair %{x}" } },
    yaxis: { ...axis, domain: [0.52, 1], range: [-0.05, 1.05], tickformat: ".0%", nticks: 5 },
    yaxis2: { ...axis, domain: [0.1, 0.46], nticks: 4, zeroline: true, zerolinecolor: ink },
    yaxis3: { domain: [0, 0.06], visible: false, range: [-1, 1], fixedrange: true },
    shapes: turned.map((version) => ({ type: "line", x0: version.x, x1: version.x, y0: 0, y1: 1, yref: "paper",
      line: { color: colour("--problem"), width: 1, dash: "dot" } })),
    annotations: turned.slice(-3).map((version) => ({ x: version.x, y: 1, yref: "paper", text: version.reason.split(":")[0], showarrow: false,
      xanchor: "right", yanchor: "top", textangle: -90, font: { size: 10, color: colour("--problem") } })),
  };
}

function inWords(rows, versions) {
  const [first, last] = [rows[0], rows.at(-1)];
  const changes = CURVES.map((curve) => `${curve.name} from ${curve.show(first[curve.key])} to ${curve.show(last[curve.key])}`);
  return `Means over the last ${RECENT} pairs, from pair ${number(first.pair)} to ${number(last.pair)}: ${changes.join(", ")}; ` +
    `${number(versions.length)} versions.`;
}
