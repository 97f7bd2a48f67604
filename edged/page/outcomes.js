// What became of feedback: asked for again whenever the daemon tells an outcome of the adapter that it teaches.

import { ApiError, call } from "./api.js";

/** Feedback whose pairs wait, by id: the adapter that learns from it, and whom to tell. */
const open = new Map();

/** Tell `show(text, settled)` what becomes of a feedback, until nothing more can come. */
export function follow(id, adapter, show) {
  open.set(id, { adapter, show });
  ask(id);
}

/** Something became of an adapter's pairs; without a name any may have moved on. */
export function outcomesCame(adapter) {
  for (const [id, each] of open) if (adapter === undefined || each.adapter === adapter) ask(id);
}

async function ask(id) {
  const { show } = open.get(id);
  try {
    const { pairs, settled } = await call(`v1/feedback/${encodeURIComponent(id)}`);
    if (!open.has(id)) return;
    // Somebody may still decide about pairs that are held.
    if (settled && pairs.every((pair) => pair.state !== "quarantined")) open.delete(id);
    show([...new Set(pairs.map((pair) => pair.text))].join("; "), settled);
  } catch (error) {
    if (!(error instanceof ApiError)) return;
    open.delete(id);
    show(error.message, true);
  }
}
