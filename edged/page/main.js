// The page: every part with what it is fed by.

import { ApiError, call, watch } from "./api.js";
import { showStatus } from "./box.js";
import { startChat } from "./chat.js";
import { addPair, addVersion, knowAdapters, refreshOf, showAdapter, showRights, startLearning } from "./learning.js";
import { outcomesCame } from "./outcomes.js";
import { showAdapters, showCaller, speaker, startSpeaker } from "./speaker.js";
import { byId, setText } from "./text.js";
import { addIterations, startTimeline } from "./timeline.js";

const BACKLOG = 1000;
const ENGINE = "edged-engine";
let versions = {};

async function readAdapters() {
  try {
    const { adapters } = await call("v1/adapters");
    versions = Object.fromEntries(adapters.map((item) => [item.adapter, item.version]));
    showAdapters(versions);
    knowAdapters(Object.keys(versions));
    await showAdapter(speaker());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    connection("waiting", error.message);
  }
}

function connection(state, problem = "") {
  byId("lamp").className = `lamp ${state}`;
  setText(byId("connection"), { live: "live", waiting: problem, hidden: "resting" }[state]);
  if (state !== "live") return;
  readAdapters();
  outcomesCame();
}

startSpeaker(showAdapter);
startChat();
startTimeline();
startLearning();
const engine = byId("engine");
engine.open = localStorage.getItem(ENGINE) === "open";
engine.addEventListener("toggle", () => localStorage.setItem(ENGINE, engine.open ? "open" : "folded"));
byId("show-keys").addEventListener("click", () => byId("keys").showModal());
watch(
  {
    iterations: (data) => addIterations(data.iterations),
    status: (status) => {
      showCaller(status.caller);
      showRights();
      showStatus(status);
    },
    pair: addPair,
    answer: refreshOf,
    outcomes: (data) => {
      outcomesCame(data.adapter);
      refreshOf(data);
    },
    version: (data) => {
      versions = { ...versions, [data.adapter]: data.version };
      showAdapters(versions);
      addVersion(data);
    },
  },
  BACKLOG,
  connection,
);
