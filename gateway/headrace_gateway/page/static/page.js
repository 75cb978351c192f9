// The page: the key, the models, and the selected view.

import { ask, key } from "./api.js";
import { $ } from "./dom.js";
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

async function loadModels() {
  const note = $("key-note");
  try {
    const { data } = await ask("/v1/models");
    playground.showModels($("play-model"), data);
    if (!data.length) note.textContent = "No worker serves a model now.";
    else note.textContent = key.get() ? "The key is kept until this tab closes." : "This gateway asks for no key.";
  } catch (error) {
    note.textContent = error.status === 401 ? (key.get() ? "The gateway refuses this key." : "The gateway asks for an API key.") : error.message;
  }
}

$("key").value = key.get();
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  loadModels();
  queue.forget();
});
for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", moveBetweenTabs);
}
for (const view of [playground, queue]) view.start();
showView(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
await loadModels();
