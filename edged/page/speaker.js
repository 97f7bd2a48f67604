// Who speaks in the chat: the name in the user box, and whether it is one of the caller's.

import { ApiError, call } from "./api.js";
import { announce, byId, h, setText } from "./text.js";

const USER_NAME = /^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$/;
const REMEMBERED = "edged-user";
/** Whom a caller begins as who may speak for everybody. */
const FIRST_USER = "guest";

const field = byId("user");
/** The API's word for who asks: name, roles, users. */
let caller = null;
let versions = {};
let typed = false;
/** Whether the box has had a name for this caller. */
let offered = false;
let changed = () => {};

/** Wire the user box up; `hears` is told of every new speaker. */
export function startSpeaker(hears) {
  changed = hears;
  field.value = localStorage.getItem(REMEMBERED) ?? "";
  field.addEventListener("input", () => {
    typed = true;
    const name = speaker();
    if (name !== null) localStorage.setItem(REMEMBERED, name);
    show();
  });
  field.addEventListener("change", () => speaker() !== null && changed(speaker()));
  field.addEventListener("blur", () => {
    offerName();
    show();
  });
  show();
}

/** The user that the chat speaks as; "" is nobody, null a name that cannot be one or is another's. */
export function speaker() {
  const name = field.value.trim();
  return problemOf(name) ? null : name;
}

/** Whether the caller's answers can be learned from. */
export const mayTeach = () => caller !== null && caller.roles.some((role) => role === "train" || role === "admin");

/** The adapters that there are, with their versions. */
export function showAdapters(current) {
  versions = current;
  show();
}

/** Take in who the caller is. A name that nobody typed here gives way to one of the caller's, once nobody is in the box. */
export function showCaller(known) {
  if (JSON.stringify(known) === JSON.stringify(caller)) return;
  caller = known;
  offered = false;
  offerName();
  show();
}

/** Put a name of the caller's into the box, once; never under the hands of somebody who is about to type one. */
function offerName() {
  if (typed || offered || !caller || document.activeElement === field) return;
  offered = true;
  const remembered = localStorage.getItem(REMEMBERED);
  field.value = remembered !== null && !problemOf(remembered) ? remembered : firstName();
  changed(speaker());
}

/** Have the daemon tell who the caller is, if it has not yet; whether that is known. */
export async function callerIsKnown() {
  if (caller) return true;
  try {
    showCaller((await call("v1/status")).caller);
  } catch (error) {
    const problem = error instanceof ApiError ? error.message : "The daemon does not answer.";
    complain(problem);
    announce(problem);
  }
  return caller !== null;
}

function firstName() {
  if (caller.users.includes("*")) return FIRST_USER;
  return ownNames().sort((a, b) => (b === caller.name) - (a === caller.name))[0] ?? "";
}

const ownNames = () => (caller ? caller.users.filter((name) => !name.endsWith("*")) : []);

/** As the daemon decides it: a name, the beginning of one with "*", or "*" for everybody. */
const isOwn = (name) => caller.users.some((known) => (known.endsWith("*") ? name.startsWith(known.slice(0, -1)) : name === known));

function problemOf(name) {
  if (!name) return "";
  if (!USER_NAME.test(name)) return "A name has 1 to 64 letters, digits, . _ @ or -, the first a letter or digit.";
  if (!caller || isOwn(name)) return "";
  const way = caller.users.length ? `you may speak for ${caller.users.join(", ")}` : "leave the box empty";
  return `"${name}" is not for you: ${way}.`;
}

function show() {
  const name = speaker();
  complain(problemOf(field.value.trim()));
  field.setAttribute("aria-invalid", name === null);
  const learning = mayTeach() ? "base, learning" : "base";
  const serving = name ? (versions[name] ? `${name}@${versions[name]}` : learning) : "base";
  setText(byId("serving"), name === null || !caller ? "" : serving);
  const names = [...new Set([...Object.keys(versions), ...ownNames()])].sort();
  const list = byId("users");
  if (names.join() !== Array.from(list.children, (option) => option.value).join()) {
    list.replaceChildren(...names.map((each) => h("option", { value: each })));
  }
}

function complain(problem) {
  const element = byId("user-problem");
  element.hidden = !problem;
  setText(element, problem);
}
