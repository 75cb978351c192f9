// The page: the key, the models, and the selected view.

import { key } from "./api.js";
import { $ } from "./dom.js";
import * as models from "./models.js";
import * as playground from "./playground.js";
import * as queue from "./queue.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function showView(tab) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", chosen);
    one.tabIndex = chosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  queue.show(tab.id === "tab-queue");
}

function choose(tab) {
  showView(tab);
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`); // a reload shows it again
}

function moveBetweenTabs(event) {
  const at = tabs.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  const tab = tabs[(to + tabs.length) % tabs.length];
  tab.focus();
  choose(tab);
}

$("key").value = key.get();
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  models.load();
  queue.forget();
});
for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", moveBetweenTabs);
}
for (const view of [models, playground, queue]) view.start();
showView(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
await models.load();
