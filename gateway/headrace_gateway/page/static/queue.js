// The queues, one request, and the dead letters. Polls at most once a second, while the view is visible.

import { ApiProblem, ask } from "./api.js";
import { $, DASH, confirmed, element, seconds, setState, showProblem } from "./dom.js";

const POLL_MS = 1000;
const RECENT_SECONDS = 90;
let isShown = false;
let timer = null;
let isPolling = false;
let letters = [];
let loading = Promise.resolve();
let deadSeen = null;

// Each cell has one box. A narrow window shows the column's heading beside the box.
const cell = (value, note, className = "wrap") => {
  const box = element("div", { text: `${value}` });
  if (note) box.append(element("small", { text: note }));
  return element("td", { className }, box);
};

const number = (value, note) => cell(value, note, "num");

function queueRow(queue, at) {
  const levels = Object.entries(queue.by_priority).filter(([, count]) => count);
  const priorities = levels.some(([step]) => step !== "0") ? levels.map(([step, count]) => `p${step}: ${count}`).join(", ") : "";
  const age = at - queue.seen;
  return element("tr", {}, cell(queue.model, queue.problem ?? `${queue.max_model_len} tokens of context`), number(queue.waiting, priorities), number(queue.running, queue.run_out ? `${queue.run_out} lost` : ""),
    number(queue.delayed), number(queue.dead), number(seconds(queue.oldest_age_seconds)), cell(age < RECENT_SECONDS ? "now" : `${seconds(age)} ago`, queue.worker));
}

function fill(table, rows, nothing) {
  const body = table.tBodies[0];
  const columns = table.tHead.rows[0].cells.length;
  if (!rows.length) rows = [element("tr", {}, element("td", { text: nothing, colspan: columns, className: "empty" }))];
  for (const row of rows) {
    if (row.cells.length === columns) [...row.cells].forEach((cell, index) => (cell.dataset.label = table.tHead.rows[0].cells[index].textContent));
  }
  body.replaceChildren(...rows);
}

function draw(found) {
  fill($("queue-table"), found.queues.map((queue) => queueRow(queue, found.at)), "No worker has registered a model yet.");
  $("tenants-card").hidden = $("dead-card").hidden = !found.is_admin;
  if (!found.is_admin) return;
  const tenants = found.queues.flatMap((queue) => Object.entries(queue.by_tenant ?? {}).map(([name, count]) => [queue.model, name, count]));
  fill($("tenants-table"), tenants.map(([model, name, count]) =>
    element("tr", {}, cell(model), cell(name || "(none)"), number(count))), "Nothing waits.");
  const dead = found.queues.reduce((sum, queue) => sum + queue.dead, 0);
  if (dead !== deadSeen) {
    deadSeen = dead;
    loadLetters();
  }
}

async function poll() {
  timer = null;
  isPolling = true;
  try {
    const found = await ask("/headrace/overview");
    draw(found);
    showProblem($("queue-problem"), null);
    setState($("queue-state"), `as of ${new Date(found.at * 1000).toLocaleTimeString()}`);
  } catch (error) {
    showProblem($("queue-problem"), error);
    setState($("queue-state"), "not up to date", "bad");
  }
  isPolling = false;
  schedule(POLL_MS);
}

function schedule(delay) {
  if (isShown && document.visibilityState === "visible" && timer === null && !isPolling) timer = setTimeout(poll, delay);
}

export function show(shown) {
  isShown = shown;
  pollNow();
}

function pollNow() {
  clearTimeout(timer);
  timer = null;
  schedule(0);
}

function letterRow(letter) {
  const name = letter.request_id ?? `letter ${letter.letter_id}`;
  const act = (verb, text, className) => {
    const button = element("button", { text, type: "button", className: `small ${className}`, "aria-label": `${text} ${name}` });
    button.addEventListener("click", () => change(verb, [letter.letter_id], name));
    return button;
  };
  const age = letter.at ? seconds(Date.now() / 1000 - letter.at) : DASH;
  return element("tr", {}, cell(letter.request_id ?? DASH, "", "id"), cell(letter.queue), cell(letter.reason), cell(letter.tenant ?? DASH), number(letter.deliveries), number(age),
    element("td", {}, element("div", { className: "row" }, act("requeue", "Requeue", ""), act("purge", "Purge", "danger"))));
}

function loadLetters() {
  loading = loading.then(readLetters); // one after the other: an older list must not replace a newer one
  return loading;
}

async function readLetters() {
  try {
    const found = await ask("/headrace/dead-letters?limit=100");
    letters = found.data;
    fill($("dead-table"), letters.map(letterRow), "There are no dead letters.");
    $("dead-requeue-all").disabled = $("dead-purge-all").disabled = !letters.length;
    setState($("dead-result"), (found.missing ?? []).join("; "));
  } catch (error) {
    deadSeen = null; // the next poll tries again
    setState($("dead-result"), error.message);
  }
}

async function change(verb, ids, name) {
  if (verb === "purge" && !(await confirmed(`Delete ${name} for good?`, "Purge"))) return;
  if (verb === "requeue" && ids.length > 1 && !(await confirmed(`Send ${name} again?`, "Requeue"))) return;
  let result;
  try {
    const done = await ask(`/headrace/dead-letters/${verb}`, { body: { letter_ids: ids } });
    const count = verb === "purge" ? done.purged : done.requeued.length;
    const left = ids.length - count;
    const kept = left && verb === "requeue" ? `; ${left} stayed: copies of requests that are alive, or of unknown origin` : "";
    result = `${count} ${verb === "purge" ? "deleted" : "requeued"}${kept}.`;
  } catch (error) {
    result = error.message;
  }
  await loadLetters(); // reload first: the buttons for all letters act on the letters that are shown
  setState($("dead-result"), result);
}

const requestPath = () => `/headrace/requests/${encodeURIComponent($("one-id").value.trim())}`;

async function lookUp() {
  const found = await ask(requestPath());
  return found.requests.map((one) => {
    const attempt = one.attempt > 1 ? `, attempt ${one.attempt}` : "";
    const [unit, count] = one.rows ? ["rows", one.rows] : ["tokens", one.tokens];
    const done = count ? `, ${count} ${unit}` : "";
    return `${one.state}${one.finish_reason ? ` (${one.finish_reason})` : ""}${done}${attempt}`;
  }).join("; ");
}

async function cancel() {
  if (!$("one-form").reportValidity()) return null;
  if (!(await confirmed(`Cancel ${$("one-id").value.trim()}?`, "Cancel it"))) return null;
  const done = await ask(`${requestPath()}/cancel`, { body: {} });
  return done.cancelled ? "cancelled" : "it had already ended";
}

async function tell(action) {
  try {
    const text = await action();
    if (text !== null) setState($("one-result"), text);
  } catch (error) {
    setState($("one-result"), error instanceof ApiProblem ? error.message : `${error}`);
  }
}

export function start() {
  document.addEventListener("visibilitychange", () => schedule(0));
  $("one-form").addEventListener("submit", (event) => {
    event.preventDefault();
    tell(lookUp);
  });
  $("one-cancel").addEventListener("click", () => tell(cancel));
  $("dead-refresh").addEventListener("click", loadLetters);
  const all = () => letters.map((letter) => letter.letter_id);
  $("dead-requeue-all").addEventListener("click", () => change("requeue", all(), `${letters.length} dead letters`));
  $("dead-purge-all").addEventListener("click", () => change("purge", all(), `${letters.length} dead letters`));
}

export function forget() {
  deadSeen = null;
  pollNow();
}
