"use strict";
// Draws a draft tree from left to right: a column for each depth, accepted nodes marked.

const ROW = 24, GAP = 22, LETTER = 7.4, MOST_LETTERS = 14;

function svg(name, attributes, parent) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (parent) parent.append(found);
  return found;
}

// White space that would not be seen is shown by signs.
function shownToken(text) {
  const signs = { "\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·" };
  const shown = text.replace(/[\n\t\r ]/g, (found) => signs[found]);
  return shown.length > MOST_LETTERS ? shown.slice(0, MOST_LETTERS - 1) + "…" : shown || "∅";
}

// Nodes stand root first, parents before children; leaves get rows in the order of the tree.
function placeNodes(tree) {
  const children = tree.tokens.map(() => []);
  tree.parents.forEach((parent, node) => { if (node) children[parent].push(node); });
  const depths = [], rows = [], widths = [];
  tree.tokens.forEach((token, node) => {
    depths[node] = node ? depths[tree.parents[node]] + 1 : 0;
    const width = 14 + LETTER * shownToken(token).length;
    widths[depths[node]] = Math.max(widths[depths[node]] || 0, width);
  });
  let next = 0;
  const walk = (node) => {
    rows[node] = next;
    if (!children[node].length) next += 1;
    children[node].forEach(walk);
  };
  walk(0);
  const lefts = [1];
  widths.forEach((width, depth) => { lefts[depth + 1] = lefts[depth] + width + GAP; });
  return { depths, rows, widths, lefts, height: next * ROW };
}

function drawTree(place, tree) {
  const { depths, rows, widths, lefts, height } = placeNodes(tree);
  const accepted = new Set(tree.path);
  const width = lefts[widths.length] - GAP + 2;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const middle = (node) => rows[node] * ROW + ROW / 2;
  const edges = [];
  tree.parents.forEach((parent, node) => {
    if (!node) return;
    const from = lefts[depths[parent]] + widths[depths[parent]], to = lefts[depths[node]];
    const bend = (from + to) / 2;
    const d = `M${from} ${middle(parent)}C${bend} ${middle(parent)} ${bend} ${middle(node)} ${to} ${middle(node)}`;
    edges.push([accepted.has(node), d]);
  });
  // Accepted edges last, so that they lie on top.
  edges.sort((a, b) => a[0] - b[0]);
  for (const [isAccepted, d] of edges) svg("path", { d, class: isAccepted ? "yes" : "no" }, picture);
  tree.tokens.forEach((token, node) => {
    const group = svg("g", { class: accepted.has(node) ? "yes" : "no" }, picture);
    const x = lefts[depths[node]], y = rows[node] * ROW + 2;
    svg("rect", { x, y, width: widths[depths[node]], height: ROW - 4, rx: 5 }, group);
    svg("text", { x: x + 7, y: y + 14 }, group).textContent = shownToken(token);
    svg("title", {}, group).textContent = JSON.stringify(token);
  });
  place.replaceChildren(picture);
  const path = tree.path.map((node) => tree.tokens[node]).join("");
  place.setAttribute("aria-label",
    `${tree.path.length - 1} of ${tree.tokens.length - 1} drafted nodes accepted: ${JSON.stringify(path)}`);
}
