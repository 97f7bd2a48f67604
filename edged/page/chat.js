// The conversation: what was said, and the answer under way.

import { AnswerGroup } from "./answers.js";
import { answerEvents, ApiError } from "./api.js";
import { callerIsKnown, mayTeach, speaker } from "./speaker.js";
import { announce, byId, h } from "./text.js";

const conversation = byId("conversation");
const question = byId("question");

/** Turns of the conversation: {question} or {group}. */
let turns = [];
let running = null;

/** Wire the chat up. */
export function startChat() {
  byId("smooth").checked = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", () => {
    clear();
    announce("A new chat.");
    question.focus();
  });
  question.addEventListener("input", fit);
  question.addEventListener("keydown", composerKey);
  conversation.addEventListener("keydown", conversationKey);
  clear();
}

function composerKey(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape") {
    stop();
  } else if (event.key === "ArrowUp" && !question.value) {
    const latest = turns.findLast((turn) => turn.group)?.group.element;
    const target = latest?.querySelector(".tools:not([hidden]) button:not([hidden])") ?? conversation;
    event.preventDefault();
    target.focus();
  }
}

function conversationKey(event) {
  if (event.target.matches("textarea, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    stop();
    question.focus();
    return;
  }
  const around = turns.find((turn) => turn.group?.element.contains(event.target)) ?? turns.findLast((turn) => turn.group);
  if (around?.group.press(event.key)) event.preventDefault();
}

function fit() {
  question.rows = Math.min(6, Math.max(1, question.value.split("\n").length, Math.ceil(question.value.length / 60)));
}

async function send() {
  if (!(await callerIsKnown())) return;
  const text = question.value.trim();
  if (!text || running) return;
  if (speaker() === null) return byId("user").focus();
  conversation.querySelector(".welcome")?.remove();
  // A question that got no answer is not part of the conversation.
  if (turns.at(-1)?.question !== undefined) turns.pop();
  turns.push({ question: text });
  conversation.append(h("article", { class: "turn question", "aria-label": "You" }, h("p", { class: "text" }, text)));
  question.value = "";
  fit();
  answer();
}

/** The conversation so far as the API wants it. */
function messages() {
  return turns.map((turn) => (turn.group ? { role: "assistant", content: turn.group.text } : { role: "user", content: turn.question }));
}

async function answer() {
  const user = speaker();
  const teaching = Boolean(user) && mayTeach();
  const count = byId("two").checked && teaching ? 2 : 1;
  const qoe = { deliver: byId("smooth").checked ? "smooth" : "as_made" };
  const body = { messages: messages(), n: count, stream: true, stream_options: { include_usage: true }, qoe, ...(user ? { user } : {}) };
  const group = new AnswerGroup(user, teaching, count, regenerate);
  const [said, own] = [turns, new AbortController()];
  running = own;
  show(true);
  conversation.append(group.element);
  follow(true);
  let problem = "";
  try {
    for await (const chunk of answerEvents("v1/chat/completions", body, own.signal)) {
      const near = atEnd();
      group.take(chunk);
      follow(near);
    }
  } catch (error) {
    if (!own.signal.aborted) problem = error instanceof ApiError ? error.message : "The daemon does not answer.";
  }
  const near = atEnd();
  group.end(own.signal.aborted, problem);
  // A turn without a word cannot be gone on from.
  if (group.text) said.push({ group });
  follow(near);
  running = null;
  show(false);
}

/** Ask the last question again; whether that can be done now. */
function regenerate(group) {
  const latest = turns.at(-1);
  if (running || !latest || (latest.group && latest.group !== group)) {
    announce("Only the latest answer can be asked for again.");
    return false;
  }
  if (speaker() === null) {
    byId("user").focus();
    return false;
  }
  if (latest.group) turns.pop();
  answer();
  return true;
}

function stop() {
  running?.abort();
}

/** An empty conversation, with questions to begin with. */
function clear() {
  stop();
  turns = [];
  conversation.replaceChildren(byId("welcome").content.cloneNode(true));
  for (const example of conversation.querySelectorAll("button")) {
    example.addEventListener("click", () => {
      question.value = example.textContent;
      question.focus();
      send();
    });
  }
}

function show(busy) {
  const stopHadFocus = document.activeElement === byId("stop");
  const sendHadFocus = document.activeElement === byId("send");
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  if ((busy && sendHadFocus) || (!busy && stopHadFocus)) question.focus();
}

const atEnd = () => conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 80;

function follow(yes) {
  if (yes) conversation.scrollTop = conversation.scrollHeight;
}
