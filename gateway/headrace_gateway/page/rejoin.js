// One stream over several connections: cut it, rejoin it here or at another replica, and count what arrived.

import { ask, chunkOf, readEvents, send } from "./api.js";
import { $, DASH, appendText, element, setState, showProblem } from "./dom.js";

const RESUME = { "X-Headrace-Resume": "1" };
let stream = null;

// What one reader has received, over all its connections.
class Reader {
  constructor(output) {
    this.output = output;
    this.text = "";
    this.tokenIds = [];
    this.tokens = 0;
    this.finished = false;
  }

  take(chunk, node) {
    const choice = chunk.choices?.[0];
    this.tokenIds.push(...(choice?.token_ids ?? []));
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    const text = choice?.delta?.content ?? "";
    this.text += text;
    if (text) appendText(node, text, this.output);
    return text;
  }

  get count() {
    return this.tokenIds.length || this.tokens;
  }
}

class Stream {
  constructor(model) {
    this.model = model;
    this.id = null;
    this.cursor = null;
    this.reader = new Reader($("join-output"));
    this.connections = [];
    this.controllers = new Set();
    this.current = null; // the controller of the connection that feeds the joined text
    this.second = null; // that of the second reader
  }

  get path() {
    return `/v1/chat/completions/${encodeURIComponent(this.id)}`;
  }

  async begin(body) {
    await this.connect("", (signal) => send("/v1/chat/completions", { body, headers: RESUME, signal }));
  }

  async rejoin(base) {
    const after = this.cursor === null ? "" : `&starting_after=${encodeURIComponent(this.cursor)}`;
    const path = `${this.path}?stream=true${after}`;
    await this.connect(base, (signal) => send(path, { base, headers: { ...RESUME, Accept: "text/event-stream" }, signal }));
  }

  // Reads one connection until it ends, is cut or fails.
  async connect(base, open) {
    const controller = new AbortController();
    this.current = controller;
    this.controllers.add(controller);
    const number = this.connections.length + 1;
    const connection = { base, before: this.reader.count, node: null, item: null };
    this.connections.push(connection);
    connection.node = element("span", { className: `seg-${number % 4}` });
    connection.item = element("li", { className: `seg-${number % 4}` });
    $("join-output").append(connection.node);
    $("join-connections").append(connection.item);
    this.draw("connecting", "busy");
    try {
      const response = await open(controller.signal);
      this.id ??= response.headers.get("x-headrace-id");
      this.draw("waiting", "busy");
      this.reader.finished = await readEvents(response, (event) => this.took(event, connection, controller));
      if (this !== stream) return;
      this.draw(this.reader.finished ? "finished" : "the replica closed the connection", this.reader.finished ? "" : "bad");
    } catch (error) {
      if (this !== stream) return;
      const cut = error.name === "AbortError";
      this.draw(cut ? "cut" : "failed", cut ? "" : "bad");
      if (!cut) showProblem($("join-problem"), error);
    } finally {
      this.controllers.delete(controller);
      controller.abort();
      if (this.current === controller) this.current = null;
      if (this === stream) this.drawButtons();
    }
    if (this.reader.finished) await this.verify(base);
  }

  took(event, connection, controller) {
    if (controller.signal.aborted || this !== stream) return; // in the same piece as the event at which it was cut
    const chunk = chunkOf(event);
    this.cursor = event.id ?? chunk?.headrace?.cursor ?? this.cursor;
    if (!chunk) return;
    this.reader.take(chunk, connection.node);
    this.draw("streaming", "busy");
    const limit = Number($("join-cut-after").value);
    if (limit && this.connections.length === 1 && this.reader.count >= limit) this.cut();
  }

  cut() {
    this.current?.abort();
  }

  async verify(base) {
    try {
      const answer = await ask(this.path, { base });
      if (this !== stream) return;
      const problem = differences(this.reader, answer);
      const [count, times] = [this.reader.count, this.connections.length];
      const received = `${count} tokens came over ${times} connection${times === 1 ? "" : "s"}`;
      const verdict = problem ?? `${received}; the finished answer has ${answer.usage.completion_tokens}. No token was lost or doubled.`;
      $("join-verdict").hidden = false;
      setState($("join-verdict"), verdict, problem ? "bad" : "");
      const status = await ask(`/headrace/requests/${encodeURIComponent(this.id)}`, { base });
      const attempts = Math.max(...status.requests.map((one) => one.attempt));
      if (attempts > 1 && this === stream) $("join-verdict").append(` ${attempts} workers took turns.`);
    } catch (error) {
      if (this === stream) showProblem($("join-problem"), error);
    }
  }

  draw(state, tone) {
    setState($("join-state"), state, tone);
    $("join-id").textContent = this.id ?? DASH;
    $("join-cursor").textContent = this.cursor ?? DASH;
    this.connections.forEach((connection, index) => {
      const until = this.connections[index + 1]?.before ?? this.reader.count;
      connection.item.textContent = `${index + 1} · ${connection.base || "this replica"} · ${until - connection.before} tokens`;
    });
    this.drawButtons();
  }

  drawButtons() {
    const open = this.current !== null;
    $("join-cut").disabled = !open || this.id === null;
    $("join-here").disabled = $("join-there").disabled = open || this.id === null || this.reader.finished;
    $("join-second").disabled = this.id === null;
  }

  // Reads from the start, without disturbing the first reader.
  async readAgain() {
    this.second?.abort(); // a browser opens six connections to a host and no more
    const controller = (this.second = new AbortController());
    this.controllers.add(controller);
    const output = $("join-second-output");
    output.replaceChildren();
    $("join-second-box").hidden = false;
    const state = $("join-second-state");
    setState(state, "connecting", "busy");
    const reader = new Reader(output);
    try {
      const headers = { ...RESUME, Accept: "text/event-stream" };
      const response = await send(`${this.path}?stream=true`, { headers, signal: controller.signal });
      const done = await readEvents(response, (event) => {
        const chunk = chunkOf(event);
        if (!chunk || controller.signal.aborted) return;
        reader.take(chunk, output);
        setState(state, `${reader.count} tokens`, "busy");
      });
      setState(state, `${reader.count} tokens, ${done ? "finished" : "connection closed"}`, done ? "" : "bad");
    } catch (error) {
      if (error.name !== "AbortError") setState(state, error.message, "bad");
    } finally {
      this.controllers.delete(controller);
      controller.abort();
    }
  }

  close() {
    for (const controller of this.controllers) controller.abort();
  }
}

// Returns the difference between the received tokens and the whole answer; null if there is none.
function differences(reader, answer) {
  const choice = answer.choices[0];
  if (reader.text !== (choice.message.content ?? "")) return "The joined text is not the text of the finished answer.";
  const whole = choice.token_ids;
  const same = Array.isArray(whole) && reader.tokenIds.length
    ? whole.length === reader.tokenIds.length && whole.every((id, index) => id === reader.tokenIds[index])
    : reader.count === answer.usage.completion_tokens;
  return same ? null : `${reader.count} tokens came, but the finished answer has ${answer.usage.completion_tokens}.`;
}

async function begin() {
  stream?.close();
  const body = {
    model: $("join-model").value,
    messages: [{ role: "user", content: $("join-prompt").value }],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_token_ids: true,
  };
  if ($("join-max").value) body.max_tokens = Number($("join-max").value);
  for (const id of ["join-output", "join-connections", "join-second-output"]) $(id).replaceChildren();
  for (const id of ["join-verdict", "join-second-box"]) $(id).hidden = true;
  showProblem($("join-problem"), null);
  stream = new Stream(body.model);
  await stream.begin(body);
}

async function rejoin(base) {
  showProblem($("join-problem"), null);
  await stream.rejoin(base);
}

export function start() {
  $("join-form").addEventListener("submit", (event) => {
    event.preventDefault();
    begin();
  });
  $("join-other-form").addEventListener("submit", (event) => {
    event.preventDefault();
    let url = null;
    try {
      url = new URL($("join-url").value);
    } catch {
      // told below
    }
    if (!url || !["http:", "https:"].includes(url.protocol)) {
      showProblem($("join-problem"), new Error("The other replica needs a URL such as http://127.0.0.1:8001"));
    } else if (!$("join-there").disabled) {
      rejoin(url.origin);
    }
  });
  $("join-cut").addEventListener("click", () => stream?.cut());
  $("join-here").addEventListener("click", () => rejoin(""));
  $("join-second").addEventListener("click", () => stream?.readAgain());
}
