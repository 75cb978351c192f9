// Shows Markdown as DOM nodes: headings, paragraphs, lists, rules, fenced code, bold, italic, inline code and links.
//
// The text is untrusted. All of it is inserted as text, and nothing is loaded: images, HTML, and links to other than
// http and https stay text, as they were written. The time is proportional to the text, whatever it contains.

import { element } from "./dom.js";
import { filled, inline } from "./markdown_text.js";

const MAX_LISTS = 8; // lists within lists; deeper ones are text
const FENCE = /^\s*(`{3,}(?=[^`]*$)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^\s*([-*+]|(\d{1,9})[.)])(?:\s+|$)/;
const shown = new WeakMap(); // by node: the sources of its blocks

// Replaces the content of `node`. Blocks that have not changed since the last call stay, as most do while text streams.
export function showMarkdown(node, text) {
  const before = shown.get(node) ?? [];
  const sources = [];
  for (const { source, build } of blocks(text.split(/\r?\n/), 0)) {
    const at = sources.push(source) - 1;
    if (source === before[at]) continue;
    if (at < node.children.length) node.children[at].replaceWith(build());
    else node.append(build());
  }
  while (node.children.length > sources.length) node.lastElementChild.remove();
  shown.set(node, sources);
}

function* blocks(lines, depth) {
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const { end, build } = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? list(lines, at, depth) ?? paragraph(lines, at);
    yield { source: lines.slice(at, end).join("\n"), build };
    at = end;
  }
}

// A fence without an end is code up to the end of the text: perhaps the rest has not arrived yet.
function fence(lines, at) {
  const mark = FENCE.exec(lines[at])?.[1];
  if (!mark) return null;
  const closes = (line) => line[0] === mark[0] && line.length >= mark.length && line === mark[0].repeat(line.length);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end].trim())) end += 1;
  const indent = indentOf(lines[at]);
  const build = () => {
    const code = lines.slice(at + 1, end).map((line) => dedented(line, indent));
    return element("pre", {}, element("code", { text: code.join("\n") }));
  };
  return { end: Math.min(end + 1, lines.length), build };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const level = Math.min(found[1].length + 2, 6); // the page itself has the first two
  return { end: at + 1, build: () => filled(`h${level}`, inline(lines[at].slice(found[0].length).trim())) };
}

const rule = (lines, at) => (RULE.test(lines[at]) ? { end: at + 1, build: () => element("hr") } : null);

function list(lines, at, depth) {
  const first = depth < MAX_LISTS ? ITEM.exec(lines[at]) : null;
  if (!first) return null;
  const base = indentOf(lines[at]);
  const isOrdered = first[2] !== undefined;
  const items = [];
  let [end, width, isBlank] = [at, null, false];
  for (let next = at; next < lines.length; next += 1) {
    const line = lines[next];
    const indent = indentOf(line);
    const found = indent < base + 2 ? ITEM.exec(line) : null;
    if (!line.trim()) {
      isBlank = true;
      items.at(-1).push("");
      continue;
    }
    if (found && !RULE.test(line) && (found[2] !== undefined) === isOrdered) {
      items.push([line.slice(found[0].length)]);
      width = null;
    } else if (indent >= base + 2) {
      width ??= indent; // the first line after the marker's own says how far the item is indented
      items.at(-1).push(dedented(line, width));
    } else if (isBlank || startsBlock(line)) break;
    else items.at(-1).push(line.trimStart());
    isBlank = false;
    end = next + 1;
  }
  const build = () => {
    const made = isOrdered ? element("ol", { start: first[2] }) : element("ul");
    for (const item of items) made.append(filled("li", [...blocks(item, depth + 1)].map((block) => block.build())));
    return made;
  };
  return { end, build };
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) end += 1;
  return { end, build: () => filled("p", inline(lines.slice(at, end).map((line) => line.trim()).join("\n"))) };
}

// A number within a paragraph begins a list only if it is 1: a year may begin a line, too.
function startsBlock(line) {
  const item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || (item !== null && (item[2] ?? "1") === "1");
}

const columns = (space) => space.replaceAll("\t", "    ").length;

const indentOf = (line) => columns(/^\s*/.exec(line)[0]);

function dedented(line, width) {
  let at = 0;
  for (let column = 0; column < width && /[ \t]/.test(line[at] ?? ""); at += 1) column += columns(line[at]);
  return line.slice(at);
}
