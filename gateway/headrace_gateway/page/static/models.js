// The models that the gateway lists, and how far a worker has loaded one. Polls only while there is something to wait for.

import { ask, key } from "./api.js";
import { $, element, setState } from "./dom.js";

const POLL_MS = 2000;
let models = [];
let loads = 0;
let isRefused = false;
let isAwaited = false;
let timer = null;
let missed = null; // the chosen model, if only the last list lacks it

const percent = (model) => `${Math.floor(100 * (model.progress ?? 0))} %`;

const isLoading = (model) => model?.state === "loading";

function draw() {
  const select = $("play-model");
  const chosen = missed ?? select.value;
  const texts = models.map((model) => (isLoading(model) ? `${model.id} (loading, ${percent(model)})` : model.id));
  const options = [...select.options];
  if (options.length === models.length && options.every((option, at) => option.value === models[at].id)) {
    options.forEach((option, at) => option.text !== texts[at] && (option.text = texts[at])); // an open list stays open
  } else {
    select.replaceChildren(...models.map((model, at) => element("option", { text: texts[at], value: model.id })));
    if (models.some((model) => model.id === chosen)) select.value = chosen;
  }
  const isMissed = chosen && chosen !== select.value && missed === null;
  missed = isMissed ? chosen : null;
  drawLoading();
}

// A model without a context length was never served: the gateway accepts no request for it yet.
function drawLoading() {
  const model = models.find((one) => one.id === $("play-model").value);
  const then = model?.max_model_len === undefined ? "It answers when it is loaded." : "Requests wait in the queue.";
  $("play-loading").hidden = !isLoading(model);
  $("play-loading-text").textContent = isLoading(model) ? `${model.id} is loading, ${percent(model)}. ${then}` : "";
  $("play-loading-bar").value = model?.progress ?? 0;
}

export async function load() {
  const number = (loads += 1);
  let told;
  isRefused = false;
  try {
    const { data } = await ask("/v1/models");
    if (number !== loads) return; // with another key, perhaps
    models = data;
    draw();
    if (!models.length) told = "No worker serves a model now.";
    else told = key.get() ? "The key is kept until this tab closes." : "This gateway asks for no key.";
  } catch (error) {
    if (number !== loads) return;
    isRefused = error.status === 401;
    if (!isRefused) told = error.message;
    else told = key.get() ? "The gateway refuses this key." : "The gateway asks for an API key.";
  }
  setState($("key-note"), told);
  schedule();
}

function schedule() {
  const isWorthIt = isAwaited || missed !== null || !models.length || models.some(isLoading);
  if (isWorthIt && !isRefused && document.visibilityState === "visible") timer ??= setTimeout(poll, POLL_MS);
}

function poll() {
  timer = null;
  load();
}

// Says whether a request waits for its first token: perhaps because its worker is loading the model again.
export function setAwaited(awaited) {
  isAwaited = awaited;
  schedule();
}

export function start() {
  $("play-model").addEventListener("change", () => {
    missed = null;
    drawLoading();
  });
  document.addEventListener("visibilitychange", schedule);
}
