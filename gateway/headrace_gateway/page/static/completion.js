// One chat completion on the server: its stream, and how it is stopped.

import { ask, chunkOf, readEvents, send } from "./api.js";

export const PATH = "/v1/chat/completions";

export class Completion {
  isStopped = false;
  #id = null; // stays null if a proxy removes the header
  #hasBegun = false;
  #connection = new AbortController();
  #tellStopped;
  #stopped = new Promise((resolve) => (this.#tellStopped = resolve));

  // Returns when the answer is complete, or has been stopped; throws the error with which it ended.
  async read(body, on) {
    const reading = this.#read(body, on);
    reading.catch(() => {}); // if it was stopped, nobody awaits it
    await Promise.race([reading, this.#stopped]);
  }

  async #read(body, { onResponse, onEvent, onChunk }) {
    try {
      const response = await send(PATH, { body, signal: this.#connection.signal });
      this.#id = response.headers.get("x-headrace-id");
      this.#hasBegun = true;
      if (this.isStopped) return this.#cancel();
      onResponse(response);
      const done = await readEvents(response, (event) => {
        if (this.isStopped) return;
        onEvent(event);
        const chunk = chunkOf(event);
        if (chunk) onChunk(chunk);
      });
      if (!done) throw new Error("The connection ended before the answer did.");
    } finally {
      this.#connection.abort(); // an error in the stream leaves it open
    }
  }

  // Closing the connection alone would leave the request running, for a client to rejoin. Before the response has
  // arrived, its id is unknown: the connection stays open until then.
  stop() {
    this.isStopped = true;
    this.#tellStopped();
    if (this.#hasBegun) this.#cancel();
  }

  #cancel() {
    if (this.#id) ask(`/headrace/requests/${encodeURIComponent(this.#id)}/cancel`, { body: {} }).catch(() => {});
    this.#connection.abort();
  }
}
