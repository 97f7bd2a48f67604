// What the adapter of the chat's user learned: a verdict, its story, the way back, its means, curves and versions.

import { ApiError, call } from "./api.js";
import { CURVES, drawCurves, isTrained, RECENT } from "./curves.js";
import { mayTeach } from "./speaker.js";
import { compare, showStory, startStory } from "./story.js";
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

/** What is known of the adapter that is shown, the one of the chat's user; another one begins with nothing known. */
const unknown = (adapter) => ({ adapter, rows: [], versions: [], current: 0, counts: null });
let shown = unknown("");
/** Names of the adapters that there are. */
const known = new Set();
let waiting = false;
let refreshing = [];
let asked = 0;
/** Whether the way back is offered. */
let offered = false;

/** Wire the panel up. */
export function startLearning() {
  for (const button of byId("held").querySelectorAll("button")) button.addEventListener("click", () => decide(button.value));
  byId("tell").addEventListener("submit", tell);
  startStory(rollBack);
}

/** Take in which adapters there are; events may have told of others while the list was on its way. */
export function knowAdapters(names) {
  for (const name of names) known.add(name);
}

/** Show the adapter of who speaks: "" is nobody, null a name that cannot be one. */
export async function showAdapter(name) {
  if (name === null) return;
  if (name !== shown.adapter) {
    shown = unknown(name);
    showStory(null);
  }
  draw();
  showPreference({ text: null });
  if (name && mayTeach()) call(`v1/adapters/${encodeURIComponent(name)}/preference`).then((found) => name === shown.adapter && showPreference(found), () => {});
  await refresh();
}

/** A pair was scored. */
export function addPair(pair) {
  known.add(pair.adapter);
  if (pair.adapter !== shown.adapter || shown.rows.some((row) => row.pair_id === pair.pair_id)) return;
  append(shown.rows, { pair_id: pair.pair_id, version: pair.version, win: Number(pair.win), logp_difference: pair.delta_nats,
    reward_margin: pair.reward_margin, reward_correct: Number(pair.reward_margin > 0), live: true });
  shown.rows = shown.rows.slice(-PAIRS);
  drawSoon();
  if (!shown.counts) refreshSoon();
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
  known.add(version.adapter);
  if (version.adapter !== shown.adapter) return;
  const { versions } = shown;
  shown.current = version.version;
  if (!versions.some((each) => each.version === version.version)) versions.unshift({ ...version, created_at: new Date(version.at_s * 1e3).toISOString() });
  drawSoon();
  refreshSoon();
}

/** Something is new of an adapter besides versions: what became of its pairs, or a version's answer. */
export function refreshOf({ adapter }) {
  known.add(adapter);
  if (adapter === shown.adapter) refreshSoon();
}

function refreshSoon() {
  refreshing = refreshing.length ? refreshing : REFRESH_MS.map((wait) => setTimeout(refreshAgain, wait));
}

async function refreshAgain() {
  refreshing = refreshing.slice(1);
  await refresh();
}

async function refresh() {
  const now = shown;
  if (!known.has(now.adapter)) return;
  const path = `v1/adapters/${encodeURIComponent(now.adapter)}`;
  try {
    const found = await call(`${path}?limit=${PAIRS}`);
    const stored = new Set(found.series.map((row) => row.pair_id));
    // Pairs that were told of while the answer was on its way.
    for (const row of now.rows) if (row.live && !stored.has(row.pair_id)) append(found.series, row);
    Object.assign(now, { rows: found.series, versions: found.versions, current: found.version, counts: found });
    if (now !== shown) return;
    draw();
    const turn = ++asked;
    const story = await call(`${path}/story`);
    if (now === shown && turn === asked) showStory(story);
  } catch (error) {
    if (!(error instanceof ApiError) || now !== shown) return;
    // It was forgotten, or is not ours to see.
    shown = unknown(now.adapter);
    showStory(null);
    draw();
    setText(byId("progress"), error.message);
  }
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
  const { adapter, rows, versions, current, counts } = shown;
  byId("figures").hidden = !counts;
  setText(byId("progress"), !counts ? "" : `version ${number(current)} · ${number(counts.pairs_trained)} of ${plural(counts.pairs_seen, "pair")} learned` +
      (counts.pairs_queued ? `, ${number(counts.pairs_queued)} waiting` : "") + (counts.pairs_held_out ? `, ${number(counts.pairs_held_out)} as a test` : ""));
  setText(byId("learning-title"), adapter ? `What ${adapter}'s adapter learned` : "Learning");
  setText(byId("verdict"), counts ? `${counts.verdict[0].toUpperCase()}${counts.verdict.slice(1)}.` : nothingOf(adapter));
  drawBeliefs();
  drawHeld();
  drawMeans();
  drawVersions();
  drawCurves(rows, versions);
  if (!counts) byId("no-curves").hidden = true;
}

const nothingOf = (adapter) => (adapter ? `Nothing yet: what ${adapter} picks, rates or edits in the chat is learned.`
  : "The base model answers, and nobody learns: give a name beside the chat.");

/** What the taste model believes, each line with a way to strike it. */
function drawBeliefs() {
  const mine = Boolean(shown.adapter) && mayTeach();
  byId("beliefs").replaceChildren(...(shown.counts?.beliefs ?? []).map((each) => {
    const said = `${each.likes ? "likes" : "avoids"}: ${each.text}`;
    return h("li", { title: `${each.agree} of ${plural(each.of, "signal")} agree` }, said,
      h("button", { type: "button", class: "icon-button", "aria-label": `Strike "${said}"`, title: "Strike: never believe this", hidden: !mine, onclick: () => strike(each.key) }, "×"));
  }));
  byId("tell").hidden = !mine;
}

async function strike(key) {
  const path = `v1/adapters/${encodeURIComponent(shown.adapter)}`;
  try {
    await call(`${path}/strike`, { key });
    announce("Struck.");
    refreshSoon();
  } catch (error) {
    complain(error);
  }
}

/** Keep what a person wants of all answers, in words; an empty text clears it. */
async function tell(event) {
  event.preventDefault();
  const [user, text] = [shown.adapter, byId("preference").value.trim()];
  const path = `v1/adapters/${encodeURIComponent(user)}/preference`;
  try {
    const found = await (text ? call(path, { text }, "PUT") : call(path, undefined, "DELETE"));
    if (user === shown.adapter) showPreference(found);
    announce(text ? "Kept." : "Cleared.");
  } catch (error) {
    if (user === shown.adapter) setText(byId("told"), `Not kept: ${error.message}`);
    complain(error);
  }
}

function showPreference(found) {
  byId("preference").value = found.text ?? "";
  setText(byId("told"), found.text ? `Told: ${found.note}.` : "");
}

/** Pairs that look poisoned, and for those who may decide the step that settles it. */
function drawHeld() {
  byId("held").hidden = !shown.counts?.held;
  for (const button of byId("held").querySelectorAll("button")) button.hidden = !mayTeach();
  setText(byId("held-text"), `${shown.counts?.held}.`);
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

/** Draw what depends on the caller's rights anew, if they have turned out to be others. */
export function showRights() {
  if (mayTeach() === offered) return;
  offered = mayTeach();
  drawHeld();
  compare();
}

function drawVersions() {
  const { versions, current } = shown;
  const where = ({ version, on_disk: onDisk }) => (version === current ? "serving" : onDisk ? "on disk" : "not on disk");
  const lines = versions.map((each) => h("tr", { class: each.version === current ? "current" : "" },
    h("td", {}, number(each.version)),
    h("td", {}, each.created_at ? moment(new Date(each.created_at)) : "–"),
    h("td", {}, h("span", { class: isTrained(each) ? "" : "turned" }, each.reason), each.answer ? h("small", {}, each.answer) : ""),
    h("td", { class: "number" }, each.held_out_pairs ? `${number(each.held_out_reward_accuracy * each.held_out_pairs)} of ${number(each.held_out_pairs)}` : "–"),
    h("td", { class: "number" }, number(each.kl_nats, 2)),
    h("td", { class: "number" }, change(each.neutral_nll_change)),
    h("td", {}, where(each))));
  byId("versions").replaceChildren(...lines);
}

function rollBack(version) {
  const { adapter: name, current } = shown;
  const dialog = byId("confirm");
  setText(byId("confirm-text"), version
    ? `${name} answers with version ${current} now. Version ${version} is then served again, as a new version; pairs learned since are not learned again.`
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
