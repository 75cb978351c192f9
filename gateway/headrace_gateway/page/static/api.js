// Calls to the gateway. The API key is sent in a header only.

const KEY = "headrace.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiProblem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Sends a request and returns its response. Throws ApiProblem for a response that is not a success.
export async function send(path, { body, method = body === undefined ? "GET" : "POST", headers = {}, signal } = {}) {
  const all = { ...headers };
  if (key.get()) all.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) all["Content-Type"] = "application/json";
  const init = { method, headers: all, signal, cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer" };
  if (body !== undefined) init.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiProblem(0, "The gateway does not answer.");
  }
  if (!response.ok) throw new ApiProblem(response.status, await problemOf(response));
  return response;
}

export const ask = async (path, options) => (await send(path, options)).json();

async function problemOf(response) {
  const text = await response.text().catch(() => "");
  try {
    return `${response.status}: ${JSON.parse(text).error.message}`;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

// Splits text into events {raw, event, data}. The text may arrive in any pieces. A comment has data null.
export class EventParser {
  #rest = "";

  feed(text) {
    const blocks = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = blocks.pop();
    return blocks.filter((block) => block !== "").map(parseBlock);
  }
}

function parseBlock(raw) {
  const found = { raw, event: "message", data: null };
  for (const line of raw.split(/\r?\n/)) {
    const at = line.indexOf(":");
    if (at === 0) continue;
    const name = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
    if (name === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
    else if (name === "event") found.event = value;
  }
  return found;
}

// Calls `onEvent(event)` for each event until the stream ends; returns whether [DONE] arrived.
export async function readEvents(response, onEvent) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  let done = false;
  for (;;) {
    const { value, done: ended } = await reader.read();
    if (ended) return done;
    for (const event of parser.feed(decoder.decode(value, { stream: true }))) {
      if (event.data === "[DONE]") done = true;
      onEvent(event);
    }
  }
}

// Returns the chunk of an event, or null if it has none. Throws the error that a stream reports.
export function chunkOf(event) {
  if (event.data === null || event.data === "[DONE]" || event.event === "ping") return null;
  const chunk = JSON.parse(event.data);
  if (chunk.error) throw new ApiProblem(0, chunk.error.message ?? "the stream failed");
  return chunk;
}
