// The form of a conversation, the figures and events of its last answer, and the request as a curl command.

import { Completion, PATH } from "./completion.js";
import * as conversation from "./conversation.js";
import { $, DASH, seconds, setState, showProblem } from "./dom.js";
import { setAwaited } from "./models.js";

const EVENTS_SHOWN = 400;
const FIGURES = ["queued", "first", "rate", "prompt", "tokens", "finish"];
let running = null;
let lastBody = null;
let events = [];
let drawn = true;

// Throws an error for a field that is no JSON.
function requestBody(turn) {
  const messages = conversation.messagesOf(turn);
  if ($("play-system").value.trim()) messages.unshift({ role: "system", content: $("play-system").value });
  const body = { model: $("play-model").value, messages };
  if ($("play-max").value) body.max_tokens = Number($("play-max").value);
  if ($("play-temperature").value) body.temperature = Number($("play-temperature").value);
  const schema = parsed("schema", "The JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = parsed("tools", "The list of tools");
  if (tools) Object.assign(body, { tools, parallel_tool_calls: false }); // the next message is the result of the call
  return { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

function parsed(name, title) {
  const text = $(`play-${name}`).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    $(`play-${name}-box`).open = true;
    throw new Error(`${title} is no JSON: ${error.message}`);
  }
}

function asCurl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl -N ${location.origin}${PATH}`,
    `-H "Authorization: Bearer $HEADRACE_API_KEY"`,
    `-H "Content-Type: application/json"`,
    `-d '${quoted}'`,
  ].join(" \\\n  ");
}

// The request that Send would send; without a message, the last one.
function drawCurl() {
  $("play-copy").textContent = "Copy";
  if (!$("play-curl-box").open) return;
  try {
    const said = $("play-user").value;
    $("play-curl").textContent = asCurl(lastBody && !said.trim() ? lastBody : requestBody(conversation.makeTurn(said)));
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

function clearFigures() {
  for (const name of FIGURES) $(`play-${name}`).textContent = DASH;
}

// Times in seconds since the request was sent.
class Figures {
  constructor() {
    this.sent = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
    clearFigures();
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

function drawButtons() {
  $("play-send").disabled = Boolean(running);
  $("play-stop").disabled = !running;
  $("play-again").disabled = Boolean(running) || conversation.isEmpty();
  $("play-new").disabled = conversation.isEmpty();
}

function send() {
  const said = $("play-user").value;
  if (running || !said.trim()) return;
  if (run(conversation.makeTurn(said))) $("play-user").value = "";
  drawCurl();
}

// Begins the answer of the turn; returns false if a field is wrong.
function run(turn) {
  showProblem($("play-problem"), null);
  try {
    lastBody = requestBody(turn);
  } catch (error) {
    showProblem($("play-problem"), error);
    return false;
  }
  conversation.begin(turn, lastBody.model);
  running = new Completion();
  events = [];
  drawEvents();
  drawButtons();
  setState($("play-state"), "waiting", "busy");
  answer(running, turn, lastBody);
  return true;
}

async function answer(completion, turn, body) {
  const figures = new Figures();
  setAwaited(true);
  let problem = null;
  try {
    await completion.read(body, {
      onResponse: (response) => figures.waited(response),
      onEvent: (event) => keepEvent(event.raw),
      onChunk(chunk) {
        figures.took(chunk);
        const delta = chunk.choices?.[0]?.delta;
        if (delta) turn.add(delta);
        if (figures.first === null) return;
        setAwaited(false);
        setState($("play-state"), "streaming", "busy");
      },
    });
  } catch (error) {
    problem = error;
  }
  turn.end({ isStopped: completion.isStopped, isFailed: Boolean(problem) });
  if (running !== completion) return; // a new conversation has begun
  running = null;
  setAwaited(false);
  if (completion.isStopped) setState($("play-state"), "stopped");
  else setState($("play-state"), problem ? "failed" : "finished", problem ? "bad" : "");
  showProblem($("play-problem"), completion.isStopped ? null : problem);
  drawButtons();
}

const stop = () => running?.stop();

function startAnew() {
  stop();
  running = null;
  setAwaited(false);
  conversation.clear();
  lastBody = null;
  events = [];
  drawEvents();
  clearFigures();
  showProblem($("play-problem"), null);
  setState($("play-state"), "idle");
  drawButtons();
  drawCurl();
  $("play-user").focus();
}

// Escape stops wherever the focus is: a button loses it when it is disabled.
function onKey(event) {
  if (event.isComposing || $("playground").hidden) return; // an input method takes Enter and Escape for itself
  if (event.key === "Escape") stop();
  const isMessage = event.target === $("play-user") && !event.shiftKey;
  const isHere = $("playground").contains(event.target);
  if (event.key !== "Enter" || !isHere || !(isMessage || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  $("play-form").requestSubmit();
}

export function start() {
  $("play-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", onKey);
  $("play-stop").addEventListener("click", stop);
  $("play-again").addEventListener("click", () => run(conversation.lastTurn()));
  $("play-new").addEventListener("click", startAnew);
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
