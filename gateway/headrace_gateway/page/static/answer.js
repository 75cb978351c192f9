// One answer of the conversation as it streams: its reasoning, text and tool calls.

import { element } from "./dom.js";
import { showMarkdown } from "./markdown.js";

export class Answer {
  #text = "";
  #reasoning = "";
  #calls = [];
  #isDrawn = true;
  #pause = 0; // milliseconds until the next draw may begin
  #hasThought = false; // since the last draw
  #hasCalled = false;
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

  // Takes the `delta` of a chunk, and draws it together with those that follow soon.
  add(delta, inPane) {
    this.#hasThought ||= Boolean(delta.reasoning_content);
    this.#hasCalled ||= Boolean(delta.tool_calls);
    this.#reasoning += delta.reasoning_content ?? "";
    this.#text += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.#calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    if (this.#isDrawn) setTimeout(() => requestAnimationFrame(() => this.#drawIn(inPane)), this.#pause);
    this.#isDrawn = false;
  }

  // Each draw builds the last block again, which takes the longer the longer it is. The pauses leave the page most of
  // the time.
  #drawIn(inPane) {
    const began = performance.now();
    inPane(() => this.draw());
    this.#pause = 4 * (performance.now() - began);
  }

  draw() {
    this.#isDrawn = true;
    if (this.#hasThought) this.#thoughts.textContent = this.#reasoning;
    this.#box.hidden = !this.#reasoning;
    showMarkdown(this.#body, this.#text);
    if (this.#hasCalled) this.#called.replaceChildren(...this.#calls.map(callNode));
    this.#hasThought = this.#hasCalled = false;
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
