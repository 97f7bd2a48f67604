// One completion in the conversation: its candidates as they come, and what the user does with them.

import { ApiError, call } from "./api.js";
import { follow } from "./outcomes.js";
import { announce, h, icon, milliseconds, number, setText } from "./text.js";

const LETTERS = "AB";

/** One candidate answer: its text, its buttons, and how it was rated. */
class Candidate {
  constructor(group, index) {
    this.group = group;
    this.index = index;
    this.text = "";
    this.name = group.count > 1 ? `answer ${LETTERS[index]}` : "the answer";
    this.body = h("div", { class: "text" });
    const button = (label, shown, act, properties = {}) =>
      h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick: act, ...properties }, shown);
    this.pick = h("button", { type: "button", class: "pick", onclick: () => group.pick(index), "aria-keyshortcuts": `${index + 1}`,
      "aria-label": `Pick ${this.name}`, "aria-pressed": "false" }, `Pick ${LETTERS[index]}`);
    this.up = button(`Good: ${this.name}`, icon("up"), () => group.rate(index, "up"), { "aria-pressed": "false" });
    this.down = button(`Bad: ${this.name}`, icon("down"), () => group.rate(index, "down"), { "aria-pressed": "false" });
    this.edit = button(`Edit ${this.name}`, icon("edit"), () => this.startEdit());
    this.tools = h("div", { class: "tools", hidden: true }, group.count > 1 && this.pick, this.up, this.down, this.edit);
    this.element = h("div", { class: "candidate", role: "group", "aria-label": this.name }, this.body, this.tools);
  }

  add(text) {
    this.text += text;
    this.body.append(text);
  }

  startEdit() {
    if (this.editor) return;
    const field = h("textarea", { rows: Math.min(12, 2 + Math.ceil(this.text.length / 48)), "aria-label": `New text of ${this.name}` });
    field.value = this.text;
    const close = () => {
      this.editor.replaceWith(this.body);
      this.editor = null;
      this.tools.hidden = false;
      this.edit.focus();
    };
    const save = async () => {
      const text = field.value.trim();
      if (!text || text === this.text.trim()) return close();
      if (!(await this.group.report({ signal: "edit", choice: this.index, text }))) return;
      this.text = text;
      this.body.textContent = text;
      this.element.classList.add("edited");
      this.group.settle(this.index);
      close();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      else if (event.key === "Escape") close();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.editor = h("div", { class: "editor" }, field, h("div", { class: "tools" },
      h("button", { type: "button", class: "primary", onclick: save }, "Save edit"),
      h("button", { type: "button", onclick: close }, "Cancel")));
    this.body.replaceWith(this.editor);
    this.tools.hidden = true;
    field.focus();
  }
}

/** A completion with its candidates, which `user` can teach or not. `again` asks for another answer to the same question. */
export class AnswerGroup {
  constructor(user, teaching, count, again) {
    this.user = user;
    this.teaching = teaching;
    this.count = count;
    this.again = again;
    this.id = "";
    this.taken = null;
    this.chosenOf = 1;
    this.edited = false;
    this.startedMs = performance.now();
    this.candidates = Array.from({ length: count }, (_, index) => new Candidate(this, index));
    this.chip = h("span", { class: "chip" }, user || "base");
    this.facts = h("span", { class: "facts-line" }, "…");
    this.repeat = h("button", { type: "button", class: "icon-button", "aria-label": "Ask again", title: "Ask again", "aria-keyshortcuts": "r",
      hidden: true, onclick: () => this.regenerate() }, icon("again"));
    this.note = h("p", { class: "note" });
    this.outcome = h("p", { class: "outcome" });
    this.element = h("article", { class: "turn answer", "aria-label": `Answer for ${user || "nobody"}`, "aria-busy": "true" },
      h("div", { class: "answer-head" }, this.chip, this.facts, this.repeat),
      h("div", { class: count > 1 ? "candidates pair" : "candidates" }, ...this.candidates.map((each) => each.element)),
      this.note, this.outcome);
  }

  /** What the conversation goes on with. */
  get text() {
    return this.candidates[this.taken ?? 0].text;
  }

  /** Take in one chunk of the stream. */
  take(chunk) {
    this.id = chunk.id;
    this.chosenOf = chunk.edged?.best_of ?? this.chosenOf;
    this.edited ||= Boolean(chunk.edged?.edited);
    for (const choice of chunk.choices) this.candidates[choice.index].add(choice.delta.content ?? "");
    if (chunk.usage) {
      const seconds = (performance.now() - this.startedMs) / 1e3;
      setText(this.chip, chunk.system_fingerprint);
      const chosen = (this.chosenOf > 1 ? `, the best of ${this.chosenOf}` : "") + (this.edited ? ", edited as you do" : "");
      setText(this.facts, `${number(chunk.usage.completion_tokens)} tokens in ${milliseconds(seconds * 1e3)}${chosen}`);
    }
  }

  /** The stream has ended, by itself, by the user (`stopped`) or by an error (`problem`). */
  end(stopped, problem) {
    this.element.setAttribute("aria-busy", "false");
    if (stopped) setText(this.facts, "stopped");
    if (problem) {
      setText(this.facts, "failed");
      this.say(problem, true);
    }
    this.repeat.hidden = false;
    const teachable = this.teaching && this.id && !problem;
    for (const each of this.candidates) each.tools.hidden = !teachable || !each.text;
    if (stopped || problem) return;
    const same = this.count > 1 && this.candidates[0].text === this.candidates[1].text;
    if (same) {
      for (const each of this.candidates) each.pick.hidden = true;
      this.say("Both answers are the same: there is nothing to pick.");
    }
    if (this.count > 1) announce(same ? "Both answers are the same." : `Two answers. A: ${this.candidates[0].text} B: ${this.candidates[1].text}`);
    else announce(this.text);
  }

  /** Tell the daemon what the user did; whether it was taken. */
  async report(signal) {
    try {
      const answer = await call("v1/feedback", { completion_id: this.id, user: this.user, ...signal });
      const pairs = answer.pair_ids;
      if (answer.duplicate) this.say("Said before: nothing changes.");
      else if (pairs.length) this.say(`${answer.reason ? "Rating" : pairs.length > 1 ? "Pairs" : "Pair"} ${pairs.join(", ")} for ${this.user}.`);
      if (pairs.length) follow(answer.id, this.user, (text, settled) => this.tell(text, settled));
      else this.say(`Noted${answer.reason ? `: ${answer.reason}` : "."}`);
      return true;
    } catch (error) {
      this.say(error instanceof ApiError ? error.message : "The daemon does not answer.", true);
      return false;
    }
  }

  async pick(index) {
    const each = this.candidates[index];
    if (this.taken === index || each.pick.hidden || each.tools.hidden || this.count < 2) return;
    if (await this.report({ signal: "chosen", choice: index })) this.settle(index);
  }

  /** The conversation goes on with this candidate. */
  settle(index) {
    this.taken = index;
    if (this.count < 2) return;
    for (const each of this.candidates) {
      const taken = each.index === index;
      each.pick.setAttribute("aria-pressed", taken);
      setText(each.pick, taken ? "Picked" : `Pick ${LETTERS[each.index]}`);
      each.element.classList.toggle("taken", taken);
      each.element.classList.toggle("passed", !taken);
    }
  }

  async rate(index, signal) {
    const each = this.candidates[index];
    if (each.tools.hidden || !(await this.report({ signal, choice: index }))) return;
    each.up.setAttribute("aria-pressed", signal === "up");
    each.down.setAttribute("aria-pressed", signal === "down");
  }

  async regenerate() {
    if (this.repeat.hidden || !this.again(this)) return;
    this.repeat.hidden = true;
    this.element.classList.add("replaced");
    const turnedDown = this.candidates.filter((each) => !each.tools.hidden && (this.taken === null || this.taken === each.index));
    for (const each of turnedDown) await this.report({ signal: "regenerate", choice: each.index });
  }

  /** What a key does, while the conversation has the focus; whether it did anything. */
  press(key) {
    const index = this.taken ?? 0;
    const acts = {
      1: () => this.pick(0),
      2: () => this.pick(1),
      "+": () => this.rate(index, "up"),
      "-": () => this.rate(index, "down"),
      e: () => !this.candidates[index].tools.hidden && this.candidates[index].startEdit(),
      r: () => this.regenerate(),
    };
    acts[key]?.();
    return key in acts;
  }

  /** What became of the latest feedback that made pairs; said aloud when it is settled. */
  tell(text, settled) {
    if (settled && this.outcome.textContent !== text) announce(text);
    setText(this.outcome, text);
  }

  say(text, isProblem = false) {
    this.note.classList.toggle("problem", isProblem);
    setText(this.note, text);
    announce(text);
  }
}
