"use strict";
// Painting on a canvas: colours, cells, lines and words.

const ORIGINS = { cache: "from the cache", again: "made again", new: "made for the first time" };

// Colours

let ramps = {};

function readRamps() {
  const channels = (name) => colour(name).match(/\w\w/g).slice(0, 3).map((hex) => parseInt(hex, 16));
  ramps = {};
  for (const origin of Object.keys(ORIGINS)) {
    const [low, high] = [channels(`${origin}-low`), channels(`${origin}-high`)];
    ramps[origin] = Array.from({ length: 64 }, (_, level) =>
      low.map((from, channel) => Math.round(from + ((high[channel] - from) * level) / 63)),
    );
  }
}

// From a number to a place between 0 and 1: shares on a square-root scale, all else as it is.
function scaleOf(name, low, high) {
  const span = high - low || 1;
  if (name === "pattern") return (number) => Math.sqrt(Math.max(number, 0) / (high || 1));
  return (number) => (number - low) / span;
}

function shade(origin, share) {
  return ramps[origin][Math.round(63 * Math.min(Math.max(share, 0), 1)) || 0];
}

const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

// Drawing

// Make a canvas sharp and of a size, and return what draws on it, in CSS pixels.
function prepare(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  return pen;
}

// Paint a matrix, a square for each number; colourOf gives [red, green, blue], or null for none.
function paintCells(pen, box, colourOf) {
  const image = new ImageData(box.columns, box.rows);
  for (let row = 0; row < box.rows; row++) {
    for (let column = 0; column < box.columns; column++) {
      const found = colourOf(row, column);
      if (found) image.data.set([...found, 255], 4 * (row * box.columns + column));
    }
  }
  const sheet = new OffscreenCanvas(box.columns, box.rows);
  sheet.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(sheet, box.x, box.y, box.width, box.height);
}

// Fill a rectangle with lines of a slope, or with dots.
function hatch(pen, x, y, width, height, kind, ink, gap = 7, alpha = 0.5) {
  if (width <= 0 || height <= 0) return;
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = pen.fillStyle = ink;
  pen.globalAlpha = alpha;
  pen.lineWidth = 1;
  pen.beginPath();
  if (kind === "dots") {
    const first = (start) => Math.ceil(start / gap) * gap;
    for (let i = first(x); i < x + width; i += gap) {
      for (let j = first(y); j < y + height; j += gap) pen.fillRect(i, j, 1.5, 1.5);
    }
  } else {
    const reach = width + height;
    const shift = (x + y) % gap; // lines of neighbours meet
    for (let i = -shift; i < reach; i += gap) {
      pen.moveTo(x + i, y);
      pen.lineTo(x + i - height, y + height);
      if (kind === "cross") {
        pen.moveTo(x + width - i, y);
        pen.lineTo(x + width - i + height, y + height);
      }
    }
    pen.stroke();
  }
  pen.restore();
}

function frame(pen, x, y, width, height, ink, { dashed = false, thick = 1 } = {}) {
  pen.save();
  pen.strokeStyle = ink;
  pen.lineWidth = thick;
  pen.setLineDash(dashed ? [4, 3] : []);
  pen.strokeRect(x, y, width, height);
  pen.restore();
}

function write(pen, text, x, y, { ink = "ink", align = "left", bold = false, room = Infinity } = {}) {
  pen.save();
  pen.fillStyle = colour(ink);
  pen.textAlign = align;
  if (bold) pen.font = `600 ${pen.font}`;
  if (pen.measureText(text).width <= room) pen.fillText(text, x, y);
  pen.restore();
}

// The marks of an origin on a rectangle: lines for the cache, dashes for again, a frame for new.
function markOrigin(pen, origin, x, y, width, height) {
  if (origin === "cache") hatch(pen, x, y, width, height, "lines", colour("cache"), 7, 0.45);
  if (origin === "new") frame(pen, x - 1, y - 1, width + 2, height + 2, colour("new"), { thick: 2 });
  else frame(pen, x, y, width, height, colour(origin), { dashed: origin === "again", thick: 1.2 });
}

// A legend of swatches that are painted like the cells are.
function fillLegend(list, entries) {
  list.replaceChildren(
    ...entries.map(([paint, text]) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      paint(prepare(canvas, 26, 16));
      return element("li", {}, canvas, text);
    }),
  );
}
