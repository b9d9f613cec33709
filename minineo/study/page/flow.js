"use strict";
// (Q × Kᵀ) × V of one head: the matrices of both paths at their true shapes. It is remembered what
// is drawn where, so that a cell can be pointed at.

const GAP = 22; // between matrices, for the signs
const TOP = 56; // above the keys, for their name and the band that says where they come from
const EDGE = 2; // before the first matrix, for its frame
const RIGHT = 20; // beside the last matrix, for its band
const MARKS = 16; // between the keys and the scores: whether both paths have computed the same

// Where the query, key and value of a token in a row or slot come from.
function originOf(path, step, place) {
  const { start, held } = steps[step];
  if (path === "cached") return place < held ? "cache" : "new";
  return place < start ? "again" : "new";
}

// Split a row of places into runs of one origin: [origin, first, length].
function runsOf(path, step, first, length) {
  const runs = [];
  for (let place = first; place < first + length; place++) {
    const origin = originOf(path, step, place);
    if (runs.at(-1)?.[0] === origin) runs.at(-1)[2] += 1;
    else runs.push([origin, place, 1]);
  }
  return runs;
}

// The four matrices of a path, with their rows and columns and where they stand.
function layOut(path, step, cell) {
  const { start, end } = steps[step];
  const columns = columnsOf(path, step);
  const first = firstRowOf(path, step);
  const rows = end - first;
  const most = Math.max(TOKENS, ...steps.map((each) => each.slots));
  const base = TOP + Math.max(most, DIM) * cell; // below the keys and values
  const left = EDGE + DIM * cell + GAP;
  const right = left + most * cell + GAP;
  const y = base + MARKS;
  const row = y + first * cell;
  const box = (name, x, top, height, width, from) => ({
    name, path, x, y: top, rows: height, columns: width, cell, first: from,
    width: width * cell, height: height * cell,
  });
  const square = state.view === "scores" ? "scores" : "pattern";
  return {
    base, left, right, y, most, start,
    width: right + DIM * cell + RIGHT,
    height: y + TOKENS * cell + 22,
    queries: box("queries", EDGE, row, rows, DIM, first),
    keys: box("keys", left, base - DIM * cell, DIM, columns, 0),
    square: box(square, left, row, rows, columns, first),
    values: box("values", right, base - columns * cell, columns, DIM, 0),
    mixed: box("mixed", right, row, rows, DIM, first),
  };
}

// The largest square for a cell that fits into the width, and into the height of a screen. The
// caption stands in the corner that the keys leave free, where there is room for it.
function cellSize(room) {
  const most = Math.max(TOKENS, ...steps.map((step) => step.slots));
  const wide = (room - EDGE - 2 * GAP - RIGHT - 1) / (2 * DIM + most);
  const tall = (innerHeight - 215 - TOP) / (TOKENS + Math.max(most, DIM)); // 215: what stands above
  return Math.max(1, Math.min(wide, Math.max(tall, 3), 14));
}

const numberIn = (box, row, column) => {
  const turned = box.name === "keys"; // they are drawn as columns
  const [place, number] = turned ? [column, row] : [row, column];
  return numberAt(box.path, box.name, state.step, state.layer, state.head, box.first + place, number);
};

// In the mix, what the newest row takes of each value: its share times the number.
function weighted(box, row, column) {
  const last = steps[state.step].end - 1;
  const { step, layer, head } = state;
  return numberAt(box.path, "pattern", step, layer, head, last, row) * numberIn(box, row, column);
}

const shownIn = (box, row, column) =>
  box.name === "values" && state.view === "mix" ? weighted(box, row, column) : numberIn(box, row, column);

// From the lowest to the highest number that is shown of a matrix, on both paths.
function range(boxes) {
  let [low, high] = [Infinity, -Infinity];
  for (const box of boxes) {
    for (let row = 0; row < box.rows; row++) {
      for (let column = 0; column < box.columns; column++) {
        const number = shownIn(box, row, column);
        if (number > HIDDEN && number < -HIDDEN) {
          low = Math.min(low, number);
          high = Math.max(high, number);
        }
      }
    }
  }
  return [low, high];
}

const FOCUS = {
  scores: ["queries", "keys", "square"],
  pattern: ["queries", "keys", "square", "values", "mixed"],
  mix: ["square", "values", "mixed"],
};
const drawn = {}; // of each canvas: the boxes on it, to find cells in
const bare = {}; // and what it shows without a cell that is pointed at

function paintFlow() {
  readRamps();
  const panel = byId("cached").parentElement;
  const cell = cellSize(panel.clientWidth);
  const both = { cached: layOut("cached", state.step, cell), naive: layOut("naive", state.step, cell) };
  const ranges = {};
  for (const name of ["queries", "keys", "square", "values", "mixed"]) {
    ranges[name] = range([both.cached[name], both.naive[name]]);
  }
  const free = both.cached.keys.y - 50; // above the names of the keys
  for (const path of ["cached", "naive"]) {
    const place = both[path];
    const caption = byId(`${path}-says`);
    const size = parseFloat(getComputedStyle(caption).fontSize);
    const over = free > 7 * size && place.right > 23 * size;
    caption.classList.toggle("over", over);
    caption.style.maxWidth = over ? `${place.right - 28}px` : "";
    const pen = prepare(byId(path), place.width, place.height);
    drawn[path] = ["queries", "keys", "square", "values", "mixed"].map((name) => place[name]);
    if (path === "cached") paintGhost(pen, place);
    for (const name of ["queries", "keys", "square", "values", "mixed"]) {
      pen.globalAlpha = FOCUS[state.view].includes(name) ? 1 : 0.35;
      paintMatrix(pen, place[name], ranges[name]);
    }
    pen.globalAlpha = 1;
    paintSigns(pen, place);
    paintBands(pen, place, path);
    if (path === "naive") paintAgreement(pen, place);
    paintWindow(pen, place, path);
    paintWrongCell(pen, place, path);
    keepBare(path);
  }
  paintRow(both, ranges.square);
  sayFlow(ranges);
}

function paintMatrix(pen, box, [low, high]) {
  const square = box.name === "scores" || box.name === "pattern";
  const turned = box.name === "keys";
  const scale = scaleOf(box.name, low, high);
  const { step, layer, head } = state;
  if (square) paintHidden(pen, box);
  paintCells(pen, box, (row, column) => {
    if (square && hiddenWhy(box.path, step, layer, head, box.first + row, column)) return null;
    const place = turned ? column : box.first + row;
    const origin = rowOrigin(box, place);
    return shade(origin, scale(shownIn(box, row, column)));
  });
  for (const [origin, first, length] of boxRuns(box)) {
    const from = (first - box.first) * box.cell;
    if (turned) markOrigin(pen, origin, box.x + from, box.y, length * box.cell, box.height);
    else markOrigin(pen, origin, box.x, box.y + from, box.width, length * box.cell);
  }
}

// Keys and values lie in slots; the rows of all else are queries, which no cache holds.
function rowOrigin(box, place) {
  if (box.name === "keys" || box.name === "values") return originOf(box.path, state.step, place);
  return place < steps[state.step].start ? "again" : "new";
}

function boxRuns(box) {
  const places = box.name === "keys" ? box.columns : box.rows;
  if (box.name === "keys" || box.name === "values") return runsOf(box.path, state.step, 0, places);
  const again = Math.max(steps[state.step].start - box.first, 0);
  const runs = [["again", box.first, again], ["new", box.first + again, places - again]];
  return runs.filter(([, , length]) => length > 0);
}

// Behind the scores: crossed lines where the future is hidden, dots before the window.
function paintHidden(pen, box) {
  const { step, layer, head } = state;
  for (let row = 0; row < box.rows; row++) {
    let begin = 0;
    let kind = "";
    for (let column = 0; column <= box.columns; column++) {
      const why = column < box.columns && hiddenWhy(box.path, step, layer, head, box.first + row, column);
      if (why === kind) continue;
      if (kind) {
        const style = kind === "future" ? "cross" : "dots";
        const [x, y] = [box.x + begin * box.cell, box.y + row * box.cell];
        const width = (column - begin) * box.cell;
        hatch(pen, x, y, width, box.cell, style, colour("hidden"), kind === "future" ? 8 : 4, 0.9);
      }
      begin = column;
      kind = why;
    }
  }
}

// Where the naive path has rows and the cached path has none.
function paintGhost(pen, place) {
  const height = place.start * place.square.cell;
  if (!height) return;
  const ink = colour("line");
  for (const [x, columns] of [
    [place.queries.x, DIM],
    [place.left, place.square.columns],
    [place.right, DIM],
  ]) {
    frame(pen, x, place.y, columns * place.square.cell, height, ink, { dashed: true });
  }
  const middle = place.left + place.square.width / 2;
  const y = place.y + height / 2;
  const rows = plural(place.start, "row");
  const narrow = place.square.width < 170;
  const lines = narrow ? [rows, "not", "computed"] : [`${rows} not computed`, "no later step needs them"];
  if (height < 18 * lines.length || place.square.width < 66) return;
  lines.forEach((line, index) => {
    const below = 17 * (index - (lines.length - 1) / 2);
    write(pen, line, middle, y + below, { ink: "quiet", align: "center", bold: narrow || !index });
  });
}

// Names, shapes and signs.
function paintSigns(pen, place) {
  const { queries, keys, square, values, mixed } = place;
  const bottom = square.y + square.height + 12;
  const size = (box) => `${box.rows} × ${box.columns}`;
  const room = DIM * square.cell + RIGHT - 1;
  const named = (name, box, x, y, most) => {
    const long = `${name} ${size(box)}`;
    const fits = 1.08 * pen.measureText(long).width <= most; // bold is wider
    write(pen, fits ? long : name, x, y, { bold: true });
  };
  named("Q", queries, queries.x, bottom, place.left - 6);
  named("Kᵀ", keys, keys.x, keys.y - 43, keys.width);
  named(square.name, square, square.x, bottom, place.right - place.left - 6);
  named("V", values, values.x, values.y - 12, room);
  named("mixed", mixed, mixed.x, bottom, room);
  const sign = (text, x) => write(pen, text, x, place.base + MARKS / 2, { align: "center", bold: true });
  if (state.view !== "mix") sign("×", place.left - GAP / 2);
  if (state.view !== "scores") sign("×", place.right - GAP / 2);
}

// Above the keys and beside the values: how many come from where.
function paintBands(pen, place, path) {
  const { keys, values } = place;
  for (const [origin, first, length] of boxRuns(keys)) {
    const [x, y] = [keys.x + first * keys.cell, keys.y - 14];
    const width = length * keys.cell;
    pen.fillStyle = colour(origin);
    pen.fillRect(x, y, width, 8);
    if (origin === "again") hatch(pen, x, y, width, 8, "lines", colour("card"), 6, 0.8);
    const side = values.x + values.width + 6;
    const top = values.y + first * values.cell;
    pen.fillStyle = colour(origin);
    pen.fillRect(side, top, 8, length * values.cell);
    if (origin === "again") hatch(pen, side, top, 8, length * values.cell, "lines", colour("card"), 6, 0.8);
    const words = { cache: "from the cache", again: "made again", new: "new" }[origin];
    if (length > 1) write(pen, `${length} ${words}`, x, keys.y - 25, { ink: origin, bold: true, room: width + GAP });
  }
}

// Below the naive path's keys: one line where a key is equal bit for bit to the cached path's,
// two where it is but for rounding, a red block where it is wrong. So beside its rows.
function paintAgreement(pen, place) {
  const { keys, square, mixed } = place;
  const { step, layer, head } = state;
  const last = steps[step].end - 1;
  const mark = (name, token, x, y, across) => {
    const code = apartAt(step, layer, head, name, token);
    const wrong = isWrong(step, layer, head, name, token);
    const size = Math.max(keys.cell - 1, 1);
    pen.fillStyle = colour(wrong ? "wrong" : "quiet");
    const bar = (shift, thick) =>
      across ? pen.fillRect(x, y + shift, size, thick) : pen.fillRect(x + shift, y, thick, size);
    if (wrong) bar(0, 8);
    else {
      bar(1, 1.5);
      if (code) bar(4.5, 1.5);
    }
  };
  for (let token = 0; token <= last; token++) {
    mark("keys", token, keys.x + token * keys.cell, place.base + 3, true);
    const name = state.view === "mix" ? "mixed" : state.view;
    const box = name === "mixed" ? mixed : square;
    mark(name, token, box.x + box.width + 4, square.y + token * square.cell, false);
  }
}

// Where the window cuts: what lies left of the line is hidden from the newest query.
function paintWindow(pen, place, path) {
  const { keys, values, square } = place;
  const cut = columnsOf(path, state.step) - facts.windows[state.layer];
  if (cut <= 0) return;
  const x = keys.x + cut * keys.cell;
  pen.save();
  pen.strokeStyle = colour("ink");
  pen.lineWidth = 1.5;
  pen.setLineDash([5, 3]);
  pen.beginPath();
  pen.moveTo(x, keys.y - 5);
  pen.lineTo(x, place.base + 3);
  pen.moveTo(x, square.y - 5);
  pen.lineTo(x, square.y + square.height + 3);
  const y = values.y + cut * values.cell;
  pen.moveTo(values.x - 5, y);
  pen.lineTo(values.x + values.width + 5, y);
  pen.stroke();
  pen.restore();
}

function paintWrongCell(pen, place, path) {
  const { found, cell } = facts;
  const { step, layer, head } = state;
  if (!cell || found.step !== step || found.layer !== layer || cell.head !== head) return;
  const box = Object.values(place).find((each) => each.name === found.value);
  if (!box) return;
  const turned = box.name === "keys";
  const row = turned ? cell.column : cell.row - box.first;
  const column = turned ? cell.row : cell.column;
  const [x, y] = [box.x + column * box.cell, box.y + row * box.cell];
  const size = Math.max(box.cell, 5);
  frame(pen, x - 2, y - 2, size + 4, size + 4, colour("wrong"), { thick: 2.5 });
  if (path !== "cached") return;
  const text = "✗ first wrong cell";
  const width = 1.1 * pen.measureText(text).width; // bold is wider
  const from = Math.min(x + size + 6, place.width - width - 2);
  pen.fillStyle = colour("wrong-soft");
  pen.fillRect(from - 2, y - 19, width + 4, 17);
  write(pen, text, from, y - 10, { ink: "wrong", bold: true });
}

// Words

const VIEW_SAYS = {
  scores: "Scores: each query is multiplied with each key that it may see. A high score says: this token matters to me.",
  pattern: "Pattern: softmax turns each row of scores into shares that add up to 1.",
  mix: "Mix: each value is weighted with its share and all are added up. V shows what each value gives to the newest row.",
};

function sayFlow(ranges) {
  const { step, layer, head } = state;
  const { start, end, held, slots } = steps[step];
  const made = fed(steps[step]);
  const kept = Math.min(held, slots);
  const window = facts.windows[layer];
  const local = window < facts.context ? `local, window ${window}` : "global";
  byId("view-says").textContent = VIEW_SAYS[state.view];
  const caption = (path, headline, text) => {
    byId(`${path}-says`).replaceChildren(
      element("b", {}, path === "cached" ? "Cached path" : "Naive path"),
      element("span", { class: "big" }, headline),
      element("p", { class: "quiet" }, text),
    );
    byId(path).setAttribute(
      "aria-label",
      `${path} path, layer ${layer} (${local}), head ${head}, step ${step}: ${headline}. ${text} ` +
        "The arrows walk from cell to cell.",
    );
  };
  caption(
    "cached",
    kept ? `${plural(made, "row")} × ${slots} keys` : `${plural(made, "row")}: all new`,
    kept
      ? `Makes ${made > 1 ? `${made} queries, keys and values` : "1 query, 1 key and 1 value"}; ` +
        `${kept} keys and ${kept} values come from the cache.`
      : "The cache is empty: the whole prompt is computed at once, and its keys and values are kept.",
  );
  const codes = tokensApart("keys").concat(tokensApart("values"));
  const equal = codes.filter((code) => code === 0).length;
  const worst = Math.max(...codes);
  const wrong = codesWrong();
  const same = wrong
    ? `✗ ${wrong} of ${2 * end} keys and values are not what the cached path has.`
    : `All ${2 * end} keys and values equal the cached path’s` +
      (worst ? `: ${equal} bit for bit, the others within ${apartSize(worst)}.` : " bit for bit.");
  caption(
    "naive",
    `${plural(end, "row")}${start ? `: ${start} made again` : ": all new"}`,
    same,
  );
  const name = { scores: "scores", pattern: "shares", mix: "shares" }[state.view];
  const [low, high] = ranges.square;
  const moved = slotOf.some((slot, token) => token < end && slot !== token);
  byId("row-title").textContent =
    `The newest row, enlarged: ${name} of the query ${tokenName(end - 1)}, ` +
    `from ${short(low)} (faint) to ${short(high)} (strong)` +
    (moved ? "; ✗ the cached path has put tokens into other slots" : "");
  byId("row").setAttribute(
    "aria-label",
    `The newest row on both paths. ${byId("row-title").textContent}. The arrows walk from cell to cell.`,
  );
  fillRowTable();
}

function tokensApart(name) {
  const { step, layer, head } = state;
  return Array.from({ length: steps[step].end }, (_, token) => apartAt(step, layer, head, name, token));
}

function codesWrong() {
  const { step, layer, head } = state;
  let wrong = 0;
  for (const name of ["keys", "values"]) {
    for (let token = 0; token < steps[step].end; token++) wrong += isWrong(step, layer, head, name, token);
  }
  return wrong;
}

function paintLegend() {
  const cells = (origin) => (pen) => {
    [0.1, 0.45, 0.8].forEach((share, place) => {
      pen.fillStyle = css(shade(origin, share));
      pen.fillRect(1 + 8 * place, 1, 8, 14);
    });
    markOrigin(pen, origin, 1, 1, 24, 14);
  };
  const bars = (...shifts) => (pen) => {
    pen.fillStyle = colour("quiet");
    for (const shift of shifts) pen.fillRect(3, shift, 20, 1.5);
  };
  const edge = (pen) => {
    pen.setLineDash([5, 3]);
    pen.strokeStyle = colour("ink");
    pen.strokeRect(13, 0, 0, 16);
  };
  const hidden = (kind, gap) => (pen) => hatch(pen, 1, 1, 24, 14, kind, colour("hidden"), gap, 0.9);
  fillLegend(byId("legend"), [
    [cells("new"), "new: made for the first time"],
    [cells("cache"), "from the cache"],
    [cells("again"), "made again"],
    [hidden("cross", 8), "hidden: later than the query"],
    [hidden("dots", 4), "hidden: before the window"],
    [edge, "edge of the window"],
    [bars(7), "both paths equal bit for bit"],
    [bars(5, 9), "equal but for rounding"],
    [(pen) => { pen.fillStyle = colour("wrong"); pen.fillRect(3, 3, 20, 10); write(pen, "✗", 13, 8, { ink: "card", align: "center" }); }, "different"],
  ]);
}

painters.push(paintFlow, paintLegend);
