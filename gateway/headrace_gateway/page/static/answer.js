// One answer of the conversation as it streams: its reasoning, text and tool calls.

import { element } from "./dom.js";
import { showMarkdown } from "./markdown.js";

export class Answer {
  #text = "";
  #reasoning = "";
  #calls = [];
  #isDrawn = true;
  #isComplete = false;
  #isFailed = false;
  #thoughts = element("pre");
  #box = element("details", { className: "reasoning", hidden: "" }, element("summary", { text: "Reasoning" }), this.#thoughts);
  #body = element("div", { className: "markdown" });
  #called = element("div");
  node;

  constructor(model) {
    this.node = element("div", { className: "answer" }, element("div", { className: "who", text: model }), this.#box, this.#body, this.#called);
  }

  // Takes the `delta` of a chunk, and draws it with all others of the same frame.
  add(delta, inPane) {
    this.#reasoning += delta.reasoning_content ?? "";
    this.#text += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.#calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    if (this.#isDrawn) requestAnimationFrame(() => inPane(() => this.draw()));
    this.#isDrawn = false;
  }

  draw() {
    this.#isDrawn = true;
    this.#thoughts.textContent = this.#reasoning;
    this.#box.hidden = !this.#reasoning;
    showMarkdown(this.#body, this.#text);
    this.#called.replaceChildren(...this.#calls.map(callNode));
  }

  get isEmpty() {
    return !this.#text && !this.#reasoning && !this.#calls.length;
  }

  end({ isStopped, isFailed }) {
    this.#isFailed = isFailed;
    this.#isComplete = !isStopped && !isFailed;
    this.draw();
  }

  // Returns the message with which the next request repeats this answer; null if there is nothing to repeat. A stopped
  // answer is repeated as far as the user saw it, without its tool calls: their arguments may be cut.
  message() {
    const whole = this.#isComplete ? this.#calls : [];
    if (this.#isFailed || (!this.#text && !whole.length)) return null;
    const calls = whole.map(({ id, name, arguments: json }) => ({ id, type: "function", function: { name, arguments: json } }));
    return { role: "assistant", content: this.#text || null, ...(calls.length ? { tool_calls: calls } : {}) };
  }
}

function callNode(call) {
  const heading = element("p", {}, "Calls ", element("code", { text: call.name }));
  return element("div", { className: "call" }, heading, element("pre", {}, element("code", { text: call.arguments })));
}
