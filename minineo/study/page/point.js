"use strict";
// Pointing at cells, by pointer or by key: what a cell holds, in words.

const TITLES = { queries: "Q", keys: "Kᵀ", values: "V", mixed: "mixed" };

const pointed = { canvas: null, box: 0, row: 0, column: 0 };

function boxAt(canvas, x, y) {
  const inside = (box) => x >= box.x && x < box.x + box.width && y >= box.y - 2 && y < box.y + box.height + 2;
  return drawn[canvas].findIndex(inside);
}

function pointAt(canvas, x, y) {
  const index = boxAt(canvas, x, y);
  if (index < 0) return unpoint();
  const box = drawn[canvas][index];
  const column = Math.min(Math.floor((x - box.x) / box.cell), box.columns - 1);
  const row = Math.floor((y - box.y) / (box.height / box.rows));
  return point(canvas, index, Math.min(Math.max(row, 0), box.rows - 1), column);
}

function point(canvas, box, row, column) {
  unpoint();
  Object.assign(pointed, { canvas, box, row, column });
  paintPointed();
  tell();
}

function unpoint() {
  if (pointed.canvas) {
    const sheet = byId(pointed.canvas);
    const pen = sheet.getContext("2d");
    pen.save();
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, sheet.width, sheet.height);
    pen.drawImage(bare[pointed.canvas], 0, 0);
    pen.restore();
  }
  pointed.canvas = null;
  byId("tip").hidden = true;
}

function keepBare(canvas) {
  const sheet = byId(canvas);
  bare[canvas] = new OffscreenCanvas(sheet.width, sheet.height);
  bare[canvas].getContext("2d").drawImage(sheet, 0, 0);
  if (pointed.canvas === canvas) {
    pointed.canvas = null;
    byId("tip").hidden = true;
  }
}

function paintPointed() {
  const { canvas, row, column } = pointed;
  const box = drawn[canvas][pointed.box];
  const pen = byId(canvas).getContext("2d");
  const tall = box.height / box.rows;
  frame(pen, box.x + column * box.cell - 1, box.y + row * tall - 1, box.cell + 2, tall + 2, colour("ink"), { thick: 2 });
}

// What a cell holds, in lines: its value first.
function describe(box, row, column) {
  const { step, layer, head } = state;
  const { name, path } = box;
  const turned = name === "keys";
  const place = box.first + (turned ? column : row);
  const dimension = turned ? row : column;
  const kept = name === "keys" || name === "values";
  const token = path === "cached" && kept ? tokenIn(place, step) : place;
  const number = numberIn(box, row, column);
  const lines = [];
  if (name === "scores" || name === "pattern") {
    const key = path === "cached" ? tokenIn(column, step) : column;
    const why = hiddenWhy(path, step, layer, head, place, column);
    const title = name === "scores" ? "score" : "share";
    lines.push(why ? `hidden: ${hiddenWords(why)}` : `${title} ${short(number)}`);
    lines.push(`query ${tokenName(place)} × key ${tokenName(key)}`);
    lines.push(`the query is ${place < steps[step].start ? "made again" : "new"}, the key ${ORIGINS[originOf(path, step, column)]}`);
    lines.push(otherPath(box, place, key, column, number));
  } else {
    const what = { queries: "query", keys: "key", values: "value", mixed: "mix" }[name];
    lines.push(`${what} ${short(number)}`);
    if (name === "values" && state.view === "mix") {
      const last = steps[step].end - 1;
      const share = numberAt(path, "pattern", step, layer, head, last, place);
      lines.push(`× share ${short(share)} = ${short(share * number)} for the newest row`);
    }
    lines.push(`${tokenName(token)}, number ${dimension} of ${DIM}`);
    lines.push(kept ? ORIGINS[originOf(path, step, place)] : ORIGINS[rowOrigin(box, place)]);
    lines.push(token < 0 ? "" : otherPath(box, token, dimension, dimension, number));
  }
  return lines.filter(Boolean);
}

// What the other path has in a cell, or of the rows that the naive path made again, how close.
function otherPath(box, token, theirs, mine, number) {
  const { step, layer, head } = state;
  const { name, path } = box;
  if (path === "naive") {
    const code = apartAt(step, layer, head, name, token);
    if (code === 0) return "= this row equals the cached path’s bit for bit";
    if (code === 255) return "✗ this row and the cached path’s have nothing in common";
    const mark = isWrong(step, layer, head, name, token) ? "✗" : "=";
    return `${mark} no number of this row is further than ${apartSize(code)} from the cached path’s`;
  }
  if (theirs < 0) return "";
  const other = numberAt("naive", name, step, layer, head, token, theirs);
  if (other < HIDDEN) return number < HIDDEN ? "hidden on the naive path too" : "✗ the naive path hides it";
  const same = other === number ? "= equal bit for bit" : `differ by ${tiny(Math.abs(other - number))}`;
  return `naive path: ${short(other)}, ${same}`;
}

function tell() {
  const box = drawn[pointed.canvas][pointed.box];
  const lines = describe(box, pointed.row, pointed.column);
  const title = `${box.path}, ${TITLES[box.name] ?? box.name}: `;
  byId("readout").textContent = title + lines.join("; ");
  const tip = byId("tip");
  tip.replaceChildren(
    element("b", {}, lines[0]),
    ...lines.slice(1).map((line) => element("div", {}, line)),
  );
  tip.hidden = false;
  const canvas = byId(pointed.canvas).getBoundingClientRect();
  const x = canvas.left + box.x + (pointed.column + 1) * box.cell;
  const y = canvas.top + box.y + ((pointed.row + 1) * box.height) / box.rows;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 14 + height < innerHeight ? y + 14 : y - height - 24}px`;
}

function walk(canvas, event) {
  const boxes = drawn[canvas];
  if (pointed.canvas !== canvas) Object.assign(pointed, { canvas, box: canvas === "row" ? 0 : 2, row: Infinity, column: Infinity });
  const box = boxes[pointed.box];
  let { row, column } = pointed;
  row = Math.min(row, box.rows - 1);
  column = Math.min(column, box.columns - 1);
  const moves = {
    ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    Home: [0, -Infinity], End: [0, Infinity], PageUp: "back", PageDown: "on",
  };
  if (event.key === "Escape") return unpoint();
  if (!Object.hasOwn(moves, event.key)) return undefined;
  event.preventDefault();
  const by = moves[event.key];
  if (typeof by === "string" || (canvas === "row" && by[0])) {
    const on = by === "on" || by[0] > 0 ? 1 : -1;
    const next = (pointed.box + on + boxes.length) % boxes.length;
    return point(canvas, next, Math.min(row, boxes[next].rows - 1), Math.min(column, boxes[next].columns - 1));
  }
  return point(canvas, pointed.box, clamp(row + by[0], box.rows), clamp(column + by[1], box.columns));
}

function setFlow() {
  for (const canvas of ["cached", "naive", "row"]) {
    const made = byId(canvas);
    const position = (event) => {
      const corner = made.getBoundingClientRect();
      pointAt(canvas, event.clientX - corner.left, event.clientY - corner.top);
    };
    made.onpointermove = position;
    made.onpointerdown = position;
    made.onpointerleave = (event) => event.pointerType === "mouse" && unpoint();
    made.onblur = unpoint;
    made.onkeydown = (event) => walk(canvas, event);
  }
}

setFlow();
