// The turns of a conversation: each is a message of the user and the last answer to it.

import { Answer } from "./answer.js";
import { $, element, keepEnd } from "./dom.js";

let turns = [];

const inPane = (change) => keepEnd($("play-turns"), change);

class Turn {
  answer = null; // the one that is shown
  #next = null; // the one that arrives
  #node;

  constructor(said) {
    this.said = said;
    this.#node = element("li", {}, element("div", { className: "who", text: "You" }), element("p", { className: "said", text: said }));
  }

  // Begins an empty answer. It replaces that before it as soon as there is something of it.
  begin(model) {
    this.#next = new Answer(model);
    if (!this.answer) this.#show();
    $("play-turns").append(this.#node);
    $("play-turns").scrollTop = $("play-turns").scrollHeight;
  }

  #show() {
    this.answer?.node.remove();
    this.answer = this.#next;
    this.#node.append(this.answer.node);
  }

  add(delta) {
    this.#next.add(delta, inPane);
    if (this.answer !== this.#next && !this.#next.isEmpty) inPane(() => this.#show());
  }

  // If nothing of the answer has arrived, the one before it stays.
  end(how) {
    if (this.answer === this.#next) inPane(() => this.answer.end(how));
  }
}

export const isEmpty = () => turns.length === 0;

export const makeTurn = (said) => new Turn(said);

export const lastTurn = () => turns.at(-1);

// Adds the turn as the last one, and begins its answer. A turn that is the last one already gets another answer.
export function begin(turn, model) {
  if (turn !== lastTurn()) turns.push(turn);
  turn.begin(model);
}

export function clear() {
  turns = [];
  $("play-turns").replaceChildren();
}

// Returns the messages of a request whose answer belongs to `turn`: all turns before it, and what the user says in it.
// Turns without an answer, or with one that failed, are left out, since many chat templates want roles in turns. What
// the user says after a tool call is the call's result.
export function messagesOf(turn) {
  const messages = [];
  let calls = [];
  const say = (text) => {
    if (!calls.length) messages.push({ role: "user", content: text });
    for (const { id } of calls) messages.push({ role: "tool", tool_call_id: id, content: text });
  };
  for (const before of turns) {
    if (before === turn) break;
    const answer = before.answer.message();
    if (!answer) continue;
    say(before.said);
    messages.push(answer);
    calls = answer.tool_calls ?? [];
  }
  say(turn.said);
  return messages;
}
