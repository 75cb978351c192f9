// One chat completion as it streams: its text, figures and events, and the same request as a curl command.

import { ask, chunkOf, readEvents, send } from "./api.js";
import { $, DASH, appendText, element, seconds, setState, showProblem } from "./dom.js";

const EVENTS_SHOWN = 400;
let running = null;
let requestId = null;
let events = [];
let drawn = true;

function requestBody() {
  const messages = [];
  if ($("play-system").value.trim()) messages.push({ role: "system", content: $("play-system").value });
  messages.push({ role: "user", content: $("play-user").value });
  const body = { model: $("play-model").value, messages };
  if ($("play-max").value) body.max_tokens = Number($("play-max").value);
  if ($("play-temperature").value) body.temperature = Number($("play-temperature").value);
  const schema = $("play-schema").value.trim();
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(schema) } };
  return { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

function parsed(schema) {
  try {
    return JSON.parse(schema);
  } catch (error) {
    throw new Error(`The JSON schema is no JSON: ${error.message}`);
  }
}

function asCurl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl -N ${location.origin}/v1/chat/completions`,
    `-H "Authorization: Bearer $HEADRACE_API_KEY"`,
    `-H "Content-Type: application/json"`,
    `-d '${quoted}'`,
  ].join(" \\\n  ");
}

function drawCurl() {
  $("play-copy").textContent = "Copy";
  try {
    $("play-curl").textContent = asCurl(requestBody());
  } catch (error) {
    $("play-curl").textContent = error.message;
  }
}

function keepEvent(raw) {
  events.push(raw);
  if (events.length > 2 * EVENTS_SHOWN) events = events.slice(-EVENTS_SHOWN);
  if (drawn && $("play-raw-box").open) {
    drawn = false;
    requestAnimationFrame(drawEvents);
  }
}

function drawEvents() {
  drawn = true;
  const pane = $("play-raw");
  pane.textContent = events.slice(-EVENTS_SHOWN).join("\n\n");
  pane.scrollTop = pane.scrollHeight;
}

// Times in seconds since the request was sent.
class Figures {
  constructor() {
    this.sent = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
    for (const name of ["queued", "first", "rate", "prompt", "tokens", "finish"]) $(`play-${name}`).textContent = DASH;
  }

  now() {
    return (performance.now() - this.sent) / 1000;
  }

  // If the status was sent before a worker began, no header says how long the request waited.
  waited(response) {
    const told = response.headers.get("x-headrace-queued-ms");
    $("play-queued").textContent = told === null ? `over ${seconds(this.now())}` : seconds(told / 1000);
  }

  took(chunk) {
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const isOutput = Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
    if (isOutput) {
      this.last = this.now();
      if (this.first === null) {
        this.first = this.last;
        $("play-first").textContent = seconds(this.first);
      }
    }
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens + (isOutput ? 1 : 0);
    if (this.tokens) $("play-tokens").textContent = `${this.tokens}`;
    if (this.last > this.first && this.tokens > 1) {
      $("play-rate").textContent = ((this.tokens - 1) / (this.last - this.first)).toFixed(1);
    }
    if (chunk.usage) {
      const cached = chunk.usage.prompt_tokens_details?.cached_tokens;
      $("play-prompt").textContent = chunk.usage.prompt_tokens + (cached ? ` (${cached} cached)` : "");
    }
    if (choice?.finish_reason) $("play-finish").textContent = choice.finish_reason;
  }
}

async function run() {
  if (running) return;
  showProblem($("play-problem"), null);
  let body;
  try {
    body = requestBody();
  } catch (error) {
    $("play-schema-box").open = true;
    showProblem($("play-problem"), error);
    return;
  }
  running = new AbortController();
  $("play-send").disabled = true;
  $("play-stop").disabled = false;
  $("play-output").replaceChildren();
  $("play-reasoning").replaceChildren();
  $("play-reasoning-box").hidden = true;
  events = [];
  requestId = null;
  drawEvents();
  setState($("play-state"), "waiting", "busy");
  const figures = new Figures();
  try {
    const response = await send("/v1/chat/completions", { body, signal: running.signal });
    figures.waited(response);
    requestId = response.headers.get("x-headrace-id");
    const done = await readEvents(response, (event) => {
      keepEvent(event.raw);
      const chunk = chunkOf(event);
      if (!chunk) return;
      figures.took(chunk);
      const delta = chunk.choices?.[0]?.delta;
      if (delta?.reasoning_content) {
        $("play-reasoning-box").hidden = false;
        appendText($("play-reasoning"), delta.reasoning_content);
      }
      if (delta?.content) appendText($("play-output"), delta.content);
      setState($("play-state"), figures.first === null ? "waiting" : "streaming", "busy");
    });
    if (!done) throw new Error("The connection ended before the answer did.");
    setState($("play-state"), "finished");
  } catch (error) {
    const stopped = error.name === "AbortError";
    setState($("play-state"), stopped ? "stopped" : "failed", stopped ? "" : "bad");
    if (!stopped) showProblem($("play-problem"), error);
  }
  running.abort(); // an error in the stream leaves it open
  running = null;
  $("play-send").disabled = false;
  $("play-stop").disabled = true;
}

// Closing the connection alone would leave the request running, for a client to rejoin.
function stop() {
  if (running && requestId) ask(`/headrace/requests/${encodeURIComponent(requestId)}/cancel`, { body: {} }).catch(() => {});
  running?.abort();
}

export function start() {
  $("play-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  $("play-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("play-form").requestSubmit();
  });
  $("playground").addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("play-stop").addEventListener("click", stop);
  $("play-raw-box").addEventListener("toggle", drawEvents);
  $("play-curl-box").addEventListener("toggle", drawCurl);
  $("play-form").addEventListener("input", drawCurl);
  $("play-copy").addEventListener("click", async () => {
    drawCurl();
    try {
      await navigator.clipboard.writeText($("play-curl").textContent);
      $("play-copy").textContent = "Copied";
    } catch {
      getSelection().selectAllChildren($("play-curl")); // the browser denies the clipboard, for example without HTTPS
    }
  });
}

export function showModels(select, models) {
  const chosen = select.value;
  select.replaceChildren(...models.map((model) => element("option", { text: model.id, value: model.id })));
  if (models.some((model) => model.id === chosen)) select.value = chosen;
}
