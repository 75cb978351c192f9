// The text within a block of Markdown: bold, italic, inline code and links.

import { element } from "./dom.js";

const MAX_OPEN = 16; // emphasis within emphasis; deeper marks are text
const TOKEN = /[^\\`*_[!]+|\\[!-/:-@[-`{-~]|`+|\*+|_+|!?\[|[\\!]/y;
const LINK = /((?:[^[\]\\\n]|\\.){1,500})\]\(\s{0,9}<?((?:[^\s()<>]|\([^\s()<>]*\)){1,2000})>?(?:\s{1,9}"[^"\n]{0,500}")?\s{0,9}\)/y;

// An argument for each node could be more arguments than a call may have.
export function filled(tag, nodes) {
  const made = element(tag);
  for (const node of nodes) made.append(node);
  return made;
}

// Returns nodes and strings. Emphasis that is open at the end was none, and its marks are text.
export function inline(text) {
  const stack = [{ nodes: [] }];
  const unclosed = new Set(); // lengths of runs of backticks that nothing closes
  const add = (node) => stack.at(-1).nodes.push(node);
  const unwrap = () => {
    const { mark, nodes } = stack.pop();
    add(mark);
    nodes.forEach(add);
  };
  for (let at = 0; at < text.length; ) {
    const [token] = match(TOKEN, text, at);
    at += token.length;
    if (token[0] === "`") at = addCode(text, at, token, unclosed, add);
    else if (token[0] === "*" || token[0] === "_") addMarks(text, at, token, stack, add, unwrap);
    else if (token === "[" || token === "![") {
      const link = match(LINK, text, at);
      if (link) at += link[0].length;
      add((link && token === "[" && linkOf(link)) || token + (link?.[0] ?? ""));
    } else add(token[0] === "\\" ? token.slice(-1) : token);
  }
  while (stack.length > 1) unwrap();
  return stack[0].nodes;
}

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function linkOf([, text, target]) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null; // a path, for example
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  const made = filled("a", inline(text));
  // the title shows where the link leads, whatever its text says
  const attributes = { href: url.href, title: url.href, rel: "noopener noreferrer", target: "_blank" };
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Adds the code that begins after a run of backticks, or else the run itself. Returns where the text continues.
function addCode(text, start, run, unclosed, add) {
  const runs = /`+/g;
  runs.lastIndex = start;
  for (let found = unclosed.has(run.length) ? null : runs.exec(text); found; found = runs.exec(text)) {
    if (found[0].length !== run.length) continue;
    const code = text.slice(start, found.index).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
    add(element("code", { text: isPadded ? code.slice(1, -1) : code }));
    return runs.lastIndex;
  }
  unclosed.add(run.length);
  add(run);
  return start;
}

// Closes and opens emphasis at a run of marks. A run of one or two closes only its like; `_` within a word is text.
function addMarks(text, end, run, stack, add, unwrap) {
  const [before, after] = [text[end - run.length - 1] ?? " ", text[end] ?? " "];
  const isWord = (char) => run[0] === "_" && /[\p{L}\p{N}]/u.test(char);
  const closes = /\S/.test(before) && !isWord(after);
  const opens = /\S/.test(after) && !isWord(before);
  let count = run.length;
  while (closes && count) {
    const open = stack.findLastIndex(({ mark }) => mark?.[0] === run[0] && (count > 2 || mark.length === count));
    if (open < 1) break;
    while (stack.length - 1 > open) unwrap();
    const { mark, nodes } = stack.pop();
    add(filled(mark.length === 2 ? "strong" : "em", nodes));
    count -= mark.length;
  }
  while (opens && count && stack.length <= MAX_OPEN) {
    const mark = run[0].repeat(Math.min(count, 2));
    stack.push({ mark, nodes: [] });
    count -= mark.length;
  }
  if (count) add(run[0].repeat(count));
}
