// One adapter's learning: its means, its curves, its versions, and the way back to one of them.

import { ApiError, call } from "./api.js";
import { CURVES, drawCurves, RECENT } from "./curves.js";
import { mayTeach } from "./speaker.js";
import { announce, byId, h, moment, number, percent, plural, setText, signed } from "./text.js";

const PAIRS = 500;
const REDRAW_MS = 500;
/** When the list of versions is asked for again after a new one: at once, and when it is on disk. */
const REFRESH_MS = [600, 6500];

const change = (share) => (share === null || share === undefined ? "–" : `${signed(share * 100)} %`);
/** How an adapter's language is, as far as the API tells. */
const LANGUAGE = [
  ["held_out_kl_nats", "KL, nats/token", (value) => number(value, 2)],
  ["neutral_nll_change", "neutral text", change],
  ["chosen_logratio_per_token_recent", "chosen, nats/token", (value) => signed(value, 2)],
  ["answer_tokens_recent", "tokens an answer", number],
  ["answer_repetition_recent", "repeated", percent],
];

/** What is known of the adapter that is shown; another one that is shown begins with nothing known. */
const unknown = (adapter) => ({ adapter, rows: [], versions: [], current: 0, counts: null });
let shown = unknown("");
/** The adapter that the reader asked for, which is shown as soon as there is one of that name. */
let wanted = "";
let waiting = false;
let refreshing = [];
/** Whether "Roll back" stands beside the versions that are drawn. */
let offered = false;

/** Wire the panel up. */
export function startLearning() {
  byId("adapter").addEventListener("change", () => showAdapter(byId("adapter").value));
  for (const button of byId("held").querySelectorAll("button")) button.addEventListener("click", () => decide(button.value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCurves(shown.rows, shown.versions));
}

/** The adapters to choose from, as the API lists them; the one to show is read again. */
export async function showList(adapters, preferred) {
  offer(...adapters.map((item) => item.adapter));
  wanted ||= preferred;
  const latest = adapters.toSorted((a, b) => (b.updated_at ?? "").localeCompare(a.updated_at ?? ""))[0]?.adapter;
  await show([wanted, shown.adapter, latest].find(isKnown));
}

/** Show an adapter, at once or when it has its first pair. */
export async function showAdapter(name) {
  wanted = name;
  await show(name);
}

async function show(name) {
  if (!isKnown(name)) return;
  if (name !== shown.adapter) {
    shown = unknown(name);
    byId("adapter").value = name;
    draw();
  }
  await refresh();
}

const isKnown = (name) => Array.from(byId("adapter").options).some((option) => option.value === name);

/** A pair was scored. */
export function addPair(pair) {
  offer(pair.adapter);
  if (!shown.adapter || (pair.adapter === wanted && shown.adapter !== wanted)) return show(pair.adapter);
  if (pair.adapter !== shown.adapter || shown.rows.some((row) => row.pair_id === pair.pair_id)) return;
  append(shown.rows, { pair_id: pair.pair_id, version: pair.version, win: Number(pair.win), logp_difference: pair.delta_nats,
    reward_margin: pair.reward_margin, reward_correct: Number(pair.reward_margin > 0), live: true });
  shown.rows = shown.rows.slice(-PAIRS);
  drawSoon();
}

/** Add a pair behind others, with its number and the means that the daemon tells of pairs that it has stored. */
function append(rows, row) {
  rows.push({ ...row, pair: (rows.at(-1)?.pair ?? 0) + 1 });
  const recent = rows.slice(-RECENT);
  const mean = (key) => recent.reduce((sum, each) => sum + each[key], 0) / recent.length;
  Object.assign(rows.at(-1), { win_rate: mean("win"), clpd: mean("logp_difference"), reward_accuracy: mean("reward_correct") });
}

/** An adapter has a new version. */
export function addVersion(version) {
  offer(version.adapter);
  if (!shown.adapter) return show(version.adapter);
  if (version.adapter !== shown.adapter) return;
  const { versions } = shown;
  shown.current = version.version;
  if (!versions.some((each) => each.version === version.version)) versions.unshift({ ...version, created_at: new Date(version.at_s * 1e3).toISOString() });
  drawSoon();
  refreshSoon();
}

/** Something became of an adapter's pairs: those that are held, or kept as a test, make no version. */
export function addOutcomes({ adapter }) {
  if (adapter === shown.adapter) refreshSoon();
}

function refreshSoon() {
  refreshing = refreshing.length ? refreshing : REFRESH_MS.map((wait) => setTimeout(refreshAgain, wait));
}

async function refreshAgain() {
  refreshing = refreshing.slice(1);
  await refresh();
}

/** Add names to the choice, in order. */
function offer(...names) {
  const select = byId("adapter");
  const known = new Set(Array.from(select.options, (option) => option.value));
  if (names.every((name) => known.has(name))) return;
  const chosen = select.value;
  select.replaceChildren(...[...new Set([...known, ...names])].sort().map((name) => h("option", { value: name }, name)));
  if (chosen) select.value = chosen;
}

async function refresh() {
  const asked = shown;
  try {
    const found = await call(`v1/adapters/${encodeURIComponent(asked.adapter)}?limit=${PAIRS}`);
    const known = new Set(found.series.map((row) => row.pair_id));
    // Pairs that were told of while the answer was on its way.
    for (const row of asked.rows) if (row.live && !known.has(row.pair_id)) append(found.series, row);
    Object.assign(asked, { rows: found.series, versions: found.versions, current: found.version, counts: found });
  } catch (error) {
    if (!(error instanceof ApiError) || asked !== shown) return;
    // It was forgotten, or is not ours to see.
    shown = unknown(asked.adapter);
    draw();
    setText(byId("progress"), error.message);
    return;
  }
  if (asked === shown) draw();
}

function drawSoon() {
  if (waiting) return;
  waiting = true;
  setTimeout(() => {
    waiting = false;
    draw();
  }, REDRAW_MS);
}

function draw() {
  const { rows, versions, current, counts } = shown;
  setText(byId("progress"), !counts ? "" : `version ${number(current)} · ${number(counts.pairs_trained)} of ${plural(counts.pairs_seen, "pair")} learnt` +
      (counts.pairs_queued ? `, ${number(counts.pairs_queued)} waiting` : "") + (counts.pairs_held_out ? `, ${number(counts.pairs_held_out)} as a test` : ""));
  setText(byId("verdict"), counts ? `${counts.verdict[0].toUpperCase()}${counts.verdict.slice(1)}.` : "");
  drawHeld();
  drawMeans();
  drawVersions();
  drawCurves(rows, versions);
  if (!counts) byId("no-curves").hidden = true;
}

/** Pairs that look poisoned, and for those who may decide the step that settles it. */
function drawHeld() {
  const { adapter, counts } = shown;
  byId("held").hidden = !counts?.pairs_quarantined;
  for (const button of byId("held").querySelectorAll("button")) button.hidden = !mayTeach();
  if (!counts) return;
  const { pairs_quarantined: pairs, quarantine_reason: reason } = counts;
  setText(byId("held-text"), `${plural(pairs, "pair")} of ${adapter} ${pairs === 1 ? "is" : "are"} held: ${reason}.`);
}

async function decide(action) {
  const user = shown.adapter;
  try {
    const { pair_ids: pairs, decision } = await call("v1/quarantine", { user, action });
    announce(`${plural(pairs.length, "pair")} of ${user} ${decision}.`);
    await refresh();
  } catch (error) {
    complain(error);
  }
}

/** Say why something could not be done. */
function complain(error) {
  const problem = error instanceof ApiError ? error.message : "The daemon does not answer.";
  setText(byId("progress"), problem);
  announce(problem);
}

function drawMeans() {
  const { rows, counts } = shown;
  const last = rows.at(-1);
  const items = CURVES.map((curve) => h("li", { class: curve.key }, h("span", {}, curve.name), h("strong", {}, last ? curve.show(last[curve.key]) : "–"),
    h("small", {}, range(counts?.[`${curve.key}_recent_interval`]))));
  const margins = rows.slice(-RECENT).map((row) => row.reward_margin).filter((margin) => margin !== undefined);
  const mean = margins.reduce((sum, margin) => sum + margin, 0) / margins.length;
  items.push(h("li", {}, h("span", {}, "reward margin"), h("strong", {}, margins.length ? signed(mean, 2) : "–")));
  for (const [key, name, show] of LANGUAGE) if ((counts?.[key] ?? null) !== null) items.push(h("li", {}, h("span", {}, name), h("strong", {}, show(counts[key]))));
  byId("means").replaceChildren(...items);
}

/** An interval of a share; "" where there is none. */
const range = (ends) => (ends ? `${number(ends[0] * 100)} to ${percent(ends[1])}` : "");

/** Draw the versions anew if the caller has turned out to be one who may (not) roll back. */
export function showRights() {
  if (mayTeach() === offered) return;
  drawHeld();
  drawVersions();
}

function drawVersions() {
  const { versions, current } = shown;
  offered = mayTeach();
  const held = document.activeElement?.dataset?.version;
  const rolled = (version) => h("button", { type: "button", class: "quiet", "data-version": version, "aria-label": `Roll back to version ${version}`,
    onclick: () => rollBack(version) }, "Roll back");
  const wayBack = ({ version, on_disk: onDisk }) =>
    version === current ? "serving" : !onDisk ? "not on disk" : mayTeach() ? rolled(version) : "your role may not";
  const untrained = { version: 0, reason: "untrained", on_disk: true };
  const lines = [...versions, ...(current ? [untrained] : [])].map((each) => h("tr", { class: each.version === current ? "current" : "" },
    h("td", {}, number(each.version)),
    h("td", {}, each.created_at ? moment(new Date(each.created_at)) : "–"),
    h("td", {}, h("span", { class: ["trained", "untrained"].includes(each.reason) ? "" : "turned" }, each.reason), each.answer ? h("small", {}, each.answer) : ""),
    h("td", { class: "number" }, each.held_out_pairs ? `${number(each.held_out_reward_accuracy * each.held_out_pairs)} of ${number(each.held_out_pairs)}` : "–"),
    h("td", { class: "number" }, number(each.kl_nats, 2)),
    h("td", { class: "number" }, change(each.neutral_nll_change)),
    h("td", { class: "number" }, wayBack(each))));
  byId("versions").replaceChildren(...lines);
  // A button that was just drawn anew keeps the focus.
  if (held !== undefined) byId("versions").querySelector(`[data-version="${held}"]`)?.focus();
}

function rollBack(version) {
  const { adapter: name, current } = shown;
  const dialog = byId("confirm");
  setText(byId("confirm-text"), version
    ? `${name} answers with version ${current} now. Version ${version} is then served again, as a new version; pairs learnt since are not learnt again.`
    : `${name} answers with version ${current} now. The untrained adapter is then served, as a new version: it answers as the base model.`);
  dialog.returnValue = "";
  dialog.showModal();
  dialog.addEventListener("close", async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      const done = await call(`v1/adapters/${encodeURIComponent(name)}/rollback`, { version });
      announce(`${name} answers with version ${done.version}, which is version ${done.restored} again.`);
    } catch (error) {
      return complain(error);
    }
    await refresh();
  }, { once: true });
}
