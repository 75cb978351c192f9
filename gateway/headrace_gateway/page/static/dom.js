// Writes to the document. All text is inserted as text, since model outputs and dead letters are untrusted.

export const $ = (id) => document.getElementById(id);

export const DASH = "–";

export function element(tag, { text, className, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function setState(node, text, tone = "") {
  if (node.textContent !== text) node.textContent = text; // screen readers read each change aloud
  node.dataset.tone = tone;
}

export function showProblem(node, error) {
  node.hidden = !error;
  node.textContent = error ? error.message ?? String(error) : "";
}

// Runs `change`; keeps the end of `pane` in view if it was in view.
export function keepEnd(pane, change) {
  const atEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 24;
  change();
  if (atEnd) pane.scrollTop = pane.scrollHeight;
}

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

export function confirmed(question, yes) {
  const dialog = $("confirm");
  $("confirm-text").textContent = question;
  $("confirm-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  $("confirm-no").focus();
  return new Promise((resolve) => {
    $("confirm-yes").onclick = () => dialog.close("yes");
    $("confirm-no").onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue === "yes"); // Escape closes it, too
  });
}
