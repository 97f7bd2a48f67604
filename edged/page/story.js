// An adapter's story in the daemon's words: what was learned when, what waits, and two versions' answers side by side.

import { mayTeach } from "./speaker.js";
import { byId, h, moment, setText } from "./text.js";

const SIDES = ["before", "after"];
/** How the step begins of what waits and needs none. */
const NOTHING = "nothing: ";

let told = null;
/** The versions that somebody chose to compare, by side. */
let chosen = {};

/** Wire it up; `goBack(version)` is called for the version on the left. */
export function startStory(goBack) {
  for (const side of SIDES) {
    byId(side).addEventListener("change", () => {
      chosen[side] = Number(byId(side).value);
      compare();
    });
  }
  byId("go-back").addEventListener("click", () => goBack(Number(byId("before").value)));
}

/** Show a story, null for none; what was chosen to compare stays for the same adapter. */
export function showStory(story) {
  if (story?.adapter !== told?.adapter) chosen = {};
  told = story;
  const waits = (told?.waits ?? []).filter((wait) => wait.kind !== "held").map((wait) => (wait.step.startsWith(NOTHING)
    ? h("li", { class: "calm" }, `${wait.text}; ${wait.step.slice(NOTHING.length)}.`)
    : h("li", {}, `${wait.text}. `, h("small", {}, `To settle it: ${wait.step}.`))));
  byId("waits").replaceChildren(...waits);
  const events = told?.events ?? [];
  byId("story").replaceChildren(...events.map((event) => h("li", {}, h("time", { datetime: event.at }, moment(new Date(event.at))), ` ${event.text}`)));
  byId("compare").hidden = !told?.version;
  if (told?.version) compare();
}

/** Draw the comparison: the untrained adapter and the newest version with an answer, if nothing else was chosen. */
export function compare() {
  if (!told?.version) return;
  const { answers, version: current } = told;
  const first = { before: 0, after: answers.findLast((each) => each.answer !== null)?.version ?? 0 };
  setText(byId("asked"), `Asked: ${told.prompt ?? "the adapter's first prompt, which came as tokens"}`);
  for (const side of SIDES) {
    const select = byId(side);
    const options = answers.map(({ version }) => [version, `version ${version}${version === 0 ? ", untrained" : ""}${version === current ? ", serving" : ""}`]);
    if (options.join() !== Array.from(select.options, (option) => [option.value, option.textContent]).join()) {
      select.replaceChildren(...options.map(([version, name]) => h("option", { value: version }, name)));
    }
    const shown = answers.find(({ version }) => version === chosen[side]) ?? answers.find(({ version }) => version === first[side]);
    select.value = shown.version;
    setText(byId(`${side}-answer`), shown.answer === "" ? "An empty answer." : (shown.answer ?? "No answer: it was not tested yet."));
  }
  const left = answers.find(({ version }) => version === Number(byId("before").value));
  const why = left.version === current ? `Version ${current} is served now.` : !left.on_disk ? `Version ${left.version} is not on disk any more.`
    : mayTeach() ? "" : "Your role may not go back.";
  byId("go-back").hidden = Boolean(why);
  setText(byId("go-back"), `Go back to version ${left.version}${left.version ? "" : ", untrained"}`);
  setText(byId("no-way-back"), why);
}
