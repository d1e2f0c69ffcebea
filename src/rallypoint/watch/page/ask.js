"use strict";
// What both pages use.

const one = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const number = (value) => value === undefined || value === null ? "-" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)
  ? value.toExponential(2) : String(+value.toPrecision(4));

function element(kind, text) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The page's token: out of the address into this tab's storage, and from there into a header of each request. Not into a
// cookie: browsers send those to every port of a host, so to other users' servers too.

const given = new URLSearchParams(location.search).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname); // so that it is in no history and no screenshot
}

const ask = (path, options = {}) => fetch(path, { ...options,
  headers: { ...options.headers, "X-Rallypoint-Token": sessionStorage.getItem("token") || "" } });

// Take the news of one answer, until it ends: a stream of `data: JSON`, with an empty line after each.
async function read(answer, take) {
  const stream = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", piece = await stream.read(); !piece.done; piece = await stream.read()) {
    text += piece.value;
    if (!piece.value.includes("\n")) continue;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) queueMicrotask(() => take(JSON.parse(part.slice(6))));
  }
}
