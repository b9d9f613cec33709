"use strict";
// The numbers of the run, and where in the arrays each of them lies.

const { facts, arrays } = readData();
const steps = facts.steps;
const LAYERS = facts.windows.length;
const HEADS = facts.heads;
const DIM = facts.head_dim;
const TOKENS = steps.at(-1).end; // that are fed
const VALUES = ["queries", "keys", "values", "scores", "pattern", "mixed"];
const HIDDEN = -1e30; // scores below it are hidden from their query

function readData() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const packed = data.arrays;
  const unpacked = {};
  const kinds = { float32: Float32Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array };
  const bytesOf = (text) => {
    const letters = atob(text);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return bytes;
  };
  for (const [name, { kind, bytes }] of Object.entries(packed)) {
    if (kind !== "differences") unpacked[name] = new kinds[kind](bytesOf(bytes).buffer);
  }
  for (const [name, { kind, bytes }] of Object.entries(packed)) {
    if (kind !== "differences") continue;
    const base = name === "naive.pool" ? unpacked.pool : unpacked[name.replace("naive", "cached")];
    unpacked[name] = addDifferences(bytesOf(bytes), base);
  }
  return { facts: data.facts, arrays: unpacked };
}

// Undo what `differences` of explore.py does: whole numbers of 7 bits a byte, the sign in the
// lowest bit, are added to the bits of the base's numbers.
function addDifferences(bytes, base) {
  const bits = new Int32Array(base.buffer, base.byteOffset, base.length);
  const result = new Int32Array(base.length);
  let count = 0;
  let value = 0;
  let shift = 0;
  for (const byte of bytes) {
    value |= (byte & 127) << shift;
    shift += 7;
    if (byte < 128) {
      result[count] = bits[count] + ((value >>> 1) ^ -(value & 1));
      count += 1;
      value = shift = 0;
    }
  }
  return new Float32Array(result.buffer, 0, count);
}

// The place in a flat array at which the part of each step begins.
function offsets(size) {
  let sum = 0;
  return steps.map((step) => {
    const here = sum;
    sum += size(step);
    return here;
  });
}

const fed = (step) => step.end - step.start;
const at = {
  cached: offsets((step) => LAYERS * HEADS * fed(step) * step.slots),
  naive: offsets((step) => LAYERS * HEADS * fed(step) * step.end),
  index: offsets((step) => LAYERS * step.slots),
  apart: offsets((step) => LAYERS * HEADS * VALUES.length * step.end),
};
const stepOf = []; // of each token: the step that has fed it
const slotOf = []; // and the slot that the cached path has put it into
for (const step of steps) {
  for (let token = step.start; token < step.end; token++) {
    stepOf[token] = step.index;
    slotOf[token] = step.held + token - step.start;
  }
}

// The token in a slot of the cached path at a step, or -1 if it holds none of this text.
function tokenIn(slot, step) {
  const token = slotOf.indexOf(slot);
  return token < steps[step].end ? token : -1;
}

const kept = {}; // arrays by path and name
for (const path of ["cached", "naive"]) {
  kept[path] = { pool: path === "cached" ? arrays.pool : arrays["naive.pool"] };
  for (const name of ["queries", "scores", "pattern", "mixed"]) {
    kept[path][name] = arrays[`${path}.${name}`];
  }
}

const columnsOf = (path, step) => (path === "cached" ? steps[step].slots : steps[step].end);
const firstRowOf = (path, step) => (path === "cached" ? steps[step].start : 0);

// One number. A row is the position of a query's token; of keys and values, a slot.
function numberAt(path, name, step, layer, head, row, column) {
  const lane = layer * HEADS + head;
  if (name === "queries" || name === "mixed") {
    return kept[path][name][(lane * TOKENS + row) * DIM + column];
  }
  if (name === "keys" || name === "values") {
    const entry = path === "cached" ? entryAt(step, layer, row) : row * LAYERS + layer;
    return kept[path].pool[(entry * HEADS + head) * 2 * DIM + (name === "values" ? DIM : 0) + column];
  }
  const made = steps[stepOf[row]];
  const columns = columnsOf(path, made.index);
  if (column >= columns) return name === "scores" ? -Infinity : 0; // not yet there: the future
  const cell = (lane * fed(made) + row - made.start) * columns + column;
  return kept[path][name][at[path][made.index] + cell];
}

// Which key and value of the pool a slot holds. Where it is a token's own, as made, this is the
// token's place there.
function entryAt(step, layer, slot) {
  return arrays.index[at.index[step] + layer * steps[step].slots + slot];
}

// How far the naive path's row lies from the cached path's: a code, 0 for equal bit for bit.
function apartAt(step, layer, head, name, token) {
  const names = VALUES.length;
  const { end } = steps[step];
  const place = ((layer * HEADS + head) * names + VALUES.indexOf(name)) * end + token;
  return arrays.apart[at.apart[step] + place];
}
const limitAt = (step, layer, name) =>
  arrays.limits[(step * LAYERS + layer) * VALUES.length + VALUES.indexOf(name)];
const isWrong = (step, layer, head, name, token) =>
  apartAt(step, layer, head, name, token) > limitAt(step, layer, name);

const apartLimit = (code) => 2 ** ((code - 200) / 4);
const apartSize = (code) => tiny(apartLimit(code));

// Whether a query may look at a slot, and if not, why.
function hiddenWhy(path, step, layer, head, row, column) {
  const score = numberAt(path, "scores", step, layer, head, row, column);
  if (!(score < HIDDEN)) return "";
  const position = path === "cached" ? slotOf[row] : row;
  return column > position ? "future" : "window";
}

// Words and numbers

const count = (number) => number.toLocaleString("en-GB");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const tiny = (number) => {
  if (number === 0) return "0";
  if (number >= 0.01 && number < 1000) return String(Number(number.toPrecision(2)));
  return number.toExponential(1).replace("e-", "e−").replace("+", "");
};
const short = (number) => {
  if (Number.isNaN(number)) return "not a number";
  if (number === 0) return "0";
  if (Math.abs(number) < 1e-3) return number.toExponential(2).replace(/-/g, "−");
  return number.toPrecision(4).replace("-", "−");
};
const percent = (share) =>
  share === null ? "—" : share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
const milliseconds = (seconds) =>
  seconds < 0.1 ? `${(1000 * seconds).toFixed(2)} ms` : `${count(Math.round(1000 * seconds))} ms`;
const bytes = (number) => {
  if (number < 1024) return `${number} B`;
  const [size, unit] = number < 2 ** 20 ? [2 ** 10, "KiB"] : [2 ** 20, "MiB"];
  const value = number / size;
  return `${value < 100 ? value.toFixed(1) : count(Math.round(value))} ${unit}`;
};
const flops = (number) => {
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, unit] = units.find(([each]) => number >= each) ?? [1, ""];
  return `${(number / size).toPrecision(3)} ${unit}FLOP`;
};
// A text without the characters that steer a display or turn the direction of what follows.
const plain = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g, "\ufffd");
const quoted = (token) => `‘${plain(token.text).replace(/\n/g, "⏎").replace(/\t/g, "⇥")}’`;
const tokenName = (position) =>
  position < 0 ? "no token of this text" : `${quoted(facts.tokens[position])} at ${position}`;

// Make an element with text and attributes.
function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name in made && name !== "role" && name !== "for") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
const byId = (id) => document.getElementById(id);
