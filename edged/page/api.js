// The public API as the page uses it: requests, streams of answers, the stream of events, and the token.

import { byId } from "./text.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const TOKEN = "edged-token";

/** An answer that is an error: its message is for people, its status and code for programs. */
export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The JSON answer to a request; `body` makes it a POST, or what `method` says. Throws ApiError. */
export async function call(path, body, method) {
  return (await open(path, body, { method })).json();
}

/** The data of each event of an answer's stream, until its end. Throws ApiError, also for an error within it. */
export async function* answerEvents(path, body, signal) {
  for await (const event of eventsOf(await open(path, body, { signal }))) {
    if (event.data === "[DONE]") return;
    const data = JSON.parse(event.data);
    if (data.error) throw new ApiError(500, data.error.message, data.error.code);
    yield data;
  }
}

/**
 * What the daemon tells, for as long as the page is seen; `on` has a function for each kind of event, and
 * `connection(state, problem)` hears of "live", "waiting" and "hidden".
 */
export async function watch(on, backlog, connection) {
  let last = "";
  for (let failures = 0; ; ) {
    await seen(connection);
    const stop = new AbortController();
    const hide = () => document.hidden && stop.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const headers = last ? { "Last-Event-ID": last } : {};
      const response = await open(`v1/events?backlog=${backlog}`, undefined, { headers, signal: stop.signal });
      connection("live");
      failures = 0;
      for await (const event of eventsOf(response)) {
        last = event.id || last;
        on[event.name]?.(JSON.parse(event.data));
      }
      connection("waiting", "the daemon stopped");
    } catch (error) {
      if (stop.signal.aborted) continue;
      connection("waiting", error instanceof ApiError ? error.message : "the daemon does not answer");
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    await new Promise((resume) => setTimeout(resume, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
  }
}

/** Wait until the page is shown: nobody reads the stream of a hidden one. */
async function seen(connection) {
  while (document.hidden) {
    connection("hidden");
    await new Promise((resume) => document.addEventListener("visibilitychange", resume, { once: true }));
  }
}

async function open(path, body, options = {}) {
  const headers = { ...options.headers };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(path, {
    method: options.method ?? (body === undefined ? "GET" : "POST"),
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: options.signal,
    cache: "no-store",
  });
  if (response.status === 401) {
    await askForToken(token);
    return open(path, body, options);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.message, error.code);
  } catch {
    return new ApiError(response.status, `the daemon answered ${response.status}`, "");
  }
}

let asking = null;

/** Ask for the token once, whoever needs it; `refused` is the one that was no good. */
async function askForToken(refused) {
  if (sessionStorage.getItem(TOKEN) !== refused) return;
  asking ??= new Promise((resume) => {
    const dialog = byId("ask-token");
    const field = byId("token");
    if (refused) byId("token-text").textContent = "That token was refused. Try again.";
    field.value = "";
    const close = () => {
      if (!field.value) return dialog.showModal();
      dialog.removeEventListener("close", close);
      sessionStorage.setItem(TOKEN, field.value.trim());
      asking = null;
      resume();
    };
    dialog.addEventListener("close", close);
    dialog.showModal();
  });
  await asking;
}

/** Events of a text/event-stream answer: name, data and id. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const event = parsed(block);
      if (event.data) yield event;
    }
  }
}

function parsed(block) {
  const event = { name: "message", data: "", id: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("data: ")) event.data += line.slice(6);
    else if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("id: ")) event.id = line.slice(4);
  }
  return event;
}
